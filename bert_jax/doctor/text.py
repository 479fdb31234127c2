"""Plain text that is not prepared yet, as `prepare` would read it.

Files are looked at as bytes first; those that are no text in this encoding are named and left out
of the rest. Of very much text a sample of the files is read, and the findings say so.
"""

import array
import dataclasses
import glob
import random
from collections.abc import Iterator

import numpy as np

from bert_jax.config import Corpus
from bert_jax.data.survey import LEAST_VALIDATION_DOCUMENTS
from bert_jax.doctor import encodings, shape
from bert_jax.doctor.characters import Characters
from bert_jax.doctor.finding import Finding, example, severity, share
from bert_jax.doctor.lines import Lines
from bert_jax.doctor.repeats import Repeats
from bert_jax.errors import InputError, printable
from bert_jax.text import documents, sentences
from bert_jax.text.documents import Document

# Characters read as documents at most: a minute. Of one file less, if there are several.
_MOST = 300_000_000
_MOST_OF_A_FILE = 30_000_000

# Shorter lines repeat by nature: names of speakers, "Yes.", "* * *".
_LINE = 30
# Boilerplate in every tenth character stands in every example.
_BOILERPLATE = 0.1
_BOILERPLATE_NOTE = 0.01
# A line in most documents is a header, a footer or a licence.
_HEADER = 0.5


def examine(corpus: Corpus) -> list[Finding]:
    """Findings on the sources of a corpus.

    Raises:
      InputError: a source without files.
    """
    places: list[tuple[str, int]] = []
    files = []
    for source in corpus.sources:
        word = source.partition(":")[0]
        if word not in ("text", "jsonl"):
            places.append((source, 0))
            continue
        looked = [encodings.look(path, corpus.encoding) for path in documents.files(source)]
        files += looked
        places += [(f"{word}:{glob.escape(f.path)}", f.size) for f in looked if f.readable]
    survey = _Survey(corpus, places)
    found = encodings.findings(corpus, files) + survey.findings()
    if all(file.readable for file in files):
        found.append(survey.too_few())
    return [finding for finding in found if finding]


class _Survey:
    """One reading of the documents.

    Args:
      corpus: how to read them.
      places: sources of one file each, with their bytes; 0 if not known.
    """

    def __init__(self, corpus: Corpus, places: list[tuple[str, int]]):
        self._corpus = corpus
        self._characters, self._lines = Characters(), Lines(corpus)
        self._texts, self._repeats = Repeats(), Repeats()
        self._lengths = array.array("q")
        self._longest = (0, "")
        self._ones, self._one = 0, ""
        self._refused: list[str] = []
        self._size = sum(size for _, size in places)
        self._read = 0
        self._is_sample = False
        self._most_of_a_file = max(_MOST_OF_A_FILE, _MOST // max(len(places), 1))
        if self._size > _MOST:
            random.Random(0).shuffle(places)
        for source, _ in places:
            for document in self._documents(source):
                self._add(document)

    def _documents(self, source: str) -> Iterator[Document]:
        """Documents of a source, until enough was read; a refusal is kept."""
        one = dataclasses.replace(self._corpus, sources=(source,))
        most = self._most_of_a_file if self._size > _MOST else _MOST
        before = self._read
        if before > _MOST:
            self._is_sample = True
            return
        try:
            for document in documents.read(one):
                if self._read > _MOST or self._read - before > most:
                    self._is_sample = True
                    return
                self._read += len(document.text)
                yield document
        except InputError as error:
            self._refused.append(str(error))

    def _add(self, document: Document) -> None:
        number, text = len(self._lengths), document.text
        if len(text) > self._longest[0]:
            self._longest = (len(text), example(document.place(0), text))
        self._lengths.append(len(text))
        self._characters.add(document)
        split = sentences.split(document, self._corpus.language)
        if len(split) == 1:
            self._ones += 1
            self._one = self._one or example(document.place(0), text)
        if self._texts.add(text, number, document.place(0)):
            return  # its lines repeat with it
        lines = text.split("\n")
        self._lines.add(document, lines, split)
        for line_number, line in enumerate(lines):
            if len(line) >= _LINE:
                self._repeats.add(line.strip(), number, document.place(line_number))

    def findings(self) -> list[Finding | None]:
        """What was found."""
        found = [self._refusals()]
        if self._lengths:
            found += [self._one_sentence(), self._repeated_documents(), self._repeated_lines()]
            found.append(shape.dominating(np.array(self._lengths), "characters", self._longest[1]))
            found += self._lines.findings(self._scope) + self._characters.findings(self._scope)
        return found

    @property
    def _scope(self) -> str:
        """How much was read, where it was not all."""
        if not self._is_sample:
            return ""
        if not self._size:
            return f" (in a sample of {self._read / 1e6:,.0f} million characters)"
        return f" (in a sample, {share(self._read / self._size)} of it)"

    def _refusals(self) -> Finding | None:
        if not self._refused:
            return None
        return Finding(
            "problem",
            f"`prepare` refuses {len(self._refused):,} files",
            printable(self._refused[0]),
            "there is no training before they are mended",
            "mend them, or change the setting it names",
        )

    def too_few(self) -> Finding | None:
        """On text of which nothing can be held out."""
        texts, repeats, _, _ = self._texts.total()
        least = 2 * LEAST_VALIDATION_DOCUMENTS
        different = texts - repeats
        if self._refused or self._is_sample or self._texts.sampled > 1 or different >= least:
            return None
        return Finding(
            "problem",
            f"{different} different documents, and `prepare` needs {least}",
            self._longest[1],
            f"{LEAST_VALIDATION_DOCUMENTS} documents are held out; next-sentence pairs need "
            "others to draw from",
            "is one file one document here? If not, set corpus.layout; else add or cut texts",
        )

    def _one_sentence(self) -> Finding | None:
        documents = len(self._lengths)
        return shape.one_sentence(self._ones, documents, self._corpus.layout, self._one)

    def _repeated_documents(self) -> Finding | None:
        _, repeats, _, _ = self._texts.total()
        if not repeats:
            return None
        first = self._texts.commonest()
        return shape.repeated(
            repeats * self._texts.sampled,
            len(self._lengths),
            self._corpus.repeated_documents,
            example(f"{first.count} times, first in {first.place}", first.excerpt),
        )

    def _repeated_lines(self) -> Finding | None:
        texts, repeats, _, repeated = self._repeats.total()
        if not repeats:
            return None
        value = repeated * self._repeats.sampled / sum(self._lengths)
        commonest = self._repeats.commonest()
        in_documents = commonest.documents / len(self._lengths)
        if value <= _BOILERPLATE_NOTE and (
            in_documents <= _HEADER or commonest.documents < LEAST_VALIDATION_DOCUMENTS
        ):
            return None
        one_in = f", one in {self._repeats.sampled} counted" if self._repeats.sampled > 1 else ""
        return Finding(
            severity(value, _BOILERPLATE),
            f"{share(repeats / texts)} of lines{self._scope} repeat an earlier one{one_in}: "
            f"{share(value)} of the text; one stands in {commonest.documents:,} of "
            f"{len(self._lengths):,} documents",
            example(f"{commonest.count:,} times, first in {commonest.place}", commonest.excerpt),
            "headers, footers and licences are learned by heart, and are no next sentences",
            "take them out of the files",
        )
