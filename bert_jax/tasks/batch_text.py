"""Shows the batch of a fine-tuning step as text: tokens and targets."""

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
from rich.text import Text

from bert_jax.config import Finetuning
from bert_jax.errors import InputError, printable
from bert_jax.pretraining.row_text import mark_tokens
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import similar
from bert_jax.tasks.adaptation import LoadedBase, kind_of
from bert_jax.tasks.examples import Example, Tally
from bert_jax.tasks.generate import TargetRows
from bert_jax.tasks.rows import Batch, TaskBatches, TaskRows
from bert_jax.text.tokenizer import Tokenizer


def show(experiment: Finetuning, done: int, most: int) -> Iterator[Text]:
    """Yields lines about the first `most` rows of the step after `done` steps.

    A token with a tag, and the first and last token of an answer, are written {token|mark}. The
    target of a generated text follows `->`.
    """
    base, is_similar = LoadedBase.of(experiment), experiment.task.kind == "similar"
    train, labels, rows = list[Example](), (), None
    if is_similar:
        task = similar.inherit_prompts(experiment.task, base.vectors)
        experiment = dataclasses.replace(experiment, task=task)
        learned = similar.read(experiment, base.model, base.tokenizer, Tally(), teacher="skip")
        batches, per_example = learned.batches, learned.rows_per_example
        row_count = learned.examples * per_example
    else:
        train = examples_lib.read(experiment.task, experiment.task.train, "labelled")
        labels = examples_lib.find_labels(experiment.task, train)
        rows = kind_of(experiment.task, labels, base.tokenizer).rows(train)
        batches = TaskBatches(rows, base.tokenizer.pad_id, experiment.batch_size, experiment.seed)
        per_example, row_count = rows.rows_per_example, len(rows.ids)
    total = math.ceil(experiment.epochs * (row_count // per_example) / experiment.batch_size)
    if not 0 <= done < total:
        raise InputError(f"--step {done}: the run has steps 0 to {total - 1}")
    count = experiment.batch_size * per_example
    batch = batches.batch(done, np.arange(count))
    filled, length = batch["input_mask"].mean(), batch["input_ids"].shape[1]
    yield Text(
        f"step {done} of {total}, epoch {done * count // row_count}: {count} rows of {length}, "
        f"{filled:.0%} filled"
    )
    if is_similar:
        yield from _similar_lines(batch, base.tokenizer, per_example, most)
        return
    assert rows is not None and isinstance(batches, TaskBatches)
    for row in batches.step_rows(done)[:most]:
        example = train[rows.notes[row][0] if rows.notes else row // per_example]
        yield Text(f"\n{printable(example.location)}{_target_text(rows, int(row), labels)}")
        tokens = [printable(base.tokenizer.token(int(i))) for i in rows.ids[row]]
        text = mark_tokens(tokens, dict(_marks(rows, int(row), labels)))
        if isinstance(rows, TargetRows):
            target = (printable(base.tokenizer.token(int(i))) for i in rows.targets[row])
            text.append(f"-> {' '.join(target)}")
        yield text


def _similar_lines(batch: Batch, tokenizer: Tokenizer, count: int, most: int) -> Iterator[Text]:
    """Yields the texts of similarity examples, each of which has `count` rows."""
    for row, ids in enumerate(batch["input_ids"][: most * count]):
        if row % count == 0:
            score = f", to be {batch['scores'][row]:g}" if "scores" in batch else ""
            yield Text(f"\nexample {row // count} of the step{score}")
        token_ids = ids[batch["input_mask"][row] > 0]
        yield mark_tokens([printable(tokenizer.token(int(i))) for i in token_ids], {})


def _target_text(rows: TaskRows, row: int, labels: Sequence[str]) -> str:
    """Returns the target of a whole row as text."""
    if "targets" not in rows.numbers:
        spans = "starts" in rows.numbers and not rows.numbers["ends"][row]
        return ": not answered here" if spans else ""
    target = rows.numbers["targets"][row]
    if not labels:
        return f": {target:g}"
    if rows.rows_per_example > 1:
        candidate = row % rows.rows_per_example
        return f", {printable(labels[candidate])}: {'right' if candidate == target else 'wrong'}"
    return f": {printable(labels[int(target)])}"


def _marks(rows: TaskRows, row: int, labels: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields (position, mark) of the tokens that are targets."""
    if rows.tokens:
        tags, weights = rows.tokens["targets"][row], rows.tokens["target_weights"][row]
        for position in np.flatnonzero(weights):
            yield int(position), printable(labels[int(tags[position])])
    elif "starts" in rows.numbers and rows.numbers["ends"][row]:
        start, end = int(rows.numbers["starts"][row]), int(rows.numbers["ends"][row])
        yield from {end: "last", start: "first" if start != end else "answer"}.items()
