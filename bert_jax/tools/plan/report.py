"""`bert-jax plan`: makes a plan as JSON (outcomes, memory, times, costs), and formats its lines."""

import collections
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from bert_jax import config
from bert_jax.config import Experiment
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.model import flops
from bert_jax.tools.plan import compile as compile_lib
from bert_jax.tools.plan import estimate
from bert_jax.tools.plan.compile import CompileJob, Outcome
from bert_jax.tools.plan.schedule import SEND, Program
from bert_jax.tools.plan.topology import Layout, Topology, layout_of, shards_of, with_layout
from bert_jax.training.collectives import method_of

FORMAT_VERSION = 3

# Values of parallelism.state and parallelism.remat, from most to least memory of a device.
STATES = ("replicated", "zero1", "zero3")
REMATS = ("none", "dots", "full")
# Number of layouts shown after a search.
SHOWN_LAYOUTS = 3
# Tokens of a good micro-batch: fewer leave the matrix units partly idle; with more, the data of a
# layer do not stay in a chip's fast memory.
_GOOD_TOKENS = 2048
_GIB = 2**30

_log_progress = functools.partial(print, file=sys.stderr, flush=True)

Entry = dict[str, Any]  # an object of the plan's JSON


def make_plan(
    experiment: Experiment,
    topologies: Sequence[Topology],
    mode: Literal["plan", "search"],
    price_per_chip_hour: float | None,
) -> Entry:
    """Compiles every phase for every slice, and changed layouts for phases that do not fit.

    In the mode `search`, compiles and ranks layouts for each slice instead.
    """
    numbers = range(len(experiment.phases))
    jobs = [
        CompileJob(experiment, number, topology) for topology in topologies for number in numbers
    ]
    outcomes = iter(compile_lib.compile_all(jobs, _log_progress))
    slices = []
    for topology in topologies:
        phase_outcomes = [next(outcomes) for _ in numbers]
        entry = _slice_entry(experiment, topology, phase_outcomes, price_per_chip_hour)
        if mode == "search":
            entry["search"] = _search(experiment, topology)
        else:
            for phase in entry["phases"]:
                if phase["outcome"] == "too large":
                    phase["remedies"] = _remedies(experiment, phase["phase"], topology)
        slices.append(entry)
    return {
        "format_version": FORMAT_VERSION,
        "experiment": experiment.name,
        "config_sha256": config_sha256(experiment),
        "versions": compile_lib.versions(),
        "assumptions": estimate.ASSUMPTIONS,
        "price_per_chip_hour": price_per_chip_hour,
        "slices": slices,
    }


# --- other layouts ---


def _compile_layouts(
    experiment: Experiment, number: int, topology: Topology, layouts: Iterable[Layout]
) -> list[tuple[Layout, Entry]]:
    """Compiles a phase in each layout that the experiment allows; returns the phase's entries."""
    jobs = {}
    for layout in dict.fromkeys(layouts):
        try:
            jobs[layout] = CompileJob(with_layout(experiment, number, layout), number, topology)
        except InputError:  # optimizer.clip=per_replica does not allow zero3
            continue
    outcomes = compile_lib.compile_all(list(jobs.values()), _log_progress, refusals="return")
    return [
        (layout, phase_entry(job.experiment, number, topology, outcome))
        for (layout, job), outcome in zip(jobs.items(), outcomes, strict=True)
    ]


def _search(experiment: Experiment, topology: Topology) -> Entry:
    """Ranks combinations of parallelism.state and parallelism.remat by the hours of all phases.

    Each phase is compiled with the experiment's micro-batches, and with micro-batches nearest to
    2,048 tokens on a device; the faster one counts.

    Returns:
      `ranked`: settings, hours and peak bytes of a device, best first; `compiled`: number of
      compiled layouts of single phases; `unfit`: number of these that do not compile.
    """
    combinations = list(itertools.product(STATES, REMATS))
    outcomes, by_phase = [], []
    for number, phase in enumerate(experiment.phases):
        rows = max(phase.batch_size // shards_of(experiment, topology), 1)
        divisors = [2**n for n in range(rows.bit_length()) if rows % 2**n == 0]
        ideal = rows * phase.sequence_length / _GOOD_TOKENS
        good = min(divisors, key=lambda count, ideal=ideal: abs(math.log(count / ideal)))
        current = experiment.parallelism.accumulation_of(number)
        layouts = [Layout(*pair, count) for pair in combinations for count in (current, good)]
        layouts.append(Layout(*combinations[-1], divisors[-1]))  # the least memory
        fastest = {}
        for layout, entry in _compile_layouts(experiment, number, topology, layouts):
            outcomes.append(entry["outcome"])
            if entry["outcome"] == "compiled":
                result = entry["hours"], layout.accumulation, entry["memory"]["peak"]
                fastest[layout[:2]] = min(result, fastest.get(layout[:2], result))
        by_phase.append(fastest)
    ranked = []
    for pair in combinations:
        if all(pair in fastest for fastest in by_phase):
            hours, counts, peaks = zip(*(fastest[pair] for fastest in by_phase), strict=True)
            values = zip(Layout._fields, (*pair, ",".join(map(str, counts))), strict=True)
            settings = [f"parallelism.{name}={value}" for name, value in values]
            ranked.append({"settings": settings, "hours": sum(hours), "peak": max(peaks)})
    return {
        "compiled": len(outcomes),
        "unfit": len(outcomes) - outcomes.count("compiled"),
        "ranked": sorted(ranked, key=lambda entry: entry["hours"])[:SHOWN_LAYOUTS],
    }


def _remedies(experiment: Experiment, number: int, topology: Topology) -> list[str]:
    """Compiles a phase with each single change that saves memory; if none fits, with all of them.

    Returns:
      A line for each layout that fits, or a line that none does.
    """
    current = layout_of(experiment, number)
    rows = max(experiment.phases[number].batch_size // shards_of(experiment, topology), 1)
    doubled = (current.accumulation << n for n in range(1, rows.bit_length()))
    smaller = [
        *(current._replace(remat=remat) for remat in REMATS[REMATS.index(current.remat) + 1 :]),
        *(current._replace(state=state) for state in STATES[STATES.index(current.state) + 1 :]),
        *(current._replace(accumulation=count) for count in doubled if rows % count == 0),
    ]
    for layouts in (smaller, [Layout(STATES[-1], REMATS[-1], rows)]):
        entries = _compile_layouts(experiment, number, topology, layouts)
        fitting = [(layout, entry) for layout, entry in entries if entry["outcome"] == "compiled"]
        if fitting:
            return [
                f"fits with {_changed_settings(experiment, number, layout)}: "
                f"{entry['memory']['peak'] / _GIB:.2f} GiB"
                for layout, entry in fitting
            ]
    return ["no remat, accumulation or sharding of the state makes it fit: take more chips"]


def _changed_settings(experiment: Experiment, number: int, layout: Layout) -> str:
    """Returns the settings that a layout changes, in the form of `--set`."""
    # The micro-batches of every phase are listed, since a single number would apply to all.
    counts = with_layout(experiment, number, layout).parallelism.accumulation
    values = layout._asdict() | {"accumulation": ",".join(map(str, counts))}
    return ", ".join(
        f"parallelism.{name}={values[name]}"
        for name, current in layout_of(experiment, number)._asdict().items()
        if current != getattr(layout, name)
    )


# --- as JSON ---


def config_sha256(experiment: Experiment) -> str:
    """Returns a hash of the experiment without its section `run`."""
    fields = json.loads(config.to_json(experiment))
    del fields["run"]
    return hashlib.sha256(json.dumps(fields).encode()).hexdigest()


def _slice_entry(
    experiment: Experiment,
    topology: Topology,
    outcomes: Sequence[Outcome],
    price_per_chip_hour: float | None,
) -> Entry:
    exchange = method_of(topology.tpu.kind, topology.slices)  # of parameters and gradients
    phases = [phase_entry(experiment, n, topology, outcome) for n, outcome in enumerate(outcomes)]
    hours = [entry["hours"] for entry in phases]
    total = None if None in hours else sum(hours)
    chip_hours = None if total is None else total * topology.chips
    is_priced = chip_hours is not None and price_per_chip_hour is not None
    return {
        "topology": topology.name,
        "device_kind": topology.tpu.kind,
        "chips": topology.chips,
        "devices": topology.devices,
        "device_memory": topology.device_memory,
        "exchange": {**exchange._asdict(), "compiler_options": dict(exchange.compiler_options)},
        "phases": phases,
        "hours": total,
        "chip_hours": chip_hours,
        "cost": chip_hours * price_per_chip_hour if is_priced else None,
    }


def phase_entry(experiment: Experiment, number: int, topology: Topology, outcome: Outcome) -> Entry:
    """Returns the entry of one phase on one slice: `hours`, seconds and bytes of a device.

    If it was not compiled, only its layout and outcome are known.
    """
    phase = experiment.phases[number]
    entry: Entry = {
        "phase": number,
        "sequence_length": phase.sequence_length,
        "batch_size": phase.batch_size,
        "rows_per_device": phase.batch_size / shards_of(experiment, topology),
        "steps": phase.steps,
        "layout": layout_of(experiment, number)._asdict(),
        "outcome": outcome.kind,
        "message": outcome.message,
        "wanted": outcome.wanted,
        "available": outcome.available,
        "memory": outcome.memory,
        "hours": None,
    }
    if outcome.program is None:
        return entry
    program = outcome.program
    step_time = estimate.estimate(program, topology, outcome.places)
    # A second estimate with the highest published rate of links, which practice does not reach.
    published_rate = topology.tpu.published_link_bandwidth
    tpu = dataclasses.replace(topology.tpu, link_bandwidth=published_rate)
    published = dataclasses.replace(topology, tpu=tpu)
    at_published = estimate.estimate(program, published, outcome.places)
    waits: dict[str, float] = collections.defaultdict(float)  # by kind
    for wait, collective in zip(step_time.waits, program.collectives, strict=True):
        waits[collective.kind] += wait
    model_flops = flops.phase_step_flops(experiment.model, phase)
    peak = topology.peak_flops(experiment.model.compute_dtype)
    return entry | {
        "hours": phase.steps * step_time.total / 3600,
        "seconds": step_time.terms | {"total": step_time.total},
        "links": {
            "bandwidth": topology.tpu.link_bandwidth,
            "published_bandwidth": published_rate,
            "published_total": at_published.total,
            "busy": {
                "within chips" if axis == estimate.WITHIN_CHIPS else f"axis {axis}": busy
                for axis, busy in step_time.busy.items()
            },
            "waits": waits,
        },
        "network": estimate.network_traffic(program, topology),
        "work": program.sums | {"unscheduled": program.unscheduled},
        "clock_hz": topology.tpu.clock_hz,
        "memory_bandwidth": topology.device_bandwidth,
        "kernels": [dataclasses.asdict(kernel) for kernel in program.kernels],
        "model_flops": model_flops,
        "peak_flops": peak,
        "utilisation": model_flops / (step_time.total * peak),
        # Positions of rows, which are tokens if none is padding.
        "places_per_second": phase.batch_size * phase.sequence_length / step_time.total,
        "collectives": _collectives_by_kind(program),
        "operations": program.operations,
        "checks": {  # docs/reference/plan-output.md explains what they show
            "whole_batch": None if outcome.whole_batch is None else list(outcome.whole_batch),
            "largest_all_reduce": max(
                (c.payload for c in program.collectives if c.kind == "all-reduce"), default=0
            ),
            "in_loops": sum(c.count for c in program.collectives if c.where == "loop"),
            "endless_loops": program.endless,  # whose number of iterations is unknown
        },
    }


def _collectives_by_kind(program: Program) -> list[Entry]:
    """Returns for each kind the number per step, bytes of whole arrays, and asynchronous share."""
    entries = []
    for kind in dict.fromkeys(c.kind for c in program.collectives):
        same_kind = [c for c in program.collectives if c.kind == kind]
        size = sum(c.count * c.payload for c in same_kind)
        asynchronous = sum(c.count * c.payload for c in same_kind if c.asynchronous)
        share = asynchronous / size if size else 0.0
        count = sum(c.count for c in same_kind)
        entries.append({"kind": kind, "count": count, "bytes": size, "asynchronous_share": share})
    return entries


# --- as lines ---


def lines(plan: Entry) -> Iterator[str]:
    """Yields the lines of a plan for a terminal."""
    versions = ", ".join(f"{name} {version}" for name, version in plan["versions"].items())
    yield f"{printable(plan['experiment'])}, compiled by {versions}; nothing was run on a TPU"
    for entry in plan["slices"]:
        yield ""
        yield from _slice_lines(entry)


def _slice_lines(entry: Entry) -> Iterator[str]:
    chips, devices = entry["chips"], entry["devices"]
    yield (
        f"{entry['topology']}: {pluralize(chips, 'chip')}, {pluralize(devices, 'device')} "
        f"({entry['device_kind']})"
    )
    for name, value in entry["exchange"]["compiler_options"].items():
        yield f"  compiler option: {name}={value}"
    for phase in entry["phases"]:
        yield (
            f"  phase {phase['phase']}: {phase['batch_size']} rows of {phase['sequence_length']}, "
            f"{phase['rows_per_device']:g} a device; {Layout(**phase['layout'])}"
        )
        yield from _phase_lines(phase, entry)
    if entry["hours"] is None:
        yield "  recipe: unknown, since not every phase compiles"
    else:
        cost = "" if entry["cost"] is None else f", cost {entry['cost']:,.0f}"
        yield f"  recipe: {entry['hours']:,.1f} hours, {entry['chip_hours']:,.0f} chip-hours{cost}"
    if search := entry.get("search"):
        yield (
            f"  search: {search['unfit']} of {search['compiled']} layouts of single phases do not "
            f"compile; the best layouts for all phases:{'' if search['ranked'] else ' none'}"
        )
        for ranked in search["ranked"]:
            settings = " ".join(f"--set {setting}" for setting in ranked["settings"])
            yield f"    {ranked['hours']:8,.1f} hours, {ranked['peak'] / _GIB:.2f} GiB: {settings}"


def _phase_lines(phase: Entry, slice_entry: Entry) -> Iterator[str]:
    if phase["outcome"] != "compiled":
        if phase["outcome"] != "too large":
            yield f"    {phase['outcome']}: {printable(phase['message'])}"
        elif phase["wanted"] is None:
            yield f"    does not fit: {printable(phase['message'])}"
        else:
            wanted, available = phase["wanted"] / _GIB, phase["available"] / _GIB
            yield (
                f"    does not fit: needs {wanted:.2f} GiB, {wanted - available:.2f} more than the "
                f"{available:.2f} that a program may use of a device's "
                f"{slice_entry['device_memory'] / _GIB:g} GiB"
            )
        for remedy in phase.get("remedies", []):
            yield f"    {remedy}"
        return
    gib = {key: value / _GIB for key, value in phase["memory"].items()}
    devices_per_chip = slice_entry["devices"] // slice_entry["chips"]
    chip = f", {devices_per_chip * gib['peak']:.2f} GiB a chip" if devices_per_chip > 1 else ""
    yield (
        f"    fits: at most {gib['peak']:.2f} of {slice_entry['device_memory'] / _GIB:g} GiB a "
        f"device{chip}: state and batch {gib['arguments']:.2f}, "
        f"temporaries {gib['temporaries']:.2f}, code {gib['code']:.2f}"
    )
    yield from _time_lines(phase)
    for summary in phase["collectives"]:
        yield (
            f"    {summary['kind']}: {summary['count']} a step, {summary['bytes'] / 1e6:,.1f} MB, "
            f"{100 * summary['asynchronous_share']:.0f} % of it during other work"
        )
    yield from _check_lines(phase["checks"])


def _time_lines(phase: Entry) -> Iterator[str]:
    seconds, kernels, network = phase["seconds"], phase["kernels"], phase["network"]
    yield (
        f"    step: {1e3 * seconds['total']:.1f} ms, {phase['hours']:,.1f} hours for "
        f"{phase['steps']:,}; utilisation {100 * phase['utilisation']:.1f} % "
        f"({phase['model_flops'] / 1e12:.2f} TFLOP at {phase['peak_flops'] / 1e12:,.0f} a second)"
    )
    yield (
        f"    tokens: {phase['places_per_second'] / 1e6:,.2f} million a second without padding; "
        "padding lowers tokens and utilisation by its share"
    )
    links = phase["links"]
    kinds = {kind: wait for kind, wait in links["waits"].items() if kind != SEND}  # see `network`
    waits = ", ".join(f"{kind} {1e3 * wait:.2f}" for kind, wait in kinds.items())
    work, bandwidth = phase["work"], phase["memory_bandwidth"] / 1e9
    reasons = {
        "products": f"{work['products']:,} cycles at {phase['clock_hz'] / 1e9:g} GHz, estimated or "
        f"scheduled, whichever is more; {work['unscheduled']:,} of them have no schedule",
        "copies": f"{work['copied'] / 1e6:,.1f} MB at {bandwidth:g} GB/s, and 1 us to begin each",
        "other": f"{work['other']:,} cycles, as the compiler estimates them",
        "kernels": f"{len(kernels)} custom kernels, as the compiler schedules them",
        "random_bits": f"{work['drawn'] / 1e6:,.1f} MB, drawn by the hardware",
        "prefetch": f"waits for {work['fetched'] / 1e6:,.1f} MB that other work does not hide",
        "issue": "a quarter of a microsecond for each permutation, assumed",
        "collectives": f"waits that other work does not hide (with latency: {waits or 'none'})",
        "latency": "a microsecond a hop, assumed",
        "network": f"waits for sums over slices: {network['bytes'] / 1e6:,.1f} MB a chip, which "
        f"take {1e3 * network['busy']:.2f} ms",
    }
    for name, reason in reasons.items():
        if seconds[name] or name in ("products", "collectives"):
            yield f"      {name.replace('_', ' '):<12}{1e3 * seconds[name]:8.2f} ms  {reason}"
    unknown = (kernel for kernel in kernels if kernel["cycles"] is None)
    if names := ", ".join(f"{kernel['count']} x {kernel['name']}" for kernel in unknown):
        yield f"      kernels of unknown cycles, estimated by their bytes alone: {names}"
    busy = ", ".join(f"{axis} {1e3 * time:.2f} ms" for axis, time in links["busy"].items())
    if busy:
        yield (
            f"      links busy: {busy}, at {links['bandwidth'] / 1e9:g} GB/s each; at "
            f"{links['published_bandwidth'] / 1e9:g}, the highest published rate, the step takes "
            f"{1e3 * links['published_total']:.1f} ms"
        )


def _check_lines(checks: Entry) -> Iterator[str]:
    whole = checks["whole_batch"]
    if whole is None:
        yield "    check: arrays of the whole batch cannot be recognised by their size"
    elif whole:
        yield f"    check: BROKEN, a device holds the whole batch: {', '.join(whole)}"
    else:
        yield "    check: no array of the whole batch on a device"
    yield f"    check: the largest all-reduce is {checks['largest_all_reduce'] / 1e6:.1f} MB"
    yield f"    check: {checks['in_loops']} collectives a step run inside loops"
    if checks["endless_loops"]:
        yield (
            f"    check: {checks['endless_loops']} loops of unknown length, counted once: the step "
            "takes longer than estimated"
        )
