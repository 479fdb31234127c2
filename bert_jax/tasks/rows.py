"""Rows of token ids for the examples of a task, and their batches.

A batch is a function of (seed, step): an epoch is a permutation of the examples, and the next epoch
starts where it ends, even inside a batch. Rows are padded to the longest of their batch, so that
short texts cost little. Every process knows all lengths, so the padded length needs no exchange.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.data import draws

Batch = dict[str, np.ndarray]
# The arrays of a batch that an encoder reads.
INPUT_NAMES = ("input_ids", "segment_ids", "input_mask")
# Batches are padded to a multiple of this (at most to the limit), so that few lengths are compiled.
LENGTH_STEP = 32


@dataclasses.dataclass
class TaskRows:
    """Rows of token ids, and the arrays that the loss needs, such as targets."""

    ids: list[np.ndarray]  # int32 [n] for each row, with [CLS] and [SEP]
    limit: int  # maximum length with padding, at most the number of positions of the model
    first_lengths: Any = None  # int32 [rows], number of tokens of segment 0; None: all tokens
    # Arrays with a value for each row: {name: [rows, ...]}.
    row_arrays: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    # Arrays with a value for each token: {name: [n] for each row}; padded with 0.
    token_arrays: dict[str, list[np.ndarray]] = dataclasses.field(default_factory=dict)
    # For each row a tuple: the index of its example, then other data for `TaskKind.answers`. Empty
    # if each example has `rows_per_example` consecutive rows, such as the candidates of a choice.
    origins: Sequence[Any] = ()
    rows_per_example: int = 1
    # Number of truncated texts by description, such as "questions at task.max_query_length=64".
    truncated: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.lengths = np.array([len(ids) for ids in self.ids], np.int32)
        lengths = self.lengths if self.first_lengths is None else self.first_lengths
        self.first_lengths = np.array(lengths, np.int32)

    def batch(self, indices: np.ndarray, length: int, pad_id: int) -> Batch:
        """Returns the rows with these indices, [B], padded to S = `length`.

        Returns:
          `input_ids`, `segment_ids`, `input_mask` int32 [B, S]; the row and token arrays by name.
        """
        batch = {"input_ids": pad_rows([self.ids[i] for i in indices], length, pad_id, np.int32)}
        positions, lengths = np.arange(length), self.lengths[indices, None]
        batch["input_mask"] = (positions < lengths).astype(np.int32)
        is_second = (positions >= self.first_lengths[indices, None]) & (positions < lengths)
        batch["segment_ids"] = is_second.astype(np.int32)
        for name, values in self.row_arrays.items():
            batch[name] = values[indices]
        for name, arrays in self.token_arrays.items():
            batch[name] = pad_rows([arrays[i] for i in indices], length, 0, arrays[0].dtype)
        return batch

    def select_at_targets(self, values: list[np.ndarray]) -> np.ndarray:
        """Selects the values, such as outputs, of the rows or tokens that have a target, [N, ...].

        `values` has one array for each row: [...] for targets of rows, or [n, ...] for tokens.
        """
        if "targets" in self.row_arrays:
            return np.stack(values)
        weights = self.token_arrays["target_weights"]
        return np.concatenate([row[w > 0] for row, w in zip(values, weights, strict=True)])

    def labels(self) -> np.ndarray:
        """Returns the label indices of all targets (rows, or words in rows), int32 [N]."""
        targets = self.row_arrays.get("targets")
        return self.select_at_targets(self.token_arrays["targets"]) if targets is None else targets

    def batch_like(self, indices: np.ndarray, like: np.ndarray, pad_id: int) -> Batch:
        """Returns the batch of some rows, with the padded length of a batch of the rows `like`."""
        return self.batch(indices, self.padded_length(like), pad_id)

    def padded_length(self, indices: np.ndarray) -> int:
        """Returns the length to which a batch of these rows is padded."""
        return padded_length(int(self.lengths[indices].max()), self.limit)


def padded_length(tokens: int, limit: int, multiple: int = LENGTH_STEP) -> int:
    """Returns a number of tokens, rounded up to a multiple of `multiple`, at most `limit`."""
    return min(-(-tokens // multiple) * multiple, limit)


def pad_rows(rows: list[np.ndarray], length: int, value: int, dtype: Any) -> np.ndarray:
    """Returns rows of any lengths as one array, [rows, length], padded with `value`."""
    array = np.full((len(rows), length), value, dtype)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return array


class TaskBatches:
    """Batches of `batch_size` shuffled examples each. Can be pickled."""

    def __init__(self, rows: TaskRows, pad_id: int, batch_size: int, seed: int):
        self._rows, self._pad_id, self._batch_size = rows, pad_id, batch_size
        total = len(rows.ids) // rows.rows_per_example
        self._shuffled = draws.ShuffledEpochs(draws.key_of(seed, "finetune"), total)

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns some rows of a step.

        Args:
          step: counted from 0.
          indices: int [B], the positions of the rows in the step, in any order.

        Returns:
          The arrays of `TaskRows.batch`; `rows` uint32 [B], ids that are unique in the run,
          for dropout; and `row_weights` float32 [B], all 1.
        """
        all_rows = self.step_rows(step)
        row_ids = step * len(all_rows) + np.asarray(indices, np.int64)
        return {
            "rows": row_ids.astype(np.uint32),
            "row_weights": np.ones(len(indices), np.float32),
            **self._rows.batch_like(all_rows[indices], all_rows, self._pad_id),
        }

    def lengths(self, step: int) -> np.ndarray:
        """Returns the number of tokens of each row of a step."""
        return self._rows.lengths[self.step_rows(step)]

    def step_rows(self, step: int) -> np.ndarray:
        """Returns the indices of all rows of a step."""
        per_example = self._rows.rows_per_example
        examples = self._shuffled[step * self._batch_size + np.arange(self._batch_size)]
        return (examples[:, None] * per_example + np.arange(per_example)).reshape(-1)


def eval_batches(rows: TaskRows, pad_id: int, size: int) -> list[tuple[np.ndarray, Batch]]:
    """Returns batches of all rows, sorted by length so that there is little padding.

    A batch has `size` rows, a multiple of `rows.rows_per_example`.

    Returns:
      For each batch, the indices of its rows and the arrays of `TaskBatches.batch`. The last batch
      repeats some rows with `row_weights` 0 to fill up; these repetitions are not in the indices.
    """
    per_example = rows.rows_per_example
    longest = rows.lengths.reshape(-1, per_example).max(axis=1)
    order = np.argsort(-longest, kind="stable")
    order = (order[:, None] * per_example + np.arange(per_example)).reshape(-1)
    batches = []
    for start in range(0, len(order), size):
        indices = order[start : start + size]
        filled = np.concatenate([indices, np.resize(indices, size - len(indices))])
        batch = rows.batch_like(filled, indices, pad_id)
        weights = (np.arange(size) < len(indices)).astype(np.float32)
        batch |= {"rows": filled.astype(np.uint32), "row_weights": weights}
        batches.append((indices, batch))
    return batches


def balanced_weights(rows: TaskRows, label_count: int) -> tuple[float, ...]:
    """Returns for each label a weight such that all labels have the same total weight.

    It is the number of targets / (number of labels that occur * number of targets with this label),
    on average 1. A label that does not occur has the weight 1.
    """
    targets = rows.labels()
    counts = np.bincount(targets, minlength=label_count)
    weights = len(targets) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return tuple(np.where(counts > 0, weights, 1.0).tolist())
