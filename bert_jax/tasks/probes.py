"""Small tasks that are asked of an encoder while it is pre-trained.

A loss says how well pieces are guessed; a probe says what a linear layer can read off the frozen
encoder: the class of a sentence or a pair from [CLS] beside the mean of all pieces, the tag of a
word from its first piece (Tenney et al. 2019 and others before them probe so). The layer is ridge
regression, exactly solved, so a probe has no seed and no learning rate of its own.

Shape letters: B rows, S sequence, D width, N features' rows, F features, C classes.
"""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import config
from bert_jax.config import Finetuning, Model, Parallelism, Task
from bert_jax.data import draws
from bert_jax.errors import InputError
from bert_jax.model import flops, heads, layers
from bert_jax.model.encoder import Loop, encode
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import rows
from bert_jax.tasks import shape as shape_lib
from bert_jax.tasks.examples import Example
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import feed, step
from bert_jax.training import lines as lines_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

_SHAPES = ("classify", "pair", "tag")
# Of a task's examples, drawn: enough to tell 60 % from 65 %, few enough to be asked often.
_TRAIN, _VALIDATION = 1_000, 1_000
# Penalties that are tried, as shares of the number of rows: features have a variance of one.
_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclasses.dataclass(frozen=True)
class Probe:
    """A task for one tokenizer.

    Attributes:
      name: of its file's claim.
      measure: the name of its score.
      shape: rows to answers to scores.
      train: examples, and their rows.
      validation: those that are scored, and their rows.
      majority: the score of always saying the commonest label.
    """

    name: str
    measure: str
    shape: shape_lib.Shape
    train: tuple[Sequence[Example], rows.Rows]
    validation: tuple[Sequence[Example], rows.Rows]
    majority: float


class _Asked(NamedTuple):
    """A task before there is a tokenizer."""

    task: Task
    labels: tuple[str, ...]
    train: list[Example]
    validation: list[Example]


class Probes:
    """The tasks of `run.probes`.

    Attributes:
      sha256: of their examples and labels.

    Args:
      paths: task files, or claims of fine-tunings as JSON; what they say of a task alone is read.

    Raises:
      InputError: a file that holds no task, a task of another shape than `classify`, `pair` or
        `tag`, two of one name; and as `tasks.examples_lib.read`.
    """

    def __init__(self, paths: Sequence[str]):
        self._asked: dict[str, _Asked] = {}
        digest = hashlib.sha256()
        for path in paths:
            try:
                claim = config.load(path, Finetuning)
            except InputError as error:
                raise InputError(f"run.probes takes files of tasks: {error}") from error
            name, task = claim.name, claim.task
            if task.kind not in _SHAPES:
                raise InputError(
                    f"run.probes: {path}: task.kind={task.kind} cannot be a probe; those of "
                    f"{', '.join(_SHAPES)} can"
                )
            if name in self._asked:
                raise InputError(f"run.probes: {path}: there are two of the name {name!r}")
            try:
                train, validation = (
                    _drawn(examples_lib.read(task, sources, "labelled"), most)
                    for sources, most in ((task.train, _TRAIN), (task.validation, _VALIDATION))
                )
                labels = examples_lib.labels_of(task, [*train, *validation])
            except InputError as error:
                raise InputError(f"run.probes: {path}: {error}") from error
            self._asked[name] = _Asked(task, labels, train, validation)
            digest.update(examples_lib.sha256([*train, *validation], labels).encode())
        self.sha256 = digest.hexdigest()

    def open(
        self,
        model: Model,
        tokenizer: Tokenizer,
        parallelism: Parallelism,
        mesh: jax.sharding.Mesh,
        size: int,
    ) -> int:
        """Makes rows of the examples, for an encoder and the devices it lies on.

        Args:
          model: whose encoder it is.
          tokenizer: that made the ids it learns from.
          parallelism: how its parameters lie on the devices.
          mesh: the devices.
          size: rows of a batch, before it is made a multiple of the devices.

        Returns:
          Operations of asking all probes once.
        """
        self._mesh, self._pad_id = mesh, tokenizer.pad_id
        shards = mesh_lib.data_shards(mesh)
        self._size = -(-size // shards) * shards
        objective = Pretraining(model)

        def of_rows(
            params: Any, fixed: Any, batch: Any, noise: layers.Noise | None, loop: Loop
        ) -> jax.Array:
            del fixed
            return _of_sentences(_hidden(model, params, batch, noise, loop), batch)

        def of_pieces(
            params: Any, fixed: Any, batch: Any, noise: layers.Noise | None, loop: Loop
        ) -> jax.Array:
            del fixed
            return _hidden(model, params, batch, noise, loop)

        self._features = {
            "pooled": step.make_rows_step(objective, of_rows, parallelism, mesh),
            "tokens": step.make_rows_step(objective, of_pieces, parallelism, mesh),
        }
        self._probes = [self._probe(name, model, tokenizer) for name in self._asked]
        batches = (
            batch["input_ids"].shape
            for probe in self._probes
            for _, its_rows in (probe.train, probe.validation)
            for _, batch in rows.eval_batches(its_rows, self._pad_id, self._size)
        )
        return sum(flops.forward_flops(model, *shape, 0) for shape in batches)

    def describe(self) -> str:
        """The probes in words."""
        return ", ".join(
            f"{probe.name} ({probe.measure}; {len(probe.train[0])} examples to learn from, "
            f"{len(probe.validation[0])} to score)"
            for probe in self._probes
        )

    def ask(self, params: Any) -> dict[str, dict[str, float]]:
        """What can be read off the encoder; all processes ask for it.

        Args:
          params: of pre-training, on the devices.

        Returns:
          `scores` and `majority`, each by the name of the probe.
        """
        return {
            "scores": {probe.name: self._score(probe, params) for probe in self._probes},
            "majority": {probe.name: probe.majority for probe in self._probes},
        }

    def _probe(self, name: str, model: Model, tokenizer: Tokenizer) -> Probe:
        task, labels, train, validation = self._asked[name]
        length = min(task.max_sequence_length, model.max_position_embeddings)
        task = dataclasses.replace(task, max_sequence_length=length)
        shape = shape_lib.of(task, labels, tokenizer)
        train_rows, held_out = shape.rows(train), shape.rows(validation)
        always = np.bincount(_classes(train_rows), minlength=len(labels)).astype(np.float32)
        said = [
            always if shape.reads == "pooled" else np.tile(always, (n, 1)) for n in held_out.lengths
        ]
        majority = shape.scores(said, held_out, validation)[task.main_score]
        both = (train, train_rows), (validation, held_out)
        return Probe(name, task.main_score, shape, *both, majority)

    def _score(self, probe: Probe, params: Any) -> float:
        features = self._of(probe, probe.train[1], params)
        if not all(np.isfinite(found).all() for found in features):
            raise InputError(
                f"run.probes: {probe.name}: the encoder gives numbers that are not finite; begin "
                "with other weights"
            )
        classes = _classes(probe.train[1])
        weights, bias = ridge(_stacked(features, probe.train[1]), classes, probe.shape.outputs)
        examples, held_out = probe.validation
        said = [found @ weights + bias for found in self._of(probe, held_out, params)]
        return probe.shape.scores(said, held_out, examples)[probe.measure]

    def _of(self, probe: Probe, its_rows: rows.Rows, params: Any) -> list[np.ndarray]:
        """Features of each row: float32 [F] of it all, or [n, F] of its pieces."""
        found: list[Any] = [None] * len(its_rows.ids)
        batches = rows.eval_batches(its_rows, self._pad_id, self._size)
        sharding = mesh_lib.batch_sharding(self._mesh)
        placed = feed.place_all([batch for _, batch in batches], sharding)
        function = self._features[probe.shape.reads]
        for (which, _), batch in zip(batches, placed, strict=True):
            values = lines_lib.fetch(function(params, None, batch))
            for row, value in zip(which, values, strict=False):
                found[row] = value if value.ndim == 1 else value[: its_rows.lengths[row]]
        return found


def ridge(features: np.ndarray, classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Linear scores of classes: least squares on one column a class, with a penalty.

    Features are brought to a variance of one. Of some penalties the one with the least squared
    error is taken, each row being left out once: what that gives is known without doing it
    (Golub, Heath and Wahba 1979).

    Args:
      features: [N, F].
      classes: of each row, int [N].
      count: C, how many classes there are.

    Returns:
      float64 weights [F, C] and bias [C]: `features @ weights + bias` is highest at the class.
    """
    centre = features.mean(axis=0, dtype=np.float64)
    scale = features.std(axis=0, dtype=np.float64)
    scale = np.where(scale > 1e-6 * max(scale.max(), 1e-30), scale, np.inf)  # constant: not read
    inputs = (features - centre) / scale
    wanted = np.eye(count)[classes]
    mean = wanted.mean(axis=0)
    rows_ = len(inputs)
    strengths, directions = np.linalg.eigh(inputs.T @ inputs)
    strengths = np.maximum(strengths, 0.0)
    rotated = inputs @ directions
    along = rotated.T @ (wanted - mean)

    def left_out(penalty: float) -> float:
        shrunk = 1 / (strengths + penalty)
        error = wanted - mean - rotated @ (shrunk[:, None] * along)
        pull = np.square(rotated) @ shrunk + 1 / rows_  # the mean is fitted, too
        return float(np.square(error / np.maximum(1 - pull, 1e-6)[:, None]).sum())

    penalty = min((share * rows_ for share in _PENALTIES), key=left_out)
    weights = directions @ (along / (strengths + penalty)[:, None]) / scale[:, None]
    return weights, mean - centre @ weights


# --- rows and examples --------------------------------------------------------------------------


def _drawn(examples: list[Example], most: int) -> list[Example]:
    """So many of them, the same in every run; files are often sorted."""
    order = draws.permutation(draws.key_of(0, "probe"), 0, len(examples))
    return [examples[i] for i in np.sort(order[:most])]


def _classes(its_rows: rows.Rows) -> np.ndarray:
    """Of each row, or of each word, int [N]."""
    if "targets" in its_rows.numbers:
        return its_rows.numbers["targets"]
    targets = its_rows.tokens["targets"]
    return np.concatenate([tags[at] for tags, (_, at) in zip(targets, its_rows.notes, strict=True)])


def _stacked(features: list[np.ndarray], its_rows: rows.Rows) -> np.ndarray:
    """[N, F]"""
    if "targets" in its_rows.numbers:
        return np.stack(features)
    return np.concatenate([f[at] for f, (_, at) in zip(features, its_rows.notes, strict=True)])


# --- on the devices -----------------------------------------------------------------------------


def _hidden(
    model: Model, params: Any, batch: Any, noise: layers.Noise | None, loop: Loop
) -> jax.Array:
    """float32 [B, S, D]"""
    ids = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
    hidden = encode(heads.merge(model, params).encoder, model, *ids, noise, loop)
    return hidden.astype(jnp.float32)


def _of_sentences(hidden: jax.Array, batch: Any) -> jax.Array:
    """[CLS] beside the mean of all pieces: float32 [B, 2 D]."""
    mask = batch["input_mask"].astype(jnp.float32)[..., None]
    mean = (hidden * mask).sum(axis=1) / mask.sum(axis=1)
    return jnp.concatenate([hidden[:, 0], mean], axis=-1)
