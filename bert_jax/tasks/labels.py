"""Texts to an answer, or each of their words to a tag (Devlin et al. 2018, sections 3.2 and 5.3).

One layer reads what [CLS] comes to (`classify`, `pair`, `regress` and `choice`) or the first piece
of each word (`tag`).
"""

from collections.abc import Sequence
from itertools import chain

import numpy as np

from bert_jax.config import SCORES, Task
from bert_jax.errors import prefix_errors
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Sentence, Tagged
from bert_jax.tasks.rows import Answer, Outputs, Rows, ScoredExample, Scores, TaskKind
from bert_jax.text.tokenizer import Tokenizer, around, joined, of_first_segment


class Sentences(TaskKind):
    """The kind of one label an example, of a text or a pair: `classify` and `pair`."""

    def rows(self, examples: Sequence[Sentence]) -> Rows:
        """Returns one row for each text, pair or choice.

        What is too long loses a piece at a time from the end of the longer text; of two as long
        the second, as in google-research/bert, but with a tokenizer.json the one that was shorter
        (the first if none was), as in `tokenizers`.
        """
        ids, first = [], []
        for example in examples:
            pieces = [self.encode(text, example.place) for text in example.texts]
            pairs = [(pieces[0], other) for other in pieces[1:]] or [(pieces[0], None)]
            for a, b in pairs:
                row, before = joined(self._tokenizer, *self._cut(a, b))
                ids.append(row)
                first.append(of_first_segment(self._tokenizer, row, before))
        numbers = {}
        if examples[0].label is not None:
            numbers["targets"] = np.repeat(self._truth(examples), self.rows_per_example)
        limit = self._task.max_sequence_length
        return Rows(ids, np.array(first, np.int32), numbers, {}, [], limit, self.rows_per_example)

    def answers(self, outputs: Outputs, rows: Rows, examples: Sequence[Sentence]) -> list[Answer]:
        """Returns for each example its `label`, and `probabilities` by label."""
        del rows, examples
        answers = []
        for logits in self._by_example(outputs):
            chances = np.exp(logits - logits.max())
            chances /= chances.sum()
            by_label = dict(zip(self._labels, map(float, chances), strict=True))
            answers.append({"label": self._labels[int(logits.argmax())], "probabilities": by_label})
        return answers

    def scores(self, outputs: Outputs, rows: Rows, examples: Sequence[Sentence]) -> Scores:
        """Returns all scores of the kind; `f1` of two labels alone, the second the positive one."""
        del rows
        names = [n for n in SCORES[self._task.kind] if n != "f1" or len(self._labels) == 2]
        truth, predicted = self._truth(examples), self._predicted(outputs)
        return {name: scores.score(name, truth, predicted) for name in names}

    def judged(self, answer: Answer, example: Sentence) -> ScoredExample:
        """Returns both labels, and how much of the probability the true one has not."""
        truth, label = str(example.label), answer["label"]
        off = 1 - answer["probabilities"][truth] if label != truth else 0.0
        return ScoredExample([truth], [label], off)

    def _truth(self, examples: Sequence[Sentence]) -> np.ndarray:
        number = {label: i for i, label in enumerate(self._labels)}
        return np.array([number[str(example.label)] for example in examples], np.int32)

    def _predicted(self, outputs: Outputs) -> np.ndarray:
        return self._by_example(outputs).argmax(axis=1)

    def _by_example(self, outputs: Outputs) -> np.ndarray:
        """Groups the scores of rows: [examples, labels]."""
        return np.stack(outputs).reshape(-1, len(self._labels))

    def _cut(self, a: list[int], b: list[int] | None) -> tuple[list[int], list[int] | None]:
        room = self._task.max_sequence_length - around(self._tokenizer, 1 + (b is not None))
        if b is None:
            return a[:room], None
        first_yields = self._tokenizer.kind == "library" and len(a) <= len(b)
        a, b = list(a), list(b)
        while len(a) + len(b) > room:
            (a if len(a) + first_yields > len(b) else b).pop()
        return a, b


class Choices(Sentences):
    """The kind of `choice`: each text is read with the first, the highest of their scores wins."""

    outputs = 1

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        super().__init__(task, labels, tokenizer)
        self.rows_per_example = len(labels)


class NumberTask(Sentences):
    """The kind of a number a pair: `regress`."""

    learns, column, outputs = "numbers", "value", 1

    def answers(self, outputs: Outputs, rows: Rows, examples: Sequence[Sentence]) -> list[Answer]:
        """Returns the `value` of each example."""
        del rows, examples
        return [{"value": float(row[0])} for row in outputs]

    def judged(self, answer: Answer, example: Sentence) -> ScoredExample:
        """Returns both numbers, and their distance."""
        truth, value = float(example.label or 0), answer["value"]
        return ScoredExample([f"{truth:.4g}"], [f"{value:.4g}"], abs(value - truth))

    def _truth(self, examples: Sequence[Sentence]) -> np.ndarray:
        return np.array([example.label for example in examples], np.float32)

    def _predicted(self, outputs: Outputs) -> np.ndarray:
        return np.array([row[0] for row in outputs])


class Tags(TaskKind):
    """The kind of `tag`.

    A sentence that is too long for a row goes on in another, so that no word is without a tag.
    """

    reads, column = "tokens", "tags"

    def rows(self, examples: Sequence[Tagged]) -> Rows:
        """Returns one row or more of each sentence; a word that is longer than a row is cut."""
        ids, tags, weights, notes = [], [], [], []
        number_of = {label: i for i, label in enumerate(self._labels)}
        for number, example in enumerate(examples):
            with prefix_errors(example.place):
                cut = self._cut(example.words)
            for pieces, begins, words in cut:
                row, _ = joined(self._tokenizer, pieces, None)
                at = np.zeros(len(row), np.float32)
                at[begins] = 1.0
                tag = np.zeros(len(row), np.int32)
                if example.tags is not None:
                    tag[begins] = [number_of[example.tags[word]] for word in words]
                ids.append(row)
                tags.append(tag)
                weights.append(at)
                notes.append((number, begins))
        first = np.array([len(row) for row in ids], np.int32)
        targets = {"targets": tags, "target_weights": weights}
        return Rows(ids, first, {}, targets, notes, self._task.max_sequence_length)

    def answers(self, outputs: Outputs, rows: Rows, examples: Sequence[Tagged]) -> list[Answer]:
        """Returns for each example its `words` and their predicted `tags`."""
        answers = [{"words": list(example.words), "tags": []} for example in examples]
        for logits, (number, begins) in zip(outputs, rows.notes, strict=True):
            answers[number]["tags"] += [self._labels[i] for i in logits[begins].argmax(axis=1)]
        return answers

    def scores(self, outputs: Outputs, rows: Rows, examples: Sequence[Tagged]) -> dict[str, float]:
        """Returns the share of words with the right tag, and entities' F1 if that is the score."""
        truth = [list(example.tags or ()) for example in examples]
        predicted = [answer["tags"] for answer in self.answers(outputs, rows, examples)]
        right = [a == b for a, b in zip(chain(*truth), chain(*predicted), strict=True)]
        by_name = {"accuracy": float(np.mean(right))}
        if self._task.main_score == "entity_f1":
            by_name["entity_f1"] = scores.entity_f1(truth, predicted)
        return by_name

    def judged(self, answer: Answer, example: Tagged) -> ScoredExample:
        """Returns the tags of the words that have wrong ones, and how many these are."""
        pairs = zip(example.tags or (), answer["tags"], strict=True)
        wrong = [pair for pair in pairs if pair[0] != pair[1]]
        return ScoredExample([a for a, _ in wrong], [b for _, b in wrong], len(wrong))

    def _cut(self, words: Sequence[str]) -> list[tuple[list[int], list[int], list[int]]]:
        """Returns for each row its pieces, where in it words begin, and which words these are."""
        room = self._task.max_sequence_length - 2
        rows: list[tuple[list[int], list[int], list[int]]] = [([], [], [])]
        for number, word in enumerate(words):
            # What has no piece (a lone control character) is a word nevertheless.
            encode = self._tokenizer.encode_within if number else self._tokenizer.encode
            pieces = (encode(word) or [self._tokenizer.unk_id])[:room]
            if len(rows[-1][0]) + len(pieces) > room:
                rows.append(([], [], []))
            row, begins, here = rows[-1]
            begins.append(len(row) + 1)  # after [CLS]
            here.append(number)
            row += pieces
        return rows
