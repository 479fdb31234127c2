"""A step's batch as a person reads it: text, masks, labels, where its rows come from."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from rich.text import Text

from bert_jax.config import Experiment
from bert_jax.data.batches import Batch
from bert_jax.errors import InputError, printable
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training.pretraining import Prepared


def show(experiment: Experiment, prepared: Prepared, done: int, rows: int) -> Iterator[Text]:
    """Lines about the first `rows` rows of the step after `done` steps.

    Raises:
      InputError: the run has no such step.
    """
    if not 0 <= done < experiment.total_steps:
        raise InputError(f"--step {done}: the run has steps 0 to {experiment.total_steps - 1}")
    phase, first = experiment.phase_at(done)
    spec = experiment.phases[phase]
    train = prepared.train_batches(experiment, phase)
    batch = train.batch(done - first, np.arange(spec.batch_size))
    epochs, slots = np.divmod(batch["rows"].astype(np.int64), train.rows_per_epoch)
    yield Text(
        f"step {done}: phase {phase}, step {done - first} of {spec.steps} there, "
        f"{spec.batch_size} rows of {spec.sequence_length}"
    )
    for epoch in np.unique(epochs):
        planned = train.rows_planned(int(epoch))
        change = planned - train.rows_per_epoch
        note = "all of its plan once"
        if change > 0:
            note = f"{change} of {planned} planned rows dropped"
        elif change < 0:
            note = f"{-change} of {planned} planned rows repeated"
        yield Text(f"epoch {epoch}: {train.rows_per_epoch} rows, {note}")
    for i in range(min(rows, spec.batch_size)):
        label = "is random" if batch["next_sentence_labels"][i] else "follows"
        yield Text(f"\nrow {batch['rows'][i]} (epoch {epochs[i]}, slot {slots[i]}): B {label}")
        yield row_text(batch, i, prepared.tokenizer)


class Piece(NamedTuple):
    """A piece of an example as it is shown.

    Attributes:
      text: what the model is given, control characters as escapes.
      stood: what stood there, if it is to be predicted; else None.
    """

    text: str
    stood: str | None


def row_pieces(batch: Batch, i: int, tokenizer: Tokenizer) -> list[Piece]:
    """The pieces of one row, without padding."""
    predicted = {
        int(p): printable(tokenizer.piece(int(label)))
        for p, label, w in zip(
            batch["masked_lm_positions"][i],
            batch["masked_lm_ids"][i],
            batch["masked_lm_weights"][i],
            strict=True,
        )
        if w
    }
    ids = batch["input_ids"][i, : int(batch["input_mask"][i].sum())].tolist()
    return [
        Piece(printable(tokenizer.piece(token)), predicted.get(position))
        for position, token in enumerate(ids)
    ]


def row_text(batch: Batch, i: int, tokenizer: Tokenizer) -> Text:
    """One row's pieces; a predicted one is written {what stands there|what stood there}."""
    text = Text()
    for piece in row_pieces(batch, i, tokenizer):
        if piece.stood is None:
            text.append(f"{piece.text} ")
        else:
            text.append(f"{{{piece.text}|{piece.stood}}}", style="bold")
            text.append(" ")
    return text
