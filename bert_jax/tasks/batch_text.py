"""Shows the batch of a fine-tuning step as text: tokens and targets."""

import math
from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from bert_jax.config import Finetuning
from bert_jax.errors import InputError, printable
from bert_jax.pretraining.row_text import mark_tokens
from bert_jax.tasks.adaptation import read_base
from bert_jax.tasks.examples import Tally
from bert_jax.tasks.generate import TargetRows
from bert_jax.tasks.rows import Batch, TaskBatches, TaskRows
from bert_jax.tasks.task_kind import TaskKind
from bert_jax.text.tokenizer import Tokenizer


def show(experiment: Finetuning, step: int, max_shown: int) -> Iterator[Text]:
    """Yields lines about the first rows of a step; for a task of vectors, the first examples.

    A token with a tag, and the first and last token of an answer, are written {token|mark}. The
    target of a generated text follows `->`.
    """
    base = read_base(experiment)
    kind_class: type[TaskKind] = experiment.task.spec.implementing_class
    training = kind_class.read_training(experiment, base, Tally(), run_teacher=False)
    kind, rows, batches = training.kind, training.rows, training.batches
    total = math.ceil(experiment.epochs * training.samples_per_epoch / experiment.batch_size)
    if not 0 <= step < total:
        raise InputError(f"--step {step}: the run has steps 0 to {total - 1}")
    per_example = kind.rows_per_example
    count = experiment.batch_size * per_example
    batch = batches.batch(step, np.arange(count))
    filled, length = batch["input_mask"].mean(), batch["input_ids"].shape[1]
    epoch = step * experiment.batch_size // training.samples_per_epoch
    yield Text(
        f"step {step} of {total}, epoch {epoch}: {count} rows of {length}, {filled:.0%} filled"
    )
    if kind.task.spec.makes_vectors:
        yield from _vector_lines(batch, base.tokenizer, per_example, max_shown)
        return
    assert rows is not None and isinstance(batches, TaskBatches)
    for row in batches.step_rows(step)[:max_shown]:
        example = training.examples[rows.origins[row][0] if rows.origins else row // per_example]
        yield Text(f"\n{printable(example.location)}{_target_suffix(rows, int(row), kind.labels)}")
        tokens = [printable(base.tokenizer.token(int(i))) for i in rows.ids[row]]
        text = mark_tokens(tokens, dict(_marks(rows, int(row), kind.labels)))
        if isinstance(rows, TargetRows):
            target = (printable(base.tokenizer.token(int(i))) for i in rows.targets[row])
            text.append(f"-> {' '.join(target)}")
        yield text


def _vector_lines(batch: Batch, tokenizer: Tokenizer, count: int, limit: int) -> Iterator[Text]:
    """Yields the texts of the first `limit` examples, which have `count` rows each."""
    for row, ids in enumerate(batch["input_ids"][: limit * count]):
        if row % count == 0:  # all rows of an example have its true scores
            scores = np.atleast_1d(batch["scores"][row]) if "scores" in batch else ()
            score = f", target {', '.join(f'{x:g}' for x in scores)}" if len(scores) else ""
            yield Text(f"\nexample {row // count} of the step{score}")
        token_ids = ids[batch["input_mask"][row] > 0]
        yield mark_tokens([printable(tokenizer.token(int(i))) for i in token_ids], {})


def _target_suffix(rows: TaskRows, row: int, labels: Sequence[str]) -> str:
    """Returns the target of a whole row as text that follows the location of its example."""
    if "targets" not in rows.row_arrays:
        is_unanswered = "starts" in rows.row_arrays and not rows.row_arrays["ends"][row]
        return ": no answer in this row" if is_unanswered else ""
    target = rows.row_arrays["targets"][row]
    if not labels:
        # For task.kind=rank a row has the scores of all texts of its query.
        score = np.ravel(target)[row % rows.rows_per_example]
        return ": padding" if np.isnan(score) else f": {score:g}"
    if rows.rows_per_example > 1:
        candidate = row % rows.rows_per_example
        return f", {printable(labels[candidate])}: {'right' if candidate == target else 'wrong'}"
    return f": {printable(labels[int(target)])}"


def _marks(rows: TaskRows, row: int, labels: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields (position, mark) of the tokens that are targets."""
    if rows.token_arrays:
        tags = rows.token_arrays["targets"][row]
        for position in np.flatnonzero(rows.token_arrays["target_weights"][row]):
            yield int(position), printable(labels[int(tags[position])])
    elif "starts" in rows.row_arrays and rows.row_arrays["ends"][row]:
        start, end = int(rows.row_arrays["starts"][row]), int(rows.row_arrays["ends"][row])
        marks = {start: "first", end: "last"} if start < end else {start: "answer"}
        yield from marks.items()
