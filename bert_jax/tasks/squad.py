"""Questions in the JSON of SQuAD 1.1 and 2.0 (Rajpurkar et al. 2016 and 2018), and in TFDS's form.

{"data": [{"paragraphs": [{"context": TEXT, "qas": [
    {"id": TEXT, "question": TEXT, "is_impossible": BOOLEAN,
     "answers": [{"text": TEXT, "answer_start": CHARACTER}]}]}]}]}
"""

from collections.abc import Iterator
from typing import Any, Literal

from bert_jax.errors import InputError
from bert_jax.tasks import files, tables
from bert_jax.tasks.examples import Answer, Question

Labelled = Literal["labelled", "unlabelled"]
NoAnswer = Literal["never", "possible"]


def read(source: str, no_answer: NoAnswer, labelled: Labelled) -> Iterator[Question]:
    """The questions of a source.

    Args:
      source: `squad:FILE` or `tfds:NAME:SPLIT`.
      no_answer: whether questions without an answer are taken. Where `is_impossible` is missing,
        a question is one if its list of answers is empty.
      labelled: whether `answers` and `is_impossible` are read, or may be missing.

    Raises:
      InputError: what is no JSON, or not of this form; a blank text; an answer that does not stand
        in the context where it is said to; a question without answers that is not called
        impossible, or the other way round.
    """
    if source.startswith("tfds:"):
        found = _of_dataset(source)
    else:
        found = _of_file(source.partition(":")[2])
    for file, where, record in found:
        id_ = files.text_of(_get(record, "id", where), "id", where)
        place = f"{file}: question {id_}"
        question = files.text_of(_get(record, "question", place), "question", place)
        context = files.text_of(_get(record, "context", place), "context", place)
        answers: tuple[Answer, ...] = ()
        if labelled == "labelled":
            answers = _answers(record, context, place)
            _require_consistent(record, answers, no_answer, place)
        possible = labelled == "unlabelled" or bool(answers)
        yield Question(place, id_, question, context, answers, possible)


def _of_file(path: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """File, place, and a question with its context."""
    tree = files.parsed("\n".join(files.lines(path)), path)
    for i, article in enumerate(_list(tree, "data", path)):
        in_article = f"{path}: data[{i}]"
        for j, paragraph in enumerate(_list(article, "paragraphs", in_article)):
            where = f"{in_article}.paragraphs[{j}]"
            context = _get(paragraph, "context", where)
            for k, record in enumerate(_list(paragraph, "qas", where)):
                where_question = f"{where}.qas[{k}]"
                _require_object(record, where_question)
                yield path, where_question, record | {"context": context}


def _of_dataset(source: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """The same; TFDS turns lists of objects into objects of lists."""
    for place, record in tables.dataset(source):
        answers = record.get("answers")
        if isinstance(answers, dict):
            texts = _list(answers, "text", place)
            starts = _list(answers, "answer_start", place)
            if len(texts) != len(starts):
                raise InputError(f"{place}: {len(texts)} answers and {len(starts)} answer_start")
            record["answers"] = [
                {"text": text, "answer_start": start}
                for text, start in zip(texts, starts, strict=True)
            ]
        yield source, place, record


def _answers(record: dict[str, Any], context: str, place: str) -> tuple[Answer, ...]:
    found = []
    for answer in _list(record, "answers", place):
        text = files.text_of(_get(answer, "text", place), "the text of an answer", place)
        start = _get(answer, "answer_start", place)
        if type(start) is not int:
            raise InputError(f"{place}: answer_start is {files.kind_of(start)}, not an integer")
        there = context[start : start + len(text)] if start >= 0 else ""
        if there != text:
            at = context.find(text)
            raise InputError(
                f"{place}: the answer {files.quoted(text)} is not at character {start} of its "
                f"context, where {files.quoted(there)} stands; "
                + (f"it is at {at}" if at >= 0 else "it is nowhere in it")
            )
        found.append(Answer(text, start))
    return tuple(found)


def _require_consistent(
    record: dict[str, Any], answers: tuple[Answer, ...], no_answer: NoAnswer, place: str
) -> None:
    impossible = record.get("is_impossible", not answers)
    if type(impossible) is not bool:
        raise InputError(f"{place}: is_impossible is {files.kind_of(impossible)}, not a boolean")
    if impossible and answers:
        raise InputError(f"{place}: is_impossible is true, but it has answers")
    if not impossible and not answers:
        raise InputError(f"{place}: has no answer, but is_impossible is false")
    if impossible and no_answer == "never":
        raise InputError(
            f"{place}: has no answer; set task.no_answer=possible, or leave the question out"
        )


def _require_object(node: Any, where: str) -> None:
    if not isinstance(node, dict):
        raise InputError(f"{where}: {files.kind_of(node)}, not an object as SQuAD's files have")


def _get(node: Any, key: str, where: str) -> Any:
    _require_object(node, where)
    if key not in node:
        raise InputError(f"{where}: no {key!r}, but {tables.listed(node) or 'nothing'}")
    return node[key]


def _list(node: Any, key: str, where: str) -> list[Any]:
    value = _get(node, key, where)
    if not isinstance(value, list):
        raise InputError(f"{where}: {key} is {files.kind_of(value)}, not a list")
    return value
