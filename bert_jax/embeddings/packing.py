"""Packing of texts of any length into rows of S tokens.

Texts are sorted by length and concatenated in a row. Attention handles each text separately
(`model.attention.Packing`), in a slot of K tokens. K is one of a few numbers, so that texts of all
lengths share a handful of compiled programs.

Shape letters: S tokens of a row, N texts (slots) of a row, K tokens of a slot.
"""

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

Batch = dict[str, np.ndarray]

# Values of K; a larger K is a multiple of the last one.
_SLOT_TOKENS = (16, 32, 64, 128)

Row = list[int]  # the indices of the texts of a row


def batches(
    lengths: Sequence[int], row_tokens: int, max_text_tokens: int, shards: int
) -> Iterator[tuple[int, int, list[Row]]]:
    """Yields batches of one row for each shard, the longest texts first.

    Args:
      lengths: tokens of each text.
      row_tokens: S.
      max_text_tokens: maximum number of tokens of a text; at most S.
      shards: rows of a batch.

    Yields:
      K, N (which depends on K only), and the texts of each row.
    """
    texts_by_length: dict[int, list[int]] = {}
    for i, length in enumerate(lengths):
        texts_by_length.setdefault(length, []).append(i)
    remaining_lengths = sorted(texts_by_length)
    while remaining_lengths:
        slot_tokens, shorter = choose_slot_tokens(remaining_lengths[-1], max_text_tokens)
        # At most this many texts with this K fit: the shortest has `shorter + 1` tokens.
        slots = max(row_tokens // (shorter + 1), 1)
        rows: list[Row] = []
        for _ in range(shards):
            row: Row = []
            free = row_tokens
            # The longest text that fits: shorter texts fill the rest of a row.
            while len(row) < slots and (fitting := bisect.bisect_right(remaining_lengths, free)):
                length = remaining_lengths[fitting - 1]
                free -= length
                row.append(texts_by_length[length].pop())
                if not texts_by_length[length]:
                    del remaining_lengths[fitting - 1]
            rows.append(row)
        yield slot_tokens, slots, rows


def pack(
    texts: Sequence[np.ndarray], row_tokens: int, slots: int, slot_tokens: int
) -> dict[str, np.ndarray]:
    """Returns one row: `input_ids` int32 [S], and the fields of a `Packing`.

    `positions` [S]; `row_indices` [N, K] into the row; `slot_indices` [S] into the flat slots.

    Args:
      texts: token ids of each text: at most N texts, of at most K tokens each and S in all.
      row_tokens: S.
      slots: N.
      slot_tokens: K.
    """
    lengths = np.array([len(ids) for ids in texts], int)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(lengths.sum()) - np.repeat(starts, lengths)

    def padded(values: np.ndarray) -> np.ndarray:
        return np.pad(values, (0, row_tokens - len(values))).astype(np.int32)

    row_indices = np.full((slots, slot_tokens), row_tokens, np.int32)
    text_numbers = np.repeat(np.arange(len(texts)), lengths)
    row_indices[text_numbers, positions] = np.arange(len(positions))
    return {
        "input_ids": padded(np.concatenate([np.empty(0, int), *texts])),
        "positions": padded(positions),
        "row_indices": row_indices,
        "slot_indices": padded(text_numbers * slot_tokens + positions),
    }


def pack_batch(batch: Batch, lengths: np.ndarray, group_rows: int) -> Batch:
    """Packs the texts of a step's rows, one text each, into shorter rows, with their `Packing`.

    A group of G consecutive rows becomes G shorter rows, which hold the group's texts without gaps;
    a text may continue in the next row. S depends on G, so on the number of devices; of all metrics
    only `filled` shows it, the share of real tokens in rows.

    Args:
      batch: `input_ids`, `segment_ids` and `input_mask` [B, K], and any other arrays, returned as
        they are.
      lengths: number of tokens of each text of the step, on all devices, int [texts].
      group_rows: G, a divisor of B: rows of a device, or of one of its micro-batches.

    Returns:
      `input_ids`, `segment_ids`, `input_mask`, `positions`, `slot_indices` int32 [B, S],
      `row_indices` [B, K].
    """
    rows, slot_tokens = batch["input_ids"].shape
    fullest = int(lengths.reshape(-1, group_rows).sum(axis=1).max())
    multiple = max(slot_tokens // 8, 1)  # S is a multiple of it, so that few programs are compiled
    row_tokens = min(-(-fullest // (group_rows * multiple)) * multiple, slot_tokens)
    groups = rows // group_rows
    slot_indices = np.zeros((groups, group_rows * row_tokens), np.int32)
    row_indices = np.full((groups, group_rows * slot_tokens), group_rows * row_tokens, np.int32)
    input_mask = np.zeros_like(slot_indices)
    for group, mask in enumerate(batch["input_mask"].reshape(groups, -1)):
        real = np.flatnonzero(mask)
        slot_indices[group, : len(real)], input_mask[group, : len(real)] = real, 1
        row_indices[group, real] = np.arange(len(real))
    arrays = {"input_mask": input_mask, "slot_indices": slot_indices, "row_indices": row_indices}
    for name in ("input_ids", "segment_ids"):
        arrays[name] = np.take_along_axis(batch[name].reshape(groups, -1), slot_indices, axis=1)
    arrays["positions"] = slot_indices % slot_tokens
    return batch | {name: array.reshape(rows, -1) for name, array in arrays.items()}


def list_slot_tokens(max_text_tokens: int) -> list[int]:
    """Returns every K of texts of up to so many tokens; each K is one compiled program."""
    lengths = range(1, max_text_tokens + 1)
    return sorted({choose_slot_tokens(length, max_text_tokens)[0] for length in lengths})


def choose_slot_tokens(length: int, max_text_tokens: int) -> tuple[int, int]:
    """Returns K for texts of this length, and the next smaller K."""
    last = _SLOT_TOKENS[-1]
    larger = range(2 * last, max_text_tokens + last, last)
    sizes = [_SLOT_TOKENS[0] // 2, *_SLOT_TOKENS, *larger]  # the first is only a next smaller K
    i = next(i for i, size in enumerate(sizes) if i and size >= length)
    return min(sizes[i], max_text_tokens), sizes[i - 1]
