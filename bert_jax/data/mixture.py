"""Batches of several sources, mixed by weight.

Which source a row is of is a draw of (seed, phase, row): of every `BLOCK` rows each source has its
share, in a random order. So the number of a row among those of its source is known without the
rows before its block, and with it the row's place in the plans of that source (data.batches), each
of whose epochs is taken once before the next: a source of a large weight goes through more epochs
than one of a small weight. Nothing here has memory.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax.config.text_corpus import MIXED_ROWS as BLOCK
from bert_jax.data import draws
from bert_jax.data.batches import Batch, TrainBatches
from bert_jax.data.plans import Units
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError


class Order:
    """The sources of a phase's rows. May be pickled.

    By its weight each has a row in `BLOCK` at least; `names`, (seed, split, phase), key the draws.
    """

    def __init__(self, weights: Sequence[float], names: tuple[object, ...]):
        self._key = draws.key_of(*names, "mixture")
        relative = np.array(weights) / max(weights)
        wanted = relative / relative.sum() * BLOCK
        counts = np.floor(wanted).astype(np.int64)
        # What is left goes to the largest remainders, of equal ones to the first.
        left = np.argsort(counts - wanted, kind="stable")[: BLOCK - counts.sum()]
        counts[left] += 1
        self.counts = tuple(counts.tolist())

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns of rows, int64 [B], their sources and their numbers among its rows, int64 [B]."""
        sources, numbers = np.empty_like(rows), np.empty_like(rows)
        blocks, places = np.divmod(rows, BLOCK)
        for block in np.unique(blocks).tolist():
            here = blocks == block
            source, number = _block(self._key, self.counts, block)
            sources[here], numbers[here] = source[places[here]], number[places[here]]
        return sources, numbers


@functools.lru_cache(maxsize=8)
def _block(
    key: tuple[int, int], counts: tuple[int, ...], block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `Order.of` does, for all rows of a block."""
    source = np.repeat(np.arange(len(counts)), counts)[draws.permutation(key, block, BLOCK)]
    number = np.empty(BLOCK, np.int64)
    for one, count in enumerate(counts):
        number[source == one] = block * count + np.arange(count)
    return source, number


class MixedBatches:
    """Training batches of one phase, of several sources; see `TrainBatches`. May be pickled.

    Sources are the batches of each by itself, with the same shape.
    """

    def __init__(self, sources: Sequence[TrainBatches], order: Order):
        self._sources, self.order, self._shape = tuple(sources), order, sources[0].shape

    def ready(self, step: int) -> bool:
        """Returns whether a step's batch can be made at once: see `TrainBatches.ready`."""
        _, numbers, sources = self._rows(step, np.arange(self._shape.batch_size))
        # Of each source is asked, so that none waits for another's plan to be begun.
        are_ready = [
            one.ready_for(int(numbers[here].min()), int(numbers[here].max()))
            for one, here in self._by_source(sources)
        ]
        return all(are_ready)

    def close(self) -> None:
        """Ends what is being planned; a thread that waits for it gives up."""
        for one in self._sources:
            one.close()

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns rows `indices` of a step of this phase: see `TrainBatches.batch`."""
        while not self.ready(step):
            self._sources[0].plans.pause()
        rows, numbers, sources = self._rows(step, indices)
        batch: Batch = {}
        for one, here in self._by_source(sources):
            for name, array in one.batch_of(step, numbers[here]).items():
                empty = np.empty((len(rows), *array.shape[1:]), array.dtype)
                batch.setdefault(name, empty)[here] = array
        return batch | {"rows": rows.astype(np.uint32)}

    def _rows(self, step: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns rows of the phase, their numbers among those of their sources, and these."""
        rows = self._shape.rows(step, indices)
        sources, numbers = self.order.of(rows)
        return rows, numbers, sources

    def _by_source(self, sources: np.ndarray) -> Iterator[tuple[TrainBatches, np.ndarray]]:
        for number, one in enumerate(self._sources):
            here = sources == number
            if here.any():
                yield one, here


def of_sources(manifest: dict[str, Any], train: Stream) -> list[Stream]:
    """Returns the parts of the training split that the sources of a mixture are."""
    ends = np.cumsum([0, *manifest["documents_of_sources"]]).tolist()
    return [train.part(*bounds) for bounds in itertools.pairwise(ends)]


def require_row(name: str, part: Stream, sequence_length: int, units: Units) -> None:
    """Raises InputError if a source of a mixture, or all text, does not give such a row."""
    if part.tokens < sequence_length:
        raise InputError(
            f"corpus.mixture: {name} has {part.tokens} tokens to train on, which do not fill a row "
            f"of {sequence_length}; give it more text, or remove it"
        )
    if units == "swapped_pairs" and not (np.diff(part.document_offsets) > 1).any():
        raise InputError(
            f"data.objective=mlm_sop: no document of {name} has two sentences; give longer ones, "
            "remove it, or take mlm"
        )
