"""Columns of files with one example a line, of CoNLL files and of TFDS datasets.

TSV is as in GLUE's files: a tab parts columns, and quotation marks mean nothing. CSV is as Python's
`csv` reads it by default: a comma parts columns, and quoted columns may hold commas, newlines and
doubled quotation marks. Empty lines are no examples.
"""

import csv
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from bert_jax.errors import InputError
from bert_jax.tasks import files
from bert_jax.text import tfds_files

# Characters of a CSV column. Python takes no more than 131,072 unless told otherwise.
_LONGEST_CELL = 2**31 - 1
# Of columns and labels, so many are listed in a message.
_LISTED = 20

Header = Literal["first_line", "none"]
# The place of an example, and the values of the columns asked for, in the order asked for.
Row = tuple[str, list[Any]]


def rows(source: str, header: Header, columns: Sequence[str]) -> Iterator[Row]:
    """The values of some columns, example after example.

    Args:
      source: `tsv:FILE`, `csv:FILE`, `jsonl:FILE`, `conll:FILE` or `tfds:NAME:SPLIT`.
      header: whether the first line of a TSV or CSV file names its columns; those of the others
        are called 0, 1 and so on, as those of CoNLL files are.
      columns: their names.

    Yields:
      For TSV and CSV texts; for JSON and TFDS what stands there, class labels by their names (None
      for -1, by which TFDS says that there is none); for CoNLL a list of texts, a line each.

    Raises:
      InputError: a file that cannot be read, a column that is not there, a line with more or fewer
        columns than the first, or not as its kind of file has to be.
    """
    word, _, path = source.partition(":")
    if word == "tsv":
        return _table(path, _tsv(path), header, columns)
    if word == "csv":
        return _table(path, _csv(path), header, columns)
    if word == "jsonl":
        return _json_lines(path, columns)
    if word == "conll":
        return _conll(path, columns)
    return _dataset(source, columns)


def listed(names: Iterable[str]) -> str:
    """Names for a message, the first twenty of many."""
    names = list(names)
    more = [f"and {len(names) - _LISTED} more"] if len(names) > _LISTED else []
    return ", ".join([*map(files.quoted, names[:_LISTED]), *more])


def _tsv(path: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(files.lines(path), 1):
        if line:
            yield number, line.split("\t")


def _csv(path: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(_LONGEST_CELL)
    # Strict: a quotation mark that is never closed would take in the rest of the file.
    reader = csv.reader((f"{line}\n" for line in files.lines(path)), strict=True)
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{path}:{number}: not CSV ({error}); quote columns that hold commas, newlines or "
                "quotation marks, and double the marks inside"
            ) from error
        if cells:
            yield number, cells


def _table(
    path: str, lines: Iterator[tuple[int, list[str]]], header: Header, columns: Sequence[str]
) -> Iterator[Row]:
    first, cells = next(lines, (0, []))
    if not cells:
        return
    names = cells if header == "first_line" else [str(i) for i in range(len(cells))]
    chosen = _chosen(names, columns, f"{path}:{first}")
    if header == "none":
        yield f"{path}:{first}", [cells[i] for i in chosen]
    for number, cells in lines:
        _require_as_many(cells, len(names), f"{path}:{number}", first)
        yield f"{path}:{number}", [cells[i] for i in chosen]


def _require_as_many(cells: list[str], count: int, place: str, first: int) -> None:
    if len(cells) != count:
        raise InputError(
            f"{place}: {len(cells)} columns, but line {first} has {count}; mend the line, or leave "
            "it out"
        )


def _chosen(names: list[str], columns: Sequence[str], place: str) -> list[int]:
    """Where the columns stand among those that there are."""
    _require_there(columns, names, place)
    for column in columns:
        if names.count(column) > 1:
            raise InputError(f"{place}: more than one column {column!r}; rename the others")
    return [names.index(column) for column in columns]


def _require_there(columns: Sequence[str], names: Collection[str], place: str) -> None:
    for column in columns:
        if column not in names:
            raise InputError(
                f"{place}: no column {column!r}, but {listed(names)}; name the task's in "
                "task.text_column, task.label_column and others (see task.header)"
            )


def _json_lines(path: str, columns: Sequence[str]) -> Iterator[Row]:
    for number, line in enumerate(files.lines(path), 1):
        if not line.strip():
            continue
        place = f"{path}:{number}"
        record = files.parsed(line, place)
        if not isinstance(record, dict):
            raise InputError(f"{place}: {files.kind_of(record)}, not an object with columns")
        _require_there(columns, record, place)
        yield place, [record[column] for column in columns]


def _conll(path: str, columns: Sequence[str]) -> Iterator[Row]:
    """Sentences: lines up to a blank one."""
    first = 0  # the line that the others are held against
    chosen: list[int] = []
    names: list[str] = []
    start = 0
    words: list[list[str]] = []
    # The file's end ends a sentence, too.
    for number, line in enumerate(_with_end(files.lines(path)), 1):
        # At blanks and tabs alone: words may hold other white space, such as U+3000.
        cells = re.split(r"[ \t]+", line.strip(" \t"))
        if cells == [""] or cells[0] == "-DOCSTART-":
            if words:
                yield f"{path}:{start}", [[cells[i] for cells in words] for i in chosen]
            words = []
            continue
        if not first:
            first = number
            names = [str(i) for i in range(len(cells))]
            chosen = _chosen(names, columns, f"{path}:{number}")
        _require_as_many(cells, len(names), f"{path}:{number}", first)
        if not words:
            start = number
        words.append(cells)


def _with_end(lines: Iterator[str]) -> Iterator[str]:
    yield from lines
    yield ""


def _dataset(source: str, columns: Sequence[str]) -> Iterator[Row]:
    for place, record in dataset(source):
        _require_there(columns, record, place)
        yield place, [record[column] for column in columns]


def dataset(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Places and records of `tfds:NAME:SPLIT`, in plain Python values, class labels as names.

    Raises:
      InputError: as `tfds_files`; texts that are not UTF-8, or a class label without a name.
    """
    name, _, split = source.partition(":")[2].rpartition(":")
    folder = tfds_files.find(name)
    classes = tfds_files.class_labels(folder)
    for number, record in enumerate(tfds_files.records(folder, split)):
        place = f"{source}:{number}"
        yield place, {key: _plain(value, classes.get(key), place) for key, value in record.items()}


def _plain(value: Any, classes: Any, place: str) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner, None, place) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, classes, place) for inner in value]
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{place}: not UTF-8 ({error})") from error
    if classes is None:
        return value
    if not -1 <= value < classes.num_classes:
        raise InputError(f"{place}: class {value}, but there are {classes.num_classes} classes")
    return None if value == -1 else classes.int2str(value)
