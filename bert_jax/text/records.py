"""Records of files, each with its place: rows of CSV, TSV and Parquet, and JSON.

CSV is what Python's `csv` reads: quoted cells may hold commas, newlines and doubled quotation
marks. In TSV, as GLUE has it, a line is a row, tabs separate columns and quotation marks mean
nothing. Blank lines are no rows.
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
from bert_jax.text import lines as text_lines

# The place of an example, the names of its columns, and their values.
Named = tuple[str, list[str], list[Any]]
# Is given the location of a broken row and the error; returns to skip the row, or raises.
OnBroken = Callable[[str, InputError], None]

# Characters of a CSV cell; Python's own limit is 131,072.
_LONGEST_CELL = 2**31 - 1
# Rows of a Parquet file that are held as Python's strings.
_ROWS = 1_000
# The most names that a message lists.
_LISTED = 20
# Half of a surrogate pair.
_HALF = re.compile("[\ud800-\udfff]")
# What to do about a table with another separator, by the separator.
_SEPARATORS = {
    ";": "semicolons: write it with commas",
    "\t": "tabs: read it as tsv:FILE",
    ",": "commas: read it as csv:FILE",
}


def refuse(place: str, error: InputError) -> None:
    """Refuses a broken row."""
    del place
    raise error


def table(
    kind: Literal["csv", "tsv"],
    lines: Iterable[str],
    path: str,
    header: str = "first_line",
    blank_lines: bool = False,
    on_broken: OnBroken = refuse,
) -> Iterator[Named]:
    """Yields FILE:LINE, names and cells of each row of a file's decoded lines.

    The names are those of the first line; without such a `header` they are 0, 1 and so on. With
    `blank_lines` those before another row are rows with a blank cell, where there is one column.
    `on_broken` is given rows with more or fewer cells than the first.
    """
    names: list[str] = []
    first = before = 0
    for number, cells in _csv(lines, path) if kind == "csv" else _tsv(lines):
        place = f"{path}:{number}"
        if not names:
            first = before = number
            names = cells if header == "first_line" else [str(i) for i in range(len(cells))]
            if header == "first_line":
                continue
        if blank_lines and len(names) == 1:
            yield from ((f"{path}:{blank}", names, [""]) for blank in range(before + 1, number))
            before = number + cells[0].count("\n")
        try:
            require_as_many(cells, len(names), place, first, separator_note(names))
        except InputError as error:
            on_broken(place, error)
        else:
            yield place, names, cells


def separator_note(names: Sequence[str]) -> str:
    """Returns what to do if a header's only name holds another separator, else ""."""
    advice = [text for mark, text in _SEPARATORS.items() if len(names) == 1 and mark in names[0]]
    return f"; the file seems to be separated by {advice[0]}" if advice else ""


def require_as_many(cells: list[str], count: int, place: str, first: int, note: str = "") -> None:
    """Raises InputError unless a row has as many cells as the line `first` of its file."""
    if len(cells) != count:
        raise InputError(
            f"{place}: {len(cells)} columns, but line {first} has {count}; mend the line, or leave "
            f"it out{note}"
        )


def _tsv(lines: Iterable[str]) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(lines, 1):
        if row := line.removesuffix("\n").removesuffix("\r"):
            yield number, row.split("\t")


def _csv(lines: Iterable[str], path: str) -> Iterator[tuple[int, list[str]]]:
    csv.field_size_limit(_LONGEST_CELL)
    # Strict: a quotation mark that is never closed would take in the rest of the file.
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
                f"{path}:{number}: not CSV ({error}); quote cells that hold commas, newlines or "
                f"quotation marks, and double the marks inside{separator_note(header)}"
            ) from error
        if cells:
            header = header or cells
            yield number, cells


def read_json(text: str, place: str) -> Any:
    """Returns what JSON says."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{place}: not JSON ({error})") from error


def field_value(record: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field; `data.text` names the field `text` of the object `data`.

    If a key itself is `data.text`, its value is returned. A field of a null object is null.

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


def listed(names: Iterable[str]) -> str:
    """Returns names in quotation marks for a message, the first twenty of many."""
    names = list(names)
    shown = [repr(name) for name in names[:_LISTED]]
    if len(names) > _LISTED:
        shown.append(f"and {len(names) - _LISTED} more")
    return ", ".join(shown) or "none"


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
    """Returns the text in a field of a record; null gives the empty text."""
    if not isinstance(record, Mapping):
        raise InputError(f"{type_name(record)}, not an object with the field {name!r}")
    try:
        value = field_value(record, name)
    except KeyError:
        wrong = f"no field {name!r}"
    else:
        if isinstance(value, bytes):  # as TFDS gives texts
            value = decode_utf8(value, f"field {name!r}")
        if value is None or isinstance(value, str):
            return value or ""
        wrong = f"{type_name(value)} in field {name!r}, not a text"
    raise InputError(
        f"{wrong}; its fields are {listed(field_names(record))}: name one with --set "
        "corpus.text_field=..."
    )


def decode_utf8(data: bytes, place: str) -> str:
    """Returns the text of a record's bytes."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{place}: not UTF-8 ({error})") from error


def encodable(text: str) -> str:
    """Returns a text in which halves of surrogate pairs, which JSON can spell, are U+FFFD."""
    if _HALF.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def column_of(rows: Iterable[Named], column: str, path: str) -> Iterator[tuple[str, str]]:
    """Yields the place and the text in a column of each row of a `table`."""
    of, at = None, 0
    for place, names, cells in rows:
        if names is not of:
            of, at = names, _place_of(column, names, path)
        yield place, cells[at]


def _place_of(column: str, names: Sequence[str], path: str) -> int:
    if names.count(column) != 1:
        how_many = "more than one" if column in names else "no"
        raise InputError(
            f"{path}: {how_many} column {column!r}; it has {listed(names)}: name one with --set "
            f"corpus.text_field=...{separator_note(names)}"
        )
    return names.index(column)


def parts(path: str, column: str, most: int) -> list[tuple[int, int, int]]:
    """Returns (first row group, one past the last, bytes of text) of parts of a Parquet file.

    A part has `most` bytes of the column's text, roughly; a row group is not cut.
    """
    with _opened(path, column) as (file, place):
        sizes = [
            file.metadata.row_group(number).column(place).total_uncompressed_size
            for number in range(file.metadata.num_row_groups)
        ]
    made: list[tuple[int, int, int]] = []
    first = size = 0
    for number, more in enumerate(sizes):
        if number > first and size + more > most:
            made.append((first, number, size))
            first, size = number, 0
        size += more
    return [*made, (first, len(sizes), size)] if sizes else []


def parquet(path: str, column: str, start: int, stop: int) -> Iterator[tuple[str, str]]:
    """Yields FILE:ROW, counted from 0, and the text of each row; empty where there is none.

    Row groups are read from `start` to one before `stop`, -1: all that follow. A column within
    another is named as `article.text`.
    """
    with _opened(path, column) as (file, _):
        try:
            groups = range(file.metadata.num_row_groups)
            number = sum(file.metadata.row_group(group).num_rows for group in groups[:start])
            chosen = groups[start:] if stop < 0 else groups[start:stop]
            for batch in file.iter_batches(_ROWS, row_groups=list(chosen), columns=[column]):
                for text in batch.column(0).to_pylist():
                    while isinstance(text, dict):  # a column within another
                        (text,) = text.values()
                    yield f"{path}:{number}", text or ""
                    number += 1
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise InputError(f"{path}: damaged Parquet file ({error})") from error


@contextlib.contextmanager
def _opened(path: str, column: str) -> Iterator[tuple[pyarrow.parquet.ParquetFile, int]]:
    """Gives a Parquet file, and the place of its column of texts; closed at the end."""
    with text_lines.answering(path), text_lines.packed(path) as data:
        try:
            file = pyarrow.parquet.ParquetFile(data)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path}: cannot be read as Parquet ({error})") from error
        schema = file.metadata.schema
        names = [schema.column(number).path for number in range(len(schema))]
        place = _place_of(column, names, path)
        chosen = schema.column(place)
        if chosen.logical_type.type != "STRING" or chosen.max_repetition_level:
            raise InputError(
                f"{path}: column {column!r} holds no texts ({chosen.physical_type}); it has "
                f"{listed(names)}: name one with --set corpus.text_field=..."
            )
        yield file, place
