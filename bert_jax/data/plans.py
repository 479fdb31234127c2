"""Plans of a phase, epoch by epoch, made once a host and mapped by all its processes.

Plans of small splits take a tenth of a second, and are made where they are asked for, in memory.
Those of a large split are files in the cache of this host. A process of its own makes such a file,
ahead of the epoch, so that neither the interpreter's lock nor the end of a run waits for it: it
ends when the process that began it closes it or dies.

    CACHE/plans/NAME.plan   the chunks (`data.pairs`) in the random order in which the epoch takes
                            them, as `np.save` writes an array; NAME is a hash of all that it hangs
                            on
    CACHE/plans/NAME.lock   held by the process whose child makes the plan

A file that is cut off is removed, and made again.
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
    no_link,
    parse_json,
    translate_os_errors,
    with_checksum,
)

Units = Literal["pairs", "swapped_pairs", "sentences"]

# Of the file of counts, and of plans: of the rules by which they are drawn, and of their files.
COUNTS_VERSION, PLAN_VERSION = 2, 4

# Plans that a host keeps, those used last: three runs need as many.
_KEPT = 8
# Seconds after which locks, and what killed makers left, are removed.
_LEFT = 24 * 3600.0
# Chunks written at once.
_CHUNKS = 1 << 20
# Sentences up to which a plan is made in memory, where it is asked for.
_IN_MEMORY = 1 << 20
# Times that the maker of a plan may be killed.
_DEATHS = 3
# Seconds between two looks at whether a plan is there.
_LOOK = 0.02
# Seconds for which a bucket may fail before counts are not fetched or sent.
_SECONDS = 10.0


class PlanSpec(NamedTuple):
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


def write(path: str, stream: Stream, recipe: PlanSpec) -> None:
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


class PlanWorker:
    """A process that makes a plan; nobody else of this host makes it meanwhile."""

    def __init__(self, path: str, stream: Stream, recipe: PlanSpec, lock: IO[bytes]):
        self._lock = lock
        # In a session of its own, since Ctrl-C is ours; its standard input ends with us.
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bert_jax.data.plans"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it was killed
            pickle.dump((path, stream, recipe), self.process.stdin)
            self.process.stdin.flush()

    @classmethod
    def begin(cls, path: str, stream: Stream, recipe: PlanSpec) -> "PlanWorker | None":
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


@dataclass
class Plans:
    """The plans of a phase. May be pickled; safe for threads."""

    stream: Stream  # the split
    names: tuple[object, ...]  # as the next two of `PlanSpec`
    sequence_length: int
    short_seq_prob: float
    corpus: str = ""  # a hash of the corpus, by which plans are recognised; "": in memory
    counts: epath.Path | None = None  # the file that remembers the rows of first plans
    # That file in the bucket of the corpus, for the one process of a run that sends them.
    shared: epath.Path | None = None
    units: Units = "pairs"  # pairs, of either kind, or rows of full sentences (`data.sentences`)

    def __post_init__(self) -> None:
        self._found: dict[int, np.ndarray] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._maker: PlanWorker | None = None
        self._deaths = 0
        self._counted: int | None = None

    def __reduce__(self) -> Any:
        # Processes that make batches send nothing.
        how = self.sequence_length, self.short_seq_prob, self.corpus, self.counts, None
        return Plans, (self.stream, self.names, *how, self.units)

    def find(self, epoch: int) -> np.ndarray | None:
        """Returns the epoch's plan (`PlanSpec.plan`), or None while it is being made.

        Raises:
          Unavailable: the process that makes it was killed again and again.
        """
        with self._lock:
            if epoch not in self._found:
                how = self.sequence_length, self.short_seq_prob, self.units
                recipe = PlanSpec(self.names, epoch, *how)
                is_small = self._is_small
                plan = recipe.plan(self.stream) if is_small else self._open_or_begin(recipe)
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
            for epoch in self._found.keys() - epochs:
                del self._found[epoch]

    def counted(self) -> int | None:
        """Returns how many rows the first plan has; None while it is being made."""
        if self._counted is None:
            name = self._name_of_count
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
            self._counted = rows
        return self._counted

    def close(self) -> None:
        """Ends what is being made; a thread that waits for it gives up."""
        self._closed.set()
        with self._lock:
            if self._maker is not None:
                self._maker.close()
                self._maker = None

    @property
    def _is_small(self) -> bool:
        return not self.stream.folder or len(self.stream.sentence_offsets) <= _IN_MEMORY

    def _open_or_begin(self, recipe: PlanSpec) -> np.ndarray | None:
        if self._maker is not None and self._maker.has_ended():
            code, self._maker = self._maker.process.returncode, None
            self._deaths += code < 0
            if self._deaths >= _DEATHS:
                raise Unavailable(
                    f"the process that plans an epoch was killed {_DEATHS} times, by signal "
                    f"{-code}; has the machine too little memory?"
                )
        path = self._path(recipe)
        with translate_os_errors(path):
            plan = read(path)
            if plan is None and self._maker is None and not self._closed.is_set():
                self._maker = PlanWorker.begin(path, self.stream, recipe)
        return plan

    def _path(self, recipe: PlanSpec) -> str:
        output = repr((PLAN_VERSION, self.corpus, self.stream.documents, tuple(recipe)))
        name = hashlib.sha256(output.encode()).hexdigest()[:32]
        return os.fspath(cache_folder() / "plans" / f"{name}.plan")

    @property
    def _name_of_count(self) -> str:
        """Returns under what name rows are counted."""
        names = "/".join(map(str, (self.corpus[:16], *self.names)))
        how = f"length={self.sequence_length}/short_seq_prob={self.short_seq_prob}"
        return f"{names}/{how}" + f"/units={self.units}" * (self.units != "pairs")


def read_counts(path: epath.Path) -> dict[str, int]:
    """Reads how many rows first plans have, by name, here or in a bucket.

    A missing, damaged or older file gives {}: what it holds is counted again.

    Raises:
      Unavailable: the bucket is out of reach.
    """
    try:
        content = storage_of(path).read(path, seconds=_SECONDS)
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
            record = with_checksum({"format_version": COUNTS_VERSION, "rows": known | rows})
            storage_of(path).write(path, json.dumps(record, indent=2) + "\n", seconds=_SECONDS)


def _end_with_parent() -> None:
    """Ends this process as soon as standard input is closed, as it is when its parent dies."""
    while os.read(0, 1):
        pass
    os._exit(errors.FAILED)


def main() -> int:
    """Makes the plan that `PlanWorker` asks for; an error is one line on standard output."""
    prepare_process()
    os.nice(10)  # a step comes first
    try:
        task = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_end_with_parent, daemon=True).start()
        write(*task)
    except Exception as error:
        line, code = errors.message_and_code(error)
        print(line.removeprefix("bert-jax: "), flush=True)
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
