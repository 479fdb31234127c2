"""A run that is killed and started again, killed and started again."""

import dataclasses
import itertools
import pathlib
import signal

from bert_jax import errors
from bert_jax.verify.children import Children, Ended
from bert_jax.verify.notes import Execution, Notes
from bert_jax.verify.orders import Death, Order
from bert_jax.verify.rounds import Round


@dataclasses.dataclass
class Killed:
    """What came of one round.

    Attributes:
      ended: how the process ended.
      began: the newest checkpoint when it started; None of what is no run.
      done: steps done when it was killed; None if it was not: the run came to its end before.
      differences: what is not as it should be, a line each.
    """

    ended: Ended
    began: int | None
    done: int | None
    differences: list[str]


class Lineage:
    """One workdir, and what all its starts noted.

    Args:
      children: start the command.
      workdir: of the run.
      checkpoint_every: steps between two saves.
      planned: {step: what the undisturbed run did there}.
      not_finite: steps in a row whose loss is made not to be.
      caught: steps done when the undisturbed run went back over them.
    """

    def __init__(
        self,
        children: Children,
        workdir: pathlib.Path,
        checkpoint_every: int,
        planned: dict[int, Execution],
        not_finite: range = range(0),
        caught: int = 0,
    ):
        self.workdir, self.notes = workdir, workdir.with_name(workdir.name + ".notes")
        self._children, self._every, self._planned = children, checkpoint_every, planned
        self._not_finite = not_finite
        # Steps done at which nothing is saved, unless the run went back before.
        self._unsaved = range(not_finite.start + 1, caught + 2) if not_finite else range(0)
        self._starts = 0
        self._least = 0  # the step from which the next start must go on at least

    def kill(self, one: Round) -> Killed:
        """Starts it, which ends as the round says."""
        saved = newest_checkpoint(self.workdir)
        ended, start = self._run(one.death)
        notes = Notes.read(self.notes)
        executions, done = notes.of_start(start), notes.killed.get(start)
        if done is not None:
            done = max(done, saved)  # it may have died before its first step
        found = Killed(ended, saved, done, [])
        found.differences += self._batches(executions, saved)
        if done is None:
            if ended.code != errors.FINISHED:
                found.differences.append(f"was to be killed and {_ended(ended)}")
            return found
        went_back = notes.rolled_back.get(start)
        self._least = self._whole(one.death, done, went_back)
        expected = errors.STOPPED if one.death.signal == signal.SIGTERM else -signal.SIGKILL
        # A request to stop that comes in the last step finds the run finished.
        at_end = expected == errors.STOPPED and done + 1 == len(self._planned)
        if ended.code != expected and not (at_end and ended.code == errors.FINISHED):
            found.differences.append(f"was to end with exit code {expected} and {_ended(ended)}")
        return found

    def finish(self) -> list[str]:
        """Starts it once more, to its end; returns what is not as it should be."""
        saved = newest_checkpoint(self.workdir)
        ended, start = self._run(None)
        wrong = self._batches(Notes.read(self.notes).of_start(start), saved)
        if ended.code != errors.FINISHED:
            wrong.append(f"was to finish and {_ended(ended)}")
        return wrong

    def _run(self, death: Death | None) -> tuple[Ended, int]:
        self._starts += 1
        order = Order(death, str(self.notes), self._starts, not_finite=tuple(self._not_finite))
        return self._children.run("pretrain", self.workdir, order), self._starts

    def _batches(self, executions: list[Execution], saved: int) -> list[str]:
        """Whether a start went on from the newest checkpoint, with the planned batches."""
        wrong = []
        if saved < self._least:
            wrong.append(f"the newest checkpoint is of step {saved}, not of {self._least}")
        steps = [e.step for e in executions]
        if steps and steps[0] != saved:
            wrong.append(f"went on from step {steps[0]}, and the newest checkpoint is of {saved}")
        for before, after in itertools.pairwise(steps):
            if after > before + 1:
                wrong.append(f"step {after} came after step {before}")
        return wrong + other_batches(executions, self._planned)

    def _whole(self, death: Death, done: int, went_back: tuple[int, int] | None) -> int:
        """The step of the newest checkpoint there must be after a death, at least."""
        least, saves = self._least, death.signal == signal.SIGTERM
        reached = done + saves
        if went_back is not None:
            least = went_back[1]  # newer ones went with the steps
        elif reached in self._unsaved:
            reached, saves = self._not_finite.start, False
        if saves:
            return max(least, reached)
        # A save waits for the one before it, so no more than the newest of those begun is lost; and
        # the last step was handed over, what follows it perhaps not begun.
        return max(least, (reached - 1) // self._every * self._every - self._every)


def newest_checkpoint(workdir: pathlib.Path) -> int:
    """The step of the newest whole checkpoint; 0 if there is none."""
    folder = workdir / "checkpoints"
    names = [path.name for path in folder.iterdir()] if folder.exists() else []
    return max((int(name) for name in names if name.isdecimal()), default=0)


def other_batches(executions: list[Execution], planned: dict[int, Execution]) -> list[str]:
    """Steps that did not see the rows of the plan, or saw others in them: the first, and how many.

    Args:
      executions: what was done.
      planned: {step: what the undisturbed run did there}.
    """
    wrong = [e for e in executions if e.step not in planned or not e.same_batch(planned[e.step])]
    if not wrong:
        return []
    first = wrong[0]
    if first.step not in planned:
        return [f"step {first.step} was done, which is none of the run"]
    rows = f"rows {_span(first)}, planned {_span(planned[first.step])}"
    return [f"{len(wrong)} steps saw another batch, the first is step {first.step}: {rows}"]


def _span(execution: Execution) -> str:
    return f"{execution.rows[0]} to {execution.rows[-1]}"


def _ended(ended: Ended) -> str:
    said = "; ".join(ended.tail) or "said nothing"
    return f"ended with exit code {ended.code}: {said}"
