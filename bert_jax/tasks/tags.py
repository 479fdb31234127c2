"""A tag for each word: `tag` (Devlin et al. 2018, sections 3.2 and 5.3).

A word's tag is read at its first piece. A sentence that is too long for a row goes on in another,
so that no word is without a tag.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.config import Task
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Tagged
from bert_jax.tasks.rows import Rows, joined
from bert_jax.text.tokenizer import Tokenizer


class Tags:
    """The `TaskKind` of `tag`."""

    reads = "tokens"

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        self._task, self._labels, self._tokenizer = task, labels, tokenizer
        self._number = {label: i for i, label in enumerate(labels)}
        self.outputs = len(labels)

    def rows(self, examples: Sequence[Tagged]) -> Rows:
        """Returns one row or more of each sentence; a word that is longer than a row is cut."""
        ids, tags, weights, notes = [], [], [], []
        for number, example in enumerate(examples):
            for pieces, begins, words in self._cut(example.words):
                row, _ = joined(self._tokenizer, pieces, None)
                at = np.zeros(len(row), np.float32)
                at[begins] = 1.0
                tag = np.zeros(len(row), np.int32)
                if example.tags is not None:
                    tag[begins] = [self._number[example.tags[word]] for word in words]
                ids.append(row)
                tags.append(tag)
                weights.append(at)
                notes.append((number, begins))
        first = np.array([len(row) for row in ids], np.int32)
        targets = {"targets": tags, "target_weights": weights}
        return Rows(ids, first, {}, targets, notes, self._task.max_sequence_length)

    def answers(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Tagged]
    ) -> list[Any]:
        """Returns for each example its `words` and their predicted `tags`.

        Args:
          outputs: of each row, float32 [n, outputs].
          rows: which rows they are.
          examples: whose rows they are.
        """
        answers = [{"words": list(example.words), "tags": []} for example in examples]
        for logits, (number, begins) in zip(outputs, rows.notes, strict=True):
            answers[number]["tags"] += [self._labels[i] for i in logits[begins].argmax(axis=1)]
        return answers

    def scores(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Tagged]
    ) -> dict[str, float]:
        """Returns the share of words with the right tag, and entities' F1 if that is the score."""
        truth = [list(example.tags or ()) for example in examples]
        predicted = [answer["tags"] for answer in self.answers(outputs, rows, examples)]
        right = [
            a == b
            for ours, theirs in zip(predicted, truth, strict=True)
            for a, b in zip(ours, theirs, strict=True)
        ]
        by_name = {"accuracy": float(np.mean(right))}
        if self._task.main_score == "entity_f1":
            by_name["entity_f1"] = scores.entity_f1(truth, predicted)
        return by_name

    def _cut(self, words: Sequence[str]) -> list[tuple[list[int], list[int], list[int]]]:
        """Returns for each row its pieces, where in it words begin, and which words these are."""
        room = self._task.max_sequence_length - 2
        rows: list[tuple[list[int], list[int], list[int]]] = [([], [], [])]
        for number, word in enumerate(words):
            # What has no piece (a lone control character) is a word nevertheless.
            pieces = (self._tokenizer.encode(word) or [self._tokenizer.unk_id])[:room]
            if len(rows[-1][0]) + len(pieces) > room:
                rows.append(([], [], []))
            row, begins, here = rows[-1]
            begins.append(len(row) + 1)  # after [CLS]
            here.append(number)
            row += pieces
        return rows
