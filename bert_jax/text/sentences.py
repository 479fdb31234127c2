"""Documents to sentences, the units that next-sentence pairs are made of."""

import sentencex

from bert_jax.text.documents import Document


def split(document: Document, language: str) -> list[str]:
    """Sentences of a document in order, stripped, none empty.

    The layout `sentences_by_line` is taken at its word; in the others sentencex splits each
    paragraph by the rules of `language` (an ISO 639 code), falling back on its parent language or
    on general rules for one it does not know.
    """
    paragraphs = document.paragraphs()
    if document.layout == "sentences_by_line":
        return paragraphs
    pieces = (s.strip() for p in paragraphs for s in sentencex.segment(language, p))
    return [piece for piece in pieces if piece]
