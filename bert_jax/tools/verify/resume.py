"""Kinds of kills, a draw of them, and a run that is killed and started again and again."""

import dataclasses
import itertools
import math
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Literal

from bert_jax import errors
from bert_jax.config import Experiment
from bert_jax.config import code as code_lib
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir
from bert_jax.tools.verify import compare
from bert_jax.tools.verify.compare import Execution, Journal
from bert_jax.tools.verify.faults import Fault, Plan, files_below

# What is started; a test of what a broken run would show puts another here.
CHILD = "bert_jax.tools.verify.child"
HUNG = "hung"

_TAIL = 5

# A start is killed before any of its files of lines, or before the first step.
_START_PARTS = 4
# A kill in prepare comes while it works, not when it is done.
_LATEST = 0.95


@dataclasses.dataclass(frozen=True)
class Round:
    """One kill."""

    kind: str  # one of KINDS
    fault: Fault


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """The run that nobody kills: where kills can come, and what each step must see."""

    saves: tuple[int, ...]  # steps after which it saves; the last is its end
    evaluations: tuple[int, ...]  # steps after which it evaluates
    evaluation_batches: int  # of an evaluation
    saved_files: int  # of a checkpoint
    not_finite: range  # steps in a row whose loss is made not to be finite, in all runs alike
    # (steps done when it went back, steps done where it went back to); None if it never did.
    rolled_back: tuple[int, int] | None
    step_seconds: float  # of a step
    prepare_seconds: float  # of making the corpus
    planned: dict[int, Execution]  # {step: what it did there}

    @property
    def total(self) -> int:
        """The run's steps."""
        return self.saves[-1]

    @classmethod
    def of(
        cls, experiment: Experiment, root: pathlib.Path, journal: Journal, not_finite: range
    ) -> "Undisturbed":
        """Reads it off the workdir of a finished run, and its journal."""
        total, run, workdir = experiment.total_steps, experiment.run, Workdir(root)
        laps = [x for x in JsonLines(workdir.timings).read() if x["kind"] == "train" and x["steps"]]
        rows = max(
            x["rows"] for x in JsonLines(workdir.metrics).read() if x["kind"] == "evaluation"
        )
        return cls(
            (*range(run.checkpoint_every, total, run.checkpoint_every), total),
            (*range(run.eval_every, total, run.eval_every), total),
            math.ceil(rows / run.eval_batch_size),
            files_below(root / "checkpoints" / str(total)),
            not_finite,
            next(iter(journal.rolled_back.values()), None),
            statistics.median(lap["seconds"] / lap["steps"] for lap in laps),
            journal.prepare_seconds,
            journal.survivors(),
        )


def steps_without_loss(experiment: Experiment, seed: int) -> range:
    """Draws steps whose loss is made not to be finite, so that every run goes back over them.

    As many in a row as it takes, between the first save and the end; none where that is too short,
    or the run would stop.
    """
    optimizer, every = experiment.optimizer, experiment.run.checkpoint_every
    first, last = every + 1, experiment.total_steps - optimizer.bad_steps_in_a_row - 2
    if first > last or optimizer.after_bad_steps == "stop":
        return range(0)
    at = random.Random(seed).randint(first, last)
    return range(at, at + optimizer.bad_steps_in_a_row)


def draw(undisturbed: Undisturbed, count: int, seed: int) -> list[Round]:
    """Draws kills, of each kind as often as of any other, in the order in which they come."""
    chance = random.Random(seed)
    kinds = [kind for kind in KINDS if kind != "at a roll-back" or undisturbed.rolled_back]
    turns = itertools.islice(itertools.cycle(kinds), count)
    drawn = [Round(kind, KINDS[kind](undisturbed, chance)) for kind in turns]
    return sorted(drawn, key=lambda one: (one.kind != "in prepare", one.fault.step))


def _draw_step_fault(run: Undisturbed, chance: random.Random) -> Fault:
    after = chance.random() * run.step_seconds  # at any moment of it
    return Fault("step", step=chance.randrange(run.total), after=after)


def _draw_save_fault(run: Undisturbed, chance: random.Random) -> Fault:
    # Whole, the last save would end the run; one more than its files is a whole one.
    at = chance.choice(run.saves)
    parts = run.saved_files + 2 if at < run.total else 1
    return Fault("save", step=at, part=chance.randrange(parts))


def _draw_evaluation_or_start_fault(run: Undisturbed, chance: random.Random) -> Fault:
    if chance.random() < 0.5:
        part = chance.randrange(run.evaluation_batches + 1)
        return Fault("evaluation", step=chance.choice(run.evaluations), part=part)
    part = chance.randrange(_START_PARTS)
    return Fault("start", step=chance.randrange(run.total), part=part)


def _draw_roll_back_fault(run: Undisturbed, chance: random.Random) -> Fault:
    assert run.rolled_back is not None  # else `draw` draws no kill of this kind
    done, to = run.rolled_back
    again = min(save for save in run.saves if save > to) - to
    return Fault("roll_back", step=done, part=chance.randrange(again))


# Each draws where a kill of its kind comes.
KINDS: dict[str, Callable[[Undisturbed, random.Random], Fault]] = {
    "in a step": _draw_step_fault,
    # Not in the last step, which a request to stop would find done.
    "SIGTERM": lambda run, chance: Fault("step", signal.SIGTERM, chance.randrange(run.total - 1)),
    "in a save": _draw_save_fault,
    "in an evaluation or a start": _draw_evaluation_or_start_fault,
    "at a roll-back": _draw_roll_back_fault,
    "in prepare": lambda run, chance: Fault(
        "prepare", after=chance.random() * _LATEST * run.prepare_seconds
    ),
}


# --- starting children ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class ChildResult:
    """The way in which a start ended."""

    # Its exit code; minus a signal's number; HUNG if it was ended for taking too long.
    code: int | str
    seconds: float  # that it took
    tail: tuple[str, ...]  # its last lines

    def __str__(self) -> str:
        return f"ended with exit code {self.code}: {'; '.join(self.tail) or 'without a line'}"


@dataclasses.dataclass(frozen=True)
class Children:
    """Starts `bert-jax COMMAND EXPERIMENT --workdir W`, one after the other."""

    experiment: pathlib.Path  # a resolved config
    # Seconds after which a start has hung; None: it may take as long as it likes.
    patience: float | None = None

    def run(
        self,
        command: Literal["pretrain", "prepare"],
        workdir: pathlib.Path,
        plan: Plan,
        settings: Sequence[str] = (),
    ) -> ChildResult:
        """Runs a command to its end; its output goes to W.log."""
        words = [command, str(self.experiment), "--workdir", str(workdir)]
        words += [word for setting in settings for word in ("--set", setting)]
        begun = time.monotonic()
        with workdir.with_name(workdir.name + ".log").open("a+b") as log:
            here = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", CHILD, plan.to_json(), *words],
                env=os.environ | code_lib.environment() | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # else Ctrl-C would reach it, too, and it would save
            )
            code: int | str
            try:
                code = process.wait(self.patience)
            except subprocess.TimeoutExpired:
                code = HUNG
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            log.seek(here)
            lines = log.read().decode(errors="replace").splitlines()
        return ChildResult(code, time.monotonic() - begun, tuple(lines[-_TAIL:]))


# --- a run that is killed -------------------------------------------------------------------------


@dataclasses.dataclass
class Killed:
    """The result of one round."""

    ended: ChildResult  # how the process ended
    began: int | None  # the newest checkpoint when it started; None of what is no run
    # Steps done when it was killed; None if it was not: the run came to its end before.
    done: int | None
    differences: list[str]  # what is not as it should be, a line each


class ResumedRun:
    """One workdir, started again after each kill, and what each start must show."""

    def __init__(self, children: Children, workdir: pathlib.Path, undisturbed: Undisturbed):
        self.workdir, self.journal = workdir, workdir.with_name(workdir.name + ".journal")
        self._children, self._undisturbed = children, undisturbed
        self._starts = 0
        self._least = 0  # the step from which the next start must go on at least
        self.is_at_its_end = False  # without having been killed, and as it should be

    def kill(self, one: Round) -> Killed:
        """Starts it, which ends as the round says."""
        killed, went_back = self._start(one.fault)
        ended = killed.ended
        if killed.done is None:
            if ended.code != errors.FINISHED:
                killed.differences.append(f"was to be killed and {ended}")
            self.is_at_its_end = not killed.differences
            return killed
        self._least = self._least_saved(one.fault, killed.done, went_back)
        expected = {errors.STOPPED if one.fault.signal == signal.SIGTERM else -signal.SIGKILL}
        if errors.STOPPED in expected and killed.done + 1 == self._undisturbed.total:
            expected.add(errors.FINISHED)  # a request that comes in the last step finds it done
        if killed.ended.code not in expected:
            killed.differences.append(
                f"was to end with exit code {max(expected)} and {killed.ended}"
            )
        return killed

    def finish(self) -> list[str]:
        """Starts it once more, to its end; returns what is not as it should be."""
        killed, _ = self._start(None)
        if killed.ended.code != errors.FINISHED:
            killed.differences.append(f"was to finish and {killed.ended}")
        return killed.differences

    def _start(self, fault: Fault | None) -> tuple[Killed, tuple[int, int] | None]:
        """Returns what came of a start, and over which steps it went back."""
        self._starts += 1
        saved, not_finite = newest_checkpoint(self.workdir), tuple(self._undisturbed.not_finite)
        plan = Plan(fault, str(self.journal), self._starts, not_finite=not_finite)
        ended = self._children.run("pretrain", self.workdir, plan)
        journal = Journal.read(self.journal)
        done = journal.killed.get(self._starts)
        done = None if done is None else max(done, saved)  # it may have died before its first step
        wrong = self._batches(journal.executions_of(self._starts), saved)
        return Killed(ended, saved, done, wrong), journal.rolled_back.get(self._starts)

    def _batches(self, executions: list[Execution], saved: int) -> list[str]:
        """Returns where a start did not go on from the newest checkpoint, with planned batches."""
        wrong = []
        if saved < self._least:
            wrong.append(f"the newest checkpoint is of step {saved}, not of {self._least}")
        steps = [e.step for e in executions]
        if steps and steps[0] != saved:
            wrong.append(f"went on from step {steps[0]}, and the newest checkpoint is of {saved}")
        for before, after in itertools.pairwise(steps):
            if after > before + 1:
                wrong.append(f"step {after} came after step {before}")
        return wrong + compare.batches(executions, self._undisturbed.planned)

    def _least_saved(self, fault: Fault, done: int, went_back: tuple[int, int] | None) -> int:
        """Returns the step of the newest checkpoint there must be after a kill, at least."""
        run, least, saves = self._undisturbed, self._least, fault.signal == signal.SIGTERM
        # Steps done at which nothing is saved, unless the run went back before.
        unsaved = range(run.not_finite.start + 1, run.rolled_back[0] + 2 if run.rolled_back else 0)
        reached = done + saves
        if went_back is not None:
            least = went_back[1]  # newer ones went with the steps
        elif reached in unsaved:
            reached, saves = run.not_finite.start, False
        if saves:
            return max(least, reached)
        # A save waits for the one before it, so no more than the newest of those begun is lost; and
        # the last step was handed over, what follows it perhaps not begun.
        every = run.saves[0]
        return max(least, (reached - 1) // every * every - every)


def newest_checkpoint(workdir: pathlib.Path) -> int:
    """Returns the step of the newest whole checkpoint; 0 if there is none."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)
