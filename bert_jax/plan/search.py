"""Which layout of an experiment is fastest on a slice.

A recipe is tried if it is a neighbour, one setting away, of one of the best that are known; the
search is over when those have no untried neighbours, or when its time is. The first are those that
usually win. What cannot fit by arithmetic is left out.

Layers in a loop are compiled whole at once: the compiler sees one body, however many rounds it
goes, so few layers take it about as long as all (67 s and 68 s, 4 and 24 of LARGE; more only where
the memory is all but full), and a step that is far too large is refused within seconds. Unrolled
layers do take longer the more there are: then SHORT of them are compiled first, which ranks the
same since layers are alike, and the best few whole.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from bert_jax.config import Experiment, Model
from bert_jax.plan import estimate
from bert_jax.plan.compile import AT_ONCE, Job, Outcome, compile_all
from bert_jax.plan.remedies import PARALLELISMS, REMATS, compile_variants
from bert_jax.plan.topology import Topology
from bert_jax.plan.variants import Variant, shards_of, variant_of, vary

SHORT = 4
# So many recipes are told, and have all their neighbours tried.
BEST = 3
# When no more is begun with SHORT layers, and when the search is over: what is under way then is
# ended, once something fits. What was compiled is kept: a search begun again gets farther.
SHORT_SECONDS = 360.0
SECONDS = 720.0

# Fewer positions at once leave the matrix units half empty; with so many, what a layer works on
# stays in a chip's fast memory.
_LEAST_TOKENS = 512
_GOOD_TOKENS = 2048
# Before anything is compiled, the likeliest first.
_LIKELY_PARALLELISMS = ("zero3", "zero1", "replicated")
_LIKELY_REMATS = ("dots", "full", "none")
# A recipe is given up if its other phases would have to be faster by this share than the best's.
_HOPELESS = 0.25

_WIDTHS = {"float32": 4, "bfloat16": 2}
_STATE_BYTES = 12  # a parameter and its two moments


class Recipe(NamedTuple):
    """How all phases are laid: the state's and the backward pass's layout is one for them all."""

    state: str
    remat: str
    accumulation: tuple[int, ...]

    def variant(self, phase: int) -> Variant:
        """How this phase is laid."""
        return Variant(self.state, self.remat, self.accumulation[phase])

    def settings(self) -> list[str]:
        """As `--set` takes them."""
        return [
            f"parallelism.state={self.state}",
            f"parallelism.remat={self.remat}",
            f"parallelism.accumulation={','.join(map(str, self.accumulation))}",
        ]


@dataclasses.dataclass
class Found:
    """A recipe, the hours it takes and the most bytes of a device, compiled with so many layers."""

    recipe: Recipe
    hours: float
    peak: int
    layers: int


def search(
    experiment: Experiment, topology: Topology, say: Callable[[str], None]
) -> dict[str, Any]:
    """Ranks layouts of the experiment on a slice.

    Args:
      experiment: what is planned; its own layout is tried first.
      topology: where.
      say: is told what is begun.

    Returns:
      `ranked`, a list of settings, hours, peak bytes of a device, the layers they were compiled
      with and whether these are all, the best first; none was compiled whole and did not fit, and
      only if there was no time to compile any whole are they of fewer layers. Of the layouts of
      single phases, how many were `possible`, `excluded` by arithmetic, `compiled`, and of these
      `unfit`, refused by the compiler. `cut_short`, whether time ran out.
    """
    return _Search(experiment, topology, say).run()


class _Search:
    def __init__(self, experiment: Experiment, topology: Topology, say: Callable[[str], None]):
        self.experiment, self.topology, self.say = experiment, topology, say
        self.first = _compiled_first(experiment)
        self.began = time.monotonic()
        self.cut_short = False
        self.numbers = range(len(experiment.phases))
        # The phase with most to keep first: what does not fit is refused there, in seconds.
        self.order = sorted(self.numbers, key=lambda number: -self._tokens(number, 1))
        self.parts = [self._parts(number) for number in self.numbers]
        self.outcomes: dict[tuple[int, Variant], Outcome] = {}
        self.given_up: set[Recipe] = set()
        recipes = itertools.starmap(
            Recipe, itertools.product(PARALLELISMS, REMATS, itertools.product(*self.parts))
        )
        own = [variant_of(experiment, number) for number in self.numbers]
        mine = Recipe(*own[0][:2], tuple(variant.accumulation for variant in own))
        self.recipes = sorted(
            filter(self._may_fit, recipes),
            key=lambda recipe: (recipe != mine, self._unlikeliness(recipe)),
        )

    def run(self) -> dict[str, Any]:
        limit = SECONDS if self._is_whole() else SHORT_SECONDS
        chosen = self._next()
        while chosen and not self._is_late(limit):
            self._try(chosen, limit)
            chosen = self._next()
        ranked = self._ranking()
        if not self._is_whole():
            ranked = self._whole(ranked)
        possible = len(PARALLELISMS) * len(REMATS) * sum(map(len, self.parts))
        tried = {(n, recipe.variant(n)) for recipe in self.recipes for n in self.numbers}
        fit = sum(outcome.program is not None for outcome in self.outcomes.values())
        return {
            "possible": possible,
            "excluded": possible - len(tried),
            "compiled": len(self.outcomes),
            "unfit": len(self.outcomes) - fit,
            "cut_short": self.cut_short,
            "ranked": [
                {
                    "settings": found.recipe.settings(),
                    "hours": found.hours,
                    "peak": found.peak,
                    "layers": found.layers,
                    "whole": found.layers == self.experiment.model.num_hidden_layers,
                }
                for found in ranked[:BEST]
            ],
        }

    # --- what there is to try ---

    def _parts(self, number: int) -> list[int]:
        """Micro-batches: powers of two that divide the rows, and the experiment's own number."""
        shards = shards_of(self.experiment, self.topology)
        rows = self.experiment.phases[number].batch_size // shards
        found, parts = {self.experiment.parallelism.accumulation_of(number)}, 1
        while rows % parts == 0 and (parts == 1 or self._tokens(number, parts) >= _LEAST_TOKENS):
            found.add(parts)
            parts *= 2
        return sorted(found)

    def _tokens(self, number: int, parts: int) -> int:
        """Positions of a micro-batch on a device."""
        phase = self.experiment.phases[number]
        rows = phase.batch_size // shards_of(self.experiment, self.topology) // parts
        return rows * phase.sequence_length

    def _may_fit(self, recipe: Recipe) -> bool:
        return all(
            self._least_bytes(self.experiment, number, recipe.variant(number))
            <= self.topology.device_memory
            for number in self.numbers
        )

    def _least_bytes(self, experiment: Experiment, number: int, variant: Variant) -> float:
        tokens = self._tokens(number, variant.accumulation)
        return least_bytes(experiment.model, variant, self.topology.devices, tokens)

    def _unlikeliness(self, recipe: Recipe) -> float:
        """The higher, the less it is expected to win."""
        ranks = _LIKELY_PARALLELISMS.index(recipe.state) + _LIKELY_REMATS.index(recipe.remat)
        return ranks + sum(
            abs(math.log2(max(self._tokens(n, recipe.accumulation[n]), 1) / _GOOD_TOKENS))
            for n in self.numbers
        )

    def _neighbours(self, recipe: Recipe) -> set[Recipe]:
        found = {recipe._replace(state=word) for word in PARALLELISMS}
        found |= {recipe._replace(remat=word) for word in REMATS}
        for number, parts in enumerate(self.parts):
            at = parts.index(recipe.accumulation[number])
            for other in parts[max(at - 1, 0) : at + 2]:
                accumulation = list(recipe.accumulation)
                accumulation[number] = other
                found.add(recipe._replace(accumulation=tuple(accumulation)))
        return found

    def _next(self) -> list[Recipe]:
        """Neighbours of the best, by likelihood; while none fits, what keeps least after that."""
        untried = [
            recipe
            for recipe in self.recipes
            if recipe not in self.given_up and self._hours(recipe) is None
        ]
        best = self._ranking()[:BEST]
        if not best:
            if self.outcomes:
                untried.sort(key=self._thrift, reverse=True)
            return untried[:AT_ONCE]
        for found in best:
            near = self._neighbours(found.recipe)
            chosen = [recipe for recipe in untried if recipe in near]
            if chosen:
                return chosen[:AT_ONCE]
        return []

    def _thrift(self, recipe: Recipe) -> tuple[int, int, int]:
        return (
            PARALLELISMS.index(recipe.state) + REMATS.index(recipe.remat),
            math.prod(recipe.accumulation),
            PARALLELISMS.index(recipe.state),
        )

    # --- trying it ---

    def _try(self, recipes: Sequence[Recipe], limit: float) -> None:
        """Compiles recipes side by side, phase after phase, as long as they are worth it."""
        for number in self.order:
            recipes = [recipe for recipe in recipes if self._is_worth_it(recipe)]
            variants = {recipe.variant(number) for recipe in recipes}
            wanted = sorted(v for v in variants if (number, v) not in self.outcomes)
            if not wanted:
                continue
            if self._is_late(limit):
                return
            self._compile(number, wanted)

    def _compile(self, number: int, variants: Sequence[Variant]) -> None:
        left = self._seconds_left() if self._ranking() else None
        try:
            answers = compile_variants(self.first, number, self.topology, variants, self.say, left)
        except TimeoutError:
            self.cut_short = True
            return
        for variant in variants:  # those that the experiment forbids are not answered
            self.outcomes[number, variant] = Outcome(kind="refused")
        self.outcomes |= {(number, variant): outcome for variant, outcome in answers}

    def _is_worth_it(self, recipe: Recipe) -> bool:
        """Whether what is known leaves hope; else it is given up."""
        best = self._ranking()[:1]
        lost = elsewhere = 0.0
        for number in self.numbers:
            known = self.outcomes.get((number, recipe.variant(number)))
            if known is not None and not self._fits(number, recipe.variant(number)):
                self.given_up.add(recipe)
                return False
            if best:
                theirs = self._phase_hours(number, best[0].recipe.variant(number))
                if known is None:
                    elsewhere += theirs
                else:
                    lost += self._phase_hours(number, recipe.variant(number)) - theirs
        if elsewhere and lost > _HOPELESS * elsewhere:
            self.given_up.add(recipe)
            return False
        return True

    def _fits(self, number: int, variant: Variant) -> bool:
        """Whether it compiled, and with all layers may fit by what it takes with few."""
        outcome = self.outcomes[number, variant]
        if outcome.program is None:
            return False
        more = self._least_bytes(self.experiment, number, variant)
        more -= self._least_bytes(self.first, number, variant)
        return self._is_whole() or outcome.memory["peak"] + more <= self.topology.device_memory

    def _phase_hours(self, number: int, variant: Variant) -> float:
        return self._outcome_hours(number, self.outcomes[number, variant])

    def _outcome_hours(self, number: int, outcome: Outcome) -> float:
        dtype = self.experiment.model.compute_dtype
        seconds = estimate.estimate(outcome.program, self.topology, outcome.places, dtype).total
        return seconds * self.experiment.phases[number].steps / 3600

    def _hours(self, recipe: Recipe) -> float | None:
        """Infinite if it does not fit; None while it is not known."""
        phases = [(number, recipe.variant(number)) for number in self.numbers]
        if not all(phase in self.outcomes for phase in phases):
            return None
        if not all(self._fits(*phase) for phase in phases):
            return math.inf
        return sum(self._phase_hours(*phase) for phase in phases)

    def _ranking(self) -> list[Found]:
        """What is known to fit as it was compiled first, the best first."""
        layers = self.first.model.num_hidden_layers
        found = []
        for recipe in self.recipes:
            hours = self._hours(recipe)
            if hours is not None and hours < math.inf:
                outcomes = [
                    self.outcomes[number, recipe.variant(number)] for number in self.numbers
                ]
                found.append(Found(recipe, hours, _peak(outcomes), layers))
        return sorted(found, key=lambda one: one.hours)

    def _whole(self, ranking: Sequence[Found]) -> list[Found]:
        """The first few that fit with all layers, by their hours; without time, those not tried."""
        whole: list[Found] = []
        for at, found in enumerate(ranking):
            if len(whole) == BEST:
                break
            if self._is_late(SECONDS):
                return sorted(whole, key=lambda one: one.hours) or list(ranking[at:])
            jobs = [
                Job(
                    vary(self.experiment, number, found.recipe.variant(number)),
                    number,
                    self.topology,
                )
                for number in self.numbers
            ]
            left = self._seconds_left() if whole else None
            try:
                outcomes = compile_all(jobs, self.say, "return", left)
            except TimeoutError:
                self.cut_short = True
                break
            if all(outcome.program is not None for outcome in outcomes):
                hours = sum(map(self._outcome_hours, self.numbers, outcomes))
                layers = self.experiment.model.num_hidden_layers
                whole.append(Found(found.recipe, hours, _peak(outcomes), layers))
        return sorted(whole, key=lambda one: one.hours)

    def _is_whole(self) -> bool:
        """Whether what is compiled first has all layers."""
        return self.first is self.experiment

    def _seconds_left(self) -> float:
        return max(SECONDS - (time.monotonic() - self.began), 0.0)

    def _is_late(self, limit: float) -> bool:
        late = time.monotonic() - self.began >= limit
        self.cut_short |= late
        return late


def _peak(outcomes: Iterable[Outcome]) -> int:
    return max(outcome.memory["peak"] for outcome in outcomes)


def _compiled_first(experiment: Experiment) -> Experiment:
    """With few layers, if that makes a difference to the compiler."""
    if experiment.parallelism.layer_loop == "scan" or experiment.model.num_hidden_layers <= SHORT:
        return experiment
    model = dataclasses.replace(experiment.model, num_hidden_layers=SHORT)
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
    if variant.state != "replicated":
        state /= devices
    if variant.state == "zero1":
        state += element * parameters
    kept = width if variant.remat == "full" else width + inner
    return state + element * layers * tokens * kept
