"""Fine-tuned models: `TaskModel` for commands, and `FinetunedModel` of the Python API."""

import copy
import dataclasses
import itertools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Finetuning, Parallelism
from bert_jax.errors import InputError, pluralize
from bert_jax.model import heads
from bert_jax.pretraining.loaded_model import (
    LoadedModel,
    list_inputs,
    list_texts,
    metrics_line,
)
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import rows
from bert_jax.tasks.adaptation import (
    compile_forward,
    frozen_params,
    head_experiment,
    read_base,
    select_weights,
)
from bert_jax.tasks.examples import Example, Tally
from bert_jax.tasks.task_kind import TaskKind
from bert_jax.tasks.task_objective import merged_params
from bert_jax.text.tokenizer import UnknownShare
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib

# The number of examples whose rows are in memory at once.
WINDOW = 2048


class _OpenedModel(NamedTuple):
    """A checkpoint of a fine-tuned run, or a base with the head of a task."""

    experiment: Finetuning
    base: base_lib.Base  # the weights that the task can use
    notes: Mapping[str, Any]  # of the checkpoint (`Job.notes`)
    # Maps abstract parameters to the step of the checkpoint, its parameters, and its notes.
    restore: Callable[[Any], tuple[int, Any, Mapping[str, Any]]]


class TaskModel:
    """A checkpoint of a fine-tuned run with its base, on all devices of this process.

    A base with the head of a task is also such a checkpoint, at step 0.

    Args:
      source: the opened workdir of a run or of a base, or a loaded base.
      base: the current path of the run's base; None: its path at training.
      checkpoint: `newest`, `best` (by held-out loss), or a step.
      beams: the number of beams of beam search; None: one, as during training.
      task_fields: replaced fields of the task, such as column names of files to be read.
    """

    def __init__(
        self,
        source: Workdir | LoadedModel,
        base: str | None = None,
        checkpoint: str = "newest",
        beams: int | None = None,
        task_fields: Mapping[str, str] = types.MappingProxyType({}),
    ):
        parallelism = Parallelism()  # the run's own is for the run's devices
        mesh = mesh_lib.make_mesh(parallelism)
        if isinstance(source, Workdir) and base_lib.is_base(source.root):
            source = LoadedModel.of(source, checkpoint=checkpoint)
        is_run = isinstance(source, Workdir)
        self.experiment, loaded, notes, restore = (
            _open_run(source, base, checkpoint) if is_run else _open_head(source)
        )
        # Only training has negatives.
        self.task = self.experiment.task.with_fields(negative_column="", **task_fields)
        # In the order of the head's outputs; () for a task without labels.
        self.labels = tuple(notes["labels"])
        # How texts become vectors; None: defaults.
        self.vector_settings = base_lib.read_vectors(notes) or loaded.vectors
        # The base's parts for these vectors, for a run that did not train them.
        names = base_lib.VECTOR_PARTS & loaded.params.keys()
        self.vector_parts = {name: loaded.params[name] for name in names}
        kind: TaskKind = self.task.spec.implementing_class.restore(
            self.task, self.labels, loaded, notes
        )
        weights = notes.get("class_weights", ())  # older runs have none
        objective: Any = kind.make_objective(self.experiment, loaded, weights)
        if beams is not None and kind.reads != "decoder":
            raise InputError(
                f"--beam: {self.experiment.name} has task.kind={self.task.kind}, which generates "
                "no texts; remove --beam"
            )
        if beams is not None:
            objective = dataclasses.replace(objective, beams=beams)
        self.pooling = objective.adapt.pooling  # of the head's input
        abstract = step.abstract_state(objective, self.experiment.optimizer, parallelism, mesh)
        # The trainable parameters of the checkpoint, on the devices.
        self.step, self.params, notes = restore(abstract["params"])
        self.kind = kind.with_threshold({**notes, "step": self.step})
        # The base's Model section, with the run's dropout rates and compute type; its tokenizer.
        self.model, self.tokenizer = objective.model, loaded.tokenizer
        # The line of metrics.jsonl with the scores of this step; None if there is none.
        self.evaluation = metrics_line(source, "scores", self.step) if is_run else None
        self.source = loaded.source  # where a base's weights come from; "" for a run
        self.frozen = frozen_params(loaded, objective, mesh)
        self._forward = compile_forward(objective, parallelism, mesh)
        self.unknown = UnknownShare(loaded.tokenizer)
        self._shards = mesh_lib.batch_shards(mesh)
        self._sizes: tuple[int, ...] = ()  # batch sizes of `warm`, in examples, ascending
        self._largest = 0  # without `_sizes`: the largest batch so far, in examples

    def warm(self, sizes: tuple[int, ...]) -> None:
        """Compiles the programs for examples of all lengths, in batches of these sizes only."""
        self._sizes, task, unit = sizes, self.task, rows.LENGTH_STEP
        others = ["a"] * (len(task.text_columns) - 1)
        for limit in range(unit, task.max_sequence_length + unit, unit):
            # Each word is one token; half a unit below `limit` leaves room for special tokens.
            words = " ".join(["a"] * (limit - unit // 2))
            (example,) = examples_lib.parse_arguments(task, [*others, words])
            for size in sizes:
                list(self.predict([example] * size))

    def predict(self, examples: Iterable[Example]) -> Iterator[dict[str, Any]]:
        """Yields the answers to examples, in order; `WINDOW` examples are in memory at once.

        Yields:
          JSON: `TaskKind.example_fields` and the answer of `TaskKind.answers`.
        """
        examples = iter(examples)
        while window := list(itertools.islice(examples, WINDOW)):
            outputs, _, task_rows = self.outputs(window)
            yield from self._answers(outputs, task_rows, window)

    def score(
        self, sources: Sequence[str], tally: Tally
    ) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
        """Returns the scores of the labelled examples of sources, and the answers to them.

        Args:
          sources: as in `task.validation`; none: the validation examples of the run.
          tally: counts the examples of each source and the broken ones.

        Returns:
          `step`, `loss`, `score`, `examples` and all scores by name, as in metrics.jsonl (spans use
          the run's threshold for no answer); and the answers as from `predict`.
        """
        self.kind.require_libraries()
        task = self.task.with_fields(labels=self.labels)
        names = tuple(sources) or task.validation
        if not names:
            raise InputError(f"--source: name labelled examples; {self.experiment.name} has none")
        examples = examples_lib.read(task, names, "labelled", tally)
        outputs, loss, task_rows = self.outputs(examples)
        by_source = self.kind.split_by_source(examples, tally.examples)
        line = self.kind.evaluate(outputs, loss, task_rows, examples, by_source)
        return {"step": self.step, **line}, self._answers(outputs, task_rows, examples)

    def _answers(
        self, outputs: list[np.ndarray], task_rows: rows.TaskRows, examples: Sequence[Example]
    ) -> Iterator[dict[str, Any]]:
        answers = self.kind.answers(outputs, task_rows, examples)
        for example, answer in zip(examples, answers, strict=True):
            yield self.kind.example_fields(example) | answer

    def outputs(self, examples: Sequence[Example]) -> tuple[list[np.ndarray], float, rows.TaskRows]:
        """Returns the outputs of each row and the mean loss (as `Forward`), and the rows."""
        task_rows = self.kind.rows(examples)
        self.unknown.add(task_rows.ids)
        count = len(task_rows.ids) // task_rows.rows_per_example
        # Batches grow with the largest window so far, so that few texts run in a small program.
        self._largest = max(self._largest, min(self.experiment.run.eval_batch_size, count))
        sizes = self._sizes or (self._largest,)
        size = next((size for size in sizes if size >= count), sizes[-1])
        size = -(-size // self._shards) * self._shards * task_rows.rows_per_example
        batches = rows.eval_batches(task_rows, self.tokenizer.pad_id, size)
        return *self._forward(self.params, self.frozen, batches, task_rows), task_rows


def _open_run(workdir: Workdir, base: str | None, checkpoint: str) -> _OpenedModel:
    latest = load_experiment(workdir, Finetuning)  # of the last start: the base may have moved
    checkpoints = Checkpoints(workdir.checkpoints)
    number = checkpoints.find_step(checkpoint)
    metadata = checkpoints.metadata(number)
    experiment = dataclasses.replace(
        checkpoints.experiment(number, Finetuning), init_from=base or latest.init_from
    )
    loaded = _read_base(experiment, workdir, metadata["init_sha256"])

    def restore(abstract: Any) -> tuple[int, Any, Mapping[str, Any]]:
        restored = checkpoints.restore_chosen(checkpoint, {"params": abstract})
        return restored.step, restored.state["params"], restored.metadata["notes"]

    return _OpenedModel(experiment, loaded, metadata["notes"], restore)


def _open_head(base: LoadedModel) -> _OpenedModel:
    experiment = head_experiment(base, base.name)
    loaded = dataclasses.replace(select_weights(base, experiment), source=base.source)
    loaded.tokenizer = copy.copy(loaded.tokenizer)
    loaded.tokenizer.tie_cuts_first = True  # as in transformers, where heads come from
    assert base.head is not None  # `head_experiment` has raised InputError
    trained = {"head": {"kernel": base.head.kernel, "bias": base.head.bias}, **loaded.params}
    labels = examples_lib.find_labels(experiment.task, ())
    notes = {"labels": labels, "no_answer_threshold": 0.0}

    def restore(abstract: Any) -> tuple[int, Any, Mapping[str, Any]]:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        return 0, feed.put({name: trained[name] for name in abstract}, shardings), notes

    return _OpenedModel(experiment, loaded, notes, restore)


def _read_base(experiment: Finetuning, workdir: Workdir, sha256: str) -> base_lib.Base:
    """Reads the base of a run, and raises InputError if it is not the one of training."""
    try:
        base = read_base(experiment)
    except InputError as error:
        raise InputError(
            f"{error}; the base of {workdir.address} is {experiment.init_from}: give its current "
            "folder with --from"
        ) from error
    if base.sha256 != sha256:
        raise InputError(
            f"{experiment.init_from}: its weights ({base.sha256[:12]}) are not those of the base "
            f"of {workdir.address} ({sha256[:12]}); give the folder of that base with --from"
        )
    return base


@dataclasses.dataclass(repr=False)
class FinetunedModel(LoadedModel):
    """A fine-tuned model: its encoder, with the methods of `LoadedModel`, and its task.

    `fill` raises InputError unless the task trains the masked LM head.
    """

    task_model: TaskModel = dataclasses.field(kw_only=True)

    @classmethod
    def load(
        cls, source: Workdir | LoadedModel, base: str | None = None, checkpoint: str = "newest"
    ) -> "FinetunedModel":
        """Reads a checkpoint of a fine-tuned run, or a base with the head of a task.

        `base` is where the base of the run is now; None: where it was during training.
        """
        tuned = TaskModel(source, base, checkpoint)
        merged = merged_params(tuned.experiment.adapt, tuned.params, tuned.frozen)
        kept = {"encoder": merged["encoder"]}
        if tuned.kind.reads == "masked_lm":
            kept["masked_lm"] = merged["masked_lm"]
        params, fresh = heads.add_missing_heads(tuned.model, kept)
        params |= tuned.vector_parts
        params |= {name: merged[name] for name in base_lib.VECTOR_PARTS & merged.keys()}
        return cls(
            tuned.model,
            params,
            tuned.tokenizer,
            tuned.source,
            fresh=fresh,
            vectors=tuned.vector_settings,
            name=tuned.experiment.name,
            step=tuned.step,
            evaluation=tuned.evaluation,
            task_model=tuned,
        )

    @property
    def labels(self) -> tuple[str, ...]:
        """The label names in the order of the head's outputs; () for a task without labels."""
        return self.task_model.labels

    def predict(self, texts: Iterable[str | Sequence[str]]) -> list[dict[str, Any]]:
        """Returns the prediction for each example, as `bert-jax predict` writes it.

        Args:
          texts: for each example its text, or a sequence of its texts.
        """
        task, examples = self.task_model.task, list[Example]()
        count = len(task.text_columns)
        for position, example in enumerate(list_inputs(texts)):
            where = f"texts[{position}]"
            columns = list_texts(example, where)
            if len(columns) != count and not (task.spec.is_variadic and len(columns) > count):
                raise InputError(
                    f"{where}: has {pluralize(len(columns), 'text')}; "
                    f"task.kind={task.kind} takes {count}"
                )
            examples.append(examples_lib.example_from_texts(task, where, columns, position + 1))
        return list(self.task_model.predict(examples))

    def score(self, sources: str | Sequence[str] = ()) -> dict[str, Any]:
        """Returns `step`, `loss`, `score` (the main score of the task) and all scores by name.

        Args:
          sources: one or several, as in `task.validation`, such as "tsv:FILE"; none: the validation
            examples of the run.
        """
        listed = [sources] if isinstance(sources, str) else sources
        metrics, _ = self.task_model.score(listed, Tally())
        return metrics
