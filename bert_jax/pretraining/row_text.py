"""Shows the batch of a pre-training step as text: tokens, and what the model must predict."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from rich.text import Text

from bert_jax.config import Corpus, Data, Experiment
from bert_jax.data.batches import Batch, TrainBatches
from bert_jax.data.mixture import MixedBatches
from bert_jax.errors import InputError, printable
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.text.tokenizer import Tokenizer


def show(experiment: Experiment, prepared: PreparedCorpus, step: int, rows: int) -> Iterator[Text]:
    """Yields lines about the first `rows` rows of a step; steps are numbered from 0."""
    if not 0 <= step < experiment.total_steps:
        raise InputError(f"--step {step}: the run has steps 0 to {experiment.total_steps - 1}")
    phase_index, first_step = experiment.phase_at(step)
    phase, data = experiment.phases[phase_index], experiment.data_of(phase_index)
    train, phase_step = prepared.train_batches(experiment, phase_index), step - first_step
    batch = train.batch(phase_step, indices=np.arange(phase.batch_size))
    origins, notes = _origins(train, batch["rows"].astype(np.int64), experiment.corpus)
    yield Text(
        f"step {step}: phase {phase_index}, its step {phase_step} of {phase.steps}, "
        f"{phase.batch_size} rows of {phase.sequence_length}"
    )
    yield from map(Text, notes)
    for i in range(min(rows, phase.batch_size)):
        title = f"row {batch['rows'][i]} ({origins[i]})"
        if "next_sentence_labels" in batch:
            label = batch["next_sentence_labels"][i]
            title += f": B {LABELS[data.row_kind][label]}"
        yield Text(f"\n{title}")
        tokens = row_tokens(batch, i, prepared.tokenizer, data)
        truth = {p: token.truth for p, token in enumerate(tokens) if token.truth is not None}
        yield mark_tokens([token.text for token in tokens], truth)


def _origins(
    train: TrainBatches | MixedBatches, rows: np.ndarray, corpus: Corpus
) -> tuple[list[str], list[str]]:
    """Returns a description of the origin of each row, and lines about the whole batch.

    `rows` are the row numbers in the phase, int64 [B].
    """
    if isinstance(train, MixedBatches):
        (indices, numbers), sources = train.order.locate(rows), corpus.source_labels
        counts = np.bincount(indices, minlength=len(sources)).tolist()
        notes = [f"{s}: {c} of {len(rows)} rows" for s, c in zip(sources, counts, strict=True)]
        return [f"{sources[i]}, its row {n}" for i, n in zip(indices, numbers, strict=True)], notes
    # All epochs have `rows_per_epoch` rows: they drop planned rows, or repeat some if too few.
    count, notes = train.rows_per_epoch, []
    epochs, slots = np.divmod(rows, count)
    for epoch in np.unique(epochs):
        planned, note = train.rows_planned(int(epoch)), "each of its planned rows once"
        if planned != count:
            change = "dropped" if planned > count else "repeated"
            note = f"{abs(planned - count)} of {planned} planned rows {change}"
        notes.append(f"epoch {epoch}: {count} rows, {note}")
    return [f"epoch {e}, slot {s}" for e, s in zip(epochs, slots, strict=True)], notes


# The relation of B, the second text of a pair, to the first one A; by `data.row_kind` and label.
LABELS = {"pairs": ("follows", "is random"), "swapped_pairs": ("follows", "comes before A")}


class ShownToken(NamedTuple):
    """A token of a row, for display; control characters are escaped."""

    text: str  # the model's input
    truth: str | None  # the original token if the model must predict it; else None


def row_tokens(batch: Batch, i: int, tokenizer: Tokenizer, data: Data) -> list[ShownToken]:
    """Returns the tokens of one row, without padding; causal targets are not marked."""
    columns = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    predicted = zip(*(batch[name][i].tolist() for name in columns), strict=True)
    truth = {} if not data.is_masked else {p: label for p, label, weight in predicted if weight}
    ids = batch["input_ids"][i, : int(batch["input_mask"][i].sum())].tolist()
    shown = [printable(tokenizer.token(token)) for token in ids]
    labels = [printable(tokenizer.token(truth[p])) if p in truth else None for p in range(len(ids))]
    return list(map(ShownToken, shown, labels))


def mark_tokens(tokens: Sequence[str], marks: Mapping[int, str]) -> Text:
    """Returns tokens as one line; a token with a mark is written {token|mark}."""
    text = Text()
    for position, token in enumerate(tokens):
        word = f"{{{token}|{marks[position]}}}" if position in marks else token
        text.append(word, style="bold" if position in marks else "").append(" ")
    return text
