"""Plans of epochs, made once a host and mapped by all its processes.

The plan of a large split is a file (`data.plan_files`). A process of its own makes it, ahead of the
epoch, so that neither the interpreter's lock nor the end of a run waits for it: it ends when the
process that began it closes its `Plans` or dies. Plans of smaller splits take a tenth of a second,
and are made where they are asked for, in memory.
"""

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
from typing import Any, Literal, NamedTuple

import numpy as np
from etils import epath

from bert_jax import errors
from bert_jax.config import Data, Phase
from bert_jax.data import draws, masking, packing, pairs, sentences
from bert_jax.data.plan_files import Plan, locked, read, write
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import mirror
from bert_jax.storage.workdir import (
    cache_folder,
    named_errors,
    parse_json,
    sealed,
)

Units = Literal["pairs", "swapped_pairs", "sentences"]

# Of the file of counts, and of the rules by which a plan is drawn.
COUNTS_VERSION, PLAN_VERSION = 2, 2

# Sentences up to which a plan is made in memory, where it is asked for.
_IN_MEMORY = 1 << 20
# Times that the maker of a plan may be killed.
_DEATHS = 3
# Seconds between two looks at whether a plan is there.
_LOOK = 0.02
# Seconds for which a bucket may fail before counts are not fetched or sent.
_SECONDS = 10.0
# Chunks measured at once.
_MEASURED = 1 << 20


class Packed(NamedTuple):
    """The limits within which examples share rows."""

    examples: int  # of a row, at most
    predictions: int  # of a row, at most
    masked_share: float  # of an example's tokens that are predicted, the largest of any step
    max_predictions: int  # of an example

    @classmethod
    def of(cls, data: Data, phase: Phase) -> "Packed | None":
        """Returns those of a phase; None if each example has a row of its own."""
        if data.packing == "none":
            return None
        limits = phase.examples_per_row, phase.row_predictions
        return cls(*limits, data.largest_masked_share, phase.max_predictions_per_seq)

    def pack(
        self, lengths: np.ndarray, sequence_length: int, key: tuple[int, int], epoch: int
    ) -> packing.Packs:
        """Packs examples of these lengths, unsigned [examples]: see `packing.pack_epoch`."""
        length = np.arange(sequence_length + 1)
        predictions = masking.number_to_predict(length, self.masked_share, self.max_predictions)
        limits = packing.Limits(sequence_length, self.examples, self.predictions)
        return packing.pack_epoch(lengths, predictions, limits, key, epoch)


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
      packed: how examples share rows; None: each has one of its own.
      units: what is planned: pairs, of either kind, or rows of full sentences (`data.sentences`),
        of which `short_seq_prob` shortens none and which `packed` does not take.
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
        packed: Packed | None = None,
        units: Units = "pairs",
    ):
        self.stream, self.names, self.packed, self.units = stream, names, packed, units
        self._length, self._short, self._corpus = sequence_length, short_seq_prob, corpus
        self._counts, self._shared = counts, shared
        self._counted: tuple[int, int] | None = None
        self._forget_all()

    def _forget_all(self) -> None:
        self._found: dict[int, Plan] = {}
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
          Unavailable: the process that makes it was killed again and again.
        """
        plan = self._find(epoch)
        return None if plan is None else plan.chunks

    def _find(self, epoch: int) -> Plan | None:
        with self._lock:
            if epoch not in self._found:
                # Of every epoch as many examples are packed as of the first.
                if self.packed and epoch and self._counts_if_known() is None:
                    return None
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

    def packs(self, epoch: int) -> packing.Packs:
        """Waits for the epoch's plan, and returns its packed rows.

        They hold the first `examples_per_epoch` chunks of the plan, of a shorter one its first
        twice, once each.
        """
        self.wait(epoch)
        plan = self._find(epoch)
        assert plan is not None and plan.packs is not None, "the plan is not packed"
        return plan.packs

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
        counted = self._counts_if_known()
        return None if counted is None else counted[1]

    def examples_per_epoch(self) -> int | None:
        """Returns the examples in the first plan; None while they are being counted."""
        counted = self._counts_if_known()
        return None if counted is None else counted[0]

    def _counts_if_known(self) -> tuple[int, int] | None:
        """Returns examples and rows of the first plan."""
        if self._counted is None:
            names = self._counts_keys
            known = {} if self._counts is None else read_counts(self._counts)
            if not all(name in known for name in names):
                plan = self._find(0)
                if plan is None:
                    return None
                rows = len(plan.chunks if plan.packs is None else plan.packs)
                known = dict(zip(names, (len(plan.chunks), rows), strict=True))
                if self._counts is not None:
                    add_counts(self._counts, known)
            known = {name: known[name] for name in names}
            self._counted = known[names[0]], known[names[1]]
            if self._shared is not None:
                add_counts(self._shared, known)
        return self._counted

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

    def _in_memory(self, epoch: int) -> Plan:
        task = self._task(epoch)
        plan, order = _planned(self.stream, task)
        return Plan(plan[order], _packs(self.stream, task, plan, order))

    def _task(self, epoch: int) -> dict[str, Any]:
        """Returns all that an epoch's plan hangs on, apart from the stream."""
        examples = self.examples_per_epoch() if self.packed and epoch else None
        return {
            "names": self.names,
            "epoch": epoch,
            "sequence_length": self._length,
            "short_seq_prob": self._short,
            "packed": self.packed,
            "examples": examples,
            "units": self.units,
        }

    def _open_or_begin(self, epoch: int) -> Plan | None:
        path = self._path(epoch)
        self._mourn()
        with named_errors(path):
            plan = read(path, pairs.chunk_dtype(self.stream))
            if plan is None and self._maker is None and not self._closed.is_set():
                self._begin(path, epoch)
        return plan

    def _path(self, epoch: int) -> str:
        output = (PLAN_VERSION, self._corpus, *self.names, epoch, self._length, self._short)
        output += self.packed or ()
        output += (self.units,) * (self.units != "pairs")
        name = hashlib.sha256("/".join(map(str, output)).encode()).hexdigest()[:32]
        return os.fspath(cache_folder() / "plans" / f"{name}.plan")

    def _begin(self, path: str, epoch: int) -> None:
        """Starts a process that makes the plan, unless another one does by now."""
        os.makedirs(os.path.dirname(path), exist_ok=True)
        file = locked(path)
        if file is None:
            return
        where = {"stream": self.stream.folder, "documents": self.stream.documents}
        task = {**where, "path": path, **self._task(epoch)}
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
    def _counts_keys(self) -> tuple[str, str]:
        """Returns under what names examples and rows are counted: one, unless they are packed."""
        names = "/".join(map(str, (self._corpus[:16], *self.names)))
        examples = f"{names}/length={self._length}/short_seq_prob={self._short}"
        examples += f"/units={self.units}" * (self.units != "pairs")
        if self.packed is None:
            return examples, examples
        limits = (f"{name}={value}" for name, value in self.packed._asdict().items())
        return examples, "/".join([examples, *limits])


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


def _planned(stream: Stream, task: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns an epoch's chunks in the order of the documents, and the order it takes them in."""
    names, epoch = task["names"], task["epoch"]
    key = draws.key_of(*names, epoch)
    if task["units"] == "sentences":
        plan = sentences.plan(stream, task["sequence_length"], key)
    else:
        how = task["short_seq_prob"], key, task["units"]
        plan = pairs.plan(stream, task["sequence_length"], *how)
    return plan, _order(names, epoch, len(plan))


def _packs(
    stream: Stream, task: dict[str, Any], plan: np.ndarray, order: np.ndarray
) -> packing.Packs | None:
    """Returns the packed rows of what `_planned` gives; None where examples share none."""
    if task["packed"] is None:
        return None
    packed, length = Packed(*task["packed"]), task["sequence_length"]
    names, epoch = task["names"], task["epoch"]
    key = draws.key_of(*names, epoch)
    lengths = np.empty(len(plan), np.min_scalar_type(length))
    for start in range(0, len(plan), _MEASURED):
        chunks = plan[start : start + _MEASURED]
        rows = pairs.rows(stream, chunks, draws.Counter(key, chunks["sentence"]), task["units"])
        lengths[start : start + _MEASURED] = pairs.truncated_lengths(rows, length)
    examples = task["examples"] or len(plan)
    by_slot = lengths[np.resize(order, examples)]
    return packed.pack(by_slot, length, draws.key_of(*names, "packs"), epoch)


def _make(task: dict[str, Any]) -> None:
    """Writes the plan that `Plans._begin` asked for."""
    stream = Stream.open(task["stream"], task["documents"])
    plan, order = _planned(stream, task)
    packs = _packs(stream, task, plan, order)
    write(task["path"], plan, order, packs)


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
