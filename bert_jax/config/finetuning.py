"""The config sections of a fine-tuning run: the task, the base's adaptation, and all together.

Fine-tuning is section 3.2 and appendix A.3 of Devlin et al. 2018; `lora` is Hu et al. 2021; the
decay of the learning rate by layer is from Howard and Ruder 2018 and Clark et al. 2020.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from bert_jax.config.fields import (
    Count,
    FolderName,
    Positive,
    PositiveCount,
    Problem,
    RequiresValue,
    RowLength,
    Section,
    Seed,
    Share,
    subset_of,
)
from bert_jax.config.pretraining import Optimizer, Parallelism, Run
from bert_jax.config.task_kinds import KINDS, TRAINABLE_KINDS, Kind, KindSpec, kinds_with
from bert_jax.config.vectors import MultiVectors, SparseVectors, Vectors
from bert_jax.errors import InputError

# Which layers of the encoder a tagger's BiLSTM reads; empty: no BiLSTM, only a linear head.
Features = Literal[
    "", "embeddings", "last", "second_to_last", "sum_last_four", "concat_last_four", "mixed"
]

# Formats of sources with a last part after the path: a split, or how pairs are made.
_SPLIT_FORMS = {"tfds": "NAME:SPLIT", "corpus": "WORKDIR:HOW", "beir": "FOLDER:SPLIT"}

_LORA_ONLY = RequiresValue("adapt.how", ("lora",))


def _only(field: str) -> RequiresValue:
    return RequiresValue("kind", kinds_with(field))


def _noted(field: str) -> RequiresValue:
    # With other kinds this field was never an error, so it only gives a note: `notes_on_settings`
    # reports rules whose field is a path, such as `task.kind`.
    return RequiresValue("task.kind", kinds_with(field))


@dataclass(frozen=True, kw_only=True)
class Task(Section, role="identity", label="task"):
    """The task of a fine-tuning, and the sources of its examples.

    `KINDS` has the formats for each kind. Paths that begin with `./` or `../` are relative to the
    experiment file, others to the current directory. A column is named as in the file's first
    line, in JSON or in TFDS; in CoNLL files and in files without a header it is a number from 0.
    The columns of a span are always SQuAD's.

    `similar` also learns from `corpus:WORKDIR:HOW`, pairs of texts from a corpus that `prepare`
    wrote. HOW is `neighbours` (two adjacent parts of a document, split between sentences), `crops`
    (two parts of a passage) or `twice` (a passage twice, with different dropout).

    Minimal pairs are those of Warstadt et al. 2020.
    """

    # What is predicted. classify: a label of a text; pair: a label of two texts; regress: a number
    # of one or two texts; choice: one of several texts; tag: a label of each word; span: a part of
    # a context; generate: another text; minimal_pairs: the acceptable one of two texts; similar: a
    # vector of a text, close to those of similar texts. The others find which texts answer a query
    # best. rank: by reading both; sparse: by a weight for each token of the vocabulary;
    # multi_vector: by a vector for each token.
    kind: Kind
    # Sources of training examples: tsv:FILE, csv:FILE, jsonl:FILE, conll:FILE, squad:FILE or
    # tfds:NAME:SPLIT; for similar also corpus:WORKDIR:HOW; for minimal_pairs none. For rank, texts
    # and scores are lists; for sparse and multi_vector a text or a list of them.
    train: Annotated[tuple[str, ...], RequiresValue("kind", TRAINABLE_KINDS)] = ()
    # Sources of examples to score on; for similar, rank, sparse and multi_vector also
    # beir:FOLDER:SPLIT.
    validation: tuple[str, ...]
    # Whether a broken row is an error (stop), or skipped and counted: a row with a blank text or
    # label, with more or fewer columns than the others, or with a label not in task.labels.
    broken_rows: Literal["stop", "skip"] = "stop"
    # Whether the first line of a TSV or CSV file names the columns.
    header: Literal["first_line", "none"] = "first_line"
    # Column of the text, or of the first of two; for minimal_pairs of the acceptable one.
    text_column: str = "sentence"
    # Column of the second text, for kinds with two; for minimal_pairs of the unacceptable one; for
    # rank, sparse and multi_vector of the list of texts, which answer the query in text_column.
    second_column: Annotated[str, _only("second_column")] = ""
    # For similar, sparse and multi_vector: column of a similar text that is not an answer (hard
    # negative); empty: none.
    negative_column: Annotated[str, _only("negative_column")] = ""
    # For similar, sparse and multi_vector: prompt of queries and of the first text of a pair.
    query_prefix: Annotated[str, _only("query_prefix")] = ""
    # For similar, sparse and multi_vector: prompt of all other texts.
    text_prefix: Annotated[str, _only("text_prefix")] = ""
    # For rank: the loss. binary_cross_entropy: scores are probabilities; mse: scores are outputs to
    # learn; list_net: the softmax over the texts of a query is learned.
    ranking_loss: Annotated[
        Literal["binary_cross_entropy", "mse", "list_net"], _only("ranking_loss")
    ] = "binary_cross_entropy"
    # For choice: the columns of the texts to choose from; the first is answer 0.
    choice_columns: Annotated[tuple[str, ...], _only("choice_columns")] = ()
    # Column of the answer. For generate: of the text to write; for minimal_pairs: of the paradigm;
    # for rank, sparse and multi_vector: of the list of scores.
    label_column: str = "label"
    # For minimal_pairs: column of the category to which a paradigm belongs, such as syntax; empty:
    # none.
    field_column: Annotated[str, _only("field_column")] = ""
    # All labels, in order; label 1 is the positive one for `f1`; empty: those of the training
    # examples, sorted. For choice, the names of the answers; empty: 0, 1, and so on.
    labels: Annotated[tuple[str, ...], _only("labels")] = ()
    # The score by which runs are compared; empty: the default of the kind.
    score: str = ""
    # Maximum number of tokens in a row; longer texts are truncated or read in windows.
    max_sequence_length: RowLength = 128
    # For generate: maximum number of tokens of a target text, with the token that ends it; the
    # rest is truncated.
    max_target_length: Annotated[RowLength, _noted("max_target_length")] = 128
    # For span: a long context is read in windows that begin this many tokens apart (SQuAD: 128 with
    # rows of 384).
    document_stride: Annotated[PositiveCount, _noted("document_stride")] = 128
    # For span: maximum number of tokens of a question; longer ones are truncated.
    max_query_length: Annotated[PositiveCount, _noted("max_query_length")] = 64
    # For span: maximum number of tokens in an answer.
    max_answer_length: Annotated[PositiveCount, _noted("max_answer_length")] = 30
    # For span: whether a question may have no answer (SQuAD 2.0).
    no_answer: Annotated[Literal["never", "possible"], _noted("no_answer")] = "never"

    @property
    def spec(self) -> KindSpec:
        """The kind of the task."""
        return KINDS[self.kind]

    @property
    def main_score(self) -> str:
        """The score by which runs are compared."""
        return self.score or ("ndcg@10" if self.is_scored_by_retrieval else self.spec.scores[0])

    @property
    def is_scored_by_retrieval(self) -> bool:
        """Returns whether the task is scored by retrieval."""
        sources = self.validation
        return bool(sources) and all(source.startswith("beir:") for source in sources)

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns of an example's texts, in the order in which the encoder reads them."""
        columns: list[str] = []
        for name in self.spec.text_columns:
            value = getattr(self, name, name)
            columns += [value] if isinstance(value, str) else value
        return tuple(filter(None, columns))

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns besides those of texts."""
        return tuple(filter(None, (self.label_column, self.field_column)))

    def with_fields(self, **fields: Any) -> "Task":
        """Returns a copy with some fields replaced, to read files with other columns.

        `train` and `validation` are not checked again: their columns differ from the new ones.
        """
        if "second_column" in fields and self.kind not in kinds_with("second_column"):
            self._refuse("kind", "has no second text; remove --second")
        task = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(task, name, value)
        return task

    def require_readable(
        self, where: str, sources: tuple[str, ...], columns: tuple[str, ...]
    ) -> None:
        """Raises InputError, which begins with `where`, unless all sources can have the columns."""
        for source in sources:
            file_format, _, path = source.partition(":")
            # A dataset name may end in a colon and a version, so the split is the last part.
            parts = path.rpartition(":")[::2] if file_format in _SPLIT_FORMS else [path]
            known = self.spec.formats
            if file_format not in known or not all(parts):
                forms = " or ".join(f"{name}:{_SPLIT_FORMS.get(name, 'FILE')}" for name in known)
                raise InputError(f"{where}: {source!r}: task.kind={self.kind} reads {forms}")
            has_no_header = file_format in ("tsv", "csv") and self.header == "none"
            is_numbered = file_format == "conll" or has_no_header
            for column in columns:
                if is_numbered and not (column.isascii() and column.isdecimal()):
                    raise InputError(
                        f"{where}: {source!r} has no column names: give task.text_column, "
                        f"task.label_column and others as numbers from 0, not {column!r}"
                    )

    def _problems(self) -> Iterator[Problem]:
        kind, labels = f"task.kind={self.kind}", self.labels
        yield from self.spec.problems(self)
        columns = self.text_columns + self.label_columns
        has_unnamed = not (self.text_column and self.label_column)
        if has_unnamed or len(set(columns)) < len(columns):
            yield "text_column", f"the columns {columns} must differ, and none may be empty"
        if len(set(labels)) < len(labels):
            yield "labels", "one is named more than once"
        # Labels are stripped when they are read.
        if not all(label and label == label.strip() for label in labels):
            yield "labels", "one is empty, or has blanks around it"
        if len(labels) == 1:
            yield "labels", "name at least two, or none"
        # Formats that must be a split's only source, and that cannot be used for it.
        for name, alone, never in (("train", "corpus", "beir"), ("validation", "beir", "corpus")):
            sources = getattr(self, name)
            formats = [source.partition(":")[0] for source in sources]
            if not sources and (name == "validation" or self.kind in TRAINABLE_KINDS):
                yield name, "name at least one source"
            self.require_readable(f"task.{name}", sources, columns)
            if never in formats:
                yield name, f"{never}: cannot be used here; name a table, such as tsv:FILE"
            if alone in formats and len(formats) > 1:
                yield name, f"{alone}: cannot be combined with other sources; remove the others"
        if self.score not in ("", *self.spec.scores):
            yield "score", f"{kind} is scored by {', '.join(self.spec.scores)}"


# The parts of a layer that have a kernel; only model.kind=modern has gates.
LORA_TARGETS = ("query", "key", "value", "attention_output", "intermediate", "gate", "output")


@dataclass(frozen=True, kw_only=True)
class Adapt(Section, role="identity", label="adapt"):
    """The adaptation of a base to a task.

    `lora` adds low-rank products A B to kernels. The BiLSTM layers of `features` are each as wide
    as the encoder. On a frozen encoder they are those of Devlin et al. 2018, Table 7; on a trained
    one, those of Table 5. `mixed` is ELMo's mixture of layers (Peters et al. 2018).
    """

    # What is trained: everything (full), only the head (frozen), or the head and adapters (lora).
    how: Literal["full", "frozen", "lora"] = "full"
    # For task.kind=tag: puts two BiLSTM layers below the head, which read these layers of the
    # encoder: one, several, or all, mixed with learned weights; empty: no BiLSTM layers, the head
    # reads the last layer.
    features: Features = ""
    # What a head over whole texts reads: the vector of [CLS], or of the last [SEP] if the encoder
    # is left-to-right (cls), or the mean over all tokens (mean); empty: as in the base's own head,
    # else cls.
    pooling: Literal["", "cls", "mean"] = ""
    # For how=lora: rank of the adapters.
    lora_rank: Annotated[PositiveCount, _LORA_ONLY] = 8
    # For how=lora: the adapters are scaled by lora_alpha / lora_rank.
    lora_alpha: Annotated[Positive, _LORA_ONLY] = 16.0
    # For how=lora: the kernels of each layer that have an adapter.
    lora_targets: Annotated[tuple[str, ...], subset_of(LORA_TARGETS), _LORA_ONLY] = (
        "query",
        "value",
    )
    # Dropout of embeddings and of each block's output.
    hidden_dropout_prob: Share = 0.1
    # Dropout of attention probabilities.
    attention_probs_dropout_prob: Share = 0.1
    # Dropout of the head's input.
    head_dropout_prob: Share = 0.1
    # Type of activations and matrix products.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"


# Settings that not all kinds of tasks have, with their defaults.
_KIND_SETTINGS = {
    "class_weights": "none",
    "adapt.features": "",
    "adapt.pooling": "",
    "vectors": Vectors(),
    "sparse": SparseVectors(),
    "multi_vector": MultiVectors(),
}


def _default_optimizer() -> Optimizer:
    # With bias correction; without it, training on few examples often fails (Mosbach et al. 2021).
    return Optimizer(name="adamw", peak_learning_rate=5e-5, warmup_steps=0, schedule="linear")


def _default_run() -> Run:
    # A few thousand examples give a few hundred steps.
    return Run(log_every=50, eval_every=250, checkpoint_every=250, eval_batch_size=64)


@dataclass(frozen=True, kw_only=True)
class Finetuning(Section, role="identity", label="finetuning"):
    """All settings of a fine-tuning."""

    # Name of the run and of its folder runs/NAME.
    name: FolderName
    # Seed of every random draw: the head's weights, order and dropout.
    seed: Seed = 0
    # The base or run whose encoder is adapted; `--from` sets it.
    init_from: str = ""
    task: Task
    adapt: Adapt = field(default_factory=Adapt)
    vectors: Vectors = field(default_factory=Vectors)
    sparse: SparseVectors = field(default_factory=SparseVectors)
    multi_vector: MultiVectors = field(default_factory=MultiVectors)
    # Passes over the training examples, with all rows of long ones (tag, span).
    epochs: Positive = 3.0
    # Early stopping after this many evaluations in a row without a lower held-out loss; 0: never.
    patience: Count = 0
    # Weights of the examples in the loss: none: all equal; balanced: each label has the same total
    # weight, however frequent it is.
    class_weights: Literal["none", "balanced"] = "none"
    # Examples per step, over all devices; for tag and span rows, since long examples have several.
    batch_size: PositiveCount = 32
    # Share of all steps in which the learning rate rises.
    warmup_share: Share = 0.1
    optimizer: Optimizer = field(default_factory=_default_optimizer)
    parallelism: Parallelism = field(default_factory=Parallelism)
    run: Run = field(default_factory=_default_run)

    def _problems(self) -> Iterator[Problem]:
        spec, how, optimizer = self.task.spec, self.adapt.how, self.optimizer
        for name, default in _KIND_SETTINGS.items():
            if name not in spec.settings and self._value_of(name) != default:
                kinds = ", ".join(kinds_with(name))
                yield name, f"not for task.kind={self.task.kind}, only for {kinds}; remove it"
        if spec.adapt_methods and how not in spec.adapt_methods:
            yield (
                "adapt.how",
                f"not for task.kind={self.task.kind}; set it to {spec.adapt_methods[0]}",
            )
        if "vectors" in spec.settings:
            yield from self._vector_problems()
        elif spec.makes_vectors:
            yield from self._retriever_problems()
        for name in ("watch", "probes", "corpus_dir", "replay_every"):
            if getattr(self.run, name):
                yield f"run.{name}", "only for pre-training; remove it"
        if optimizer.warmup_steps:
            # An Optimizer without warmup_steps has 10,000.
            yield "optimizer.warmup_steps", "must be 0: warmup_share sets the warm-up"
        if optimizer.schedule == "wsd":
            why = "not for fine-tuning, whose steps follow from the examples; choose another"
            yield "optimizer.schedule", why
        if optimizer.clip == "per_replica":
            yield "optimizer.clip", "not for fine-tuning; set it to global"
        if optimizer.layer_decay < 1 and how != "full":
            yield "optimizer.layer_decay", f"adapt.how={how} trains no layer; set it to 1"
        if self.parallelism.state != "replicated" and how != "full":
            yield "parallelism.state", f"adapt.how={how} has little state; set it to replicated"
        parts = self.parallelism.accumulation
        if len(parts) != 1 or self.batch_size % parts[0]:
            why = f"give one number that divides batch_size={self.batch_size}"
            yield "parallelism.accumulation", why

    def _vector_problems(self) -> Iterator[Problem]:
        task, loss = self.task, self.vectors.loss
        reads_corpus = task.train[0].startswith("corpus:")
        if reads_corpus and loss != "contrastive":
            yield "task.train", f"vectors.loss={loss}: give tables; a corpus has no scores"
        reads_pairs = not reads_corpus and loss != "distil"
        if (reads_pairs or not task.is_scored_by_retrieval) and not task.second_column:
            yield "task.second_column", "name the column of the text to compare with the first"
        if task.negative_column and (reads_corpus or loss != "contrastive"):
            yield "task.negative_column", "only for tables with vectors.loss=contrastive; remove it"
        if loss == "contrastive" and self.batch_size < 2:
            yield "batch_size", "a text is compared with the others of its step; set it to more"

    def _retriever_problems(self) -> Iterator[Problem]:
        loss = self._value_of(f"{self.task.kind}.loss")
        if self.task.negative_column and loss != "contrastive":
            why = f"only for {self.task.kind}.loss=contrastive; give all texts in second_column"
            yield "task.negative_column", why
        if loss == "contrastive" and self.batch_size < 2:
            yield "batch_size", "a text is compared with the others of its step; set it to more"
        length, longest = self.multi_vector.query_length, self.task.max_sequence_length
        if self.task.kind == "multi_vector" and not (length == 0 or 3 <= length <= longest):
            why = f"must be 0, or from 3 to task.max_sequence_length={longest}"
            yield "multi_vector.query_length", why
