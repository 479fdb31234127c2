"""Steps that went wrong: which are left out after a roll-back, and losses that jump.

A step without a finite loss and gradient changes nothing (see training.step). A few of them are bad
luck; many in a row say that the parameters are broken, by the update before or by the hardware.
"""

import statistics
from collections.abc import Iterable, Mapping
from typing import Any

from bert_jax.config import SKIPPED_STEPS

# A jump is told from noise by the highest losses of the lines before it: so many of them, at least
# so many, and so many times their usual distance from their middle, or this share of it.
_LINES, _LEAST = 20, 5
_TIMES, _SHARE = 8.0, 0.1
# Of a normal distribution: standard deviations in a median distance.
_SPREAD = 1.4826


def bad_steps(reached: int, in_a_row: int, most: int) -> range | None:
    """The bad steps at the end of a state that is latched, else None.

    Args:
      reached: the state's `step`.
      in_a_row: its `bad_in_a_row`.
      most: `optimizer.bad_steps_in_a_row`.
    """
    return range(reached - in_a_row, reached) if in_a_row >= most else None


def left_out(skipped: Iterable[int], bad: range) -> tuple[tuple[int, ...], int]:
    """The steps to leave out after these were bad, and the one from which all is done again.

    Beside the bad ones, the last that was done before them: with its update the same would come
    again. With it left out the run takes another way.

    Args:
      skipped: steps that are left out already.
      bad: in a row.
    """
    known = set(skipped)
    first = bad[0]
    for step in range(bad[0] - 1, -1, -1):
        if step not in known:
            first = step
            break
    return tuple(sorted(known.union(bad, [first]))), first


def can_go_back(checkpoints: Iterable[int], first: int, every: int) -> bool:
    """Whether the newest state before a step is near enough for a roll-back to go on from it.

    A run that rolls back again and again needs older and older checkpoints, while only the newest
    are kept. What is older still, one kept for good or for its loss, or the state before step 0,
    may be thousands of steps away: to do them again is not for the run to decide.

    Args:
      checkpoints: steps of those that are there.
      first: the step from which all is done again.
      every: steps from one checkpoint to the next.

    Returns:
      True where no checkpoint is newer than `first` (a run that is killed goes on from the newest
      as well), or where at most two intervals are done again.
    """
    steps = list(checkpoints)
    before = max((step for step in steps if step <= first), default=0)
    return max(steps, default=0) <= first or first - before < 2 * every


def too_many(skipped: tuple[int, ...]) -> bool:
    """Whether a run cannot leave out so many steps."""
    return len(skipped) > SKIPPED_STEPS


class Spikes:
    """Finds lines of metrics.jsonl in which a step's loss jumps."""

    def __init__(self) -> None:
        self._highest: list[float] = []

    @classmethod
    def of(cls, lines: Iterable[Mapping[str, Any]]) -> "Spikes":
        """With these lines behind it."""
        spikes = cls()
        for line in lines:
            spikes.of_line(line)
        return spikes

    def of_line(self, line: Mapping[str, Any]) -> tuple[int, float, float] | None:
        """(step, its loss, the usual highest loss of a line) if the line has a jump.

        Args:
          line: of metrics.jsonl; each is looked at once, in their order.
        """
        loss = line.get("worst_step_loss")
        if line.get("kind") != "train" or not isinstance(loss, int | float):
            return None
        before, usual = self._highest[-_LINES:], 0.0
        self._highest = [*before, float(loss)]
        if len(before) < _LEAST:
            return None
        usual = statistics.median(before)
        spread = _SPREAD * statistics.median(abs(x - usual) for x in before)
        if loss <= usual + max(_TIMES * spread, _SHARE * usual):
            return None
        return int(line["worst_step"]), float(loss), usual
