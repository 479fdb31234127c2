"""Plans of epochs, made once a host and mapped by all its processes.

The plan of a large split is a file: its chunks (`data.pairs`) in the random order in which the
epoch takes them, 10 bytes each.

    CACHE/plans/NAME.plan       a plan; NAME is a hash of all that it hangs on
    CACHE/plans/NAME.plan.tmp   one that is being made; its maker holds a lock on it

A process of its own makes it, ahead of the epoch, so that neither the interpreter's lock nor the
end of a run waits for it: it ends when the process that began it closes its `Plans` or dies. A
file that is cut off or changed is made again. Plans of smaller splits take a tenth of a second, and
are made where they are asked for, in memory.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import struct
import subprocess
import sys
import threading
import zlib
from typing import Any

import numpy as np
from etils import epath

from bert_jax import errors
from bert_jax.data import draws, pairs
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import mirror
from bert_jax.storage.workdir import (
    cache_folder,
    named_errors,
    no_link,
    parse_json,
    sealed,
)

# Of the file of counts, and of the rules by which a plan is drawn.
COUNTS_VERSION, PLAN_VERSION = 2, 1

# Sentences up to which a plan is made in memory, where it is asked for.
_IN_MEMORY = 1 << 20
# Plans that a host keeps, those used last: three runs need as many.
_KEPT = 8
# Times that the maker of a plan may be killed.
_DEATHS = 3
# Seconds between two looks at whether a plan is there.
_LOOK = 0.02
# Seconds for which a bucket may fail before counts are not fetched or sent.
_SECONDS = 10.0
# What a file begins with: magic, chunks, CRC-32 of them.
_HEAD = struct.Struct("<16sQQ")
_MAGIC = b"bert_jax plan\n\0\0"
# Chunks written at once.
_WRITTEN = 1 << 20


class Plans:
    """The plans of a phase, epoch by epoch. May be pickled; safe for threads.

    Args:
      stream: the split.
      names: (seed, split, phase): they and an epoch's number key its draws.
      sequence_length: of the examples, specials included.
      short_seq_prob: share of documents cut into shorter pairs.
      corpus: a hash of the corpus, by which its plans are recognised; "" for a stream in memory.
      counts: the file in which the rows of first plans are remembered; None: they are not.
      shared: that file in the bucket of the corpus, for the one process of a run that sends what
        was counted; None: nothing is sent.
    """

    def __init__(
        self,
        stream: Stream,
        names: tuple[object, ...],
        sequence_length: int,
        short_seq_prob: float,
        corpus: str = "",
        counts: epath.Path | None = None,
        shared: epath.Path | None = None,
    ):
        self.stream, self.names = stream, names
        self._length, self._short, self._corpus = sequence_length, short_seq_prob, corpus
        self._counts, self._shared = counts, shared
        self._rows: int | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self._found: dict[int, np.ndarray] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._maker: subprocess.Popen | None = None
        self._deaths = 0

    def __getstate__(self) -> dict[str, Any]:
        own = ("_found", "_lock", "_closed", "_maker", "_deaths")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return state | {"_shared": None}  # processes that make batches send nothing

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ |= state
        self._forget_all()

    def key(self, epoch: int) -> tuple[int, int]:
        """Returns the key of an epoch's draws for pairs."""
        return draws.key_of(*self.names, epoch)

    def find(self, epoch: int) -> np.ndarray | None:
        """Returns the epoch's chunks in their random order, or None while they are being planned.

        Raises:
          InputError: the plan cannot be written.
          Unavailable: the process that makes it was killed again and again.
        """
        with self._lock:
            if epoch not in self._found:
                plan = self._in_memory(epoch) if self._is_small else self._open_or_begin(epoch)
                if plan is None:
                    return None
                self._found[epoch] = plan
            return self._found[epoch]

    def wait(self, epoch: int) -> np.ndarray:
        """Waits for what `find` looks for, and returns it."""
        while (plan := self.find(epoch)) is None:
            self.pause()
        return plan

    def pause(self) -> None:
        """Waits a moment.

        Raises:
          RuntimeError: closed meanwhile, by another thread.
        """
        if self._closed.wait(_LOOK):
            raise RuntimeError("the plans were closed")

    def begin(self, epoch: int) -> None:
        """Begins to plan the epoch ahead, where that takes long."""
        if not self._is_small:
            self.find(epoch)

    def keep(self, epochs: set[int]) -> None:
        """Drops the plans of all other epochs."""
        with self._lock:
            for epoch in [epoch for epoch in self._found if epoch not in epochs]:
                del self._found[epoch]

    def rows_per_epoch(self) -> int | None:
        """Returns the rows in the first plan; None while they are being counted."""
        if self._rows is None:
            rows = None if self._counts is None else read_counts(self._counts).get(self._counts_key)
            if rows is None:
                plan = self.find(0)
                if plan is None:
                    return None
                rows = len(plan)
                if self._counts is not None:
                    add_counts(self._counts, {self._counts_key: rows})
            self._rows = rows
            if self._shared is not None:
                add_counts(self._shared, {self._counts_key: rows})
        return self._rows

    def close(self) -> None:
        """Ends what is being made; a thread that waits for it gives up."""
        self._closed.set()
        with self._lock:
            if self._maker is not None:
                self._maker.kill()
                self._maker.communicate()
                self._maker = None

    @property
    def _is_small(self) -> bool:
        return not self.stream.folder or len(self.stream.sentence_offsets) <= _IN_MEMORY

    def _in_memory(self, epoch: int) -> np.ndarray:
        plan = pairs.plan(self.stream, self._length, self._short, self.key(epoch))
        return plan[_order(self.names, epoch, len(plan))]

    def _open_or_begin(self, epoch: int) -> np.ndarray | None:
        path = self._path(epoch)
        self._mourn()
        with named_errors(path):
            plan = _read(path, pairs.chunk_dtype(self.stream))
            if plan is None and self._maker is None and not self._closed.is_set():
                self._begin(path, epoch)
        return plan

    def _path(self, epoch: int) -> str:
        output = (PLAN_VERSION, self._corpus, *self.names, epoch, self._length, self._short)
        name = hashlib.sha256("/".join(map(str, output)).encode()).hexdigest()[:32]
        return os.fspath(cache_folder() / "plans" / f"{name}.plan")

    def _begin(self, path: str, epoch: int) -> None:
        """Starts a process that makes the plan, unless another one does by now."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = _claimed(path)
        if file is None:
            return
        task = {
            "stream": self.stream.folder,
            "names": self.names,
            "epoch": epoch,
            "sequence_length": self._length,
            "short_seq_prob": self._short,
            "path": path,
        }
        command = [sys.executable, "-m", "bert_jax.data.plans", json.dumps(task)]
        try:
            # In a session of its own, since Ctrl-C is ours; its standard input ends with us.
            self._maker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(file,),
                start_new_session=True,
            )
        finally:
            os.close(file)  # which the maker has now

    def _mourn(self) -> None:
        """Lets go of a maker that ended; raises what it failed with."""
        if self._maker is None or self._maker.poll() is None:
            return
        output, _ = self._maker.communicate()
        code, self._maker = self._maker.returncode, None
        line = output.decode(errors="replace").strip()
        if code == 0:
            return
        if code > 0:
            kind = {errors.BAD_INPUT: InputError, errors.UNAVAILABLE: Unavailable}
            raise kind.get(code, RuntimeError)(line or "the process that plans an epoch failed")
        self._deaths += 1
        if self._deaths >= _DEATHS:
            raise Unavailable(
                f"the process that plans an epoch was killed {_DEATHS} times, by signal {-code}; "
                "has the machine too little memory?"
            )

    @property
    def _counts_key(self) -> str:
        names = "/".join(map(str, (self._corpus[:16], *self.names)))
        return f"{names}/length={self._length}/short_seq_prob={self._short}"


def read_counts(path: epath.Path) -> dict[str, int]:
    """Reads how many rows first plans have, here or in a bucket.

    A missing, damaged or older file gives {}: what it holds is counted again.

    Raises:
      Unavailable: the bucket is out of reach.
    """
    try:
        content = mirror.read(path, seconds=_SECONDS)
        return parse_json(content, path, COUNTS_VERSION, "", "", seal="required")["rows"]
    except (FileNotFoundError, InputError):
        return {}


def add_counts(path: epath.Path, rows: dict[str, int]) -> None:
    """Adds counts to those of a file, here or in a bucket; as far as it can be reached and written.

    What cannot be kept is counted again by the next run that needs it.
    """
    with contextlib.suppress(InputError, Unavailable):
        known = read_counts(path)
        if not rows.items() <= known.items():
            record = sealed({"format_version": COUNTS_VERSION, "rows": known | rows})
            mirror.write(path, json.dumps(record, indent=2) + "\n", seconds=_SECONDS)


def _order(names: tuple[object, ...], epoch: int, count: int) -> np.ndarray:
    """Returns the random order in which an epoch takes its chunks, int64 [count]."""
    return draws.permutation(draws.key_of(*names), epoch, count)


def _read(path: str, dtype: np.dtype) -> np.ndarray | None:
    """Returns a plan's chunks, mapped; None if it is not there, or not as it was made."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD.size)
            size = os.fstat(file.fileno()).st_size - _HEAD.size
        magic, count, checksum = _HEAD.unpack(head)
        if magic != _MAGIC or not count or size != count * dtype.itemsize:
            raise ValueError
        plan = np.memmap(path, dtype, "r", offset=_HEAD.size, shape=(count,))
        if zlib.crc32(plan.view(np.uint8)) != checksum:
            raise ValueError
    except FileNotFoundError:
        return None
    except (ValueError, struct.error):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return plan


def _claimed(path: str) -> int | None:
    """Returns the temporary file of a plan, locked for its maker; None if another one makes it."""
    temporary = f"{path}.tmp"
    file = no_link(temporary, os.O_RDWR | os.O_CREAT)
    with contextlib.suppress(OSError):  # held by another, or no longer there
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file), os.stat(temporary)):
            if not os.path.exists(path):
                return file
            os.unlink(temporary)
    os.close(file)
    return None


def _make(task: dict[str, Any]) -> None:
    """Writes the plan that `Plans._begin` asked for."""
    stream, names, epoch = Stream.open(task["stream"]), task["names"], task["epoch"]
    key = draws.key_of(*names, epoch)
    plan = pairs.plan(stream, task["sequence_length"], task["short_seq_prob"], key)
    order, checksum = _order(names, epoch, len(plan)), 0
    path, temporary = task["path"], task["path"] + ".tmp"
    try:
        with named_errors(path), open(temporary, "wb") as file:
            file.seek(_HEAD.size)
            for start in range(0, len(plan), _WRITTEN):
                chunks = plan[order[start : start + _WRITTEN]].tobytes()
                checksum = zlib.crc32(chunks, checksum)
                file.write(chunks)
            file.seek(0)
            file.write(_HEAD.pack(_MAGIC, len(plan), checksum))
            file.flush()
            os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _prune(os.path.dirname(path))


def _prune(folder: str) -> None:
    """Removes the plans that were not used for longest, and what makers left that were killed."""
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        used = {e.path: e.stat().st_mtime for e in entries if e.name.endswith(".plan")}
        for path in sorted(used, key=used.__getitem__)[:-_KEPT]:
            os.unlink(path)
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".tmp"):
                file = _claimed(entry.path.removesuffix(".tmp"))
                if file is not None:
                    os.unlink(entry.path)
                    os.close(file)


def _end_with_parent() -> None:
    """Ends this process as soon as standard input is closed, as it is when its parent dies."""
    while os.read(0, 1):
        pass
    os._exit(errors.FAILED)


def main() -> int:
    """Makes the plan that the first argument describes; an error is one line on standard output."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.nice(10)  # a step comes first
    try:
        _make(json.loads(sys.argv[1]))
    except Exception as error:
        line, code = errors.of_error(error)
        print(line.removeprefix("bert-jax: "), flush=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
