"""Metrics from sums on devices to lines in a file.

metrics.jsonl is a function of experiment (its logging intervals included), corpus and step alone:
two runs of the same claim, one of them killed and resumed as often as you like, write the same
bytes. What depends on the machine and the hour stands in timings.jsonl.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage.workdir import DiskFull, named_errors, no_link, write_atomic

Sums = Mapping[str, np.ndarray]  # {name: [sum, count]}

# Kinds of lines that tell of an evaluation: of pre-training, and of a task.
EVALUATIONS = ("evaluation", "scores")
OUTCOMES = ("finished", "stopped", "failed")

# What a line holds beside its step, by file and kind.
_TIMES = ("time", "seconds", "steps")
_NEEDED: dict[str, dict[str | None, tuple[str, ...]]] = {
    "metrics.jsonl": {
        "train": (),
        "evaluation": (
            "masked_lm_loss",
            "masked_lm_accuracy",
            "unigram_loss",
            "next_sentence_accuracy",
            "next_sentence_majority",
            "next_sentence_error",
            "rows",
        ),
        "scores": ("loss", "score", "examples"),
        "probes": ("scores", "majority"),
    },
    "predictions.jsonl": {"predictions": ("sentences",)},
    "timings.jsonl": {
        "start": _TIMES,
        "train": _TIMES,
        "roll_back": (*_TIMES, "bad", "skipped"),
        "end": (*_TIMES, "outcome"),
        None: ("seconds",),  # of older versions, which knew steps alone
    },
}
# What a training line holds that has a loss; without one, all its steps were skipped.
_WITH_LOSS = ("next_sentence_loss", "gradient_norm")
_SHARES = (
    "masked_lm_accuracy",
    "next_sentence_accuracy",
    "next_sentence_majority",
    "filled",
    "bad_steps",
)
# None is negative, and none that floats of 32 bits give is larger.
_LARGEST = 1e39


def fetch(arrays: Any) -> Any:
    """Waits for the device and reads a tree of sums."""
    return jax.device_get(arrays)


def means(sums: Sums) -> dict[str, float]:
    """Each sum divided by its count; what was never counted is left out."""
    return {name: float(s) / float(n) for name, (s, n) in sorted(sums.items()) if n}


def next_sentence_error(accuracy: float, count: float) -> float:
    """Standard error of an accuracy over `count` independent pairs."""
    return math.sqrt(max(accuracy * (1 - accuracy), 0.0) / count)


class Lines:
    """A file of JSON lines, each with a `step`, flushed as it is written.

    Args:
      path: of the file.
      when_full: whether a full disk is an error, or lines wait until there is space.
    """

    def __init__(self, path: epath.Path, when_full: Literal["stop", "go_on"] = "stop"):
        self._path, self._when_full = path, when_full
        self._waiting = ""

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line, with numbers that read back as the same bits."""
        self._waiting += json.dumps(line, allow_nan=False) + "\n"
        try:
            self._write()
        except DiskFull:
            if self._when_full == "stop":
                raise

    def _write(self) -> None:
        name = os.fspath(self._path)
        with named_errors(self._path), open(name, "ab", opener=no_link) as file:
            before = file.tell()
            try:
                file.write(self._waiting.encode())
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
        self._waiting = ""

    def flush(self) -> None:
        """Writes what is not written yet: whatever may follow, these lines are there."""
        if self._waiting:
            self._write()

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a last one cut off by a kill is left out.

        Raises:
          InputError: another line is not JSON, or none that a run has written.
        """
        if not self._path.exists():
            return []
        with named_errors(self._path):
            raw = self._path.read_bytes().split(b"\n")
        lines = []
        for number, text in enumerate(raw[:-1], 1):
            try:
                lines.append(json.loads(text))
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f"{self._path}:{number}: not JSON ({error}); mend or remove the line"
                ) from error
            fault = _fault(self._path.name, lines)
            if fault:
                raise InputError(
                    f"{self._path}:{number}: not a line of a run ({fault}); mend or remove it"
                )
        return lines

    def forget_after(self, step: int, written: dict[str, Any] | None = None) -> None:
        """Drops lines of steps that will be done again, those not yet written among them.

        A file that is not there is taken for removed on purpose.

        Args:
          step: up to which lines are kept.
          written: what `written` said when the checkpoint of this step was saved; None: nothing.

        Raises:
          InputError: the lines up to the step are not those.
        """
        self.flush()
        damage = self.damage(step, written) if written else ""
        if damage:
            raise InputError(
                f"{self._path}: damaged, {damage}; put the whole file back, or remove it to go on "
                "without its lines"
            )
        lines = [line for line in self.read() if line["step"] <= step]
        if self._path.exists():
            write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in lines))

    def written(self) -> dict[str, Any]:
        """Returns how many lines there are, and their SHA-256; see `damage`."""
        with named_errors(self._path):
            data = self._path.read_bytes() if self._path.exists() else b""
        return _tally(data.splitlines(keepends=True))

    def damage(self, step: int, written: dict[str, Any]) -> str:
        """Returns what is wrong with the lines up to a checkpoint, in words; "" if nothing is.

        Args:
          step: of the checkpoint.
          written: what `written` said when it was saved.
        """
        if not self._path.exists():
            return ""
        with named_errors(self._path):
            data = self._path.read_bytes().splitlines(keepends=True)
        found = _tally(data[: sum(line["step"] <= step for line in self.read())])
        if found == written:
            return ""
        if found["lines"] < written["lines"]:
            return (
                f"{written['lines'] - found['lines']} of the {written['lines']} lines up to step "
                f"{step} are missing"
            )
        return f"the lines up to step {step} are not those that were written"


def _tally(lines: list[bytes]) -> dict[str, Any]:
    return {"lines": len(lines), "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}


class NoLines(Lines):
    """Takes lines and keeps none: one process of several writes."""

    def read(self) -> list[dict[str, Any]]:
        """None: the file may be another process's, or left from another start."""
        return []

    def written(self) -> dict[str, Any]:
        """None."""
        return {}

    def append(self, line: dict[str, Any]) -> None:
        """Does nothing."""

    def forget_after(self, step: int, written: dict[str, Any] | None = None) -> None:
        """Does nothing."""


def _fault(file: str, lines: list[Any]) -> str:
    """What is wrong with the last of a file's lines, in words; "" if nothing is."""
    line = lines[-1]
    if not isinstance(line, dict) or type(line.get("step")) is not int:
        return "no step"
    if not 0 <= line["step"] < _LARGEST:
        return "its step cannot be"
    if file not in _NEEDED:
        return ""
    kind = line.get("kind")
    if kind not in list(_NEEDED[file]):
        return f"its kind is {kind!r}"
    if file != "timings.jsonl":  # where steps that are done again are kept
        if len(lines) > 1 and line["step"] < lines[-2]["step"]:
            return "its step lies before that of the line above"
        if kind == "train" and not line["step"]:
            return "its step cannot be"
    needed = _NEEDED[file][kind]
    if kind == "train" and "masked_lm_loss" in line:
        needed += _WITH_LOSS
    missing = [name for name in needed if name not in line]
    if missing:
        return f"no {missing[0]}"
    wrong = [name for name, value in line.items() if not _can_be(kind, name, value)]
    return f"its {wrong[0]} cannot be" if wrong else ""


def _can_be(kind: str, name: str, value: Any) -> bool:
    """Whether a value of a line is of its kind and in its range."""
    if name == "kind":
        return True
    if name == "outcome":
        return value in OUTCOMES
    if name == "environment":
        return isinstance(value, dict)
    if name == "sentences":
        return isinstance(value, list) and all(map(_is_sentence, value))
    if kind == "roll_back" and name in ("bad", "skipped"):
        steps = isinstance(value, list) and all(type(step) is int for step in value)
        return steps and (name == "skipped" or len(value) == 2)
    if (
        kind in ("start", "roll_back", "end")
        and name not in _TIMES
        and not name.endswith("_seconds")
    ):
        return True  # nobody reads it
    if kind == "scores":  # correlations and thresholds may be negative
        return _is_score(value)
    if kind == "probes" and name != "step":
        return isinstance(value, dict) and all(map(_is_score, value.values()))
    return _is_number(value) and (name not in _SHARES or value <= 1)


def _is_score(value: Any) -> bool:
    return _is_number(abs(value)) if type(value) in (int, float) else False


def _is_sentence(value: Any) -> bool:
    """Whether this is what `watch.Watched.predict` says of a sentence."""
    return (
        isinstance(value, dict)
        and isinstance(value.get("text"), str)
        and isinstance(value.get("truth", ""), str)
        and _is_number(value.get("truth_probability", 0.0))
        and isinstance(value.get("masks"), list)
        and all(
            isinstance(said, list)
            and len(said) == 2
            and isinstance(said[0], str)
            and _is_number(said[1])
            for pieces in value["masks"]
            for said in (pieces if isinstance(pieces, list) else [None])
        )
    )


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < _LARGEST
