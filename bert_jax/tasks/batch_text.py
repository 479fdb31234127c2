"""What a step of a fine-tuning learns from, as text: pieces, and what is to be answered."""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from rich.text import Text

from bert_jax.config import Finetuning
from bert_jax.errors import InputError, printable
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import similar
from bert_jax.tasks.adaptation import LoadedBase, kind_of
from bert_jax.tasks.examples import Example, Tally
from bert_jax.tasks.generate import TargetRows
from bert_jax.tasks.rows import Batch, TaskBatches, TaskRows
from bert_jax.text.tokenizer import Tokenizer


def show(experiment: Finetuning, done: int, most: int) -> Iterator[Text]:
    """Yields lines about the first rows of the step after `done` steps.

    A piece with a tag, and the first and the last of an answer, are written {piece|what it is};
    behind `->` stands a text that is to be generated.
    """
    base, is_similar = LoadedBase.of(experiment), experiment.task.kind == "similar"
    train, labels, rows = list[Example](), (), None
    if is_similar:
        task = similar.inherit_prompts(experiment.task, base.vectors)
        experiment = dataclasses.replace(experiment, task=task)
        learned = similar.read(experiment, base.model, base.tokenizer, Tally(), teacher="left_out")
        batches, each = learned.batches, learned.rows_per_example
        in_all = learned.examples * each
    else:
        train = examples_lib.read(experiment.task, experiment.task.train, "labelled")
        labels = examples_lib.find_labels(experiment.task, train)
        rows = kind_of(experiment.task, labels, base.tokenizer).rows(train)
        batches = TaskBatches(rows, base.tokenizer.pad_id, experiment.batch_size, experiment.seed)
        each, in_all = rows.rows_per_example, len(rows.ids)
    total = math.ceil(experiment.epochs * (in_all // each) / experiment.batch_size)
    if not 0 <= done < total:
        raise InputError(f"--step {done}: the run has steps 0 to {total - 1}")
    count = experiment.batch_size * each
    batch = batches.batch(done, np.arange(count))
    filled, length = batch["input_mask"].mean(), batch["input_ids"].shape[1]
    yield Text(
        f"step {done} of {total}, epoch {done * count // in_all}: {count} rows of {length}, "
        f"{filled:.0%} filled"
    )
    if is_similar:
        yield from _compared(batch, base.tokenizer, each, most)
        return
    assert rows is not None and isinstance(batches, TaskBatches)
    for row in batches.step_rows(done)[:most]:
        example = train[rows.notes[row][0] if rows.notes else row // each]
        yield Text(f"\n{printable(example.place)}{_answer(rows, int(row), labels)}")
        pieces = [printable(base.tokenizer.piece(int(i))) for i in rows.ids[row]]
        text = mark_tokens(pieces, dict(_marks(rows, int(row), labels)))
        if isinstance(rows, TargetRows):
            target = (printable(base.tokenizer.piece(int(i))) for i in rows.targets[row])
            text.append(f"-> {' '.join(target)}")
        yield text


def _compared(batch: Batch, tokenizer: Tokenizer, each: int, most: int) -> Iterator[Text]:
    """Yields texts that are compared, the ones of an example together."""
    for row, ids in enumerate(batch["input_ids"][: most * each]):
        if row % each == 0:
            score = f", to be {batch['scores'][row]:g}" if "scores" in batch else ""
            yield Text(f"\nexample {row // each} of the step{score}")
        pieces = ids[batch["input_mask"][row] > 0]
        yield mark_tokens([printable(tokenizer.piece(int(i))) for i in pieces], {})


def _answer(rows: TaskRows, row: int, labels: Sequence[str]) -> str:
    """Returns what is to be answered about a whole row, in words."""
    if "targets" not in rows.numbers:
        spans = "starts" in rows.numbers and not rows.numbers["ends"][row]
        return ": not answered here" if spans else ""
    target = rows.numbers["targets"][row]
    if not labels:
        return f": {target:g}"
    if rows.rows_per_example > 1:
        place = row % rows.rows_per_example
        return f", {printable(labels[place])}: {'right' if place == target else 'wrong'}"
    return f": {printable(labels[int(target)])}"


def _marks(rows: TaskRows, row: int, labels: Sequence[str]) -> Iterator[tuple[int, str]]:
    """Yields places of pieces that are to be answered, and as what."""
    if rows.tokens:
        tags, weights = rows.tokens["targets"][row], rows.tokens["target_weights"][row]
        for place in np.flatnonzero(weights):
            yield int(place), printable(labels[int(tags[place])])
    elif "starts" in rows.numbers and rows.numbers["ends"][row]:
        start, end = int(rows.numbers["starts"][row]), int(rows.numbers["ends"][row])
        yield from {end: "last", start: "first" if start != end else "answer"}.items()


def mark_tokens(pieces: Sequence[str], marks: Mapping[int, str]) -> Text:
    """Returns pieces as a line; one with a mark is written {piece|mark}."""
    text = Text()
    for place, piece in enumerate(pieces):
        word = f"{{{piece}|{marks[place]}}}" if place in marks else piece
        text.append(word, style="bold" if place in marks else "").append(" ")
    return text
