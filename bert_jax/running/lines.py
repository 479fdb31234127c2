"""Metrics from sums on devices to lines in a file.

metrics.jsonl is a function of experiment (its logging intervals included), corpus and step: on the
same machine two runs, one of them killed and resumed as often as you like, write the same bytes;
other cores or devices round sums otherwise. What depends on the hour stands in timings.jsonl.
"""

import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir

Sums = Mapping[str, np.ndarray]  # {name: [sum, count]}

# Kinds of lines of an evaluation: of pre-training, and of a task.
EVALUATIONS = ("evaluation", "scores")
# A spike: a loss above the median + max(8 deviations, 10 %) of the last 20 lines, 5 at least.
_WINDOW, _LEAST = 20, 5
_TIMES, _SHARE = 8.0, 0.1
# Standard deviations in the median distance of a normal distribution.
_DEVIATION = 1.4826


def means(sums: Sums) -> dict[str, float]:
    """Divides each sum by its count; what was never counted is left out."""
    return {name: float(s) / float(n) for name, (s, n) in sorted(sums.items()) if n}


def skipped_steps(lines: Iterable[Mapping[str, Any]], excluded: Iterable[int]) -> tuple[int, str]:
    """Returns how many steps of a run changed no parameter, and which ones, in words.

    `lines` are those of metrics.jsonl, `excluded` the steps that roll-backs excluded. `bad_steps`
    of a training line is a share of the steps since the previous training line, excluded steps
    among them. Except for excluded steps, a line gives only the number of its bad steps.
    """
    known, partial_ranges, unknown_count, start = set(excluded), [], 0, 0
    for line in lines:
        if line["kind"] != "train":
            continue
        steps, start = range(start, line["step"]), line["step"]
        bad = round(line.get("bad_steps", 0.0) * len(steps))
        if 0 < bad == len(steps):
            known.update(steps)
        elif (bad := bad - len(known.intersection(steps))) > 0:
            unknown_count += bad
            partial_ranges.append(f"{bad} of {steps[0]} to {steps[-1]}")
    ordered = sorted(known)
    first = [step for step in ordered if step - 1 not in known]
    last = [step for step in ordered if step + 1 not in known]
    ranges = [f"{a} to {b}" if a < b else f"{a}" for a, b in zip(first, last, strict=True)]
    return unknown_count + len(known), ", ".join([*ranges, *partial_ranges])


def should_stop_early(held_out: Sequence[tuple[int, float]], patience: int) -> bool:
    """Tells whether the last `patience` of all (step, loss) have no loss below those before them.

    With a patience of 0 it is never in vain.
    """
    losses = [loss for _, loss in held_out]
    return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])


class Spikes:
    """Finds training lines in which a step's loss jumps."""

    def __init__(self) -> None:
        self._highest: list[float] = []
        self._learned: list[str] = []  # the losses of the line before

    def of_line(self, line: Mapping[str, Any]) -> tuple[int, float, float] | None:
        """Returns (step, its loss, the usual highest loss of a line) if the line has a jump.

        Each line of metrics.jsonl is looked at once, in their order.
        """
        loss = line.get("worst_step_loss")
        if line.get("kind") != "train" or not isinstance(loss, int | float):
            return None
        learned = sorted(name for name in line if name.endswith("_loss"))
        if learned != self._learned:  # another phase's objective, whose losses are others
            self._highest, self._learned = [], learned
        before, usual = self._highest[-_WINDOW:], 0.0
        self._highest = [*before, float(loss)]
        if len(before) < _LEAST:
            return None
        usual = statistics.median(before)
        spread = _DEVIATION * statistics.median(abs(x - usual) for x in before)
        if loss <= usual + max(_TIMES * spread, _SHARE * usual):
            return None
        return int(line["worst_step"]), float(loss), usual


class RunLines:
    """The files of lines of a run; of several processes one `writes`, and the others keep none."""

    def __init__(self, workdir: Workdir, when_full: Literal["stop", "go_on"], writes: bool):
        self._writes = writes
        self.metrics = JsonLines(workdir.metrics, when_full)
        self.timings = JsonLines(workdir.timings, when_full)
        # Whose lines up to a checkpoint never change again.
        self._lasting = {
            "metrics.jsonl": self.metrics,
            "predictions.jsonl": JsonLines(workdir.predictions, when_full),
        }
        self.spikes = Spikes()

    def append(self, line: dict[str, Any], file: Literal["metrics", "predictions"]) -> None:
        """Adds a line to a file."""
        if self._writes:
            self._lasting[f"{file}.jsonl"].append(line)

    def time(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Adds a line to the timings."""
        if self._writes:
            self.timings.append({"step": step, "kind": kind, "time": time.time(), **values})

    def flush(self) -> None:
        """Writes what is not written yet."""
        for lines in (*self._lasting.values(), self.timings):
            lines.flush()

    def written(self) -> dict[str, Any]:
        """Returns what a checkpoint keeps about its lines; see `JsonLines.written`."""
        return {name: lines.written() for name, lines in self._lasting.items() if self._writes}

    def go_on_from(self, step: int, written: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        """Drops lines of later steps; yields each file that is not there, and its lines."""
        if not self._writes:
            return
        for name, lines in self._lasting.items():
            if gone := lines.forget_after(step or -1, written.get(name)):
                yield name, gone
        self.spikes = Spikes()
        for line in self.metrics.read():
            self.spikes.of_line(line)
