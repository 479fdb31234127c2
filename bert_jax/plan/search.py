"""Which layout of an experiment is fastest on a slice.

What cannot fit by arithmetic is left out. The rest is compiled with SHORT layers, which takes a
fraction of the time and ranks the same, since layers are alike: first the micro-batches of the
experiment's own layout, then all layouts with the best of them. The best few are compiled whole.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax.config import Experiment, Model
from bert_jax.plan import estimate
from bert_jax.plan.compile import Job, Outcome, compile_all
from bert_jax.plan.remedies import PARALLELISMS, REMATS, compile_variants
from bert_jax.plan.topology import Topology
from bert_jax.plan.variants import Variant, shards_of, variant_of, vary

SHORT = 4
_WHOLE = 3
_MICRO_BATCHES = 2
# Fewer positions at once leave the matrix units half empty.
_LEAST_TOKENS = 512
# After so long, which the phases share, no more is compiled with few layers; after so long nothing
# is begun at all. What is under way is finished, and kept: a search begun again gets farther.
SHORT_SECONDS = 480.0
SECONDS = 780.0

_WIDTHS = {"float32": 4, "bfloat16": 2}
_STATE_BYTES = 12  # a parameter and its two moments


class Layout(NamedTuple):
    """A way to lay a recipe: the state's and the backward pass's are one for all phases."""

    parallelism: str
    remat: str


@dataclasses.dataclass
class Found:
    """A layout, its micro-batches in each phase, and the recipe's hours with so many layers."""

    layout: Layout
    accumulation: tuple[int, ...]
    hours: float
    layers: int

    def settings(self) -> list[str]:
        """As `--set` takes them."""
        return [
            f"mesh.parallelism={self.layout.parallelism}",
            f"mesh.remat={self.layout.remat}",
            f"mesh.accumulation={','.join(map(str, self.accumulation))}",
        ]


def search(
    experiment: Experiment, topology: Topology, say: Callable[[str], None]
) -> dict[str, Any]:
    """Ranks layouts of the experiment on a slice.

    Args:
      experiment: what is planned.
      topology: where.
      say: is told what is begun.

    Returns:
      `ranked`, a list of settings, hours and the layers they were compiled with, the best first;
      how many layouts were `possible`, `excluded` by arithmetic and `compiled` short; `cut_short`,
      whether time ran out. If it did before any was compiled whole, those with few layers are
      ranked.
    """
    return _Search(experiment, topology, say).run()


class _Search:
    def __init__(self, experiment: Experiment, topology: Topology, say: Callable[[str], None]):
        self.experiment, self.topology, self.say = experiment, topology, say
        self.short = _shortened(experiment)
        self.began = time.monotonic()
        self.cut_short = False
        self.numbers = range(len(experiment.phases))
        # Seconds of a step, by phase and variant, with SHORT layers.
        self.seconds: dict[tuple[int, Variant], float] = {}

    def run(self) -> dict[str, Any]:
        possible = {(n, v) for n in self.numbers for v in self._variants(n)}
        fitting = {(n, v) for n, v in possible if self._may_fit(n, v)}
        for number in self.numbers:
            own = variant_of(self.experiment, number)
            layout = (own.parallelism, own.remat)
            mine = [v for n, v in fitting if n == number]
            if not any(v[:2] == layout for v in mine):
                layout = (PARALLELISMS[-1], REMATS[-1])
            share = SHORT_SECONDS * (number + 1) / len(self.numbers)
            self._compile(number, [v for v in mine if v[:2] == layout], share)
            best = sorted((s, v.accumulation) for (n, v), s in self.seconds.items() if n == number)
            parts = {accumulation for _, accumulation in best[:_MICRO_BATCHES]}
            self._compile(number, [v for v in mine if v.accumulation in parts], share)
        ranking = self._ranking()
        ranked = self._whole(ranking)
        if not ranked and self.cut_short:
            ranked = ranking[:_WHOLE]
        return {
            "possible": len(possible),
            "excluded": len(possible) - len(fitting),
            "compiled": len(self.seconds),
            "cut_short": self.cut_short,
            "ranked": [
                {"settings": found.settings(), "hours": found.hours, "layers": found.layers}
                for found in ranked
            ],
        }

    def _variants(self, number: int) -> Iterable[Variant]:
        phase = self.experiment.phases[number]
        rows = phase.batch_size // shards_of(self.experiment, self.topology)
        parts = 1
        while rows % parts == 0 and (
            parts == 1 or rows // parts * phase.sequence_length >= _LEAST_TOKENS
        ):
            for parallelism in PARALLELISMS:
                for remat in REMATS:
                    yield Variant(parallelism, remat, parts)
            parts *= 2

    def _may_fit(self, number: int, variant: Variant) -> bool:
        phase = self.experiment.phases[number]
        shards = shards_of(self.experiment, self.topology)
        rows = phase.batch_size // shards // variant.accumulation
        least = least_bytes(
            self.experiment.model, variant, self.topology.devices, rows * phase.sequence_length
        )
        return least <= self.topology.device_memory

    def _compile(self, number: int, variants: Sequence[Variant], seconds: float) -> None:
        """Compiles short, two by two so that nothing is begun after so many seconds."""
        wanted = sorted(v for v in variants if (number, v) not in self.seconds)
        for at in range(0, len(wanted), 2):
            if self._is_late(seconds):
                return
            some = wanted[at : at + 2]
            for variant, outcome in compile_variants(
                self.short, number, self.topology, some, self.say
            ):
                if outcome.program is not None:
                    self.seconds[number, variant] = self._step(outcome)

    def _step(self, outcome: Outcome) -> float:
        dtype = self.experiment.model.compute_dtype
        return estimate.estimate(outcome.program, self.topology, outcome.places, dtype).total

    def _ranking(self) -> list[Found]:
        """Layouts that all phases have, by hours with short layers, the best first."""
        ranking = []
        for layout in {Layout(*variant[:2]) for _, variant in self.seconds}:
            hours, parts = 0.0, []
            for number in self.numbers:
                mine = [
                    (seconds, v.accumulation)
                    for (n, v), seconds in self.seconds.items()
                    if n == number and v[:2] == layout
                ]
                if not mine:
                    break
                seconds, accumulation = min(mine)
                hours += seconds * self.experiment.phases[number].steps / 3600
                parts.append(accumulation)
            else:
                layers = self.short.model.num_hidden_layers
                ranking.append(Found(layout, tuple(parts), hours, layers))
        return sorted(ranking, key=lambda found: found.hours)

    def _whole(self, ranking: Sequence[Found]) -> list[Found]:
        """The first few that fit with all layers, by their hours."""
        whole: list[Found] = []
        for found in ranking:
            if len(whole) == _WHOLE or self._is_late(SECONDS):
                break
            jobs = [self._job(found, number) for number in self.numbers]
            outcomes = compile_all(jobs, self.say, "return")
            if all(outcome.program is not None for outcome in outcomes):
                hours = sum(
                    self._step(outcome) * phase.steps / 3600
                    for outcome, phase in zip(outcomes, self.experiment.phases, strict=True)
                )
                layers = self.experiment.model.num_hidden_layers
                whole.append(dataclasses.replace(found, hours=hours, layers=layers))
        return sorted(whole, key=lambda found: found.hours)

    def _job(self, found: Found, number: int) -> Job:
        variant = Variant(*found.layout, found.accumulation[number])
        return Job(vary(self.experiment, number, variant), number, self.topology)

    def _is_late(self, seconds: float) -> bool:
        late = time.monotonic() - self.began > seconds
        self.cut_short |= late
        return late


def _shortened(experiment: Experiment) -> Experiment:
    layers = min(SHORT, experiment.model.num_hidden_layers)
    model = dataclasses.replace(experiment.model, num_hidden_layers=layers)
    return dataclasses.replace(experiment, model=model)


def least_bytes(model: Model, variant: Variant, devices: int, tokens: int) -> float:
    """Less than a step needs on a device, by arithmetic: what exceeds a device cannot fit.

    The state, whole or cut; with zero1 the whole parameters for a step; the inputs of every layer,
    and unless they are computed anew, what enters its activation.

    Args:
      model: the shape.
      variant: how it is laid.
      devices: among which a state is cut.
      tokens: positions of a micro-batch on a device.
    """
    width, inner, layers = model.hidden_size, model.intermediate_size, model.num_hidden_layers
    parameters = layers * (4 * width * width + 2 * width * inner) + model.vocab_size * width
    element = _WIDTHS[model.compute_dtype]
    state = _STATE_BYTES * parameters
    if variant.parallelism != "replicated":
        state /= devices
    if variant.parallelism == "zero1":
        state += element * parameters
    kept = width if variant.remat == "full" else width + inner
    return state + element * layers * tokens * kept
