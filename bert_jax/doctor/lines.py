"""Lines read in a layout they were not written in, and sentences that come out too long."""

import dataclasses
import itertools
import re

from bert_jax.config import Corpus
from bert_jax.doctor.finding import Finding, example, severity, share
from bert_jax.text import documents, sentences
from bert_jax.text.documents import Document

# Some 500 pieces: the longest example. Of a longer sentence the rest is never seen.
_LONG = 2_000
_LONG_SHARE, _LONG_NOTE = 0.1, 0.01

# A few lines say nothing of a file's layout.
_LEAST_LINES = 20
# What is wrapped is wrapped to this width, but for some line that a machine wrote.
_WRAPPED = 100
_MOSTLY = 0.9
# One sentence a line: nearly all end in one of these.
_ENDS = tuple(".!?\"'”’…")
_ENDING = 0.8
# Blank lines between documents of several lines; between paragraphs they stand after each line.
_LINES_A_BLOCK = 2
_SENTENCES_A_LINE = 1.2
# Splitters differ on a few; paragraphs have several. Looked at in so many documents.
_SENTENCES_A_LINE_NOTE = 1.5
_SPLIT_DOCUMENTS = 5_000


class Lines:
    """Looks at the lines and sentences of documents as they are read."""

    def __init__(self, corpus: Corpus) -> None:
        self._corpus = corpus
        self._characters = self._documents = 0
        self._long = self._long_characters = 0
        self._longest = (0, "")
        self._flipped: list[str] = []
        self._by_sentence: list[str] = []
        self._lines = self._sentences = 0  # in sentences_by_line
        self._several = ""

    def add(self, document: Document, lines: list[str], split: list[str]) -> None:
        """Looks at a document, its lines, and its sentences."""
        self._documents += 1
        self._characters += len(document.text)
        for sentence in split:
            if len(sentence) > _LONG:
                self._add_long(document, sentence)
        if _is_flipped(document, lines):
            self._flipped.append(example(document.place(0), document.text))
        if _is_by_sentence(document, lines, split):
            self._by_sentence.append(example(document.place(0), document.text))
        if document.layout == "sentences_by_line" and self._documents <= _SPLIT_DOCUMENTS:
            self._add_by_line(document, split)

    def _add_by_line(self, document: Document, lines: list[str]) -> None:
        paragraphs = dataclasses.replace(document, layout="paragraphs_by_line")
        count = len(sentences.split(paragraphs, self._corpus.language))
        self._lines += len(lines)
        self._sentences += count
        if count > _SENTENCES_A_LINE_NOTE * len(lines) and not self._several:
            self._several = example(document.place(0), document.text)

    def _add_long(self, document: Document, sentence: str) -> None:
        self._long += 1
        self._long_characters += len(sentence)
        if len(sentence) > self._longest[0]:
            # In the text its blanks may be line ends.
            words = re.search(r"\s+".join(map(re.escape, sentence.split()[:8])), document.text)
            line = document.text.count("\n", 0, words.start() if words else 0)
            self._longest = (len(sentence), example(document.place(line), sentence))

    def findings(self, scope: str) -> list[Finding]:
        """What was found; `scope` says how much was read."""
        found = []
        if self._long_characters > _LONG_NOTE * self._characters:
            found.append(self._long_sentences(scope))
        if self._sentences > _SENTENCES_A_LINE_NOTE * self._lines:
            found.append(
                Finding(
                    "note",
                    f"lines hold {self._sentences / self._lines:.1f} sentences each{scope}, and "
                    "are read as one",
                    self._several,
                    "pairs are made of few, long pieces, of which more is cut off",
                    "--set corpus.layout=paragraphs_by_line, if lines are paragraphs",
                )
            )
        of = f"of {self._documents:,} documents{scope}"
        if self._flipped:
            found.append(
                Finding(
                    "problem",
                    f"{len(self._flipped):,} {of} are wrapped, but for a long line or two, and are "
                    "read as paragraphs_by_line",
                    self._flipped[0],
                    "every line end cuts a sentence in two",
                    "--set corpus.layout=wrapped, if all files are",
                )
            )
        if self._by_sentence:
            found.append(
                Finding(
                    "note",
                    f"{len(self._by_sentence):,} {of} look like one sentence a line with a blank "
                    "line between documents, and are read as one document each",
                    self._by_sentence[0],
                    "a next sentence may come from another text",
                    "--set corpus.layout=sentences_by_line, if they are",
                )
            )
        return found

    def _long_sentences(self, scope: str) -> Finding:
        value = self._long_characters / self._characters
        by_line = self._corpus.layout == "sentences_by_line"
        return Finding(
            severity(value, _LONG_SHARE),
            f"{self._long:,} sentences{scope} are longer than {_LONG:,} characters and hold "
            f"{share(value)} of the text (the longest {self._longest[0]:,})",
            self._longest[1],
            "no example holds them: most of each is cut off",
            "--set corpus.layout=paragraphs_by_line, if lines are paragraphs"
            if by_line
            else "is corpus.language right, do quotation marks match, is it prose? "
            "corpus.layout=sentences_by_line takes sentences as they are",
        )


def _is_flipped(document: Document, lines: list[str]) -> bool:
    """Whether a wrapped text is read as paragraphs because of a few long lines."""
    if document.layout != "paragraphs_by_line" or not document.line:
        return False
    short = [line for line in lines if len(line) <= _WRAPPED]
    if len(short) < _MOSTLY * len(lines):
        return False
    return documents.contradiction("\n".join(short), "paragraphs_by_line") is not None


def _is_by_sentence(document: Document, lines: list[str], split: list[str]) -> bool:
    """Whether a document looks like several, one sentence a line."""
    if document.layout == "sentences_by_line" or not document.line:
        return False
    texts = [line.strip() for line in lines]
    full = [line for line in texts if line]
    blanks = sum(1 for a, b in itertools.pairwise(texts) if a and not b)
    if len(full) < _LEAST_LINES or not blanks or len(full) < _LINES_A_BLOCK * (blanks + 1):
        return False
    whole = sum(line.endswith(_ENDS) and not line[0].islower() for line in full)
    # Paragraphs look like this too, but hold several sentences.
    return whole >= _ENDING * len(full) and len(split) <= _SENTENCES_A_LINE * len(full)
