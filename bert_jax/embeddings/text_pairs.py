"""Pairs of related texts, drawn from a corpus without labels.

The seed and the number of an example determine a sentence, and two spans of tokens around it.

Shape letters: E examples, B rows (two for each example), S tokens of a row.
"""

import dataclasses
import zlib
from typing import Literal

import numpy as np

from bert_jax.data import draws
from bert_jax.data.batches import Batch, Ids
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError

# `neighbours`: the text up to the end of a sentence, and the text after it in the document;
# `crops`: two parts of one passage, which may overlap; `twice`: the same passage twice, with
# different dropout (Gao et al. 2021, SimCSE).
PairMethod = Literal["neighbours", "crops", "twice"]

# Minimum number of tokens of a text, unless its document has fewer.
_SHORTEST = 8
# A crop skips at most this many tokens to begin with a whole word.
_MAX_SKIPPED = 8


@dataclasses.dataclass
class SpanPairs:
    """The spans of the two texts of each example in `Stream.ids`."""

    starts: np.ndarray  # int64 [E, 2]
    lengths: np.ndarray  # int64 [E, 2], in tokens, at least 1


class CorpusPairs:
    """Batches of pairs of a corpus. Can be pickled.

    Args:
      prefixes: token ids before the first texts, and before the second texts.
      length: maximum number of tokens of a row, S.
    """

    def __init__(
        self,
        stream: Stream,
        special_ids: Ids,
        method: PairMethod,
        prefixes: tuple[list[int], list[int]],
        examples_per_step: int,
        length: int,
        seed: int,
    ):
        self._stream, self._special_ids = stream, special_ids
        self._method, self._prefixes = method, prefixes
        self._step_examples, self._key = examples_per_step, draws.key_of(seed, "similar", method)
        self._length = length
        self._room = length - 2 - max(map(len, prefixes))
        if self._room < _SHORTEST:
            raise InputError(
                f"task.max_sequence_length={length}: too short for the prefix and a text of "
                f"{_SHORTEST} tokens; increase it"
            )
        # Sentences of which examples are made; the last of a document has no next neighbour.
        ends = np.asarray(stream.document_offsets[1:], np.int64)
        sentences = len(stream.sentence_offsets) - 1
        self._sentences = np.arange(sentences)
        if method == "neighbours":
            self._sentences = np.delete(self._sentences, ends - 1)
        if not self.total:
            raise InputError(
                f"task.train: corpus: no document has two sentences, for {method}; use crops"
            )
        self._shuffled = draws.ShuffledEpochs(self._key, self.total)
        # First sentence, and end, of the document of each sentence: [sentences, 2].
        document = np.searchsorted(ends, self._sentences, side="right")
        self._bounds = np.stack([np.append(0, ends[:-1])[document], ends[document]], axis=1)

    @property
    def total(self) -> int:
        """Returns the number of examples of an epoch."""
        return len(self._sentences)

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns the arrays of `tasks.rows.TaskBatches.batch`, and `keys`.

        `keys` are uint32 [B], equal for equal texts. `indices` are rows of the step in any order,
        but rows 2i and 2i + 1, those of example i, stand together.
        """
        spans, special_ids = self._step_spans(step), self._special_ids
        length = min(-(-int(self._row_lengths(spans).max()) // 32) * 32, self._length)
        rows = np.asarray(indices, np.int64)
        ids = np.full((len(rows), length), special_ids.pad, np.int32)
        mask = np.zeros_like(ids)
        keys = np.empty(len(rows), np.uint32)
        for index, (example, side) in enumerate(zip(*divmod(rows, 2), strict=True)):
            start = int(spans.starts[example, side])
            text = self._stream.ids[start : start + int(spans.lengths[example, side])]
            row = [special_ids.cls, *self._prefixes[side], *text.tolist(), special_ids.sep]
            ids[index, : len(row)], mask[index, : len(row)] = row, 1
            keys[index] = zlib.crc32(text.astype(np.uint32).tobytes())
        return {
            "rows": (step * 2 * self._step_examples + rows).astype(np.uint32),
            "row_weights": np.ones(len(rows), np.float32),
            "input_ids": ids,
            "segment_ids": np.zeros_like(ids),
            "input_mask": mask,
            "keys": keys,
        }

    def lengths(self, step: int) -> np.ndarray:
        """Returns the number of tokens of each row of a step, int64 [B]."""
        return self._row_lengths(self._step_spans(step))

    def _row_lengths(self, spans: SpanPairs) -> np.ndarray:
        added = 2 + np.array([len(prefix) for prefix in self._prefixes])
        return (spans.lengths + added).reshape(-1)

    def _step_spans(self, step: int) -> SpanPairs:
        return self.spans(np.int64(step) * self._step_examples + np.arange(self._step_examples))

    def spans(self, numbers: np.ndarray) -> SpanPairs:
        """Returns the spans of examples; `numbers`, int64 [E], count from the start of the run."""
        indices = self._shuffled[numbers]
        low = (numbers & 0xFFFFFFFF).astype(np.uint64)
        bits = draws.philox(low, (numbers >> 32).astype(np.uint64), 0, 0, self._key)
        sentences, bounds = self._sentences[indices], self._bounds[indices]
        return getattr(self, f"_{self._method}")(sentences, bounds, bits)

    def _offsets(self, sentences: np.ndarray) -> np.ndarray:
        """Returns the offsets of the sentences in `Stream.ids`."""
        return np.asarray(self._stream.sentence_offsets)[sentences].astype(np.int64)

    def _neighbours(self, sentences: np.ndarray, bounds: np.ndarray, bits: np.ndarray) -> SpanPairs:
        middle = self._offsets(sentences + 1)
        drawn = [self._draw_lengths(bits[:, side], self._room) for side in (0, 1)]
        # As many whole sentences as fit into the drawn length; a longer sentence is truncated.
        first = np.searchsorted(self._stream.sentence_offsets, middle - drawn[0])
        first = self._offsets(np.clip(first, bounds[:, 0], sentences))
        last = np.searchsorted(self._stream.sentence_offsets, middle + drawn[1], side="right") - 1
        last = self._offsets(np.clip(last, sentences + 2, bounds[:, 1]))
        starts = np.stack([first, middle], axis=1)
        ends = np.stack([middle, last], axis=1)
        return SpanPairs(starts, np.minimum(ends - starts, np.stack(drawn, axis=1)))

    def _crops(self, sentences: np.ndarray, bounds: np.ndarray, bits: np.ndarray) -> SpanPairs:
        begin = self._offsets(sentences)
        passage_length = np.minimum(self._offsets(bounds[:, 1]) - begin, 2 * self._room)
        starts, lengths = [], []
        for side in (0, 1):
            length = self._draw_lengths(bits[:, side], np.minimum(passage_length, self._room))
            start = begin + draws.bounded_integers(bits[:, 2 + side], passage_length - length + 1)
            for _ in range(_MAX_SKIPPED):
                in_word = self._special_ids.continues[self._stream.ids[start]] & (length > 1)
                start, length = start + in_word, length - in_word
            starts.append(start)
            lengths.append(length)
        return SpanPairs(np.stack(starts, axis=1), np.stack(lengths, axis=1))

    def _twice(self, sentences: np.ndarray, bounds: np.ndarray, bits: np.ndarray) -> SpanPairs:
        begin, end = self._offsets(sentences), self._offsets(bounds[:, 1])
        length = self._draw_lengths(bits[:, 0], np.minimum(end - begin, self._room))
        return SpanPairs(np.stack([begin, begin], axis=1), np.stack([length, length], axis=1))

    def _draw_lengths(self, bits: np.ndarray, longest: np.ndarray | int) -> np.ndarray:
        """Returns lengths from `_SHORTEST` to `longest`, or `longest` where that is less."""
        shortest = np.minimum(_SHORTEST, longest)
        return shortest + draws.bounded_integers(bits, longest - shortest + 1)
