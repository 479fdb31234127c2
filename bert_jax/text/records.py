"""Reads records with their locations: rows of tables and JSON objects.

  csv      a row per line, as Python's `csv` reads it: quoted cells may contain commas, newlines and
           doubled quotation marks
  tsv      a row per line, tabs between cells, as in GLUE; quotation marks have no meaning
  jsonl    a JSON object per line
  parquet  a column of texts

Blank lines of tables and of JSON lines are not records.
"""

import contextlib
import csv
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow
import pyarrow.parquet

from bert_jax.errors import InputError, excerpt, json_object
from bert_jax.text import line_reader

# Maximum length of a CSV cell; Python's default is 131,072.
_LONGEST_CELL = 2**31 - 1
# Rows of a Parquet file per batch.
_ROWS = 1_000
# The most characters of a value, and the most names, that a message quotes.
_QUOTED_CHARACTERS, _LISTED_NAMES = 60, 20
# Half of a surrogate pair.
_SURROGATE = re.compile("[\ud800-\udfff]")
# What to do about a column of texts or of numbers that is missing.
_TEXT_FIELD_ADVICE = "name one with --set corpus.text_field=..."
_QUALITY_ADVICE = "name another field with --set corpus.quality=FIELD:MIN"
# Advice for tables with another separator.
_SEPARATORS = {
    ";": "semicolons: write it with commas",
    "\t": "tabs: read it as tsv:FILE",
    ",": "commas: read it as csv:FILE",
}


class SourceRecord(NamedTuple):
    """The values of a row or a JSON object, with the names of their columns."""

    location: str  # FILE:LINE, for messages; FILE:NUMBER, counted from 0, in Parquet and TFDS
    names: Sequence[str]  # a table may have a name twice
    values: Sequence[Any]  # texts in CSV and TSV, any values in JSON, Parquet and TFDS

    @classmethod
    def from_dict(cls, location: str, fields: Mapping[str, Any]) -> "SourceRecord":
        """Returns the record of a JSON object or of a row of Parquet."""
        return cls(location, list(fields), list(fields.values()))

    def value(self, column: str, remedy: str) -> Any:
        """Returns the value of a column; `data.text` means the field `text` of the object `data`.

        Raises InputError with a `remedy` unless the record has exactly one such column.
        """
        count = self.names.count(column)
        if count == 1:
            return self.values[self.names.index(column)]
        if not count:
            with contextlib.suppress(KeyError):
                return field_value(dict(zip(self.names, self.values, strict=True)), column)
        raise InputError(
            f"{self.location}: {'more than one' if count else 'no'} column {column!r} among "
            f"{self._quote_columns()}; {remedy}{_separator_note(self.names)}"
        )

    def text(self, column: str) -> str:
        """Returns the text in a column that `corpus.text_field` names; null is an empty text."""
        value = self.value(column, _TEXT_FIELD_ADVICE)
        if isinstance(value, bytes):  # as TFDS gives texts
            value = decode_utf8(value, f"{self.location}: column {column!r}")
        if value is None or isinstance(value, str):
            return replace_surrogates(value or "")
        raise InputError(
            f"{self.location}: column {column!r} is {quote_value(value)}, not a text; the columns "
            f"are {self._quote_columns()}; {_TEXT_FIELD_ADVICE}"
        )

    def number(self, column: str) -> float:
        """Returns the finite number in a column that `corpus.quality` names.

        Texts such as "3.5" are accepted, true and false are not.
        """
        value = self.value(column, _QUALITY_ADVICE)
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            if not isinstance(value, bool) and math.isfinite(number := float(value)):
                return number
        raise InputError(
            f"{self.location}: column {column!r} is {quote_value(value)}, not a finite number; "
            "correct or remove the record, or change corpus.quality"
        )

    def _quote_columns(self) -> str:
        columns = zip(self.names, self.values, strict=True)
        return quote_names(name for key, value in columns for name in field_names({key: value}))


# Takes the location of a broken record and the error; raises, or returns so that it is skipped.
OnBroken = Callable[[str, InputError], None]


def refuse(location: str, error: InputError) -> None:
    """Refuses a broken record."""
    del location
    raise error


def parse(
    kind: str,
    lines: Iterable[str],
    path: str,
    header: str = "first_line",
    keep_blank_lines: bool = False,
    on_broken: OnBroken = refuse,
) -> Iterator[SourceRecord]:
    """Yields the records of a file of this kind from its decoded lines, which end with \\n.

    The first line of a table has the names of the columns; without such a `header` they are 0, 1
    and so on. With `keep_blank_lines` a blank line before a row of a one-column table is a row with
    a blank cell. `on_broken` is called for rows with more or fewer cells than the first, and for
    lines that are no JSON object.
    """
    if kind == "jsonl":
        return _json_lines(lines, path, on_broken)
    numbered = _csv(lines, path) if kind == "csv" else _tsv(lines)
    return _table(numbered, path, header, keep_blank_lines, on_broken)


def _table(
    numbered: Iterable[tuple[int, list[str]]],
    path: str,
    header: str,
    keep_blank_lines: bool,
    on_broken: OnBroken,
) -> Iterator[SourceRecord]:
    names: list[str] = []
    first = before = 0
    for number, cells in numbered:
        location = f"{path}:{number}"
        if not names:
            first = before = number
            names = cells if header == "first_line" else [str(i) for i in range(len(cells))]
            if header == "first_line":
                continue
        if keep_blank_lines and len(names) == 1:
            yield from (
                SourceRecord(f"{path}:{blank}", names, [""]) for blank in range(before + 1, number)
            )
            before = number + cells[0].count("\n")
        try:
            require_cell_count(cells, len(names), location, first, _separator_note(names))
        except InputError as error:
            on_broken(location, error)
        else:
            yield SourceRecord(location, names, cells)


def _separator_note(names: Sequence[str]) -> str:
    """Returns advice if the only name of a header contains another separator, else ""."""
    advice = [text for mark, text in _SEPARATORS.items() if len(names) == 1 and mark in names[0]]
    return f"; the file seems to be separated by {advice[0]}" if advice else ""


def require_cell_count(
    cells: list[str], count: int, where: str, first: int, note: str = ""
) -> None:
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
                f"quotation marks, and double the marks inside{_separator_note(header)}"
            ) from error
        if cells:
            header = header or cells
            yield number, cells


def _json_lines(lines: Iterable[str], path: str, on_broken: OnBroken) -> Iterator[SourceRecord]:
    for number, line in enumerate(lines, 1):
        if line.strip():
            location = f"{path}:{number}"
            try:
                fields = json_object(line, location)
            except InputError as error:
                on_broken(location, error)
            else:
                yield SourceRecord.from_dict(location, fields)


# --- fields ---------------------------------------------------------------------------------------


def field_value(fields: Mapping[str, Any], name: str) -> Any:
    """Returns the value of a field; `data.text` means the field `text` of the object `data`.

    A key that itself is `data.text` takes precedence. A field of a null object is null.

    Raises:
      KeyError: there is no such field.
    """
    if name in fields:
        return fields[name]
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        outer = fields.get(key := ".".join(parts[:count]))
        if isinstance(outer, Mapping):
            return field_value(outer, ".".join(parts[count:]))
        if key in fields and outer is None:
            return None
    raise KeyError(name)


def field_names(fields: Mapping[str, Any]) -> list[str]:
    """Returns the names by which `field_value` finds the values, except objects."""
    names: list[str] = []
    for key, value in fields.items():
        inner = field_names(value) if isinstance(value, Mapping) else []
        names += [f"{key}.{name}" for name in inner] or [key]
    return names


def quote_names(names: Iterable[str]) -> str:
    """Formats names for a message: 'a', 'b', and 5 more."""
    names = list(names)
    quoted = [excerpt(name) for name in names[:_LISTED_NAMES]]
    if len(names) > _LISTED_NAMES:
        quoted.append(f"and {len(names) - _LISTED_NAMES} more")
    return ", ".join(quoted) or "none"


def quote_value(value: Any) -> str:
    """Formats a value for a message as JSON, or the beginning of a long one."""
    return json.dumps(value, default=str)[:_QUOTED_CHARACTERS]


def decode_utf8(data: bytes, where: str) -> str:
    """Decodes UTF-8; error messages begin with `where`."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 ({error})") from error


def replace_surrogates(text: str) -> str:
    """Returns a text with U+FFFD for lone surrogates, which JSON may contain."""
    if _SURROGATE.search(text):
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


# --- Parquet --------------------------------------------------------------------------------------


def divide_parquet(path: str, column: str, most: int) -> list[tuple[int, int, int]]:
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


def read_parquet(
    path: str, column: str, start: int, stop: int, quality_column: str = ""
) -> Iterator[SourceRecord]:
    """Yields a record for each row, with its text (may be null) and the value of `quality_column`.


    Reads the row groups from `start` until before `stop`; -1: to the end. `article.text` means the
    column `text` within the column `article`.
    """
    with _open_parquet(path, column, quality_column) as (file, _):
        columns = [column, quality_column] if quality_column else [column]
        try:
            groups = range(file.metadata.num_row_groups)
            number = sum(file.metadata.row_group(group).num_rows for group in groups[:start])
            selected = groups[start:] if stop < 0 else groups[start:stop]
            for batch in file.iter_batches(_ROWS, row_groups=list(selected), columns=columns):
                for fields in batch.to_pylist():
                    yield SourceRecord.from_dict(f"{path}:{number}", fields)
                    number += 1
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise InputError(f"{path}: damaged Parquet file ({error})") from error


@contextlib.contextmanager
def _open_parquet(
    path: str, column: str, quality_column: str = ""
) -> Iterator[tuple[pyarrow.parquet.ParquetFile, int]]:
    """Opens a Parquet file; yields it and the index of its column of texts."""
    with line_reader.translate_errors(path), line_reader.open_raw(path) as data:
        try:
            file = pyarrow.parquet.ParquetFile(data)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path}: cannot be read as Parquet ({error})") from error
        schema = file.metadata.schema
        names = [schema.column(number).path for number in range(len(schema))]
        columns = SourceRecord(path, names, range(len(names)))
        index: int = columns.value(column, _TEXT_FIELD_ADVICE)
        if quality_column:
            columns.value(quality_column, _QUALITY_ADVICE)  # raises InputError if it is missing
        texts = schema.column(index)
        if texts.logical_type.type != "STRING" or texts.max_repetition_level:
            raise InputError(
                f"{path}: column {column!r} holds no texts ({texts.physical_type}); the columns "
                f"are {quote_names(names)}; {_TEXT_FIELD_ADVICE}"
            )
        yield file, index
