"""Kinds of kills, random draws of kills, and a run that is killed and restarted repeatedly."""

import dataclasses
import itertools
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
from bert_jax.config import code as custom_code
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir
from bert_jax.tools.verify import compare
from bert_jax.tools.verify.compare import Execution, Journal
from bert_jax.tools.verify.faults import Fault, Plan, files_below

# The module that is started. A test replaces it by one whose run is broken.
CHILD = "bert_jax.tools.verify.child"
HUNG = "hung"

_TAIL_LINES = 5

# A start is killed before it opens metrics, timings or predictions, or before the first step.
_STARTUP_MOMENTS = 4
# A kill in `prepare` comes within this share of its duration, so never after its end.
_LATEST_SHARE = 0.95


@dataclasses.dataclass(frozen=True)
class Round:
    """A round of the command: a planned kill."""

    kind: str  # one of KINDS
    fault: Fault


@dataclasses.dataclass(frozen=True)
class Undisturbed:
    """The run without a kill: when kills of other runs can come, and the batch of each step."""

    saves: tuple[int, ...]  # steps after which the run saves; the last is the run's end
    evaluations: tuple[int, ...]  # steps after which the run evaluates
    saved_files: int  # files of a checkpoint
    nonfinite_steps: range  # consecutive steps whose loss is made NaN, in all runs alike
    # (steps done before the roll-back, steps done at the checkpoint); None without a roll-back.
    rolled_back: tuple[int, int] | None
    step_seconds: float  # median time of a step
    evaluation_seconds: float  # median time of an evaluation
    prepare_seconds: float  # time of making the corpus
    executions: dict[int, Execution]  # {step: its execution in this run}

    @property
    def total(self) -> int:
        """Steps of the run."""
        return self.saves[-1]

    @classmethod
    def of(
        cls, experiment: Experiment, root: pathlib.Path, journal: Journal, nonfinite_steps: range
    ) -> "Undisturbed":
        """Reads the workdir of a finished run, and its journal."""
        total, run, workdir = experiment.total_steps, experiment.run, Workdir(root)
        timings = JsonLines(workdir.timings).read()
        train_lines = [line for line in timings if line["kind"] == "train" and line["steps"]]
        evaluation_seconds = [x["evaluation_seconds"] for x in timings if "evaluation_seconds" in x]
        return cls(
            saves=(*range(run.checkpoint_every, total, run.checkpoint_every), total),
            evaluations=(*range(run.eval_every, total, run.eval_every), total),
            saved_files=files_below(root / "checkpoints" / str(total)),
            nonfinite_steps=nonfinite_steps,
            rolled_back=next(iter(journal.rolled_back.values()), None),
            step_seconds=statistics.median(line["seconds"] / line["steps"] for line in train_lines),
            evaluation_seconds=statistics.median(evaluation_seconds),
            prepare_seconds=max(line.get("prepare_seconds", 0.0) for line in timings),
            executions=journal.survivors(),
        )


def draw_nonfinite_steps(experiment: Experiment, seed: int) -> range:
    """Draws steps whose loss is made NaN, so that every run rolls back.

    Returns `optimizer.bad_steps_in_a_row` consecutive steps between the first save and the end; no
    steps if the run is too short, or would stop instead of rolling back.
    """
    optimizer, every = experiment.optimizer, experiment.run.checkpoint_every
    # After the step that follows the first save, and early enough to be noticed before the end.
    first, last = every + 1, experiment.total_steps - optimizer.bad_steps_in_a_row - 2
    if first > last or optimizer.after_bad_steps == "stop":
        return range(0)
    start = random.Random(seed).randint(first, last)
    return range(start, start + optimizer.bad_steps_in_a_row)


def draw(undisturbed: Undisturbed, count: int, seed: int) -> list[Round]:
    """Draws kills, equally many of each kind, in the order in which they come."""
    rng = random.Random(seed)
    kinds = [kind for kind in KINDS if kind != "at a roll-back" or undisturbed.rolled_back]
    kinds_in_turn = itertools.islice(itertools.cycle(kinds), count)
    rounds = [Round(kind, KINDS[kind](undisturbed, rng)) for kind in kinds_in_turn]
    return sorted(rounds, key=lambda round_: (round_.kind != "in prepare", round_.fault.step))


def _draw_step_fault(run: Undisturbed, rng: random.Random) -> Fault:
    after = rng.random() * run.step_seconds  # at any moment of the step
    return Fault("step", step=rng.randrange(run.total), after=after)


def _draw_save_fault(run: Undisturbed, rng: random.Random) -> Fault:
    # With more `progress` than files, the save is complete. The last save is killed at once.
    step = rng.choice(run.saves)
    most = run.saved_files + 2 if step < run.total else 1
    return Fault("save", step=step, progress=rng.randrange(most))


def _draw_evaluation_or_startup_fault(run: Undisturbed, rng: random.Random) -> Fault:
    if rng.random() < 0.5:
        after = rng.random() * run.evaluation_seconds
        return Fault("evaluation", step=rng.choice(run.evaluations), after=after)
    progress = rng.randrange(_STARTUP_MOMENTS)
    return Fault("startup", step=rng.randrange(run.total), progress=progress)


def _draw_roll_back_fault(run: Undisturbed, rng: random.Random) -> Fault:
    assert run.rolled_back is not None  # otherwise `draw` draws no kill of this kind
    done, restored = run.rolled_back
    redone = min(save for save in run.saves if save > restored) - restored
    return Fault("roll_back", step=done, progress=rng.randrange(redone))


# {kind of kill: function that draws the fault}.
KINDS: dict[str, Callable[[Undisturbed, random.Random], Fault]] = {
    "in a step": _draw_step_fault,
    # Not in the last step, after which a request to stop has no effect.
    "SIGTERM": lambda run, rng: Fault("step", signal.SIGTERM, rng.randrange(run.total - 1)),
    "in a save": _draw_save_fault,
    "in an evaluation or a start": _draw_evaluation_or_startup_fault,
    "at a roll-back": _draw_roll_back_fault,
    "in prepare": lambda run, rng: Fault(
        "prepare", after=rng.random() * _LATEST_SHARE * run.prepare_seconds
    ),
}


@dataclasses.dataclass(frozen=True)
class ChildResult:
    """The outcome of a start."""

    # The exit code; minus the signal's number; HUNG if it was killed for taking too long.
    code: int | str
    seconds: float  # duration
    tail: tuple[str, ...]  # last lines of the output

    def __str__(self) -> str:
        end = self.code if self.code == HUNG else f"ended with exit code {self.code}"
        return f"{end}: {'; '.join(self.tail) or 'no output'}"


@dataclasses.dataclass(frozen=True)
class Launcher:
    """Runs `bert-jax COMMAND EXPERIMENT --workdir W` in child processes, one after the other."""

    experiment: pathlib.Path  # a resolved config
    # Seconds after which a start counts as hung; None: no limit.
    timeout: float | None = None

    def run(
        self,
        command: Literal["pretrain", "prepare"],
        workdir: pathlib.Path,
        plan: Plan,
        settings: Sequence[str] = (),
    ) -> ChildResult:
        """Runs a command to its end; its output goes to W.log."""
        arguments = [command, str(self.experiment), "--workdir", str(workdir)]
        arguments += [word for setting in settings for word in ("--set", setting)]
        start_time = time.monotonic()
        with workdir.with_name(workdir.name + ".log").open("a+b") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                [sys.executable, "-m", CHILD, plan.to_json(), *arguments],
                env=os.environ | custom_code.environment() | {"PYTHONUNBUFFERED": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # else Ctrl-C would reach the child, and it would save
            )
            code: int | str
            try:
                code = process.wait(self.timeout)
            except subprocess.TimeoutExpired:
                code = HUNG
            finally:
                if process.returncode is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            log.seek(log_start)
            lines = log.read().decode(errors="replace").splitlines()
        return ChildResult(code, time.monotonic() - start_time, tuple(lines[-_TAIL_LINES:]))


# --- a run that is killed -------------------------------------------------------------------------


@dataclasses.dataclass
class Attempt:
    """One start of a run or of `prepare`, which is usually killed."""

    result: ChildResult  # how the process ended
    restored: int | None  # newest checkpoint's step when it was started; None for `prepare`
    done: int | None  # steps done when it was killed; None if the run ended before the kill
    differences: list[str]  # a line for each difference from what is expected


class ResumedRun:
    """A run that is restarted after each kill; each start is checked."""

    def __init__(self, launcher: Launcher, workdir: pathlib.Path, undisturbed: Undisturbed):
        self.workdir, self.journal = workdir, workdir.with_name(workdir.name + ".journal")
        self._launcher, self._undisturbed = launcher, undisturbed
        self._starts = 0
        self._min_step = 0  # the next start must resume from this step or a later one
        self.is_complete = False  # whether the run ended before its kill, without a difference

    def kill(self, round_: Round) -> Attempt:
        """Starts the run, and kills it as the round says."""
        attempt, rolled_back = self._start(round_.fault)
        result = attempt.result
        if attempt.done is None:
            if result.code != errors.FINISHED:
                attempt.differences.append(f"was to be killed, but {result}")
            self.is_complete = not attempt.differences
            return attempt
        self._min_step = self._min_checkpoint(round_.fault, attempt.done, rolled_back)
        wanted = errors.STOPPED if round_.fault.signal == signal.SIGTERM else -signal.SIGKILL
        # A request to stop has no effect in the last step.
        may_finish = wanted == errors.STOPPED and attempt.done + 1 == self._undisturbed.total
        if result.code != wanted and not (may_finish and result.code == errors.FINISHED):
            attempt.differences.append(f"was to end with exit code {wanted}, but {result}")
        return attempt

    def finish(self) -> list[str]:
        """Starts the run once more, to its end; returns differences from what is expected."""
        attempt, _ = self._start(None)
        if attempt.result.code != errors.FINISHED:
            attempt.differences.append(f"was to finish, but {attempt.result}")
        return attempt.differences

    def _start(self, fault: Fault | None) -> tuple[Attempt, tuple[int, int] | None]:
        """Starts the run with a fault; returns the attempt, and its roll-back as in `Journal`."""
        self._starts += 1
        saved, bad_steps = newest_checkpoint(self.workdir), self._undisturbed.nonfinite_steps
        plan = Plan(fault, str(self.journal), self._starts, nonfinite_steps=tuple(bad_steps))
        result = self._launcher.run("pretrain", self.workdir, plan)
        journal = Journal.read(self.journal)
        done = journal.killed.get(self._starts)
        done = None if done is None else max(done, saved)  # a kill may precede the first step
        differences = self._check_steps(journal.executions_of(self._starts), saved)
        return Attempt(result, saved, done, differences), journal.rolled_back.get(self._starts)

    def _check_steps(self, executions: list[Execution], saved: int) -> list[str]:
        """Checks that a start resumed from the newest checkpoint, with the planned batches."""
        differences = []
        if saved < self._min_step:
            differences.append(f"the newest checkpoint is of step {saved}, not of {self._min_step}")
        steps = [e.step for e in executions]
        if steps and steps[0] != saved:
            message = f"resumed from step {steps[0]}, but the newest checkpoint is of {saved}"
            differences.append(message)
        for before, after in itertools.pairwise(steps):
            if after > before + 1:
                differences.append(f"step {after} came after step {before}")
        return differences + compare.batches(executions, self._undisturbed.executions)

    def _min_checkpoint(self, fault: Fault, done: int, rolled_back: tuple[int, int] | None) -> int:
        """Returns the lowest step that the newest checkpoint may have after a kill."""
        run, saves_at_end = self._undisturbed, fault.signal == signal.SIGTERM
        reached = done + saves_at_end  # SIGTERM comes before a step, which is still done
        least = rolled_back[1] if rolled_back else self._min_step  # roll-backs delete newer ones
        # With these numbers of steps done, a run without a roll-back saves nothing: from the first
        # bad step on, until it has rolled back, up to one step later than the undisturbed run.
        bad = run.nonfinite_steps.start
        unsaved = range(bad + 1, run.rolled_back[0] + 2 if run.rolled_back else 0)
        if rolled_back is None and reached in unsaved:
            reached, saves_at_end = bad, False
        if saves_at_end:
            return max(least, reached)
        # A save waits for the save before it, so a kill loses at most the one in progress. The last
        # step was dispatched, but its save may not have begun.
        every = run.saves[0]
        return max(least, (reached - 1) // every * every - every)


def newest_checkpoint(workdir: pathlib.Path) -> int:
    """Returns the step of the newest complete checkpoint; 0 if there is none."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)
