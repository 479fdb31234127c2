"""Reads records with their locations: rows of CSV, TSV and Parquet files, and JSON.

CSV is read by Python's `csv`: quoted cells may contain commas, newlines and doubled quotation
marks. TSV is as in GLUE: a line is a row, tabs separate columns, and quotation marks have no
meaning. Blank lines are not rows.
"""

import contextlib
import csv
import json
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet

from bert_jax.errors import InputError
from bert_jax.text import line_reader

# The location of a row, the names of its columns, and their values.
TableRow = tuple[str, list[str], list[Any]]
# Is given the location of a broken row and the error; returns to skip the row, or raises.
OnBroken = Callable[[str, InputError], None]

# Maximum length of a CSV cell; Python's default is 131,072.
_LONGEST_CELL = 2**31 - 1
# Rows of a Parquet file per batch.
_ROWS = 1_000
# The most names that a message lists.
_LISTED = 20
# Half of a surrogate pair.
_HALF = re.compile("[\ud800-\udfff]")
# Advice for tables with another separator.
_SEPARATORS = {
    ";": "semicolons: write it with commas",
    "\t": "tabs: read it as tsv:FILE",
    ",": "commas: read it as csv:FILE",
}


def refuse(location: str, error: InputError) -> None:
    """Refuses a broken row."""
    del location
    raise error


def table(
    kind: Literal["csv", "tsv"],
    lines: Iterable[str],
    path: str,
    header: str = "first_line",
    blank_lines: bool = False,
    on_broken: OnBroken = refuse,
) -> Iterator[TableRow]:
    """Yields FILE:LINE, names and cells of each row of a file's decoded lines.

    The first line has the names; without such a `header` they are 0, 1 and so on. With
    `blank_lines` a blank line before a row of a one-column table is a row with a blank cell.
    `on_broken` is called for rows with more or fewer cells than the first.
    """
    names: list[str] = []
    first = before = 0
    for number, cells in _csv(lines, path) if kind == "csv" else _tsv(lines):
        location = f"{path}:{number}"
        if not names:
            first = before = number
            names = cells if header == "first_line" else [str(i) for i in range(len(cells))]
            if header == "first_line":
                continue
        if blank_lines and len(names) == 1:
            yield from ((f"{path}:{blank}", names, [""]) for blank in range(before + 1, number))
            before = number + cells[0].count("\n")
        try:
            require_as_many(cells, len(names), location, first, separator_note(names))
        except InputError as error:
            on_broken(location, error)
        else:
            yield location, names, cells


def separator_note(names: Sequence[str]) -> str:
    """Returns advice if the only name of a header contains another separator, else ""."""
    advice = [text for mark, text in _SEPARATORS.items() if len(names) == 1 and mark in names[0]]
    return f"; the file seems to be separated by {advice[0]}" if advice else ""


def require_as_many(cells: list[str], count: int, where: str, first: int, note: str = "") -> None:
    """Raises InputError unless a row has as many cells as the line `first` of its file."""
    if len(cells) != count:
        raise InputError(
            f"{where}: {len(cells)} columns, but line {first} has {count}; correct or remove the "
            f"line{note}"
        )


def _tsv(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, 1):
        if row := line.removesuffix("\n").removesuffix("\r"):
            yield number, row.split("\t")


def _csv(lines: Iterable[str], path: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(_LONGEST_CELL)
    # Strict: otherwise an unclosed quotation mark would include the rest of the file.
    reader = csv.reader(lines, strict=True)
    header: list[str] = []
    while True:
        number = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            raise InputError(
                f"{path}:{number}: not CSV ({error}); quote cells that contain commas, newlines or "
                f"quotation marks, and double the marks inside{separator_note(header)}"
            ) from error
        if cells:
            header = header or cells
            yield number, cells


def read_json(text: str, where: str) -> Any:
    """Parses JSON; error messages begin with `where`."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where}: not JSON ({error})") from error


def field_value(record: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field; `data.text` means the field `text` of the object `data`.

    A key that itself is `data.text` takes precedence. A field of a null object is null.

    Raises:
      KeyError: the record has no such field.
    """
    if name in record:
        return record[name]
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        outer = record.get(key := ".".join(parts[:count]))
        if isinstance(outer, Mapping):
            return field_value(outer, ".".join(parts[count:]))
        if key in record and outer is None:
            return None
    raise KeyError(name)


def field_names(record: Mapping[str, Any]) -> list[str]:
    """Returns the names by which `field_value` finds the values of a record, except objects."""
    names: list[str] = []
    for key, value in record.items():
        inner = field_names(value) if isinstance(value, Mapping) else []
        names += [f"{key}.{name}" for name in inner] or [key]
    return names


def quote_names(names: Iterable[str]) -> str:
    """Formats names in quotation marks for a message, the first twenty of many."""
    names = list(names)
    quoted = [repr(name) for name in names[:_LISTED]]
    if len(names) > _LISTED:
        quoted.append(f"and {len(names) - _LISTED} more")
    return ", ".join(quoted) or "none"


def type_name(value: object) -> str:
    """Returns the JSON name of a value's type for a message, such as "a number"."""
    if isinstance(value, np.generic):  # as TFDS gives numbers
        value = value.item()
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a text"
    if isinstance(value, Mapping):
        return "an object"
    return "a number" if isinstance(value, numbers.Number) else "a list"


def text_field(record: Any, name: str) -> str:
    """Returns the text in a field of a record; for null the empty text."""
    if not isinstance(record, Mapping):
        raise InputError(f"{type_name(record)}, not an object with the field {name!r}")
    try:
        value = field_value(record, name)
    except KeyError:
        problem = f"no field {name!r}"
    else:
        if isinstance(value, bytes):  # as TFDS gives texts
            value = decode_utf8(value, f"field {name!r}")
        if value is None or isinstance(value, str):
            return value or ""
        problem = f"{type_name(value)} in field {name!r}, not a text"
    raise InputError(
        f"{problem}; its fields are {quote_names(field_names(record))}: name one with --set "
        "corpus.text_field=..."
    )


def decode_utf8(data: bytes, where: str) -> str:
    """Decodes UTF-8; error messages begin with `where`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 ({error})") from error


def encodable(text: str) -> str:
    """Returns a text with U+FFFD for lone surrogates, which JSON may contain."""
    if _HALF.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def column_of(rows: Iterable[TableRow], column: str, path: str) -> Iterator[tuple[str, str]]:
    """Yields the location and the text in a column of each row of a `table`."""
    known_names, index = None, 0
    for location, names, cells in rows:
        if names is not known_names:
            known_names, index = names, _column_index(column, names, path)
        yield location, cells[index]


def _column_index(column: str, names: Sequence[str], path: str) -> int:
    if names.count(column) != 1:
        how_many = "more than one" if column in names else "no"
        raise InputError(
            f"{path}: {how_many} column {column!r}; it has {quote_names(names)}: name one with "
            f"--set corpus.text_field=...{separator_note(names)}"
        )
    return names.index(column)


def parts(path: str, column: str, most: int) -> list[tuple[int, int, int]]:
    """Divides a Parquet file into parts: (first row group, one past the last, bytes of text).

    A part has about `most` bytes of the column's text; row groups are never cut.
    """
    with _open_parquet(path, column) as (file, index):
        sizes = [
            file.metadata.row_group(number).column(index).total_uncompressed_size
            for number in range(file.metadata.num_row_groups)
        ]
    complete: list[tuple[int, int, int]] = []
    first = size = 0
    for number, group_size in enumerate(sizes):
        if number > first and size + group_size > most:
            complete.append((first, number, size))
            first, size = number, 0
        size += group_size
    return [*complete, (first, len(sizes), size)] if sizes else []


def parquet(path: str, column: str, start: int, stop: int) -> Iterator[tuple[str, str]]:
    """Yields FILE:ROW, counted from 0, and the text of each row; for null the empty text.

    Reads the row groups from `start` until before `stop`; -1: to the end. `article.text` means the
    column `text` within the column `article`.
    """
    with _open_parquet(path, column) as (file, _):
        try:
            groups = range(file.metadata.num_row_groups)
            number = sum(file.metadata.row_group(group).num_rows for group in groups[:start])
            selected = groups[start:] if stop < 0 else groups[start:stop]
            for batch in file.iter_batches(_ROWS, row_groups=list(selected), columns=[column]):
                for text in batch.column(0).to_pylist():
                    while isinstance(text, dict):  # a column within another
                        (text,) = text.values()
                    yield f"{path}:{number}", text or ""
                    number += 1
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise InputError(f"{path}: damaged Parquet file ({error})") from error


@contextlib.contextmanager
def _open_parquet(path: str, column: str) -> Iterator[tuple[pyarrow.parquet.ParquetFile, int]]:
    """Opens a Parquet file; yields it and the index of its column of texts."""
    with line_reader.translate_errors(path), line_reader.open_raw(path) as data:
        try:
            file = pyarrow.parquet.ParquetFile(data)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path}: cannot be read as Parquet ({error})") from error
        schema = file.metadata.schema
        names = [schema.column(number).path for number in range(len(schema))]
        index = _column_index(column, names, path)
        texts = schema.column(index)
        if texts.logical_type.type != "STRING" or texts.max_repetition_level:
            raise InputError(
                f"{path}: column {column!r} holds no texts ({texts.physical_type}); it has "
                f"{quote_names(names)}: name one with --set corpus.text_field=..."
            )
        yield file, index
