"""Functions for notebooks: load a trained model, compute the batch of a step, pre-train.

They are `bert_jax.load`, `bert_jax.batches` and `bert_jax.pretrain`. Paths are strings or `pathlib`
paths. Shape letters: B rows, S positions, P predictions.
"""

import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from etils import epath
from rich.text import Text

from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Data, Experiment
from bert_jax.config.code import name_file
from bert_jax.data import corpus
from bert_jax.data.batches import Batch, TrainBatches
from bert_jax.data.mixture import MixedBatches
from bert_jax.errors import InputError, printable
from bert_jax.interop import huggingface
from bert_jax.pretraining import pretraining_job
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.pretraining.pretraining_job import OpenCorpus
from bert_jax.running.progress import LoggedProgress
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks.batch_text import mark_tokens
from bert_jax.text.tokenizer import Tokenizer

Path = str | os.PathLike[str]


def load(path: Path, checkpoint: str = "newest", code: Path | None = None) -> LoadedModel:
    """Loads a model from a run, a base, or a folder that transformers wrote.

    Args:
      path: the folder; a run or a base may also be in a bucket.
      checkpoint: a run's checkpoint: `newest`, `best` (by held-out loss), or a step.
      code: the file of a run's custom objective or encoder; it runs if its hash is the saved one.
    """
    if code is not None:
        name_file(os.fspath(code))
    folder = epath.Path(path)
    run = mirror.open_workdir(folder)
    has_config = (run.root / "config.json").exists()
    if base_lib.is_base(run.root) or run.experiment.exists() or not has_config:
        return LoadedModel.of(run, which=checkpoint)
    return LoadedModel.load_base(huggingface.read_folder(run.root, lambda line: None), folder.name)


def batches(experiment: Experiment | Path, step: int, workdir: Path | None = None) -> Batch:
    """Returns the batch of any step, without the steps before; prepares the corpus if needed.

    Args:
      experiment: a value, an experiment file, or a resolved config as JSON.
      step: the number of steps before this one, over all phases.
      workdir: the run's folder; None: runs/NAME.

    Returns:
      NumPy arrays: input_ids, segment_ids, input_mask int32 [B, S]; masked_lm_positions,
      masked_lm_ids int32 and masked_lm_weights float32 [B, P]; next_sentence_labels int32 [B], 1
      if B is random; rows uint32 [B]; row_weights float32 [B].
    """
    experiment, run = _open_run(experiment, workdir)
    if not 0 <= step < experiment.total_steps:
        raise InputError(f"step {step}: the run has steps 0 to {experiment.total_steps - 1}")
    cfg, size = experiment.corpus, experiment.model.vocab_size
    corpus.prepare(cfg, size, run.corpus, lambda line: None)
    phase, first = experiment.phase_at(step)
    train = OpenCorpus.open(run.corpus).train_batches(experiment, phase)
    return train.batch(step - first, np.arange(experiment.phases[phase].batch_size))


def pretrain(experiment: Experiment | Path, workdir: Path | None = None) -> LoadedModel:
    """Starts or resumes a run, trains it to its last step, and loads the result.

    The logger `bert_jax` receives the lines that the command prints (level INFO).

    Args:
      experiment: a value, an experiment file, or a resolved config as JSON.
      workdir: the run's folder; None: runs/NAME.

    Raises:
      RuntimeError: the run ended before its last step.
    """
    experiment, run = _open_run(experiment, workdir)
    outcome = pretraining_job.pretrain(experiment, run, "keep", LoggedProgress())
    if outcome != "finished":
        raise RuntimeError(f"{run.address}: the run has {outcome}; call again to resume it")
    return load(run.address)


def _open_run(experiment: Experiment | Path, workdir: Path | None) -> tuple[Experiment, Workdir]:
    if not isinstance(experiment, Experiment):
        experiment = config.load(os.fspath(experiment))
    root = f"runs/{experiment.name}" if workdir is None else workdir
    return experiment, mirror.open_to_write(root, experiment.run.corpus_dir)


# --- a batch as text ------------------------------------------------------------------------------


def show(experiment: Experiment, prepared: OpenCorpus, done: int, rows: int) -> Iterator[Text]:
    """Yields lines about the first `rows` rows of the step after `done` steps."""
    if not 0 <= done < experiment.total_steps:
        raise InputError(f"--step {done}: the run has steps 0 to {experiment.total_steps - 1}")
    phase, first = experiment.phase_at(done)
    spec = experiment.phases[phase]
    train, data = prepared.train_batches(experiment, phase), experiment.data_of(phase)
    batch = train.batch(done - first, np.arange(spec.batch_size))
    origins, notes = _origins(train, batch["rows"].astype(np.int64), experiment.corpus.sources)
    yield Text(
        f"step {done}: phase {phase}, its step {done - first} of {spec.steps}, "
        f"{spec.batch_size} rows of {spec.sequence_length}"
    )
    yield from map(Text, notes)
    for i in range(min(rows, spec.batch_size)):
        title = f"row {batch['rows'][i]} ({origins[i]})"
        if "next_sentence_labels" in batch:
            label = batch["next_sentence_labels"][i]
            title += f": B {LABELS[data.units][label]}"
        yield Text(f"\n{title}")
        tokens = row_tokens(batch, i, prepared.tokenizer, data)
        truth = {i: token.truth for i, token in enumerate(tokens) if token.truth is not None}
        yield mark_tokens([token.text for token in tokens], truth)


def _origins(
    train: TrainBatches | MixedBatches, rows: np.ndarray, sources: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Returns the origin of each row of a phase, int64 [B], and lines about the whole batch."""
    if isinstance(train, MixedBatches):
        source, numbers = train.order.locate(rows)
        counts = np.bincount(source, minlength=len(sources)).tolist()
        notes = [f"{s}: {c} of {len(rows)} rows" for s, c in zip(sources, counts, strict=True)]
        return [f"{sources[s]}, its row {n}" for s, n in zip(source, numbers, strict=True)], notes
    epochs, slots = np.divmod(rows, train.rows_per_epoch)
    notes = []
    for epoch in np.unique(epochs):
        planned = train.rows_planned(int(epoch))
        excess = planned - train.rows_per_epoch
        note = f"{abs(excess)} of {planned} planned rows {'dropped' if excess > 0 else 'repeated'}"
        note = note if excess else "each of its planned rows once"
        notes.append(f"epoch {epoch}: {train.rows_per_epoch} rows, {note}")
    return [f"epoch {e}, slot {s}" for e, s in zip(epochs, slots, strict=True)], notes


# The relation of B to A, by `data.units` and the label.
LABELS = {"pairs": ("follows", "is random"), "swapped_pairs": ("follows", "comes before A")}


class ShownToken(NamedTuple):
    """A token of a row, for display; control characters are escaped."""

    text: str  # the model's input
    truth: str | None  # the original token if the model must predict it; else None


def row_tokens(batch: Batch, i: int, tokenizer: Tokenizer, data: Data) -> list[ShownToken]:
    """Returns the tokens of one row, without padding; causal targets are not marked."""
    columns = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    predicted = zip(*(batch[name][i].tolist() for name in columns), strict=True)
    truth = {} if data.unpredicted else {p: label for p, label, weight in predicted if weight}
    ids = batch["input_ids"][i, : int(batch["input_mask"][i].sum())].tolist()
    shown = [printable(tokenizer.piece(token)) for token in ids]
    known = [printable(tokenizer.piece(truth[p])) if p in truth else None for p in range(len(ids))]
    return list(map(ShownToken, shown, known))
