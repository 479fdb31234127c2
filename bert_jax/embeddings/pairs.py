"""Pairs of texts that belong together, made of a corpus without labels.

A row is a function of (seed, row): which sentence it is about, and what is cut around it.

Shape letters: E examples, B rows (two an example), S pieces of a row.
"""

import dataclasses
import zlib
from typing import Literal

import numpy as np

from bert_jax.data import draws
from bert_jax.data.batches import Batch, Ids
from bert_jax.data.stream import Stream
from bert_jax.errors import InputError

# `neighbours`: what ends with a sentence, and what begins with the next of the same document;
# `crops`: two pieces of one passage, which may overlap; `twice`: a passage and itself, which
# dropout alone tells apart (Gao et al. 2021, SimCSE).
How = Literal["neighbours", "crops", "twice"]

# Pieces that a text has at least, where its document has so many.
_SHORTEST = 8
# A crop begins with a word if one begins within so many pieces.
_WORD = 8


@dataclasses.dataclass
class SpanPairs:
    """The places of two texts an example in `Stream.ids`."""

    starts: np.ndarray  # int64 [E, 2]
    lengths: np.ndarray  # int64 [E, 2], in pieces, at least 1


class CorpusPairs:
    """Batches of pairs of a corpus. May be pickled.

    Args:
      stream: of the documents.
      ids: of their vocabulary.
      how: see above.
      prefixes: of the first texts and of those that answer them, in pieces.
      examples: a step.
      length: of a row at most, S.
      seed: of all draws.
    """

    def __init__(
        self,
        stream: Stream,
        ids: Ids,
        how: How,
        prefixes: tuple[list[int], list[int]],
        examples: int,
        length: int,
        seed: int,
    ):
        self._stream, self._ids, self._how, self._prefixes = stream, ids, how, prefixes
        self._examples, self._key = examples, draws.key_of(seed, "similar", how)
        self._length = length
        self._room = length - 2 - max(map(len, prefixes))
        if self._room < _SHORTEST:
            raise InputError(
                f"task.max_sequence_length={length}: has no room for texts of {_SHORTEST} pieces "
                "behind the prefix; take more"
            )
        # Sentences that an example can be about: of neighbours all but each document's last.
        ends = np.asarray(stream.document_offsets[1:], np.int64)
        sentences = len(stream.sentence_offsets) - 1
        self._places = np.arange(sentences)
        if how == "neighbours":
            self._places = np.delete(self._places, ends - 1)
        if not self.total:
            raise InputError(
                f"task.train: corpus: has no document of two sentences to make {how} of; take crops"
            )
        self._shuffled = draws.ShuffledEpochs(self._key, self.total)
        # Where the document of each of them ends, and begins, in sentences.
        document = np.searchsorted(ends, self._places, side="right")
        self._document = np.stack([np.append(0, ends[:-1])[document], ends[document]], axis=1)

    @property
    def total(self) -> int:
        """Returns how many examples an epoch has."""
        return len(self._places)

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns rows of a step, any subset in any order, the two of an example together.

        Returns:
          What `tasks.rows.TrainBatches.batch` does; `keys` uint32 [B], alike where texts are.
        """
        spans = self._of_step(step)
        length = min(-(-int(self._lengths(spans).max()) // 32) * 32, self._length)
        rows = np.asarray(indices, np.int64)
        ids = np.full((len(rows), length), self._ids.pad, np.int32)
        mask = np.zeros_like(ids)
        keys = np.empty(len(rows), np.uint32)
        for at, (example, side) in enumerate(zip(*divmod(rows, 2), strict=True)):
            start = int(spans.starts[example, side])
            text = self._stream.ids[start : start + int(spans.lengths[example, side])]
            row = [self._ids.cls, *self._prefixes[side], *text.tolist(), self._ids.sep]
            ids[at, : len(row)], mask[at, : len(row)] = row, 1
            keys[at] = zlib.crc32(text.astype(np.uint32).tobytes())
        return {
            "rows": (step * 2 * self._examples + rows).astype(np.uint32),
            "row_weights": np.ones(len(rows), np.float32),
            "input_ids": ids,
            "segment_ids": np.zeros_like(ids),
            "input_mask": mask,
            "keys": keys,
        }

    def lengths(self, step: int) -> np.ndarray:
        """Returns how many pieces each row of a step has, int64 [B]."""
        return self._lengths(self._of_step(step))

    def _lengths(self, spans: SpanPairs) -> np.ndarray:
        around = 2 + np.array([len(prefix) for prefix in self._prefixes])
        return (spans.lengths + around).reshape(-1)

    def _of_step(self, step: int) -> SpanPairs:
        return self.spans(np.int64(step) * self._examples + np.arange(self._examples))

    def spans(self, numbers: np.ndarray) -> SpanPairs:
        """Returns which texts examples of these numbers have, int64 [E], counted from the first."""
        which = self._shuffled[numbers]
        low = (numbers & 0xFFFFFFFF).astype(np.uint64)
        words = draws.philox(low, (numbers >> 32).astype(np.uint64), 0, 0, self._key)
        sentences, bounds = self._places[which], self._document[which]
        return getattr(self, f"_{self._how}")(sentences, bounds, words)

    def _offsets(self, sentences: np.ndarray) -> np.ndarray:
        """Returns where sentences begin in `ids`."""
        return np.asarray(self._stream.sentence_offsets)[sentences].astype(np.int64)

    def _neighbours(
        self, sentences: np.ndarray, bounds: np.ndarray, words: np.ndarray
    ) -> SpanPairs:
        middle = self._offsets(sentences + 1)
        wanted = [self._drawn(words[:, side], self._room) for side in (0, 1)]
        # Whole sentences, as many as the drawn length has room for; of a longer one its beginning.
        first = np.searchsorted(self._stream.sentence_offsets, middle - wanted[0])
        first = self._offsets(np.clip(first, bounds[:, 0], sentences))
        last = np.searchsorted(self._stream.sentence_offsets, middle + wanted[1], side="right") - 1
        last = self._offsets(np.clip(last, sentences + 2, bounds[:, 1]))
        starts = np.stack([first, middle], axis=1)
        ends = np.stack([middle, last], axis=1)
        return SpanPairs(starts, np.minimum(ends - starts, np.stack(wanted, axis=1)))

    def _crops(self, sentences: np.ndarray, bounds: np.ndarray, words: np.ndarray) -> SpanPairs:
        begin = self._offsets(sentences)
        passage = np.minimum(self._offsets(bounds[:, 1]) - begin, 2 * self._room)
        starts, lengths = [], []
        for side in (0, 1):
            length = self._drawn(words[:, side], np.minimum(passage, self._room))
            start = begin + draws.bounded_integers(words[:, 2 + side], passage - length + 1)
            for _ in range(_WORD):
                inside = self._ids.continues[self._stream.ids[start]] & (length > 1)
                start, length = start + inside, length - inside
            starts.append(start)
            lengths.append(length)
        return SpanPairs(np.stack(starts, axis=1), np.stack(lengths, axis=1))

    def _twice(self, sentences: np.ndarray, bounds: np.ndarray, words: np.ndarray) -> SpanPairs:
        begin, end = self._offsets(sentences), self._offsets(bounds[:, 1])
        length = self._drawn(words[:, 0], np.minimum(end - begin, self._room))
        return SpanPairs(np.stack([begin, begin], axis=1), np.stack([length, length], axis=1))

    def _drawn(self, words: np.ndarray, most: np.ndarray | int) -> np.ndarray:
        """Returns lengths from `_SHORTEST` to `most`; `most` where it is less."""
        least = np.minimum(_SHORTEST, most)
        return least + draws.bounded_integers(words, most - least + 1)
