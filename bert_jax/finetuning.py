"""The claim a fine-tuning makes: a task, and how a base is adapted to it.

Fine-tuning is section 3.2 and appendix A.3 of Devlin et al. 2018; `lora` is Hu et al. 2021, the
decay of the learning rate by layer Howard and Ruder 2018 and Clark et al. 2020.
"""

from dataclasses import dataclass, field
from typing import Literal

from bert_jax.section import InputError, Section
from bert_jax.sections import Mesh, Optimizer, Run

Kind = Literal["classify", "pair", "regress", "choice", "tag", "span"]

# What each kind of task can be scored by, the first unless another is named.
SCORES: dict[str, tuple[str, ...]] = {
    "classify": ("accuracy", "f1", "macro_f1", "micro_f1", "matthews"),
    "pair": ("accuracy", "f1", "macro_f1", "micro_f1", "matthews"),
    "regress": ("spearman", "pearson"),
    "choice": ("accuracy",),
    "tag": ("entity_f1", "accuracy"),
    "span": ("f1", "exact_match"),
}

_SOURCES = ("tsv", "csv", "jsonl", "conll", "squad", "tfds")


@dataclass(frozen=True, kw_only=True)
class Task(Section):
    """What is asked of a text, and where examples of it are.

    A source is `tsv:FILE`, `csv:FILE`, `jsonl:FILE`, `conll:FILE`, `squad:FILE` or
    `tfds:NAME:SPLIT` (`tfds:glue/sst2:train`); relative paths are relative to the current
    directory. Columns are named as the file's first line names them, or as JSON and TFDS do, or,
    where there is no such line and in CoNLL files, by their numbers from 0.
    """

    kind = "identity"
    label = "task"

    shape: Kind
    train: tuple[str, ...]
    validation: tuple[str, ...]
    header: Literal["first_line", "none"] = "first_line"
    text_column: str = "sentence"
    # The second text of a pair.
    second_column: str = ""
    # The texts to choose from, each a column; the first is answer 0.
    choice_columns: tuple[str, ...] = ()
    label_column: str = "label"
    # In this order; none: those of the training examples, sorted.
    labels: tuple[str, ...] = ()
    # The one that decides; empty: the usual one of the shape.
    score: str = ""
    max_sequence_length: int = 128
    # Pieces that windows over a long context move on by, of a question's that are kept, and of an
    # answer's at most.
    document_stride: int = 128
    max_query_length: int = 64
    max_answer_length: int = 30
    # Whether there may be no answer (SQuAD 2.0).
    no_answer: Literal["never", "possible"] = "never"

    def _validate(self) -> None:
        for name in ("train", "validation"):
            sources = getattr(self, name)
            self._require(len(sources) > 0, name, "name at least one source of examples")
            for source in sources:
                word, colon, rest = source.partition(":")
                if not colon or not rest or word not in _SOURCES:
                    raise InputError(
                        f"task.{name}: {source!r} is not tsv:FILE, csv:FILE, jsonl:FILE, "
                        "conll:FILE, squad:FILE or tfds:NAME:SPLIT"
                    )
                if (self.shape == "span") != (word in ("squad", "tfds") and self.shape == "span"):
                    raise InputError(f"task.{name}: {source!r} holds no answers in contexts")
                if word == "conll" and self.shape != "tag":
                    raise InputError(f"task.{name}: {source!r} holds words with tags alone")
        self._require(
            (self.second_column != "") == (self.shape == "pair")
            or (self.shape == "regress" and self.second_column != ""),
            "second_column",
            "a pair has two texts, other tasks have none",
        )
        self._require(
            (len(self.choice_columns) >= 2) == (self.shape == "choice"),
            "choice_columns",
            "task.shape=choice needs two at least, other tasks have none",
        )
        self._require(
            self.score in ("", *SCORES[self.shape]),
            "score",
            f"task.shape={self.shape} is scored by {', '.join(SCORES[self.shape])}",
        )
        self._require(
            len(set(self.labels)) == len(self.labels), "labels", "one is named more than once"
        )
        self._require_at_least(8, "max_sequence_length")
        self._require_at_least(1, "document_stride", "max_query_length", "max_answer_length")

    @property
    def main_score(self) -> str:
        """The score that decides."""
        return self.score or SCORES[self.shape][0]


@dataclass(frozen=True, kw_only=True)
class Adapt(Section):
    """What of a base learns a task.

    `full`: everything. `frozen`: the task's own head alone. `lora`: the head, and for each of
    `lora_targets` in every layer two thin matrices whose product is added to the kernel.
    """

    kind = "identity"
    label = "adapt"

    how: Literal["full", "frozen", "lora"] = "full"
    lora_rank: int = 8
    lora_alpha: float = 16.0
    lora_targets: tuple[str, ...] = ("query", "value")
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    # Of what the head reads.
    head_dropout_prob: float = 0.1
    compute_dtype: Literal["float32", "bfloat16"] = "float32"

    def _validate(self) -> None:
        self._require_at_least(1, "lora_rank")
        self._require(self.lora_alpha > 0, "lora_alpha", "must be positive")
        self._require_share(
            "hidden_dropout_prob", "attention_probs_dropout_prob", "head_dropout_prob"
        )
        for name in self.lora_targets:
            if name not in LORA_TARGETS:
                raise InputError(
                    f"adapt.lora_targets: {name!r} is none of {', '.join(LORA_TARGETS)}"
                )


# Of a layer, what has a kernel.
LORA_TARGETS = ("query", "key", "value", "attention_output", "intermediate", "output")


def _usual_update() -> Optimizer:
    # With bias correction: without, small sets often fail to train (Mosbach et al. 2021).
    return Optimizer(name="adamw", peak_learning_rate=5e-5, warmup_steps=0, schedule="linear")


@dataclass(frozen=True, kw_only=True)
class Finetuning(Section):
    """One fine-tuning: all a run needs to know but the base, which the command names."""

    kind = "identity"
    label = "finetuning"

    name: str
    seed: int = 0
    # A base or a run, whose encoder is adapted; `--from` names it.
    init_from: str = ""
    task: Task
    adapt: Adapt = field(default_factory=Adapt)
    epochs: float = 3.0
    batch_size: int = 32
    # Of all steps, those in which the learning rate rises.
    warmup_share: float = 0.1
    optimizer: Optimizer = field(default_factory=_usual_update)
    mesh: Mesh = field(default_factory=Mesh)
    run: Run = field(default_factory=Run)

    def _validate(self) -> None:
        self._require_folder_name("name")
        self._require(0 <= self.seed < 2**32, "seed", "must be in [0, 2**32)")
        self._require(self.epochs > 0, "epochs", "must be positive")
        self._require_at_least(1, "batch_size")
        self._require_share("warmup_share")
        for where, value, wanted in (
            ("optimizer.warmup_steps", self.optimizer.warmup_steps, 0),
            ("optimizer.clip", self.optimizer.clip == "per_replica", False),
        ):
            if value != wanted:
                raise InputError(
                    f"{where}: not for fine-tuning, where warmup_share counts the steps and a "
                    "gradient is clipped as a whole"
                )
        if self.optimizer.layer_decay < 1 and self.adapt.how != "full":
            raise InputError(
                f"optimizer.layer_decay={self.optimizer.layer_decay}: adapt.how={self.adapt.how} "
                "has no layers that learn; leave it at 1"
            )
        if len(self.mesh.accumulation) != 1 or self.batch_size % self.mesh.accumulation[0]:
            raise InputError(
                f"mesh.accumulation={self.mesh.accumulation}: give one number that divides "
                f"batch_size={self.batch_size}"
            )
