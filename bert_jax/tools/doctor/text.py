"""Plain text that is not prepared yet, as `prepare` would read it.

Findings name files that `prepare` would refuse, such as files with bytes that do not decode. If
there is very much text, only a sample of the files is read, and the findings say so.
"""

import collections
import dataclasses
import itertools
import math
import os
import random
import re
from collections.abc import Iterator

from bert_jax.config import Corpus
from bert_jax.data.build import LEAST_VALIDATION_DOCUMENTS, ONE_FILE
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.text import documents, sentences
from bert_jax.text import lines as text_lines
from bert_jax.text import sources as text_sources
from bert_jax.text.documents import Document
from bert_jax.tools.doctor import finding
from bert_jax.tools.doctor.characters import Characters
from bert_jax.tools.doctor.finding import Finding, FindingRule, example

# The most characters read as documents, in all (this takes a minute) and of one file of several.
_MOST = 300_000_000
_MOST_OF_A_FILE = 30_000_000
# Characters of some 500 tokens, the longest row. The rest of a longer sentence is never seen.
_LONG = 2_000
# The most refused files named for a reason, and the most reasons with a finding of their own.
_NAMED, _REASONS = 8, 5

REFUSED = FindingRule(
    "`prepare` refuses {count}",
    0, 0,
    "there is no training before they are mended",
    "mend them, or change the setting it names",
)  # fmt: skip
TOO_FEW = FindingRule(
    "{count}, and `prepare` needs {least}",
    0, 0,
    f"`prepare` stops: it holds out {LEAST_VALIDATION_DOCUMENTS}, and learns from as many others",
    ONE_FILE,
)  # fmt: skip
LEFT_OUT = FindingRule(
    "{line}",
    0, math.inf,
    "this is not part of the corpus",
    "name further sources in corpus.sources, or a pattern for files with other endings, if it is "
    "text to learn from",
)  # fmt: skip


def examine(corpus: Corpus, prepared_as: Corpus | None = None) -> list[Finding]:
    """Examines the sources of a corpus.

    Also reports the files that `prepared_as` (None: the corpus itself) would leave out.
    """
    places: list[tuple[Corpus, str, int]] = []
    for one in corpus.alone():
        (source,) = one.sources
        word = source.partition(":")[0]
        if word in ("tfds", "tfds_dir"):
            places.append((one, source, 0))
            continue
        for path, listed in text_sources.files(source).items():
            alone = dataclasses.replace(one, sources=(f"{word}:{path}",))
            size = 0 if word == "parquet" else text_sources.state(path, listed=listed)["bytes"]
            places.append((alone, path, size))
    findings = _Survey(corpus, places).findings()
    for line in text_sources.left_out(prepared_as or corpus):
        findings += LEFT_OUT.check(1, line=printable(line))
    return findings


# --- lines read in a layout that they were not written in ---

# What is wrapped is wrapped to this width, except for some line that a machine wrote.
_WRAPPED, _MOSTLY = 100, 0.9
# A few lines say nothing of a file's layout; one sentence a line, nearly all end in one of these.
_LEAST_LINES, _ENDS, _ENDING = 20, tuple(".!?\"'”’…"), 0.8
# Blank lines between documents of several lines; between paragraphs they stand after each line.
_LINES_A_BLOCK = 2
# Splitters differ on a few sentences; paragraphs have several. Their beginnings tell.
_SENTENCES_A_LINE, _A_PARAGRAPH, _BEGINNING = 1.2, 1.5, 500


def _layout(looks: str, note_over: float, problem_over: float, effect: str) -> FindingRule:
    what = f"{{count:,}} of {{documents:,}} documents{{scope}} look {looks}, and are not read so"
    remedy = f"--set corpus.layout={looks}, if all are"
    return FindingRule(what, note_over, problem_over, effect, remedy)


# By the layout that documents look like.
LAYOUTS = {
    "wrapped": _layout("wrapped", 0, 0, "every line end cuts a sentence in two"),
    "sentences_by_line": _layout(
        *("sentences_by_line", 0, math.inf), "a next sentence may come from another text"
    ),
    "paragraphs_by_line": _layout(
        *("paragraphs_by_line", 0.5, math.inf),
        "pairs are made of few, long pieces, of which more is cut off",
    ),
}


def _looks_like(document: Document, lines: list[str], split: list[str], language: str) -> str:
    """Returns the layout that a document looks like where it is read in another, else ""."""
    if not document.line:  # a record
        return ""
    if document.layout == "sentences_by_line":
        text = document.text[:_BEGINNING]
        beginning = dataclasses.replace(document, pieces=[text], layout="paragraphs_by_line")
        whole = len(sentences.split(beginning, language))
        return "paragraphs_by_line" if whole > _A_PARAGRAPH * len(beginning.paragraphs()) else ""
    if document.layout == "paragraphs_by_line":
        short = [line for line in lines if len(line) <= _WRAPPED]
        mostly = len(short) >= _MOSTLY * len(lines)
        if mostly and documents.contradiction(short, "paragraphs_by_line") is not None:
            return "wrapped"
    texts = [line.strip() for line in lines]
    full = [line for line in texts if line]
    blanks = sum(1 for a, b in itertools.pairwise(texts) if a and not b)
    if len(full) < _LEAST_LINES or not blanks or len(full) < _LINES_A_BLOCK * (blanks + 1):
        return ""
    ended = sum(line.endswith(_ENDS) and not line[0].islower() for line in full)
    # Paragraphs look like this too, but hold several sentences.
    is_so = ended >= _ENDING * len(full) and len(split) <= _SENTENCES_A_LINE * len(full)
    return "sentences_by_line" if is_so else ""


# --- documents ---


class _Survey:
    """One reading of the documents.

    Args:
      corpus: how to read them.
      places: sources of one file each, as they are read, with their names and bytes; 0 if not
        known.
    """

    def __init__(self, corpus: Corpus, places: list[tuple[Corpus, str, int]]):
        self._corpus, self._characters = corpus, Characters()
        # (file, message) pairs, by the message without file names and numbers.
        self._refused: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
        self._count = self._read = self._repeats = self._ones = 0
        self._seen: set[int] = set()  # hashes of whole texts
        self._any = self._repeated = self._one = ""  # examples
        self._sentences, self._largest = 0, (0, "")  # counts; of the largest with an example
        self._long: list[int] = []  # characters of each long sentence
        self._longest = (0, "")  # with an example
        self._layouts: dict[str, list[str]] = collections.defaultdict(list)
        self._size = sum(size for *_, size in places)
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
            reason = re.split(r"[(;]", str(error).replace(name, ""))[0]
            self._refused[re.sub(r"\d+", "", reason)].append((name, str(error)))

    def _add(self, document: Document) -> None:
        self._characters.add(document)
        all_split, known = list[str](), len(self._seen)
        for text, split in sentences.of_documents(document, self._corpus):
            where = example(document.place(0), text)
            self._any = self._any or where
            self._count += 1
            self._sentences += len(split)
            self._largest = max(self._largest, (len(split), where))
            if len(split) == 1:
                self._ones += 1
                self._one = self._one or where
            if (digest := hash(text)) in self._seen:
                self._repeats += 1
                self._repeated = self._repeated or where
            self._seen.add(digest)
            all_split += split
        if len(self._seen) == known:
            return  # its lines repeat with it
        for sentence in all_split:
            if len(sentence) > _LONG:
                where = example(document.place(0), sentence)
                self._longest = max(self._longest, (len(sentence), where))
                self._long.append(len(sentence))
        lines = document.text.split("\n")
        if looks := _looks_like(document, lines, all_split, self._corpus.language):
            self._layouts[looks].append(example(document.place(0), document.text))

    def _refusals(self) -> list[Finding]:
        """Returns a finding for each reason why files are refused, the commonest first."""
        by_reason = sorted(self._refused.values(), key=len, reverse=True)
        rare = list(itertools.chain.from_iterable(by_reason[_REASONS:]))
        findings: list[Finding] = []
        for files in (*by_reason[:_REASONS], rare):
            if files:
                names = [os.path.basename(name) for name, _ in files[1 : 1 + _NAMED]]
                names += [f"{len(files) - 1 - _NAMED:,} more"] * (len(files) > 1 + _NAMED)
                also = f"; also {', '.join(names)}" if names else ""
                count = pluralize(len(files), "file")
                findings += REFUSED.check(len(files), printable(files[0][1] + also), count=count)
        return findings

    def findings(self) -> list[Finding]:
        """Returns the findings."""
        findings = self._refusals()
        if not self._refused and not self._is_sample:
            least, different = 2 * LEAST_VALIDATION_DOCUMENTS, len(self._seen)
            count = pluralize(different, "different document")
            findings += TOO_FEW.check(least - different, self._any, count=count, least=least)
        if not self._count:
            return findings
        sample = f" (in a sample of {self._read / 1e6:,.3g} million characters)"
        scope = sample if self._is_sample else ""
        findings += finding.check_documents(
            finding.ONE_SENTENCE, self._ones, self._count, self._one
        )
        if len(self._seen) >= 2 * LEAST_VALIDATION_DOCUMENTS:
            largest, where = self._largest
            findings += finding.dominant_document(largest, self._sentences, where, scope)
        if self._corpus.repeated_documents == "keep":
            number = self._repeats, self._count, self._repeated
            findings += finding.check_documents(finding.REPEATED, *number)
        long = self._long, self._read, f"{_LONG:,} characters{scope}", self._longest[1]
        findings += finding.long_sentences(*long)
        for looks, examples in self._layouts.items():
            number = {"count": len(examples), "documents": self._count, "scope": scope}
            findings += LAYOUTS[looks].check(len(examples) / self._count, examples[0], **number)
        return findings + self._characters.findings(scope)
