"""Predictions of a fine-tuned run for examples, and their scores."""

import collections
import csv
import dataclasses
import itertools
import json
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from etils import epath

from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.checkpoint import Checkpoints
from bert_jax.config import Finetuning, Parallelism
from bert_jax.errors import InputError, printable
from bert_jax.model import heads
from bert_jax.pretraining.loaded_model import LoadedModel, metrics_line
from bert_jax.process import logger
from bert_jax.storage.workdir import Workdir, create_folder, load_experiment, write_atomic
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import formats, rows
from bert_jax.tasks.adaptation import compile_forward, frozen_params, read_base
from bert_jax.tasks.examples import Example, Tally
from bert_jax.tasks.task_kind import TaskKind
from bert_jax.tasks.task_objective import merged_params
from bert_jax.text import records as text_records
from bert_jax.text.tokenizer import UnknownShare
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step

# The number of examples whose rows are in memory at once.
WINDOW = 2048


class TaskModel:
    """A checkpoint of a fine-tuned run with its base, on all devices of this process.

    Args:
      workdir: the run's workdir, opened.
      base: the current path of the run's base; None: its path at training.
      which: the run's checkpoint: `newest`, `best` (by held-out loss), or a step.
      beams: the number of beams of the search for texts; None: one, as during training.
      reading: fields of the task, such as column names, for files of another format.
    """

    def __init__(
        self,
        workdir: Workdir,
        base: str | None = None,
        which: str = "newest",
        beams: int | None = None,
        reading: Mapping[str, str] = types.MappingProxyType({}),
    ):
        parallelism = Parallelism()  # the run's own is for the run's devices
        mesh = mesh_lib.make_mesh(parallelism)
        newest = load_experiment(workdir, Finetuning)
        saved = Checkpoints(workdir.checkpoints)
        number = saved.find_step(which)
        metadata = saved.metadata(number)
        self.experiment = dataclasses.replace(
            saved.experiment(number, Finetuning), init_from=base or newest.init_from
        )
        loaded = _read_base(self.experiment, workdir, metadata["init_sha256"])
        # Only training has negatives.
        self.task = self.experiment.task.with_fields(negative_column="", **reading)
        # In the order of the head's outputs; empty for regression and spans.
        self.labels = tuple(metadata["notes"]["labels"])
        self._vectors = base_lib.read_vectors(metadata["notes"]) or loaded.vectors
        kind: TaskKind = self.task.spec.implementing_class.from_notes(
            self.task, self.labels, loaded, metadata["notes"]
        )
        weights = metadata["notes"].get("class_weights", ())  # older runs have none
        objective: Any = kind.make_objective(self.experiment, loaded, weights)
        if beams is not None and kind.reads != "decoder":
            raise InputError(
                f"--beam: {workdir.address} has task.kind={self.task.kind}, which generates no "
                "texts; remove --beam"
            )
        if beams is not None:
            objective = dataclasses.replace(objective, beams=beams)
        self.pooling = objective.adapt.pooling  # of the head's input
        abstract = step.abstract_state(objective, self.experiment.optimizer, parallelism, mesh)
        restored = saved.read(which, {"params": abstract["params"]})
        # The trainable parameters of the checkpoint, on the devices.
        self.step, self.params = restored.step, restored.state["params"]
        self.kind = kind.fitted(restored.metadata["notes"] | {"step": self.step})
        # The base's, with the run's dropout rates and compute type.
        self.model, self.tokenizer = objective.model, loaded.tokenizer
        # The line of metrics.jsonl with the scores of this step; None if there is none.
        self.evaluation = metrics_line(workdir, "scores", self.step)
        self.fixed = frozen_params(loaded, objective, mesh)  # the frozen parameters
        self._forward = compile_forward(objective, parallelism, mesh)
        self.unknown = UnknownShare(loaded.tokenizer)
        self._shards = mesh_lib.batch_shards(mesh)
        # Batch sizes in examples, smallest first, after `warm`; before, the largest size so far.
        self._sizes: tuple[int, ...] = ()
        self._largest = 0

    def encoder(self) -> LoadedModel:
        """Returns the fine-tuned encoder, for vectors or for export."""
        merged = merged_params(self.experiment.adapt, self.params, self.fixed)
        params, fresh = heads.add_missing_heads(self.model, {"encoder": merged["encoder"]})
        return self.make_model(params, fresh)

    def make_model(self, params: dict[str, Any], fresh: tuple[str, ...] = ()) -> LoadedModel:
        """Returns a model of these parameters, with the name, step and vectors of this one."""
        fields = {"vectors": self._vectors, "step": self.step, "evaluation": self.evaluation}
        return LoadedModel(
            self.model, params, self.tokenizer, fresh=fresh, name=self.experiment.name, **fields
        )

    def warm(self, sizes: tuple[int, ...]) -> None:
        """Compiles the programs for examples of all lengths, in batches of these sizes only."""
        self._sizes, task = sizes, self.task
        others = ["a"] * (len(task.text_columns) - 1)
        for limit in range(
            rows.LENGTH_STEP, task.max_sequence_length + rows.LENGTH_STEP, rows.LENGTH_STEP
        ):
            # Each word is one token, so that the rows need the program of this length.
            words = " ".join(["a"] * (limit - rows.LENGTH_STEP // 2))
            for size in sizes:
                list(self.predict(examples_lib.parse_arguments(task, [*others, words] * size)))

    def predict(self, examples: Iterable[Example]) -> Iterator[dict[str, Any]]:
        """Yields the answers to examples, in order; `WINDOW` examples are in memory at once.

        Yields:
          JSON: `TaskKind.inputs` and the answer of `TaskKind.answers`.
        """
        examples = iter(examples)
        while window := list(itertools.islice(examples, WINDOW)):
            outputs, _, task_rows = self.outputs(window)
            yield from self._answers(outputs, task_rows, window)

    def score(
        self, examples: Sequence[Example], counts: Mapping[str, int]
    ) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
        """Returns the scores of labelled examples, and the answers to them.

        Args:
          examples: of all sources, one source after the other.
          counts: the number of examples of each source.

        Returns:
          `step`, `loss`, `score`, `examples` and all scores by name, as in metrics.jsonl (spans use
          the run's threshold for no answer); and the answers as from `predict`.
        """
        self.kind.require_libraries()
        examples_lib.require_known_labels(self.labels, examples)
        outputs, loss, task_rows = self.outputs(examples)
        parts = self.kind.parts(examples, counts)
        line = self.kind.evaluate(outputs, loss, task_rows, examples, parts)
        return {"step": self.step, **line}, self._answers(outputs, task_rows, examples)

    def _answers(
        self, outputs: list[np.ndarray], task_rows: rows.TaskRows, examples: Sequence[Example]
    ) -> Iterator[dict[str, Any]]:
        answers = self.kind.answers(outputs, task_rows, examples)
        pairs = zip(examples, answers, strict=True)
        return (self.kind.inputs(example) | answer for example, answer in pairs)

    def score_sources(
        self, sources: Sequence[str], tally: Tally
    ) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
        """Returns what `score` returns, for the labelled examples of sources.

        Args:
          sources: as in `task.validation`; none: the validation examples of the run.
          tally: counts the examples of each source and the broken ones.
        """
        known = self.task.with_fields(labels=self.labels)
        examples = examples_lib.read(known, tuple(sources) or known.validation, "labelled", tally)
        return self.score(examples, tally.examples)

    def outputs(self, examples: Sequence[Example]) -> tuple[list[np.ndarray], float, rows.TaskRows]:
        """Returns the outputs of each row and the mean loss (as `Forward`), and the rows."""
        task_rows = self.kind.rows(examples)
        self.unknown.add(task_rows.ids)
        count = len(task_rows.ids) // task_rows.rows_per_example
        # The batch size grows with the windows, so that few texts compile a small program.
        self._largest = max(self._largest, min(self.experiment.run.eval_batch_size, count))
        sizes = self._sizes or (self._largest,)
        size = next((size for size in sizes if size >= count), sizes[-1])
        size = -(-size // self._shards) * self._shards * task_rows.rows_per_example
        batches = rows.eval_batches(task_rows, self.tokenizer.pad_id, size)
        return *self._forward(self.params, self.fixed, batches, task_rows), task_rows


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


def predict(
    model: TaskModel,
    texts: Sequence[str] | Iterator[tuple[str, str]],
    sources: tuple[str, ...],
    what: Literal["predict", "score"],
    out: str | None,
) -> Iterator[str]:
    """Yields lines of JSON: the answers of a fine-tuned run, or its scores.

    Args:
      texts: one or more texts, or (location, line) pairs; unused with sources or `score`.
      sources: of examples; with `score`, () means the run's validation examples.
      out: a file for the answers; None: they are yielded.
    """
    task = model.task
    scores, tally = None, examples_lib.Tally()
    if what == "score":
        scores, answers = model.score_sources(sources, tally)
    elif sources:
        answers = model.predict(examples_lib.iterate(task, sources, "unlabelled", tally))
    elif isinstance(texts, Sequence):
        answers = model.predict(examples_lib.parse_arguments(task, texts))
    else:
        answers = model.predict(examples_lib.parse_lines(task, texts))
    if out is not None:
        with create_folder(epath.Path(out).parent):
            write_atomic(epath.Path(out), (f"{_json(answer)}\n" for answer in answers))
    if scores is not None:
        yield _json(_rounded(scores))
    elif out is None:
        yield from (_json(_rounded(answer)) for answer in answers)
    _warn_of_broken(tally)
    _warn_of_unknown(model)


def _warn_of_broken(tally: Tally) -> None:
    if tally.broken:
        logger.warning("broken rows left out: %s", printable(str(tally)))


def _warn_of_unknown(model: TaskModel) -> None:
    if warning := model.unknown.warning("the text"):
        logger.warning("%s", warning)


# --- tables ---------------------------------------------------------------------------------------

# The added columns, and the suffixes of output files.
_PREDICTED, _PROBABILITY = "predicted", "probability"
_SUFFIXES = (".csv", ".tsv", ".jsonl")


def predict_table(model: TaskModel, file: str, out: str) -> str:
    """Writes a file's rows with a fine-tuned run's predictions in two more columns.

    `predicted` is a label, a number, a list of tags or a text; `probability` is that of the label.
    Both are empty for a row with a blank text. Labels in the file are not read.

    Returns:
      A message with the number of rows and of each predicted label.
    """
    task = model.task
    source, suffix = file, epath.Path(out).suffix
    if not {"csv", "tsv", "jsonl"}.isdisjoint(task.spec.sources):
        source = config.source_of("--input", task.kind, file)
    if source.partition(":")[0] not in ("csv", "tsv", "jsonl"):
        raise InputError(
            f"--input {file}: must be a table, which task.kind={task.kind} does not read; use "
            "--source and --out FILE, which write the answers as JSON lines"
        )
    if suffix not in _SUFFIXES:
        raise InputError(f"--out {out}: the name must end in {', '.join(_SUFFIXES)}")
    counts, unread, tally = collections.Counter[str](), Tally(), Tally()
    table_rows = _predict_rows(model, source, counts, unread, tally)
    with create_folder(epath.Path(out).parent):
        write_atomic(epath.Path(out), _table_lines(table_rows, suffix, task.header))
    _warn_of_broken(tally)
    _warn_of_unknown(model)
    shown = ", ".join(f"{label} {counts[label]:,}" for label in model.labels if counts[label])
    parts = [f"{counts.total() + len(unread.broken):,} rows of {file}"]
    parts += [f"predicted {shown}"] if shown else []
    if unread.broken:
        parts.append(f"no prediction for rows with a blank text: {unread}")
    return "; ".join(parts)


def _predict_rows(
    model: TaskModel,
    source: str,
    counts: collections.Counter[str],
    unread: Tally,
    tally: Tally,
) -> Iterator[text_records.TableRow]:
    """Yields (location, column names, values) of each row, with the predicted columns.

    `counts` counts labels, `unread` rows without a prediction, and `tally` broken rows.
    """
    task, column = model.task, model.kind.column
    on_broken = examples_lib.broken_row_handler(task, tally)
    records = formats.records(source, task.header, blank_lines=True, on_broken=on_broken)
    added = [_PREDICTED] if column else [_PREDICTED, _PROBABILITY]
    is_empty = True
    while window := list(itertools.islice(records, WINDOW)):
        is_empty, examples = False, dict[str, Example]()  # by location
        for location, names, values in window:
            if existing := [name for name in added if name in names]:
                raise InputError(f"{location}: has a column {existing[0]!r} already; rename it")
            _require_json(values, location)
            cells = formats.cells(task.text_columns, names, values, location)
            try:
                examples[location] = examples_lib.example_from_cells(task, location, cells)
            except InputError as error:
                if task.broken_rows == "stop" and not any(map(examples_lib.is_blank, cells)):
                    raise
                unread.record_broken(location, error)
        answers = list(model.predict(examples.values())) if examples else []
        by_place = dict(zip(examples, answers, strict=True))
        for location, names, values in window:
            predicted: list[Any] = [None] * len(added)
            if answer := by_place.get(location):
                label = answer[column or "label"]
                predicted = [label] if column else [label, answer["probabilities"][label]]
                counts[str(label)] += 1
            yield location, [*names, *added], [*values, *predicted]
    if is_empty:
        raise InputError(f"{source}: holds no examples")


def _require_json(values: Sequence[Any], location: str) -> None:
    """Raises InputError if a value is a number that JSON cannot represent, such as 1e400."""
    try:
        json.dumps(values, allow_nan=False)
    except ValueError as error:
        raise InputError(
            f"{location}: holds a number that is not finite; write null or a smaller number"
        ) from error


def _table_lines(
    table_rows: Iterable[text_records.TableRow], suffix: str, header: str
) -> Iterator[str]:
    """Yields the lines of a .csv, .tsv or .jsonl file; `header` "none" omits the column names."""
    first: list[str] = []
    # The writer quotes cells with a character of its line end, so that is \r\n, written as \n.
    file, end = types.SimpleNamespace(write=str), "\r\n"
    table = csv.writer(file, lineterminator=end)
    if suffix == ".tsv":
        quoting: Any = {"quoting": csv.QUOTE_NONE, "quotechar": None}
        table = csv.writer(file, lineterminator=end, delimiter="\t", **quoting)
    for location, names, values in table_rows:
        if suffix == ".jsonl":
            if len(set(names)) < len(names):
                raise InputError(
                    f"{location}: two columns have one name; rename one, or write .csv"
                )
            yield _json(dict(zip(names, values, strict=True))) + "\n"
            continue
        lines = [values] if first or header == "none" else [names, values]
        first = first or names
        if sorted(names) != sorted(first):
            raise InputError(
                f"{location}: has the columns {formats.quote_names(names)}, but the first row has "
                f"{formats.quote_names(first)}; write a .jsonl file"
            )
        if names != first:  # JSON objects may have them in any order
            lines = [[values[names.index(name)] for name in first]]
        for line in lines:
            try:
                yield table.writerow(map(_cell, line)).removesuffix("\r\n") + "\n"
            except csv.Error as error:
                raise InputError(
                    f"{location}: a cell holds a tab or a newline; write a .csv or .jsonl file"
                ) from error


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return text_records.encodable(value if isinstance(value, str) else json.dumps(value))


def _rounded(value: Any) -> Any:
    """Returns the value with numbers rounded to seven digits, the precision of float32."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def _json(value: dict[str, Any]) -> str:
    """Returns JSON with readable Unicode; escapes characters that might control a terminal."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
