"""Exact nearest-neighbour search in bounded memory.

Every query is compared with every vector, for a search and for the scores of a retrieval task.
The comparison multiplies a block of queries with a block of vectors at a time. So memory grows with
the number of results, not with the number of queries times the number of vectors.

Shape letters: Q queries, N vectors, K results of a query, W width.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from bert_jax.errors import InputError


class NotFiniteError(InputError):
    """A number that is not finite, in the vector `index`, counted from 0 over all blocks."""

    def __init__(self, index: int):
        super().__init__(f"vector {index} holds a number that is not finite")
        self.index = index


# Queries in a block: their scores for a block of 65,536 vectors take 64 MiB.
_BLOCK_QUERIES = 256


def split_indices(indices: np.ndarray, size: int) -> Iterator[np.ndarray]:
    """Yields consecutive blocks of `size` of the indices, in their order."""
    for start in range(0, len(indices), size):
        yield indices[start : start + size]


# Computes the scores of all pairs: (queries, vectors) -> float32 [queries, vectors].
Score = Callable[[Any, Any], np.ndarray]


def nearest(
    blocks: Iterable[Any],
    queries: Any,
    count: int,
    score: Score = lambda queries, vectors: queries @ vectors.T,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the vectors whose scores for each query are the largest.

    Args:
      blocks: all blocks together are the N vectors; dense ones are float32 [any, W].
      queries: at least one; dense ones are float32 [Q, W].
      count: results wanted for each query; K is the smaller of `count` and N.
      score: computes scores, by default dot products; see `forms` for other forms of vectors.

    Returns:
      Indices of vectors, int64 [Q, K], and their scores, float32 [Q, K], in descending order.
      Vectors with equal scores keep their order.

    Raises:
      NotFiniteError: a vector holds a number that is not finite.
    """
    query_count = queries.shape[0]
    indices = [np.empty(0, np.int64)] * query_count
    scores = [np.empty(0, np.float32)] * query_count
    start = 0
    for block in blocks:
        for first in range(0, query_count, _BLOCK_QUERIES):
            block_scores = score(queries[first : first + _BLOCK_QUERIES], block)
            finite = np.isfinite(block_scores).all(axis=0)
            if not finite.all():
                raise NotFiniteError(start + int(np.argmin(finite)))
            for query, row in enumerate(block_scores, first):
                nearest_in_block = largest_indices(row, count)
                candidates = np.concatenate([scores[query], row[nearest_in_block]])
                best = largest_indices(candidates, count)
                indices[query] = np.concatenate([indices[query], start + nearest_in_block])[best]
                scores[query] = candidates[best]
        start += block.shape[0]
    return np.stack(indices), np.stack(scores)


def largest_indices(values: np.ndarray, count: int) -> np.ndarray:
    """Returns indices of the largest values, in descending order; equal values in their order."""
    if count < len(values):
        indices = np.flatnonzero(values >= np.partition(values, -count)[-count])
    else:
        indices = np.arange(len(values))
    return indices[np.argsort(-values[indices], kind="stable")][:count]
