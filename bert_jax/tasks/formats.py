"""Formats of examples: files and TFDS datasets to columns, and to questions, with their places.

A source is FORMAT:PLACE. What each format holds:

  tsv    an example a row, cells between tabs (see text.records)
  csv    the same, cells between commas
  jsonl  a JSON object a line
  conll  a word a line, a blank line after each sentence; blanks and tabs separate columns
  squad  JSON of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018):
         {"data": [{"paragraphs": [{"context": TEXT, "qas": [
             {"id": TEXT, "question": TEXT, "is_impossible": BOOLEAN,
              "answers": [{"text": TEXT, "answer_start": CHARACTER}]}]}]}]}
  tfds   records of a prepared dataset, NAME:SPLIT
"""

import itertools
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from bert_jax.errors import InputError, json_object
from bert_jax.text import lines as text_lines
from bert_jax.text import records as text_records
from bert_jax.text import tfds_files
from bert_jax.text.records import OnBroken

# Of a text, and of columns and labels, what messages quote.
_QUOTED_CHARACTERS, _LISTED_NAMES = 60, 20
_TABLES = ("tsv", "csv", "conll")
# What JSON calls a type.
_TYPE_NAMES = {list: "a list", str: "a text", bool: "a boolean", int: "an integer"}

Record = tuple[str, dict[str, Any]]


def rows(
    source: str, header: str, columns: Sequence[str], on_broken: OnBroken = text_records.refuse
) -> Iterator[tuple[str, list[Any]]]:
    """Yields the place and the values of some columns, example after example, but not of `squad`.

    With the header `none` columns of TSV and CSV files are called 0, 1 and so on, as those of CoNLL
    files are. In JSON and TFDS `data.text` is the field `text` of the object `data`.

    Yields:
      For TSV and CSV texts, for JSON and TFDS what stands there, for CoNLL a list of texts, a line
      each.
    """
    is_table = source.partition(":")[0] in _TABLES  # whose rows all have the same columns
    for place, names, values in records(source, header, on_broken=on_broken):
        try:
            chosen = cells(columns, names, values, place)
        except InputError as error:
            if is_table:
                raise
            on_broken(place, error)
        else:
            yield place, chosen


def records(
    source: str,
    header: str,
    blank_lines: bool = False,
    on_broken: OnBroken = text_records.refuse,
) -> Iterator[text_records.Named]:
    """Yields all of each example; arguments as of `rows`.

    With `blank_lines` those before another row are rows with a blank cell, in a table that has a
    single column.
    """
    word, _, path = source.partition(":")
    if word in ("tsv", "csv"):
        lines = (f"{line}\n" for line in _lines(path))
        return text_records.table(word, lines, path, header, blank_lines, on_broken)
    if word == "conll":
        return _conll(path, on_broken)
    each = _json_lines(path, on_broken) if word == "jsonl" else _dataset(source)
    return ((place, list(record), list(record.values())) for place, record in each)


def cells(
    columns: Sequence[str], names: Sequence[str], values: Sequence[Any], place: str
) -> list[Any]:
    """Returns the values of some columns of a row."""
    record, chosen = dict(zip(names, values, strict=True)), []
    for column in columns:
        wrong = "more than one" if names.count(column) > 1 else ""
        try:
            chosen.append(text_records.field_value(record, column))
        except KeyError:
            wrong = "no"
        if wrong:
            raise InputError(
                f"{place}: {wrong} column {column!r} among "
                f"{listed(text_records.field_names(record))}; name the task's in task.text_column, "
                f"task.label_column and others (see task.header)"
                f"{text_records.separator_note(names)}"
            )
    return chosen


def _lines(path: str) -> Iterator[str]:
    """Yields a text file's lines without their ends; .gz and .zst are uncompressed."""
    return (line.removesuffix("\r") for _, line in text_lines.of_file(path))


def _conll(path: str, on_broken: OnBroken) -> Iterator[text_records.Named]:
    first, start, names = 0, 0, list[str]()
    words: list[list[str]] = []
    broken: InputError | None = None  # of the sentence
    # The file's end ends a sentence, too.
    for number, line in enumerate(itertools.chain(_lines(path), [""]), 1):
        # Blanks and tabs alone: a word may hold other white space, such as U+3000.
        columns = re.findall(r"[^ \t]+", line)
        if columns and columns[0] != "-DOCSTART-":
            if not names:
                first, names = number, [str(i) for i in range(len(columns))]
            try:
                text_records.require_as_many(columns, len(names), f"{path}:{number}", first)
            except InputError as error:
                broken = broken or error
            start = start if words else number
            words.append(columns)
        elif words:
            place = f"{path}:{start}"
            if broken is None:
                yield place, names, [list(column) for column in zip(*words, strict=True)]
            else:
                on_broken(place, broken)
            words, broken = [], None


def _json_lines(path: str, on_broken: OnBroken) -> Iterator[Record]:
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            place = f"{path}:{number}"
            try:
                record = json_object(line, place)
            except InputError as error:
                on_broken(place, error)
            else:
                yield place, record


def _dataset(source: str) -> Iterator[Record]:
    name, _, split = source.partition(":")[2].rpartition(":")
    folder = tfds_files.find(name)
    classes = tfds_files.class_labels(folder)
    for number, record in enumerate(tfds_files.records(folder, split)):
        place = f"{source}:{number}"
        yield place, {key: _plain(value, classes.get(key), place) for key, value in record.items()}


def _plain(value: Any, classes: Any, place: str) -> Any:
    """Returns plain Python values, class labels by their names; None for -1, no label in TFDS."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, dict):
        return {key: _plain(inner, None, place) for key, inner in value.items()}
    if isinstance(value, list):
        return [_plain(inner, classes, place) for inner in value]
    if isinstance(value, bytes):
        return text_records.decode_utf8(value, place)
    if classes is None:
        return value
    if not -1 <= value < classes.num_classes:
        raise InputError(f"{place}: class {value}, but there are {classes.num_classes} classes")
    return None if value == -1 else classes.int2str(value)


# --- questions ------------------------------------------------------------------------------------


def questions(source: str) -> Iterator[Record]:
    """Yields the questions of `squad:FILE` or `tfds:NAME:SPLIT`, not checked.

    Yields:
      Where it stands, and `id`, `question`, `context`, `answers` as a list of objects, and so on.
    """
    word, _, path = source.partition(":")
    return _squad_file(path) if word == "squad" else _squad_dataset(source)


def _squad_file(path: str) -> Iterator[Record]:
    """Yields where each question stands in the file, and the question with its context."""
    tree = text_records.read_json("\n".join(_lines(path)), path)
    for i, article in enumerate(field(tree, "data", list, path)):
        in_article = f"{path}: data[{i}]"
        for j, paragraph in enumerate(field(article, "paragraphs", list, in_article)):
            where = f"{in_article}.paragraphs[{j}]"
            context = field(paragraph, "context", str, where)
            for k, record in enumerate(field(paragraph, "qas", list, where)):
                place = f"{where}.qas[{k}]"
                field(record, "id", str, place)
                yield place, record | {"context": context}


def _squad_dataset(source: str) -> Iterator[Record]:
    """Yields the same of a dataset; TFDS turns lists of objects into objects of lists."""
    for place, record in _dataset(source):
        answers = record.get("answers")
        if isinstance(answers, dict):
            texts = field(answers, "text", list, place)
            starts = field(answers, "answer_start", list, place)
            if len(texts) != len(starts):
                raise InputError(f"{place}: {len(texts)} answers and {len(starts)} answer_start")
            pairs = zip(texts, starts, strict=True)
            record["answers"] = [{"text": text, "answer_start": start} for text, start in pairs]
        yield place, record


# --- values ---------------------------------------------------------------------------------------


def field(node: Any, key: str, of: type, where: str) -> Any:
    """Returns the value of a key of a JSON object."""
    if not isinstance(node, dict) or type(node.get(key)) is not of:
        keys = f"; it has {listed(node)}" if isinstance(node, dict) else ""
        raise InputError(f"{where}: must be an object with {key!r}, {_TYPE_NAMES[of]}{keys}")
    return node[key]


def text_of(value: object, name: str, place: str) -> str:
    """Returns a text that any tokenizer takes, not a blank one.

    Halves of surrogate pairs, which JSON can spell and no encoding can, become U+FFFD.
    """
    if not isinstance(value, str):
        raise InputError(f"{place}: {name} is {json.dumps(value)[:_QUOTED_CHARACTERS]}, not a text")
    if not value.strip():
        raise InputError(f"{place}: {name} is blank; fill it in, or leave the example out")
    return text_records.encodable(value)


def quoted(text: str) -> str:
    """Returns a text in quotation marks, cut if it is long, for messages."""
    cut = text if len(text) <= _QUOTED_CHARACTERS else f"{text[:_QUOTED_CHARACTERS]}..."
    return repr(cut)


def listed(names: Iterable[str]) -> str:
    """Returns names for a message, the first twenty of many."""
    names = list(names)
    shown = [quoted(name) for name in names[:_LISTED_NAMES]]
    if len(names) > _LISTED_NAMES:
        shown.append(f"and {len(names) - _LISTED_NAMES} more")
    return ", ".join(shown)
