"""One text or several to one answer: `classify`, `pair`, `regress` and `choice`.

As in section 3.2 of Devlin et al. 2018 one layer reads what [CLS] comes to. Of a choice each text
is read with the first one, and the highest of their scores is the answer.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.config import SCORES, Task
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Sentence
from bert_jax.tasks.rows import Rows, joined
from bert_jax.text.tokenizer import Tokenizer


class Sentences:
    """The `TaskKind` of one label or number an example."""

    reads = "pooled"

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        self._task, self._labels, self._tokenizer = task, labels, tokenizer
        self._rows_per_example = len(labels) if task.kind == "choice" else 1
        self.outputs = 1 if task.kind in ("regress", "choice") else len(labels)

    def rows(self, examples: Sequence[Sentence]) -> Rows:
        """Returns one row for each text, pair or choice.

        What is too long loses a piece at a time from the end of the longer text.
        """
        ids, first = [], []
        for example in examples:
            pieces = [self._tokenizer.encode(text) for text in example.texts]
            pairs = [(pieces[0], other) for other in pieces[1:]] or [(pieces[0], None)]
            for a, b in pairs:
                row, split = joined(self._tokenizer, *self._cut(a, b))
                ids.append(row)
                first.append(split)
        numbers = {}
        if examples[0].label is not None:
            truth = self._truth(examples)
            numbers["targets"] = np.repeat(truth, self._rows_per_example)
        limit = self._task.max_sequence_length
        return Rows(ids, np.array(first, np.int32), numbers, {}, [], limit, self._rows_per_example)

    def answers(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Sentence]
    ) -> list[Any]:
        """Returns for each example `label` and `probabilities` by label, or a regression's `value`.

        Args:
          outputs: of each row, float32 [outputs].
          rows: which rows they are.
          examples: whose rows they are.
        """
        del rows, examples
        if self._task.kind == "regress":
            return [{"value": float(row[0])} for row in outputs]
        answers = []
        for logits in self._by_example(outputs):
            chances = np.exp(logits - logits.max())
            chances /= chances.sum()
            by_label = dict(zip(self._labels, map(float, chances), strict=True))
            answers.append({"label": self._labels[int(logits.argmax())], "probabilities": by_label})
        return answers

    def scores(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Sentence]
    ) -> dict[str, float]:
        """Returns all scores of the kind; `f1` of two labels alone, the second the positive one."""
        del rows
        truth = self._truth(examples)
        if self._task.kind == "regress":
            predicted = np.array([row[0] for row in outputs])
        else:
            predicted = self._by_example(outputs).argmax(axis=1)
        names = SCORES[self._task.kind]
        if len(self._labels) != 2:
            names = tuple(name for name in names if name != "f1")
        return {name: scores.score(name, truth, predicted) for name in names}

    def _truth(self, examples: Sequence[Sentence]) -> np.ndarray:
        if self._task.kind == "regress":
            return np.array([example.label for example in examples], np.float32)
        number = {label: i for i, label in enumerate(self._labels)}
        return np.array([number[str(example.label)] for example in examples], np.int32)

    def _by_example(self, outputs: list[np.ndarray]) -> np.ndarray:
        """Groups the scores of rows: [examples, labels]."""
        return np.stack(outputs).reshape(-1, len(self._labels))

    def _cut(self, a: list[int], b: list[int] | None) -> tuple[list[int], list[int] | None]:
        room = self._task.max_sequence_length - (2 if b is None else 3)
        if b is None:
            return a[:room], None
        a, b = list(a), list(b)
        while len(a) + len(b) > room:
            (a if len(a) > len(b) else b).pop()
        return a, b
