"""What victims did, step by step, in a file that outlives them.

A line is one JSON object, written in one call to a file opened for appending, so that neither a
kill nor a second process can cut it:

    {"kind": "step", "start": N, "process": P, "step": S, "rows": [...], "hashes": [...]}
    {"kind": "killed", "start": N, "process": P, "done": S}
    {"kind": "rolled_back", "start": N, "process": P, "done": S, "to": S}
    {"kind": "prepared", "start": N, "process": P, "seconds": T}
"""

import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


class Notebook:
    """Appends notes of one process.

    Args:
      path: of the file; "" keeps none.
      start: number of the start.
      process: number of the process.
    """

    def __init__(self, path: str, start: int, process: int):
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY
        self._file = os.open(path, flags, 0o644) if path else None
        self._who = {"start": start, "process": process}

    def write(self, kind: str, values: Mapping[str, Any]) -> None:
        """Adds a note."""
        if self._file is not None:
            line = json.dumps({"kind": kind, **self._who, **values}) + "\n"
            os.write(self._file, line.encode())


def rows_of(batch: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """(row, hash of all that it holds) of the rows on this process's devices.

    Args:
      batch: arrays of jax, the same rows of each on one device.
    """
    names = sorted(batch)
    for shards in zip(*(batch[name].addressable_shards for name in names), strict=True):
        arrays = dict(zip(names, (np.asarray(shard.data) for shard in shards), strict=True))
        for i, row in enumerate(arrays["rows"].tolist()):
            held = b"".join(arrays[name][i].tobytes() for name in names)
            yield row, int.from_bytes(hashlib.blake2b(held, digest_size=8).digest())


@dataclasses.dataclass
class Execution:
    """A step that was handed to the devices.

    Attributes:
      start: number of the start that did it.
      step: steps done before it.
      rows: uint64 [B], rising.
      hashes: uint64 [B], of what they held.
    """

    start: int
    step: int
    rows: np.ndarray
    hashes: np.ndarray

    def same_batch(self, other: "Execution") -> bool:
        """Whether both saw the same rows, and the same in them."""
        return np.array_equal(self.rows, other.rows) and np.array_equal(self.hashes, other.hashes)


@dataclasses.dataclass
class Notes:
    """A file of notes, read.

    Attributes:
      executions: in the order in which they were begun; what several processes did of a step is
        one of them.
      killed: {start: steps done when it was killed}.
      rolled_back: {start: (steps done, steps done where it went back to)}.
      prepare_seconds: what making the corpus took; None if nothing was made.
    """

    executions: list[Execution]
    killed: dict[int, int]
    rolled_back: dict[int, tuple[int, int]]
    prepare_seconds: float | None

    @classmethod
    def read(cls, path: pathlib.Path) -> "Notes":
        """Reads a file of notes; none if it is not there."""
        notes = cls([], {}, {}, None)
        parts: dict[tuple[int, int, int], list[dict[str, Any]]] = {}
        times: dict[tuple[int, int, int], int] = {}
        for line in path.read_text().splitlines() if path.exists() else ():
            note = json.loads(line)
            if note["kind"] == "killed":
                notes.killed[note["start"]] = note["done"]
            elif note["kind"] == "rolled_back":
                notes.rolled_back[note["start"]] = (note["done"], note["to"])
            elif note["kind"] == "prepared":
                notes.prepare_seconds = note["seconds"]
            else:
                # A process may do a step again within one start.
                mine = (note["start"], note["process"], note["step"])
                times[mine] = times.get(mine, 0) + 1
                parts.setdefault((note["start"], note["step"], times[mine]), []).append(note)
        for (start, step, _), found in parts.items():
            pairs: dict[int, int] = {}
            for note in found:
                pairs |= dict(zip(note["rows"], note["hashes"], strict=True))
            rows = np.array(sorted(pairs), np.uint64)
            hashes = np.array([pairs[row] for row in sorted(pairs)], np.uint64)
            notes.executions.append(Execution(start, step, rows, hashes))
        return notes

    def of_start(self, start: int) -> list[Execution]:
        """What one start did, in order."""
        return [e for e in self.executions if e.start == start]

    def survivors(self) -> dict[int, Execution]:
        """{step: its last execution}: what the newest state is made of."""
        return {e.step: e for e in self.executions}
