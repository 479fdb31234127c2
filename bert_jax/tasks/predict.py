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
from bert_jax.checkpoints.checkpoint import Checkpoints, Restored
from bert_jax.config import Finetuning, Parallelism
from bert_jax.errors import InputError, printable
from bert_jax.model import heads
from bert_jax.pretraining.loaded import Loaded, line_of
from bert_jax.process import logger
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir, create_folder, load_experiment, write_atomic
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import formats, rows
from bert_jax.tasks import scores as scores_lib
from bert_jax.tasks.adapted import LoadedBase, forward_of, kind_of
from bert_jax.tasks.examples import Example, Question, Sentence, Tally
from bert_jax.tasks.objective import merged_params
from bert_jax.tasks.similar import inherit_prompts, validation_task
from bert_jax.text import records as text_records
from bert_jax.text.tokenizer import UnknownShare
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step

# Examples whose rows are in memory at once.
WINDOW = 2048


class TaskModel:
    """A checkpoint of a fine-tuned run over its base, on all devices of this process.

    Args:
      base: where the run's base lies now; None: where it lay then.
      which: of the run's checkpoints: `newest`, `best` (by held-out loss), or a step.
      reading: fields of the task for files that are written otherwise than its own.
      beams: with which texts are searched for; None: one, as while it was trained.
    """

    def __init__(
        self,
        folder: str,
        base: str | None = None,
        which: str = "newest",
        beams: int | None = None,
        reading: Mapping[str, str] = types.MappingProxyType({}),
    ):
        workdir = mirror.open_workdir(folder)
        parallelism = Parallelism()  # the run's own is for the devices it had
        mesh = mesh_lib.make_mesh(parallelism)
        newest = load_experiment(workdir, Finetuning)
        saved = Checkpoints(workdir.checkpoints)
        number = saved.find_step(which)
        metadata = saved.metadata(number)
        # Of the run.
        self.experiment = dataclasses.replace(
            saved.experiment(number, Finetuning), init_from=base or newest.init_from
        )
        loaded = _base_of(self.experiment, workdir, metadata["init_sha256"])
        # What is asked of it.
        task = validation_task(self.experiment.task)
        self.task = task.with_fields(**reading)
        if beams is not None and task.kind != "generate":
            raise InputError(
                f"--beam: {folder} has learned task.kind={task.kind}, which writes no texts; "
                "remove it"
            )
        # In the order of the head's outputs; empty of regressions and spans.
        self.labels = tuple(metadata["notes"]["labels"])
        self._vectors = base_lib.vectors_of(metadata["notes"]) or loaded.vectors
        led = inherit_prompts(task, self._vectors) if task.kind == "similar" else task
        self.kind = kind_of(led.with_fields(**reading), self.labels, loaded.tokenizer)
        # Runs of the time before there were any have none.
        weights = metadata["notes"].get("class_weights", ())
        if task.kind == "similar":
            self.kind.outputs = metadata["notes"]["teacher_width"]
        objective = loaded.objective(self.experiment, self.kind, weights)
        self.pooling = objective.adapt.pooling  # of what the head reads
        abstract = step.abstract_state(objective, self.experiment.optimizer, parallelism, mesh)
        restored = saved.read(which, {"params": abstract["params"]})
        # Those that learned, on the devices.
        self.step, self.params = restored.step, restored.state["params"]  # of the checkpoint
        # Of the base, with the dropout and the type of the run.
        self.model, self.tokenizer = objective.model, loaded.tokenizer  # of the base
        # The line of scores of this step; None if there is none.
        self.evaluation = line_of(workdir, "scores", self.step)
        if task.kind == "span" and task.no_answer == "possible":
            self.kind = kind_of(task, self.labels, loaded.tokenizer, _threshold(restored))
        self.fixed = loaded.fixed(objective, mesh)  # those of the base that did not
        self._forward = forward_of(objective, parallelism, mesh, beams or 1)
        self._pad_id = loaded.tokenizer.pad_id
        self.unknown = UnknownShare(loaded.tokenizer)
        self._shards = mesh_lib.batch_shards(mesh)
        self._sizes: tuple[int, ...] = ()  # of batches, in examples, smallest first, once warm
        self._most = 0  # examples of a batch so far, before that

    def encoder(self) -> Loaded:
        """Returns the encoder as it was adapted, to be asked for vectors, or exported."""
        learned = merged_params(self.experiment.adapt, self.params, self.fixed)
        params, fresh = heads.add_missing_heads(self.model, {"encoder": learned["encoder"]})
        return self.stated(params, fresh)

    def stated(self, params: dict[str, Any], fresh: tuple[str, ...] = ()) -> Loaded:
        """Returns parameters that are made of its own, and what is known of them."""
        known = {"vectors": self._vectors, "step": self.step, "evaluation": self.evaluation}
        return Loaded(
            self.model, params, self.tokenizer, fresh=fresh, name=self.experiment.name, **known
        )

    def warm(self, sizes: tuple[int, ...]) -> None:
        """Compiles what examples of any length need; batches have no other sizes from then on."""
        self._sizes, task = sizes, self.task
        others = ["a"] * (examples_lib.texts_per_example(task) - 1)
        for limit in range(
            rows.LENGTH_STEP, task.max_sequence_length + rows.LENGTH_STEP, rows.LENGTH_STEP
        ):
            # A piece each, so that with the others they are as long as the longest of a program.
            words = " ".join(["a"] * (limit - rows.LENGTH_STEP // 2))
            example = [words, *others] if task.kind != "span" else [*others, words]
            for size in sizes:
                list(self.predict(examples_lib.parse_arguments(task, example * size)))

    def predict(self, examples: Iterable[Example]) -> Iterator[dict[str, Any]]:
        """Yields answers to examples in their order; `WINDOW` examples are in memory at once.

        Yields:
          JSON: what `TaskKind.answers` returns, with the `text` or `texts` of a sentence and the
          `question` of a span.
        """
        examples = iter(examples)
        while window := list(itertools.islice(examples, WINDOW)):
            outputs, _, of_window = self.outputs(window)
            yield from _with_inputs(window, self.kind.answers(outputs, of_window, window))

    def score(
        self, examples: Sequence[Example], counts: Mapping[str, int]
    ) -> tuple[dict[str, Any], Iterator[dict[str, Any]]]:
        """Returns the scores of labelled examples, all in memory, and the answers to them.

        Args:
          examples: of all sources, one after the other.
          counts: how many examples each source has.

        Returns:
          As metrics.jsonl keeps them: `step`, `loss`, `score`, `examples` and all scores by name,
          those of spans that may have no answer by the run's threshold; and what `predict` yields.
        """
        if self.task.kind == "generate":
            scores_lib.require_sacrebleu()
        examples_lib.require_known_labels(self.labels, examples)
        outputs, loss, of_all = self.outputs(examples)
        scores = self.kind.scores(outputs, of_all, examples)
        scores |= self.kind.part_scores(outputs, self.kind.parts(examples, counts))
        score = scores[self.task.main_score]
        loss = 1 - score if self.task.kind == "similar" else loss
        line = {"step": self.step, "loss": loss, "score": score}
        answers = self.kind.answers(outputs, of_all, examples)
        return line | {"examples": len(examples)} | scores, _with_inputs(examples, answers)

    def outputs(self, examples: Sequence[Example]) -> tuple[list[np.ndarray], float, rows.Rows]:
        """Returns what the head gives for each row, the mean loss, and the rows.

        Returns:
          As `adapted.Forward` does, and `TaskKind.rows`.
        """
        made = self.kind.rows(examples)
        self.unknown.add(made.ids)
        count = len(made.ids) // made.rows_per_example
        # Few texts make a small batch, until a window holds more.
        self._most = max(self._most, min(self.experiment.run.eval_batch_size, count))
        sizes = self._sizes or (self._most,)
        size = next((size for size in sizes if size >= count), sizes[-1])
        size = -(-size // self._shards) * self._shards * made.rows_per_example
        batches = rows.eval_batches(made, self._pad_id, size)
        return *self._forward(self.params, self.fixed, batches, made), made


def _with_inputs(
    examples: Sequence[Example], answers: Iterable[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
    for example, answer in zip(examples, answers, strict=True):
        given: dict[str, Any] = {}
        if isinstance(example, Sentence):
            texts = example.texts
            given = {"text": texts[0]} if len(texts) == 1 else {"texts": list(texts)}
        elif isinstance(example, Question):
            given = {"id": example.id, "question": example.question}
        yield given | answer


def _base_of(experiment: Finetuning, workdir: Workdir, sha256: str) -> LoadedBase:
    try:
        loaded = LoadedBase.of(experiment)
    except InputError as error:
        raise InputError(
            f"{error}; {workdir.named} adapts {experiment.init_from}: name with --from the "
            "folder it is in now"
        ) from error
    if loaded.sha256 != sha256:
        raise InputError(
            f"{experiment.init_from}: holds other weights ({loaded.sha256[:12]}) than those that "
            f"{workdir.named} adapts ({sha256[:12]}); name with --from the folder they are in now"
        )
    return loaded


def _threshold(restored: Restored) -> float:
    """Returns the score for no answer above which none is given."""
    threshold = restored.metadata["notes"]["no_answer_threshold"]
    if threshold is None:
        logger.warning(
            "step %d was not evaluated, which would set a threshold; `no answer` is given wherever "
            "it scores highest",
            restored.step,
        )
        return 0.0
    return threshold


def predict(
    model: TaskModel,
    texts: Sequence[str] | Iterator[tuple[str, str]],
    sources: tuple[str, ...],
    what: Literal["predict", "score"],
    out: str | None,
) -> Iterator[str]:
    """Yields lines of JSON: a fine-tuned run's answers, or its scores.

    Args:
      texts: texts given one by one, or (place, line), if there is neither a source nor scores.
      sources: of examples; with `score` none are the run's validation examples.
      out: a file for the answers; None: they are yielded.
    """
    task = model.task
    scores, tally = None, examples_lib.Tally()
    if what == "score":
        known = task.with_fields(labels=model.labels)
        examples = examples_lib.read(known, sources or task.validation, "labelled", tally)
        scores, answers = model.score(examples, tally.examples)
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

# What is written next to the columns of a file, and files that can be written.
_PREDICTED, _PROBABILITY = "predicted", "probability"
_WRITTEN = (".csv", ".tsv", ".jsonl")


def predict_table(model: TaskModel, file: str, out: str) -> str:
    """Writes a file's rows with what a fine-tuned run predicts for each in columns of its own.

    `predicted` is a label, a regression's number, a list of tags or a text; `probability` is the
    label's.
    A row with a blank text has neither, and is counted; labels are not read.

    Returns:
      How many rows were written, and how often each label was predicted, in words.
    """
    task = model.task
    source, ending = file, epath.Path(out).suffix
    if task.kind != "span":
        source = config.source_of("--input", task.kind, file)
    if source.partition(":")[0] not in ("csv", "tsv", "jsonl"):
        raise InputError(
            f"--input {file}: a file of columns is needed, and task.kind={task.kind} reads no "
            "such; --source and --out FILE write its answers as JSON lines"
        )
    if ending not in _WRITTEN:
        raise InputError(f"--out {out}: end its name in {', '.join(_WRITTEN)}")
    counts, unread, tally = collections.Counter[str](), Tally(), Tally()
    rows_ = _predicted_rows(model, source, counts, unread, tally)
    with create_folder(epath.Path(out).parent):
        write_atomic(epath.Path(out), _written(rows_, ending, task.header))
    _warn_of_broken(tally)
    _warn_of_unknown(model)
    shown = ", ".join(f"{label} {counts[label]:,}" for label in model.labels if counts[label])
    parts = [f"{counts.total() + len(unread.broken):,} rows of {file}"]
    parts += [f"predicted {shown}"] if shown else []
    if unread.broken:
        parts.append(f"no prediction for rows with a blank text: {unread}")
    return "; ".join(parts)


def _predicted_rows(
    model: TaskModel,
    source: str,
    counts: collections.Counter[str],
    unread: Tally,
    tally: Tally,
) -> Iterator[text_records.Named]:
    """Yields place, names and values of each row, with the predicted ones.

    `counts` counts labels, `unread` rows without a prediction, `tally` rows that are left out.
    """
    task, column = model.task, model.kind.column
    on_broken = examples_lib.broken_row_handler(task, tally)
    records = formats.records(source, task.header, blank_lines=True, on_broken=on_broken)
    more = [_PREDICTED] if column else [_PREDICTED, _PROBABILITY]
    none = True
    while window := list(itertools.islice(records, WINDOW)):
        none, examples = False, dict[str, Example]()  # by place
        for place, names, values in window:
            if taken := [name for name in more if name in names]:
                raise InputError(f"{place}: has a column {taken[0]!r} already; rename it")
            _require_json(values, place)
            cells = formats.cells(task.text_columns, names, values, place)
            try:
                examples[place] = examples_lib.from_cells(task, place, cells)
            except InputError as error:
                if task.broken_rows == "stop" and not any(map(examples_lib.is_blank, cells)):
                    raise
                unread.record_broken(place, error)
        answers = list(model.predict(examples.values())) if examples else []
        answer_at = dict(zip(examples, answers, strict=True))
        for place, names, values in window:
            predicted: list[Any] = [None] * len(more)
            if answer := answer_at.get(place):
                label = answer[column or "label"]
                predicted = [label] if column else [label, answer["probabilities"][label]]
                counts[str(label)] += 1
            yield place, [*names, *more], [*values, *predicted]
    if none:
        raise InputError(f"{source}: holds no examples")


def _require_json(values: Sequence[Any], place: str) -> None:
    """Raises InputError if a value is a number that JSON cannot spell, such as 1e400."""
    try:
        json.dumps(values, allow_nan=False)
    except ValueError as error:
        raise InputError(
            f"{place}: holds a number that is not finite; write null or a smaller number"
        ) from error


def _written(rows_: Iterable[text_records.Named], ending: str, header: str) -> Iterator[str]:
    """Yields lines of a file that ends so; .csv and .tsv begin with names if `header` says so."""
    first: list[str] = []
    # Characters of a line's end are quoted, which here becomes a newline alone.
    file, end = types.SimpleNamespace(write=str), "\r\n"
    table = csv.writer(file, lineterminator=end)
    if ending == ".tsv":
        quoting: Any = {"quoting": csv.QUOTE_NONE, "quotechar": None}
        table = csv.writer(file, lineterminator=end, delimiter="\t", **quoting)
    for place, names, values in rows_:
        if ending == ".jsonl":
            if len(set(names)) < len(names):
                raise InputError(f"{place}: two columns have one name; rename one, or write .csv")
            yield _json(dict(zip(names, values, strict=True))) + "\n"
            continue
        lines = [values] if first or header == "none" else [names, values]
        first = first or names
        if sorted(names) != sorted(first):
            raise InputError(
                f"{place}: has the columns {formats.listed(names)}, and the first row "
                f"{formats.listed(first)}; write it as .jsonl"
            )
        if names != first:  # JSON has them in any order
            lines = [[values[names.index(name)] for name in first]]
        for line in lines:
            try:
                yield table.writerow(map(_cell, line)).removesuffix("\r\n") + "\n"
            except csv.Error as error:
                raise InputError(
                    f"{place}: a cell holds a tab or a newline; write it as .csv or .jsonl"
                ) from error


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return text_records.encodable(value if isinstance(value, str) else json.dumps(value))


def _rounded(value: Any) -> Any:
    """Returns the value for a person: numbers have the seven digits that float32 holds."""
    if isinstance(value, float):
        return float(f"{value:.7g}")
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value


def _json(value: dict[str, Any]) -> str:
    """Returns JSON as people read it; what might command a terminal is escaped."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(c if c.isprintable() else json.dumps(c)[1:-1] for c in text)
