"""Documents to sentences, the units that next-sentence pairs are made of."""

import itertools

import sentencex

from bert_jax.config import Corpus
from bert_jax.errors import RustErrors, excerpt, prefix_errors
from bert_jax.text.documents import Document

# sentencex takes what stands between quotation marks or brackets for one sentence, be it a page.
# From this many characters on the marks are overlooked.
_LONG = 400
_MARKS = "\"'“”‘’„‚«»‹›「」『』()[]（）"
# sentencex panics at some blanks of several bytes before a full stop.
_WIDE_BLANKS = [chr(c) for c in range(128, 0x3001) if chr(c).isspace()]
_BLANKED = {ord(blank): " " for blank in _WIDE_BLANKS}
_BLANKED_MARKS = _BLANKED | {ord(mark): " " for mark in _MARKS}


def split(document: Document, language: str) -> list[str]:
    """Returns the sentences of a document in order, stripped, none empty.

    The layout `sentences_by_line` is taken at its word; in the others sentencex splits each
    paragraph by the rules of `language` (an ISO 639 code), falling back on its parent language or
    on general rules for one it does not know. Speeches within quotation marks are split too, if
    they are long.
    """
    paragraphs = document.paragraphs()
    if document.layout == "sentences_by_line":
        return paragraphs
    pieces: list[str] = []
    with prefix_errors(document.name):
        for paragraph in paragraphs:
            for piece in _cut(paragraph, language, _BLANKED):
                if len(piece) < _LONG:
                    pieces.append(piece)
                else:
                    pieces += _cut(piece, language, _BLANKED_MARKS)
    return [stripped for piece in pieces if (stripped := piece.strip())]


def of_documents(document: Document, corpus: Corpus) -> list[tuple[str, list[str]]]:
    """Returns text and sentences of a document, or of those that `cut_documents` makes of it.

    A text of n sentences is cut into n / cut_documents of the same length, give or take one
    sentence.
    """
    split_ = split(document, corpus.language)
    ends = ends_of(len(split_), corpus)
    if len(ends) < 2:
        return [(document.text, split_)]
    return [("\n".join(split_[a:b]), split_[a:b]) for a, b in itertools.pairwise([0, *ends])]


def ends_of(count: int, corpus: Corpus) -> list[int]:
    """Returns one past the last sentence of each document that is made of one of `count`."""
    parts = max(round(count / corpus.cut_documents), 1) if corpus.cut_documents else 1
    return [count * part // parts for part in range(1, parts + 1)]


def _cut(text: str, language: str, blanked: dict[int, str]) -> list[str]:
    """Returns the text, cut where sentencex cuts it with some characters blanked."""
    plain = text if blanked is _BLANKED and text.isascii() else text.translate(blanked)
    with RustErrors(lambda: f"sentencex cannot split {excerpt(text)}; remove this text"):
        sentences = sentencex.segment(language, plain)
    ends = itertools.accumulate(map(len, sentences), initial=0)
    return [text[a:b] for a, b in itertools.pairwise([*ends, len(text)])]
