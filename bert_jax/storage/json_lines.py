"""JSON Lines files whose lines each have a step: append, read, delete after a step, check."""

import hashlib
import json
import os
from typing import Any, Literal

from etils import epath

from bert_jax import errors
from bert_jax.errors import InputError
from bert_jax.storage.workdir import DiskFull, open_without_links, translate_os_errors, write_atomic


class JsonLines:
    """A file of JSON lines, each with a `step`. Each line is flushed to disk.

    With "go_on", lines wait in memory while the disk is full, else `append` raises DiskFull.
    """

    def __init__(self, path: epath.Path, when_disk_is_full: Literal["stop", "go_on"] = "stop"):
        self._path, self._when_disk_is_full = path, when_disk_is_full
        self._waiting = ""

    def append(self, line: dict[str, Any]) -> None:
        """Adds a line; JSON's decimals of a float read back as the same bits."""
        self._waiting += json.dumps(line, allow_nan=False) + "\n"
        try:
            self._write()
        except DiskFull:
            if self._when_disk_is_full == "stop":
                raise

    def _write(self) -> None:
        name = os.fspath(self._path)
        # Unbuffered: a buffer would keep bytes that a full disk refused, and write them on close.
        with (
            translate_os_errors(self._path),
            open(name, "ab", buffering=0, opener=open_without_links) as file,
        ):
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
        """Writes the waiting lines; raises DiskFull even with "go_on"."""
        if self._waiting:
            self._write()

    def read(self) -> list[dict[str, Any]]:
        """Returns all complete lines; drops a last line that a kill has cut off."""
        lines = []
        for number, text in enumerate(self._raw(), 1):
            if text.endswith(b"\n"):
                with errors.translate_parser_errors(f"{self._path}:{number}", "mend or remove it"):
                    line = json.loads(text)
                    line["step"] = int(line["step"])
                    lines.append(line)
        return lines

    def delete_after(self, step: int, expected: dict[str, Any] | None = None) -> int:
        """Deletes the lines of steps after `step`, including waiting lines.

        `expected` is what `tally()` returned at the checkpoint of this step. A missing file is not
        an error, since a user may have removed it. Returns the number of lines that were lost with
        a missing file, else 0.
        """
        self.flush()
        if expected and (damage := self.find_damage(step, expected)):
            raise InputError(
                f"{self._path}: damaged, {damage}; restore the file, or remove it to continue "
                "without its lines"
            )
        if not self._path.exists():
            return expected["lines"] if expected else 0
        lines = [line for line in self.read() if line["step"] <= step]
        write_atomic(self._path, "".join(json.dumps(line) + "\n" for line in lines))
        return 0

    def tally(self) -> dict[str, Any]:
        """Returns the number of lines and their SHA-256, which `find_damage` compares."""
        return _tally(self._raw())

    def find_damage(self, step: int, expected: dict[str, Any]) -> str:
        """Returns how the lines up to a checkpoint differ from their tally; "" if they do not."""
        if not self._path.exists():
            return ""
        count = sum(line["step"] <= step for line in self.read())  # steps ascend
        tally = _tally(self._raw()[:count])
        if tally == expected:
            return ""
        if missing := max(expected["lines"] - tally["lines"], 0):
            return f"{missing} of the {expected['lines']} lines up to step {step} are missing"
        return f"the lines up to step {step} are not those that were written"

    def _raw(self) -> list[bytes]:
        if not self._path.exists():
            return []
        with translate_os_errors(self._path):
            return self._path.read_bytes().splitlines(keepends=True)


def _tally(lines: list[bytes]) -> dict[str, Any]:
    return {"lines": len(lines), "sha256": hashlib.sha256(b"".join(lines)).hexdigest()}
