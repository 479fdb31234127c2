"""Compiles other layouts of an experiment: which is fastest on a slice, and which fits at all.

`search` climbs: a short ladder of layouts that usually win, then the neighbours, one setting away,
of the best that are known, until these have no untried neighbours or `MOST` were tried. What cannot
fit by arithmetic is left out. The compiler refuses a step that is far too large within seconds, and
takes about as long for few layers in a loop as for all (67 s and 68 s, 4 and 24 of LARGE).
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from bert_jax.config import Experiment, Model
from bert_jax.errors import InputError
from bert_jax.plan import estimate
from bert_jax.plan.compile import Job, Outcome, compile_all
from bert_jax.plan.topology import Layout, Topology, layout_of, shards_of, with_layout

# From what keeps most on a device to what keeps least.
STATES = ("replicated", "zero1", "zero3")
REMATS = ("none", "dots", "full")

# Candidates tried at most: of two phases forty compilations, of a minute each if they fit, by twos.
MOST = 20
# Candidates that are shown, and have all their neighbours tried.
BEST = 3
# Candidates compiled side by side.
_AT_ONCE = 2
# State and remat of the first candidates, the likeliest to be fastest first.
_LADDER = (
    *(("zero3", "dots"), ("zero3", "none"), ("zero1", "none")),
    *(("replicated", "none"), ("zero3", "full")),
)
# Fewer positions at once leave the matrix units half empty; with so many, what a layer works on
# stays in a chip's fast memory.
_LEAST_TOKENS = 512
_GOOD_TOKENS = 2048

_WIDTHS = {"float32": 4, "bfloat16": 2}
_STATE_BYTES = 12  # a parameter and its two moments
_GIB = 2**30


class Candidate(NamedTuple):
    """A layout of all phases: what holds the state and the backward pass is one for them all."""

    state: str
    remat: str
    accumulation: tuple[int, ...]

    def layout(self, phase: int) -> Layout:
        """Returns the layout of this phase."""
        return Layout(self.state, self.remat, self.accumulation[phase])

    def settings(self) -> list[str]:
        """Returns the layout as strings that `--set` takes."""
        return [
            f"parallelism.state={self.state}",
            f"parallelism.remat={self.remat}",
            f"parallelism.accumulation={','.join(map(str, self.accumulation))}",
        ]


def search(
    experiment: Experiment, topology: Topology, log: Callable[[str], None]
) -> dict[str, Any]:
    """Ranks layouts of the experiment on a slice.

    Args:
      experiment: what is planned; its own layout is tried first.
      topology: where.
      log: gets a line when a compilation begins.

    Returns:
      `ranked`, a list of settings, hours and peak bytes of a device, the best first. Of the layouts
      of single phases, how many were `possible`, `excluded` by arithmetic, `compiled`, and of these
      `unfit`, refused by the compiler. `cut_short`, whether more were worth trying.
    """
    numbers = range(len(experiment.phases))
    parts = [_micro_batches(experiment, topology, number) for number in numbers]
    outcomes: dict[tuple[int, Layout], Outcome] = {}
    hours: dict[Candidate, float] = {}  # of those tried; infinite if one does not fit

    def untried(candidates: Iterable[Candidate]) -> list[Candidate]:
        return [
            candidate
            for candidate in dict.fromkeys(candidates)
            if candidate not in hours and _may_fit(experiment, topology, candidate)
        ]

    def ranked() -> list[Candidate]:
        return sorted((one for one in hours if hours[one] < math.inf), key=hours.__getitem__)

    def worth_trying() -> list[Candidate]:
        choices = [_ladder(experiment, topology, parts)]
        choices += [_neighbours(candidate, parts) for candidate in ranked()[:BEST]]
        return next(filter(None, map(untried, choices)), [])

    while (chosen := worth_trying()[:_AT_ONCE]) and len(hours) < MOST:
        shown = ranked()[:BEST]
        limit = hours[shown[-1]] if len(shown) == BEST else math.inf
        hours |= _try(experiment, topology, chosen, outcomes, limit, log)
    every = [
        (number, Layout(state, remat, accumulation))
        for number in numbers
        for state, remat, accumulation in itertools.product(STATES, REMATS, parts[number])
    ]
    return {
        "possible": len(every),
        "excluded": sum(not _phase_may_fit(experiment, topology, *one) for one in every),
        "compiled": len(outcomes),
        "unfit": sum(outcome.program is None for outcome in outcomes.values()),
        "cut_short": bool(chosen),
        "ranked": [
            {
                "settings": one.settings(),
                "hours": hours[one],
                "peak": max(outcomes[n, one.layout(n)].memory["peak"] for n in numbers),
            }
            for one in ranked()[:BEST]
        ],
    }


def _try(
    experiment: Experiment,
    topology: Topology,
    candidates: Sequence[Candidate],
    outcomes: dict[tuple[int, Layout], Outcome],
    limit: float,
    log: Callable[[str], None],
) -> dict[Candidate, float]:
    """Compiles candidates side by side; returns the hours of each, infinite if it was given up.

    One is given up once a phase does not fit or the limit is reached. The phase with most positions
    on a device goes first: what does not fit is refused there, soon.

    Args:
      experiment: what is planned.
      topology: where.
      candidates: what to compile.
      outcomes: of phases that were compiled; gets more.
      limit: hours that are too many to be shown.
      log: gets a line when a compilation begins.
    """
    hours = dict.fromkeys(candidates, 0.0)
    phases = range(len(experiment.phases))
    for number in sorted(phases, key=lambda n: -_tokens(experiment, topology, n, 1)):
        left = [candidate for candidate in candidates if hours[candidate] < limit]
        layouts = dict.fromkeys(candidate.layout(number) for candidate in left)
        wanted = [layout for layout in layouts if (number, layout) not in outcomes]
        compiled = compile_layouts(experiment, number, topology, wanted, log)
        outcomes |= {(number, layout): outcome for layout, outcome in compiled.items()}
        for candidate in left:
            outcome = outcomes[number, candidate.layout(number)]
            hours[candidate] += _hours(experiment, number, topology, outcome)
    return {one: value if value < limit else math.inf for one, value in hours.items()}


def _hours(experiment: Experiment, number: int, topology: Topology, outcome: Outcome) -> float:
    if outcome.program is None:
        return math.inf
    seconds = estimate.estimate(outcome.program, topology, outcome.places).total
    return seconds * experiment.phases[number].steps / 3600


def _micro_batches(experiment: Experiment, topology: Topology, number: int) -> list[int]:
    """Returns powers of two that divide a device's rows, and the experiment's own number."""
    rows = experiment.phases[number].batch_size // shards_of(experiment, topology)
    counts, count = {experiment.parallelism.accumulation_of(number)}, 1
    while rows % count == 0 and (
        count == 1 or _tokens(experiment, topology, number, count) >= _LEAST_TOKENS
    ):
        counts.add(count)
        count *= 2
    return sorted(counts)


def _tokens(experiment: Experiment, topology: Topology, number: int, accumulation: int) -> int:
    """Returns the positions of a micro-batch on a device."""
    phase = experiment.phases[number]
    rows = phase.batch_size // shards_of(experiment, topology) // accumulation
    return rows * phase.sequence_length


def _ladder(
    experiment: Experiment, topology: Topology, parts: Sequence[Sequence[int]]
) -> Iterator[Candidate]:
    """Yields the experiment's own layout, those that usually win, and the one that keeps least."""
    own = [layout_of(experiment, number) for number in range(len(parts))]
    yield Candidate(own[0].state, own[0].remat, tuple(layout.accumulation for layout in own))
    good = tuple(
        min(
            counts,
            key=lambda n: abs(
                math.log(max(_tokens(experiment, topology, number, n), 1) / _GOOD_TOKENS)
            ),
        )
        for number, counts in enumerate(parts)
    )
    yield from (Candidate(state, remat, good) for state, remat in _LADDER)
    yield Candidate(STATES[-1], REMATS[-1], tuple(counts[-1] for counts in parts))


def _neighbours(candidate: Candidate, parts: Sequence[Sequence[int]]) -> Iterator[Candidate]:
    """Yields candidates that differ in one setting, in micro-batches by one step."""
    yield from (candidate._replace(state=word) for word in STATES)
    yield from (candidate._replace(remat=word) for word in REMATS)
    for number, counts in enumerate(parts):
        at = counts.index(candidate.accumulation[number])
        for count in counts[max(at - 1, 0) : at + 2]:
            accumulation = list(candidate.accumulation)
            accumulation[number] = count
            yield candidate._replace(accumulation=tuple(accumulation))


def _may_fit(experiment: Experiment, topology: Topology, candidate: Candidate) -> bool:
    return all(
        _phase_may_fit(experiment, topology, number, candidate.layout(number))
        for number in range(len(experiment.phases))
    )


def _phase_may_fit(experiment: Experiment, topology: Topology, number: int, layout: Layout) -> bool:
    tokens = _tokens(experiment, topology, number, layout.accumulation)
    least = least_bytes(experiment.model, layout, topology.devices, tokens)
    return least <= topology.device_memory


def least_bytes(model: Model, layout: Layout, devices: int, tokens: int) -> float:
    """Returns less than a step needs on a device, by arithmetic: what exceeds a device cannot fit.

    The state, whole or cut; with zero1 the whole parameters for a step; the inputs of every layer,
    and unless they are computed again, what enters its activation.

    Args:
      model: its sizes.
      layout: of the step.
      devices: among which a state is cut.
      tokens: positions of a micro-batch on a device.
    """
    width, inner, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    parameters = layers * (4 * width * width + 2 * width * inner) + model.vocab_size * width
    element = _WIDTHS[model.compute_dtype]
    state = _STATE_BYTES * parameters
    if layout.state != "replicated":
        state /= devices
    if layout.state == "zero1":
        state += element * parameters
    kept = width if layout.remat == "full" else width + inner
    return state + element * layers * tokens * kept


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

    Args:
      experiment: its batches are those of the first slice.
      topologies: slices of one generation, the smallest first.
      log: gets a line when a compilation begins.

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
