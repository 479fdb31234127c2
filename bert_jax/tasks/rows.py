"""Rows of token ids for the examples of a task, their batches, and the base class of task kinds.

A batch is a function of (seed, step): an epoch is a permutation of the examples, and the next epoch
starts where it ends, even inside a batch. Rows are padded to the longest of their batch, so that
short texts cost little. Every process computes the padded length from the lengths alone.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from bert_jax.config import Task, source_name
from bert_jax.data import draws
from bert_jax.errors import prefix_errors
from bert_jax.text.tokenizer import Tokenizer

Batch = dict[str, np.ndarray]
# Input of a task's head: the pooled output of a text, or the output of each token. `decoder` is a
# decoder instead of a head; `vectors` are compared without a head.
Reads = Literal["pooled", "tokens", "decoder", "vectors"]
# Targets of a head: a label for each target, a number, or the first and last token of a span.
Learns = Literal["labels", "numbers", "places"]
Answer = dict[str, Any]
Answers = list[Answer]
Outputs = list[np.ndarray]
Scores = dict[str, float]

# Batches are padded to a multiple of this (at most to the limit), so that few programs compile.
LENGTH_STEP = 32


@dataclasses.dataclass
class TaskRows:
    """Rows of token ids, and their targets."""

    ids: list[np.ndarray]  # int32 [n] for each row, with [CLS] and [SEP]
    first: np.ndarray  # int32 [rows], number of tokens of segment 0
    numbers: dict[str, np.ndarray]  # targets with one number per row: {name: [rows]}
    # Targets with one number per token: {name: [n] for each row}; padded with 0.
    tokens: dict[str, list[np.ndarray]]
    notes: list[Any]  # data about each row for `TaskKind.answers`
    limit: int  # maximum length, also with padding: the model may have no more positions
    # Consecutive rows that form one example, such as the candidates of a choice.
    rows_per_example: int = 1
    cut_questions: int = 0  # number of questions of `span` that were truncated

    def __post_init__(self) -> None:
        self.lengths = np.array([len(ids) for ids in self.ids], np.int32)

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
        longest = int(self.lengths[numbers].max())
        return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self.limit)


def padded(rows: list[np.ndarray], length: int, value: int, dtype: Any) -> np.ndarray:
    """Returns rows of any lengths as one array, [rows, length], padded with `value`."""
    array = np.full((len(rows), length), value, dtype)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return array


class ScoredExample(NamedTuple):
    """A prediction compared with the truth."""

    truth: Sequence[str]  # names of labels (one, or one per word), or one number or text
    predicted: Sequence[str]  # as long as `truth`
    error: float  # in the unit of the kind's score; 0 if the prediction is right


class SourceExamples(NamedTuple):
    """The examples of one of several sources, and their rows."""

    name: str
    first: int  # the number of its first row among the rows of all sources
    rows: TaskRows
    examples: Sequence[Any]


class TaskKind:
    """A kind of task, for one tokenizer and one set of labels; `adaptation.KINDS` has all.

    Outputs are the head's results for each row: float32 [outputs] for the pooled text, or
    [n, outputs] for its n tokens; token ids from a decoder.
    """

    reads: Reads = "pooled"  # input of the head
    outputs = 0  # number of the head's outputs; 0: one for each label
    learns: Learns = "labels"  # determines the loss, see `tasks.task_objective`
    rows_per_example = 1  # consecutive rows that are answered together
    # The field of an answer that a table shows; "": the label, and its probability.
    column = ""

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        self._task, self._labels, self._tokenizer = task, labels, tokenizer
        self.outputs = self.outputs or len(labels)

    def encode(self, text: str, location: str) -> list[int]:
        """Returns the token ids of a text; errors begin with `location`."""
        with prefix_errors(location):
            return self._tokenizer.encode(text)

    def rows(self, examples: Sequence[Any]) -> TaskRows:
        """Returns the rows of examples, with targets if the examples have labels."""
        raise NotImplementedError

    def answers(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Any]) -> Answers:
        """Returns the prediction for each example, as JSON."""
        raise NotImplementedError

    def scores(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Any]) -> Scores:
        """Returns the scores of labelled examples by name."""
        raise NotImplementedError

    def parts(self, examples: Sequence[Any], counts: Mapping[str, int]) -> list[SourceExamples]:
        """Returns the examples of each source; empty if there is only one source.

        Args:
          examples: of all sources, one source after the other.
          counts: the number of examples of each source.
        """
        names = [re.split("[/:]", source)[-1].partition(".")[0] for source in counts]
        if len({*names, ""}) <= len(names):  # some are equal or empty: use the whole sources
            names = list(map(source_name, counts))
        parts, start, first = list[SourceExamples](), 0, 0
        for name, count in zip(names, counts.values(), strict=True):
            selected = examples[start : start + count]
            rows = self.rows(selected)
            parts.append(SourceExamples(name, first, rows, selected))
            start, first = start + count, first + len(rows.ids)
        return parts if len(parts) > 1 else []

    def part_scores(self, outputs: Outputs, parts: Sequence[SourceExamples]) -> Scores:
        """Returns the main score of each part, named SCORE/NAME; `outputs` are of all rows."""
        score, by_name = self._task.main_score, Scores()
        for name, first, rows, examples in parts:
            selected = outputs[first : first + len(rows.ids)]
            by_name[f"{score}/{name}"] = self.scores(selected, rows, examples)[score]
        return by_name

    def score_example(self, answer: Answer, example: Any) -> ScoredExample:
        """Returns the comparison of an answer to a labelled example with its label."""
        raise NotImplementedError

    def count_rows(self, example: Any, most: int) -> int:
        """Returns the number of rows of an example; stops counting above `most`."""
        del example, most
        return 1


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
