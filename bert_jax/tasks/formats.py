"""Maps the columns of records to the texts and labels of a task.

A source is FORMAT:PATH. The formats are those of `text.records` except parquet, and tfds: records
of a prepared dataset, whose path is NAME:SPLIT.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from bert_jax.errors import InputError
from bert_jax.text import line_reader, tfds_files
from bert_jax.text import records as text_records
from bert_jax.text.records import OnBroken, Record, field, quote_value

# Formats whose rows all have the same columns.
_TABLE_FORMATS = ("tsv", "csv", "conll")


def records(
    source: str,
    header: str,
    blank_lines: bool = False,
    on_broken: OnBroken = text_records.refuse,
) -> Iterator[Record]:
    """Yields the records of a source; see `text.records.parse` for the other arguments."""
    format_, _, path = source.partition(":")
    if format_ == "tfds":
        return itertools.starmap(Record.of_object, tfds_files.plain_records(path))
    lines = (line.removesuffix("\r") + "\n" for _, line in line_reader.read_file(path))
    return text_records.parse(format_, lines, path, header, blank_lines, on_broken)


def rows(
    source: str, header: str, columns: Sequence[str], on_broken: OnBroken = text_records.refuse
) -> Iterator[tuple[str, list[Any]]]:
    """Yields (location, values of `columns`) for each record of a source."""
    is_table = source.partition(":")[0] in _TABLE_FORMATS
    for record in records(source, header, on_broken=on_broken):
        try:
            values = select(record, columns)
        except InputError as error:
            if is_table:  # every row lacks the column
                raise
            on_broken(record.location, error)
        else:
            yield record.location, values


def select(record: Record, columns: Sequence[str]) -> list[Any]:
    """Returns the values of `columns`; the record must have each of them exactly once."""
    remedy = (
        "set the columns of the task in task.text_column, task.label_column and others (see "
        "task.header)"
    )
    return [record.value(column, remedy) for column in columns]


def questions(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the questions of `squad:FILE` or `tfds:NAME:SPLIT`, unchecked.

    Yields:
      (location, fields): `id`, `question`, `context`, `answers` (a list of objects) and others.
    """
    for location, names, values in records(source, "first_line"):
        fields = dict(zip(names, values, strict=True))
        answers = fields.get("answers")
        if isinstance(answers, dict):  # TFDS stores answers as an object of lists
            texts = field(answers, "text", list, location)
            starts = field(answers, "answer_start", list, location)
            if len(texts) != len(starts):
                raise InputError(f"{location}: {len(texts)} answers and {len(starts)} answer_start")
            pairs = zip(texts, starts, strict=True)
            fields["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        yield location, fields


def text_of(value: object, name: str, location: str) -> str:
    """Returns `value`, which must be a text and not blank, in a form that UTF-8 can encode.

    JSON can contain halves of surrogate pairs; they become U+FFFD.
    """
    if not isinstance(value, str):
        raise InputError(f"{location}: {name} is {quote_value(value)}, not a text")
    if not value.strip():
        raise InputError(f"{location}: {name} is blank; fill it in, or remove the example")
    return text_records.encodable(value)
