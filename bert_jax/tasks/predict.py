"""Writes the predictions of a fine-tuned run for examples, and its scores."""

import csv
import itertools
import json
import types
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from etils import epath

from bert_jax import config
from bert_jax.errors import InputError, printable
from bert_jax.process import logger
from bert_jax.storage.workdir import create_folder, write_atomic
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import formats
from bert_jax.tasks.examples import Example, Tally
from bert_jax.tasks.finetuned_model import WINDOW, TaskModel
from bert_jax.text.records import SourceRecord, quote_names, replace_surrogates


def predict(
    model: TaskModel,
    texts: Sequence[str] | Iterator[tuple[str, str]],
    sources: tuple[str, ...],
    mode: Literal["predict", "score"],
    out: str | None,
) -> Iterator[str]:
    """Yields lines of JSON: the answers of a fine-tuned run, or its scores.

    Args:
      texts: texts of examples, for `parse_arguments`, or (location, line) of one example each;
        unused with sources or `score`.
      sources: where to read examples; with `score`, () means the run's validation examples.
      out: a file for the answers, with unrounded numbers; None: yielded, except with `score`.
    """
    task = model.task
    scores, tally = None, examples_lib.Tally()
    if mode == "score":
        scores, answers = model.score(sources, tally)
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
    _warn(model, tally)


def _warn(model: TaskModel, tally: Tally) -> None:
    """Warns of broken rows and of unknown tokens."""
    if tally.broken:
        logger.warning("broken rows left out: %s", printable(tally.describe_broken()))
    if warning := model.unknown.warning("the text"):
        logger.warning("%s", warning)


# --- tables ---------------------------------------------------------------------------------------

# The added columns, and the suffixes of output files.
_PREDICTED, _PROBABILITY = "predicted", "probability"
_SUFFIXES = (".csv", ".tsv", ".jsonl")


def predict_table(model: TaskModel, file: str, out: str) -> str:
    """Writes a file's rows with a fine-tuned run's predictions in one or two more columns.

    `predicted` is a label, a number, a list of tags or a text; for a label, `probability` is added.
    Both are empty for a row with a blank or broken text. Rows that cannot be parsed are left out.

    Returns:
      A message with the number of rows and of each predicted label.
    """
    task = model.task
    source, suffix = file, epath.Path(out).suffix
    if not {"csv", "tsv", "jsonl"}.isdisjoint(task.spec.formats):
        source = config.source_of("--input", task.kind, file)
    if source.partition(":")[0] not in ("csv", "tsv", "jsonl"):
        raise InputError(
            f"--input {file}: must be a table, which task.kind={task.kind} does not read; use "
            "--source and --out FILE, which write the answers as JSON lines"
        )
    if suffix not in _SUFFIXES:
        raise InputError(f"--out {out}: the name must end in {', '.join(_SUFFIXES)}")
    # The `broken` rows of `unpredicted` are those without a prediction.
    counts, unpredicted, tally = Counter[str](), Tally(), Tally()
    table_rows = _predict_rows(model, source, counts, unpredicted, tally)
    with create_folder(epath.Path(out).parent):
        write_atomic(epath.Path(out), _table_lines(table_rows, suffix, task.header))
    _warn(model, tally)
    shown = ", ".join(f"{label} {counts[label]:,}" for label in model.labels if counts[label])
    parts = [f"{counts.total() + len(unpredicted.broken):,} rows of {file}"]
    parts += [f"predicted {shown}"] if shown else []
    if unpredicted.broken:
        parts.append(f"rows without a prediction: {unpredicted.describe_broken()}")
    return "; ".join(parts)


def _predict_rows(
    model: TaskModel, source: str, counts: Counter[str], unpredicted: Tally, tally: Tally
) -> Iterator[SourceRecord]:
    """Yields each row with the predicted columns.

    `counts` counts labels, `unpredicted` rows without a prediction, and `tally` broken rows.
    """
    task, field = model.task, model.kind.answer_field  # "" if the answer is a label
    on_broken = examples_lib.broken_row_handler(task, tally)
    records = formats.read_records(source, task.header, keep_blank_lines=True, on_broken=on_broken)
    added = [_PREDICTED] if field else [_PREDICTED, _PROBABILITY]
    is_empty = True
    while window := list(itertools.islice(records, WINDOW)):
        is_empty, examples = False, dict[str, Example]()  # by location
        for record in window:
            location, names, values = record
            if existing := [name for name in added if name in names]:
                raise InputError(f"{location}: has a column {existing[0]!r} already; rename it")
            _require_json(values, location)
            cells = formats.select_columns(record, task.text_columns)
            try:
                examples[location] = examples_lib.example_from_cells(task, location, cells)
            except InputError as error:
                if task.broken_rows == "stop" and not any(map(examples_lib.is_blank, cells)):
                    raise
                unpredicted.record_broken(location, error)
        answers = list(model.predict(examples.values())) if examples else []
        by_location = dict(zip(examples, answers, strict=True))
        for location, names, values in window:
            predicted: list[Any] = [None] * len(added)
            if answer := by_location.get(location):
                label = answer[field or "label"]
                predicted = [label] if field else [label, answer["probabilities"][label]]
                counts[str(label)] += 1
            yield SourceRecord(location, [*names, *added], [*values, *predicted])
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


def _table_lines(table_rows: Iterable[SourceRecord], suffix: str, header: str) -> Iterator[str]:
    """Yields the lines of a .csv, .tsv or .jsonl file; `header` "none" omits the column names."""
    first: Sequence[str] = ()  # the column names of the first row
    # `table.writerow` returns the line, as `write` does. It quotes cells with a \r or \n, as
    # both are in `end`; below, \n replaces `end`.
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
                f"{location}: has the columns {quote_names(names)}, but the first row has "
                f"{quote_names(first)}; write a .jsonl file"
            )
        if names != first:  # JSON objects may have them in any order
            lines = [[values[names.index(name)] for name in first]]
        for line in lines:
            try:
                yield table.writerow(map(_cell, line)).removesuffix(end) + "\n"
            except csv.Error as error:
                raise InputError(
                    f"{location}: a cell holds a tab or a newline; write a .csv or .jsonl file"
                ) from error


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return replace_surrogates(value if isinstance(value, str) else json.dumps(value))


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
