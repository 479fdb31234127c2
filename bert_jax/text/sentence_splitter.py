"""Splits documents into sentences, the units of next-sentence pairs."""

import itertools

import sentencex

from bert_jax.config import Corpus
from bert_jax.errors import TranslateRustErrors, excerpt, prefix_errors
from bert_jax.text.documents import Document

# sentencex treats any quoted or bracketed text as one sentence. Sentences from this length on are
# split again with the marks replaced by blanks.
_LONG = 400
_MARKS = "\"'“”‘’„‚«»‹›「」『』()[]（）"
# sentencex panics at some multi-byte blanks before a full stop.
_WIDE_BLANKS = [chr(c) for c in range(128, 0x3001) if chr(c).isspace()]
_BLANKED = {ord(blank): " " for blank in _WIDE_BLANKS}
_BLANKED_MARKS = _BLANKED | {ord(mark): " " for mark in _MARKS}


def split(document: Document, language: str) -> list[str]:
    """Returns the sentences of a document in order, stripped, none empty.

    In the layout `sentences_by_line` each line is a sentence. In the others sentencex splits each
    paragraph by the rules of `language` (an ISO 639 code), of its parent language, or by general
    rules for an unknown language. Long quotations are split, too.
    """
    paragraphs = document.paragraphs()
    if document.layout == "sentences_by_line":
        return paragraphs
    sentences: list[str] = []
    with prefix_errors(document.name):
        for paragraph in paragraphs:
            for sentence in _segment(paragraph, language, _BLANKED):
                is_long = len(sentence) >= _LONG
                sentences += _segment(sentence, language, _BLANKED_MARKS) if is_long else [sentence]
    return [stripped for sentence in sentences if (stripped := sentence.strip())]


def split_document(document: Document, corpus: Corpus) -> list[tuple[str, list[str]]]:
    """Returns the text and sentences of a document, or of its parts if `cut_documents` is set.

    A document of n sentences is cut into n / cut_documents parts, whose lengths differ by at most
    one sentence.
    """
    sentences = split(document, corpus.language)
    ends = ends_of(len(sentences), corpus)
    if len(ends) < 2:
        return [(document.text, sentences)]
    parts = [sentences[a:b] for a, b in itertools.pairwise([0, *ends])]
    return [("\n".join(part), part) for part in parts]


def ends_of(count: int, corpus: Corpus) -> list[int]:
    """Returns one past the last sentence of each part of a document of `count` sentences."""
    parts = max(round(count / corpus.cut_documents), 1) if corpus.cut_documents else 1
    return [count * part // parts for part in range(1, parts + 1)]


def _segment(text: str, language: str, blanked: dict[int, str]) -> list[str]:
    """Splits a text where sentencex splits it with the characters in `blanked` replaced."""
    plain = text if blanked is _BLANKED and text.isascii() else text.translate(blanked)
    with TranslateRustErrors(lambda: f"sentencex cannot split {excerpt(text)}; remove this text"):
        sentences = sentencex.segment(language, plain)
    if plain is text and "".join(sentences) == text:  # as for most texts
        return sentences
    ends = itertools.accumulate(map(len, sentences), initial=0)
    return [text[a:b] for a, b in itertools.pairwise([*ends, len(text)])]
