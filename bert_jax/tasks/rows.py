"""Examples as rows of ids, batches of them, and what a kind of task does with both.

A batch is a function of (seed, step): an epoch is a permutation of the examples, and one goes on
where the other ends. Rows are padded to the longest of their batch, so that short texts cost
little; how far is known to every process from the lengths alone.
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
# What the head of a task reads: what [CLS] comes to, every piece, or as a decoder does; `vectors`:
# there is none, and vectors are compared.
Reads = Literal["pooled", "tokens", "decoder", "vectors"]
# What a head learns: a label of each target, a number, or the first and the last piece of a part.
Learns = Literal["labels", "numbers", "places"]
Answer = dict[str, Any]
Outputs = list[np.ndarray]
Scores = dict[str, float]

# Batches are padded to a multiple of this, or to the limit, so that few programs are compiled.
LENGTH_STEP = 32


@dataclasses.dataclass
class Rows:
    """Rows of ids, and their targets."""

    ids: list[np.ndarray]  # of each row int32 [n], [CLS] and [SEP] among them
    first: np.ndarray  # int32 [rows], how many of a row's ids are of segment 0
    numbers: dict[str, np.ndarray]  # targets that are one number a row: {name: [rows]}
    # Targets that are one number an id: {name: [n] of each row}; 0 where padded.
    tokens: dict[str, list[np.ndarray]]
    notes: list[Any]  # what `TaskKind.answers` needs to know of each row
    limit: int  # no row is longer, nor is padded further: the model may have no more positions
    # Rows that make one example, one after the other: the texts of a choice.
    rows_per_example: int = 1
    cut_questions: int = 0  # how many questions of `span` were longer than they may be

    def __post_init__(self) -> None:
        self.lengths = np.array([len(ids) for ids in self.ids], np.int32)

    def batch(self, which: np.ndarray, length: int, pad_id: int) -> Batch:
        """Returns the rows of these numbers, [B], padded to S = `length`, no less than the longest.

        Returns:
          `input_ids`, `segment_ids`, `input_mask` int32 [B, S]; the targets, [B] or [B, S].
        """
        batch = {"input_ids": padded([self.ids[i] for i in which], length, pad_id, np.int32)}
        column, lengths = np.arange(length), self.lengths[which, None]
        batch["input_mask"] = (column < lengths).astype(np.int32)
        beyond = (column >= self.first[which, None]) & (column < lengths)
        batch["segment_ids"] = beyond.astype(np.int32)
        for name, values in self.numbers.items():
            batch[name] = values[which]
        for name, arrays in self.tokens.items():
            batch[name] = padded([arrays[i] for i in which], length, 0, arrays[0].dtype)
        return batch

    def labelled(self, values: list[np.ndarray]) -> np.ndarray:
        """Returns values of rows, or of their pieces, [n, ...] each, where labels are: [N, ...]."""
        if "targets" in self.numbers:
            return np.stack(values)
        weights = self.tokens["target_weights"]
        return np.concatenate([one[at > 0] for one, at in zip(values, weights, strict=True)])

    def labels(self) -> np.ndarray:
        """Returns the labels of rows, or of the words in them, by number, int32 [N]."""
        targets = self.numbers.get("targets")
        return self.labelled(self.tokens["targets"]) if targets is None else targets

    def batch_like(self, which: np.ndarray, like: np.ndarray, pad_id: int) -> Batch:
        """Returns some rows as `batch` does, padded as all of `like` need it."""
        return self.batch(which, self.padded_length(like), pad_id)

    def padded_length(self, which: np.ndarray) -> int:
        """Returns the length to which rows are padded in one batch."""
        longest = int(self.lengths[which].max())
        return min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self.limit)


def padded(rows: list[np.ndarray], length: int, value: int, dtype: Any) -> np.ndarray:
    """Returns rows of any lengths as one array, [rows, length], `value` behind each."""
    array = np.full((len(rows), length), value, dtype)
    for row, values in zip(array, rows, strict=True):
        row[: len(values)] = values
    return array


class ScoredExample(NamedTuple):
    """An answer next to the truth."""

    truth: Sequence[str]  # names of labels, one or one a word; or a number or a text
    predicted: Sequence[str]  # as many
    off: float  # how far, in what the kind counts by; 0 if it is right


class Part(NamedTuple):
    """The examples of one source among those of several, and their rows."""

    name: str
    first: int  # its first row among those of all examples
    rows: Rows
    examples: Sequence[Any]


class TaskKind:
    """A kind of task, for one tokenizer and one set of labels; `adapted.KINDS` has all.

    Outputs are what the head gives of each row: float32 [outputs] of what [CLS] comes to, or of all
    n pieces [n, outputs]; of a decoder ids.
    """

    reads: Reads = "pooled"  # what the head reads
    outputs = 0  # how many scores it gives; 0: one for each label
    learns: Learns = "labels"  # what the loss is of, see `tasks.objective`
    rows_per_example = 1  # rows, one after the other, that are answered together
    # What of an answer a table shows; "": the label, and its probability.
    column = ""

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        self._task, self._labels, self._tokenizer = task, labels, tokenizer
        self.outputs = self.outputs or len(labels)

    def encode(self, text: str, place: str) -> list[int]:
        """Returns the ids of a text; errors begin with `place`, where the text stands."""
        with prefix_errors(place):
            return self._tokenizer.encode(text)

    def rows(self, examples: Sequence[Any]) -> Rows:
        """Returns the examples as the encoder reads them; with targets if they have labels."""
        raise NotImplementedError

    def answers(self, outputs: Outputs, rows: Rows, examples: Sequence[Any]) -> list[Answer]:
        """Returns what the outputs predict for each example, as JSON."""
        raise NotImplementedError

    def scores(self, outputs: Outputs, rows: Rows, examples: Sequence[Any]) -> Scores:
        """Returns the scores of labelled examples by name."""
        raise NotImplementedError

    def parts(self, examples: Sequence[Any], counts: Mapping[str, int]) -> list[Part]:
        """Returns the examples of each source, by its name; none if there is but one source.

        Args:
          examples: of all sources, one after the other.
          counts: how many examples each source has.
        """
        names = [re.split("[/:]", source)[-1].partition(".")[0] for source in counts]
        if len({*names, ""}) <= len(names):  # equal or empty: name the whole sources
            names = list(map(source_name, counts))
        parts, start, first = list[Part](), 0, 0
        for name, count in zip(names, counts.values(), strict=True):
            of_source = examples[start : start + count]
            rows = self.rows(of_source)
            parts.append(Part(name, first, rows, of_source))
            start, first = start + count, first + len(rows.ids)
        return parts if len(parts) > 1 else []

    def part_scores(self, outputs: Outputs, parts: Sequence[Part]) -> Scores:
        """Returns the main score of each part, called SCORE/NAME; `outputs` are of all rows."""
        score, by_name = self._task.main_score, Scores()
        for name, first, rows, examples in parts:
            of_part = outputs[first : first + len(rows.ids)]
            by_name[f"{score}/{name}"] = self.scores(of_part, rows, examples)[score]
        return by_name

    def judged(self, answer: Answer, example: Any) -> ScoredExample:
        """Returns an answer to a labelled example next to the truth."""
        raise NotImplementedError

    def rows_of(self, example: Any, most: int) -> int:
        """Returns how many rows an example becomes, `most` + 1 or more if there are more."""
        del example, most
        return 1


class TrainBatches:
    """Batches of shuffled examples, so many `examples` a step. May be pickled."""

    def __init__(self, rows: Rows, pad_id: int, examples: int, seed: int):
        self._rows, self._pad_id, self._examples = rows, pad_id, examples
        total = len(rows.ids) // rows.rows_per_example
        self._shuffled = draws.ShuffledEpochs(draws.key_of(seed, "finetune"), total)

    def batch(self, step: int, indices: np.ndarray) -> Batch:
        """Returns rows of a step, from 0, any subset in any order: `indices`, int [B].

        Returns:
          What `Rows.batch` does, `rows` uint32 [B], numbered through the run, and `row_weights`
          float32 [B], all 1.
        """
        every = self.of_step(step)
        which = every[indices]
        row = step * len(every) + np.asarray(indices, np.int64)
        return {
            "rows": row.astype(np.uint32),
            "row_weights": np.ones(len(which), np.float32),
            **self._rows.batch_like(which, every, self._pad_id),
        }

    def lengths(self, step: int) -> np.ndarray:
        """Returns how many pieces each row of a step has."""
        return self._rows.lengths[self.of_step(step)]

    def of_step(self, step: int) -> np.ndarray:
        """Returns the numbers of all rows of a step."""
        per_example = self._rows.rows_per_example
        examples = self._shuffled[step * self._examples + np.arange(self._examples)]
        return (examples[:, None] * per_example + np.arange(per_example)).reshape(-1)


def eval_batches(rows: Rows, pad_id: int, size: int) -> list[tuple[np.ndarray, Batch]]:
    """Returns all rows once, those of like lengths together, so that little is padded.
    A batch has `size` rows, a multiple of `rows.rows_per_example`.

    Returns:
      For each batch, which rows its first ones are, and its arrays as `TrainBatches.batch` gives
      them; the last is filled up with rows of `row_weights` 0.
    """
    per_example = rows.rows_per_example
    longest = rows.lengths.reshape(-1, per_example).max(axis=1)
    order = np.argsort(-longest, kind="stable")
    order = (order[:, None] * per_example + np.arange(per_example)).reshape(-1)
    batches = []
    for start in range(0, len(order), size):
        which = order[start : start + size]
        filled = np.concatenate([which, np.resize(which, size - len(which))])
        batch = rows.batch_like(filled, which, pad_id)
        weights = (np.arange(size) < len(which)).astype(np.float32)
        batches.append((which, {"rows": filled.astype(np.uint32), "row_weights": weights, **batch}))
    return batches


def balanced_weights(rows: Rows, labels: int) -> tuple[float, ...]:
    """Returns for each label how much one of it weighs if all labels weigh the same together.

    That is examples / (labels that occur * examples of this label), 1 on average over all examples;
    a label that does not occur weighs 1. Targets are the labels of rows, or of the words in them.
    """
    targets = rows.labels()
    counts = np.bincount(targets, minlength=labels)
    shares = len(targets) / (np.count_nonzero(counts) * np.maximum(counts, 1))
    return tuple(np.where(counts > 0, shares, 1.0).tolist())
