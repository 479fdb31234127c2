"""Packing: examples of any length in rows of the same number of tokens.

Of an epoch's examples all lengths are known: their histogram is packed, and examples of one length
take its places in turn (Krell et al. 2021, "Efficient sequence packing without
cross-contamination", longest-pack-first histogram packing).

Shape letters: S tokens of a row; B rows, E examples of a row at most, M examples of a batch, P
predictions of an example, Q of a row.
"""

from typing import NamedTuple

import numpy as np

from bert_jax.config import Data, Phase
from bert_jax.data import draws, masking


class Limits(NamedTuple):
    """The most that a row holds: S tokens, E examples, Q predictions."""

    tokens: int
    examples: int
    predictions: int


class Packed(NamedTuple):
    """The limits within which examples of a phase share rows."""

    examples: int  # of a row, at most
    predictions: int  # of a row, at most
    masked_share: float  # of an example's tokens that are predicted, the largest of any step
    max_predictions: int  # of an example

    @classmethod
    def of(cls, data: Data, phase: Phase) -> "Packed | None":
        """Returns that of a phase; None if each example has a row of its own."""
        if data.packing == "none":
            return None
        limits = phase.examples_per_row, phase.row_predictions
        return cls(*limits, data.largest_masked_share, phase.max_predictions_per_seq)

    def pack(
        self, lengths: np.ndarray, sequence_length: int, key: tuple[int, int], epoch: int
    ) -> "Packs":
        """Packs examples of these lengths, unsigned [examples]: see `pack_epoch`."""
        length = np.arange(sequence_length + 1)
        predictions = masking.number_to_predict(length, self.masked_share, self.max_predictions)
        limits = Limits(sequence_length, self.examples, self.predictions)
        return pack_epoch(lengths, predictions, limits, key, epoch)


class Packs(NamedTuple):
    """The packed rows of an epoch, in the order in which it takes them."""

    starts: np.ndarray  # uint64 [rows + 1], where each row's examples begin in `slots`
    slots: np.ndarray  # uint32 [examples], which examples of the epoch, row after row

    def __len__(self) -> int:
        return len(self.starts) - 1

    def of(self, rows: np.ndarray, examples: int) -> np.ndarray:
        """Returns the slots of some rows, int64 [B, E], -1 where a row holds fewer.

        `rows` are int64 [B], `examples` is E.
        """
        first, last = (self.starts[rows + i].astype(np.int64)[:, None] for i in (0, 1))
        entry = first + np.arange(examples)
        there = entry < last
        return np.where(there, self.slots[np.where(there, entry, 0)].astype(np.int64), -1)


def pack_epoch(
    lengths: np.ndarray,
    predictions: np.ndarray,
    limits: Limits,
    key: tuple[int, int],
    epoch: int,
) -> Packs:
    """Packs the examples of an epoch; a function of its arguments alone.

    Args:
      lengths: uint16 or wider [examples], by slot, specials included; S at most.
      predictions: int64 [S + 1], of an example of each length at most; Q at most.
      limits: of a row.
      key: of the order of the rows.
      epoch: its number.
    """
    counts = np.bincount(lengths, minlength=limits.tokens + 1)
    # Rising within a length: which example gets which place hangs on nothing but the slots.
    by_length = np.argsort(lengths, kind="stable").astype(np.uint32)
    taken = np.cumsum(counts) - counts
    members, sizes = [], []
    for count, together in combinations(counts, predictions, limits):
        columns = []
        for length in together:
            columns.append(by_length[taken[length] : taken[length] + count])
            taken[length] += count
        members.append(np.stack(columns, axis=1).ravel())
        sizes.append(np.full(count, len(together), np.uint8 if limits.examples < 256 else np.int64))
    slots, size = np.concatenate(members), np.concatenate(sizes)
    before = np.cumsum(size, dtype=np.int64) - size
    order = draws.permutation(key, epoch, len(size))
    size = size[order]
    starts = np.concatenate([[0], np.cumsum(size, dtype=np.int64)])
    entry = np.arange(len(slots)) + np.repeat(before[order] - starts[:-1], size)
    return Packs(starts.astype(np.uint64), slots[entry])


def combinations(
    counts: np.ndarray, predictions: np.ndarray, limits: Limits
) -> list[tuple[int, tuple[int, ...]]]:
    """Returns which lengths stand together, each with how many rows of them there are.

    From the longest length on, examples go into the row that they leave least empty.

    Args:
      counts: int64 [S + 1], examples of each length.
      predictions: int64 [S + 1], of an example of each length at most.
      limits: of a row.
    """
    # By how much of a row is left: (rows, lengths in them, predictions in them).
    waiting: list[list[tuple[int, tuple[int, ...], int]]] = [[] for _ in range(limits.tokens + 1)]
    full = []

    def put(rows: int, together: tuple[int, ...], predicted: int) -> None:
        left = limits.tokens - sum(together)
        if left and len(together) < limits.examples and predicted < limits.predictions:
            waiting[left].append((rows, together, predicted))
        else:
            full.append((rows, together))

    for length in np.flatnonzero(counts)[::-1].tolist():
        examples, predicted = int(counts[length]), int(predictions[length])
        most = limits.predictions - predicted
        for left in range(length, limits.tokens + 1):
            # Shorter for every example that is put there, so that each is looked at once.
            kept = []
            for rows, together, before in waiting[left]:
                each = min(
                    left // length,
                    limits.examples - len(together),
                    (limits.predictions - before) // max(predicted, 1),
                )
                if before > most or not each or not examples:
                    kept.append((rows, together, before))
                    continue
                whole = min(examples // each, rows)
                parts = [(whole, each)] if whole else []
                rest = min(examples - whole * each, each) if whole < rows else 0
                if rest:
                    parts.append((1, rest))
                for number, times in parts:
                    put(number, together + (length,) * times, before + times * predicted)
                    examples -= number * times
                if left_over := rows - sum(number for number, _ in parts):
                    kept.append((left_over, together, before))
            waiting[left] = kept
        each = min(
            limits.tokens // length, limits.examples, limits.predictions // max(predicted, 1)
        )
        if examples // each:
            put(examples // each, (length,) * each, each * predicted)
        if examples % each:
            put(1, (length,) * (examples % each), examples % each * predicted)
    return full + [(rows, together) for room in waiting for rows, together, _ in room]


def share(
    examples: dict[str, np.ndarray], slots: np.ndarray, predictions: int
) -> dict[str, np.ndarray]:
    """Puts examples that stand by themselves in rows, one behind the other.

    Args:
      examples: M rows of `batches.Examples`, S tokens and P predictions each.
      slots: bool [B, E], M of them True: the examples of each row, in turn.
      predictions: Q.

    Returns:
      `row_weights` float32 [B, E], 1 for an example; `next_sentence_labels` int32 [B, E];
      `example_starts` int32 [B, E], where each begins; `input_ids`, `segment_ids`, `input_mask`,
      `example_numbers` from 1 on and `positions` within each, int32 [B, S]; and what
      `batches.Examples` gives of masked pieces, [B, Q]. What is of no example is 0.
    """
    row, place = np.nonzero(slots)
    real, predicted = (examples[n].astype(bool) for n in ("input_mask", "masked_lm_weights"))

    def begins(there: np.ndarray) -> np.ndarray:
        """Returns where the examples begin, if those before them fill a row: int32 [M]."""
        sizes = np.zeros(slots.shape, np.int32)
        sizes[slots] = there.sum(axis=1)
        return (np.cumsum(sizes, axis=1) - sizes)[slots]

    def by_example(values: np.ndarray) -> np.ndarray:
        result = np.zeros(slots.shape, values.dtype)
        result[slots] = values
        return result

    starts = begins(real)
    result = {
        "row_weights": slots.astype(np.float32),
        "example_starts": by_example(starts.astype(np.int32)),
        "next_sentence_labels": by_example(examples["next_sentence_labels"]),
    }
    column = np.arange(real.shape[1], dtype=np.int32)
    of_tokens = {name: examples[name] for name in ("input_ids", "segment_ids", "input_mask")} | {
        "example_numbers": np.broadcast_to(place[:, None].astype(np.int32) + 1, real.shape),
        "positions": np.broadcast_to(column, real.shape),
    }
    of_masked = {name: examples[name] for name in ("masked_lm_ids", "masked_lm_weights")} | {
        "masked_lm_positions": examples["masked_lm_positions"] + starts[:, None].astype(np.int32)
    }
    for there, begin, width, arrays in (
        (real, starts, real.shape[1], of_tokens),
        (predicted, begins(predicted), predictions, of_masked),
    ):
        # In each row entries that are there come first, so that columns count them.
        to = (row * width + begin)[:, None] + np.arange(there.shape[1])
        for name, values in arrays.items():
            result[name] = np.zeros((len(slots), width), values.dtype)
            result[name].ravel()[to[there]] = values[there]
    return result
