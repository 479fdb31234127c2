"""Texts of any length in rows of the same number of tokens, as they come.

Texts whose vectors are wanted come some thousands at a time: sorted by length they are put one
behind the other, and attention, which takes each by itself (`model.attention.Packing`), gets room
for K tokens a text. K is one of a few numbers, so that texts of all lengths share a handful of
compiled programs.

Shape letters: S tokens of a row, N texts of a row, K places for the tokens of a text.
"""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

Batch = dict[str, np.ndarray]

# K; beyond, a multiple of the last.
_PLACES = (16, 32, 64, 128)

Row = list[int]


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


def shared(batch: Batch, lengths: np.ndarray, together: int) -> Batch:
    """Returns rows of a step with one text each as rows that texts share, and a `Packing` of them.

    The texts of so many rows that follow one another stand one behind the other in as many shorter
    rows, over whose ends they go on. How long these are is known from the step's lengths and N
    alone; so what a line calls `filled` depends on the devices, as no other number of it does.

    Args:
      batch: `input_ids`, `segment_ids` and `input_mask` [B, K], and whatever else a row has.
      lengths: of all texts of the step.
      together: N, into which B falls: rows of a device, or of a part of what it has to do.

    Returns:
      `input_ids`, `segment_ids`, `input_mask`, `positions` and `places` int32 [B, S], `tokens`
      int32 [B, K], and the rest as it was.
    """
    places = batch["input_ids"].shape[1]
    fullest = int(lengths.reshape(-1, together).sum(axis=1).max())
    step = max(places // 8, 1)  # few programs are compiled
    size = min(-(-fullest // (together * step)) * step, places)
    groups = len(batch["input_ids"]) // together
    where = np.zeros((groups, together * size), np.int32)
    made = {"input_mask": np.zeros_like(where), "places": where}
    tokens = np.full((groups, together * places), together * size, np.int32)
    for group, mask in enumerate(batch["input_mask"].reshape(groups, -1)):
        there = np.flatnonzero(mask)
        where[group, : len(there)], made["input_mask"][group, : len(there)] = there, 1
        tokens[group, there] = np.arange(len(there))
    for name in ("input_ids", "segment_ids"):
        made[name] = np.take_along_axis(batch[name].reshape(groups, -1), where, axis=1)
    made["positions"], made["tokens"] = where % places, tokens
    rows = len(batch["input_ids"])
    return batch | {name: array.reshape(rows, -1) for name, array in made.items()}


def lengths_of_programs(longest: int) -> list[int]:
    """Returns every K of texts of up to `longest` tokens: the longest text of each program."""
    return sorted({room(length, longest)[0] for length in range(1, longest + 1)})


def room(length: int, longest: int) -> tuple[int, int]:
    """Returns K for texts of this length, and the next smaller one."""
    step = _PLACES[-1]
    steps = [_PLACES[0] // 2, *_PLACES, *range(2 * step, longest + step, step)]
    i = next(i for i, most in enumerate(steps) if i and most >= length)
    return min(steps[i], longest), steps[i - 1]
