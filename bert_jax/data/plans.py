"""Plans of a phase, epoch by epoch, made once a host and mapped by all its processes.

The plan of a large split is a file (`data.plan_files`), made ahead of its epoch. Plans of smaller
splits take a tenth of a second, and are made where they are asked for, in memory.
"""

import contextlib
import hashlib
import json
import os
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from bert_jax.data import draws
from bert_jax.data.plan_files import Maker, Recipe, Units, read
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import buckets
from bert_jax.storage.workdir import cache_folder, named_errors, parse_json, sealed

# Of the file of counts, and of plans: of the rules by which they are drawn, and of their files.
COUNTS_VERSION, PLAN_VERSION = 2, 4

# Sentences up to which a plan is made in memory, where it is asked for.
_IN_MEMORY = 1 << 20
# Times that the maker of a plan may be killed.
_DEATHS = 3
# Seconds between two looks at whether a plan is there.
_LOOK = 0.02
# Seconds for which a bucket may fail before counts are not fetched or sent.
_SECONDS = 10.0


@dataclass
class Plans:
    """The plans of a phase. May be pickled; safe for threads."""

    stream: Stream  # the split
    names: tuple[object, ...]  # (seed, split, phase): they and an epoch's number key its draws
    sequence_length: int  # of a row, specials included
    short_seq_prob: float  # share of documents cut into shorter pairs; of sentences none are
    corpus: str = ""  # a hash of the corpus, by which plans are recognised; "": in memory
    counts: epath.Path | None = None  # the file that remembers the rows of first plans
    # That file in the bucket of the corpus, for the one process of a run that sends them.
    shared: epath.Path | None = None
    units: Units = "pairs"  # pairs, of either kind, or rows of full sentences (`data.sentences`)

    def __post_init__(self) -> None:
        self._found: dict[int, np.ndarray] = {}
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._maker: Maker | None = None
        self._deaths = 0
        self._counted: int | None = None

    def __reduce__(self) -> Any:
        # Processes that make batches send nothing.
        how = self.sequence_length, self.short_seq_prob, self.corpus, self.counts, None
        return Plans, (self.stream, self.names, *how, self.units)

    def key(self, epoch: int) -> tuple[int, int]:
        """Returns the key of an epoch's draws for pairs."""
        return draws.key_of(*self.names, epoch)

    def find(self, epoch: int) -> np.ndarray | None:
        """Returns the epoch's plan (`Recipe.plan`), or None while it is being made.

        Raises:
          Unavailable: the process that makes it was killed again and again.
        """
        with self._lock:
            if epoch not in self._found:
                how = self.sequence_length, self.short_seq_prob, self.units
                recipe = Recipe(self.names, epoch, *how)
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

    def _open_or_begin(self, recipe: Recipe) -> np.ndarray | None:
        if self._maker is not None and self._maker.has_ended():
            code, self._maker = self._maker.process.returncode, None
            self._deaths += code < 0
            if self._deaths >= _DEATHS:
                raise Unavailable(
                    f"the process that plans an epoch was killed {_DEATHS} times, by signal "
                    f"{-code}; has the machine too little memory?"
                )
        path = self._path(recipe)
        with named_errors(path):
            plan = read(path)
            if plan is None and self._maker is None and not self._closed.is_set():
                self._maker = Maker.begin(path, self.stream, recipe)
        return plan

    def _path(self, recipe: Recipe) -> str:
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
        content = buckets.read(path, seconds=_SECONDS)
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
            buckets.write(path, json.dumps(record, indent=2) + "\n", seconds=_SECONDS)
