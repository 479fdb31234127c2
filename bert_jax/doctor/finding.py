"""What `doctor` finds: one finding, the rule that it breaks, and how both are put into words."""

import dataclasses
from typing import Any, Literal

import numpy as np

from bert_jax.errors import printable

# Characters of text that an example shows.
_EXCERPT = 70

Severity = Literal["problem", "note"]


@dataclasses.dataclass(frozen=True)
class Rule:
    """The limits of a measured value, and the words of the finding where it is more.

    `what` and `remedy` are templates of `str.format`; `{value}` is the value as a share.
    """

    what: str  # what is wrong, with its number
    note_over: float  # a larger value is worth knowing
    problem_over: float  # a larger value is a problem
    effect: str  # what it is likely to do to training
    remedy: str  # the setting or action that mends it

    def check(
        self, value: float, example: str = "", named: bool = False, **fields: Any
    ) -> list["Finding"]:
        """Returns the finding, or nothing if the value is within the limits, unless it is `named`.

        `fields` are those of the templates.
        """
        if not value > self.note_over and not named:
            return []
        severity = "problem" if value > self.problem_over else "note"
        words = {"value": share(value)} | fields
        what, remedy = self.what.format(**words), self.remedy.format(**words)
        return [Finding(self, severity, what, example, self.effect, remedy)]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, in the words of its rule."""

    rule: Rule
    severity: Severity  # `problem` if training suffers or is refused, `note` for a remark
    what: str
    example: str  # where, and a short printable excerpt; empty where there is none to show
    effect: str
    remedy: str


def example(place: str, text: str) -> str:
    """Returns a place and the beginning of the text there, on one line, controls as escapes."""
    line = " ".join(text[: 4 * _EXCERPT].split())
    if len(line) > _EXCERPT:
        line = line[: _EXCERPT - 3] + "..."
    return printable(f'{place}: "{line}"')


def share(value: float) -> str:
    """Returns a share as percent, never rounded to nothing."""
    percent = 100 * value
    if 0 < percent < 0.001:
        return "under 0.001%"
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


# --- how text falls into documents: the same of plain text and of a prepared corpus ---

# With half of the documents of one sentence, most pairs of such text are random by need.
ONE_SENTENCE = Rule(
    "{ones:,} of {documents:,} documents ({value}) have one sentence",
    0.1,
    0.5,
    "nothing follows a document's last sentence, so the next sentence is random by need: the label "
    "says nothing of the text, and pairs are short",
    "join texts that belong together into documents of several sentences",
)
# Documents that all are single lines were not written that way.
SINGLE_LINES = dataclasses.replace(
    ONE_SENTENCE,
    what=ONE_SENTENCE.what + ": is there a blank line after every line?",
    remedy="in corpus.layout=sentences_by_line a blank line ends a document: keep those between "
    "documents alone",
)
# Each repeat is learned by heart a little; at one in ten it shows in every epoch.
REPEATED = Rule(
    "{repeats:,} of {documents:,} documents ({value}) repeat an earlier one",
    0.0,
    0.1,
    "what repeats is learned by heart; a random next sentence may be the true one",
    "--set corpus.repeated_documents=drop",
)
# One document that is half the text is what the model learns, and half of B's come from it.
DOMINATES = Rule(
    "the longest of {documents:,} documents holds {value} of the text ({longest:,} {unit}, the "
    "median {median:,})",
    0.2,
    0.5,
    "the model learns that one document; held out, it alone would decide the score",
    "cut it into documents of its chapters or articles",
)


def one_sentence(ones: int, documents: int, layout: str, example: str) -> list[Finding]:
    """Reports documents of a single sentence, after which nothing follows."""
    value = ones / documents
    single_lines = layout == "sentences_by_line" and value > ONE_SENTENCE.problem_over
    rule = SINGLE_LINES if single_lines else ONE_SENTENCE
    return rule.check(value, example, ones=ones, documents=documents)


def repeated(repeats: int, documents: int, handling: str, example: str) -> list[Finding]:
    """Reports documents whose whole text stood before."""
    value = 0.0 if handling == "drop" else repeats / documents
    return REPEATED.check(value, example, repeats=repeats, documents=documents)


def dominating(lengths: np.ndarray, unit: str, example: str) -> list[Finding]:
    """Reports a document longer than all others together, or nearly; `lengths` [documents]."""
    value = float(lengths.max() / lengths.sum())
    if len(lengths) * value < 4:  # of five documents one is easily a fifth
        return []
    return DOMINATES.check(
        value,
        example,
        documents=len(lengths),
        longest=int(lengths.max()),
        unit=unit,
        median=int(np.median(lengths)),
    )
