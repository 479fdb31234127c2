"""What a kind of task is: examples to rows, and what the head says of them to answers and scores.

`sentences`, `tags` and `spans` are the three there are.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from bert_jax.config import Task
from bert_jax.tasks.heads import Reads
from bert_jax.tasks.rows import Rows
from bert_jax.tasks.sentences import Sentences
from bert_jax.tasks.spans import Spans
from bert_jax.tasks.tags import Tags
from bert_jax.text.tokenizer import Tokenizer


class Shape(Protocol):
    """A task for one tokenizer and one set of labels.

    Attributes:
      reads: what the head reads.
      outputs: how many scores it gives.
    """

    reads: Reads
    outputs: int

    def rows(self, examples: Sequence[Any]) -> Rows:
        """The examples as the encoder reads them; with targets if they have labels."""

    def answers(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Any]
    ) -> list[dict[str, Any]]:
        """What the outputs, one array a row, say of each example, as JSON."""

    def scores(
        self, outputs: list[np.ndarray], rows: Rows, examples: Sequence[Any]
    ) -> dict[str, float]:
        """The scores of labelled examples by name."""


def of(
    task: Task,
    labels: tuple[str, ...],
    tokenizer: Tokenizer,
    no_answer_threshold: float | None = None,
) -> Shape:
    """The task for these labels, in their order, and this tokenizer.

    Args:
      task: the task.
      labels: their names.
      tokenizer: of the base.
      no_answer_threshold: see `Spans`.
    """
    if task.kind == "span":
        return Spans(task, tokenizer, no_answer_threshold)
    return (Tags if task.kind == "tag" else Sentences)(task, labels, tokenizer)
