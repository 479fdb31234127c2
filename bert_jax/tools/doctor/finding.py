"""What `doctor` finds: one finding, the rule that it breaks, and how both are put into words."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from bert_jax.errors import pluralize, printable

# Characters of text that an example shows.
_EXCERPT = 70

Severity = Literal["problem", "note"]


@dataclasses.dataclass(frozen=True)
class FindingRule:
    """The limits of a measured value, and the words of the finding where it is more.

    `what` and `remedy` are templates of `str.format`; `{value}` is the value as a share.
    """

    what: str  # what is wrong, with its number
    note_over: float  # a larger value is worth knowing
    problem_over: float  # a larger value is a problem
    effect: str  # what it is likely to do to training
    remedy: str  # the setting or action that mends it

    def check(self, value: float, example: str = "", **fields: Any) -> list["Finding"]:
        """Returns the finding, or nothing if the value is within the limits.

        `fields` are those of the templates.
        """
        if not value > self.note_over:
            return []
        severity = "problem" if value > self.problem_over else "note"
        words = {"value": share(value)} | fields
        what, remedy = self.what.format(**words), self.remedy.format(**words)
        return [Finding(self, severity, what, example, self.effect, remedy)]


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or worth knowing, in the words of its rule."""

    rule: FindingRule
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
ONE_SENTENCE = FindingRule(
    "{count:,} of {documents:,} documents ({value}) have one sentence",
    0.1, 0.5,
    "nothing follows a document's last sentence, so the next sentence is random by need: the label "
    "says nothing of the text, and pairs are short",
    "join texts that belong together into documents of several sentences; in "
    "corpus.layout=sentences_by_line a blank line ends a document: is there one after every line?",
)  # fmt: skip
# Each repeat is learned by heart a little; at one in ten it shows in every epoch.
REPEATED = FindingRule(
    "{count:,} of {documents:,} documents ({value}) repeat an earlier one",
    0.0, 0.1,
    "what repeats is learned by heart; a random next sentence may be the true one",
    "--set corpus.repeated_documents=drop",
)  # fmt: skip
# What is longer than the longest example is no prose, or the splitter did not see its ends.
LONG_SENTENCES = FindingRule(
    "{count} of over {limit}, {value} of the text (the longest {longest:,})",
    0.01, 0.1,
    "no example holds them: most of each is cut off",
    "if they are several sentences: is corpus.language right, do quotation marks match, are lines "
    "paragraphs (corpus.layout=paragraphs_by_line)? Take out what is no prose: a string without "
    "blanks is one word to WordPiece, and [UNK]",
)  # fmt: skip
# A document with most of the text decides the split, and its random next sentences come from the
# few other documents.
DOMINANT = FindingRule(
    "one document has {value} of all sentences ({count:,} of {sentences:,}){scope}",
    0.5, 0.9,
    "a document is trained on or held out as a whole, and its random next sentences come from the "
    "few other documents",
    "--set corpus.cut_documents=100, or corpus.document_starts, if it is several texts",
)  # fmt: skip


def dominant_document(largest: int, sentences: int, example: str, scope: str = "") -> list[Finding]:
    """Reports a document with most of the sentences; `largest` counts the sentences in it."""
    counts = {"count": largest, "sentences": sentences}
    return DOMINANT.check(largest / sentences, example, **counts, scope=scope)


def check_documents(rule: FindingRule, count: int, documents: int, example: str) -> list[Finding]:
    """Reports that so many of the documents are what the rule says."""
    return rule.check(count / documents, example, count=count, documents=documents)


def long_sentences(sizes: Sequence[int], whole: int, limit: str, example: str) -> list[Finding]:
    """Reports sentences that no example holds, of these sizes; `whole` is that of all text."""
    count, longest = pluralize(len(sizes), "sentence"), max(sizes, default=0)
    value = sum(sizes) / whole
    return LONG_SENTENCES.check(value, example, count=count, limit=limit, longest=longest)
