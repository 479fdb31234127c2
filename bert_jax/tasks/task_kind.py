"""The base class of the kinds of tasks, and the data of a fine-tuning run.

Each kind is a class in a module of this package; `config.task_kinds.KINDS` lists these classes.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from bert_jax.checkpoints.base import Base
from bert_jax.config import Finetuning, Task, source_name
from bert_jax.embeddings import packing
from bert_jax.embeddings.retrieval import Passage
from bert_jax.embeddings.text_pairs import CorpusPairs
from bert_jax.errors import prefix_errors
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import scores as scores_lib
from bert_jax.tasks.examples import Example, Sentence, Tally
from bert_jax.tasks.rows import Batch, TaskBatches, TaskRows, balanced_weights
from bert_jax.tasks.task_objective import Learns, Reads, TaskObjective
from bert_jax.text.tokenizer import Tokenizer

Answer = dict[str, Any]
Answers = list[Answer]
# The results of the head for each row: float32 [outputs] for the pooled text, or float32
# [n, outputs] for its n tokens, or the token ids that a decoder writes.
Outputs = list[np.ndarray]
Scores = dict[str, float]

# Maximum number of recorded mistakes and confusions, and of characters of a text.
_MAX_LISTED, _MAX_CHARACTERS = 20, 400


class ComparedAnswer(NamedTuple):
    """A prediction compared with the truth."""

    truth: Sequence[str]  # one label, number or text; for tags, the label of each wrong word
    predicted: Sequence[str]  # as long as `truth`
    error: float  # 0 if right; larger is worse: 1 - F1, a distance, or a number of wrong words


class SourceExamples(NamedTuple):
    """The examples of one of several sources, and their rows."""

    name: str
    first: int  # index of its first row among the rows of all sources
    rows: TaskRows
    examples: Sequence[Any]


class TaskKind:
    """A kind of task, for one tokenizer and one set of labels."""

    reads: Reads = "pooled"  # input of the head
    output_count = 0  # number of the head's outputs; 0: one for each label
    learns: Learns = "labels"  # determines the loss, see `tasks.task_objective`
    rows_per_example = 1  # consecutive rows with one answer, such as one for each candidate
    # The field of an answer that `predict --input` adds to a row of the table; "": `label` and its
    # probability.
    answer_field = ""
    duplicates_must_agree = False  # whether equal texts must have equal labels
    objective_class: type[TaskObjective] = TaskObjective

    # (task, location, cells of texts, cells of labels or []) -> example
    parse_cells: Callable[..., Example] = staticmethod(examples_lib.sentence_from_cells)

    def __init__(self, task: Task, labels: tuple[str, ...], tokenizer: Tokenizer):
        self.task, self.labels, self.tokenizer = task, labels, tokenizer
        self.output_count = self.output_count or len(labels)

    @staticmethod
    def parse_texts(location: str, number: int, texts: Sequence[str]) -> Example:
        """Returns an unlabelled example of given texts; `number` becomes the id of a question."""
        return Sentence(location, tuple(texts), None)

    @staticmethod
    def parse_passages(passages: Sequence[Passage]) -> Iterable[Example]:
        """Returns the examples that the passages of a BEIR folder make."""
        return passages

    @classmethod
    def require_libraries(cls) -> None:
        """Raises InputError unless the libraries for the scores are installed."""

    # --- training -------------------------------------------------------------------------------

    @classmethod
    def read_training(
        cls, experiment: Finetuning, base: Base, tally: Tally, run_teacher: bool = True
    ) -> "TrainingSet":
        """Reads the training examples; `tally` counts them.

        A kind that learns from another model runs this teacher here if `run_teacher`.
        """
        task = experiment.task
        examples = examples_lib.read(task, task.train, "labelled", tally)
        labels = examples_lib.find_labels(task, examples)
        kind = cls(task, labels, base.tokenizer)
        rows = kind.rows(examples)
        batches = TaskBatches(rows, base.tokenizer.pad_id, experiment.batch_size, experiment.seed)
        text_keys = frozenset(map(examples_lib.text_key, examples))
        return TrainingSet(kind, len(examples), batches, rows, examples, labels, text_keys)

    def make_objective(
        self, experiment: Finetuning, base: Base, class_weights: Sequence[float] = ()
    ) -> TaskObjective:
        """Returns the objective of the task for a base."""
        adapt = experiment.adapt
        if base.head is not None and self.task.kind in base.head.kinds:
            adapt = dataclasses.replace(adapt, pooling=adapt.pooling or base.head.pooling)
        return self.objective_class(
            *(base.model, self.learns, self.reads, self.output_count, self.rows_per_example, adapt),
            fresh_parts=base.fresh,
            class_weights=tuple(class_weights),
            **self.objective_fields(experiment, base),
        )

    def objective_fields(self, experiment: Finetuning, base: Base) -> dict[str, Any]:
        """Returns the arguments of `objective_class` that only some kinds have."""
        return {}

    def adjust_base(
        self, base: Base, objective: TaskObjective, rows: TaskRows | None
    ) -> tuple[Base, str]:
        """Returns the base with the weights that training starts from, and a line about changes.

        `rows` are those of the training examples. The line is "" if nothing has changed.
        """
        return base, ""

    def packs_rows(self, on_cpu: bool) -> bool:
        """Returns whether several texts share a row in training, so that few tokens are padding.

        They do in kinds that train vectors (`vectors`, and `masked_lm` for sparse ones). In kinds
        with a head on pooled states they do on CPUs only, since the speed on GPUs and TPUs is not
        known. It is not implemented for kinds that use the state of each token.
        """
        return self.reads in ("vectors", "masked_lm") or (on_cpu and self.reads == "pooled")

    # --- rows and answers -----------------------------------------------------------------------

    def encode(self, text: str, location: str) -> list[int]:
        """Returns the token ids of a text; errors begin with `location`."""
        with prefix_errors(location):
            return self.tokenizer.encode(text)

    def rows(self, examples: Sequence[Any]) -> TaskRows:
        """Returns the rows of examples, with targets if the examples have labels."""
        raise NotImplementedError

    def count_rows(self, example: Any, limit: int) -> int:
        """Returns the number of rows of an example; stops counting above `limit`."""
        return 1

    def answers(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Any]) -> Answers:
        """Returns the prediction for each example, as JSON."""
        raise NotImplementedError

    def example_fields(self, example: Any) -> dict[str, Any]:
        """Returns the fields of an example that `predict` shows before its answer."""
        texts = example.texts
        return {"text": texts[0]} if len(texts) == 1 else {"texts": list(texts)}

    @classmethod
    def restore(
        cls, task: Task, labels: tuple[str, ...], base: Base, notes: Mapping[str, Any]
    ) -> Self:
        """Returns the kind of a trained run; `notes` are those of its checkpoint (`Job.notes`)."""
        return cls(task, labels, base.tokenizer)

    def make_validation_kind(self, task: Task) -> Self:
        """Returns the kind for validation examples; `self` is the one for training examples."""
        return type(self)(task, self.labels, self.tokenizer)

    def with_threshold(self, values: Mapping[str, Any]) -> Self:
        """Returns this kind or, for `span`, a copy with the no-answer threshold of an evaluation.

        `values` are the scores of the evaluation, or the notes of a checkpoint.
        """
        return self

    # --- scores ---------------------------------------------------------------------------------

    def scores(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Any]) -> Scores:
        """Returns the scores of labelled examples by name."""
        raise NotImplementedError

    def split_by_source(
        self, examples: Sequence[Any], counts: Mapping[str, int]
    ) -> list[SourceExamples]:
        """Returns the examples of each source; empty if there is only one source.

        Args:
          examples: of all sources, one source after the other.
          counts: the number of examples of each source.
        """
        names = [re.split("[/:]", source)[-1].partition(".")[0] for source in counts]
        if len(set(names)) < len(names) or "" in names:
            names = list(map(source_name, counts))
        by_source, start, first = list[SourceExamples](), 0, 0
        for name, count in zip(names, counts.values(), strict=True):
            selected = examples[start : start + count]
            rows = self.rows(selected)
            by_source.append(SourceExamples(name, first, rows, selected))
            start, first = start + count, first + len(rows.ids)
        return by_source if len(by_source) > 1 else []

    def evaluate(
        self,
        outputs: Outputs,
        loss: float,
        rows: TaskRows,
        examples: Sequence[Any],
        by_source: Sequence[SourceExamples],
    ) -> dict[str, Any]:
        """Returns the `loss`, the main score as `score`, the number of `examples`, and all scores.

        These include the main score of each source, named SCORE/NAME.
        """
        main, by_name = self.task.main_score, self.scores(outputs, rows, examples)
        fitted = self.with_threshold(by_name)
        for source in by_source:
            selected = outputs[source.first : source.first + len(source.rows.ids)]
            source_scores = fitted.scores(selected, source.rows, source.examples)
            by_name[f"{main}/{source.name}"] = source_scores[main]
        score = by_name[main]
        if self.task.spec.makes_vectors:
            loss = 1 - score  # stands in for the loss, which was not computed
        return {"loss": loss, "score": score, "examples": len(examples), **by_name}

    def compare_answer(self, answer: Answer, example: Any) -> ComparedAnswer:
        """Compares the answer to a labelled example with the label."""
        raise NotImplementedError

    def mistakes(self, answers: Sequence[Answer], examples: Sequence[Any]) -> dict[str, Any]:
        """Returns the mistakes in answers to labelled examples, as JSON of bounded length.

        Returns:
          `wrong`: their number. `worst`: those with the largest errors, sorted, with `place`,
          `texts`, `truth`, `predicted` and, for labels, the `probability` of the prediction. For
          labels and tags also `confusions`: the most frequent [truth, predicted, count].
        """
        compared = [self.compare_answer(*pair) for pair in zip(answers, examples, strict=True)]
        order = np.argsort([-answer.error for answer in compared], kind="stable")
        wrong = [i for i in order if compared[i].error]
        worst = []
        for i in wrong[:_MAX_LISTED]:
            names = compared[i].truth, compared[i].predicted
            truth, predicted = (" ".join(x)[:_MAX_CHARACTERS] for x in names)
            mistake = {"place": examples[i].location, "truth": truth, "predicted": predicted}
            if "probabilities" in answers[i]:
                mistake["probability"] = answers[i]["probabilities"][answers[i]["label"]]
            texts = self.mistake_texts(examples[i])
            worst.append(mistake | {"texts": [text[:_MAX_CHARACTERS] for text in texts]})
        record: dict[str, Any] = {"wrong": len(wrong), "worst": worst}
        if self.labels:
            labels = (zip(compared[i].truth, compared[i].predicted, strict=True) for i in wrong)
            confusions = collections.Counter(itertools.chain.from_iterable(labels))
            listed = confusions.most_common(_MAX_LISTED)
            record["confusions"] = [[*pair, count] for pair, count in listed]
        return record

    def mistake_texts(self, example: Any) -> Sequence[str]:
        """Returns the texts of an example that `mistakes` shows."""
        return example.texts

    def baseline(self, examples: Sequence[Any]) -> tuple[str, float] | None:
        """Returns the best constant answer as text, and its main score; None if there is none.

        It is one label or tag for all examples, or "no answer" for all questions. There is no such
        baseline for numbers, entities, generated texts, and questions that all have answers.
        """
        main = self.task.main_score
        if not self.labels or main == "entity_f1":
            return None
        names = [name for example in examples for name in example.label_names]
        truth = np.array([self.labels.index(name) for name in names])
        by_label = {
            name: scores_lib.score(main, truth, np.full_like(truth, number))
            for number, name in enumerate(self.labels)
        }
        best = max(self.labels, key=lambda name: by_label[name])
        return f"always {best!r}", by_label[best]


def make_kind(task: Task, labels: tuple[str, ...], tokenizer: Tokenizer) -> TaskKind:
    """Creates the `TaskKind` of a task."""
    return task.spec.implementing_class(task, labels, tokenizer)


# --- data of a run ------------------------------------------------------------------------


@dataclasses.dataclass
class TrainingSet:
    """The training examples of a run, as rows and batches."""

    kind: TaskKind
    count: int  # number of examples, each once per epoch
    batches: TaskBatches | CorpusPairs
    rows: TaskRows | None  # None for a corpus, whose rows are computed for each batch
    examples: Sequence[Any]  # () if they are neither shown nor recorded as mistakes (vectors)
    # Hashed with `examples`: the labels, or hashes of the data that `examples` does not have.
    identity: tuple[str, ...]
    text_keys: frozenset[int] = frozenset()  # of examples that validation should not have

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples per epoch: groups of `rows_per_example` rows, else examples."""
        return self.count if self.rows is None else len(self.rows.ids) // self.kind.rows_per_example

    def batch(self, block: int, step: int, indices: np.ndarray) -> Batch:
        """Returns rows `indices` of a step; packs each `block` rows into fewer; 0: packs none."""
        batch = self.batches.batch(step, indices)
        return packing.pack_batch(batch, self.batches.lengths(step), block) if block else batch


@dataclasses.dataclass
class TaskData:
    """The data of a fine-tuning run."""

    training: TrainingSet
    kind: TaskKind  # of the validation examples
    validation: Sequence[Any]
    eval_rows: TaskRows
    objective: TaskObjective
    sha256: str  # hash of all examples
    warnings: list[str]  # about examples that make scores misleading


def read_data(experiment: Finetuning, base: Base, tallies: Mapping[str, Tally]) -> TaskData:
    """Reads the examples of a run; `tallies` counts those of `train` and `validation`."""
    kind_class: type[TaskKind] = experiment.task.spec.implementing_class
    training = kind_class.read_training(experiment, base, tallies["train"])
    labels = training.kind.labels
    task = training.kind.task.with_fields(negative_column="")  # only training has negatives
    validation = examples_lib.read(task, task.validation, "labelled", tallies["validation"])
    examples_lib.require_known_labels(labels, validation)
    kind, class_weights = training.kind.make_validation_kind(task), ()
    if experiment.class_weights == "balanced" and training.rows is not None:
        class_weights = balanced_weights(training.rows, len(labels))
    splits = {"train": training.examples, "validation": validation}
    return TaskData(
        training,
        kind,
        validation,
        kind.rows(validation),
        training.kind.make_objective(experiment, base, class_weights),
        examples_lib.sha256([*training.examples, *validation], training.identity),
        scores_lib.data_warnings(task, labels, splits, training.text_keys),
    )
