"""A first reading of the text, before any of it is tokenized.

A document goes to validation if the hash of its text is among the smallest
`Corpus.validation_share`; so equal texts share a split, and a split does not depend on order.
"""

import array
import dataclasses
import hashlib

import numpy as np

from bert_jax.config import Corpus, InputError
from bert_jax.text import documents

# Fewer held-out documents say little: their pairs share one topic and one writer.
LEAST_VALIDATION_DOCUMENTS = 8


@dataclasses.dataclass
class Survey:
    """Which documents repeat, which are held out.

    Attributes:
      hashes: uint64 [documents], the first bytes of each text's SHA-256.
      first: bool [documents], no earlier document has the same text.
      held_out: bool [documents], goes to validation.
      layouts: documents of each layout.
    """

    hashes: np.ndarray
    first: np.ndarray
    held_out: np.ndarray
    layouts: dict[str, int]

    @property
    def count(self) -> int:
        """Documents, repeats included."""
        return len(self.hashes)

    @property
    def repeated(self) -> int:
        """Documents whose text stood before."""
        return int(self.count - self.first.sum())

    @classmethod
    def take(cls, corpus: Corpus) -> "Survey":
        """Reads all documents.

        Raises:
          InputError: no text, or too few documents to hold some out.
        """
        values = array.array("Q")
        layouts: dict[str, int] = {}
        for document in documents.read(corpus):
            digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
            values.append(int.from_bytes(digest[:8], "big"))
            layouts[document.layout] = layouts.get(document.layout, 0) + 1
        if not values:
            raise InputError(
                f"corpus.sources: no text in any document of {', '.join(corpus.sources)}"
            )
        hashes = np.array(values, np.uint64)
        unique, first_index = np.unique(hashes, return_index=True)
        first = np.zeros(len(hashes), bool)
        first[first_index] = True
        wanted = max(LEAST_VALIDATION_DOCUMENTS, round(corpus.validation_share * len(unique)))
        if len(unique) < 2 * LEAST_VALIDATION_DOCUMENTS:
            raise InputError(
                f"corpus.sources: {len(unique)} different documents, but "
                f"{2 * LEAST_VALIDATION_DOCUMENTS} are needed, to hold out "
                f"{LEAST_VALIDATION_DOCUMENTS}. Is one file one document here? (corpus.layout)"
            )
        if wanted > len(unique) // 2:
            raise InputError(
                f"corpus.validation_share={corpus.validation_share}: would hold out {wanted} of "
                f"{len(unique)} documents"
            )
        return cls(hashes, first, hashes <= unique[wanted - 1], layouts)

    def layout_line(self) -> str:
        """How the documents were read, in words."""
        return "read as " + ", ".join(f"{name} ({n})" for name, n in self.layouts.items())
