"""What a notebook wants: a trained model in one call, the batches of a step, a run.

`import bert_jax` gives `bert_jax.load`, `bert_jax.batches` and `bert_jax.pretrain`; everything else
is a module of its own. Paths are strings or `pathlib` paths.

Shape letters: B rows, S positions, P predictions.
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
from bert_jax.pretraining import pretraining
from bert_jax.pretraining.loaded import Loaded
from bert_jax.pretraining.pretraining import Prepared
from bert_jax.running.progress import LoggedProgress
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks.shown import marked
from bert_jax.text.tokenizer import Tokenizer

Path = str | os.PathLike[str]


def load(place: Path, checkpoint: str = "newest", code: Path | None = None) -> Loaded:
    """Loads a model from a run, a base, or a folder that transformers wrote.

    Args:
      place: the folder; of a run or a base it may lie in a bucket.
      checkpoint: of a run: `newest`, `best` (by held-out loss), or a step.
      code: the file of a run's own objective or encoder, which runs if its hash is the run's.
    """
    if code is not None:
        name_file(os.fspath(code))
    folder = epath.Path(place)
    run = mirror.open_workdir(folder)
    theirs = (run.root / "config.json").exists() and not run.experiment.exists()
    if not theirs or base_lib.is_base(run.root):
        return Loaded.of(folder, which=checkpoint)
    return Loaded.of_base(huggingface.read_folder(run.root, lambda line: None), folder.name)


def batches(experiment: Experiment | Path, step: int, workdir: Path | None = None) -> Batch:
    """Returns the batch of a step of a run, whatever was done before; the corpus is made if needed.

    Args:
      experiment: a value, an experiment file, or a resolved config as JSON.
      step: how many steps are done before it, over all phases.
      workdir: of the run; None: runs/NAME.

    Returns:
      NumPy arrays: input_ids, segment_ids, input_mask int32 [B, S]; masked_lm_positions,
      masked_lm_ids int32 and masked_lm_weights float32 [B, P]; next_sentence_labels int32 [B], 1
      for a random next; rows uint32 [B]; row_weights float32 [B].
    """
    experiment, place = _opened(experiment, workdir)
    if not 0 <= step < experiment.total_steps:
        raise InputError(f"step {step}: the run has steps 0 to {experiment.total_steps - 1}")
    cfg, size = experiment.corpus, experiment.model.vocab_size
    corpus.prepare(cfg, size, place.corpus, lambda line: None)
    phase, first = experiment.phase_at(step)
    train = Prepared.open(place.corpus).train_batches(experiment, phase)
    return train.batch(step - first, np.arange(experiment.phases[phase].batch_size))


def pretrain(experiment: Experiment | Path, workdir: Path | None = None) -> Loaded:
    """Pre-trains to the end, or goes on where the run stopped, and loads the result.

    What the command would print, the logger `bert_jax` is given (level INFO).

    Args:
      experiment: a value, an experiment file, or a resolved config as JSON.
      workdir: where the run lives; None: runs/NAME.

    Raises:
      RuntimeError: it ended before its last step.
    """
    experiment, place = _opened(experiment, workdir)
    outcome = pretraining.pretrain(experiment, place, "keep", LoggedProgress())
    if outcome != "finished":
        raise RuntimeError(f"{place.named}: the run has {outcome}; call again to go on")
    return load(place.named)


def _opened(experiment: Experiment | Path, workdir: Path | None) -> tuple[Experiment, Workdir]:
    if not isinstance(experiment, Experiment):
        experiment = config.load(os.fspath(experiment))
    root = f"runs/{experiment.name}" if workdir is None else workdir
    return experiment, mirror.open_to_write(root, experiment.run.corpus_dir)


# --- a batch as text ------------------------------------------------------------------------------


def show(experiment: Experiment, prepared: Prepared, done: int, rows: int) -> Iterator[Text]:
    """Yields lines about the first `rows` rows of the step after `done` steps."""
    if not 0 <= done < experiment.total_steps:
        raise InputError(f"--step {done}: the run has steps 0 to {experiment.total_steps - 1}")
    phase, first = experiment.phase_at(done)
    spec = experiment.phases[phase]
    train, data = prepared.train_batches(experiment, phase), experiment.data_of(phase)
    batch = train.batch(done - first, np.arange(spec.batch_size))
    places, notes = _places(train, batch["rows"].astype(np.int64), experiment.corpus.sources)
    yield Text(
        f"step {done}: phase {phase}, step {done - first} of {spec.steps} there, "
        f"{spec.batch_size} rows of {spec.sequence_length}"
    )
    yield from map(Text, notes)
    for i in range(min(rows, spec.batch_size)):
        where = f"row {batch['rows'][i]} ({places[i]})"
        if "next_sentence_labels" in batch:
            label = batch["next_sentence_labels"][i]
            where += f": B {LABELS[data.units][label]}"
        yield Text(f"\n{where}")
        pieces = row_pieces(batch, i, prepared.tokenizer, data)
        stood = {at: one.stood for at, one in enumerate(pieces) if one.stood is not None}
        yield marked([one.text for one in pieces], stood)  # {what the model is given|truth}


def _places(
    train: TrainBatches | MixedBatches, rows: np.ndarray, sources: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Returns where rows of a phase, int64 [B], come from, and lines about all of them."""
    if isinstance(train, MixedBatches):
        of, numbers = train.order.locate(rows)
        counts = np.bincount(of, minlength=len(sources)).tolist()
        notes = [f"{s}: {c} of {len(rows)} rows" for s, c in zip(sources, counts, strict=True)]
        return [f"{sources[s]}, its row {n}" for s, n in zip(of, numbers, strict=True)], notes
    epochs, slots = np.divmod(rows, train.rows_per_epoch)
    notes = []
    for epoch in np.unique(epochs):
        planned = train.rows_planned(int(epoch))
        more = planned - train.rows_per_epoch
        note = f"{abs(more)} of {planned} planned rows {'dropped' if more > 0 else 'repeated'}"
        note = note if more else "each of its planned rows once"
        notes.append(f"epoch {epoch}: {train.rows_per_epoch} rows, {note}")
    return [f"epoch {e}, slot {s}" for e, s in zip(epochs, slots, strict=True)], notes


# What B is to A, by `data.units` and the label.
LABELS = {"pairs": ("follows", "is random"), "swapped_pairs": ("follows", "comes before A")}


class Piece(NamedTuple):
    """A piece of an example as it is shown."""

    text: str  # what the model is given, control characters as escapes
    stood: str | None  # what stood here, if it is to be predicted; else None


def row_pieces(batch: Batch, i: int, tokenizer: Tokenizer, data: Data) -> list[Piece]:
    """Returns the pieces of one row, without padding; of next pieces none is marked."""
    columns = ("masked_lm_positions", "masked_lm_ids", "masked_lm_weights")
    predicted = zip(*(batch[name][i].tolist() for name in columns), strict=True)
    truth = {} if data.unpredicted else {p: label for p, label, weight in predicted if weight}
    ids = batch["input_ids"][i, : int(batch["input_mask"][i].sum())].tolist()
    shown = [printable(tokenizer.piece(token)) for token in ids]
    stood = [printable(tokenizer.piece(truth[p])) if p in truth else None for p in range(len(ids))]
    return list(map(Piece, shown, stood))
