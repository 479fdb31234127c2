"""Probes: small tasks that a linear layer does on a frozen encoder while it is pre-trained.

A loss shows how well pieces are guessed, a probe what a linear layer can read off the encoder: the
class of a sentence or a pair from [CLS] and the mean of all pieces, the tag of a word from its
first piece (as Tenney et al. 2019 and others before them). The layer is ridge regression, solved
exactly, so a probe has no seed and no learning rate of its own. Minimal pairs are asked here, too,
of the model as it is (`minimal_pairs`).

Shape letters: B rows, S sequence, D width, N features' rows, F features, C classes.
"""

import dataclasses
import functools
import hashlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import config
from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Adapt, Finetuning, Model, Parallelism, Run, Task
from bert_jax.data import draws
from bert_jax.errors import InputError, prefix_errors
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import encode, text_vector
from bert_jax.pretraining.loaded import Loaded
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import similar
from bert_jax.tasks.adapted import MeshEncoder, kind_of, require_finite, run_rows
from bert_jax.tasks.examples import Example
from bert_jax.tasks.minimal_pairs import MinimalPairs
from bert_jax.tasks.rows import Reads
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import mesh as mesh_lib

# Of which layers something is read: of the last, or of the embeddings and all.
Outputs = Literal["last", "all"]
_KINDS = ("classify", "pair", "tag", "minimal_pairs", "similar")
# Of a task's examples, drawn: enough to tell 60 % from 65 %, few enough to be scored often.
_MOST = 1_000
# Penalties that are tried, as shares of the number of rows: features have a variance of one.
_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclasses.dataclass
class Probe:
    """A task that a linear layer does; once it is open it has a `majority` score, too."""

    name: str  # of its file's experiment
    task: Task
    labels: tuple[str, ...]  # by number
    train: Sequence[Example]  # to learn from
    validation: Sequence[Example]  # to score

    def open(self, reader: MeshEncoder) -> int:
        """Makes rows of the examples; returns the operations of scoring them once."""
        self._reader = reader
        kind = self._kind = kind_of(reader.fitted(self.task), self.labels, reader.tokenizer)
        self._sides = [kind.rows(self.train), kind.rows(self.validation)]
        self._batches = [reader.batches(side) for side in self._sides]
        counts = np.bincount(self._sides[0].labels(), minlength=len(self.labels))
        always = counts.astype(np.float32)
        predicted = [
            always if kind.reads == "pooled" else np.tile(always, (n, 1))
            for n in self._sides[1].lengths
        ]
        self.majority = self._score(predicted)  # of always predicting the commonest label
        return sum(map(reader.operations, self._batches))

    def ask(self, params: Any) -> dict[str, float]:
        """Returns the score from the last layer, by its name."""
        return dict.fromkeys([self.task.main_score], *self.scores(params, "last"))

    def scores(self, params: Any, outputs: Outputs) -> list[float]:
        """Returns the score from each layer that is read, the lowest first."""
        reader = self._reader
        program = features_of(reader, self._kind.reads, outputs)
        run = functools.partial(program, params, None)
        # Of each row float32 [layers F], or [n, layers F] of its pieces.
        learned, asked = (
            run_rows(run, batches, side, reader.mesh)
            for batches, side in zip(self._batches, self._sides, strict=True)
        )
        require_finite(self.name, learned)
        count = reader.model.num_hidden_layers + 1 if outputs == "all" else 1
        stacked = np.split(self._sides[0].labelled(learned), count, axis=-1)
        of_layers = zip(*(np.split(values, count, axis=-1) for values in asked), strict=True)
        classes, each = self._sides[0].labels(), []
        for features, held_out in zip(stacked, of_layers, strict=True):
            weights, bias = ridge(features, classes, self._kind.outputs)
            each.append(self._score([values @ weights + bias for values in held_out]))
        return each

    def _score(self, outputs: list[np.ndarray]) -> float:
        scores = self._kind.scores(outputs, self._sides[1], self.validation)
        return scores[self.task.main_score]


@functools.lru_cache(maxsize=8)
def features_of(reader: MeshEncoder, reads: Reads, outputs: Outputs) -> Callable[..., jax.Array]:
    """Returns what gives the features of a batch's rows, compiled once for all probes."""
    model = reader.model

    def of_rows(params: Any, _: Any, batch: Any, noise: Any, loop: Loop) -> jax.Array:
        ids, mask = (batch["input_ids"], batch["segment_ids"]), batch["input_mask"]
        encoder = heads.merge(model, params).encoder
        hidden = encode(encoder, model, *ids, mask, noise, loop, outputs)
        hidden = hidden if outputs == "all" else hidden[None]
        hidden = hidden.astype(jnp.float32)  # [layers, B, S, D]
        if reads == "pooled":
            whole = jax.vmap(lambda layer: text_vector(model, layer, batch["input_mask"]))
            mask = batch["input_mask"].astype(jnp.float32)[..., None]
            mean = (hidden * mask).sum(axis=2) / mask.sum(axis=1)
            hidden = jnp.concatenate([whole(hidden), mean], axis=-1)
        moved = jnp.moveaxis(hidden, 0, -2)
        return moved.reshape(*moved.shape[:-2], -1)  # [B, layers 2 D], [B, S, layers D]

    return reader.program(of_rows)


class SimilarityProbe:
    """Validation examples of a task, and an encoder that is asked as it is."""

    majority = 0.0

    def __init__(self, name: str, task: Task):
        self.name, self.task = name, similar.validation_task(task)
        examples = examples_lib.read(self.task, task.validation, "labelled")
        self.examples = cast(list[examples_lib.Sentence | examples_lib.Passage], examples)

    def open(self, reader: MeshEncoder) -> int:
        """Makes rows of the examples; returns the operations of scoring them once."""
        self._reader, known = reader, reader.vectors or TextVectors()
        task = reader.fitted(similar.inherit_prompts(self.task, known))
        # Texts are cut as `embed` cuts them, so that its vectors are scored.
        length = min(task.max_sequence_length, known.max_length or task.max_sequence_length)
        task = dataclasses.replace(task, max_sequence_length=length)
        self._kind = similar.Similar(task, (), reader.tokenizer)
        self._rows = self._kind.rows(self.examples)
        self._batches = reader.batches(self._rows)
        return reader.operations(self._batches)

    def ask(self, params: Any) -> dict[str, float]:
        """Returns all scores of the encoder's vectors."""
        run = functools.partial(vectors_of(self._reader), params, None)
        vectors = run_rows(run, self._batches, self._rows, self._reader.mesh)
        require_finite(self.name, vectors)
        return self._kind.scores(vectors, self._rows, self.examples)


@functools.lru_cache(maxsize=8)
def vectors_of(reader: MeshEncoder) -> Callable[..., jax.Array]:
    """Returns what gives the vectors of a batch's rows, compiled for the devices."""
    pooling, how = (reader.vectors or TextVectors()).pooling, ("labels", "vectors", 0, 1, Adapt())
    return reader.program(similar.SimilarObjective(reader.model, *how, pooling=pooling).vectors)


class Probes:
    """The tasks of `run.probes`, or of `--task`: of the experiments in their files the task alone.

    At most `pairs` minimal pairs are drawn, or all if it is None. `fields` replace fields of each
    task.
    """

    def __init__(
        self,
        paths: Sequence[str],
        pairs: int | None = _MOST,
        where: str = "run.probes",
        fields: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        self._where = where
        self.probes: list[Probe | MinimalPairs | SimilarityProbe] = []  # in the order of the files
        about, digest = list[str](), hashlib.sha256()
        for path, name, task in tasks_of(paths, _KINDS, where):
            with prefix_errors(f"{where}: {path}"):
                task = dataclasses.replace(task, **fields)
                if task.kind == "minimal_pairs":
                    probe, labels = MinimalPairs(name, task, pairs), ()
                    learned = probe.pairs
                    words = f"{len(learned)} minimal pairs"
                elif task.kind == "similar":
                    probe, labels = SimilarityProbe(name, task), ()
                    learned = probe.examples
                    words = f"{probe.task.main_score}; {len(learned)} examples to score"
                else:
                    train, validation = (drawn(task, part) for part in ("train", "validation"))
                    learned = [*train, *validation]
                    labels = examples_lib.find_labels(task, learned)
                    probe = Probe(name, task, labels, train, validation)
                    words = f"{task.main_score}; {len(train)} examples to learn from, "
                    words += f"{len(validation)} to score"
            self.probes.append(probe)
            about.append(f"{name} ({words})")
            digest.update(examples_lib.sha256(learned, labels).encode())
        # The probes in words, and a hash of their examples and labels.
        self.about, self.sha256 = ", ".join(about), digest.hexdigest()

    def open(
        self,
        model: Model,
        tokenizer: Tokenizer,
        parallelism: Parallelism,
        mesh: jax.sharding.Mesh,
        size: int,
        vectors: TextVectors | None = None,
    ) -> int:
        """Makes rows of the examples, for an encoder and the devices it lies on.

        `size` is of a batch in rows, before it is made a multiple of the devices. Returns the
        operations of scoring all probes once.
        """
        shards = mesh_lib.batch_shards(mesh)
        size = -(-size // shards) * shards
        reader = MeshEncoder(model, tokenizer, parallelism, mesh, size, vectors)
        return sum(probe.open(reader) for probe in self.probes)

    def ask(self, params: Any) -> dict[str, dict[str, Any]]:
        """Returns what a linear layer reads off the encoder, and how often the acceptable text of a
        minimal pair is the likelier one; all processes call it.

        Returns:
          `scores` and `majority`, each by the name of the probe; if there are minimal pairs,
          `minimal_pairs`, what `MinimalPairs.ask` returns, by name; if vectors are compared,
          `similar`, all of their scores, by name.
        """
        line: dict[str, Any] = {"scores": {}, "majority": {}}
        for probe in self.probes:
            with prefix_errors(self._where):
                answer = probe.ask(params)
            line["scores"][probe.name] = answer[probe.task.main_score]
            line["majority"][probe.name] = probe.majority
            if probe.task.kind in ("minimal_pairs", "similar"):
                line.setdefault(probe.task.kind, {})[probe.name] = answer
        return line


def of_trained(probes: Probes, trained: Loaded) -> dict[str, dict[str, Any]]:
    """Returns what `Probes.ask` does, of a run's checkpoint or a base, on all devices."""
    asks_head = any(isinstance(probe, MinimalPairs) for probe in probes.probes)
    if asks_head and any(part.startswith("masked_lm") for part in trained.fresh):
        raise InputError(
            f"{trained.name}: has no masked LM head that has learned, and minimal pairs need one; "
            "import weights with it"
        )
    return probes.ask(load_probe(probes, trained))


def load_probe(probes: Probes, trained: Loaded) -> Any:
    """Opens probes for a run's checkpoint or a base; returns its parameters, on all devices."""
    mesh = mesh_lib.make_mesh(Parallelism())
    how = Parallelism(), mesh, Run().eval_batch_size, trained.vectors
    probes.open(trained.model, trained.tokenizer, *how)
    return jax.device_put(trained.params, mesh_lib.replicated(mesh))


def ridge(features: np.ndarray, classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns linear scores of classes: least squares on one column a class, with a penalty.

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
    from sklearn.linear_model import RidgeCV

    scale = features.std(axis=0, dtype=np.float64)
    scale = np.where(scale > 1e-6 * max(scale.max(), 1e-30), scale, np.inf)  # constant: not read
    solved = RidgeCV(np.array([share * len(features) for share in _PENALTIES]))
    solved.fit(features.astype(np.float64) / scale, np.eye(count)[classes])
    return solved.coef_.T / scale[:, None], np.asarray(solved.intercept_)


# --- tasks and their examples -------------------------------------------------------------------


def tasks_of(
    paths: Sequence[str], kinds: Sequence[str], where: str
) -> Iterator[tuple[str, str, Task]]:
    """Yields the path, the name and the task of each file, if it is of these kinds.

    Errors name `where`, that names the files; no two tasks have one name.
    """
    names = set[str]()
    for path in paths:
        with prefix_errors(f"{where} takes files of tasks"):
            experiment = config.load(path, Finetuning)
        name, kind = experiment.name, experiment.task.kind
        if kind not in kinds:
            raise InputError(
                f"{where}: {path}: task.kind={kind} cannot be read off an encoder here; those of "
                f"{', '.join(kinds)} can"
            )
        if name in names:
            raise InputError(f"{where}: {path}: two tasks have the name {name!r}; rename one")
        names.add(name)
        yield path, name, experiment.task


def drawn(task: Task, part: Literal["train", "validation"]) -> list[Example]:
    """Returns a thousand examples at most, the same in every run; files are often sorted."""
    there = examples_lib.read(task, getattr(task, part), "labelled")
    order = draws.permutation(draws.key_of(0, "probe"), 0, len(there))
    return [there[i] for i in np.sort(order[:_MOST])]
