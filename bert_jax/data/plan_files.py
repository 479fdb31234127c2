"""Plans of epochs, and those of large splits as files in the cache of this host.

A process of its own makes such a file, ahead of the epoch, so that neither the interpreter's lock
nor the end of a run waits for it: it ends when the process that began it closes it or dies.

    CACHE/plans/NAME.plan   the chunks (`data.pairs`) in the random order in which the epoch takes
                            them, as `np.save` writes an array; NAME is a hash of all that it hangs
                            on
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
from bert_jax.data import draws, pairs, sentences
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage.workdir import new_file, no_link

Units = Literal["pairs", "swapped_pairs", "sentences"]

# Plans that a host keeps, those used last: three runs need as many.
_KEPT = 8
# Seconds after which locks, and what killed makers left, are removed.
_LEFT = 24 * 3600.0
# Chunks written at once.
_CHUNKS = 1 << 20


class Recipe(NamedTuple):
    """All that an epoch's plan hangs on, apart from the stream."""

    names: tuple[object, ...]  # (seed, split, phase): they and the epoch key its draws
    epoch: int
    sequence_length: int  # of a row, specials included
    short_seq_prob: float  # share of documents cut into shorter pairs
    units: Units

    def make(self, stream: Stream) -> tuple[np.ndarray, np.ndarray]:
        """Returns chunks in the order of documents, and the order they are taken in."""
        key, length = draws.key_of(*self.names, self.epoch), self.sequence_length
        if self.units == "sentences":
            chunks = sentences.plan(stream, length, key)
        else:
            chunks = pairs.plan(stream, length, self.short_seq_prob, key, self.units)
        return chunks, draws.permutation(draws.key_of(*self.names), self.epoch, len(chunks))

    def plan(self, stream: Stream) -> np.ndarray:
        """Returns the plan, made in memory: chunks in their order, `pairs.chunk_dtype` [rows]."""
        chunks, order = self.make(stream)
        return chunks[order]


def read(path: str) -> np.ndarray | None:
    """Returns a plan, mapped; None if it is not there, or cut off."""
    try:
        chunks = np.lib.format.open_memmap(path, mode="r")
    except FileNotFoundError:
        return None
    except ValueError:
        with contextlib.suppress(OSError):
            os.unlink(path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # used now
    return chunks


def write(path: str, stream: Stream, recipe: Recipe) -> None:
    """Makes a plan and writes it; drops those that were not used for longest."""
    chunks, order = recipe.make(stream)
    with new_file(epath.Path(path)) as temporary, open(temporary, "wb") as file:
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
