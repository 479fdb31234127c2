"""The forms of vectors of texts: how they are stored, and how texts are scored for queries.

dense         float32 [texts, W]; the score is the dot product
sparse        `csr_array` [texts, V], a weight for each token of the vocabulary (SPLADE); the score
              is the dot product, computed from an inverted index
multi_vector  `TokenVectors`, a vector for each token (ColBERT); the score is MaxSim: the sum over
              the query's vectors of the largest dot product with a vector of the text

`search` stores a text as one or more records: its vector, its weights that are not 0, or the
vectors of its tokens.
"""

import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from scipy import sparse

from bert_jax.text.tokenizer import Tokenizer

if TYPE_CHECKING:  # the module imports jax, which scores do not need
    from bert_jax.checkpoints.base import TextVectors


@dataclass(frozen=True)
class TokenVectors:
    """The vectors of the tokens of texts."""

    vectors: np.ndarray  # float32 [tokens of all texts, W]
    counts: np.ndarray  # int64 [texts], at least 1

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape `(number of texts,)`, so that `shape[0]` counts texts in all forms."""
        return self.counts.shape

    def __getitem__(self, index: Any) -> "TokenVectors":
        """Returns the vectors of a slice of the texts."""
        starts = np.cumsum(self.counts) - self.counts
        counts = self.counts[index]
        return TokenVectors(self.vectors[ragged_indices(starts[index], counts)], counts)

    def split(self) -> list[np.ndarray]:
        """Returns the vectors of each text, float32 [tokens, W]."""
        return np.split(self.vectors, np.cumsum(self.counts)[:-1])


def ragged_indices(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the indices starts[i], ..., starts[i] + counts[i] - 1 for each i, concatenated."""
    first = np.cumsum(counts) - counts
    return np.arange(counts.sum()) + np.repeat(starts - first, counts)


class TokenSelection:
    """The tokens of queries and texts that have a vector in the form `multi_vector`."""

    def __init__(self, tokenizer: Tokenizer, settings: "TextVectors"):
        self._tokenizer, self.query_length = tokenizer, settings.query_length
        skipped = set(string.punctuation) if settings.skipped_tokens == "punctuation" else set()
        ids = [i for i in range(tokenizer.size) if skipped and tokenizer.token(i) in skipped]
        self._skipped = np.array(ids, np.int32)
        self.skipped_tokens = [tokenizer.token(i) for i in ids]

    def resize_query(self, ids: np.ndarray) -> np.ndarray:
        """Truncates a query's ids, [CLS] and [SEP] included, or pads them with [MASK]."""
        length = self.query_length
        if not length:
            return ids
        if len(ids) > length:
            return np.append(ids[: length - 1], ids[-1:])
        return np.pad(ids, (0, length - len(ids)), constant_values=self._tokenizer.mask_id)

    def has_vector(self, ids: np.ndarray, is_query: bool) -> np.ndarray:
        """Returns which tokens have a vector, bool [n]; in a query all have one, even [MASK]."""
        return np.isin(ids, self._skipped, invert=True) | is_query


class VectorForm(Protocol):
    """The operations on vectors of one form; `shape[0]` and slices of vectors refer to texts."""

    block_texts: int  # number of texts that are scored at a time

    def record_dtype(self, width: int) -> np.dtype:
        """Returns the type of a record; `width` is W or V."""

    def split_records(self, vectors: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the records of vectors, and the number of records of each text, int64."""

    def join_records(self, records: np.ndarray, counts: np.ndarray, width: int) -> Any:
        """Returns the vectors of records, the inverse of `split_records`."""

    def stack(self, texts: Sequence[Any]) -> Any:
        """Combines the vectors of single texts."""

    def concatenate(self, parts: Sequence[Any]) -> Any:
        """Combines the vectors of parts, each of several texts."""

    def score(self, queries: Any, texts: Any) -> np.ndarray:
        """Returns the score of each text for each query, float32 [queries, texts]."""


class _Dense:
    block_texts = 65_536

    def record_dtype(self, width: int) -> np.dtype:
        return np.dtype((np.float32, (width,)))

    def split_records(self, vectors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return vectors, np.ones(len(vectors), np.int64)

    def join_records(self, records: np.ndarray, counts: np.ndarray, width: int) -> np.ndarray:
        return records

    def stack(self, texts: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(texts)

    def concatenate(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(parts)

    def score(self, queries: np.ndarray, texts: np.ndarray) -> np.ndarray:
        return queries @ texts.T


class _Sparse:
    block_texts = 65_536

    def record_dtype(self, width: int) -> np.dtype:
        return np.dtype([("token", np.uint32), ("weight", np.float32)])

    def split_records(self, vectors: sparse.csr_array) -> tuple[np.ndarray, np.ndarray]:
        records = np.empty(vectors.nnz, self.record_dtype(0))
        records["token"], records["weight"] = vectors.indices, vectors.data
        return records, np.diff(vectors.indptr).astype(np.int64)

    def join_records(self, records: np.ndarray, counts: np.ndarray, width: int) -> sparse.csr_array:
        offsets = np.concatenate([[0], np.cumsum(counts)])
        content = records["weight"], records["token"].astype(np.int64), offsets
        return sparse.csr_array(content, shape=(len(counts), width))

    def stack(self, texts: Sequence[sparse.csr_array]) -> sparse.csr_array:
        return sparse.csr_array(sparse.vstack(texts, format="csr"))

    def concatenate(self, parts: Sequence[sparse.csr_array]) -> sparse.csr_array:
        return self.stack(parts)

    def score(self, queries: sparse.csr_array, texts: sparse.csr_array) -> np.ndarray:
        # Rows of the transposed matrix are the inverted index: the texts of each token.
        return (queries @ texts.T.tocsr()).toarray()


class _MultiVector:
    block_texts = 1_024

    def record_dtype(self, width: int) -> np.dtype:
        return np.dtype((np.float32, (width,)))

    def split_records(self, vectors: TokenVectors) -> tuple[np.ndarray, np.ndarray]:
        return vectors.vectors, vectors.counts

    def join_records(self, records: np.ndarray, counts: np.ndarray, width: int) -> TokenVectors:
        return TokenVectors(records, counts)

    def stack(self, texts: Sequence[np.ndarray]) -> TokenVectors:
        return TokenVectors(np.concatenate(texts), np.array([len(text) for text in texts]))

    def concatenate(self, parts: Sequence[TokenVectors]) -> TokenVectors:
        return TokenVectors(
            np.concatenate([part.vectors for part in parts]),
            np.concatenate([part.counts for part in parts]),
        )

    def score(self, queries: TokenVectors, texts: TokenVectors) -> np.ndarray:
        starts = np.cumsum(texts.counts) - texts.counts
        products = (texts.vectors @ query.T for query in queries.split())
        return np.stack([np.maximum.reduceat(x, starts).sum(axis=1) for x in products])


DENSE: VectorForm = _Dense()
# By the value of `TextVectors.form`.
FORMS: dict[str, VectorForm] = {
    "dense": DENSE,
    "sparse": _Sparse(),
    "multi_vector": _MultiVector(),
}
