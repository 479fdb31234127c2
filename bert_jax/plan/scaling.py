"""The same work on each chip of ever larger slices: what larger pods lose."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bert_jax.config import Experiment
from bert_jax.errors import InputError
from bert_jax.plan import document, estimate
from bert_jax.plan.compile import Job, Outcome, compile_all
from bert_jax.plan.topology import Topology

# Of the collectives whose arithmetic is shown.
_SHOWN = 3


def scaling(
    experiment: Experiment, topologies: Sequence[Topology], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Compiles each phase for each slice with as many rows a chip as on the first one.

    Args:
      experiment: its batches are those of the first slice.
      topologies: slices of one generation, the smallest first.
      say: is told what is begun.

    Returns:
      For each phase its `rows_per_chip` and, for each slice, what `document.phase_entry` gives,
      `efficiency`, the first slice's step over this one's, and `arithmetic`, lines.

    Raises:
      InputError: libtpu is not installed, slices of several generations, or a batch that the first
        slice does not divide.
    """
    first = topologies[0]
    if any(topology.tpu is not first.tpu for topology in topologies):
        raise InputError("--scaling: name slices of one generation of TPU, the smallest first")
    grown = [_grown(experiment, topology.chips / first.chips) for topology in topologies]
    numbers = range(len(experiment.phases))
    jobs = [
        Job(larger, number, topology)
        for number in numbers
        for larger, topology in zip(grown, topologies, strict=True)
    ]
    outcomes = iter(compile_all(jobs, say, "return"))
    found = []
    for number in numbers:
        slices = [
            _entry(larger, number, topology, next(outcomes))
            for larger, topology in zip(grown, topologies, strict=True)
        ]
        base = slices[0].get("seconds")
        for entry in slices:
            if base and "seconds" in entry:
                entry["efficiency"] = base["total"] / entry["seconds"]["total"]
        rows = experiment.phases[number].batch_size / first.chips
        found.append({"phase": number, "rows_per_chip": rows, "slices": slices})
    return found


def _grown(experiment: Experiment, factor: float) -> Experiment:
    """As many rows a chip, and as many rows in all: larger batches, fewer steps."""
    phases = tuple(
        dataclasses.replace(
            phase,
            batch_size=round(phase.batch_size * factor),
            steps=max(round(phase.steps / factor), 1),
        )
        for phase in experiment.phases
    )
    steps = sum(phase.steps for phase in phases)
    warmup = min(experiment.optimizer.warmup_steps, steps - 1)  # of no weight in a step's time
    optimizer = dataclasses.replace(experiment.optimizer, warmup_steps=warmup)
    return dataclasses.replace(experiment, phases=phases, optimizer=optimizer)


def _entry(
    experiment: Experiment, number: int, topology: Topology, outcome: Outcome
) -> dict[str, Any]:
    entry = document.phase_entry(experiment, number, topology, outcome)
    entry |= {"topology": topology.name, "chips": topology.chips, "efficiency": None}
    return entry | {"arithmetic": list(_arithmetic(topology, outcome))}


def _arithmetic(topology: Topology, outcome: Outcome) -> Iterator[str]:
    """The collectives that take longest, as they were computed."""
    if outcome.program is None:
        return
    timed = []
    for one in outcome.program.collectives:
        transfer, latency = estimate.collective_seconds(one, topology, outcome.places)
        timed.append((one.count * (transfer + latency), one))
    timed.sort(key=lambda pair: -pair[0])
    for seconds, one in timed[:_SHOWN]:
        way = estimate.route(one.group, topology, outcome.places)
        twice = "2 x " if one.kind == "all-reduce" else ""
        covered = "" if one.cover is None else ", less what other work covers"
        yield (
            f"{one.count} {one.kind} of {one.payload / 1e6:.2f} MB over {way.size}: "
            f"{one.count} x {twice}({way.size - 1}/{way.size} x {one.payload / 1e6:.2f} MB / "
            f"{way.bandwidth / 1e9:g} GB/s + {way.hops} us){covered} = {1e3 * seconds:.2f} ms"
        )


def lines(found: list[dict[str, Any]]) -> Iterator[str]:
    """A table for each phase, and its arithmetic."""
    for phase in found:
        yield ""
        yield (
            f"scaling, phase {phase['phase']}, {phase['rows_per_chip']:g} rows of "
            f"{phase['slices'][0]['sequence_length']} a chip (ms a step)"
        )
        yield (
            f"  {'slice':<12}{'chips':>6}{'batch':>8}{'step':>9}{'compute':>9}{'links':>8}"
            f"{'latency':>9}{'efficiency':>12}"
        )
        for entry in phase["slices"]:
            head = f"  {entry['topology']:<12}{entry['chips']:>6,}{entry['batch_size']:>8,}"
            if entry["outcome"] != "compiled":
                yield f"{head}  {entry['outcome']}: {entry['message']}"
                continue
            s = entry["seconds"]
            yield (
                f"{head}{1e3 * s['total']:>9.1f}{1e3 * s['compute']:>9.1f}"
                f"{1e3 * s['collectives']:>8.1f}{1e3 * s['latency']:>9.1f}"
                f"{entry['efficiency'] or 0:>12.3f}"
            )
        for entry in phase["slices"]:
            for line in entry["arithmetic"]:
                yield f"  {entry['topology']}: {line}"
