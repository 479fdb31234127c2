"""Findings of `doctor`, and the rules with their limits and texts."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from bert_jax.errors import pluralize, printable

# Characters of text that an example shows.
_EXCERPT = 70

Severity = Literal["problem", "note"]


@dataclasses.dataclass(frozen=True)
class FindingRule:
    """The limits of a measured value, and the texts of the finding above these limits.

    `message` and `remedy` are templates of `str.format`; `{value}` is the value as a share.
    """

    message: str  # the fault, with the measured value
    note_over: float  # a larger value is worth a note
    problem_over: float  # a larger value is a problem
    effect: str  # the likely effect on training
    remedy: str  # the setting or action that helps

    def check(self, value: float, example: str = "", **fields: Any) -> list["Finding"]:
        """Returns the finding, or [] if the value is within the limits.

        `fields` are the fields of the templates.
        """
        if not value > self.note_over:
            return []
        severity = "problem" if value > self.problem_over else "note"
        fields = {"value": format_share(value)} | fields
        message, remedy = self.message.format(**fields), self.remedy.format(**fields)
        return [Finding(self, severity, message, example, self.effect, remedy)]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A problem or a note, with the texts of its rule."""

    rule: FindingRule
    severity: Severity  # `problem` if training suffers or is refused, `note` for a remark
    message: str
    example: str  # a location and a short printable excerpt; may be empty
    effect: str
    remedy: str


def example(location: str, text: str) -> str:
    """Returns a location and the beginning of its text, on one line, with controls escaped."""
    line = " ".join(text[: 4 * _EXCERPT].split())
    if len(line) > _EXCERPT:
        line = line[: _EXCERPT - 3] + "..."
    return printable(f'{location}: "{line}"')


def format_share(value: float) -> str:
    """Formats a share as percent; a small share is never rounded to 0."""
    percent = 100 * value
    if 0 < percent < 0.001:
        return "under 0.001%"
    return f"{percent:.0f}%" if percent >= 10 else f"{percent:.2g}%"


# --- documents, both in plain text and in a prepared corpus ---

# If half of the documents have one sentence, most pairs cannot be anything but random.
ONE_SENTENCE = FindingRule(
    "{count:,} of {documents:,} documents ({value}) have one sentence",
    0.1, 0.5,
    "nothing follows a document's last sentence, so the next sentence must be random: the label "
    "does not depend on the text, and pairs are short",
    "join texts that belong together into documents of several sentences; in "
    "corpus.layout=sentences_by_line a blank line ends a document: is there one after every line?",
)  # fmt: skip
# Even a few repeats are memorized a little, so any is noted; one document in ten is too many.
REPEATED = FindingRule(
    "{count:,} of {documents:,} documents ({value}) repeat an earlier one",
    0.0, 0.1,
    "the model memorizes repeated text; a random next sentence may be the true one",
    "--set corpus.repeated_documents=drop",
)  # fmt: skip
# A sentence longer than the longest row is no prose, or the splitter did not find its end.
LONG_SENTENCES = FindingRule(
    "{sentences} longer than {limit}, {value} of the text (the longest {longest:,})",
    0.01, 0.1,
    "they do not fit into a row: most of each is cut off",
    "if they are several sentences: is corpus.language right, do quotation marks match, are lines "
    "paragraphs (corpus.layout=paragraphs_by_line)? Remove text that is no prose: WordPiece makes "
    "a long string without spaces one [UNK]",
)  # fmt: skip
# A document with most of the text is wholly in one split, and its random next sentences come from
# the few other documents.
DOMINANT = FindingRule(
    "one document has {value} of all sentences ({count:,} of {sentences:,}){scope}",
    0.5, 0.9,
    "a document is trained on or held out as a whole, and its random next sentences come from the "
    "few other documents",
    "--set corpus.cut_documents=100 (sentences); corpus.document_starts if it has several texts",
)  # fmt: skip


def check_dominance(largest: int, sentences: int, example: str, scope: str = "") -> list[Finding]:
    """Checks the share of the largest document, which has `largest` of `sentences` sentences."""
    counts = {"count": largest, "sentences": sentences}
    return DOMINANT.check(largest / sentences, example, **counts, scope=scope)


def check_documents(rule: FindingRule, count: int, documents: int, example: str) -> list[Finding]:
    """Checks a rule about the share of documents: `count` of `documents`."""
    return rule.check(count / documents, example, count=count, documents=documents)


def check_lengths(sizes: Sequence[int], total: int, limit: str, example: str) -> list[Finding]:
    """Checks the share of sentences that fit into no row, from their sizes and that of all text."""
    sentences, longest = pluralize(len(sizes), "sentence"), max(sizes, default=0)
    value = sum(sizes) / total
    return LONG_SENTENCES.check(value, example, sentences=sentences, limit=limit, longest=longest)
