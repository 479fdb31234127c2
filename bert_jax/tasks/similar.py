"""One vector a text: `similar`, its rows, its loss and its scores.

Shape letters: B rows (of an example one after the other), S pieces, D width, E examples.
"""

import dataclasses
import hashlib
import zlib
from collections.abc import Sequence
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Finetuning, Model, Parallelism, Task, Vectors
from bert_jax.data import corpus
from bert_jax.embeddings import retrieval
from bert_jax.embeddings.embed import Embedder, Features, Role
from bert_jax.embeddings.retrieval import Passage
from bert_jax.embeddings.text_pairs import CorpusPairs, PairMethod
from bert_jax.errors import InputError, reading
from bert_jax.model import layers, similarity
from bert_jax.model import losses as losses_lib
from bert_jax.model.attention import Packing
from bert_jax.model.encoder import Loop, fill_params
from bert_jax.model.kinds import encode, encoder_of
from bert_jax.model.similarity import Texts
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.pretraining.pretraining_job import OpenCorpus
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Sentence
from bert_jax.tasks.rows import Answers, Outputs, Scores, TaskBatches, TaskKind, TaskRows
from bert_jax.tasks.task_objective import HEAD_RULE, Batch, TaskObjective, Tree, merged_params
from bert_jax.text.tokenizer import Tokenizer, joined
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import sharding

_Examples = Sequence[Sentence | Passage]
_SCALE_RULE = sharding.Rule("head/scale")


class Similar(TaskKind):
    """The kind of `similar`: a row for each text, and of each row a vector.

    `outputs` is the teacher's width where a projection learns, else 0.
    """

    reads, column = "vectors", "cosine"

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        super().__init__(task, labels, tokenizer)
        self._limit = task.max_sequence_length
        self._prefixes = {"query": task.query_prefix, "text": task.text_prefix}
        # Tokens of a text that fit behind the longer prefix, as in `CorpusPairs`.
        longest = max(len(tokenizer.encode(x.rstrip())) for x in self._prefixes.values())
        self._text_tokens = max(self._limit - 2 - longest, 0)
        self.rows_per_example = len(task.text_columns)

    def rows(self, examples: _Examples) -> TaskRows:
        """Returns a row for each text, with its prefix; long texts are cut at the end.

        Texts with equal keys are not negatives of each other. A key is computed from the tokens of
        the text that fit into a row, without the prefix.
        """
        ids, keys, texts = [], [], ()
        for example in examples:
            texts = example.texts if isinstance(example, Sentence) else (example.text,)
            for role, text in zip(roles_of(example), texts, strict=True):
                tokens = self.encode(text, example.place)
                prefix = self._prefixes[role]
                row = self.encode(prefix + text, example.place) if prefix else tokens
                ids.append(joined(self._tokenizer, row[: self._limit - 2], None)[0])
                keys.append(zlib.crc32(np.array(tokens[: self._text_tokens], np.uint32).tobytes()))
        first = np.array([len(row) for row in ids], np.int32)
        numbers = {"keys": np.array(keys, np.uint32)}
        return TaskRows(ids, first, numbers, {}, [], self._limit, len(texts))

    def answers(self, outputs: Outputs, rows: TaskRows, examples: _Examples) -> Answers:
        """Returns the `cosine` of the two texts of each example."""
        if rows.rows_per_example == 1:
            raise InputError(
                f"{examples[0].place}: task.kind=similar: this is one text, and a cosine is of "
                "two; `bert-jax embed` and `search` take the run, `evaluate --task` scores it"
            )
        return [{"cosine": float(value)} for value in _cosines(np.stack(outputs))]

    def scores(self, outputs: Outputs, rows: TaskRows, examples: _Examples) -> Scores:
        """Returns correlations of the cosine with scores; of queries how well texts are found."""
        del rows
        if isinstance(examples[0], Passage):  # and so are all
            return retrieval.scores(outputs, cast(Sequence[Passage], examples))
        pairs = cast(Sequence[Sentence], examples)
        truth = np.array([pair.label for pair in pairs], np.float32)
        cosines = _cosines(np.stack(outputs))
        return {name: scores.score(name, truth, cosines) for name in ("spearman", "pearson")}


def roles_of(example: Sentence | Passage) -> list[Role]:
    """Returns the role of each text of an example, which decides its prefix.

    The first of several texts is a query, and so is a query of a BEIR folder. Every other text has
    the role "text", a single text too, since `embed` uses that role by default.
    """
    if isinstance(example, Passage):
        return ["text" if example.relevant is None else "query"]
    count = len(example.texts)
    return ["query", *["text"] * (count - 1)] if count > 1 else ["text"]


def require_comparable(how: Vectors, model: Model) -> None:
    """Raises InputError unless an encoder makes such vectors."""
    if how.dimensions and how.dimensions[-1] > model.hidden_size:
        raise InputError(
            f"vectors.dimensions={how.dimensions}: the encoder's vectors have {model.hidden_size} "
            "numbers; remove the wider ones"
        )
    if how.pooling == "cls" and model.direction != "both":
        raise InputError(
            f"vectors.pooling=cls: with model.direction={model.direction} the vector of [CLS] "
            "knows nothing of the text; take mean or last"
        )


def _cosines(vectors: np.ndarray) -> np.ndarray:
    """Returns the cosine of rows 0 and 1, 2 and 3, and so on, all of length 1."""
    return (vectors[::2] * vectors[1::2]).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class SimilarObjective(TaskObjective):
    """The `Objective` of vectors, whose rows are compared with each other."""

    how: Vectors = dataclasses.field(default_factory=Vectors)  # what is learned
    pooling: similarity.Pooling = "mean"  # of `how`, or of the base

    @property
    def metrics(self) -> tuple[str, ...]:
        """Returns the names of what `forward` returns."""
        return ("loss", "accuracy") if self.how.loss == "contrastive" else ("loss",)

    def notes(self, task: Task) -> dict[str, Any]:
        """Returns what is kept with checkpoints for those who ask for vectors."""
        made = TextVectors(
            self.pooling,
            normalize=True,
            max_length=task.max_sequence_length,
            query_prefix=task.query_prefix,
            text_prefix=task.text_prefix,
        )
        return {"vectors": dataclasses.asdict(made), "teacher_width": self.outputs}

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Returns where the parameters that learn are cut."""
        head = {"learned": [_SCALE_RULE]}.get(self.how.temperature_is, [])
        if self.how.projection == "linear":
            return super().rules
        return [*(rule for rule in super().rules if rule != HEAD_RULE), *head]

    def init_params(self, key: jax.Array) -> Tree:
        """Returns those that learn, fresh; an encoder in them is to be replaced by the base's."""
        params = super().init_params(key)
        if self.how.temperature_is == "learned":
            params["head"] = {"scale": -jnp.log(jnp.full([1], self.how.temperature))}
        elif self.how.projection == "none":
            del params["head"]
        return params

    def vectors(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the vector of each row, float32 [B, D], of length 1."""
        params = merged_params(self.adapt, params, fixed)
        encoder = fill_params(params["encoder"], encoder_of(self.model).encoder, self.model)
        ids, mask = (batch["input_ids"], batch["segment_ids"]), batch["input_mask"]
        if "tokens" in batch:  # texts share rows, see `embeddings.packing`
            packed = Packing(batch["positions"], batch["tokens"], batch["places"])
            hidden = packed.unpack(encode(encoder, self.model, *ids, packed, noise, loop))
            mask = packed.mask
        else:
            hidden = encode(encoder, self.model, *ids, mask, noise, loop)
        return similarity.normalize(similarity.pool(hidden, mask, self.pooling))

    # What is asked of a model is what its rows are compared by.
    logits = vectors

    def compare(
        self,
        vectors: jax.Array,
        params: Any,
        fixed: Any,
        batch: Batch,
        noise: layers.Noise | None,
        loop: Loop,
    ) -> losses_lib.Metrics:
        """Computes the metrics of rows by their vectors, float32 [B, D]."""
        del fixed, noise, loop
        how, head, axes = self.how, params.get("head", {}), mesh_lib.manual_axes()
        if how.loss == "distil":
            if "kernel" in head:
                vectors = similarity.normalize(vectors @ head["kernel"] + head["bias"])
            wanted, weights = batch["wanted"], batch["row_weights"]
            sums = similarity.distillation_loss(vectors, wanted, weights, how.geometry, axes)
            return {"loss": sums}
        scale = jnp.exp(head["scale"][0]) if "scale" in head else 1 / how.temperature
        together = self.rows_per_example
        keys, weights = batch["keys"].reshape(-1, together), batch["row_weights"][::together]
        loss, hits = jnp.zeros(2), jnp.zeros(2)
        for size in how.dimensions or (vectors.shape[1],):
            cut = vectors[:, :size].reshape(-1, together, size)
            texts = Texts(cut, keys, weights)
            if how.loss == "cosine":
                of_size = similarity.cosine_loss(texts, batch["scores"][::together])
            else:
                of_size, hits = similarity.contrastive_loss(texts, scale, axes)
            loss = jnp.stack([loss[0] + of_size[0], of_size[1]])
        return {"loss": loss} if how.loss == "cosine" else {"loss": loss, "accuracy": hits}

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows."""
        vectors = self.vectors(params, fixed, batch, noise, loop)
        return self.compare(vectors, params, fixed, batch, noise, loop)


# --- what is learned from ------------------------------------------------------------------------


@dataclasses.dataclass
class PairTrainingSet:
    """Rows that a run learns from."""

    examples: int  # an epoch
    sha256: str
    batches: TaskBatches | CorpusPairs
    rows_per_example: int
    rows: TaskRows | None  # None of a corpus, whose rows are made as they are asked for
    width: int  # of a teacher's vectors; 0: there is none
    keys: frozenset[int] = frozenset()  # `text_key` of the first two texts of each example


def validation_task(task: Task) -> Task:
    """Returns a task as its validation examples are read: without texts that answer nothing."""
    return dataclasses.replace(task, negative_column="")


def inherit_prompts(task: Task, known: TextVectors | None) -> Task:
    """Returns a task with what a base puts before its texts, where the task names nothing."""
    known = known or TextVectors()
    return dataclasses.replace(
        task,
        query_prefix=task.query_prefix or known.query_prefix,
        text_prefix=task.text_prefix or known.text_prefix,
    )


def read(
    experiment: Finetuning,
    model: Model,
    tokenizer: Tokenizer,
    tally: examples_lib.Tally,
    teacher: Literal["asked", "left_out"] = "asked",
) -> PairTrainingSet:
    """Reads what an experiment learns vectors from; a teacher's take a while.

    `tally` counts the examples.
    """
    task, how = experiment.task, experiment.vectors
    word, _, place = task.train[0].partition(":")
    if word == "corpus":
        return _read_corpus(experiment, tokenizer, *place.rpartition(":")[::2])
    if how.loss == "distil":
        task = dataclasses.replace(task, second_column="")
    labelled: examples_lib.Labelled = "labelled" if how.loss == "cosine" else "unlabelled"
    examples = cast(list[Sentence], examples_lib.read(task, task.train, labelled, tally))
    kind = Similar(task, (), tokenizer)
    rows, width, more = kind.rows(examples), 0, ""
    if how.loss == "cosine":
        scaled = _scaled(examples, how)
        rows.numbers["scores"] = np.repeat(scaled, rows.rows_per_example)
    if how.loss == "distil" and teacher == "asked":
        wanted = _teacher_vectors(how, examples)
        rows.numbers["wanted"], width = wanted, wanted.shape[1]
        more = hashlib.sha256(np.ascontiguousarray(wanted).data).hexdigest()
        if how.projection == "none" and width != model.hidden_size:
            raise InputError(
                f"vectors.teacher={how.teacher}: its vectors have {width} numbers, and the "
                f"encoder's {model.hidden_size}; set vectors.projection=linear"
            )
    sha256 = examples_lib.sha256(examples, (more,))
    batches = TaskBatches(rows, tokenizer.pad_id, experiment.batch_size, experiment.seed)
    pairs = [dataclasses.replace(x, texts=x.texts[:2]) for x in examples if len(x.texts) > 1]
    keys = frozenset(map(examples_lib.text_key, pairs))
    return PairTrainingSet(len(examples), sha256, batches, rows.rows_per_example, rows, width, keys)


def _read_corpus(
    experiment: Finetuning, tokenizer: Tokenizer, place: str, how: str
) -> PairTrainingSet:
    task, folder = experiment.task, epath.Path(place)
    if how not in get_args(PairMethod):
        raise InputError(
            f"task.train: corpus:{place}:{how}: end it in {', '.join(get_args(PairMethod))}"
        )
    prepared = OpenCorpus.open(folder / "corpus" if (folder / "corpus").exists() else folder)
    if prepared.tokenizer.sha256 != tokenizer.sha256:
        raise InputError(
            f"task.train: corpus:{place}: was made with another vocabulary than the base has; "
            "prepare the text with the base's"
        )
    # A corpus has the blank before its texts.
    asks, other = (tokenizer.encode(it.rstrip()) for it in (task.query_prefix, task.text_prefix))
    pairs = CorpusPairs(
        corpus.open_stream(prepared.folder, "train"),
        prepared.ids,
        cast(PairMethod, how),
        (asks, other),
        experiment.batch_size,
        task.max_sequence_length,
        experiment.seed,
    )
    return PairTrainingSet(pairs.total, prepared.sha256, pairs, 2, None, 0)


def _scaled(examples: Sequence[Sentence], how: Vectors) -> np.ndarray:
    """Returns the scores of pairs as cosines from 0 to 1, float32 [E]."""
    low, high = how.score_range
    for example in examples:
        if example.label is None or not low <= float(example.label) <= high:
            raise InputError(
                f"{example.place}: the score {example.label} is not within "
                f"vectors.score_range={how.score_range}; correct one of them"
            )
    values = np.array([example.label for example in examples], np.float32)
    return (values - low) / (high - low)


def _teacher_vectors(how: Vectors, examples: Sequence[Sentence]) -> np.ndarray:
    """Returns the teacher's vector for the text of each example, float32 [E, W], of length 1.

    The teacher reads a text in the same role as the student, with the teacher's own prefix.
    """
    path = epath.Path(how.teacher)
    if path.suffix != ".npz":
        mesh = mesh_lib.make_mesh(Parallelism())
        embedder = Embedder(LoadedModel.of(path), Features(length="unit"), mesh)
        (role,) = roles_of(examples[0])
        parts = embedder.embed((example.texts[0] for example in examples), role)
        return np.concatenate([part.vectors for part in parts])
    with reading(path, "name a file that `bert-jax embed` wrote"), np.load(path) as file:
        vectors = file["vectors"]
    if vectors.dtype == np.uint8:
        raise InputError(f"vectors.teacher={how.teacher}: holds bits alone; write it unquantized")
    if len(vectors) != len(examples):
        raise InputError(
            f"vectors.teacher={how.teacher}: holds {len(vectors)} vectors, and there are "
            f"{len(examples)} training examples; embed their texts again"
        )
    vectors = vectors.astype(np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
