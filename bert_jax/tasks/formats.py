"""Reads rows and questions from files and TFDS datasets, with their locations.

A source is FORMAT:PATH. The formats:

  tsv    a row per line, tabs between cells (see text.records)
  csv    a row per line, commas between cells
  jsonl  a JSON object per line
  conll  a word per line, a blank line after each sentence; blanks and tabs separate columns
  squad  JSON of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018):
         {"data": [{"paragraphs": [{"context": TEXT, "qas": [
             {"id": TEXT, "question": TEXT, "is_impossible": BOOLEAN,
              "answers": [{"text": TEXT, "answer_start": CHARACTER}]}]}]}]}
  tfds   records of a prepared dataset; the path is NAME:SPLIT
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax.errors import InputError, excerpt, json_object
from bert_jax.text import line_reader, tfds_files
from bert_jax.text import records as text_records
from bert_jax.text.records import OnBroken

# The most characters of a value, and the most names, that a message quotes.
_QUOTED_CHARACTERS, _LISTED_NAMES = 60, 20
# Formats whose rows all have the same columns.
_TABLE_FORMATS = ("tsv", "csv", "conll")
# Names of JSON's types, for messages.
_TYPE_NAMES = {list: "a list", str: "a text", bool: "a boolean", int: "an integer"}

Record = tuple[str, dict[str, Any]]  # location, fields


def rows(
    source: str, header: str, columns: Sequence[str], on_broken: OnBroken = text_records.refuse
) -> Iterator[tuple[str, list[Any]]]:
    """Yields (location, values of `columns`) for each example of a source, except `squad`.

    With the header "none", the columns of TSV and CSV files are called 0, 1 and so on. The columns
    of CoNLL files always are. `data.text` is the field `text` of the object `data` (JSON, TFDS).

    Yields:
      The values are texts in TSV and CSV, any values in JSON and TFDS, and lists of texts, one per
      word, in CoNLL.
    """
    is_table = source.partition(":")[0] in _TABLE_FORMATS
    for location, names, values in records(source, header, on_broken=on_broken):
        try:
            selected = cells(columns, names, values, location)
        except InputError as error:
            if is_table:  # every row lacks the column
                raise
            on_broken(location, error)
        else:
            yield location, selected


def records(
    source: str,
    header: str,
    blank_lines: bool = False,
    on_broken: OnBroken = text_records.refuse,
) -> Iterator[text_records.TableRow]:
    """Yields (location, column names, values) for each example; see `rows` for the arguments.

    With `blank_lines`, a blank line before a row of a one-column table is a row with a blank cell.
    """
    format_, _, path = source.partition(":")
    if format_ in ("tsv", "csv"):
        lines = (f"{line}\n" for line in _lines(path))
        return text_records.table(format_, lines, path, header, blank_lines, on_broken)
    if format_ == "conll":
        return _conll(path, on_broken)
    located = _json_lines(path, on_broken) if format_ == "jsonl" else _dataset(source)
    return ((location, list(record), list(record.values())) for location, record in located)


def cells(
    columns: Sequence[str], names: Sequence[str], values: Sequence[Any], location: str
) -> list[Any]:
    """Returns the values of `columns` in a row; `names` must have each of them exactly once."""
    record, selected = dict(zip(names, values, strict=True)), []
    for column in columns:
        problem = "more than one" if names.count(column) > 1 else ""
        try:
            selected.append(text_records.field_value(record, column))
        except KeyError:
            problem = "no"
        if problem:
            raise InputError(
                f"{location}: {problem} column {column!r} among "
                f"{quote_names(text_records.field_names(record))}; set the columns of the task in "
                "task.text_column, task.label_column and others (see task.header)"
                f"{text_records.separator_note(names)}"
            )
    return selected


def _lines(path: str) -> Iterator[str]:
    """Yields the lines of a text file, without line ends; decompresses .gz and .zst."""
    return (line.removesuffix("\r") for _, line in line_reader.read_file(path))


def _conll(path: str, on_broken: OnBroken) -> Iterator[text_records.TableRow]:
    first_line, names = 0, list[str]()  # of the file's first word
    start = 0  # the line of the sentence's first word
    words: list[list[str]] = []  # of the sentence
    sentence_error: InputError | None = None
    # The added line ends the last sentence.
    for number, line in enumerate(itertools.chain(_lines(path), [""]), 1):
        # Not split(): a word may contain other white space, such as U+3000.
        columns = re.findall(r"[^ \t]+", line)
        if columns and columns[0] != "-DOCSTART-":
            if not names:
                first_line, names = number, [str(i) for i in range(len(columns))]
            try:
                text_records.require_as_many(columns, len(names), f"{path}:{number}", first_line)
            except InputError as error:
                sentence_error = sentence_error or error
            start = start if words else number
            words.append(columns)
        elif words:
            location = f"{path}:{start}"
            if sentence_error is None:
                yield location, names, [list(column) for column in zip(*words, strict=True)]
            else:
                on_broken(location, sentence_error)
            words, sentence_error = [], None


def _json_lines(path: str, on_broken: OnBroken) -> Iterator[Record]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            location = f"{path}:{number}"
            try:
                record = json_object(line, location)
            except InputError as error:
                on_broken(location, error)
            else:
                yield location, record


def _dataset(source: str) -> Iterator[Record]:
    name, _, split = source.partition(":")[2].rpartition(":")
    folder = tfds_files.find(name)
    classes = tfds_files.class_labels(folder)
    for number, record in enumerate(tfds_files.records(folder, split)):
        location = f"{source}:{number}"
        yield (
            location,
            {key: _plain(value, classes.get(key), location) for key, value in record.items()},
        )


def _plain(value: Any, classes: Any, location: str) -> Any:
    """Converts a value of TFDS: arrays to lists, class numbers to names, -1 (no label) to None."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner, None, location) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, classes, location) for inner in value]
    if isinstance(value, bytes):
        return text_records.decode_utf8(value, location)
    if classes is None:
        return value
    if not -1 <= value < classes.num_classes:
        raise InputError(f"{location}: class {value}, but there are {classes.num_classes} classes")
    return None if value == -1 else classes.int2str(value)


# --- questions ------------------------------------------------------------------------------------


def questions(source: str) -> Iterator[Record]:
    """Yields the questions of `squad:FILE` or `tfds:NAME:SPLIT`, unchecked.

    Yields:
      (location, fields): `id`, `question`, `context`, `answers` (a list of objects) and others.
    """
    format_, _, path = source.partition(":")
    return _squad_file(path) if format_ == "squad" else _squad_dataset(source)


def _squad_file(path: str) -> Iterator[Record]:
    """Yields each question, with its context and its position in the file's JSON."""
    tree = text_records.read_json("\n".join(_lines(path)), path)
    for i, article in enumerate(field(tree, "data", list, path)):
        article_place = f"{path}: data[{i}]"
        for j, paragraph in enumerate(field(article, "paragraphs", list, article_place)):
            paragraph_place = f"{article_place}.paragraphs[{j}]"
            context = field(paragraph, "context", str, paragraph_place)
            for k, record in enumerate(field(paragraph, "qas", list, paragraph_place)):
                location = f"{paragraph_place}.qas[{k}]"
                field(record, "id", str, location)
                yield location, record | {"context": context}


def _squad_dataset(source: str) -> Iterator[Record]:
    """Yields each question of a dataset. TFDS stores answers as an object of lists."""
    for location, record in _dataset(source):
        answers = record.get("answers")
        if isinstance(answers, dict):
            texts = field(answers, "text", list, location)
            starts = field(answers, "answer_start", list, location)
            if len(texts) != len(starts):
                raise InputError(f"{location}: {len(texts)} answers and {len(starts)} answer_start")
            pairs = zip(texts, starts, strict=True)
            record["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        yield location, record


# --- values ---------------------------------------------------------------------------------------


def field(node: Any, key: str, of: type, where: str) -> Any:
    """Returns the value of a key of a JSON object, which must have the type `of`."""
    if not isinstance(node, dict) or type(node.get(key)) is not of:
        keys = f"; it has {quote_names(node)}" if isinstance(node, dict) else ""
        raise InputError(f"{where}: must be an object with {key!r}, {_TYPE_NAMES[of]}{keys}")
    return node[key]


def text_of(value: object, name: str, location: str) -> str:
    """Returns `value`, which must be a text and not blank, in a form that UTF-8 can encode.

    JSON can contain halves of surrogate pairs; they become U+FFFD.
    """
    if not isinstance(value, str):
        raise InputError(
            f"{location}: {name} is {json.dumps(value)[:_QUOTED_CHARACTERS]}, not a text"
        )
    if not value.strip():
        raise InputError(f"{location}: {name} is blank; fill it in, or remove the example")
    return text_records.encodable(value)


def quote_names(names: Iterable[str]) -> str:
    """Formats names for a message: 'a', 'b', and 5 more."""
    names = list(names)
    quoted = [excerpt(name) for name in names[:_LISTED_NAMES]]
    if len(names) > _LISTED_NAMES:
        quoted.append(f"and {len(names) - _LISTED_NAMES} more")
    return ", ".join(quoted)
