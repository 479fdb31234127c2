"""Probes: small tasks that measure an encoder during pre-training.

A loss measures how well a model predicts tokens. A probe measures what a linear layer learns from
the frozen encoder: the class of a text or a pair, from [CLS] and the mean of all tokens, or the tag
of a word, from its first token (as in Tenney et al. 2019). The linear layer is ridge regression
with an exact solution, so a probe has no seed or learning rate. Minimal pairs (`minimal_pairs`) and
similarities are probes without training.

Shape letters: B rows, S sequence, D width, N texts or words, F features, C classes.
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
from bert_jax.tasks.adaptation import ModelRunner, require_finite, run_rows
from bert_jax.tasks.examples import Example
from bert_jax.tasks.minimal_pairs import MinimalPairsProbe, require_masked_lm_head
from bert_jax.tasks.task_kind import make_kind
from bert_jax.tasks.task_objective import Reads
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import mesh as mesh_lib

# The layers to read: the last, or the embeddings and all layers.
Layers = Literal["last", "all"]
# Maximum size of a sample: enough to tell 60 % from 65 %, small enough to be scored often.
_SAMPLE_SIZE = 1_000
# Penalties to select from, as multiples of the number of rows; features have a variance of one.
_PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0)


@dataclasses.dataclass
class Probe:
    """A task for a linear layer. `prepare` sets `majority`, the score of the majority baseline."""

    name: str  # of the task's experiment
    task: Task
    labels: tuple[str, ...]  # the label of each class number
    train: Sequence[Example]
    validation: Sequence[Example]

    @classmethod
    def read(cls, name: str, task: Task, max_pairs: int | None) -> "Probe":
        """Reads at most 1,000 training and validation examples each; `max_pairs` is unused."""
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

    def prepare(self, runner: ModelRunner) -> int:
        """Builds the rows for a model; returns the FLOPs of one evaluation."""
        self._runner = runner
        kind = self._kind = make_kind(runner.clamp_length(self.task), self.labels, runner.tokenizer)
        self._split_rows = [kind.rows(self.train), kind.rows(self.validation)]
        self._batches = [runner.batches(rows) for rows in self._split_rows]
        counts = np.bincount(self._split_rows[0].labels(), minlength=len(self.labels))
        logits = counts.astype(np.float32)  # the same for each prediction: the majority baseline
        outputs = [
            logits if kind.reads == "pooled" else np.tile(logits, (n, 1))
            for n in self._split_rows[1].lengths
        ]
        self.majority = self._score(outputs)
        return sum(map(runner.count_flops, self._batches))

    def evaluate(self, params: Any) -> dict[str, float]:
        """Returns the main score on the last layer, by its name."""
        (score,) = self.scores(params, "last")
        return {self.task.main_score: score}

    def scores(self, params: Any, layers: Layers) -> list[float]:
        """Returns the main score on each layer of `layers`, the lowest layer first."""
        runner = self._runner
        run = functools.partial(jit_features(runner, self._kind.reads, layers), params, None)
        # float32 [layers * F] for each row, or [n, layers * F] for its n tokens.
        train, validation = (
            run_rows(run, batches, rows, runner.mesh)
            for batches, rows in zip(self._batches, self._split_rows, strict=True)
        )
        require_finite(self.name, train)
        count = runner.model.num_hidden_layers + 1 if layers == "all" else 1
        train_layers = np.split(self._split_rows[0].select_at_targets(train), count, axis=-1)
        eval_layers = zip(*(np.split(row, count, axis=-1) for row in validation), strict=True)
        classes, scores = self._split_rows[0].labels(), []
        for features, held_out in zip(train_layers, eval_layers, strict=True):
            weights, bias = ridge(features, classes, len(self.labels))
            scores.append(self._score([values @ weights + bias for values in held_out]))
        return scores

    def _score(self, outputs: list[np.ndarray]) -> float:
        scores = self._kind.scores(outputs, self._split_rows[1], self.validation)
        return scores[self.task.main_score]


@functools.lru_cache(maxsize=8)
def jit_features(runner: ModelRunner, reads: Reads, layers: Layers) -> Callable[..., jax.Array]:
    """Compiles a function for the features of rows, with the arguments of `Objective.forward`."""
    model = runner.model

    def row_features(params: Any, _: Any, batch: Any, noise: Any, loop: Loop) -> jax.Array:
        mask = batch["input_mask"]
        inputs = batch["input_ids"], batch["segment_ids"], mask
        hidden = encode(heads.merge(model, params).encoder, model, *inputs, noise, loop, layers)
        hidden = hidden if layers == "all" else hidden[None]
        hidden = hidden.astype(jnp.float32)  # [layers, B, S, D]
        if reads == "pooled":
            # The output of [CLS] (of the last token if the model is causal), then the mean.
            pool = jax.vmap(lambda layer: text_vector(model, layer, mask))
            weights = mask.astype(jnp.float32)[..., None]
            mean = (hidden * weights).sum(axis=2) / weights.sum(axis=1)
            hidden = jnp.concatenate([pool(hidden), mean], axis=-1)
        features = jnp.moveaxis(hidden, 0, -2)
        # [B, layers * 2 D] of pooled texts, or [B, S, layers * D] of tokens.
        return features.reshape(*features.shape[:-2], -1)

    return runner.compile_rows(row_features)


class SimilarityProbe:
    """A probe that scores the encoder's text vectors on the validation examples of a task."""

    majority, labels = 0.0, ()  # there is no majority baseline, and there are no labels

    def __init__(self, name: str, task: Task, max_pairs: int | None):
        self.name, self.task = name, task.with_fields(negative_column="")  # only for training
        examples = examples_lib.read(self.task, task.validation, "labelled")
        self.examples = cast(list[examples_lib.Sentence | examples_lib.Passage], examples)
        self.description = f"{task.main_score}; {len(examples)} examples to score"

    def prepare(self, runner: ModelRunner) -> int:
        """Builds the rows for a model; returns the FLOPs of one evaluation."""
        self._runner, settings = runner, runner.vector_settings or TextVectors()
        task = runner.clamp_length(similar.inherit_prefixes(self.task, settings))
        # Texts are truncated as in `embed`, to score the vectors that `embed` returns.
        length = min(task.max_sequence_length, settings.max_length or task.max_sequence_length)
        task = dataclasses.replace(task, max_sequence_length=length)
        self._kind = similar.Similar(task, (), runner.tokenizer)
        self._rows = self._kind.rows(self.examples)
        self._batches = runner.batches(self._rows)
        return runner.count_flops(self._batches)

    @functools.cached_property
    def bm25_scores(self) -> dict[str, float] | None:
        """The scores of BM25, if the task ranks texts and the library is installed."""
        if not self.task.is_scored_by_retrieval:
            return None
        return retrieval.bm25_scores(cast(list[examples_lib.Passage], self.examples))

    def evaluate(self, params: Any) -> dict[str, float]:
        """Returns all scores of the encoder's vectors."""
        run = functools.partial(jit_vectors(self._runner), params, None)
        vectors = run_rows(run, self._batches, self._rows, self._runner.mesh)
        require_finite(self.name, vectors)
        return self._kind.scores(vectors, self._rows, self.examples)


@functools.lru_cache(maxsize=8)
def jit_vectors(runner: ModelRunner) -> Callable[..., jax.Array]:
    """Returns a function that computes the vectors of rows, compiled for the devices."""
    adapt, settings = Adapt(), runner.vector_settings or TextVectors()
    fields: Any = {"learns": "labels", "reads": "vectors", "outputs": 0, "rows_per_example": 1}
    objective = similar.SimilarObjective(runner.model, **fields, adapt=adapt, text_vectors=settings)
    return runner.compile_rows(objective.vectors)


AnyProbe = Probe | MinimalPairsProbe | SimilarityProbe
# The probe of each kind of task: (name, task, `max_pairs`, which only minimal pairs use) -> probe.
PROBES: dict[str, Callable[[str, Task, int | None], AnyProbe]] = {
    **dict.fromkeys(("classify", "pair", "tag"), Probe.read),
    "minimal_pairs": MinimalPairsProbe,
    "similar": SimilarityProbe,
}


class Probes:
    """The probes for the tasks of experiment files, from `run.probes` or `--task`.

    At most `max_pairs` minimal pairs are drawn, or all if it is None. Messages begin with `where`.
    `fields` replaces fields of each task.
    """

    def __init__(
        self,
        paths: Sequence[str],
        max_pairs: int | None = _SAMPLE_SIZE,
        where: str = "run.probes",
        fields: Mapping[str, Any] = types.MappingProxyType({}),
    ):
        self._where = where
        self.probes: list[AnyProbe] = []  # in the order of the files
        descriptions, digest = list[str](), hashlib.sha256()
        for path, name, task in read_tasks(paths, tuple(PROBES), where):
            with prefix_errors(f"{where}: {path}"):
                probe = PROBES[task.kind](name, dataclasses.replace(task, **fields), max_pairs)
            self.probes.append(probe)
            descriptions.append(f"{name} ({probe.description})")
            digest.update(examples_lib.sha256(probe.examples, probe.labels).encode())
        self.description = ", ".join(descriptions)
        self.sha256 = digest.hexdigest()  # of the examples and labels

    def prepare(
        self,
        model: Model,
        tokenizer: Tokenizer,
        parallelism: Parallelism,
        mesh: jax.sharding.Mesh,
        size: int,
        vector_settings: TextVectors | None = None,
    ) -> int:
        """Prepares all probes for an encoder on a mesh; returns the FLOPs of one evaluation.

        `size` is the number of rows of a batch; it is rounded up to a multiple of the devices.
        """
        shards = mesh_lib.batch_shards(mesh)
        size = -(-size // shards) * shards
        runner = ModelRunner(model, tokenizer, parallelism, mesh, size, vector_settings)
        return sum(probe.prepare(runner) for probe in self.probes)

    def evaluate(self, params: Any) -> dict[str, dict[str, Any]]:
        """Returns the scores of all probes. All processes call it.

        Returns:
          `scores` and `majority` by probe. If there are probes of these kinds, by probe also
          `minimal_pairs`, from `MinimalPairsProbe.evaluate`, and `similar`, all scores.
        """
        results: dict[str, Any] = {"scores": {}, "majority": {}}
        for probe in self.probes:
            with prefix_errors(self._where):
                scores = probe.evaluate(params)
            results["scores"][probe.name] = scores[probe.task.main_score]
            results["majority"][probe.name] = probe.majority
            if probe.task.kind in ("minimal_pairs", "similar"):
                results.setdefault(probe.task.kind, {})[probe.name] = scores
        return results


def score_probes(probes: Probes, trained: LoadedModel) -> dict[str, dict[str, Any]]:
    """Prepares and evaluates probes on a loaded model, on all devices; see `Probes.evaluate`."""
    if any(isinstance(probe, MinimalPairsProbe) for probe in probes.probes):
        require_masked_lm_head(trained)
    params = prepare_probes(probes, trained)
    return probes.evaluate(params)


def retrieval_baselines(
    probes: Probes, trained: LoadedModel
) -> dict[str, dict[str, dict[str, float]]]:
    """Returns all scores of BM25 and of the untrained encoder for each probe that ranks texts.

    `score_probes` must have prepared the probes for the model. BM25 is missing without its library.
    """
    baselines = {}
    for probe in probes.probes:
        if isinstance(probe, SimilarityProbe) and probe.task.is_scored_by_retrieval:
            params = heads.init_params(trained.model, jax.random.key(0))
            mesh = mesh_lib.make_mesh(Parallelism())
            by_name = {"BM25": probe.bm25_scores} if probe.bm25_scores else {}
            params = jax.device_put(params, mesh_lib.replicated(mesh))
            baselines[probe.name] = by_name | {"untrained": probe.evaluate(params)}
    return baselines


def prepare_probes(probes: Probes, trained: LoadedModel) -> Any:
    """Prepares probes for a loaded model; returns its parameters, replicated on all devices."""
    mesh = mesh_lib.make_mesh(Parallelism())
    setup = Parallelism(), mesh, Run().eval_batch_size, trained.vectors
    probes.prepare(trained.model, trained.tokenizer, *setup)
    return jax.device_put(trained.params, mesh_lib.replicated(mesh))


def ridge(features: np.ndarray, classes: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Fits a linear classifier by ridge regression on one-hot classes.

    Features are scaled to a variance of one. The one of `_PENALTIES` with the lowest squared
    error in leave-one-out cross-validation is used (in closed form: Golub, Heath and Wahba 1979).

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

    Raises InputError for other kinds and for equal names; the message begins with `where`.
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
    return [examples[i] for i in np.sort(order[:_SAMPLE_SIZE])]
