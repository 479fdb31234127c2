"""Reads the records of a task's sources, and maps their columns to texts and labels.

A source is FORMAT:PATH. The formats:

  tsv, csv, jsonl  see `text.records`
  conll  a word per line, a blank line after each sentence; columns separated by spaces or tabs
  squad  JSON of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018):
         {"data": [{"paragraphs": [{"context": TEXT, "qas": [
             {"id": TEXT, "question": TEXT, "is_impossible": BOOLEAN,
              "answers": [{"text": TEXT, "answer_start": CHARACTER}]}]}]}]}
  tfds   records of a prepared dataset; the path is NAME:SPLIT
  beir   a folder of texts and queries, read by `embeddings.retrieval`
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax.errors import InputError, json_object
from bert_jax.text import line_reader, tfds_files
from bert_jax.text import records as text_records
from bert_jax.text.records import OnBroken, SourceRecord, quote_names, quote_value

# Formats whose rows all have the same columns.
_TABLE_FORMATS = ("tsv", "csv", "conll")
# Names of JSON's types, for messages.
_TYPE_NAMES = {list: "a list", str: "a text", bool: "a boolean", int: "an integer"}


def read_records(
    source: str,
    header: str,
    keep_blank_lines: bool = False,
    on_broken: OnBroken = text_records.refuse,
) -> Iterator[SourceRecord]:
    """Yields the records of a source; `header` is `task.header`, and see `text.records.parse`.

    The columns of CoNLL are 0, 1 and so on; their values are lists of texts, one for each word.
    """
    format_, _, path = source.partition(":")
    if format_ == "tfds":
        return _read_tfds(path)
    lines = (line.removesuffix("\r") + "\n" for _, line in line_reader.read_file(path))
    if format_ == "conll":
        return _read_conll(lines, path, on_broken)
    if format_ == "squad":
        return _read_squad(lines, path)
    return text_records.parse(format_, lines, path, header, keep_blank_lines, on_broken)


def _read_conll(lines: Iterable[str], path: str, on_broken: OnBroken) -> Iterator[SourceRecord]:
    first_line, names = 0, list[str]()  # line number and column names of the file's first word
    start = 0  # line number of the sentence's first word
    words: list[list[str]] = []  # the columns of the sentence's words
    sentence_error: InputError | None = None
    # The added line ends the last sentence.
    for number, line in enumerate(itertools.chain(lines, [""]), 1):
        # Not split(): a word may contain other white space, such as U+3000.
        columns = re.findall(r"[^ \t\n]+", line)
        if columns and columns[0] != "-DOCSTART-":
            if not names:
                first_line, names = number, [str(i) for i in range(len(columns))]
            try:
                text_records.require_cell_count(columns, len(names), f"{path}:{number}", first_line)
            except InputError as error:
                sentence_error = sentence_error or error
            start = start if words else number
            words.append(columns)
        elif words:
            location = f"{path}:{start}"
            if sentence_error is None:
                values = [list(column) for column in zip(*words, strict=True)]
                yield SourceRecord(location, names, values)
            else:
                on_broken(location, sentence_error)
            words, sentence_error = [], None


def _read_squad(lines: Iterable[str], path: str) -> Iterator[SourceRecord]:
    """Yields each question with its context; the location is its position in the file's JSON."""
    tree = json_object("".join(lines), path)
    for i, article in enumerate(require_field(tree, "data", list, path)):
        article_location = f"{path}: data[{i}]"
        for j, paragraph in enumerate(require_field(article, "paragraphs", list, article_location)):
            paragraph_location = f"{article_location}.paragraphs[{j}]"
            context = require_field(paragraph, "context", str, paragraph_location)
            for k, fields in enumerate(require_field(paragraph, "qas", list, paragraph_location)):
                location = f"{paragraph_location}.qas[{k}]"
                require_field(fields, "id", str, location)  # so `fields` is an object
                yield SourceRecord.from_dict(location, fields | {"context": context})


def _read_tfds(name_and_split: str) -> Iterator[SourceRecord]:
    """Yields the records of a TFDS dataset, with values converted to JSON.

    Arrays become lists, bytes texts, and class numbers names; -1 (no label) becomes None.
    """
    name, _, split = name_and_split.rpartition(":")
    folder = tfds_files.find(name)
    classes = tfds_files.class_labels(folder)
    for number, fields in enumerate(tfds_files.records(folder, split)):
        location = f"tfds:{name_and_split}:{number}"
        values = [_to_json(value, classes.get(key), location) for key, value in fields.items()]
        yield SourceRecord(location, list(fields), values)


def _to_json(value: Any, classes: Any, location: str) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _to_json(inner, None, location) for key, inner in value.items()}
    if isinstance(value, list):
        return [_to_json(inner, classes, location) for inner in value]
    if isinstance(value, bytes):
        return text_records.decode_utf8(value, location)
    if classes is None:
        return value
    if not -1 <= value < classes.num_classes:
        raise InputError(f"{location}: class {value}, but there are {classes.num_classes} classes")
    return None if value == -1 else classes.int2str(value)


def read_columns(
    source: str, header: str, columns: Sequence[str], on_broken: OnBroken = text_records.refuse
) -> Iterator[tuple[str, list[Any]]]:
    """Yields (location, values of `columns`) for each record of a source."""
    is_table = source.partition(":")[0] in _TABLE_FORMATS
    for record in read_records(source, header, on_broken=on_broken):
        try:
            values = select_columns(record, columns)
        except InputError as error:
            if is_table:  # every row lacks the column
                raise
            on_broken(record.location, error)
        else:
            yield record.location, values


def select_columns(record: SourceRecord, columns: Sequence[str]) -> list[Any]:
    """Returns the values of `columns`; the record must have each of them exactly once."""
    remedy = (
        "set the columns of the task in task.text_column, task.label_column and others (see "
        "task.header)"
    )
    return [record.value(column, remedy) for column in columns]


def read_questions(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the questions of `squad:FILE` or `tfds:NAME:SPLIT`, unchecked.

    Yields:
      (location, fields): `id`, `question`, `context`, `answers` (a list of objects) and others.
    """
    for location, names, values in read_records(source, "first_line"):
        fields = dict(zip(names, values, strict=True))
        answers = fields.get("answers")
        if isinstance(answers, dict):  # TFDS stores answers as an object of lists
            texts = require_field(answers, "text", list, location)
            starts = require_field(answers, "answer_start", list, location)
            if len(texts) != len(starts):
                raise InputError(f"{location}: {len(texts)} answers and {len(starts)} answer_start")
            pairs = zip(texts, starts, strict=True)
            fields["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        yield location, fields


def require_text(value: object, name: str, location: str) -> str:
    """Returns `value`, which must be a text and not blank, in a form that UTF-8 can encode.

    JSON can contain halves of surrogate pairs; they become U+FFFD.
    """
    if not isinstance(value, str):
        raise InputError(f"{location}: {name} is {quote_value(value)}, not a text")
    if not value.strip():
        raise InputError(f"{location}: {name} is blank; fill it in, or remove the example")
    return text_records.replace_surrogates(value)


def require_field(node: Any, key: str, type_: type, location: str) -> Any:
    """Returns `node[key]`; `node` must be a JSON object, and the value of type `type_`."""
    if not isinstance(node, dict) or type(node.get(key)) is not type_:
        keys = f"; it has {quote_names(node)}" if isinstance(node, dict) else ""
        raise InputError(f"{location}: must be an object with {key!r}, {_TYPE_NAMES[type_]}{keys}")
    return node[key]
