"""Plain text that is not prepared yet, as `prepare` would read it.

Files that `prepare` would refuse, such as those with bytes that do not decode, are named. Of very
much text a sample of the files is read, and the findings say so.
"""

import array
import dataclasses
import glob
import hashlib
import itertools
import math
import os
import random
import re
from collections.abc import Iterator

import numpy as np

from bert_jax.config import Corpus
from bert_jax.data.build import LEAST_VALIDATION_DOCUMENTS, ONE_FILE
from bert_jax.doctor import finding
from bert_jax.doctor.characters import Characters
from bert_jax.doctor.finding import Finding, Rule, example, share
from bert_jax.errors import InputError, printable, quantity
from bert_jax.text import documents, sentences
from bert_jax.text import lines as text_lines
from bert_jax.text import sources as text_sources
from bert_jax.text.documents import Document

# Characters read as documents at most: a minute. Of one file less, if there are several.
_MOST = 300_000_000
_MOST_OF_A_FILE = 30_000_000


def examine(corpus: Corpus) -> list[Finding]:
    """Examines the sources of a corpus."""
    places: list[tuple[Corpus, str, int]] = []
    for one in corpus.alone():
        (source,) = one.sources
        word = source.partition(":")[0]
        if word in ("parquet", "tfds", "tfds_dir"):
            places.append((one, source, 0))
            continue
        for path in text_sources.files(source):
            alone = dataclasses.replace(one, sources=(f"{word}:{glob.escape(path)}",))
            places.append((alone, path, text_sources.state(path)["bytes"]))
    return _Survey(corpus, places).findings()


# --- lines read in a layout they were not written in, and sentences that come out too long ---

# Some 500 pieces: the longest example. Of a longer sentence the rest is never seen.
_LONG = 2_000
# A few lines say nothing of a file's layout.
_LEAST_LINES = 20
# What is wrapped is wrapped to this width, except for some line that a machine wrote.
_WRAPPED, _MOSTLY = 100, 0.9
# One sentence a line: nearly all end in one of these.
_ENDS, _ENDING = tuple(".!?\"'”’…"), 0.8
# Blank lines between documents of several lines; between paragraphs they stand after each line.
_LINES_A_BLOCK = 2
_SENTENCES_A_LINE = 1.2
# Documents whose lines are split, to see whether they are paragraphs.
_SPLIT_DOCUMENTS = 5_000

LONG_SENTENCES = Rule(
    "{count}{scope} of over 2,000 characters, {value} of the text (the longest {longest:,})",
    0.01, 0.1,
    "no example holds them: most of each is cut off",
    "{remedy}",
)  # fmt: skip
# No word, but what excerpts begin with that are none.
_NO_PROSE = re.compile(r': "[\x21-\x7e]{60}')
# Splitters differ on a few sentences; paragraphs have several.
PARAGRAPHS = Rule(
    "lines hold {sentences:.1f} sentences each{scope}, and are read as one",
    1.5, math.inf,
    "pairs are made of few, long pieces, of which more is cut off",
    "--set corpus.layout=paragraphs_by_line, if lines are paragraphs",
)  # fmt: skip
FLIPPED = Rule(
    "{count:,} of {documents:,} documents{scope} are wrapped, except for a long line or two, and "
    "are read as paragraphs_by_line",
    0, 0,
    "every line end cuts a sentence in two",
    "--set corpus.layout=wrapped, if all files are",
)  # fmt: skip
BY_SENTENCE = Rule(
    "{count:,} of {documents:,} documents{scope} look like one sentence a line with a blank line "
    "between documents, and are read as one document each",
    0, math.inf,
    "a next sentence may come from another text",
    "--set corpus.layout=sentences_by_line, if they are",
)  # fmt: skip


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
        """Counts a document, its lines, and its sentences."""
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
            paragraphs = dataclasses.replace(document, layout="paragraphs_by_line")
            count = len(sentences.split(paragraphs, self._corpus.language))
            self._lines += len(split)
            self._sentences += count
            if count > PARAGRAPHS.note_over * len(split) and not self._several:
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
        """Returns the findings; `scope` says how much was read."""
        longest, where = self._longest
        by_line = self._corpus.layout == "sentences_by_line"
        findings = LONG_SENTENCES.check(
            self._long_characters / self._characters,
            where,
            count=quantity(self._long, "sentence"),
            scope=scope,
            longest=longest,
            remedy="take out what is no prose, such as this string without blanks (base64, DNA, "
            "minified code): to WordPiece it is one word, and [UNK]"
            if _NO_PROSE.search(where)
            else "--set corpus.layout=paragraphs_by_line, if lines are paragraphs"
            if by_line
            else "is corpus.language right, do quotation marks match, is it prose? "
            "corpus.layout=sentences_by_line takes sentences as they are",
        )
        a_line = self._sentences / max(self._lines, 1)
        findings += PARAGRAPHS.check(a_line, self._several, sentences=a_line, scope=scope)
        for rule, examples in ((FLIPPED, self._flipped), (BY_SENTENCE, self._by_sentence)):
            findings += rule.check(
                len(examples),
                "".join(examples[:1]),
                count=len(examples),
                documents=self._documents,
                scope=scope,
            )
        return findings


def _is_flipped(document: Document, lines: list[str]) -> bool:
    """Returns whether a wrapped text is read as paragraphs because of a few long lines."""
    if document.layout != "paragraphs_by_line" or not document.line:
        return False
    short = [line for line in lines if len(line) <= _WRAPPED]
    if len(short) < _MOSTLY * len(lines):
        return False
    return documents.contradiction(short, "paragraphs_by_line") is not None


def _is_by_sentence(document: Document, lines: list[str], split: list[str]) -> bool:
    """Returns whether a document looks like several, one sentence a line."""
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


# --- what repeats, counted in bounded memory ---

# Different texts held at once: some 100 MB.
_HELD = 300_000


@dataclasses.dataclass
class Entry:
    """A text seen: how often, in how many documents, how long it is, where first."""

    count: int
    documents: int
    last_document: int
    length: int
    place: str
    excerpt: str


class Repeats:
    """Counts texts by their hashes.

    Once too many differ, it keeps those whose hash is even, then a multiple of four, and so on:
    a fair sample of the different texts, each with its true count.
    """

    def __init__(self) -> None:
        self._mask = 0
        self._entries: dict[int, Entry] = {}

    @property
    def sampled(self) -> int:
        """Returns one in how many different texts is counted."""
        return self._mask + 1

    def add(self, text: str, document: int, place: str) -> bool:
        """Counts a text; returns whether it is known to have stood before."""
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        key = int.from_bytes(digest, "little")
        if key & self._mask:
            return False
        entry = self._entries.get(key)
        if entry is not None:
            entry.count += 1
            entry.documents += entry.last_document != document
            entry.last_document = document
            return True
        self._entries[key] = Entry(1, 1, document, len(text), place, text[:200])
        if len(self._entries) > _HELD:
            self._mask = 2 * self._mask + 1
            self._entries = {k: e for k, e in self._entries.items() if not k & self._mask}
        return False

    def total(self) -> tuple[int, int, int]:
        """Returns (texts, repeats, characters of repeats) of those that are counted."""
        entries = self._entries.values()
        return (
            sum(e.count for e in entries),
            sum(e.count - 1 for e in entries),
            sum((e.count - 1) * e.length for e in entries),
        )

    def commonest(self) -> Entry:
        """Returns the text whose repeats hold most characters; in a tie, of most documents."""
        return max(self._entries.values(), key=lambda e: ((e.count - 1) * e.length, e.documents))


# --- documents ---

# Refused files that are named.
_NAMED = 8
# Shorter lines repeat by nature: names of speakers, "Yes.", "* * *".
_LINE = 30
# A line in most documents is a header, a footer or a licence.
_HEADER = 0.5

REFUSED = Rule(
    "`prepare` refuses {count}",
    0, 0,
    "there is no training before they are mended",
    "mend them, or change the setting it names",
)  # fmt: skip
TOO_FEW = Rule(
    "{count}, and `prepare` needs {least}",
    0, 0,
    f"`prepare` stops: it holds out {LEAST_VALIDATION_DOCUMENTS}, and learns from as many others",
    ONE_FILE,
)  # fmt: skip
# Boilerplate in every tenth character stands in every example.
BOILERPLATE = Rule(
    "{repeats} of lines{scope} repeat an earlier one{sampled}: {value} of the text; one stands in "
    "{documents:,} of {all:,} documents",
    0.01, 0.1,
    "headers, footers and licences are learned by heart, and are no next sentences",
    "take them out of the files",
)  # fmt: skip


class _Survey:
    """One reading of the documents.

    Args:
      corpus: how to read them.
      places: sources of one file each, as they are read, with their names and bytes; 0 if not
        known.
    """

    def __init__(self, corpus: Corpus, places: list[tuple[Corpus, str, int]]):
        self._corpus = corpus
        self._characters, self._lines = Characters(), Lines(corpus)
        self._texts, self._repeats = Repeats(), Repeats()
        self._lengths = array.array("q")
        self._longest = (0, "")
        self._ones, self._one = 0, ""
        self._refused: dict[str, str] = {}  # by file
        self._size = sum(size for *_, size in places)
        self._read = 0
        self._is_sample = False
        self._most_of_a_file = max(_MOST_OF_A_FILE, _MOST // max(len(places), 1))
        if self._size > _MOST:
            random.Random(0).shuffle(places)
        for one, name, size in places:
            for document in self._documents(one, name, is_text=size > 0):
                self._add(document)

    def _documents(self, one: Corpus, name: str, is_text: bool) -> Iterator[Document]:
        """Yields documents of a source, until enough was read; keeps a refusal."""
        most = self._most_of_a_file if self._size > _MOST else _MOST
        before = self._read
        if before > _MOST:
            self._is_sample = True
            return
        try:
            if is_text:
                text_lines.require_not_utf8([name], one.encoding)
            for document in documents.read(one):
                if self._read > _MOST or self._read - before > most:
                    self._is_sample = True
                    return
                self._read += len(document.text)
                yield document
        except InputError as error:
            self._refused[name] = str(error)

    def _add(self, document: Document) -> None:
        place = document.place(0)
        self._characters.add(document)
        number, split, is_new = len(self._lengths), list[str](), False
        for text, own in sentences.of_documents(document, self._corpus):
            if len(text) > self._longest[0]:
                self._longest = (len(text), example(place, text))
            self._lengths.append(len(text))
            if len(own) == 1:
                self._ones += 1
                self._one = self._one or example(place, text)
            is_new |= not self._texts.add(text, len(self._lengths), place)
            split += own
        if not is_new:
            return  # its lines repeat with it
        lines = document.text.split("\n")
        self._lines.add(document, lines, split)
        for line_number, line in enumerate(lines):
            if len(line) >= _LINE:
                self._repeats.add(line.strip(), number, document.place(line_number))

    def findings(self) -> list[Finding]:
        """Returns the findings."""
        refused = printable(next(iter(self._refused.values()), ""))
        if others := [os.path.basename(name) for name in list(self._refused)[1 : 1 + _NAMED]]:
            refused += printable(f"; also {', '.join(others)}")
        count = quantity(len(self._refused), "file")
        findings = REFUSED.check(len(self._refused), refused, count=count) + self._too_few()
        count = len(self._lengths)
        if not count:
            return findings
        findings += finding.one_sentence(self._ones, count, self._corpus.layout, self._one)
        _, repeats, _ = self._texts.total()
        if repeats:
            first = self._texts.commonest()
            where = example(f"{first.count} times, first in {first.place}", first.excerpt)
            repeats *= self._texts.sampled
            findings += finding.repeated(repeats, count, self._corpus.repeated_documents, where)
        findings += self._boilerplate()
        findings += finding.dominating(np.array(self._lengths), "characters", self._longest[1])
        return findings + self._lines.findings(self._scope) + self._characters.findings(self._scope)

    @property
    def _scope(self) -> str:
        """Returns how much was read, where it was not all."""
        if not self._is_sample:
            return ""
        return f" (in a sample of {self._read / 1e6:,.3g} million characters)"

    def _too_few(self) -> list[Finding]:
        """Looks whether there is text of which something can be held out."""
        texts, repeats, _ = self._texts.total()
        least, different = 2 * LEAST_VALIDATION_DOCUMENTS, texts - repeats
        if self._refused or self._is_sample or self._texts.sampled > 1:
            return []
        return TOO_FEW.check(
            least - different,
            self._longest[1],
            count=quantity(different, "different document"),
            least=least,
        )

    def _boilerplate(self) -> list[Finding]:
        texts, repeats, repeated = self._repeats.total()
        if not repeats:
            return []
        value = repeated * self._repeats.sampled / sum(self._lengths)
        commonest = self._repeats.commonest()
        is_header = (
            commonest.documents > _HEADER * len(self._lengths)
            and commonest.documents >= LEAST_VALIDATION_DOCUMENTS
        )
        sampled = self._repeats.sampled
        return BOILERPLATE.check(
            value,
            example(f"{commonest.count:,} times, first in {commonest.place}", commonest.excerpt),
            named=is_header,
            repeats=share(repeats / texts),
            scope=self._scope,
            sampled=f", one in {sampled} counted" if sampled > 1 else "",
            documents=commonest.documents,
            all=len(self._lengths),
        )
