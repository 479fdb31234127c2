"""Plans of a phase, epoch by epoch, made once a host and mapped by all its processes.

A plan of a small split takes a tenth of a second and is made in memory by the process that needs
it. Plans of a large split are files in the cache of this host. A child process makes such a file
ahead of the epoch, so that neither the interpreter's lock nor the end of a run waits for it; the
child ends when its parent closes it or dies.

    CACHE/plans/NAME.plan   the chunks (`data.pairs`) in the random order of the epoch, an array as
                            `np.save` writes it; NAME is a hash of everything that determines it
    CACHE/plans/NAME.lock   held by the process whose child makes the plan

A truncated file is removed and made again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from etils import epath

from bert_jax import errors
from bert_jax.data import draws, pairs, sentences
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError, Unavailable
from bert_jax.process import prepare_process
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import (
    cache_folder,
    new_file,
    open_without_links,
    parse_json,
    translate_os_errors,
    with_checksum,
)

Units = Literal["pairs", "swapped_pairs", "sentences"]

# Versions of the file of counts, and of plans: of their random rules and of their files.
COUNTS_VERSION, PLAN_VERSION = 2, 4

# Most recently used plans that a host keeps: enough for three runs.
_PLANS_KEPT = 8
# Seconds after which locks and the files of killed workers are removed.
_STALE_SECONDS = 24 * 3600.0
# Chunks per write.
_CHUNKS = 1 << 20
# Up to this many sentences a plan is made in memory.
_IN_MEMORY = 1 << 20
# The worker of a plan may be killed fewer times than this.
_DEATHS = 3
# Seconds between two checks for a plan.
_POLL_SECONDS = 0.02
# Seconds for which a bucket may fail before counts are not fetched or sent.
_SECONDS = 10.0


class PlanSpec(NamedTuple):
    """Everything that determines an epoch's plan, except the token stream."""

    names: tuple[object, ...]  # (seed, split, phase): with the epoch the key of its draws
    epoch: int
    sequence_length: int  # of a row, specials included
    short_seq_prob: float  # share of documents cut into shorter pairs
    units: Units

    def make(self, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunks in the order of documents, and their random order in the epoch."""
        key, length = draws.key_of(*self.names, self.epoch), self.sequence_length
        if self.units == "sentences":
            chunks = sentences.plan(stream, length, key)
        else:
            chunks = pairs.plan(stream, length, self.short_seq_prob, key, self.units)
        return chunks, draws.permutation(draws.key_of(*self.names), self.epoch, len(chunks))

    def plan(self, stream: Stream) -> np.ndarray:
        """Makes the plan in memory: chunks in the epoch's order, `pairs.chunk_dtype` [rows]."""
        chunks, order = self.make(stream)
        return chunks[order]


def read(path: str) -> np.ndarray | None:
    """Maps a plan; returns None if it is missing or truncated."""
    try:
        chunks = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        return None
    except ValueError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # `_prune` deletes by date
    return chunks


def write(path: str, stream: Stream, spec: PlanSpec) -> None:
    """Makes a plan and writes it; deletes the least recently used plans."""
    chunks, order = spec.make(stream)
    with new_file(epath.Path(path)) as temporary, open(temporary, "wb") as file:
        header = {"descr": chunks.dtype.descr, "fortran_order": False, "shape": chunks.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(order), _CHUNKS):
            file.write(chunks[order[start : start + _CHUNKS]].tobytes())
    _prune(os.path.dirname(path))


def _prune(folder: str) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        dates = {entry.path: entry.stat().st_mtime for entry in entries}
        plans = sorted((p for p in dates if p.endswith(".plan")), key=dates.__getitem__)
        oldest = time.time() - _STALE_SECONDS
        stale = [p for p in dates if not p.endswith(".plan") and dates[p] < oldest]
        for path in plans[:-_PLANS_KEPT] + stale:
            os.unlink(path)


class PlanWorker:
    """A process that makes a plan; its lock keeps other processes of this host from doing so."""

    def __init__(self, path: str, stream: Stream, spec: PlanSpec, lock: IO[bytes]):
        self._lock = lock
        # In its own session, so that Ctrl-C reaches only the parent; ends with its standard input.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bert_jax.data.plans"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process was killed
            pickle.dump((path, stream, spec), self.process.stdin)
            self.process.stdin.flush()

    @classmethod
    def begin(cls, path: str, stream: Stream, spec: PlanSpec) -> "PlanWorker | None":
        """Starts to make a plan; returns None if another process makes or has made it."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock = open(f"{path.removesuffix('.plan')}.lock", "ab", opener=open_without_links)  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(path):
                return cls(path, stream, spec, lock)
        except BlockingIOError:
            pass
        lock.close()
        return None

    def has_ended(self) -> bool:
        """Returns whether the process has ended, perhaps by a signal; raises its error."""
        if self.process.poll() is None:
            return False
        output = self.close()
        if (code := self.process.returncode) > 0:
            types = {errors.BAD_INPUT: InputError, errors.UNAVAILABLE: Unavailable}
            line = output.decode(errors="replace").strip()
            raise types.get(code, RuntimeError)(line or "the process that plans an epoch failed")
        return True

    def close(self) -> bytes:
        """Ends the process; returns its output."""
        self.process.kill()
        output, _ = self.process.communicate()
        self._lock.close()
        return output


@dataclass
class Plans:
    """The plans of a phase. May be pickled; safe for threads."""

    stream: Stream  # the split
    names: tuple[object, ...]  # see `PlanSpec`, also for the next two
    sequence_length: int
    short_seq_prob: float
    corpus: str = ""  # a hash of the corpus, part of the plans' names; "": in memory
    counts: epath.Path | None = None  # the file with the numbers of rows of first plans
    # The same file in the corpus's bucket, for the one process of a run that sends counts.
    shared: epath.Path | None = None
    units: Units = "pairs"  # pairs of either kind, or rows of full sentences (`data.sentences`)

    def __post_init__(self) -> None:
        self._plans: dict[int, np.ndarray] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._worker: PlanWorker | None = None
        self._deaths = 0
        self._row_count: int | None = None

    def __reduce__(self) -> Any:
        # Processes that make batches do not send counts: `shared` is None.
        settings = self.sequence_length, self.short_seq_prob, self.corpus, self.counts, None
        return Plans, (self.stream, self.names, *settings, self.units)

    def find(self, epoch: int) -> np.ndarray | None:
        """Returns the epoch's plan (`PlanSpec.plan`), or None while it is being made.

        Raises:
          Unavailable: the process that makes it was killed several times.
        """
        with self._lock:
            if epoch not in self._plans:
                settings = self.sequence_length, self.short_seq_prob, self.units
                spec = PlanSpec(self.names, epoch, *settings)
                is_small = self._is_small
                plan = spec.plan(self.stream) if is_small else self._open_or_begin(spec)
                if plan is None:
                    return None
                self._plans[epoch] = plan
            return self._plans[epoch]

    def wait(self, epoch: int) -> np.ndarray:
        """Waits until the epoch's plan is made, and returns it."""
        while (plan := self.find(epoch)) is None:
            self.pause()
        return plan

    def pause(self) -> None:
        """Waits a moment.

        Raises:
          RuntimeError: another thread has closed the plans.
        """
        if self._closed.wait(_POLL_SECONDS):
            raise RuntimeError("the plans were closed")

    def begin(self, epoch: int) -> None:
        """Starts to plan a later epoch, if the plan takes long."""
        if not self._is_small:
            self.find(epoch)

    def keep(self, epochs: set[int]) -> None:
        """Drops the plans of all other epochs."""
        with self._lock:
            for epoch in self._plans.keys() - epochs:
                del self._plans[epoch]

    def count_rows(self) -> int | None:
        """Returns the number of rows of the first plan; None while it is being made."""
        if self._row_count is None:
            name = self._count_name
            rows = None if self.counts is None else read_counts(self.counts).get(name)
            if rows is None:
                plan = self.find(0)
                if plan is None:
                    return None
                rows = len(plan)
                if self.counts is not None:
                    add_counts(self.counts, {name: rows})
            if self.shared is not None:
                add_counts(self.shared, {name: rows})
            self._row_count = rows
        return self._row_count

    def close(self) -> None:
        """Ends the worker; a thread that waits for a plan raises RuntimeError."""
        self._closed.set()
        with self._lock:
            if self._worker is not None:
                self._worker.close()
                self._worker = None

    @property
    def _is_small(self) -> bool:
        return not self.stream.folder or len(self.stream.sentence_offsets) <= _IN_MEMORY

    def _open_or_begin(self, spec: PlanSpec) -> np.ndarray | None:
        if self._worker is not None and self._worker.has_ended():
            code, self._worker = self._worker.process.returncode, None
            self._deaths += code < 0
            if self._deaths >= _DEATHS:
                raise Unavailable(
                    f"the process that plans an epoch was killed {_DEATHS} times, by signal "
                    f"{-code}; has the machine too little memory?"
                )
        path = self._path(spec)
        with translate_os_errors(path):
            plan = read(path)
            if plan is None and self._worker is None and not self._closed.is_set():
                self._worker = PlanWorker.begin(path, self.stream, spec)
        return plan

    def _path(self, spec: PlanSpec) -> str:
        output = repr((PLAN_VERSION, self.corpus, self.stream.documents, tuple(spec)))
        name = hashlib.sha256(output.encode()).hexdigest()[:32]
        return os.fspath(cache_folder() / "plans" / f"{name}.plan")

    @property
    def _count_name(self) -> str:
        """Returns the name of the number of rows in the file of counts."""
        names = "/".join(map(str, (self.corpus[:16], *self.names)))
        settings = f"length={self.sequence_length}/short_seq_prob={self.short_seq_prob}"
        return f"{names}/{settings}" + f"/units={self.units}" * (self.units != "pairs")


def read_counts(path: epath.Path) -> dict[str, int]:
    """Reads the numbers of rows of first plans, by name, from a local file or a bucket.

    A missing, damaged or older file gives {}, and the rows are counted again.

    Raises:
      Unavailable: the bucket is out of reach.
    """
    try:
        content = storage_of(path).read(path, seconds=_SECONDS)
        return parse_json(content, path, COUNTS_VERSION, "", "", checksum="required")["rows"]
    except (FileNotFoundError, InputError):
        return {}


def add_counts(path: epath.Path, rows: dict[str, int]) -> None:
    """Adds counts to a local file or an object in a bucket, if it can be reached and written.

    Otherwise the next run that needs the counts counts again.
    """
    with contextlib.suppress(InputError, Unavailable):
        known = read_counts(path)
        if not rows.items() <= known.items():
            record = with_checksum({"format_version": COUNTS_VERSION, "rows": known | rows})
            storage_of(path).write(path, json.dumps(record, indent=2) + "\n", seconds=_SECONDS)


def _end_with_parent() -> None:
    """Ends this process when standard input is closed, which happens when the parent dies."""
    while os.read(0, 1):
        pass
    os._exit(errors.FAILED)


def main() -> int:
    """Makes the plan that `PlanWorker` requests; prints an error as one line."""
    prepare_process()
    os.nice(10)  # training steps have priority
    try:
        arguments = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        write(*arguments)
    except Exception as error:
        line, code = errors.message_and_code(error)
        print(line.removeprefix("bert-jax: "), flush=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
