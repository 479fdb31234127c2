"""Examines plain text as `prepare` would read it.

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
from bert_jax.data.build import DOCUMENT_ADVICE, LEAST_VALIDATION_DOCUMENTS
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.text import documents, line_reader, sentence_splitter
from bert_jax.text import sources as text_sources
from bert_jax.text.documents import Document
from bert_jax.tools.doctor import finding
from bert_jax.tools.doctor.characters import Characters
from bert_jax.tools.doctor.finding import Finding, FindingRule, example
from bert_jax.tools.doctor.languages import LanguageSample

_MAX_CHARACTERS = 300_000_000  # that are read in all, which takes a minute
# If files are cut short, at least so many characters of each are read.
_MIN_PER_FILE = 30_000_000
# Characters of some 500 tokens, the longest row. The rest of a longer sentence is never seen.
_LONG = 2_000
# Most files that a finding of refused files names, most reasons with a finding of their own.
_NAMED, _REASONS = 8, 5

REFUSED = FindingRule(
    "`prepare` refuses {files}",
    0, 0,
    "training cannot start",
    "repair the files, or change the setting that the example names",
)  # fmt: skip
TOO_FEW = FindingRule(
    "{documents}, but `prepare` needs {least}",
    0, 0,
    f"`prepare` stops: it needs {LEAST_VALIDATION_DOCUMENTS} to hold out, and as many for training",
    DOCUMENT_ADVICE,
)  # fmt: skip
LEFT_OUT = FindingRule(
    "{line}",
    0, math.inf,
    "this is not part of the corpus",
    "if it is text to learn from, add sources to corpus.sources, or a pattern for files with other "
    "endings",
)  # fmt: skip


def examine(corpus: Corpus, prepared_as: Corpus | None = None) -> list[Finding]:
    """Examines the sources of a corpus.

    Also reports files that `prepare` leaves out of `prepared_as`, by default the corpus itself.
    """
    files: list[tuple[Corpus, str, int]] = []
    for source_corpus in corpus.split_by_source():
        (source,) = source_corpus.sources
        kind = source.partition(":")[0]
        if kind in ("tfds", "tfds_dir"):
            files.append((source_corpus, source, 0))
            continue
        for path, bucket_entry in text_sources.require_files(source).items():
            file_corpus = dataclasses.replace(source_corpus, sources=(f"{kind}:{path}",))
            size = 0 if kind == "parquet" else text_sources.stat(path, entry=bucket_entry)["bytes"]
            files.append((file_corpus, path, size))
    reader, survey = _Reader(files), _Survey(corpus)
    for document in reader.read():
        survey.add(document)
    findings = survey.findings(reader)
    for line in text_sources.describe_unread(prepared_as or corpus):
        findings += LEFT_OUT.check(1, line=printable(line))
    return findings


# --- the layout of lines ---

# Wrapped text has lines of at most this width, in at least this share of its lines.
_WRAPPED, _WRAPPED_SHARE = 100, 0.9
# Fewest lines from which a layout is inferred. If each line is a sentence, at least this share of
# lines end in one of these characters.
_LEAST_LINES, _ENDS, _ENDED_SHARE = 20, tuple(".!?\"'”’…"), 0.8
# With fewer lines between blank lines, on average, lines may be paragraphs.
_LINES_PER_BLOCK = 2
_SENTENCES_PER_LINE = 1.2  # at most, if lines are sentences; splitters differ on a few
_SENTENCES_PER_PARAGRAPH = 1.5  # more, if lines are paragraphs; counted in the `_BEGINNING`
_BEGINNING = 500  # characters of a document


def _layout_rule(layout: str, note_over: float, problem_over: float, effect: str) -> FindingRule:
    counts = "{count:,} of {documents:,} documents{scope}"
    message = f"{counts} look like corpus.layout={layout}, but are read in another layout"
    remedy = f"--set corpus.layout={layout}, if all documents have this layout"
    return FindingRule(message, note_over, problem_over, effect, remedy)


# {layout that documents seem to have: rule}.
LAYOUTS = {
    "wrapped": _layout_rule("wrapped", 0, 0, "every line end cuts a sentence in two"),
    "sentences_by_line": _layout_rule(
        "sentences_by_line", 0, math.inf, "a next sentence may come from another text"
    ),
    "paragraphs_by_line": _layout_rule(
        "paragraphs_by_line", 0.5, math.inf, "pairs have few, long sentences, and more is cut off"
    ),
}


def _other_layout(document: Document, lines: list[str], sentences: list[str], language: str) -> str:
    """Returns the layout that a document seems to have, if it is read in another one; else ""."""
    if not document.line:  # a record
        return ""
    if document.layout == "sentences_by_line":
        text = document.text[:_BEGINNING]
        beginning = dataclasses.replace(document, chunks=[text], layout="paragraphs_by_line")
        count = len(sentence_splitter.split(beginning, language))
        most = _SENTENCES_PER_PARAGRAPH * len(beginning.paragraphs())
        return "paragraphs_by_line" if count > most else ""
    if document.layout == "paragraphs_by_line":
        short = [line for line in lines if len(line) <= _WRAPPED]
        are_short = len(short) >= _WRAPPED_SHARE * len(lines)
        # A contradiction says why lines cannot be paragraphs: sentences continue in the next line.
        if are_short and documents.contradiction(short, "paragraphs_by_line") is not None:
            return "wrapped"
    texts = [line.strip() for line in lines]
    full = [line for line in texts if line]
    blanks = sum(1 for a, b in itertools.pairwise(texts) if a and not b)
    if len(full) < _LEAST_LINES or not blanks or len(full) < _LINES_PER_BLOCK * (blanks + 1):
        return ""
    ended = sum(line.endswith(_ENDS) and not line[0].islower() for line in full)
    # Paragraphs end so, too, but hold several sentences.
    are_single = len(sentences) <= _SENTENCES_PER_LINE * len(full)
    return "sentences_by_line" if ended >= _ENDED_SHARE * len(full) and are_single else ""


# --- documents ---


class _Reader:
    """Reads the documents of files; records why files are refused.

    Args:
      files: for each, a corpus with it as the only source, name, bytes (0: of Parquet or TFDS).
    """

    def __init__(self, files: list[tuple[Corpus, str, int]]):
        self._files = files
        # {message without file names and numbers: (file, message) pairs}.
        self._refused: dict[str, list[tuple[str, str]]] = collections.defaultdict(list)
        self.characters, self.is_sample = 0, False

    def read(self) -> Iterator[Document]:
        """Yields the documents; of very much text, only a part of the files, in random order."""
        max_per_file = _MAX_CHARACTERS
        if sum(size for *_, size in self._files) > _MAX_CHARACTERS:
            random.Random(0).shuffle(self._files)
            max_per_file = max(_MIN_PER_FILE, _MAX_CHARACTERS // len(self._files))
        for corpus, name, size in self._files:
            if self.characters > _MAX_CHARACTERS:
                self.is_sample = True
                return
            start = self.characters
            try:
                if size:  # refuses UTF-8 that would be read in another encoding
                    line_reader.require_not_utf8([name], corpus.encoding)
                for document in documents.read(corpus):
                    if self.characters > _MAX_CHARACTERS or self.characters - start > max_per_file:
                        self.is_sample = True
                        break
                    self.characters += len(document.text)
                    yield document
            except InputError as error:
                reason = re.split(r"[(;]", str(error).replace(name, ""))[0]
                self._refused[re.sub(r"\d+", "", reason)].append((name, str(error)))

    def refusals(self) -> list[Finding]:
        """Returns a finding for each common reason to refuse files, and one for all others."""
        by_reason = sorted(self._refused.values(), key=len, reverse=True)
        rare = list(itertools.chain.from_iterable(by_reason[_REASONS:]))
        findings: list[Finding] = []
        for files in filter(None, (*by_reason[:_REASONS], rare)):
            names = [os.path.basename(name) for name, _ in files[1 : 1 + _NAMED]]
            if (unnamed := len(files) - 1 - _NAMED) > 0:
                names.append(f"{unnamed:,} more")
            also = f"; also {', '.join(names)}" if names else ""
            count = pluralize(len(files), "file")
            findings += REFUSED.check(len(files), printable(files[0][1] + also), files=count)
        return findings


@dataclasses.dataclass
class _Tally:
    """A number of documents, and an example: the first one."""

    count: int = 0
    example: str = ""

    def add(self, example: str) -> None:
        self.count += 1
        self.example = self.example or example


class _Survey:
    """Counts the faults of documents."""

    def __init__(self, corpus: Corpus):
        self._corpus, self._characters, self._sample = corpus, Characters(), LanguageSample()
        self._documents, self._one_sentence, self._repeats = _Tally(), _Tally(), _Tally()
        self._layouts: dict[str, _Tally] = collections.defaultdict(_Tally)
        self._seen: set[int] = set()  # hashes of whole texts
        self._sentences, self._largest = 0, (0, "")  # of all documents; (number, example) of one
        self._long: list[int] = []  # characters of each long sentence
        self._longest = (0, "")  # (characters, example)

    def add(self, document: Document) -> None:
        """Counts the faults of a document, or of its parts if it is cut."""
        self._characters.add(document)
        sentences, distinct_before = list[str](), len(self._seen)
        for text, part_sentences in sentence_splitter.split_document(document, self._corpus):
            excerpt = example(document.location(0), text)
            self._documents.add(excerpt)
            self._sentences += len(part_sentences)
            self._largest = max(self._largest, (len(part_sentences), excerpt))
            if len(part_sentences) == 1:
                self._one_sentence.add(excerpt)
            if (digest := hash(text)) in self._seen:
                self._repeats.add(excerpt)
            self._seen.add(digest)
            sentences += part_sentences
        if len(self._seen) == distinct_before:
            return  # the checks below count repeated documents once
        self._sample.add(document)
        for sentence in sentences:
            if len(sentence) > _LONG:
                excerpt = example(document.location(0), sentence)
                self._longest = max(self._longest, (len(sentence), excerpt))
                self._long.append(len(sentence))
        lines = document.text.split("\n")
        if layout := _other_layout(document, lines, sentences, self._corpus.language):
            self._layouts[layout].add(example(document.location(0), document.text))

    def findings(self, reader: _Reader) -> list[Finding]:
        """Returns the findings about the documents of a reader, and about files it refused."""
        findings, total = reader.refusals(), self._documents.count
        distinct, needed = len(self._seen), 2 * LEAST_VALIDATION_DOCUMENTS
        if not findings and not reader.is_sample:
            count = pluralize(distinct, "different document")
            excerpt = self._documents.example
            findings += TOO_FEW.check(needed - distinct, excerpt, documents=count, least=needed)
        if not total:
            return findings
        sample = f" (in a sample of {reader.characters / 1e6:,.3g} million characters)"
        scope = sample if reader.is_sample else ""
        one = self._one_sentence
        findings += finding.check_documents(finding.ONE_SENTENCE, one.count, total, one.example)
        if distinct >= needed:
            largest, excerpt = self._largest
            findings += finding.check_dominance(largest, self._sentences, excerpt, scope)
        if self._corpus.repeated_documents == "keep":
            old = self._repeats
            findings += finding.check_documents(finding.REPEATED, old.count, total, old.example)
        long = self._long, reader.characters, f"{_LONG:,} characters{scope}", self._longest[1]
        findings += finding.check_lengths(*long)
        for layout, tally in self._layouts.items():
            counts = {"count": tally.count, "documents": total, "scope": scope}
            findings += LAYOUTS[layout].check(tally.count / total, tally.example, **counts)
        findings += self._sample.findings(self._corpus.language)
        return findings + self._characters.findings(scope)
