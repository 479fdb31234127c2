"""Examples of a task: read, checked, labelled and hashed.

The `place` of an example is for messages alone: FILE:LINE, for a question FILE and its id, in a
dataset tfds:NAME:SPLIT and the record's number from 0.
"""

import dataclasses
import hashlib
import itertools
import json
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from bert_jax.config import Task
from bert_jax.embeddings import retrieval
from bert_jax.embeddings.retrieval import Passage
from bert_jax.errors import InputError
from bert_jax.tasks import formats
from bert_jax.tasks.formats import field, listed, quoted, text_of
from bert_jax.text.records import OnBroken

Labelled = Literal["labelled", "unlabelled"]
NoAnswer = Literal["never", "possible"]

_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
# Outside an entity, at its beginning, inside. A type may be missing.
_ENTITY_TAG = re.compile(r"O|[BI](-.+)?", re.DOTALL)
# Broken rows that a message names.
_NAMED = 3


@dataclass(frozen=True)
class Sentence:
    """One text, or several that belong together, with a label."""

    place: str  # see above
    # One for `classify` and `generate`; two for `pair` and `regress`; for `choice` the one that
    # comes first, then the texts to choose from.
    texts: tuple[str, ...]
    # Its name; for `regress` a number, for `generate` a text; None if labels are not read.
    label: str | float | None


@dataclass(frozen=True)
class Tagged:
    """A sentence cut into words, each with a tag."""

    place: str  # see above; where its first word stands
    words: tuple[str, ...]  # at least one
    tags: tuple[str, ...] | None  # as many; None if labels are not read


class Answer(NamedTuple):
    """A part of a context: its text, and the character from 0 at which it begins."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question whose answer stands in its context."""

    place: str  # see above
    id: str  # no other question of the task has it
    question: str  # texts. Answers are counted in the context's characters, so it is as read.
    context: str
    # Those that people gave; none if there is none, or if labels are not read.
    answers: tuple[Answer, ...]
    possible: bool  # whether the context holds an answer; True if labels are not read


@dataclass(frozen=True)
class MinimalPair:
    """Two texts that differ in little, of which one is acceptable (Warstadt et al. 2020)."""

    place: str  # see above
    good: str  # the acceptable text, and the other one
    bad: str
    paradigm: str  # what they are about
    field: str  # what several paradigms belong to; "" if there are no fields


Example = Sentence | Tagged | Question | MinimalPair | Passage


def texts_of(example: Example) -> tuple[str, ...]:
    """Returns what is asked about, for people."""
    if isinstance(example, Sentence):
        return example.texts
    if isinstance(example, Tagged):
        return (" ".join(example.words),)
    if isinstance(example, Passage):
        return (example.text,)
    return (example.question,) if isinstance(example, Question) else (example.good, example.bad)


def text_key(example: Example) -> int:
    """Returns a hash of all texts of an example.

    Texts are the same if they are equal after Unicode's NFKC, without white space around them.
    """
    texts = texts_of(example)
    if isinstance(example, Question):
        texts = (example.question, example.context)
    return hash(tuple(unicodedata.normalize("NFKC", text).strip() for text in texts))


def names_of(example: Example) -> tuple[str, ...]:
    """Returns the names of an example's labels, of words one each; none if there are none."""
    if isinstance(example, Tagged):
        return example.tags or ()
    if isinstance(example, Sentence) and isinstance(example.label, str):
        return (example.label,)
    return ()


# --- files ----------------------------------------------------------------------------------------


@dataclass
class Tally:
    """Counts of the examples read and the rows skipped, by source."""

    examples: dict[str, int] = dataclasses.field(default_factory=dict)  # how many, by source
    # Place and error of each row that `task.broken_rows` leaves out.
    broken: list[tuple[str, InputError]] = dataclasses.field(default_factory=list)

    def leave_out(self, place: str, error: InputError) -> None:
        """Records a broken row."""
        self.broken.append((place, error))

    def __str__(self) -> str:
        """Returns how many rows were left out, and where the first stood."""
        places = [place for place, _ in self.broken]
        shown = ", ".join(places[:_NAMED]) + (", ..." if len(places) > _NAMED else "")
        return f"{len(places):,}" + (f" ({shown})" if places else "")


def read(
    task: Task, sources: tuple[str, ...], labelled: Labelled, tally: Tally | None = None
) -> list[Example]:
    """Returns the examples of all sources, in order; see `each`."""
    return list(each(task, sources, labelled, tally))


def each(
    task: Task, sources: tuple[str, ...], labelled: Labelled, tally: Tally | None = None
) -> Iterator[Example]:
    """Yields the examples of all sources in order, as `FORMS` has them.

    Unlabelled sources may lack the label column. `tally` counts examples and broken rows.
    """
    columns = task.text_columns + (task.label_columns if labelled == "labelled" else ())
    task.require_readable("source", sources, columns)
    places: dict[str, str] = {}  # of questions, by id
    tally = Tally() if tally is None else tally
    for source in sources:
        count, left_out = 0, len(tally.broken)
        for example in _of_source(task, source, columns, labelled, on_broken(task, tally)):
            count += 1
            if isinstance(example, Question):
                if example.id in places:
                    raise InputError(
                        f"{example.place}: {places[example.id]} has the same id; rename or leave "
                        "out one"
                    )
                places[example.id] = example.place
            yield example
        if not count:
            broken = [str(error) for _, error in tally.broken[left_out:]]
            why = f"; all {len(broken)} rows are broken, the first: {broken[0]}" if broken else ""
            raise InputError(f"{source}: holds no examples{why}")
        tally.examples[source] = tally.examples.get(source, 0) + count


def on_broken(task: Task, tally: Tally) -> OnBroken:
    """Returns what is done about a broken row: it is refused, or left out and counted."""
    return tally.leave_out if task.broken_rows == "skip" else _refuse


def _refuse(place: str, error: InputError) -> None:
    del place
    raise InputError(
        f"{error}; --broken-rows skip (task.broken_rows) leaves such rows out"
    ) from error


def _of_source(
    task: Task, source: str, columns: tuple[str, ...], labelled: Labelled, on_broken: OnBroken
) -> Iterator[Example]:
    if task.kind == "span":  # SQuAD's files are no tables
        for where, record in formats.questions(source):
            try:
                yield _question(source, where, record, task.no_answer, labelled)
            except InputError as error:
                on_broken(where, error)
        return
    if source.startswith("beir:"):
        yield from retrieval.read(*source.removeprefix("beir:").rsplit(":", 1))
        return
    for place, values in formats.rows(source, task.header, columns, on_broken):
        try:
            example = of_values(task, place, values)
            require_known(task.labels, [example])
        except InputError as error:
            on_broken(place, error)
        else:
            yield example


def is_blank(value: Any) -> bool:
    """Tells whether a cell holds nothing: JSON's null, or white space at most."""
    return value is None or (isinstance(value, str) and not value.strip())


def of_values(task: Task, place: str, values: list[Any]) -> Example:
    """Returns an example of its cells: of `task.text_columns`, then those of labels, if any."""
    count = len(task.text_columns)
    return FORMS[task.kind].of_cells(task, place, values[:count], values[count:])


def _sentence(task: Task, place: str, texts: list[Any], labels: list[Any]) -> Sentence:
    columns = zip(task.text_columns, texts, strict=True)
    checked = tuple(text_of(value, f"column {column!r}", place) for column, value in columns)
    label_of = _number if task.kind in ("regress", "similar") else _name
    label = label_of(labels[0], f"column {task.label_column!r}", place) if labels else None
    return Sentence(place, checked, label)


def _minimal_pair(task: Task, place: str, texts: list[Any], labels: list[Any]) -> MinimalPair:
    columns = zip(task.text_columns, texts, strict=True)
    good, bad = (text_of(value, f"column {column!r}", place) for column, value in columns)
    names = zip((task.label_column, task.field_column), labels, strict=False)
    paradigm, field_, *_ = (*(_name(value, f"column {c!r}", place) for c, value in names), "")
    return MinimalPair(place, good, bad, paradigm, field_)


def _tagged(task: Task, place: str, texts: list[Any], labels: list[Any]) -> Tagged:
    columns = (task.text_column, task.label_column)
    for column, value in zip(columns, [*texts, *labels], strict=False):
        if not isinstance(value, list) or not value:
            raise InputError(f"{place}: column {column!r} is no list of words or tags, or empty")
    # Equal words and equal tags share one object.
    words = tuple(sys.intern(text_of(w, f"word {i}", place)) for i, w in enumerate(texts[0], 1))
    if not labels:
        return Tagged(place, words, None)
    if len(labels[0]) != len(words):
        raise InputError(f"{place}: {len(words)} words, but {len(labels[0])} tags")
    tags = (sys.intern(_name(tag, f"tag {i}", place)) for i, tag in enumerate(labels[0], 1))
    return Tagged(place, words, tuple(tags))


def _question(
    source: str, where: str, record: Mapping[str, Any], no_answer: NoAnswer, labelled: Labelled
) -> Question:
    id_ = text_of(field(record, "id", str, where), "id", where)
    place = f"{source.removeprefix('squad:')}: question {id_}"
    question = text_of(field(record, "question", str, place), "question", place)
    context = text_of(field(record, "context", str, place), "context", place)
    if labelled == "unlabelled":
        return Question(place, id_, question, context, (), True)
    given = field(record, "answers", list, place)
    answers = tuple(_answer(answer, context, place) for answer in given)
    if "is_impossible" in record:
        impossible = field(record, "is_impossible", bool, place)
        if impossible == bool(answers):
            some = "answers" if answers else "no answer"
            raise InputError(f"{place}: is_impossible={impossible}, but it has {some}")
    if not answers and no_answer == "never":
        raise InputError(
            f"{place}: has no answer; set task.no_answer=possible, or leave the question out"
        )
    return Question(place, id_, question, context, answers, bool(answers))


def _answer(answer: Any, context: str, place: str) -> Answer:
    text = text_of(field(answer, "text", str, place), "the text of an answer", place)
    start = field(answer, "answer_start", int, place)
    if start < 0 or context[start : start + len(text)] != text:
        raise InputError(
            f"{place}: the answer {quoted(text)} is not at character {start} of its context, but "
            f"at {context.find(text)} (-1: nowhere)"
        )
    return Answer(text, start)


def _name(value: Any, what: str, place: str) -> str:
    """Returns the name of a label; integers and booleans are spelled as JSON does."""
    if value is None:
        raise InputError(f"{place}: {what} is missing: the example has no label")
    if isinstance(value, bool | int):
        return json.dumps(value)
    return text_of(value, what, place).strip()


def _number(value: Any, what: str, place: str) -> float:
    text = value.strip() if isinstance(value, str) else json.dumps(value)
    number = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(number):
        raise InputError(f"{place}: {what} is {quoted(text)}, not a finite number")
    return number


# --- typed texts ----------------------------------------------------------------------------------


class Form(NamedTuple):
    """The way in which examples of a kind of task are written."""

    line: str  # what a typed line holds; tabs separate its texts
    # Of the task, the place, and the cells of texts and of labels, if any.
    of_cells: Callable[[Task, str, list[Any], list[Any]], Example] = _sentence
    # Of the place, the number from 1, and typed texts.
    of_texts: Callable[[str, int, Sequence[str]], Example] = lambda place, number, texts: Sentence(
        place, tuple(texts), None
    )


# By `task.kind`.
FORMS = {
    **dict.fromkeys(("classify", "generate"), Form("TEXT")),
    **dict.fromkeys(("pair", "regress", "similar"), Form("A<tab>B")),
    "choice": Form("TEXT<tab>A<tab>B and so on, one for each of task.choice_columns"),
    "tag": Form(
        "words separated by blanks",
        _tagged,
        lambda place, _, texts: Tagged(place, tuple(texts[0].split()), None),
    ),
    "span": Form(
        "QUESTION<tab>CONTEXT",
        of_texts=lambda place, number, texts: Question(place, str(number), *texts, (), True),
    ),
    "minimal_pairs": Form("", _minimal_pair),  # are not typed
}


def parse_lines(task: Task, lines: Iterable[tuple[str, str]]) -> Iterator[Example]:
    """Yields an unlabelled example of each line that is not blank; tabs separate its texts."""
    several = "<tab>" in FORMS[task.kind].line
    written = ((place, line) for place, line in lines if line.strip())
    for number, (place, line) in enumerate(written, 1):
        yield _typed(task, place, line.split("\t") if several else [line], number)


def parse_arguments(task: Task, texts: Sequence[str], first: int = 1) -> Iterator[Example]:
    """Yields unlabelled examples of as many texts each as the task has: `A B A B` are two pairs.
    Questions are numbered from `first` on.
    """
    count = texts_of_example(task)
    for number, start in enumerate(range(0, len(texts), count), first):
        yield _typed(task, f"TEXT {start + 1}", texts[start : start + count], number)


def texts_of_example(task: Task) -> int:
    """Returns how many texts are typed for an example."""
    return 2 if task.kind == "span" else len(task.text_columns)


def _typed(task: Task, place: str, texts: Sequence[str], number: int) -> Example:
    count, form = texts_of_example(task), FORMS[task.kind]
    if len(texts) != count:
        raise InputError(
            f"{place}: {len(texts)} texts, but task.kind={task.kind} takes {count}; a line is "
            f"{form.line}, and as arguments each text is one of its own"
        )
    checked = [text_of(text, f"text {i}", place) for i, text in enumerate(texts, 1)]
    return form.of_texts(place, number, checked)


# --- labels ---------------------------------------------------------------------------------------


def labels_of(task: Task, train: Sequence[Example]) -> tuple[str, ...]:
    """Returns the names of the labels, by number: those that the task names, or those of the
    examples, sorted.

    A choice has those of the task, or 0, 1 and so on, one for each text to choose from;
    regressions, spans and texts that are generated have none.
    """
    if not task.has_labels:
        return ()
    if task.labels:
        labels = task.labels
    elif task.kind == "choice":
        labels = tuple(str(i) for i in range(len(task.choice_columns)))
    else:
        labels = tuple(sorted({name for example in train for name in names_of(example)}))
    require_known(labels, train)
    if len(labels) < 2:
        raise InputError(
            f"task.train: {task.label_column!r} has but one label, {listed(labels)}; there is "
            "nothing to learn"
        )
    if task.main_score == "f1" and len(labels) != 2:
        raise InputError(
            f"task.score=f1: is of two labels, and there are {len(labels)}, {listed(labels)}; set "
            "task.score=macro_f1"
        )
    if task.main_score == "entity_f1":
        for label in itertools.filterfalse(_ENTITY_TAG.fullmatch, labels):
            raise InputError(
                f"task.score=entity_f1: the tag {quoted(label)} is not O, B-TYPE or I-TYPE; set "
                "task.score=accuracy, or convert the tags"
            )
    return labels


def require_known(labels: Sequence[str], examples: Sequence[Example]) -> None:
    """Raises InputError, which names the place, if an example has a label that is not known.

    Where there are no labels anything may stand.
    """
    known = set(labels)
    for example in examples if known else ():
        for number, name in enumerate(names_of(example), 1):
            if name not in known:
                what = f"word {number}: tag" if isinstance(example, Tagged) else "label"
                raise InputError(
                    f"{example.place}: {what} {quoted(name)} is none of {listed(labels)}, those "
                    "of task.labels or of the training examples; if it is meant, name all in "
                    "task.labels; if not, name the others there with task.broken_rows=skip"
                )


def sha256(examples: Iterable[Example], labels: Sequence[str]) -> str:
    """Returns a hash of what a run learns from: examples in their order, and labels by number.

    Places do not count: the same examples in another file have the same hash.
    """
    digest = hashlib.sha256(json.dumps(labels).encode())
    for example in examples:
        names = (one.name for one in dataclasses.fields(example))
        values = [getattr(example, name) for name in names if name != "place"]
        # A line each; JSON spells different values differently and holds no newlines.
        digest.update(f"\n{type(example).__name__}{json.dumps(values)}".encode())
    return digest.hexdigest()
