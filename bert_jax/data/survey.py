"""Which documents repeat, and which are held out.

A document goes to validation if the hash of its text is among the smallest
`Corpus.validation_share`; so equal texts share a split, and a split does not depend on order.
"""

import dataclasses
import hashlib

import numpy as np

from bert_jax.config import Corpus
from bert_jax.errors import InputError

# Fewer held-out documents say little: their pairs share one topic and one writer.
LEAST_VALIDATION_DOCUMENTS = 8


def text_hash(text: str) -> int:
    """The first 64 bits of a text's SHA-256."""
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big")


@dataclasses.dataclass
class Survey:
    """All documents of a corpus, in order.

    Attributes:
      first: bool [documents], no earlier document has the same text.
      held_out: bool [documents], goes to validation.
    """

    first: np.ndarray
    held_out: np.ndarray

    @property
    def count(self) -> int:
        """Documents, repeats included."""
        return len(self.first)

    @property
    def repeated(self) -> int:
        """Documents whose text stood before."""
        return int(self.count - self.first.sum())

    @classmethod
    def of(cls, hashes: np.ndarray, corpus: Corpus) -> "Survey":
        """Decides by the hashes of all texts, uint64 [documents].

        Raises:
          InputError: no text, or too few documents to hold some out.
        """
        if not len(hashes):
            raise InputError(
                f"corpus.sources: no text in any document of {', '.join(corpus.sources)}"
            )
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
        return cls(first, hashes <= unique[wanted - 1])

    def splits(self, corpus: Corpus) -> np.ndarray:
        """Where each document goes, uint8 [documents]: 0 train, 1 validation, 2 nowhere."""
        splits = self.held_out.astype(np.uint8)
        if corpus.repeated_documents == "drop":
            splits[~self.first] = 2
        return splits
