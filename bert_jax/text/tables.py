"""Texts in a column of CSV, TSV and Parquet files.

The first line of a CSV or TSV file (see `records`) names its columns.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import pyarrow
import pyarrow.parquet

from bert_jax.errors import InputError
from bert_jax.text import lines as text_lines
from bert_jax.text import records

# Rows of a Parquet file that are held as Python's strings.
_ROWS = 1_000


def read(
    path: str, lines: Iterable[str], kind: Literal["csv", "tsv"], column: str
) -> Iterator[tuple[str, str]]:
    """Yields FILE:LINE and the text of each row of a file's decoded lines, blank rows left out."""
    rows = records.rows(kind, lines, path)
    _, names = next(rows, (0, []))
    if not names:
        return
    place = _place_of(column, names, path)
    for number, cells in rows:
        if len(cells) != len(names):
            raise InputError(
                f"{path}:{number}: {len(cells)} columns, but the first line names {len(names)}; is "
                f"it {kind}?"
            )
        yield f"{path}:{number}", cells[place]


def _place_of(column: str, names: Sequence[str], path: str) -> int:
    if column not in names:
        raise InputError(
            f"{path}: no column {column!r}; it has {', '.join(map(repr, names))}: name one with "
            "--set corpus.text_field=..."
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
                for text in _leaf(batch).to_pylist():
                    yield f"{path}:{number}", text or ""
                    number += 1
        except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
            raise InputError(f"{path}: damaged Parquet file ({error})") from error


def _leaf(batch: pyarrow.RecordBatch) -> pyarrow.Array:
    values = batch.column(0)
    while pyarrow.types.is_struct(values.type):
        values = values.flatten()[0]
    return values


@contextlib.contextmanager
def _opened(path: str, column: str) -> Iterator[tuple[pyarrow.parquet.ParquetFile, int]]:
    """Gives a Parquet file, and the place of its column of texts; closed at the end."""
    with contextlib.ExitStack() as stack:
        try:
            data = stack.enter_context(text_lines.packed(path))
            file = pyarrow.parquet.ParquetFile(data)
        except (pyarrow.ArrowException, OSError) as error:
            raise InputError(f"{path}: cannot be read as Parquet ({error})") from error
        schema = file.metadata.schema
        names = [schema.column(number).path for number in range(len(schema))]
        place = _place_of(column, names, path)
        if schema.column(place).logical_type.type != "STRING":
            raise InputError(f"{path}: column {column!r} holds no texts")
        yield file, place
