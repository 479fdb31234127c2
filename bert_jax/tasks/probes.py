"""Probes: small tasks that measure an encoder during pre-training.

A loss measures how well a model predicts tokens; a probe, what a linear layer learns from the
frozen encoder: the class of a text or a pair, from [CLS] and the mean of all tokens, or the tag of
a word, from its first token (as in Tenney et al. 2019). The linear layer is ridge regression with
an exact solution, so a probe has no seed or learning rate. Minimal pairs (`minimal_pairs`) and
similarities are probes without training.

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
from bert_jax.embeddings import retrieval
from bert_jax.errors import InputError, prefix_errors
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import encode, text_vector
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import similar
from bert_jax.tasks.adaptation import MeshEncoder, require_finite, run_rows
from bert_jax.tasks.examples import Example
from bert_jax.tasks.minimal_pairs import MinimalPairs
from bert_jax.tasks.task_kind import kind_of
from bert_jax.tasks.task_objective import Reads
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import mesh as mesh_lib

# The layers to read: the last, or the embeddings and all layers.
Outputs = Literal["last", "all"]
# Maximum size of a sample: enough to tell 60 % from 65 %, small enough to be scored often.
_MOST = 1_000
# Penalties to select from, as shares of the number of rows; features have a variance of one.
_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclasses.dataclass
class Probe:
    """A task for a linear layer. `open` sets `majority`, the score of the majority baseline."""

    name: str  # of the experiment in its file
    task: Task
    labels: tuple[str, ...]  # the label of each class number
    train: Sequence[Example]
    validation: Sequence[Example]

    @classmethod
    def read(cls, name: str, task: Task, most: int | None) -> "Probe":
        """Reads at most 1,000 training and validation examples each."""
        train, validation = draw_examples(task, "train"), draw_examples(task, "validation")
        labels = examples_lib.find_labels(task, [*train, *validation])
        return cls(name, task, labels, train, validation)

    @property
    def examples(self) -> Sequence[Example]:
        """All examples."""
        return [*self.train, *self.validation]

    @property
    def description(self) -> str:
        """The score, and the numbers of examples."""
        counts = f"{len(self.train)} examples to learn from, {len(self.validation)} to score"
        return f"{self.task.main_score}; {counts}"

    def open(self, reader: MeshEncoder) -> int:
        """Builds the rows; returns the number of operations of one evaluation."""
        self._reader = reader
        kind = self._kind = kind_of(reader.fit_task(self.task), self.labels, reader.tokenizer)
        self._sides = [kind.rows(self.train), kind.rows(self.validation)]
        self._batches = [reader.batches(side) for side in self._sides]
        counts = np.bincount(self._sides[0].labels(), minlength=len(self.labels))
        logits = counts.astype(np.float32)
        outputs = [
            logits if kind.reads == "pooled" else np.tile(logits, (n, 1))
            for n in self._sides[1].lengths
        ]
        self.majority = self._score(outputs)
        return sum(map(reader.operations, self._batches))

    def evaluate(self, params: Any) -> dict[str, float]:
        """Returns the main score on the last layer, by its name."""
        return dict.fromkeys([self.task.main_score], *self.scores(params, "last"))

    def scores(self, params: Any, outputs: Outputs) -> list[float]:
        """Returns the main score on each layer of `outputs`, the lowest layer first."""
        reader = self._reader
        program = jit_features(reader, self._kind.reads, outputs)
        run = functools.partial(program, params, None)
        # For each row float32 [layers F], or [n, layers F] for its tokens.
        train, validation = (
            run_rows(run, batches, side, reader.mesh)
            for batches, side in zip(self._batches, self._sides, strict=True)
        )
        require_finite(self.name, train)
        count = reader.model.num_hidden_layers + 1 if outputs == "all" else 1
        train_layers = np.split(self._sides[0].select_labelled(train), count, axis=-1)
        eval_layers = zip(*(np.split(row, count, axis=-1) for row in validation), strict=True)
        classes, scores = self._sides[0].labels(), []
        for features, held_out in zip(train_layers, eval_layers, strict=True):
            weights, bias = ridge(features, classes, self._kind.outputs)
            scores.append(self._score([values @ weights + bias for values in held_out]))
        return scores

    def _score(self, outputs: list[np.ndarray]) -> float:
        scores = self._kind.scores(outputs, self._sides[1], self.validation)
        return scores[self.task.main_score]


@functools.lru_cache(maxsize=8)
def jit_features(reader: MeshEncoder, reads: Reads, outputs: Outputs) -> Callable[..., jax.Array]:
    """Returns a function that computes the features of rows, compiled once for all probes."""
    model = reader.model

    def row_features(params: Any, _: Any, batch: Any, noise: Any, loop: Loop) -> jax.Array:
        ids, mask = (batch["input_ids"], batch["segment_ids"]), batch["input_mask"]
        encoder = heads.build_model(model, params).encoder
        hidden = encode(encoder, model, *ids, mask, noise, loop, outputs)
        hidden = hidden if outputs == "all" else hidden[None]
        hidden = hidden.astype(jnp.float32)  # [layers, B, S, D]
        if reads == "pooled":
            pool = jax.vmap(lambda layer: text_vector(model, layer, batch["input_mask"]))
            mask = batch["input_mask"].astype(jnp.float32)[..., None]
            mean = (hidden * mask).sum(axis=2) / mask.sum(axis=1)
            hidden = jnp.concatenate([pool(hidden), mean], axis=-1)
        moved = jnp.moveaxis(hidden, 0, -2)
        return moved.reshape(*moved.shape[:-2], -1)  # [B, layers 2 D], [B, S, layers D]

    return reader.compile_rows(row_features)


class SimilarityProbe:
    """A probe that scores the encoder's text vectors on the validation examples of a task."""

    majority, labels = 0.0, ()

    def __init__(self, name: str, task: Task, most: int | None):
        self.name, self.task = name, task.with_fields(negative_column="")
        examples = examples_lib.read(self.task, task.validation, "labelled")
        self.examples = cast(list[examples_lib.Sentence | examples_lib.Passage], examples)
        self.description = f"{task.main_score}; {len(examples)} examples to score"

    def open(self, reader: MeshEncoder) -> int:
        """Builds the rows; returns the number of operations of one evaluation."""
        self._reader, vectors = reader, reader.vectors or TextVectors()
        task = reader.fit_task(similar.inherit_prompts(self.task, vectors))
        # Texts are truncated as in `embed`, so that its vectors are scored.
        length = min(task.max_sequence_length, vectors.max_length or task.max_sequence_length)
        task = dataclasses.replace(task, max_sequence_length=length)
        self._kind = similar.Similar(task, (), reader.tokenizer)
        self._rows = self._kind.rows(self.examples)
        self._batches = reader.batches(self._rows)
        return reader.operations(self._batches)

    @functools.cached_property
    def bm25_scores(self) -> dict[str, float] | None:
        """The scores of BM25, if the task ranks texts and the library is installed."""
        if not self.task.is_scored_by_retrieval:
            return None
        return retrieval.bm25_scores(cast(list[examples_lib.Passage], self.examples))

    def evaluate(self, params: Any) -> dict[str, float]:
        """Returns all scores of the encoder's vectors."""
        run = functools.partial(jit_vectors(self._reader), params, None)
        vectors = run_rows(run, self._batches, self._rows, self._reader.mesh)
        require_finite(self.name, vectors)
        return self._kind.scores(vectors, self._rows, self.examples)


@functools.lru_cache(maxsize=8)
def jit_vectors(reader: MeshEncoder) -> Callable[..., jax.Array]:
    """Returns a function that computes the vectors of rows, compiled for the devices."""
    args, vectors = ("labels", "vectors", 0, 1, Adapt()), reader.vectors or TextVectors()
    objective = similar.SimilarObjective(reader.model, *args, text_vectors=vectors)
    return reader.compile_rows(objective.vectors)


# The probe for each kind of task: (name, task, maximum number of minimal pairs) -> probe.
PROBES: dict[str, Callable[[str, Task, int | None], "Probe | MinimalPairs | SimilarityProbe"]] = {
    **dict.fromkeys(("classify", "pair", "tag"), Probe.read),
    "minimal_pairs": MinimalPairs,
    "similar": SimilarityProbe,
}


class Probes:
    """The probes for the tasks of experiment files, from `run.probes` or `--task`.

    At most `pairs` minimal pairs are drawn, or all if it is None. `fields` replaces fields of each
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
        for path, name, task in read_tasks(paths, tuple(PROBES), where):
            with prefix_errors(f"{where}: {path}"):
                probe = PROBES[task.kind](name, dataclasses.replace(task, **fields), pairs)
            self.probes.append(probe)
            about.append(f"{name} ({probe.description})")
            digest.update(examples_lib.sha256(probe.examples, probe.labels).encode())
        # A description of the probes, and a hash of their examples and labels.
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
        """Opens all probes for an encoder on a mesh; returns the operations of one evaluation.

        `size` is the number of rows of a batch; it is rounded up to a multiple of the devices.
        """
        shards = mesh_lib.batch_shards(mesh)
        size = -(-size // shards) * shards
        reader = MeshEncoder(model, tokenizer, parallelism, mesh, size, vectors)
        return sum(probe.open(reader) for probe in self.probes)

    def evaluate(self, params: Any) -> dict[str, dict[str, Any]]:
        """Returns the scores of all probes. All processes call it.

        Returns:
          `scores` and `majority` by probe. For probes of these kinds, also `minimal_pairs` with the
          results of `MinimalPairs.evaluate`, and `similar` with all scores, by probe.
        """
        line: dict[str, Any] = {"scores": {}, "majority": {}}
        for probe in self.probes:
            with prefix_errors(self._where):
                answer = probe.evaluate(params)
            line["scores"][probe.name] = answer[probe.task.main_score]
            line["majority"][probe.name] = probe.majority
            if probe.task.kind in ("minimal_pairs", "similar"):
                line.setdefault(probe.task.kind, {})[probe.name] = answer
        return line


def score_probes(probes: Probes, trained: LoadedModel) -> dict[str, dict[str, Any]]:
    """Returns the scores of probes (`Probes.evaluate`) on a loaded model, on all devices."""
    needs_head = any(isinstance(probe, MinimalPairs) for probe in probes.probes)
    if needs_head and any(part.startswith("masked_lm") for part in trained.fresh):
        raise InputError(
            f"{trained.name}: its masked LM head is untrained, and minimal pairs need it; import "
            "weights with it"
        )
    return probes.evaluate(load_probe(probes, trained))


def retrieval_baselines(
    probes: Probes, trained: LoadedModel
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns all scores of BM25 and of the untrained encoder, by probe that ranks texts.

    `probes` have scored the loaded model. BM25 is missing without its library.
    """
    baselines = {}
    for probe in probes.probes:
        if isinstance(probe, SimilarityProbe) and probe.task.is_scored_by_retrieval:
            fresh = heads.init_params(trained.model, jax.random.key(0))
            mesh = mesh_lib.make_mesh(Parallelism())
            by_name = {"BM25": probe.bm25_scores} if probe.bm25_scores else {}
            fresh = jax.device_put(fresh, mesh_lib.replicated(mesh))
            baselines[probe.name] = by_name | {"untrained": probe.evaluate(fresh)}
    return baselines


def load_probe(probes: Probes, trained: LoadedModel) -> Any:
    """Opens probes for a loaded model; returns its parameters, replicated on all devices."""
    mesh = mesh_lib.make_mesh(Parallelism())
    setup = Parallelism(), mesh, Run().eval_batch_size, trained.vectors
    probes.open(trained.model, trained.tokenizer, *setup)
    return jax.device_put(trained.params, mesh_lib.replicated(mesh))


def ridge(features: np.ndarray, classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Fits a linear classifier by ridge regression on one-hot classes.

    Features are scaled to a variance of one. The penalty is the one of `_PENALTIES` with the least
    squared error in leave-one-out cross-validation, which has a closed form (Golub, Heath and Wahba
    1979).

    Args:
      features: [N, F].
      classes: the class number of each row, int [N].
      count: C, the number of classes.

    Returns:
      float64 weights [F, C] and bias [C]; the prediction is the argmax of
      `features @ weights + bias`.
    """
    from sklearn.linear_model import RidgeCV

    scale = features.std(axis=0, dtype=np.float64)
    scale = np.where(scale > 1e-6 * max(scale.max(), 1e-30), scale, np.inf)  # drops constants
    model = RidgeCV(np.array([share * len(features) for share in _PENALTIES]))
    model.fit(features.astype(np.float64) / scale, np.eye(count)[classes])
    return model.coef_.T / scale[:, None], np.asarray(model.intercept_)


# --- tasks and their examples -------------------------------------------------------------------


def read_tasks(
    paths: Sequence[str], kinds: Sequence[str], where: str
) -> Iterator[tuple[str, str, Task]]:
    """Yields the path, the name and the task of each experiment file.

    Raises InputError, which names the field `where`, for other kinds and for equal names.
    """
    names = set[str]()
    for path in paths:
        with prefix_errors(f"{where} takes files of tasks"):
            experiment = config.load(path, Finetuning)
        name, kind = experiment.name, experiment.task.kind
        if kind not in kinds:
            raise InputError(
                f"{where}: {path}: task.kind={kind} is not supported here; choose a task of kind "
                f"{', '.join(kinds)}"
            )
        if name in names:
            raise InputError(f"{where}: {path}: two tasks have the name {name!r}; rename one")
        names.add(name)
        yield path, name, experiment.task


def draw_examples(task: Task, split: Literal["train", "validation"]) -> list[Example]:
    """Returns a random sample of at most 1,000 examples, the same in every run."""
    examples = examples_lib.read(task, getattr(task, split), "labelled")
    order = draws.permutation(draws.key_of(0, "probe"), 0, len(examples))
    return [examples[i] for i in np.sort(order[:_MOST])]
