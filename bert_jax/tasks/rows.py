"""Rows of token ids for the examples of a task, and their batches.

A batch is a function of (seed, step): an epoch is a permutation of the examples, and the next epoch
starts where it ends, even inside a batch. Rows are padded to the longest of their batch, so that
short texts cost little. Every process computes the padded length from the lengths alone.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.data import draws

Batch = dict[str, np.ndarray]
# The arrays of a batch that an encoder reads.
INPUT_NAMES = ("input_ids", "segment_ids", "input_mask")
# Batches are padded to a multiple of this (at most to the limit), so that few programs compile.
LENGTH_STEP = 32


@dataclasses.dataclass
class TaskRows:
    """Rows of token ids, and their targets."""

    ids: list[np.ndarray]  # int32 [n] for each row, with [CLS] and [SEP]
    limit: int  # maximum length, also with padding: the model may have no more positions
    first: Any = None  # int32 [rows], number of tokens of segment 0; None: all tokens
    # Targets with one number per row: {name: [rows]}.
    numbers: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # Targets with one number per token: {name: [n] for each row}; padded with 0.
    tokens: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    notes: Sequence[Any] = ()  # data about each row, for `TaskKind.answers`
    # Consecutive rows that form one example, such as the candidates of a choice.
    rows_per_example: int = 1
    # Numbers of truncated texts, by a description of the texts.
    cut: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lengths = np.array([len(ids) for ids in self.ids], np.int32)
        self.first = self.lengths if self.first is None else np.array(self.first, np.int32)

    def batch(self, numbers: np.ndarray, length: int, pad_id: int) -> Batch:
        """Returns the rows with these numbers, [B], padded to S = `length`.

        Returns:
          `input_ids`, `segment_ids`, `input_mask` int32 [B, S]; the targets, [B] or [B, S].
        """
        batch = {"input_ids": padded([self.ids[i] for i in numbers], length, pad_id, np.int32)}
        column, lengths = np.arange(length), self.lengths[numbers, None]
        batch["input_mask"] = (column < lengths).astype(np.int32)
        is_second = (column >= self.first[numbers, None]) & (column < lengths)
        batch["segment_ids"] = is_second.astype(np.int32)
        for name, values in self.numbers.items():
            batch[name] = values[numbers]
        for name, arrays in self.tokens.items():
            batch[name] = padded([arrays[i] for i in numbers], length, 0, arrays[0].dtype)
        return batch

    def select_labelled(self, values: list[np.ndarray]) -> np.ndarray:
        """Returns the values of all targets, [N, ...].

        `values` has for each row its value, or the values of its tokens, [n, ...].
        """
        if "targets" in self.numbers:
            return np.stack(values)
        weights = self.tokens["target_weights"]
        return np.concatenate([row[w > 0] for row, w in zip(values, weights, strict=True)])

    def labels(self) -> np.ndarray:
        """Returns the label numbers of all targets (rows, or words in rows), int32 [N]."""
        targets = self.numbers.get("targets")
        return self.select_labelled(self.tokens["targets"]) if targets is None else targets

    def batch_like(self, numbers: np.ndarray, like: np.ndarray, pad_id: int) -> Batch:
        """Returns some rows as `batch` does, padded to the length of a batch of the rows `like`."""
        return self.batch(numbers, self.padded_length(like), pad_id)

    def padded_length(self, numbers: np.ndarray) -> int:
        """Returns the length to which a batch of these rows is padded."""
        return padded_length(int(self.lengths[numbers].max()), self.limit)


def padded_length(tokens: int, limit: int, multiple: int = LENGTH_STEP) -> int:
    """Returns a number of tokens, rounded up to a multiple of `multiple`, at most `limit`."""
    return min(-(-tokens // multiple) * multiple, limit)


def padded(rows: list[np.ndarray], length: int, value: int, dtype: Any) -> np.ndarray:
    """Returns rows of any lengths as one array, [rows, length], padded with `value`."""
    array = np.full((len(rows), length), value, dtype)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return array


class TaskBatches:
    """Batches of shuffled examples, with `examples` of them per step. Can be pickled."""

    def __init__(self, rows: TaskRows, pad_id: int, examples: int, seed: int):
        self._rows, self._pad_id, self._examples = rows, pad_id, examples
        total = len(rows.ids) // rows.rows_per_example
        self._shuffled = draws.ShuffledEpochs(draws.key_of(seed, "finetune"), total)

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns some rows of a step.

        Args:
          step: counted from 0.
          indices: int [B], the positions of the rows in the step, in any order.

        Returns:
          The arrays of `TaskRows.batch`; `rows` uint32 [B], numbered through the run; and
          `row_weights` float32 [B], all 1.
        """
        numbers = self.step_rows(step)
        row = step * len(numbers) + np.asarray(indices, np.int64)
        return {
            "rows": row.astype(np.uint32),
            "row_weights": np.ones(len(indices), np.float32),
            **self._rows.batch_like(numbers[indices], numbers, self._pad_id),
        }

    def lengths(self, step: int) -> np.ndarray:
        """Returns the number of tokens of each row of a step."""
        return self._rows.lengths[self.step_rows(step)]

    def step_rows(self, step: int) -> np.ndarray:
        """Returns the numbers of all rows of a step."""
        per_example = self._rows.rows_per_example
        examples = self._shuffled[step * self._examples + np.arange(self._examples)]
        return (examples[:, None] * per_example + np.arange(per_example)).reshape(-1)


def eval_batches(rows: TaskRows, pad_id: int, size: int) -> list[tuple[np.ndarray, Batch]]:
    """Returns batches of all rows, sorted by length so that there is little padding.

    A batch has `size` rows, a multiple of `rows.rows_per_example`.

    Returns:
      For each batch, the numbers of its rows and the arrays of `TaskBatches.batch`. The last batch
      is filled up with rows whose `row_weights` are 0, which have no number.
    """
    per_example = rows.rows_per_example
    longest = rows.lengths.reshape(-1, per_example).max(axis=1)
    order = np.argsort(-longest, kind="stable")
    order = (order[:, None] * per_example + np.arange(per_example)).reshape(-1)
    batches = []
    for start in range(0, len(order), size):
        numbers = order[start : start + size]
        filled = np.concatenate([numbers, np.resize(numbers, size - len(numbers))])
        batch = rows.batch_like(filled, numbers, pad_id)
        weights = (np.arange(size) < len(numbers)).astype(np.float32)
        batch |= {"rows": filled.astype(np.uint32), "row_weights": weights}
        batches.append((numbers, batch))
    return batches


def balanced_weights(rows: TaskRows, labels: int) -> tuple[float, ...]:
    """Returns for each label a weight such that the targets of each label have the same total.

    That is targets / (labels that occur * targets with this label), on average 1. A label that does
    not occur has the weight 1.
    """
    targets = rows.labels()
    counts = np.bincount(targets, minlength=labels)
    shares = len(targets) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return tuple(np.where(counts > 0, shares, 1.0).tolist())
