"""The kind `similar`, with one vector for each text: its rows, its loss and its scores.

Shape letters: B rows (those of an example are consecutive), S tokens, D width, E examples.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base, TextVectors
from bert_jax.config import Adapt, Finetuning, Parallelism, Task, Vectors
from bert_jax.data import corpus
from bert_jax.embeddings import retrieval
from bert_jax.embeddings.embed import Embedder, Role, VectorOptions
from bert_jax.embeddings.retrieval import Passage
from bert_jax.embeddings.text_pairs import CorpusPairs, PairMethod
from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.model import layers, similarity
from bert_jax.model import losses as losses_lib
from bert_jax.model.encoder import Loop, fill_params
from bert_jax.model.kinds import encoder_functions
from bert_jax.model.similarity import Texts
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.storage import mirror
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import scores
from bert_jax.tasks.adaptation import compile_forward
from bert_jax.tasks.examples import Sentence
from bert_jax.tasks.rows import TaskBatches, TaskRows, eval_batches
from bert_jax.tasks.task_kind import Answers, Outputs, Scores, TaskKind, TrainingSet
from bert_jax.tasks.task_objective import (
    HEAD_RULE,
    Batch,
    TaskObjective,
    Tree,
    encode_texts,
    merged_params,
)
from bert_jax.text.tokenizer import Tokenizer, add_special_tokens
from bert_jax.training import feed, sharding
from bert_jax.training import mesh as mesh_lib

_Examples = Sequence[Sentence | Passage]
_SCALE_RULE = sharding.Rule("head/scale")


@dataclasses.dataclass(frozen=True)
class SimilarObjective(TaskObjective):
    """The `training.objective.ComparingObjective` of `similar`: compares vectors of a batch."""

    settings: Vectors = dataclasses.field(default_factory=Vectors)
    # How a text becomes a vector, for `embed`.
    text_vectors: TextVectors = dataclasses.field(default_factory=TextVectors)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy") if self.settings.loss == "contrastive" else ("loss",)

    @property
    def notes(self) -> dict[str, Any]:
        return {"vectors": dataclasses.asdict(self.text_vectors), "teacher_width": self.outputs}

    @property
    def base_parts(self) -> tuple[str, ...]:
        return (*super().base_parts, *["dense"] * bool(self.text_vectors.dense_width))

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        rules = list(super().rules)
        if self.adapt.how == "full" and self.text_vectors.dense_width:
            rules.append(sharding.Rule("dense/(kernel|bias)"))  # on each device, whole
        if self.settings.projection == "linear":
            return rules
        scale_rules = [_SCALE_RULE] if self.settings.temperature_is == "learned" else []
        return [*(rule for rule in rules if rule != HEAD_RULE), *scale_rules]

    def init_params(self, key: jax.Array) -> Tree:
        params = super().init_params(key)
        if self.settings.temperature_is == "learned":  # "scale" is the log of 1 / temperature
            params["head"] = {"scale": -jnp.log(jnp.full([1], self.settings.temperature))}
        elif self.settings.projection == "none":
            del params["head"]
        width = self.text_vectors.dense_width
        if self.adapt.how == "full" and width:  # shapes: the values are the base's
            kernel = jnp.zeros([self.model.hidden_size, width], jnp.float32)
            params["dense"] = {"kernel": kernel, "bias": jnp.zeros([width], jnp.float32)}
        return params

    def vectors(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the vector of each row, float32 [B, D], of length 1."""
        params = merged_params(self.adapt, params, fixed)
        encoder = fill_params(params["encoder"], encoder_functions(self.model).encoder, self.model)
        hidden, mask = encode_texts(encoder, self.model, batch, noise, loop)
        pooled = similarity.pool(hidden, mask, self.text_vectors.pooling)
        if "dense" in params:  # an untrained encoder, which probes compare with, has no such part
            activation = self.text_vectors.dense_activation
            pooled = similarity.apply_dense(pooled, params["dense"], activation)
        return similarity.normalize(pooled)

    predict = vectors

    def compare(
        self,
        vectors: jax.Array,
        params: Any,
        fixed: Any,
        batch: Batch,
        noise: layers.Noise | None,
        loop: Loop,
    ) -> losses_lib.Metrics:
        """Computes the metrics of a batch from its vectors, float32 [B, D]."""
        settings, head, axes = self.settings, params.get("head", {}), mesh_lib.manual_axes()
        if settings.loss == "distil":
            if "kernel" in head:
                vectors = similarity.normalize(vectors @ head["kernel"] + head["bias"])
            targets, weights = batch["teacher_vectors"], batch["row_weights"]
            geometry = settings.geometry  # the weight of a loss of the cosines between texts
            sums = similarity.distillation_loss(vectors, targets, weights, geometry, axes)
            return {"loss": sums}
        scale = jnp.exp(head["scale"][0]) if "scale" in head else 1 / settings.temperature
        per_example, weights = self.rows_per_example, batch["row_weights"][:: self.rows_per_example]
        text_hashes = batch["keys"].reshape(-1, per_example)  # see `Similar.rows`
        loss, hits = jnp.zeros(2), jnp.zeros(2)
        # Shortened vectors, as in Matryoshka Representation Learning (Kusupati et al. 2022).
        for size in settings.dimensions or (vectors.shape[1],):
            texts = Texts(vectors[:, :size].reshape(-1, per_example, size), text_hashes, weights)
            if settings.loss == "cosine":
                size_loss = similarity.cosine_loss(texts, batch["scores"][::per_example])
            else:
                size_loss, hits = similarity.contrastive_loss(texts, scale, axes)
            # Each size has the same count; the accuracy is that of the last, the largest.
            loss = jnp.stack([loss[0] + size_loss[0], size_loss[1]])
        return {"loss": loss} if settings.loss == "cosine" else {"loss": loss, "accuracy": hits}

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        vectors = self.vectors(params, fixed, batch, noise, loop)
        return self.compare(vectors, params, fixed, batch, noise, loop)


class Similar(TaskKind):
    """The kind `similar`: a row and a vector for each text.

    `output_count` is the width of the teacher's vectors, 0 without a teacher.
    """

    reads, answer_field = "vectors", "cosine"
    objective_class = SimilarObjective

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        super().__init__(task, labels, tokenizer)
        self._limit = task.max_sequence_length
        self._prefixes = {"query": task.query_prefix, "document": task.text_prefix}
        # Number of tokens of a text that fit behind the longer prefix, as in `CorpusPairs`.
        longest = max(len(tokenizer.encode(x.rstrip())) for x in self._prefixes.values())
        self._text_limit = max(self._limit - 2 - longest, 0)
        self.rows_per_example = len(task.text_columns)

    @classmethod
    def restore(
        cls, task: Task, labels: tuple[str, ...], base: Base, notes: Mapping[str, Any]
    ) -> "Similar":
        vectors = base_lib.read_vectors(notes) or base.vectors
        kind = cls(inherit_prefixes(task, vectors), labels, base.tokenizer)
        kind.output_count = notes["teacher_width"]
        return kind

    @classmethod
    def read_training(
        cls, experiment: Finetuning, base: Base, tally: examples_lib.Tally, run_teacher: bool = True
    ) -> TrainingSet:
        """Reads the training examples or opens a corpus; see `TaskKind.read_training`."""
        task, settings = inherit_prefixes(experiment.task, base.vectors), experiment.vectors
        kind = cls(task, (), base.tokenizer)
        format_, _, path = task.train[0].partition(":")
        if format_ == "corpus":
            kind.rows_per_example = 2
            folder, _, method = path.rpartition(":")
            pairs, sha256 = _read_corpus(kind, experiment, folder, method)
            return TrainingSet(kind, pairs.total, pairs, rows=None, examples=(), identity=(sha256,))
        mode: examples_lib.Labelling = "labelled" if settings.loss == "cosine" else "unlabelled"
        if settings.loss == "distil":  # only the first text of a pair has a target
            task = dataclasses.replace(task, second_column="")
        examples = cast(list[Sentence], examples_lib.read(task, task.train, mode, tally))
        rows, teacher_sha256 = kind.rows(examples), ""
        kind.rows_per_example = rows.rows_per_example
        if settings.loss == "cosine":
            targets = _scale_scores(examples, settings)
            rows.row_arrays["scores"] = np.repeat(targets, rows.rows_per_example)
        if settings.loss == "distil" and run_teacher:
            targets = _teacher_vectors(settings.teacher, examples)
            rows.row_arrays["teacher_vectors"], kind.output_count = targets, targets.shape[1]
            teacher_sha256 = hashlib.sha256(np.ascontiguousarray(targets).data).hexdigest()
            width = vector_width(base)
            if settings.projection == "none" and kind.output_count != width:
                raise InputError(
                    f"vectors.teacher={settings.teacher}: its vectors have {kind.output_count} "
                    f"numbers, the base's {width}; set vectors.projection=linear"
                )
        batches = TaskBatches(rows, kind.tokenizer.pad_id, experiment.batch_size, experiment.seed)
        identity = (examples_lib.sha256(examples, (teacher_sha256,)),)
        # Without negatives, since the validation pairs, whose `text_key` is compared, have none.
        pairs = [dataclasses.replace(x, texts=x.texts[:2]) for x in examples if len(x.texts) > 1]
        text_keys = frozenset(map(examples_lib.text_key, pairs))
        # Without the examples, whose hash is in `identity`.
        return TrainingSet(kind, len(examples), batches, rows, (), identity, text_keys)

    def objective_fields(self, experiment: Finetuning, base: Base) -> dict[str, Any]:
        settings, inherited = experiment.vectors, base.vectors or TextVectors()
        require_supported(settings, base)
        vectors = TextVectors(
            settings.pooling or inherited.pooling,
            normalize=True,
            max_length=self.task.max_sequence_length,
            query_prefix=self.task.query_prefix,
            text_prefix=self.task.text_prefix,
            dense_width=inherited.dense_width,
            dense_activation=inherited.dense_activation,
        )
        return {"settings": settings, "text_vectors": vectors}

    def rows(self, examples: _Examples) -> TaskRows:
        """Returns a row for each text, with its prefix; long texts are truncated at the end.

        `keys` are hashes of the tokens of a text that fit into a row, without the prefix; texts
        with equal keys are not negatives of each other.
        """
        ids, keys = [], []
        for example in examples:
            for role, text in zip(roles_of(example), examples_lib.texts_of(example), strict=True):
                tokens = self.encode(text, example.location)
                prefix = self._prefixes[role]
                row = self.encode(prefix + text, example.location) if prefix else tokens
                ids.append(add_special_tokens(self.tokenizer, row[: self._limit - 2], None)[0])
                keys.append(zlib.crc32(np.array(tokens[: self._text_limit], np.uint32).tobytes()))
        row_arrays = {"keys": np.array(keys, np.uint32)}
        per_example = len(examples_lib.texts_of(examples[0]))
        return TaskRows(ids, self._limit, row_arrays=row_arrays, rows_per_example=per_example)

    def answers(self, outputs: Outputs, rows: TaskRows, examples: _Examples) -> Answers:
        if rows.rows_per_example == 1:
            raise InputError(
                f"{examples[0].location}: task.kind=similar: this is one text, but a cosine needs "
                "two; use the run in `bert-jax embed`, `search` or `evaluate --task`"
            )
        return [{"cosine": float(value)} for value in _cosines(np.stack(outputs))]

    def scores(self, outputs: Outputs, rows: TaskRows, examples: _Examples) -> Scores:
        """Returns correlations of cosines with the scores of pairs, or retrieval scores."""
        if isinstance(examples[0], Passage):  # then all are
            return retrieval.scores(outputs, cast(Sequence[Passage], examples))
        pairs = cast(Sequence[Sentence], examples)
        truth = np.array([pair.label for pair in pairs], np.float32)
        cosines = _cosines(np.stack(outputs))
        return {name: scores.score(name, truth, cosines) for name in ("spearman", "pearson")}

    def baseline(self, examples: _Examples) -> tuple[str, float] | None:
        """Returns the score of BM25 on a BEIR folder."""
        return retrieval.bm25_baseline(examples, self.task.main_score)


def score_mean_vectors(
    base: Base, task: Task, passages: Sequence[Passage], mesh: jax.sharding.Mesh, size: int
) -> float:
    """Returns the main score of a retrieval task by vectors that are means over a text's tokens.

    They are computed by the encoder of a base. `size` is the number of texts of a batch, a multiple
    of the shards of the mesh.
    """
    task = dataclasses.replace(inherit_prefixes(task, base.vectors), kind="similar")
    kind = Similar(task, (), base.tokenizer)
    rows = kind.rows(passages)
    batches = eval_batches(rows, base.tokenizer.pad_id, size)
    fields: Any = {"outputs": 0, "rows_per_example": 1, "adapt": Adapt()}
    objective = SimilarObjective(base.model, kind.learns, kind.reads, **fields)
    params = feed.put({"encoder": base.params["encoder"]}, mesh_lib.replicated(mesh))
    vectors, _ = compile_forward(objective, Parallelism(), mesh)(params, None, batches, rows)
    return kind.scores(vectors, rows, passages)[task.main_score]


def roles_of(example: Sentence | Passage) -> list[Role]:
    """Returns the role of each text of an example, which decides its prefix.

    The first of several texts is a query, and so is a query of a BEIR folder. Every other text has
    the role "document", also a single text, since `embed` uses this role by default.
    """
    if isinstance(example, Passage):
        return ["document" if example.relevant is None else "query"]
    count = len(example.texts)
    return ["query", *["document"] * (count - 1)] if count > 1 else ["document"]


def vector_width(base: Base) -> int:
    """Returns how many numbers the vectors of a base have."""
    return (base.vectors and base.vectors.dense_width) or base.model.hidden_size


def require_supported(settings: Vectors, base: Base) -> None:
    """Raises InputError unless a base supports the dimensions and the pooling of `settings`."""
    width, direction = vector_width(base), base.model.direction
    if settings.dimensions and settings.dimensions[-1] > width:
        raise InputError(
            f"vectors.dimensions={settings.dimensions}: the base's vectors have {width} numbers; "
            "remove larger dimensions"
        )
    if settings.projection == "linear" and width != base.model.hidden_size:
        raise InputError(
            f"vectors.projection=linear: reads {base.model.hidden_size} numbers, but the base's "
            f"Dense layer gives {width}; set it to none, and name a teacher of {width} numbers"
        )
    if settings.pooling == "cls" and direction != "both":
        raise InputError(
            f"vectors.pooling=cls: with model.direction={direction} the vector of [CLS] "
            "does not depend on the text; use mean or last"
        )


def _cosines(vectors: np.ndarray) -> np.ndarray:
    """Returns the cosine of rows 0 and 1, 2 and 3, and so on, all of length 1."""
    return (vectors[::2] * vectors[1::2]).sum(axis=-1)


# --- training examples ----------------------------------------------------------------------------


def inherit_prefixes(task: Task, vectors: TextVectors | None) -> Task:
    """Returns the task with the base's prefixes where the task sets none."""
    vectors = vectors or TextVectors()
    return task.with_fields(
        query_prefix=task.query_prefix or vectors.query_prefix,
        text_prefix=task.text_prefix or vectors.text_prefix,
    )


def _read_corpus(
    kind: Similar, experiment: Finetuning, path: str, method: str
) -> tuple[CorpusPairs, str]:
    """Returns the pairs of a corpus, and its hash."""
    task, tokenizer, folder = kind.task, kind.tokenizer, epath.Path(path)
    if method not in get_args(PairMethod):
        methods = " or ".join(get_args(PairMethod))
        raise InputError(f"task.train: corpus:{path}:{method}: must end with {methods}")
    prepared = PreparedCorpus.open(folder / "corpus" if (folder / "corpus").exists() else folder)
    if prepared.tokenizer.sha256 != tokenizer.sha256:
        raise InputError(
            f"task.train: corpus:{path}: its vocabulary is not that of the base; prepare the text "
            "with the base's vocabulary"
        )
    # The tokens of a text in a corpus include the space before it: prefixes end without one.
    query, text = (tokenizer.encode(x.rstrip()) for x in (task.query_prefix, task.text_prefix))
    pairs = CorpusPairs(
        corpus.open_stream(prepared.folder, "train"),
        special_ids=prepared.special_ids,
        method=cast(PairMethod, method),
        prefixes=(query, text),
        examples_per_step=experiment.batch_size,
        length=task.max_sequence_length,
        seed=experiment.seed,
    )
    return pairs, prepared.sha256


def _scale_scores(examples: Sequence[Sentence], settings: Vectors) -> np.ndarray:
    """Returns the scores of pairs, scaled to cosines from 0 to 1, float32 [E]."""
    low, high = settings.score_range
    for example in examples:
        if example.label is None or not low <= float(example.label) <= high:
            raise InputError(
                f"{example.location}: the score {example.label} is not within "
                f"vectors.score_range={settings.score_range}; correct one of them"
            )
    values = np.array([example.label for example in examples], np.float32)
    return (values - low) / (high - low)


def _teacher_vectors(teacher: str, examples: Sequence[Sentence]) -> np.ndarray:
    """Returns the teacher's vectors for the texts, float32 [E, teacher's width], of length 1.

    The teacher reads a text in the same role as the student, with the teacher's own prefix.
    """
    path = epath.Path(teacher)
    if path.suffix != ".npz":  # a run or a base, on this machine or in a bucket (`mirror`)
        model, mesh = LoadedModel.of(mirror.open_workdir(path)), mesh_lib.make_mesh(Parallelism())
        embedder = Embedder(model, VectorOptions(normalize=True), mesh)
        (role,) = roles_of(examples[0])
        parts = embedder.embed((example.texts[0] for example in examples), role)
        return np.concatenate([part.vectors for part in parts])
    with (
        translate_parser_errors(path, "give a file that `bert-jax embed` wrote"),
        np.load(path) as file,
    ):
        vectors = file["vectors"]
    if vectors.dtype == np.uint8:
        raise InputError(f"vectors.teacher={teacher}: is quantized; embed without --quantize")
    if len(vectors) != len(examples):
        raise InputError(
            f"vectors.teacher={teacher}: has {len(vectors)} vectors, but there are "
            f"{len(examples)} training examples; embed their texts again"
        )
    vectors = vectors.astype(np.float32)
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.all():
        raise InputError(
            f"vectors.teacher={teacher}: row {np.argmin(is_finite)} of its vectors holds a number "
            "that is not finite; embed the texts again"
        )
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
