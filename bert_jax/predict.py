"""What a run holds, for people and tools: trained parameters, and a step's batch as text."""

import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import jax
import numpy as np
from etils import epath
from rich.text import Text

from bert_jax import base as base_lib
from bert_jax import config
from bert_jax.base import Moments, TextVectors
from bert_jax.config import Data, Experiment, Model, Parallelism
from bert_jax.data.batches import Batch, TrainBatches
from bert_jax.data.mixture import MixedBatches
from bert_jax.errors import InputError, printable
from bert_jax.model import heads
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import lines as lines_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective, step
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training.checkpoint import Checkpoints, Restored
from bert_jax.training.pretraining import Prepared

What = Literal["params", "with_moments"]


@dataclasses.dataclass
class Trained:
    """Parameters, and what is known about them."""

    name: str  # of the run or the base
    model: Model  # their shape
    params: dict[str, Any]  # nested dict of float32 arrays, on one device
    tokenizer: Tokenizer  # whose ids they know
    fresh: tuple[str, ...] = ()  # parts that were never trained
    step: int = 0  # of the checkpoint; 0 of a base
    source: str = ""  # in words, where a base comes from; "" of a run
    experiment: Experiment | None = None  # of a run; None of a base
    manifest: dict[str, Any] | None = None  # of the corpus; None of a base
    # The line of metrics.jsonl of this step; None if there is none.
    evaluation: dict[str, Any] | None = None
    moments: Moments | None = None  # of the optimizer, if they were asked for
    # Of texts, as the base makes them, or the one that the run began with; None: unsaid.
    vectors: TextVectors | None = None

    @classmethod
    def of(cls, folder: epath.Path, what: What = "params", which: str = "newest") -> "Trained":
        """Reads a base, or a checkpoint of a run.

        Args:
          folder: of a base or a run.
          what: is wanted of it.
          which: of a run's checkpoints: `newest`, `best`, or a step.
        """
        run = mirror.opened(folder)
        if base_lib.is_base(run.root):
            _require_newest(folder, which)
            base = base_lib.read(run.root)
            if what == "with_moments" and base.moments is None:
                raise InputError(
                    f"{folder}: --with-optimizer: this base holds weights alone; import it again "
                    "with --with-optimizer"
                )
            return cls(
                folder.name,
                base.model,
                jax.device_put(base.params),
                base.tokenizer,
                base.fresh,
                source=base.source,
                moments=base.moments if what == "with_moments" else None,
                vectors=base.vectors,
            )
        experiment = load_experiment(run)
        workdir = Workdir(run.root, experiment.run.corpus_dir, run.remote)
        prepared = Prepared.open(workdir.corpus)
        if what == "with_moments" and experiment.optimizer.name != "bert_adam":
            raise InputError(
                f"{folder}: --with-optimizer: optimizer.name={experiment.optimizer.name}; only "
                "bert_adam's moments can be imported"
            )
        restored = _restored(experiment, workdir, prepared, mesh_lib.one_device(), what, which)
        state, done = restored.state, restored.step
        moments = None
        if what == "with_moments":
            kept = jax.device_get(optimizer_lib.moments(state["optimizer"]))
            moments = Moments(done, kept.mu, kept.nu)
        params, fresh = heads.completed(experiment.model, state["params"])
        lines = lines_lib.Lines(workdir.metrics).read()
        of_step = [x for x in lines if x.get("kind") == "evaluation" and x["step"] == done]
        return cls(
            experiment.name,
            experiment.model_after(done),
            params,
            prepared.tokenizer,
            fresh,
            step=done,
            experiment=experiment,
            manifest=prepared.manifest,
            evaluation=of_step[-1] if of_step else None,
            moments=moments,
            vectors=base_lib.vectors_of(restored.metadata.get("notes", {})),
        )


def load_params(
    experiment: Experiment,
    workdir: Workdir,
    prepared: Prepared,
    mesh: jax.sharding.Mesh,
    which: str = "newest",
) -> tuple[Any, int]:
    """Returns parameters, whole on each device of the mesh, and the step of their checkpoint.

    Of a base they are its own, and the step is 0.
    """
    if base_lib.is_base(workdir.root):
        _require_newest(workdir.root, which)
        base = base_lib.read(workdir.root)
        base_lib.require_same_model(base, experiment.model, str(workdir.root))
        base_lib.require_same_tokenizer(base, prepared.tokenizer, str(workdir.root))
        return jax.device_put(base.params, mesh_lib.replicated(mesh)), 0
    restored = _restored(experiment, workdir, prepared, mesh, "params", which)
    return restored.state["params"], restored.step


def _require_newest(folder: epath.Path, which: str) -> None:
    if which != "newest":
        raise InputError(f"--checkpoint {which}: {folder} is a base, which has none; leave it out")


def _restored(
    experiment: Experiment,
    workdir: Workdir,
    prepared: Prepared,
    mesh: jax.sharding.Mesh,
    what: What,
    which: str,
) -> Restored:
    """Returns `params`, and `optimizer` if it is wanted, of a checkpoint.

    They are whole on each device of the mesh: a run's own sharding is for the devices it had.
    """
    if not mirror.names(workdir.checkpoints):
        raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
    with Checkpoints(workdir.checkpoints, experiment.run, "read") as saved:
        newest = saved.newest_step()
        if newest is None:
            raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
        changed = config.differences(saved.experiment(newest), experiment, "identity")
        if changed:
            raise InputError(
                f"{workdir.named}: was trained with other settings ({'; '.join(changed)})"
            )
        abstract = step.abstract_state(
            objective.of(experiment.model, experiment.data),
            experiment.optimizer,
            Parallelism(),
            mesh,
        )
        wanted = ("params",) if what == "params" else ("params", "optimizer")
        part = {name: abstract[name] for name in wanted}
        if which == "newest":
            restored = saved.newest(part)
        else:
            restored = saved.restore(saved.named(which), part)
        prepared.require_same(restored.metadata)
        for why in restored.damaged.values():
            print(f"{why}; step {restored.step} is used instead", file=sys.stderr)
        return restored


# --- a batch as text ------------------------------------------------------------------------------


def show(experiment: Experiment, prepared: Prepared, done: int, rows: int) -> Iterator[Text]:
    """Yields lines about the first `rows` rows of the step after `done` steps."""
    if not 0 <= done < experiment.total_steps:
        raise InputError(f"--step {done}: the run has steps 0 to {experiment.total_steps - 1}")
    phase, first = experiment.phase_at(done)
    spec = experiment.phases[phase]
    train = prepared.train_batches(experiment, phase)
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
            # Of each example that stands there.
            labels = batch["next_sentence_labels"][i][batch["row_weights"][i] > 0]
            words = LABELS[experiment.data.units]
            where += f": B {', '.join(words[label] for label in labels.ravel())}"
        yield Text(f"\n{where}")
        yield row_text(batch, i, prepared.tokenizer, experiment.data)


def _places(
    train: TrainBatches | MixedBatches, rows: np.ndarray, sources: tuple[str, ...]
) -> tuple[list[str], list[str]]:
    """Returns where rows of a phase, int64 [B], come from, and lines about all of them."""
    if isinstance(train, MixedBatches):
        of, numbers = train.order.of(rows)
        counts = np.bincount(of, minlength=len(sources)).tolist()
        notes = [f"{s}: {c} of {len(rows)} rows" for s, c in zip(sources, counts, strict=True)]
        return [f"{sources[s]}, its row {n}" for s, n in zip(of, numbers, strict=True)], notes
    epochs, slots = np.divmod(rows, train.rows_per_epoch)
    notes = []
    for epoch in np.unique(epochs):
        planned = train.rows_planned(int(epoch))
        change = planned - train.rows_per_epoch
        note = "each of its planned rows once"
        if change > 0:
            note = f"{change} of {planned} planned rows dropped"
        elif change < 0:
            note = f"{-change} of {planned} planned rows repeated"
        notes.append(f"epoch {epoch}: {train.rows_per_epoch} rows, {note}")
    return [f"epoch {e}, slot {s}" for e, s in zip(epochs, slots, strict=True)], notes


# What B is to A, by `data.units` and the label.
LABELS = {
    "pairs": ("follows", "is random"),
    "swapped_pairs": ("follows", "comes before A"),
}


class Piece(NamedTuple):
    """A piece of an example as it is shown."""

    text: str  # what the model is given, control characters as escapes
    stood: str | None  # what stood here, if it is to be predicted; else None


def row_pieces(batch: Batch, i: int, tokenizer: Tokenizer, data: Data) -> list[Piece]:
    """Returns the pieces of one row, without padding; of next pieces none is marked."""
    truth = {
        int(p): printable(tokenizer.piece(int(label)))
        for p, label, w in zip(
            batch["masked_lm_positions"][i],
            batch["masked_lm_ids"][i],
            batch["masked_lm_weights"][i],
            strict=True,
        )
        if w and not data.unpredicted
    }
    ids = batch["input_ids"][i, : int(batch["input_mask"][i].sum())].tolist()
    return [
        Piece(printable(tokenizer.piece(token)), truth.get(position))
        for position, token in enumerate(ids)
    ]


def row_text(batch: Batch, i: int, tokenizer: Tokenizer, data: Data) -> Text:
    """Returns one row's pieces; one to be predicted is written {what the model is given|truth}."""
    text = Text()
    for piece in row_pieces(batch, i, tokenizer, data):
        if piece.stood is None:
            text.append(f"{piece.text} ")
        else:
            text.append(f"{{{piece.text}|{piece.stood}}}", style="bold")
            text.append(" ")
    return text
