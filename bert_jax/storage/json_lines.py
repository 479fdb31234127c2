"""A file of JSON lines, each of a step: append, read, cut back to a step, check for damage."""

import hashlib
import json
import os
from typing import Any, Literal

from etils import epath

from bert_jax import errors
from bert_jax.errors import InputError
from bert_jax.storage.workdir import DiskFull, no_link, translate_os_errors, write_atomic


class JsonLines:
    """A file of JSON lines, each with a `step`, flushed as it is written."""

    def __init__(self, path: epath.Path, when_full: Literal["stop", "go_on"] = "stop"):
        # On a full disk `go_on` lets lines wait until there is space.
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
        # Without a buffer, which would hold what a full disk refused, and write it when it closes.
        with translate_os_errors(self._path), open(name, "ab", buffering=0, opener=no_link) as file:
            before, left = file.tell(), self._waiting.encode()
            try:
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
            except OSError:
                file.truncate(before)
                raise
        self._waiting = ""

    def flush(self) -> None:
        """Writes the waiting lines; a full disk is an error here, with `go_on` too."""
        if self._waiting:
            self._write()

    def read(self) -> list[dict[str, Any]]:
        """Returns all whole lines; a last one cut off by a kill is left out."""
        lines = []
        for number, text in enumerate(self._raw(), 1):
            if text.endswith(b"\n"):
                with errors.reading(f"{self._path}:{number}", "mend or remove it"):
                    line = json.loads(text)
                    line["step"] = int(line["step"])
                    lines.append(line)
        return lines

    def forget_after(self, step: int, written: dict[str, Any] | None = None) -> int:
        """Drops the lines of steps after `step`, including lines that are not written yet.

        `written` is what `written()` returned at this step's checkpoint. A missing file is taken
        for removed on purpose. Returns how many lines a missing file had, else 0.
        """
        self.flush()
        if written and (damage := self.damage(step, written)):
            raise InputError(
                f"{self._path}: damaged, {damage}; put the whole file back, or remove it to go on "
                "without its lines"
            )
        if not self._path.exists():
            return written["lines"] if written else 0
        lines = [line for line in self.read() if line["step"] <= step]
        write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        return 0

    def written(self) -> dict[str, Any]:
        """Returns how many lines there are, and their SHA-256; see `damage`."""
        return _tally(self._raw())

    def damage(self, step: int, written: dict[str, Any]) -> str:
        """Returns what is wrong with the lines `written` up to a checkpoint; "" if nothing is."""
        if not self._path.exists():
            return ""
        tally = _tally(self._raw()[: sum(line["step"] <= step for line in self.read())])
        if tally == written:
            return ""
        if missing := max(written["lines"] - tally["lines"], 0):
            return f"{missing} of the {written['lines']} lines up to step {step} are missing"
        return f"the lines up to step {step} are not those that were written"

    def _raw(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with translate_os_errors(self._path):
            return self._path.read_bytes().splitlines(keepends=True)


def _tally(lines: list[bytes]) -> dict[str, Any]:
    return {"lines": len(lines), "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}
