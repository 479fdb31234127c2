"""Plans of epochs, and those of large splits as files in the cache of this host.

A process of its own makes such a file, ahead of the epoch, so that neither the interpreter's lock
nor the end of a run waits for it: it ends when the process that began it closes it or dies.

    CACHE/plans/NAME.plan   three arrays as `np.save` writes them, one behind another: where packed
                            rows begin and whose they are (`packing.Packs`, of no rows where
                            examples share none), and the chunks (`data.pairs`) in the random order
                            in which the epoch takes them; NAME is a hash of all that it hangs on
    CACHE/plans/NAME.lock   held by the process whose child makes the plan

A file that is cut off is removed, and made again.
"""

import contextlib
import fcntl
import os
import pickle
import subprocess
import sys
import threading
import time
from typing import IO, Literal, NamedTuple

import numpy as np
from etils import epath

from bert_jax import errors
from bert_jax.data import draws, packing, pairs, sentences
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage.workdir import new_file, no_link

Units = Literal["pairs", "swapped_pairs", "sentences"]

# Plans that a host keeps, those used last: three runs need as many.
_KEPT = 8
# Seconds after which locks, and what killed makers left, are removed.
_LEFT = 24 * 3600.0
# Chunks written or measured at once.
_CHUNKS = 1 << 20


class Plan(NamedTuple):
    """An epoch's chunks in their random order, and its packed rows."""

    chunks: np.ndarray  # `pairs.chunk_dtype` [examples]
    packs: packing.Packs | None  # None where each example has a row of its own


class Recipe(NamedTuple):
    """All that an epoch's plan hangs on, apart from the stream."""

    names: tuple[object, ...]  # (seed, split, phase): they and the epoch key its draws
    epoch: int
    sequence_length: int  # of the examples, specials included
    short_seq_prob: float  # share of documents cut into shorter pairs
    units: Units
    packed: packing.Packed | None  # how examples share rows
    examples: int | None  # that are packed; None: all of the plan

    def make(self, stream: Stream) -> tuple[np.ndarray, np.ndarray, packing.Packs | None]:
        """Returns chunks in the order of documents, the order they are taken in, packed rows."""
        key, length = draws.key_of(*self.names, self.epoch), self.sequence_length
        if self.units == "sentences":
            chunks = sentences.plan(stream, length, key)
        else:
            chunks = pairs.plan(stream, length, self.short_seq_prob, key, self.units)
        order = draws.permutation(draws.key_of(*self.names), self.epoch, len(chunks))
        if self.packed is None or self.units == "sentences":
            return chunks, order, None
        lengths = np.empty(len(chunks), np.min_scalar_type(length))
        for start in range(0, len(chunks), _CHUNKS):
            some = chunks[start : start + _CHUNKS]
            rows = pairs.rows(stream, some, draws.Counter(key, some["sentence"]), self.units)
            lengths[start : start + _CHUNKS] = pairs.truncated_lengths(rows, length)
        by_slot = lengths[np.resize(order, self.examples or len(chunks))]
        key = draws.key_of(*self.names, "packs")
        return chunks, order, self.packed.pack(by_slot, length, key, self.epoch)

    def plan(self, stream: Stream) -> Plan:
        """Returns the plan, made in memory."""
        chunks, order, packs = self.make(stream)
        return Plan(chunks[order], packs)


def read(path: str) -> Plan | None:
    """Returns a plan, mapped; None if it is not there, or cut off."""
    try:
        with open(path, "rb") as file:
            starts, slots, chunks = (_mapped(file) for _ in range(3))
    except FileNotFoundError:
        return None
    except (ValueError, EOFError):
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return Plan(chunks, packing.Packs(starts, slots) if len(slots) else None)


def _mapped(file: IO[bytes]) -> np.ndarray:
    """Returns the array that a file goes on with, and goes behind it."""
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    if not shape[0]:  # nothing that could be mapped
        return np.empty(shape, dtype)
    start = file.tell()
    array = np.memmap(file, dtype, "r", start, shape)
    file.seek(start + array.nbytes)
    return array


def write(path: str, stream: Stream, recipe: Recipe) -> None:
    """Makes a plan and writes it; drops those that were not used for longest."""
    chunks, order, packs = recipe.make(stream)
    if packs is None:
        packs = packing.Packs(np.zeros(1, np.uint64), np.empty(0, np.uint32))
    with new_file(epath.Path(path)) as temporary, open(temporary, "wb") as file:
        np.save(file, packs.starts)
        np.save(file, packs.slots)
        head = {"descr": chunks.dtype.descr, "fortran_order": False, "shape": chunks.shape}
        np.lib.format.write_array_header_1_0(file, head)
        for start in range(0, len(order), _CHUNKS):
            file.write(chunks[order[start : start + _CHUNKS]].tobytes())
    _prune(os.path.dirname(path))


def _prune(folder: str) -> None:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        dates = {entry.path: entry.stat().st_mtime for entry in entries}
        plans = sorted((p for p in dates if p.endswith(".plan")), key=dates.__getitem__)
        long_ago = time.time() - _LEFT
        left = [p for p in dates if not p.endswith(".plan") and dates[p] < long_ago]
        for path in plans[:-_KEPT] + left:
            os.unlink(path)


class Maker:
    """A process that makes a plan; nobody else of this host makes it meanwhile."""

    def __init__(self, path: str, stream: Stream, recipe: Recipe, lock: IO[bytes]):
        self._lock = lock
        # In a session of its own, since Ctrl-C is ours; its standard input ends with us.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bert_jax.data.plan_files"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            pickle.dump((path, stream, recipe), self.process.stdin)
            self.process.stdin.flush()

    @classmethod
    def begin(cls, path: str, stream: Stream, recipe: Recipe) -> "Maker | None":
        """Starts to make a plan; None where another process does, or has by now."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        lock = open(f"{path.removesuffix('.plan')}.lock", "ab", opener=no_link)  # noqa: SIM115
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not os.path.exists(path):
                return cls(path, stream, recipe, lock)
        except BlockingIOError:
            pass
        lock.close()
        return None

    def has_ended(self) -> bool:
        """Returns whether it has, by a signal perhaps; raises what it failed with."""
        if self.process.poll() is None:
            return False
        output = self.close()
        if (code := self.process.returncode) > 0:
            kind = {errors.BAD_INPUT: InputError, errors.UNAVAILABLE: Unavailable}
            line = output.decode(errors="replace").strip()
            raise kind.get(code, RuntimeError)(line or "the process that plans an epoch failed")
        return True

    def close(self) -> bytes:
        """Ends it; returns its output."""
        self.process.kill()
        output, _ = self.process.communicate()
        self._lock.close()
        return output


def _end_with_parent() -> None:
    """Ends this process as soon as standard input is closed, as it is when its parent dies."""
    while os.read(0, 1):
        pass
    os._exit(errors.FAILED)


def main() -> int:
    """Makes the plan that `Maker` asks for; an error is one line on standard output."""
    os.nice(10)  # a step comes first
    try:
        task = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        write(*task)
    except Exception as error:
        line, code = errors.of_error(error)
        print(line.removeprefix("bert-jax: "), flush=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
