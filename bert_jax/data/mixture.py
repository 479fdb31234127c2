"""Batches of several sources, mixed by weight and size, in each phase by its own shares.

In every block of 4,096 rows each source has its share, in a random order keyed by (seed, split,
phase, block). So the number of a row among the rows of its source can be computed from its block
alone; that number gives the row's position in the plans of the source (data.batches). A source with
a large weight goes through more epochs than one with a small weight. Batches are stateless.
"""

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax.config import Experiment, source_name
from bert_jax.config.text_corpus import LEAST_SHARE
from bert_jax.config.text_corpus import MIXED_ROWS as BLOCK_ROWS
from bert_jax.data import draws
from bert_jax.data.batches import Batch, TrainBatches
from bert_jax.data.plans import RowKind
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError, printable


class SourceOrder:
    """The sources of a phase's rows. May be pickled.

    Each weight is 0 or gives at least one row in every block; `key_parts` is (seed, split, phase).
    """

    def __init__(self, weights: Sequence[float] | np.ndarray, key_parts: tuple[object, ...]):
        self._key = draws.key_of(*key_parts, "mixture")
        relative = np.array(weights) / max(weights)  # the sum of large weights may overflow
        exact = relative / relative.sum() * BLOCK_ROWS
        counts = np.floor(exact).astype(np.int64)
        # The remaining rows go to the largest remainders, among equal ones to the first.
        rounded_up = np.argsort(counts - exact, kind="stable")[: BLOCK_ROWS - counts.sum()]
        counts[rounded_up] += 1
        self.counts = tuple(counts.tolist())

    def locate(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the sources of rows and their numbers among the source's rows, int64 [B] each."""
        sources, numbers = np.empty_like(rows), np.empty_like(rows)
        blocks, slots = np.divmod(rows, BLOCK_ROWS)
        for block in np.unique(blocks).tolist():
            in_block = blocks == block
            source, number = _locate_block(self._key, self.counts, block)
            sources[in_block], numbers[in_block] = source[slots[in_block]], number[slots[in_block]]
        return sources, numbers


@functools.lru_cache(maxsize=8)
def _locate_block(
    key: tuple[int, int], counts: tuple[int, ...], block: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `SourceOrder.locate` does, for all rows of a block."""
    sources = np.repeat(np.arange(len(counts)), counts)[draws.permutation(key, block, BLOCK_ROWS)]
    numbers = np.empty(BLOCK_ROWS, np.int64)
    for source, count in enumerate(counts):
        numbers[sources == source] = block * count + np.arange(count)
    return sources, numbers


class MixedBatches:
    """Training batches of one phase from several sources; see `TrainBatches`. May be pickled.

    `by_source` has the batches of each source alone, all with the same shape.
    """

    def __init__(self, by_source: Sequence[TrainBatches], order: SourceOrder):
        self._by_source, self.order, self._shape = tuple(by_source), order, by_source[0].shape

    def is_ready(self, step: int) -> bool:
        """Returns whether a step's batch can be made at once: see `TrainBatches.is_ready`."""
        _, numbers, sources = self._locate(step, np.arange(self._shape.batch_size))
        # A list, so that every source starts to plan, even if an earlier one is not ready.
        are_ready = [
            batches.are_rows_ready(int(numbers[in_source].min()), int(numbers[in_source].max()))
            for batches, in_source in self._group_by_source(sources)
        ]
        return all(are_ready)

    def close(self) -> None:
        """Stops planning; a thread that waits for a plan raises RuntimeError."""
        for batches in self._by_source:
            batches.close()

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns rows `indices` of a step of this phase: see `TrainBatches.batch`."""
        while not self.is_ready(step):
            self._by_source[0].plans.wait_briefly()  # they are closed together
        rows, numbers, sources = self._locate(step, indices)
        batch: Batch = {}
        for batches, in_source in self._group_by_source(sources):
            for name, array in batches.batch_of_rows(step, numbers[in_source]).items():
                empty = np.empty((len(rows), *array.shape[1:]), array.dtype)
                batch.setdefault(name, empty)[in_source] = array
        return batch | {"rows": rows.astype(np.uint32)}

    def _locate(self, step: int, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns for each row its number in the phase, its number in its source, the source."""
        rows = self._shape.rows(step, indices)
        sources, numbers = self.order.locate(rows)
        return rows, numbers, sources

    def _group_by_source(self, sources: np.ndarray) -> Iterator[tuple[TrainBatches, np.ndarray]]:
        for source, batches in enumerate(self._by_source):
            in_source = sources == source
            if in_source.any():
                yield batches, in_source


def split_sources(manifest: dict[str, Any], train: Stream) -> list[Stream]:
    """Splits the training split of a mixture into the parts of its sources."""
    ends = np.cumsum([0, *manifest["documents_of_sources"]]).tolist()
    return [train.part(*bounds) for bounds in itertools.pairwise(ends)]


def phase_weights(experiment: Experiment, phase: int, parts: Sequence[Stream]) -> np.ndarray:
    """Returns a weight for each source of a mixture in a phase, float64; their sum is arbitrary.

    With s the tokens of a source divided by those of the largest source, its weight is multiplied
    by s^temperature (Conneau et al. 2020, section 3.1). `parts` are those of `split_sources`.
    """
    corpus, sizes = experiment.corpus_of(phase), np.array([part.tokens for part in parts], float)
    weights = np.array(corpus.mixture or (1.0,) * len(parts))
    weights = weights / weights.max() * (sizes / sizes.max()) ** corpus.temperature
    too_small = (weights > 0) & (weights * BLOCK_ROWS < weights.sum())
    if corpus.temperature and too_small.any():  # with temperature 0, `Corpus` has checked this
        name = corpus.source_labels[int(too_small.argmax())]
        raise InputError(
            f"phases.{phase}: with temperature {corpus.temperature:g}, {name} has {LEAST_SHARE}; "
            f"lower the temperature, or set its weight in phases.{phase}.mixture higher or to 0"
        )
    return weights


def describe_shares(experiment: Experiment, parts: Sequence[Stream]) -> list[str]:
    """Returns a line for each source: its share of the rows of each phase."""
    weights = [phase_weights(experiment, n, parts) for n in range(len(experiment.phases))]
    lines = []
    for source, name in enumerate(experiment.corpus.source_labels):
        shares = ", then ".join(f"{w[source] / w.sum():.2%}" for w in weights)
        lines.append(f"mixture: {printable(source_name(name))}: {shares} of rows")
    return lines


def require_row(name: str, part: Stream, sequence_length: int, row_kind: RowKind) -> None:
    """Raises InputError if `part`, a source or all text, gives no row."""
    if part.tokens < sequence_length:
        raise InputError(
            f"corpus.mixture: {name} has {part.tokens} tokens to train on, which do not fill a row "
            f"of {sequence_length}; give it more text, or remove it"
        )
    if row_kind == "swapped_pairs" and not (np.diff(part.document_offsets) > 1).any():
        raise InputError(
            f"data.objective=mlm_sop: no document of {name} has two sentences; give longer ones, "
            "remove the source, or set data.objective=mlm"
        )
