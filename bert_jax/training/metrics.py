"""Metrics from sums on devices to lines in a file.

metrics.jsonl is a function of experiment (its logging intervals included), corpus and step alone:
two runs of the same claim, one of them killed and resumed as often as you like, write the same
bytes. What depends on the machine and the hour stands in timings.jsonl.
"""

import json
import math
import os
from collections.abc import Mapping
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax.bucket import Growing, is_bucket
from bert_jax.config import InputError
from bert_jax.workdir import DiskFull, named_errors, write_atomic

Sums = Mapping[str, np.ndarray]  # {name: [sum, count]}


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

    In a bucket, where nothing can be appended, it is written now and then, and by `flush`.

    Args:
      path: of the file.
      when_full: whether a full disk is an error, or lines wait until there is space.
    """

    def __init__(self, path: epath.Path, when_full: Literal["stop", "go_on"] = "stop"):
        self._path, self._when_full = path, when_full
        self._object = Growing(path) if is_bucket(path) else None
        self._waiting = ""

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line, with numbers that read back as the same bits."""
        text = json.dumps(line, allow_nan=False) + "\n"
        if self._object is not None:
            with named_errors(self._path):
                self._object.append(text)
            return
        self._waiting += text
        try:
            self._write()
        except DiskFull:
            if self._when_full == "stop":
                raise

    def _write(self) -> None:
        with named_errors(self._path), self._path.open("ab") as file:
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
        if self._object is not None:
            with named_errors(self._path):
                self._object.write()
        elif self._waiting:
            self._write()

    def read(self) -> list[dict[str, Any]]:
        """All whole lines; a last one cut off by a kill is left out.

        Raises:
          InputError: another line is not JSON.
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
            if not isinstance(lines[-1], dict) or not isinstance(lines[-1].get("step"), int):
                raise InputError(
                    f"{self._path}:{number}: not a line of a run (no step); remove the line"
                )
        return lines

    def forget_after(self, step: int) -> None:
        """Drops lines of steps that will be done again; to be called before any is added."""
        lines = [line for line in self.read() if line["step"] <= step]
        if self._path.exists():
            write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in lines))


class NoLines(Lines):
    """Takes lines and keeps none: one process of several writes."""

    def append(self, line: dict[str, Any]) -> None:
        """Does nothing."""

    def forget_after(self, step: int) -> None:
        """Does nothing."""
