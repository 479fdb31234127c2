"""Which kills: kinds, where a run can meet them, and a draw of them."""

import dataclasses
import itertools
import math
import pathlib
import random
import signal
import statistics
from typing import Literal

from etils import epath

from bert_jax.config import Experiment
from bert_jax.storage.workdir import Workdir
from bert_jax.training.lines import Lines
from bert_jax.training.pretraining import Prepared
from bert_jax.verify.notes import Notes
from bert_jax.verify.orders import Death, files_below

Kind = Literal[
    "SIGKILL",
    "SIGTERM",
    "in a save",
    "in an evaluation",
    "in prepare",
    "in a start",
    "at an epoch's end",
    "at the switch of phases",
    "after a roll-back",
]

# A save is cut at any of its files, a start before any of its files of lines and the first step.
_START_PARTS = 4
# A kill in prepare comes while it works, not when it is done.
_LATEST = 0.95


@dataclasses.dataclass(frozen=True)
class Round:
    """One kill."""

    kind: Kind
    death: Death


@dataclasses.dataclass(frozen=True)
class Calendar:
    """What happens in a run at which step, as the undisturbed one shows.

    Attributes:
      total: steps.
      saves: steps after which it saves; the last is `total`.
      evaluations: steps after which it evaluates.
      evaluation_batches: of an evaluation.
      saved_files: of a checkpoint.
      epoch_ends: steps in which an epoch's first row stands, but for the first epochs of phases.
      switches: first steps of phases, but for the first phase.
      rolled_back: (steps done when it went back, steps done where it went back to); None if it
        never did.
      step_seconds: of a step.
      prepare_seconds: of making the corpus.
    """

    total: int
    saves: tuple[int, ...]
    evaluations: tuple[int, ...]
    evaluation_batches: int
    saved_files: int
    epoch_ends: tuple[int, ...]
    switches: tuple[int, ...]
    rolled_back: tuple[int, int] | None
    step_seconds: float
    prepare_seconds: float

    @classmethod
    def of(cls, experiment: Experiment, undisturbed: pathlib.Path, notes: Notes) -> "Calendar":
        """Reads it off the workdir of a finished run, and its notes."""
        total, run = experiment.total_steps, experiment.run
        workdir = Workdir(undisturbed, experiment.run.corpus_dir)
        laps = [x for x in Lines(workdir.timings).read() if x["kind"] == "train" and x["steps"]]
        rows = max(x["rows"] for x in Lines(workdir.metrics).read() if x["kind"] == "evaluation")
        steps = [phase.steps for phase in experiment.phases]
        return cls(
            total,
            (*range(run.checkpoint_every, total, run.checkpoint_every), total),
            (*range(run.eval_every, total, run.eval_every), total),
            math.ceil(rows / run.eval_batch_size),
            files_below(undisturbed / "checkpoints" / str(total)),
            tuple(epoch_ends(experiment, workdir.corpus)),
            tuple(itertools.accumulate(steps[:-1])),
            next(iter(notes.rolled_back.values()), None),
            statistics.median(lap["seconds"] / lap["steps"] for lap in laps),
            notes.prepare_seconds or 0.0,
        )


def steps_without_loss(experiment: Experiment, seed: int) -> range:
    """Steps whose loss is made not to be finite, so that every run goes back over them.

    So many in a row as it takes, between the first save and the end; none where that is too short,
    or the run would stop.
    """
    optimizer, every = experiment.optimizer, experiment.run.checkpoint_every
    first, last = every + 1, experiment.total_steps - optimizer.bad_steps_in_a_row - 2
    if first > last or optimizer.after_bad_steps == "stop":
        return range(0)
    at = random.Random(seed).randint(first, last)
    return range(at, at + optimizer.bad_steps_in_a_row)


def epoch_ends(experiment: Experiment, folder: epath.Path) -> list[int]:
    """Steps in which the first row of an epoch stands, but for the first epoch of each phase."""
    prepared = Prepared.open(folder)
    found, first = [], 0
    for number, phase in enumerate(experiment.phases):
        rows = prepared.train_batches(experiment, number).rows_per_epoch
        last = phase.steps * phase.batch_size
        found += [first + row // phase.batch_size for row in range(rows, last, rows)]
        first += phase.steps
    return sorted(set(found))


def absent_kinds(calendar: Calendar) -> dict[Kind, str]:
    """Kinds that this run cannot meet, and why."""
    absent: dict[Kind, str] = {}
    if not calendar.epoch_ends:
        absent["at an epoch's end"] = "no phase reads the corpus more than once"
    if not calendar.switches:
        absent["at the switch of phases"] = "the run has one phase"
    if calendar.rolled_back is None:
        absent["after a roll-back"] = (
            "optimizer.after_bad_steps=stop, or more steps than optimizer.bad_steps_in_a_row are "
            "wanted after the first save"
        )
    return absent


def draw(calendar: Calendar, count: int, seed: int) -> list[Round]:
    """So many rounds, of each kind as often as of any other, in the order in which they come."""
    chance = random.Random(seed)
    kinds = [kind for kind in Kind.__args__ if kind not in absent_kinds(calendar)]
    turns = itertools.islice(itertools.cycle(kinds), count)
    drawn = [Round(kind, _death(kind, calendar, chance)) for kind in turns]
    return sorted(drawn, key=lambda one: (one.kind != "in prepare", one.death.step))


def _death(kind: Kind, calendar: Calendar, chance: random.Random) -> Death:
    total = calendar.total
    if kind == "SIGKILL":  # at any moment of a step
        after = chance.random() * calendar.step_seconds
        return Death("step", signal.SIGKILL, chance.randrange(total), after=after)
    if kind == "SIGTERM":
        return Death("step", signal.SIGTERM, _stoppable(chance.randrange(total), total))
    if kind == "in a save":
        # Whole, the last save would end the run; one more than its files is a whole one.
        at = chance.choice(calendar.saves)
        parts = calendar.saved_files + 2 if at < total else 1
        return Death("save", step=at, part=chance.randrange(parts))
    if kind == "in an evaluation":
        part = chance.randrange(calendar.evaluation_batches + 1)
        return Death("evaluation", step=chance.choice(calendar.evaluations), part=part)
    if kind == "in prepare":
        return Death("prepare", after=chance.random() * _LATEST * calendar.prepare_seconds)
    if kind == "in a start":
        part = chance.randrange(_START_PARTS)
        return Death("start", step=chance.randrange(total), part=part)
    if kind == "after a roll-back":
        done, to = calendar.rolled_back or (0, 0)
        again = min(save for save in calendar.saves if save > to) - to
        return Death("roll_back", step=done, part=chance.randrange(again))
    near = calendar.epoch_ends if kind == "at an epoch's end" else calendar.switches
    at = min(chance.choice(near) + chance.choice((-1, 0, 1)), total - 1)
    number = chance.choice((signal.SIGKILL, signal.SIGTERM))
    return Death("step", number, _stoppable(at, total) if number == signal.SIGTERM else at)


def _stoppable(step: int, total: int) -> int:
    """The step, unless it is the last, which a request to stop would find done."""
    return max(min(step, total - 2), 0)
