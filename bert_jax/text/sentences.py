"""Documents to sentences, the units that next-sentence pairs are made of."""

from collections.abc import Iterator

import sentencex

from bert_jax.text.documents import Document

# sentencex takes what stands between quotation marks or brackets for one sentence, be it a page.
# From this many characters on the marks are overlooked.
_LONG = 400
_BLANKED_MARKS = {ord(mark): " " for mark in "\"'“”‘’„‚«»‹›「」『』()[]（）"}


def split(document: Document, language: str) -> list[str]:
    """Sentences of a document in order, stripped, none empty.

    The layout `sentences_by_line` is taken at its word; in the others sentencex splits each
    paragraph by the rules of `language` (an ISO 639 code), falling back on its parent language or
    on general rules for one it does not know. Speeches within quotation marks are split too, if
    they are long.
    """
    paragraphs = document.paragraphs()
    if document.layout == "sentences_by_line":
        return paragraphs
    pieces = (
        sentence.strip()
        for paragraph in paragraphs
        for piece in sentencex.segment(language, paragraph)
        for sentence in ([piece] if len(piece) < _LONG else _within_marks(piece, language))
    )
    return [piece for piece in pieces if piece]


def _within_marks(text: str, language: str) -> Iterator[str]:
    """The text cut where it would be without its marks."""
    start = 0
    for piece in sentencex.segment(language, text.translate(_BLANKED_MARKS)):
        yield text[start : start + len(piece)]
        start += len(piece)
    yield text[start:]
