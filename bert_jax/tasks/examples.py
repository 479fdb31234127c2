"""Reads, checks and hashes the examples of a task, and finds their labels.

Messages name the `location` of an example: FILE:LINE; "FILE: question ID" for a question;
tfds:NAME:SPLIT:NUMBER for a record of a dataset, counted from 0.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
import sys
import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bert_jax.config import Task
from bert_jax.embeddings import retrieval
from bert_jax.embeddings.retrieval import Passage
from bert_jax.errors import InputError, excerpt
from bert_jax.tasks import formats
from bert_jax.tasks.formats import require_field, require_text
from bert_jax.text.records import OnBroken, quote_names

Cells = list[Any]
Labelling = Literal["labelled", "unlabelled"]
NoAnswer = Literal["never", "possible"]  # "never": every question has an answer

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# IOB2: O, B-TYPE and I-TYPE. "-TYPE" may be missing.
ENTITY_TAG = re.compile(r"O|[BI](-.+)?", re.DOTALL)
# A message names the locations of at most this many broken rows.
_SHOWN_LOCATIONS = 3


@dataclass(frozen=True)
class Sentence:
    """An example of one or more texts and a label. (The name is part of the hash of examples.)"""

    location: str
    # One text for `classify` and `generate`; two for `pair`, `regress` and `similar`; for `choice`
    # the context, then the candidates.
    texts: tuple[str, ...]
    # A label's name; a number (`regress`, `similar`); a text (`generate`); None if unlabelled.
    label: str | float | None

    @property
    def label_names(self) -> tuple[str, ...]:
        """The name of the label; () for a number or an unlabelled example."""
        return (self.label,) if isinstance(self.label, str) else ()


@dataclass(frozen=True)
class Tagged:
    """A sentence split into words, each with a tag."""

    location: str  # of the first word
    words: tuple[str, ...]  # at least one
    tags: tuple[str, ...] | None  # one for each word; None if unlabelled

    @property
    def texts(self) -> tuple[str, ...]:
        """The sentence."""
        return (" ".join(self.words),)

    @property
    def label_names(self) -> tuple[str, ...]:
        """The tags; () for an unlabelled example."""
        return self.tags or ()


class AnswerSpan(NamedTuple):
    """A reference answer: a part of a context, and the offset of its first character."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question whose answer is a part of its context."""

    location: str
    id: str  # unique in a task
    question: str
    context: str  # unchanged, since answers are offsets in it
    answers: tuple[AnswerSpan, ...]  # () if there are none, or if unlabelled
    has_answer: bool  # whether the context contains an answer; True if unlabelled

    @property
    def texts(self) -> tuple[str, ...]:
        """The question and its context."""
        return self.question, self.context


@dataclass(frozen=True)
class MinimalPair:
    """Two texts that differ little; only the first is acceptable (Warstadt et al. 2020)."""

    location: str
    good: str
    bad: str
    paradigm: str  # one set of pairs that test the same, such as a file of BLiMP
    field: str  # of linguistics, a group of paradigms, such as "syntax"; "": no groups

    @property
    def texts(self) -> tuple[str, ...]:
        """Both texts."""
        return self.good, self.bad


@dataclass(frozen=True)
class Candidates:
    """A query with its candidates, the texts to rank."""

    location: str
    query: str
    candidates: tuple[str, ...]  # at least one
    scores: tuple[float, ...] | None  # true ones, above 0 if relevant; None if unlabelled
    # Scores of the relevant texts that BM25 did not retrieve; None if the source lists the texts.
    missed: tuple[float, ...] | None = None

    @property
    def texts(self) -> tuple[str, ...]:
        """The query, then the candidates."""
        return self.query, *self.candidates

    @property
    def label_names(self) -> tuple[str, ...]:
        """There are none: scores are numbers."""
        return ()


Example = Sentence | Tagged | Question | MinimalPair | Passage | Candidates


def texts_of(example: Example) -> tuple[str, ...]:
    """Returns the texts of an example."""
    return (example.text,) if isinstance(example, Passage) else example.texts


def text_key(example: Example) -> int:
    """Returns a hash of all texts of an example.

    Differences in Unicode normalization (NFKC) and in surrounding white space do not matter.
    """
    return hash(tuple(unicodedata.normalize("NFKC", text).strip() for text in texts_of(example)))


# --- files ----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of the examples read, and the broken rows skipped."""

    examples: dict[str, int] = dataclasses.field(default_factory=dict)  # count by source
    # The location and the error of each row that was skipped.
    broken: list[tuple[str, InputError]] = dataclasses.field(default_factory=list)

    def record_broken(self, location: str, error: InputError) -> None:
        """Records a broken row."""
        self.broken.append((location, error))

    def describe_broken(self) -> str:
        """Returns the number of broken rows, and the locations of the first ones."""
        locations = [location for location, _ in self.broken]
        shown = ", ".join(locations[:_SHOWN_LOCATIONS])
        shown += ", ..." if len(locations) > _SHOWN_LOCATIONS else ""
        return f"{len(locations):,}" + (f" ({shown})" if locations else "")


def read(
    task: Task, sources: tuple[str, ...], labelling: Labelling, tally: Tally | None = None
) -> list[Example]:
    """Returns the examples of all sources, in order; see `iterate`."""
    return list(iterate(task, sources, labelling, tally))


def iterate(
    task: Task, sources: tuple[str, ...], labelling: Labelling, tally: Tally | None = None
) -> Iterator[Example]:
    """Yields the examples of all sources, in order.

    Unlabelled sources may lack the label column. `tally` counts examples and broken rows.
    """
    columns = task.text_columns + (task.label_columns if labelling == "labelled" else ())
    task.require_readable(where="source", sources=sources, columns=columns)
    location_by_id: dict[str, str] = {}  # of questions
    tally = Tally() if tally is None else tally
    for source in sources:
        count, first_broken = 0, len(tally.broken)
        on_broken = broken_row_handler(task, tally)
        for example in _read_source(task, source, columns, labelling, on_broken):
            count += 1
            if isinstance(example, Question):
                if example.id in location_by_id:
                    raise InputError(
                        f"{example.location}: {location_by_id[example.id]} has the same id; "
                        "rename or remove one"
                    )
                location_by_id[example.id] = example.location
            yield example
        if not count:
            errors = [str(error) for _, error in tally.broken[first_broken:]]
            why = f"; all {len(errors)} rows are broken, the first: {errors[0]}" if errors else ""
            raise InputError(f"{source}: holds no examples{why}")
        tally.examples[source] = tally.examples.get(source, 0) + count


def broken_row_handler(task: Task, tally: Tally) -> OnBroken:
    """Returns a function that raises errors or records them in `tally` (see `task.broken_rows`)."""
    return tally.record_broken if task.broken_rows == "skip" else _raise_broken


def _raise_broken(location: str, error: InputError) -> None:
    del location  # the error names it
    raise InputError(f"{error}; --broken-rows skip (task.broken_rows) skips such rows") from error


def _read_source(
    task: Task, source: str, columns: tuple[str, ...], labelling: Labelling, on_broken: OnBroken
) -> Iterator[Example]:
    if "squad" in task.spec.formats:  # the kind reads questions, which have no columns
        for location, record in formats.read_questions(source):
            try:
                yield _question_from_record(source, location, record, task.no_answer, labelling)
            except InputError as error:
                on_broken(location, error)
        return
    if source.startswith("beir:"):
        passages = retrieval.read(*source.removeprefix("beir:").rsplit(":", 1))
        yield from task.spec.implementing_class.parse_passages(passages)
        return
    for location, values in formats.read_columns(source, task.header, columns, on_broken):
        try:
            example = example_from_cells(task, location, values)
            require_known_labels(task.labels, [example])
        except InputError as error:
            on_broken(location, error)
        else:
            yield example


def is_blank(value: Any) -> bool:
    """Tells whether a cell is null, empty or white space."""
    return value is None or (isinstance(value, str) and not value.strip())


def example_from_cells(task: Task, location: str, values: list[Any]) -> Example:
    """Builds an example from the cells of its text columns and, if labelled, label columns."""
    count = len(task.text_columns)
    kind_class = task.spec.implementing_class
    return kind_class.parse_cells(task, location, values[:count], values[count:])


def sentence_from_cells(task: Task, location: str, texts: Cells, labels: Cells) -> Sentence:
    """Returns an example whose label is a name, a text, or a number."""
    text_cells = zip(task.text_columns, texts, strict=True)
    checked = tuple(require_text(value, f"column {name!r}", location) for name, value in text_cells)
    # Kinds that are scored by correlations have numbers as labels.
    parse_label = parse_number if "spearman" in task.spec.scores else _label_name
    label = parse_label(labels[0], f"column {task.label_column!r}", location) if labels else None
    return Sentence(location, checked, label)


def minimal_pair_from_cells(task: Task, location: str, texts: Cells, labels: Cells) -> MinimalPair:
    """Returns a pair with its paradigm and, if the task names its column, its field."""
    text_cells = zip(task.text_columns, texts, strict=True)
    good, bad = (require_text(value, f"column {name!r}", location) for name, value in text_cells)
    label_cells = zip(task.label_columns, labels, strict=True)  # pairs are always labelled
    names = [_label_name(value, f"column {name!r}", location) for name, value in label_cells]
    return MinimalPair(location, good, bad, names[0], names[1] if task.field_column else "")


def tagged_from_cells(task: Task, location: str, texts: Cells, labels: Cells) -> Tagged:
    """Returns an example from a list of words and a list of tags."""
    columns = (task.text_column, task.label_column)
    for column, value in zip(columns, [*texts, *labels], strict=False):  # `labels` may be []
        if not isinstance(value, list) or not value:
            raise InputError(
                f"{location}: column {column!r} must be a non-empty list of words or tags"
            )
    # Words and tags are interned to save memory.
    checked = [require_text(word, f"word {i}", location) for i, word in enumerate(texts[0], 1)]
    words = tuple(map(sys.intern, checked))
    if not labels:
        return Tagged(location, words, None)
    if len(labels[0]) != len(words):
        raise InputError(f"{location}: {len(words)} words, but {len(labels[0])} tags")
    tags = (_label_name(tag, f"tag {i}", location) for i, tag in enumerate(labels[0], 1))
    return Tagged(location, words, tuple(map(sys.intern, tags)))


def _question_from_record(
    source: str, location: str, record: Mapping[str, Any], no_answer: NoAnswer, labelling: Labelling
) -> Question:
    id_ = require_text(require_field(record, "id", str, location), "id", location)
    location = f"{source.removeprefix('squad:')}: question {id_}"
    question = require_text(require_field(record, "question", str, location), "question", location)
    context = require_text(require_field(record, "context", str, location), "context", location)
    if labelling == "unlabelled":
        return Question(location, id_, question, context, (), True)
    records = require_field(record, "answers", list, location)
    answers = tuple(_answer_from_record(answer, context, location) for answer in records)
    if "is_impossible" in record:
        impossible = require_field(record, "is_impossible", bool, location)
        if impossible == bool(answers):
            what = "answers" if answers else "no answer"
            raise InputError(f"{location}: is_impossible={impossible}, but it has {what}")
    if not answers and no_answer == "never":
        raise InputError(
            f"{location}: has no answer; set task.no_answer=possible, or remove the question"
        )
    return Question(location, id_, question, context, answers, bool(answers))


def _answer_from_record(answer: Any, context: str, location: str) -> AnswerSpan:
    value = require_field(answer, "text", str, location)
    text = require_text(value, "the text of an answer", location)
    start = require_field(answer, "answer_start", int, location)
    if start < 0 or context[start : start + len(text)] != text:
        raise InputError(
            f"{location}: the answer {excerpt(text)} is not at character {start} of its context, "
            f"but at {context.find(text)} (-1: nowhere)"
        )
    return AnswerSpan(text, start)


def _label_name(value: Any, what: str, location: str) -> str:
    """Returns the name of a label. Integers and booleans are written as in JSON."""
    if value is None:
        raise InputError(f"{location}: {what} is missing: the example has no label")
    if isinstance(value, bool | int):
        return json.dumps(value)
    return require_text(value, what, location).strip()


def parse_number(value: Any, what: str, location: str) -> float:
    """Returns the finite number that a JSON value or a text gives."""
    text = value.strip() if isinstance(value, str) else json.dumps(value)
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        raise InputError(f"{location}: {what} is {excerpt(text)}, not a finite number")
    return number


# --- examples from given texts --------------------------------------------------------------------


def parse_lines(task: Task, lines: Iterable[tuple[str, str]]) -> Iterator[Example]:
    """Yields an unlabelled example for each (location, line) that is not blank."""
    has_tabs = len(task.text_columns) > 1
    filled = ((location, line) for location, line in lines if line.strip())
    for number, (location, line) in enumerate(filled, 1):
        yield example_from_texts(task, location, line.split("\t") if has_tabs else [line], number)


def parse_arguments(task: Task, texts: Sequence[str], first: int = 1) -> Iterator[Example]:
    """Yields unlabelled examples, numbered from `first`.

    The texts A B C D give two pairs, or for a variadic kind one example: a query and three texts.
    """
    count = len(texts) if task.spec.is_variadic else len(task.text_columns)
    for number, start in enumerate(range(0, len(texts), count), first):
        yield example_from_texts(task, f"TEXT {start + 1}", texts[start : start + count], number)


def example_from_texts(task: Task, location: str, texts: Sequence[str], number: int) -> Example:
    """Returns the unlabelled example of given texts; `number` becomes the id of a question."""
    columns = task.text_columns
    has_more = task.spec.is_variadic and len(texts) > len(columns)  # a query and several texts
    if len(texts) != len(columns) and not has_more:
        raise InputError(
            f"{location}: {len(texts)} texts, but task.kind={task.kind} takes {len(columns)}: "
            f"write {'<tab>'.join(columns)} in a line, or give each text as one argument"
        )
    checked = [require_text(text, f"text {i}", location) for i, text in enumerate(texts, 1)]
    return task.spec.implementing_class.parse_texts(location, number, checked)


# --- labels ---------------------------------------------------------------------------------------


def find_labels(task: Task, train: Sequence[Any]) -> tuple[str, ...]:
    """Returns the label names of a task; a label's index is its class number.

    These are `task.labels` or, if it is empty, the sorted labels of the training examples. The
    labels of `choice` are 0, 1 and so on, one for each candidate. A task without label names,
    such as regression, has ().
    """
    if "labels" not in task.spec.settings:
        return ()
    if task.labels:
        labels = task.labels
    elif task.choice_columns:
        labels = tuple(str(i) for i in range(len(task.choice_columns)))
    else:
        labels = tuple(sorted({name for example in train for name in example.label_names}))
    require_known_labels(labels, train)
    if len(labels) < 2:
        raise InputError(
            f"task.train: {task.label_column!r} has only one label, {quote_names(labels)}; there "
            "is nothing to learn"
        )
    if task.main_score == "f1" and len(labels) != 2:
        raise InputError(
            f"task.score=f1: needs two labels, but there are {len(labels)}, {quote_names(labels)}; "
            "set task.score=macro_f1"
        )
    if task.main_score == "entity_f1":
        for label in itertools.filterfalse(ENTITY_TAG.fullmatch, labels):
            raise InputError(
                f"task.score=entity_f1: the tag {excerpt(label)} is not O, B-TYPE or I-TYPE; set "
                "task.score=accuracy, or convert the tags"
            )
    return labels


def require_known_labels(labels: Sequence[str], examples: Sequence[Any]) -> None:
    """Raises InputError if a label of an example is not in `labels`; () allows every label."""
    known = set(labels)
    for example in examples if known else ():
        for number, name in enumerate(example.label_names, 1):
            if name not in known:
                what = f"word {number}: tag" if isinstance(example, Tagged) else "label"
                raise InputError(
                    f"{example.location}: {what} {excerpt(name)} is none of {quote_names(labels)}, "
                    "the labels in task.labels or in the training examples; to learn it, list all "
                    "labels in task.labels; to skip such rows, list the other labels there and set "
                    "task.broken_rows=skip"
                )


def sha256(examples: Iterable[Example], labels: Sequence[str] = ()) -> str:
    """Returns a hash of the examples and the labels, both in order.

    Locations are excluded: the same examples in another file have the same hash.
    """
    digest = hashlib.sha256(json.dumps(labels).encode())
    for example in examples:
        names = (item.name for item in dataclasses.fields(example))
        values = [getattr(example, name) for name in names if name != "location"]
        # One line per example: JSON is unambiguous and contains no newlines.
        digest.update(f"\n{type(example).__name__}{json.dumps(values)}".encode())
    return digest.hexdigest()
