"""An example of a task, in one class for each form that a question to a text can have.

`place` says where it stands: FILE:LINE, for a question FILE and its id, in a TFDS dataset
tfds:NAME:SPLIT and the record's number from 0. It is for messages alone.
"""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Sentence:
    """One text, or several that belong together, and what is said of them.

    Attributes:
      place: see above.
      texts: one for `classify`; two for `pair` and `regress`; for `choice` what comes first, then
        the texts to choose from.
      label: its name; for `regress` a number; None if labels are not read.
    """

    place: str
    texts: tuple[str, ...]
    label: str | float | None


@dataclass(frozen=True)
class Tagged:
    """A sentence cut into words, each with a tag.

    Attributes:
      place: see above; where its first word stands.
      words: at least one.
      tags: as many; None if labels are not read.
    """

    place: str
    words: tuple[str, ...]
    tags: tuple[str, ...] | None


class Answer(NamedTuple):
    """A part of a context: its text, and the character from 0 at which it begins."""

    text: str
    start: int


@dataclass(frozen=True)
class Question:
    """A question whose answer stands in its context.

    Attributes:
      place: see above.
      id: no other question of the task has it.
      question, context: texts. Answers are counted in the context's characters, so it is as read.
      answers: those that people gave; none if there is none, or if labels are not read.
      possible: whether the context holds an answer; True if labels are not read.
    """

    place: str
    id: str
    question: str
    context: str
    answers: tuple[Answer, ...]
    possible: bool


Example = Sentence | Tagged | Question
