"""Compiles variants of a plan: other layouts, which may fit or be faster, and larger slices."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from bert_jax.config import Experiment
from bert_jax.errors import InputError
from bert_jax.plan import estimate
from bert_jax.plan.compile import Job, Outcome, compile_all
from bert_jax.plan.topology import Layout, Topology, layout_of, shards_of, with_layout

# From what keeps most on a device to what keeps least.
STATES = ("replicated", "zero1", "zero3")
REMATS = ("none", "dots", "full")

# Of those that were compiled, how many are shown.
BEST = 3
# With fewer positions at once the matrix units are half empty; with so many, what a layer works on
# stays in a chip's fast memory.
_GOOD_TOKENS = 2048
_GIB = 2**30


def search(
    experiment: Experiment, topology: Topology, log: Callable[[str], None]
) -> dict[str, Any]:
    """Ranks ways to hold the state and the backward pass on a slice.

    Each phase is compiled with the experiment's micro-batches, and with those nearest to 2,048
    positions on a device; the faster counts.

    Returns:
      `ranked`, a list of settings, hours and peak bytes of a device, the best first. Of the layouts
      of single phases, how many were `compiled`, and of these `unfit`.
    """
    phases, ways = range(len(experiment.phases)), list(itertools.product(STATES, REMATS))
    outcomes = []
    for number in phases:
        own, good, most = _micro_batches(experiment, topology, number)
        layouts = [Layout(*way, count) for way in ways for count in (own, good)]
        layouts.append(Layout(*ways[-1], most))  # what keeps least
        outcomes.append(compile_layouts(experiment, number, topology, layouts, log))
    ranked = []
    for state, remat in ways:
        best = [
            min(
                (_hours(experiment, number, topology, outcome), layout, outcome.memory.get("peak"))
                for layout, outcome in outcomes[number].items()
                if (layout.state, layout.remat) == (state, remat)
            )
            for number in phases
        ]
        hours, layouts, peaks = zip(*best, strict=True)
        if sum(hours) < math.inf:
            accumulation = ",".join(str(layout.accumulation) for layout in layouts)
            settings = {"state": state, "remat": remat, "accumulation": accumulation}
            ranked.append(
                {
                    "settings": [f"parallelism.{name}={word}" for name, word in settings.items()],
                    "hours": sum(hours),
                    "peak": max(peaks),
                }
            )
    tried = [outcome for of_phase in outcomes for outcome in of_phase.values()]
    return {
        "compiled": len(tried),
        "unfit": sum(outcome.program is None for outcome in tried),
        "ranked": sorted(ranked, key=lambda one: one["hours"])[:BEST],
    }


def _micro_batches(experiment: Experiment, topology: Topology, number: int) -> tuple[int, ...]:
    """Returns the experiment's own number; of powers of two that nearest to good, and the most."""
    phase = experiment.phases[number]
    rows = max(phase.batch_size // shards_of(experiment, topology), 1)
    powers = [2**n for n in range(rows.bit_length()) if rows % 2**n == 0]
    wanted = rows * phase.sequence_length / _GOOD_TOKENS
    good = min(powers, key=lambda count: abs(math.log(count / wanted)))
    return experiment.parallelism.accumulation_of(number), good, powers[-1]


def _hours(experiment: Experiment, number: int, topology: Topology, outcome: Outcome) -> float:
    """Returns the hours of a phase; infinite where it does not compile."""
    if outcome.program is None:
        return math.inf
    seconds = estimate.estimate(outcome.program, topology, outcome.places).total
    return seconds * experiment.phases[number].steps / 3600


# --- what makes a step fit that does not ---


def remedies(
    experiment: Experiment, phase: int, topology: Topology, log: Callable[[str], None]
) -> list[str]:
    """Compiles a phase with one setting changed, for each that saves memory; then with all.

    Returns:
      A line for each that fits, or one that says that none does.
    """
    now = layout_of(experiment, phase)
    rows = experiment.phases[phase].batch_size // shards_of(experiment, topology)
    least = Layout(STATES[-1], REMATS[-1], max(rows, 1))
    for layouts in (_smaller(now, rows), [least]):
        outcomes = compile_layouts(experiment, phase, topology, layouts, log)
        lines = [
            f"fits with {_changed(experiment, phase, layout)}: "
            f"{outcome.memory['peak'] / _GIB:.2f} GiB"
            for layout, outcome in outcomes.items()
            if outcome.kind == "compiled"
        ]
        if lines:
            return lines
    return ["no remat, accumulation or sharding of the state makes it fit: take more chips"]


def _smaller(now: Layout, rows: int) -> Iterator[Layout]:
    """Yields layouts that differ in one setting and keep less on a device."""
    yield from (now._replace(remat=word) for word in REMATS[REMATS.index(now.remat) + 1 :])
    yield from (now._replace(state=word) for word in STATES[STATES.index(now.state) + 1 :])
    count = 2 * now.accumulation
    while count <= rows and rows % count == 0:
        yield now._replace(accumulation=count)
        count *= 2


def _changed(experiment: Experiment, phase: int, layout: Layout) -> str:
    """Returns the settings that a layout changes, as `--set` takes them."""
    now = layout_of(experiment, phase)._asdict()
    # Micro-batches of every phase: one number would be for all of them.
    parts = with_layout(experiment, phase, layout).parallelism.accumulation
    words = layout._asdict() | {"accumulation": ",".join(map(str, parts))}
    return ", ".join(
        f"parallelism.{name}={words[name]}"
        for name, value in layout._asdict().items()
        if value != now[name]
    )


def compile_layouts(
    experiment: Experiment,
    phase: int,
    topology: Topology,
    layouts: Iterable[Layout],
    log: Callable[[str], None],
) -> dict[Layout, Outcome]:
    """Compiles a phase in several layouts; one that the experiment forbids is "refused"."""
    outcomes, jobs = {}, {}
    for layout in layouts:
        try:
            jobs[layout] = Job(with_layout(experiment, phase, layout), phase, topology)
        except InputError as error:
            outcomes[layout] = Outcome(kind="refused", message=str(error))
    compiled = compile_all(list(jobs.values()), log, "return")
    return outcomes | dict(zip(jobs, compiled, strict=True))


# --- scaling ---


def scale(
    experiment: Experiment, topologies: Sequence[Topology], log: Callable[[str], None]
) -> list[list[tuple[Job, Outcome]]]:
    """Compiles each phase for each slice with as many rows a chip as on the first one.

    The first slice is the smallest, and its batches are the experiment's.

    Returns:
      For each phase what was compiled for each slice, and what came of it.
    """
    first = topologies[0]
    if any(topology.tpu is not first.tpu for topology in topologies):
        raise InputError("--scaling: name slices of one generation of TPU, the smallest first")
    grown = [_grown(experiment, topology.chips / first.chips) for topology in topologies]
    jobs = [
        Job(larger, number, topology)
        for number in range(len(experiment.phases))
        for larger, topology in zip(grown, topologies, strict=True)
    ]
    compiled = list(zip(jobs, compile_all(jobs, log, "return"), strict=True))
    width = len(topologies)
    return [compiled[start : start + width] for start in range(0, len(compiled), width)]


def _grown(experiment: Experiment, factor: float) -> Experiment:
    """Returns it with `factor` as many rows a step, and as many rows in all: fewer steps."""
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
