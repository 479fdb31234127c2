"""Packing: texts, or examples, of any length in rows of the same number of tokens.

Two ways, since what is known beforehand differs. Of an epoch's examples all lengths are: their
histogram is packed, and examples of one length take its places in turn (Krell et al. 2021,
"Efficient sequence packing without cross-contamination", longest-pack-first histogram packing).
Texts whose vectors are wanted come some thousands at a time: sorted by length they are put one
behind the other, and attention, which takes each by itself (`model.attention.Packing`), gets room
for K tokens a text. K is one of a few numbers, so that texts of all lengths share a handful of
compiled programs.

Shape letters: S tokens of a row, N texts of a row, K places for the tokens of a text; B rows, E
examples of a row at most, M examples of a batch, P predictions of an example, Q of a row.
"""

import bisect
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.data import draws

# K; beyond, a multiple of the last.
_PLACES = (16, 32, 64, 128)

Row = list[int]


# --- examples of an epoch -------------------------------------------------------------------------


class Limits(NamedTuple):
    """The most that a row holds: S tokens, E examples, Q predictions."""

    tokens: int
    examples: int
    predictions: int


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
      examples: M rows of `batches.execute`, S tokens and P predictions each.
      slots: bool [B, E], M of them True: the examples of each row, in turn.
      predictions: Q.

    Returns:
      `row_weights` float32 [B, E], 1 for an example; `next_sentence_labels` int32 [B, E];
      `example_starts` int32 [B, E], where each begins; `input_ids`, `segment_ids`, `input_mask`,
      `example_numbers` from 1 on and `positions` within each, int32 [B, S]; and what
      `batches.execute` gives of masked pieces, [B, Q]. What is of no example is 0.
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


# --- texts as they come ---------------------------------------------------------------------------


def batches(
    lengths: Sequence[int], row_tokens: int, longest: int, shards: int
) -> Iterator[tuple[int, int, list[Row]]]:
    """Yields texts from the longest on, as many as go into a row, a row a shard.

    Args:
      lengths: tokens of each text.
      row_tokens: S.
      longest: that a text may be; at most S.
      shards: rows of a batch.

    Yields:
      K and N, which depend on each other alone, and which texts are in each row.
    """
    waiting: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        waiting.setdefault(length, []).append(i)
    present = sorted(waiting)  # each a length of texts that wait
    while present:
        places, shorter = room(present[-1], longest)
        # So many as fill a row if all are just too long for the next shorter program.
        slots = max(row_tokens // (shorter + 1), 1)
        rows: list[Row] = []
        for _ in range(shards):
            row: Row = []
            left = row_tokens
            # The longest that fits: what longer ones leave of a row is filled with shorter ones.
            while len(row) < slots and (fitting := bisect.bisect_right(present, left)):
                length = present[fitting - 1]
                left -= length
                row.append(waiting[length].pop())
                if not waiting[length]:
                    del present[fitting - 1]
            rows.append(row)
        yield places, slots, rows


def pack(
    texts: Sequence[np.ndarray], row_tokens: int, slots: int, places: int
) -> dict[str, np.ndarray]:
    """Returns one row: `input_ids` int32 [S], and the parts of a `Packing`, [S], [N, K] and [S].

    Args:
      texts: ids of each, N at most, of K tokens at most, S together at most.
      row_tokens: S.
      slots: N.
      places: K.
    """
    lengths = np.array([len(ids) for ids in texts], int)
    starts = np.cumsum(lengths) - lengths
    column = np.arange(lengths.sum()) - np.repeat(starts, lengths)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, row_tokens - len(values))).astype(np.int32)

    tokens = np.full((slots, places), row_tokens, np.int32)
    numbers = np.repeat(np.arange(len(texts)), lengths)
    tokens[numbers, column] = np.arange(len(column))
    return {
        "input_ids": padded(np.concatenate([np.empty(0, int), *texts])),
        "positions": padded(column),
        "tokens": tokens,
        "places": padded(numbers * places + column),
    }


def lengths_of_programs(longest: int) -> list[int]:
    """Returns every K of texts of up to `longest` tokens: the longest text of each program."""
    return sorted({room(length, longest)[0] for length in range(1, longest + 1)})


def room(length: int, longest: int) -> tuple[int, int]:
    """Returns K for texts of this length, and the next smaller one."""
    step = _PLACES[-1]
    steps = [_PLACES[0] // 2, *_PLACES, *range(2 * step, longest + step, step)]
    i = next(i for i, most in enumerate(steps) if i and most >= length)
    return min(steps[i], longest), steps[i - 1]
