"""Examples from texts as they are typed: arguments of a command, or lines."""

from collections.abc import Iterable, Iterator, Sequence

from bert_jax.config import Task
from bert_jax.errors import InputError
from bert_jax.tasks import files
from bert_jax.tasks.examples import Example, Question, Sentence, Tagged

# What a line holds, its texts parted by tabs.
_FORMS = {
    "classify": "TEXT",
    "pair": "A<tab>B",
    "regress": "A<tab>B",
    "choice": "TEXT<tab>A<tab>B and so on, one for each of task.choice_columns",
    "tag": "words parted by blanks",
    "span": "QUESTION<tab>CONTEXT",
}


def of_lines(task: Task, lines: Iterable[tuple[str, str]]) -> Iterator[Example]:
    """An example of each line that holds something; its texts are parted by tabs.

    Args:
      task: the task.
      lines: (place, line).

    Raises:
      InputError: too few or too many texts, or a blank one.
    """
    number = 0
    for place, line in lines:
        if not line.strip():
            continue
        number += 1
        several = task.kind not in ("classify", "tag")
        yield _example(task, place, line.split("\t") if several else [line], number)


def of_arguments(task: Task, texts: Sequence[str]) -> Iterator[Example]:
    """An example of so many texts as the task has: `A B A B` are two pairs.

    Raises:
      InputError: too few texts, or a blank one.
    """
    count = _count(task)
    for number, start in enumerate(range(0, len(texts), count), 1):
        yield _example(task, f"TEXT {start + 1}", list(texts[start : start + count]), number)


def _count(task: Task) -> int:
    """Texts of an example."""
    return 2 if task.kind == "span" else len(task.text_columns)


def _example(task: Task, place: str, texts: list[str], number: int) -> Example:
    if len(texts) != _count(task):
        raise InputError(
            f"{place}: {len(texts)} texts, but task.kind={task.kind} takes {_count(task)}; a "
            f"line is {_FORMS[task.kind]}, and as arguments each text is one of its own"
        )
    checked = [files.text_of(text, f"text {i}", place) for i, text in enumerate(texts, 1)]
    if task.kind == "span":
        return Question(place, str(number), checked[0], checked[1], (), True)
    if task.kind == "tag":
        return Tagged(place, tuple(checked[0].split()), None)
    return Sentence(place, tuple(checked), None)
