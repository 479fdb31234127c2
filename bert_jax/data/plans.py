"""The plan of an epoch: its rows in random order.

A plan is made once per host and memory-mapped by all processes there. A plan of a small split takes
a tenth of a second and is made in memory by the process that needs it. Plans of a large split are
files in the cache of this host. A worker process makes such a file before the epoch begins, so that
planning does not hold the GIL of the training process. The training process may end meanwhile.

    CACHE/plans/NAME.plan   the rows in the random order of the epoch, `pairs.chunk_dtype` [rows]
                            as `np.save` writes it: a chunk tells which sentences form a row; NAME
                            is a hash of everything that determines the plan
    CACHE/plans/NAME.lock   held by the process whose worker makes the plan

A truncated file is removed and made again.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import threading
import time
from dataclasses import dataclass
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from etils import epath

from bert_jax.data import draws, pairs, sentences, workers
from bert_jax.data.stream import Stream
from bert_jax.data.workers import Worker, WorkerDied
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import (
    cache_folder,
    open_without_links,
    parse_json,
    replace_atomically,
    translate_os_errors,
    with_checksum,
)

# What a row consists of: a pair with a random or a swapped B, or packed sentences.
RowKind = Literal["pairs", "swapped_pairs", "sentences"]

# Version of the format of row counts.
COUNTS_VERSION = 2
# Version of plans: changes with their format or their random draws.
PLAN_VERSION = 4

# Number of plans that a host keeps, the most recently used: enough for three runs.
_PLANS_KEPT = 8
# Seconds after which locks and the files of killed workers are removed.
_STALE_SECONDS = 24 * 3600.0
# Chunks per write.
_WRITE_CHUNKS = 1 << 20
# Up to this many sentences a plan is made in memory.
_IN_MEMORY = 1 << 20
# Planning fails after this many deaths of its worker.
_MOST_DEATHS = 3
# Seconds between two checks for a plan.
_POLL_SECONDS = 0.02
# How long a bucket is retried, before a run does without its row counts.
_BUCKET_SECONDS = 10.0


class PlanSpec(NamedTuple):
    """Everything that determines the plans of a phase, except the token stream."""

    # (seed, split, phase) and, in a mixture, the source; they and the epoch give a random key.
    key_parts: tuple[object, ...]
    sequence_length: int  # of a row, with [CLS] and [SEP]
    short_seq_prob: float  # share of documents cut into shorter pairs
    row_kind: RowKind = "pairs"

    def make(self, stream: Stream, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the chunks in the order of documents, and the permutation of an epoch."""
        key, length = draws.key_of(*self.key_parts, epoch), self.sequence_length
        if self.row_kind == "sentences":
            chunks = sentences.plan(stream, length, key)
        else:
            chunks = pairs.plan(stream, length, self.short_seq_prob, key, self.row_kind)
        return chunks, draws.permutation(draws.key_of(*self.key_parts), epoch, len(chunks))


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


def write(path: str, stream: Stream, spec: PlanSpec, epoch: int) -> None:
    """Makes a plan and writes it; deletes the least recently used plans."""
    chunks, order = spec.make(stream, epoch)
    with replace_atomically(epath.Path(path)) as temporary, open(temporary, "wb") as file:
        header = {"descr": chunks.dtype.descr, "fortran_order": False, "shape": chunks.shape}
        np.lib.format.write_array_header_1_0(file, header)
        for start in range(0, len(order), _WRITE_CHUNKS):
            file.write(chunks[order[start : start + _WRITE_CHUNKS]].tobytes())
    _prune(os.path.dirname(path))


def _prune(folder: str) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        dates = {entry.path: entry.stat().st_mtime for entry in entries}
        plans = sorted((p for p in dates if p.endswith(".plan")), key=dates.__getitem__)
        oldest = time.time() - _STALE_SECONDS
        stale = [p for p in dates if not p.endswith(".plan") and dates[p] < oldest]
        for path in plans[:-_PLANS_KEPT] + stale:
            os.unlink(path)


class PlanWorker(Worker):
    """A worker that makes a plan; its lock keeps other processes of this host from doing so."""

    def __init__(self, lock: IO[bytes]):
        super().__init__()
        self._lock = lock

    @classmethod
    def begin(cls, path: str, stream: Stream, spec: PlanSpec, epoch: int) -> "PlanWorker | None":
        """Starts to make a plan; returns None if another process makes or has made it."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock = open(f"{path.removesuffix('.plan')}.lock", "ab", opener=open_without_links)  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(path):
                worker = cls(lock)
                worker.start(_write_in_background, path, stream, spec, epoch)
                return worker
        except BlockingIOError:
            pass
        lock.close()
        return None

    def close(self) -> None:
        super().close()
        self._lock.close()


def _write_in_background(path: str, stream: Stream, spec: PlanSpec, epoch: int) -> None:
    os.nice(10)  # training steps have priority
    write(path, stream, spec, epoch)


@dataclass
class Plans:
    """The plans of a phase. May be pickled; safe for threads."""

    stream: Stream  # token stream of the split
    spec: PlanSpec
    # A part of the names of files; not used for a stream in memory, whose plans are in memory too.
    corpus_sha256: str = ""
    counts_path: epath.Path | None = None  # the file that `read_counts` reads
    # The same file in the corpus's bucket; only in the one process that sends counts.
    bucket_counts_path: epath.Path | None = None

    def __post_init__(self) -> None:
        self._plans: dict[int, np.ndarray] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._worker: PlanWorker | None = None
        self._deaths = 0
        self._row_count: int | None = None

    def __reduce__(self) -> Any:
        # Processes that make batches do not send counts: `bucket_counts_path` is None.
        return Plans, (self.stream, self.spec, self.corpus_sha256, self.counts_path)

    def find_or_begin(self, epoch: int) -> np.ndarray | None:
        """Returns the chunks of an epoch in its order, `pairs.chunk_dtype` [rows].

        Returns None until they are planned; starts to plan them if no other plan is being made.

        Raises:
          Unavailable: the process that plans them was killed several times.
        """
        with self._lock:
            plan = self._plans.get(epoch)
            if plan is None and self._is_small:
                chunks, order = self.spec.make(self.stream, epoch)
                plan = chunks[order]
            elif plan is None:
                plan = self._open_or_begin(epoch)
            if plan is not None:
                self._plans[epoch] = plan
            return plan

    def wait(self, epoch: int) -> np.ndarray:
        """Waits until the epoch's plan is made, and returns it."""
        while (plan := self.find_or_begin(epoch)) is None:
            self.wait_briefly()
        return plan

    def wait_briefly(self) -> None:
        """Waits a moment; raises RuntimeError if another thread has closed the plans."""
        if self._closed.wait(_POLL_SECONDS):
            raise RuntimeError("the plans were closed")

    def prefetch(self, epoch: int) -> None:
        """Starts to plan a later epoch, if the plan takes long."""
        if not self._is_small:
            self.find_or_begin(epoch)

    def keep(self, epochs: set[int]) -> None:
        """Drops the plans of all other epochs."""
        with self._lock:
            for epoch in self._plans.keys() - epochs:
                del self._plans[epoch]

    def count_rows(self) -> int | None:
        """Returns the number of rows of the first epoch; None while its plan is being made."""
        if self._row_count is None:
            name = self._count_key
            rows = None if self.counts_path is None else read_counts(self.counts_path).get(name)
            if rows is None:
                plan = self.find_or_begin(0)
                if plan is None:
                    return None
                rows = len(plan)
                if self.counts_path is not None:
                    add_counts(self.counts_path, {name: rows})
            if self.bucket_counts_path is not None:
                add_counts(self.bucket_counts_path, {name: rows})
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

    def _open_or_begin(self, epoch: int) -> np.ndarray | None:
        """Opens a plan if it exists; else starts a worker for it, unless one is working already."""
        if self._worker is not None and workers.wait([self._worker], 0):
            self._close_finished(self._worker)
        path = self._path(epoch)
        with translate_os_errors(path):
            plan = read(path)
            if plan is None and self._worker is None and not self._closed.is_set():
                self._worker = PlanWorker.begin(path, self.stream, self.spec, epoch)
        return plan

    def _close_finished(self, worker: PlanWorker) -> None:
        """Closes a worker that has ended; raises Unavailable if too many have died."""
        self._worker = None
        try:
            worker.result()
        except WorkerDied as error:
            self._deaths += 1
            if self._deaths >= _MOST_DEATHS:
                raise Unavailable(
                    f"the process that plans an epoch died {_MOST_DEATHS} times, most "
                    f"recently with exit code {error.code}; has the machine too little memory?"
                ) from None
        finally:
            worker.close()

    def _path(self, epoch: int) -> str:
        key_parts, *settings = self.spec
        # `documents` is the range of the corpus's documents that the stream has.
        inputs = self.corpus_sha256, self.stream.documents, (key_parts, epoch, *settings)
        name = hashlib.sha256(repr((PLAN_VERSION, *inputs)).encode()).hexdigest()[:32]
        return os.fspath(cache_folder() / "plans" / f"{name}.plan")

    @property
    def _count_key(self) -> str:
        """Returns the key of the row count in its file."""
        key_parts, length, short_seq_prob, row_kind = self.spec
        name = "/".join(map(str, (self.corpus_sha256[:16], *key_parts)))
        name += f"/length={length}/short_seq_prob={short_seq_prob}"
        return name + f"/units={row_kind}" * (row_kind != "pairs")


def read_counts(path: epath.Path) -> dict[str, int]:
    """Reads the number of rows of each first epoch, by key, from a local file or a bucket.

    A missing, damaged or older file gives {}, and the rows are counted again.

    Raises:
      Unavailable: the bucket is out of reach.
    """
    try:
        content = storage_of(path).read(path, seconds=_BUCKET_SECONDS)
        return parse_json(content, path, COUNTS_VERSION, "", "", checksum="required")["rows"]
    except (FileNotFoundError, InputError):  # not reported, so it needs no remedies
        return {}


def add_counts(path: epath.Path, rows: dict[str, int]) -> None:
    """Adds counts to a local file or an object in a bucket, if it can be reached and written.

    Otherwise the next run counts again.
    """
    with contextlib.suppress(InputError, Unavailable):
        known = read_counts(path)
        if not rows.items() <= known.items():
            record = with_checksum({"format_version": COUNTS_VERSION, "rows": known | rows})
            storage_of(path).write(
                path, json.dumps(record, indent=2) + "\n", seconds=_BUCKET_SECONDS
            )
