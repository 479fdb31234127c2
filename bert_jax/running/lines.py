"""Metrics: from sums on devices to lines in a file.

metrics.jsonl is a function of experiment (with its logging intervals), corpus and step. On the same
machine a run that is killed and resumed writes the same bytes as one without interruption; other
cores or devices round sums differently. Everything that depends on time is in timings.jsonl.
"""

import statistics
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir

Sums = Mapping[str, np.ndarray]  # {name: [sum, count]}

# The `kind` of lines with an evaluation, in pre-training and in fine-tuning.
EVALUATIONS = ("evaluation", "scores")
# A spike is a loss above median + max(8 deviations, 10 %) of the last 20 lines; 5 are required.
_MOST_LINES, _FEWEST_LINES = 20, 5
_DEVIATIONS, _SHARE = 8.0, 0.1
# Standard deviation of a normal distribution, in units of its median absolute deviation.
_MAD_TO_DEVIATION = 1.4826


def mean_metrics(sums: Sums) -> dict[str, float]:
    """Divides each sum by its count; omits sums with a count of 0."""
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
    """Tells whether none of the last `patience` (step, loss) improved on the best before them.

    A patience of 0 disables early stopping.
    """
    losses = [loss for _, loss in held_out]
    return 0 < patience < len(losses) and min(losses[-patience:]) >= min(losses[:-patience])


class Spikes:
    """Finds training lines in which a step's loss jumps."""

    def __init__(self) -> None:
        self._highest: list[float] = []  # the highest loss of a step, of each recent line
        self._loss_names: list[str] = []  # of the previous line

    def check(self, line: Mapping[str, Any]) -> tuple[int, float, float] | None:
        """Returns (step, its loss, the usual highest loss of a line) if the line has a spike.

        Must be called once for each line of metrics.jsonl, in order.
        """
        loss = line.get("worst_step_loss")
        if line.get("kind") != "train" or not isinstance(loss, int | float):
            return None
        loss_names = sorted(name for name in line if name.endswith("_loss"))
        if loss_names != self._loss_names:  # a phase with another objective begins
            self._highest, self._loss_names = [], loss_names
        previous = self._highest[-_MOST_LINES:]
        self._highest = [*previous, float(loss)]
        if len(previous) < _FEWEST_LINES:
            return None
        usual = statistics.median(previous)
        deviation = _MAD_TO_DEVIATION * statistics.median(abs(x - usual) for x in previous)
        if loss <= usual + max(_DEVIATIONS * deviation, _SHARE * usual):
            return None
        return int(line["worst_step"]), float(loss), usual


class RunLines:
    """The JSON Lines files of a run; with several processes only one of them `writes`."""

    def __init__(self, workdir: Workdir, when_disk_is_full: Literal["stop", "go_on"], writes: bool):
        self._writes = writes
        self.metrics = JsonLines(workdir.metrics, when_disk_is_full)
        self.timings = JsonLines(workdir.timings, when_disk_is_full)
        # Their lines up to a checkpoint never change again.
        self._reproducible = {
            "metrics.jsonl": self.metrics,
            "predictions.jsonl": JsonLines(workdir.predictions, when_disk_is_full),
        }
        self.spikes = Spikes()

    def append(self, line: dict[str, Any], file: Literal["metrics", "predictions"]) -> None:
        """Adds a line to a file."""
        if self._writes:
            self._reproducible[f"{file}.jsonl"].append(line)

    def time(self, step: int, kind: str, values: Mapping[str, Any]) -> None:
        """Adds a line to the timings."""
        if self._writes:
            self.timings.append({"step": step, "kind": kind, "time": time.time(), **values})

    def flush(self) -> None:
        """Writes buffered lines."""
        for lines in (*self._reproducible.values(), self.timings):
            lines.flush()

    def tallies(self) -> dict[str, Any]:
        """Returns what a checkpoint saves about each file; see `JsonLines.tally`."""
        return {name: lines.tally() for name, lines in self._reproducible.items() if self._writes}

    def resume_from(self, step: int, tallies: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
        """Drops lines of later steps; yields each file with its lost lines, if it is missing.

        Keeps the timings of lost steps. `tallies` are those of the checkpoint at this step.
        """
        if not self._writes:
            return
        self.timings.delete_after(sys.maxsize)  # a last line that a kill has cut off
        yield "timings.jsonl", 0
        for name, lines in self._reproducible.items():
            yield name, lines.delete_after(step or -1, tallies.get(name))
        self.spikes = Spikes()
        for line in self.metrics.read():
            self.spikes.check(line)
