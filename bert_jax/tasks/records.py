"""The examples of a task, read and checked; their labels; their hash."""

import dataclasses
import hashlib
import json
import math
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bert_jax.config import Task
from bert_jax.errors import InputError
from bert_jax.tasks import files, squad, tables
from bert_jax.tasks.examples import Example, Question, Sentence, Tagged
from bert_jax.tasks.squad import Labelled

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Tags of entities: outside, at the beginning, inside. A type may be missing.
_ENTITY_TAG = re.compile(r"O|[BI](-.+)?", re.DOTALL)


def read(task: Task, sources: tuple[str, ...], labelled: Labelled) -> list[Example]:
    """The examples of all sources, in order, all at once; see `each`."""
    return list(each(task, sources, labelled))


def each(task: Task, sources: tuple[str, ...], labelled: Labelled) -> Iterator[Example]:
    """The examples of all sources, in order: as `Question` for `span`, `Tagged` for `tag`, else
    `Sentence`.

    Args:
      task: its shape, and the names of its columns.
      sources: as `Task` has them.
      labelled: whether every example must have a label, or labels are not read and their column
        may be missing.

    Raises:
      InputError: a source that cannot be read for this shape or has no examples, a column that is
        not there, a blank text, no label or one that the shape cannot have, words without tags, an
        id that two questions have; and as `tables.rows` and `squad.read`.
    """
    task.require_readable("source", sources)
    places: dict[str, str] = {}
    for source in sources:
        examples: Iterable[Example]
        if task.kind == "span":
            examples = squad.read(source, task.no_answer, labelled)
            examples = _with_own_ids(examples, places)
        else:
            examples = _of_rows(task, source, labelled)
        empty = True
        for example in examples:
            empty = False
            yield example
        if empty:
            raise InputError(f"{source}: holds no examples")


def _of_rows(task: Task, source: str, labelled: Labelled) -> Iterable[Example]:
    label_columns = (task.label_column,) if labelled == "labelled" else ()
    make = _tagged if task.kind == "tag" else _sentence
    rows = tables.rows(source, task.header, (*task.text_columns, *label_columns))
    for place, values in rows:
        texts = values[: len(task.text_columns)]
        yield make(task, place, texts, values[len(texts) :])


def _sentence(task: Task, place: str, texts: list[Any], labels: list[Any]) -> Sentence:
    checked = tuple(
        files.text_of(value, f"column {column!r}", place)
        for column, value in zip(task.text_columns, texts, strict=True)
    )
    label: str | float | None = None
    for value in labels:
        what = f"column {task.label_column!r}"
        label = _number(value, what, place) if task.kind == "regress" else _name(value, what, place)
    return Sentence(place, checked, label)


def _tagged(task: Task, place: str, texts: list[Any], labels: list[Any]) -> Tagged:
    given = _list(texts[0], task.text_column, place)
    if not given:
        raise InputError(f"{place}: column {task.text_column!r} has no words")
    # Each word and each tag is kept once for all that are alike.
    words = tuple(
        sys.intern(files.text_of(word, f"word {i}", place)) for i, word in enumerate(given, 1)
    )
    if not labels:
        return Tagged(place, words, None)
    tags = _list(labels[0], task.label_column, place)
    if len(tags) != len(words):
        raise InputError(f"{place}: {len(words)} words, but {len(tags)} tags")
    names = (sys.intern(_name(tag, f"tag {i}", place)) for i, tag in enumerate(tags, 1))
    return Tagged(place, words, tuple(names))


def _list(value: Any, column: str, place: str) -> list[Any]:
    if not isinstance(value, list):
        raise InputError(
            f"{place}: column {column!r} is {files.kind_of(value)}, not a list of words or tags"
        )
    return value


def _name(value: Any, what: str, place: str) -> str:
    """The name of a label; integers and booleans are spelled as JSON does."""
    if value is None:
        raise InputError(f"{place}: {what} is missing: the example has no label")
    if isinstance(value, bool | int):
        return json.dumps(value)
    return files.text_of(value, what, place).strip()


def _number(value: Any, what: str, place: str) -> float:
    text = value.strip() if isinstance(value, str) else json.dumps(value)
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        raise InputError(f"{place}: {what} is {files.quoted(text)}, not a finite number")
    return number


def _with_own_ids(questions: Iterable[Question], places: dict[str, str]) -> Iterator[Question]:
    for question in questions:
        if question.id in places:
            raise InputError(
                f"{question.place}: {places[question.id]} has the same id; rename or leave out one"
            )
        places[question.id] = question.place
        yield question


def labels_of(task: Task, train: Sequence[Example]) -> tuple[str, ...]:
    """The names of the labels, by number: those that the task names, or those found, sorted.

    A choice has those of the task, or 0, 1 and so on, one for each text to choose from;
    regressions and spans have none.

    Args:
      task: the task.
      train: its training examples, labelled.

    Raises:
      InputError: fewer than two labels, one that the task does not name, or, if the score is F1
        of the second, more than two, or of entities, one that is not O, B-TYPE or I-TYPE.
    """
    if task.kind in ("regress", "span"):
        return ()
    if task.labels:
        labels = task.labels
    elif task.kind == "choice":
        labels = tuple(str(i) for i in range(len(task.choice_columns)))
    else:
        labels = tuple(sorted({name for example in train for name in _names(example)}))
    require_known(labels, train)
    if len(labels) < 2:
        raise InputError(
            f"task.train: {task.label_column!r} has but one label, {tables.listed(labels)}; there "
            "is nothing to learn"
        )
    if task.main_score == "f1" and len(labels) != 2:
        raise InputError(
            f"task.score=f1: is of two labels, and there are {len(labels)}, "
            f"{tables.listed(labels)}; set task.score=macro_f1"
        )
    if task.main_score == "entity_f1":
        for label in labels:
            if not _ENTITY_TAG.fullmatch(label):
                raise InputError(
                    f"task.score=entity_f1: the tag {files.quoted(label)} is not O, B-TYPE or "
                    "I-TYPE; set task.score=accuracy, or convert the tags"
                )
    return labels


def require_known(labels: Sequence[str], examples: Sequence[Example]) -> None:
    """Raises InputError, which names the place, if an example has a label that is not known."""
    known = set(labels)
    for example in examples:
        for number, name in enumerate(_names(example), 1):
            if name not in known:
                what = "label"
                if isinstance(example, Tagged):
                    what = f"word {number}, {files.quoted(example.words[number - 1])}: tag"
                raise InputError(
                    f"{example.place}: {what} {files.quoted(name)} is none of "
                    f"{tables.listed(labels)}, those of task.labels or of the training examples; "
                    "if it is meant, name all in task.labels"
                )


def _names(example: Example) -> tuple[str, ...]:
    if isinstance(example, Tagged):
        return example.tags or ()
    if isinstance(example, Sentence) and isinstance(example.label, str):
        return (example.label,)
    return ()


def sha256(examples: Iterable[Example], labels: Sequence[str]) -> str:
    """A hash of what a run learns from: examples in their order, and the labels by number.

    Places do not count: the same examples in another file have the same hash.
    """
    digest = hashlib.sha256(json.dumps(labels).encode())
    for example in examples:
        values = [
            getattr(example, field.name)
            for field in dataclasses.fields(example)
            if field.name != "place"
        ]
        # A line each; JSON spells different values differently and holds no newlines.
        digest.update(f"\n{type(example).__name__}{json.dumps(values)}".encode())
    return digest.hexdigest()
