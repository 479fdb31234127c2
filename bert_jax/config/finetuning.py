"""The sections of a fine-tuning: a task, how a base is adapted to it, and which vectors it learns.

Fine-tuning is section 3.2 and appendix A.3 of Devlin et al. 2018; `lora` is Hu et al. 2021, the
decay of the learning rate by layer Howard and Ruder 2018 and Clark et al. 2020.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from bert_jax.config.fields import (
    Count,
    FieldRule,
    FolderName,
    Positive,
    PositiveCount,
    RequiresValue,
    RowLength,
    Section,
    Seed,
    Share,
    Wrong,
    among,
    at_least,
)
from bert_jax.config.pretraining import Optimizer, Parallelism, Run
from bert_jax.errors import InputError

Kind = Literal[
    "classify", "pair", "regress", "choice", "tag", "span", "generate", "minimal_pairs", "similar"
]

# What a tagger reads of a frozen encoder; empty: nothing, a linear head does.
Features = Literal[
    "", "embeddings", "last", "second_to_last", "sum_last_four", "concat_last_four", "mixed"
]

# What each kind of task can be scored by, the first unless another is named.
SCORES: dict[str, tuple[str, ...]] = {
    "classify": ("accuracy", "f1", "macro_f1", "micro_f1", "matthews"),
    "pair": ("accuracy", "f1", "macro_f1", "micro_f1", "matthews"),
    "regress": ("spearman", "pearson"),
    "choice": ("accuracy",),
    "tag": ("entity_f1", "accuracy"),
    "span": ("f1", "exact_match"),
    "generate": ("chrf", "bleu"),
    "minimal_pairs": ("accuracy",),
    # The first of pairs with a score, of `beir` one of the others.
    "similar": ("spearman", "pearson", "ndcg@10", "mrr@10", "recall@10", "recall@1"),
}

_TABLES = ("tsv", "csv", "jsonl", "tfds")
# Where examples of each kind of task can be read from.
SOURCES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(SCORES, _TABLES),
    "tag": ("conll", "jsonl", "tfds"),
    "span": ("squad", "tfds"),
    "similar": (*_TABLES, "corpus", "beir"),
}
# Of these the last part is no path: a split, or how pairs are made.
_ENDS = {"tfds": "NAME:SPLIT", "corpus": "WORKDIR:HOW", "beir": "FOLDER:SPLIT"}

_OF_TWO_TEXTS = ("pair", "regress", "minimal_pairs")
_OF_LABELS = ("classify", "pair", "choice", "tag")
_OF_SIMILAR = Annotated[str, RequiresValue("kind", ("similar",))]
# Of other kinds these were never refused; by a whole path they are noted.
_OF_GENERATE, _OF_SPAN = (
    RequiresValue("task.kind", ("generate",)),
    RequiresValue("task.kind", ("span",)),
)
_OF_LORA = RequiresValue("adapt.how", ("lora",))


def _all_but(kind: str) -> RequiresValue:
    return RequiresValue("kind", tuple(other for other in SCORES if other != kind))


@dataclass(frozen=True, kw_only=True)
class Task(Section, role="identity", label="task"):
    """The question that is asked of a text, and where examples of it are.

    `SOURCES` says what is read for which kind; relative paths are relative to the current
    directory. Columns are named as the file's first line names them, or as JSON and TFDS do, or,
    where there is no such line and in CoNLL files, by their numbers from 0. Those of a span are
    SQuAD's, whatever is named here.

    `similar` also learns from `corpus:WORKDIR:HOW`, pairs of texts of a corpus that `prepare`
    wrote: `neighbours` (what ends with a sentence, and what begins with the next), `crops` (two
    pieces of a passage) or `twice` (a passage, and itself under dropout).

    Minimal pairs are those of Warstadt et al. 2020.
    """

    # What is predicted: a label of a text, a label or number of a pair, one of several texts,
    # a label of each word, a span of a context, another text, which of two texts is the acceptable
    # one, or a vector of a text, near to those of similar ones.
    kind: Kind
    # Sources of examples to learn from: tsv:FILE, csv:FILE, jsonl:FILE, conll:FILE, squad:FILE or
    # tfds:NAME:SPLIT, and of similar ones corpus:WORKDIR:HOW; of minimal pairs none.
    train: Annotated[tuple[str, ...], _all_but("minimal_pairs")] = ()
    # Sources of examples to score on; of similar ones also beir:FOLDER:SPLIT.
    validation: tuple[str, ...]
    # Whether a broken row is an error, or left out and counted: one with a blank text or label,
    # with more or fewer columns than the others, or with a label that `labels` does not name.
    broken_rows: Literal["stop", "skip"] = "stop"
    # Whether a TSV or CSV file's first line names its columns.
    header: Literal["first_line", "none"] = "first_line"
    # The text, or the first of two; of minimal pairs the acceptable one.
    text_column: str = "sentence"
    # The second text of a pair, and of a regression, which is over pairs; of minimal pairs the one
    # that is not acceptable.
    second_column: Annotated[str, RequiresValue("kind", (*_OF_TWO_TEXTS, "similar"))] = ""
    # For similar: a text that is near, and no answer; empty: none.
    negative_column: _OF_SIMILAR = ""
    # For similar: what is put before a text that asks: the first of two, and a query.
    query_prefix: _OF_SIMILAR = ""
    # For similar: what is put before all other texts.
    text_prefix: _OF_SIMILAR = ""
    # The texts to choose from, each a column; the first is answer 0.
    choice_columns: Annotated[tuple[str, ...], RequiresValue("kind", ("choice",))] = ()
    # The answer; of generate the text that is to be written; of minimal pairs the paradigm that
    # they belong to.
    label_column: str = "label"
    # For minimal pairs: the column with the field of several paradigms, such as syntax; empty:
    # none.
    field_column: Annotated[str, RequiresValue("kind", ("minimal_pairs",))] = ""
    # All labels, in order; label 1 is the positive one of `f1`; empty: those of the training
    # examples, sorted. For a choice, names of the answers; empty: 0, 1, and so on.
    labels: Annotated[tuple[str, ...], RequiresValue("kind", _OF_LABELS)] = ()
    # The score that runs are compared by; empty: the usual one of the kind.
    score: str = ""
    # The most tokens in a row; longer texts are cut, or read in windows.
    max_sequence_length: RowLength = 128
    # For generate: the most pieces in a text that is written, with its end; longer ones are cut.
    max_target_length: Annotated[RowLength, _OF_GENERATE] = 128
    # For span: a long context is read in windows, each so many pieces after the last (SQuAD: 128
    # with rows of 384).
    document_stride: Annotated[PositiveCount, _OF_SPAN] = 128
    # For span: pieces of a question that are kept.
    max_query_length: Annotated[PositiveCount, _OF_SPAN] = 64
    # For span: the most pieces in an answer.
    max_answer_length: Annotated[PositiveCount, _OF_SPAN] = 30
    # For span: whether there may be no answer (SQuAD 2.0).
    no_answer: Annotated[Literal["never", "possible"], _OF_SPAN] = "never"

    @property
    def main_score(self) -> str:
        """The score that decides."""
        if self.kind == "similar" and self.ranks:
            return self.score or "ndcg@10"
        return self.score or SCORES[self.kind][0]

    @property
    def ranks(self) -> bool:
        """Tells whether queries are scored by the texts that they find."""
        return all(source.startswith("beir:") for source in self.validation)

    @property
    def has_labels(self) -> bool:
        """Returns whether one of several labels is predicted."""
        return self.kind in _OF_LABELS

    @property
    def text_columns(self) -> tuple[str, ...]:
        """The columns of an example's texts, in the order in which the encoder reads them."""
        if self.kind in _OF_TWO_TEXTS:
            return self.text_column, self.second_column
        more = (self.second_column, self.negative_column) if self.kind == "similar" else ()
        return self.text_column, *self.choice_columns, *filter(None, more)

    @property
    def label_columns(self) -> tuple[str, ...]:
        """The columns that are read with labels, next to those of texts."""
        return (self.label_column, *((self.field_column,) if self.field_column else ()))

    def for_files(self, **fields: Any) -> "Task":
        """Returns the task for files that are written otherwise than its own, with these fields.

        `train` and `validation` are not checked again, since their columns are others.
        """
        if "second_column" in fields and self.kind not in (*_OF_TWO_TEXTS, "similar"):
            self._refuse("kind", "has no second text; remove --second")
        task = copy.copy(self)
        for name, value in fields.items():
            object.__setattr__(task, name, value)
        return task

    def require_readable(
        self, where: str, sources: tuple[str, ...], columns: tuple[str, ...]
    ) -> None:
        """Raises InputError, which names `where`, unless columns can be read from each source."""
        for source in sources:
            word, _, place = source.partition(":")
            # The name of a dataset may end in a colon and its version.
            parts = place.rpartition(":")[::2] if word in _ENDS else [place]
            known = SOURCES[self.kind]
            if word not in known or not all(parts):
                forms = " or ".join(f"{word}:{_ENDS.get(word, 'FILE')}" for word in known)
                raise InputError(f"{where}: {source!r}: task.kind={self.kind} reads {forms}")
            numbered = word == "conll" or (word in ("tsv", "csv") and self.header == "none")
            for column in columns:
                if numbered and not (column.isascii() and column.isdecimal()):
                    raise InputError(
                        f"{where}: {source!r} has no names of columns: give task.text_column, "
                        f"task.label_column and others as numbers from 0, not {column!r}"
                    )

    def _wrong(self) -> Iterator[Wrong]:
        kind = f"task.kind={self.kind}"
        yield from self._wrong_columns()
        yield from self._wrong_labels()
        for name, alone, never in (("train", "corpus", "beir"), ("validation", "beir", "corpus")):
            sources = getattr(self, name)
            words = [source.partition(":")[0] for source in sources]
            if not sources and (self.kind, name) != ("minimal_pairs", "train"):
                yield name, "name at least one source"
            self.require_readable(f"task.{name}", sources, self.text_columns + self.label_columns)
            if never in words:
                yield name, f"{never}: is not for this; {kind} reads tables there, too"
            if alone in words and len(words) > 1:
                yield name, f"{alone}: is read alone; remove the others"
        if self.score not in ("", *SCORES[self.kind]):
            yield "score", f"{kind} is scored by {', '.join(SCORES[self.kind])}"
        # [CLS], a question and two [SEP] leave a window its room for the context.
        room = self.max_sequence_length - self.max_query_length - 3
        whole = f"task.max_sequence_length={self.max_sequence_length}, which is usually 384,"
        if self.kind == "span" and room <= 0:
            yield "max_query_length", f"{whole} has no room for a context next to it"
        if self.kind == "span" and self.document_stride > room:
            why = f"{whole} has room for {room} tokens next to a question, which has up to "
            yield "document_stride", f"{why}task.max_query_length={self.max_query_length}"

    def _wrong_columns(self) -> Iterator[Wrong]:
        if self.kind in _OF_TWO_TEXTS and not self.second_column:
            example = "hypothesis" if self.text_column == "premise" else "text_b"
            why = f"task.kind={self.kind}: name the column of the second text, {example} say"
            yield "second_column", why
        if self.kind == "choice" and len(self.choice_columns) < 2:
            yield "choice_columns", "task.kind=choice needs two at least"
        columns = self.text_columns + self.label_columns
        if "" in columns or len(set(columns)) < len(columns):
            yield "text_column", f"of {columns} none may be empty, or named twice"

    def _wrong_labels(self) -> Iterator[Wrong]:
        labels, choices = self.labels, len(self.choice_columns)
        if len(set(labels)) < len(labels):
            yield "labels", "one is named more than once"
        # As they are read.
        if not all(label and label == label.strip() for label in labels):
            yield "labels", "one is empty, or has blanks around it"
        if self.kind == "choice" and len(labels) not in (0, choices):
            yield "labels", f"name one for each of the {choices} choices, or none"
        if len(labels) == 1:
            yield "labels", "name two at least, or none"


# Of a layer, what has a kernel; model.kind=modern alone has gates.
LORA_TARGETS = ("query", "key", "value", "attention_output", "intermediate", "gate", "output")


@dataclass(frozen=True, kw_only=True)
class Adapt(Section, role="identity", label="adapt"):
    """The parts of a base that learn a task.

    An addition of `lora` is the product of two thin matrices. The BiLSTM layers of `features` are
    each as wide as the encoder: on a frozen one those of Devlin et al. 2018, Table 7; on one that
    learns, the BiLSTM of their Table 5. `mixed` is ELMo's (Peters et al. 2018).
    """

    # What learns: everything, the head alone, or the head and low-rank additions.
    how: Literal["full", "frozen", "lora"] = "full"
    # For task.kind=tag: puts two BiLSTM layers below the head, and says which of the encoder's they
    # read: one, several, or all mixed by learned weights; empty: no BiLSTM layers, the head reads
    # the last layer.
    features: Features = ""
    # What a head over whole texts reads: the vector of [CLS] (of an encoder from left to right, of
    # the last [SEP]), or the mean of all pieces; empty: as the base's own head does, else cls.
    pooling: Literal["", "cls", "mean"] = ""
    # With how=lora: rank of the low-rank additions.
    lora_rank: Annotated[PositiveCount, _OF_LORA] = 8
    # With how=lora: the additions are scaled by lora_alpha / lora_rank.
    lora_alpha: Annotated[Positive, _OF_LORA] = 16.0
    # With how=lora: the kernels of each layer that have an addition.
    lora_targets: Annotated[tuple[str, ...], among(LORA_TARGETS), _OF_LORA] = ("query", "value")
    # Dropout of embeddings and of what each layer adds.
    hidden_dropout_prob: Share = 0.1
    # Dropout of attention probabilities.
    attention_probs_dropout_prob: Share = 0.1
    # Dropout of what the head reads.
    head_dropout_prob: Share = 0.1
    # Type of activations and matrix products.
    compute_dtype: Literal["float32", "bfloat16"] = "float32"


_Dimensions = Annotated[
    tuple[int, ...],
    FieldRule(lambda sizes: list(sizes) == sorted({*sizes}), "must grow, none twice"),
    FieldRule(lambda sizes: all(size > 0 for size in sizes), "each must be at least 1"),
]
_CONTRASTIVE, _COSINE, _DISTIL = (
    RequiresValue("loss", (x,)) for x in ("contrastive", "cosine", "distil")
)


@dataclass(frozen=True, kw_only=True)
class Vectors(Section, role="identity", label="vectors"):
    """The vectors that a `similar` task learns, one a text (Reimers and Gurevych 2019).

    `contrastive` tells the text of `second_column`, or what a corpus says belongs to the first,
    from all other texts of the step, in both directions. `cosine` learns a number for two texts,
    `distil` a teacher's vectors.
    """

    # The mean of all pieces, or the vector of the first or the last piece; empty: as the base says
    # of itself, else mean.
    pooling: Literal["", "mean", "cls", "last"] = ""
    # What is learned of the vectors.
    loss: Literal["contrastive", "cosine", "distil"] = "contrastive"
    # For contrastive: by which cosines are divided.
    temperature: Annotated[Positive, _CONTRASTIVE] = 0.05
    # For contrastive: whether the temperature learns, too.
    temperature_is: Annotated[Literal["fixed", "learned"], _CONTRASTIVE] = "fixed"
    # Matryoshka (Kusupati et al. 2022): the loss is the sum over vectors cut to so many numbers;
    # empty: whole ones.
    dimensions: Annotated[_Dimensions, RequiresValue("loss", ("contrastive", "cosine"))] = ()
    # For cosine: the lowest and the highest score, which stand for cosines of 0 and 1.
    score_range: Annotated[tuple[float, ...], _COSINE] = (0.0, 1.0)
    # For distil: a base or run whose vectors are learned, or a .npz file with one for each training
    # example, as `embed` writes it.
    teacher: Annotated[str, _DISTIL] = ""
    # For distil: a linear layer between vectors and the teacher's, thrown away in the end: where
    # their widths differ.
    projection: Annotated[Literal["none", "linear"], _DISTIL] = "none"
    # For distil: the weight of the cosines between all texts of a step, which should be the
    # teacher's.
    geometry: Annotated[float, at_least(0), _DISTIL] = 0.0

    def _wrong(self) -> Iterator[Wrong]:
        low_high = self.score_range
        if len(low_high) != 2 or low_high[0] >= low_high[1]:
            yield "score_range", "give the lowest and the highest score, (0, 5) say"
        if self.loss == "distil" and not self.teacher:
            yield "teacher", "vectors.loss=distil: name a base, a run or a .npz file of vectors"


def _usual_update() -> Optimizer:
    # With bias correction: without, small sets often fail to train (Mosbach et al. 2021).
    return Optimizer(name="adamw", peak_learning_rate=5e-5, warmup_steps=0, schedule="linear")


def _usual_run() -> Run:
    # A few thousand examples are a few hundred steps.
    return Run(log_every=50, eval_every=250, checkpoint_every=250, eval_batch_size=64)


@dataclass(frozen=True, kw_only=True)
class Finetuning(Section, role="identity", label="finetuning"):
    """One fine-tuning: all a run needs to know but the base, which the command names."""

    # Names the run, and its folder runs/NAME.
    name: FolderName
    # Seed of every random draw: the head's weights, order and dropout.
    seed: Seed = 0
    # A base or a run, whose encoder is adapted; `--from` names it.
    init_from: str = ""
    task: Task
    adapt: Adapt = field(default_factory=Adapt)
    vectors: Vectors = field(default_factory=Vectors)
    # Passes over the training examples, all rows of long ones (tag, span) among them.
    epochs: Positive = 3.0
    # The run ends after so many evaluations in a row without a lower held-out loss; 0: it does not.
    patience: Count = 0
    # How examples count in the loss: none: all alike; balanced: each label as much as any other,
    # however often it comes.
    class_weights: Literal["none", "balanced"] = "none"
    # Examples a step, over all devices; rows where long ones are several (tag, span).
    batch_size: PositiveCount = 32
    # Share of all steps in which the learning rate rises.
    warmup_share: Share = 0.1
    optimizer: Optimizer = field(default_factory=_usual_update)
    parallelism: Parallelism = field(default_factory=Parallelism)
    run: Run = field(default_factory=_usual_run)

    def _wrong(self) -> Iterator[Wrong]:
        kind, how, optimizer = self.task.kind, self.adapt.how, self.optimizer
        if self.class_weights != "none" and kind not in ("classify", "pair", "tag"):
            yield "class_weights", f"task.kind={kind} has no labels to weigh; remove it"
        if self.adapt.features and kind != "tag":
            yield "adapt.features", f"not for task.kind={kind}, only for tag; remove it"
        if self.adapt.pooling and kind not in ("classify", "pair", "regress", "choice"):
            yield "adapt.pooling", f"not for task.kind={kind}, which no one vector is read for"
        yield from self._wrong_vectors()
        if kind == "generate" and how != "full":
            yield "adapt.how", "task.kind=generate learns everything; set it to full"
        for name in ("watch", "probes", "corpus_dir", "replay_every"):
            if getattr(self.run, name):
                yield f"run.{name}", "only for pre-training; remove it"
        if optimizer.warmup_steps:
            # 10,000 is what an Optimizer has unless it is named.
            yield "optimizer.warmup_steps", "must be 0: warmup_share counts the steps"
        if optimizer.schedule == "wsd":
            why = "not for fine-tuning, whose steps follow from its examples; choose another"
            yield "optimizer.schedule", why
        if optimizer.clip == "per_replica":
            yield "optimizer.clip", "not for fine-tuning; set it to global"
        if optimizer.layer_decay < 1 and how != "full":
            yield "optimizer.layer_decay", f"adapt.how={how} trains no layer; set it to 1"
        if self.parallelism.state != "replicated" and how != "full":
            yield "parallelism.state", f"adapt.how={how} learns little, whole on each device"
        parts = self.parallelism.accumulation
        if len(parts) != 1 or self.batch_size % parts[0]:
            why = f"give one number that divides batch_size={self.batch_size}"
            yield "parallelism.accumulation", why

    def _wrong_vectors(self) -> Iterator[Wrong]:
        task, loss = self.task, self.vectors.loss
        if task.kind != "similar":
            if self.vectors != Vectors():
                yield "vectors", f"not for task.kind={task.kind}, only for similar; remove it"
            return
        by_loss = f"vectors.loss={loss}"
        of_corpus = task.train[0].startswith("corpus:")
        if of_corpus and loss != "contrastive":
            yield "task.train", f"{by_loss} reads tables: a corpus has no scores and no teacher"
        reads_pairs = not of_corpus and loss != "distil"
        if (reads_pairs or not task.ranks) and not task.second_column:
            yield "task.second_column", "name the column of the text to compare with the first"
        if task.negative_column and (of_corpus or loss != "contrastive"):
            yield "task.negative_column", "only for tables with vectors.loss=contrastive"
        if loss == "contrastive" and self.batch_size < 2:
            yield "batch_size", "a text is compared with the others of its step; take more"
        if self.adapt.how == "frozen":
            yield "adapt.how", "task.kind=similar has no head; set it to full or lora"
