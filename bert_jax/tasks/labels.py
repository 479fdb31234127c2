"""Kinds of tasks with a label or number for each example, or a tag for each word.

One layer reads the pooled output of [CLS] (`classify`, `pair`, `regress` and `choice`) or the first
token of each word (`tag`), as in Devlin et al. 2018, sections 3.2 and 5.3.
"""

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from bert_jax.config import Task
from bert_jax.errors import prefix_errors
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Sentence, Tagged
from bert_jax.tasks.rows import TaskRows
from bert_jax.tasks.task_kind import Answer, Answers, ComparedAnswer, Outputs, Scores, TaskKind
from bert_jax.text.tokenizer import (
    Tokenizer,
    add_special_tokens,
    first_segment_length,
    special_count,
)


class SentenceKind(TaskKind):
    """The kinds `classify` and `pair`: one label for a text or a pair of texts."""

    duplicates_must_agree = True

    def rows(self, examples: Sequence[Sentence]) -> TaskRows:
        """Returns one row for each text, pair or candidate.

        A pair that is too long loses tokens from the end of the longer text, one at a time. If both
        are equally long, the second loses one, as in google-research/bert; with a tokenizer.json or
        an imported head, as in `tokenizers`, the one that was shorter before, or the first of
        equally long ones.
        """
        ids, first_lengths = [], []
        for example in examples:
            tokens = [self.encode(text, example.location) for text in example.texts]
            # The first text with each other one, such as the candidates of a choice.
            pairs = [(tokens[0], other) for other in tokens[1:]] or [(tokens[0], None)]
            for a, b in pairs:
                row, start_b = add_special_tokens(self.tokenizer, *self._truncate(a, b))
                ids.append(row)
                first_lengths.append(first_segment_length(self.tokenizer, row, start_b))
        row_arrays = {}
        if examples[0].label is not None:
            row_arrays["targets"] = np.repeat(self._truth(examples), self.rows_per_example)
        limit, per_example = self.task.max_sequence_length, self.rows_per_example
        return TaskRows(ids, limit, first_lengths, row_arrays, rows_per_example=per_example)

    def answers(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Sentence]) -> Answers:
        answers = []
        for logits in self._example_logits(outputs):
            probabilities = np.exp(logits - logits.max())
            probabilities /= probabilities.sum()
            by_label = dict(zip(self.labels, map(float, probabilities), strict=True))
            answers.append({"label": self.labels[int(logits.argmax())], "probabilities": by_label})
        return answers

    def scores(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Sentence]) -> Scores:
        """Returns all scores of the kind; `f1` only for two labels, the second being positive."""
        names = [n for n in self.task.spec.scores if n != "f1" or len(self.labels) == 2]
        truth, predicted = self._truth(examples), self._predicted(outputs)
        return {name: scores.score(name, truth, predicted) for name in names}

    def compare_answer(self, answer: Answer, example: Sentence) -> ComparedAnswer:
        """Returns both labels; if they differ, the error is 1 - probability of the true one."""
        truth, label = str(example.label), answer["label"]
        error = 1 - answer["probabilities"][truth] if label != truth else 0.0
        return ComparedAnswer([truth], [label], error)

    def _truth(self, examples: Sequence[Sentence]) -> np.ndarray:
        indices = {label: i for i, label in enumerate(self.labels)}
        return np.array([indices[str(example.label)] for example in examples], np.int32)

    def _predicted(self, outputs: Outputs) -> np.ndarray:
        return self._example_logits(outputs).argmax(axis=1)

    def _example_logits(self, outputs: Outputs) -> np.ndarray:
        """Returns the logits of each example, [examples, labels]; a row of `choice` has one."""
        return np.stack(outputs).reshape(-1, len(self.labels))

    def _truncate(self, a: list[int], b: list[int] | None) -> tuple[list[int], list[int] | None]:
        room = self.task.max_sequence_length - special_count(self.tokenizer, 1 + (b is not None))
        if b is None:
            return a[:room], None
        tie_cuts_first = self.tokenizer.tie_cuts_first and len(a) <= len(b)
        a, b = list(a), list(b)
        while len(a) + len(b) > room:
            (a if len(a) + tie_cuts_first > len(b) else b).pop()
        return a, b


class ChoiceKind(SentenceKind):
    """The kind of `choice`: scores each pair of the context and a candidate."""

    output_count = 1

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        super().__init__(task, labels, tokenizer)
        self.rows_per_example = len(labels)


class RegressionKind(SentenceKind):
    """The kind of `regress`: a number for each example."""

    learns, answer_field, output_count = "numbers", "value", 1

    def answers(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Sentence]) -> Answers:
        return [{"value": float(row[0])} for row in outputs]

    def compare_answer(self, answer: Answer, example: Sentence) -> ComparedAnswer:
        truth, value = float(example.label or 0), answer["value"]  # `or` is for the type checker
        return ComparedAnswer([f"{truth:.4g}"], [f"{value:.4g}"], abs(value - truth))

    def _truth(self, examples: Sequence[Sentence]) -> np.ndarray:
        return np.array([example.label for example in examples], np.float32)

    def _predicted(self, outputs: Outputs) -> np.ndarray:
        return np.array([row[0] for row in outputs])


class TagKind(TaskKind):
    """The kind of `tag`: a label for each word.

    A sentence that is too long for a row continues in another row, so that every word gets a tag.
    """

    reads, answer_field, duplicates_must_agree = "tokens", "tags", True
    parse_cells = staticmethod(examples_lib.tagged_from_cells)

    @staticmethod
    def parse_texts(location: str, number: int, texts: Sequence[str]) -> Tagged:
        return Tagged(location, tuple(texts[0].split()), None)

    def example_fields(self, example: Tagged) -> dict[str, Any]:
        return {}  # the answer has the words

    def rows(self, examples: Sequence[Tagged]) -> TaskRows:
        """Returns one or more rows for each sentence; a word longer than a row is truncated."""
        ids, tags, weights, origins = [], [], [], []
        label_numbers = {label: i for i, label in enumerate(self.labels)}
        for number, example in enumerate(examples):
            with prefix_errors(example.location):
                parts = self._split_words(example.words)
            for tokens, starts, word_indices in parts:
                row, _ = add_special_tokens(self.tokenizer, tokens, None)
                weight = np.zeros(len(row), np.float32)
                weight[starts] = 1.0
                tag = np.zeros(len(row), np.int32)
                if example.tags is not None:
                    tag[starts] = [label_numbers[example.tags[i]] for i in word_indices]
                ids.append(row)
                tags.append(tag)
                weights.append(weight)
                origins.append((number, starts))
        arrays = {"targets": tags, "target_weights": weights}
        return TaskRows(ids, self.task.max_sequence_length, token_arrays=arrays, origins=origins)

    def answers(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Tagged]) -> Answers:
        answers = [{"words": list(example.words), "tags": []} for example in examples]
        for logits, (number, starts) in zip(outputs, rows.origins, strict=True):
            answers[number]["tags"] += [self.labels[i] for i in logits[starts].argmax(axis=1)]
        return answers

    def scores(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Tagged]) -> Scores:
        """Returns the accuracy over words, and the F1 of entities if it is the main score."""
        truth = [list(example.tags or ()) for example in examples]
        predicted = [answer["tags"] for answer in self.answers(outputs, rows, examples)]
        right = [a == b for a, b in zip(chain(*truth), chain(*predicted), strict=True)]
        by_name = {"accuracy": float(np.mean(right))}
        if self.task.main_score == "entity_f1":
            by_name["entity_f1"] = scores.entity_f1(truth, predicted)
        return by_name

    def compare_answer(self, answer: Answer, example: Tagged) -> ComparedAnswer:
        """Returns the true and predicted tags of wrong words, and their number as the error."""
        pairs = zip(example.tags or (), answer["tags"], strict=True)
        wrong = [pair for pair in pairs if pair[0] != pair[1]]
        return ComparedAnswer([a for a, _ in wrong], [b for _, b in wrong], len(wrong))

    def _split_words(self, words: Sequence[str]) -> list[tuple[list[int], list[int], list[int]]]:
        """Returns for each row its tokens, the positions where words start, and word indices."""
        room = self.task.max_sequence_length - 2
        rows: list[tuple[list[int], list[int], list[int]]] = [([], [], [])]
        for number, word in enumerate(words):
            encode = self.tokenizer.encode_after_space if number else self.tokenizer.encode
            # A word without a token, such as a control character, becomes [UNK].
            tokens = (encode(word) or [self.tokenizer.unk_id])[:room]
            if len(rows[-1][0]) + len(tokens) > room:
                rows.append(([], [], []))
            row, starts, row_words = rows[-1]
            starts.append(len(row) + 1)  # after [CLS]
            row_words.append(number)
            row += tokens
        return rows
