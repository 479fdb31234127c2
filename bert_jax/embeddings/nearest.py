"""Exact nearest-neighbour search in bounded memory.

Every query is compared with every vector, for a search and for the scores of a retrieval task.
The comparison multiplies a block of queries with a block of vectors at a time. So memory grows with
the number of results, not with the number of queries times the number of vectors.

Shape letters: Q queries, N vectors, K results of a query, W width.
"""

from collections.abc import Iterable, Iterator

import numpy as np

# Vectors and queries in a block: the products of two blocks take 64 MiB.
_BLOCK_VECTORS, _BLOCK_QUERIES = 65_536, 256


def parts(order: np.ndarray) -> Iterator[np.ndarray]:
    """Yields consecutive parts of the indices `order`, one for each block of vectors."""
    for start in range(0, len(order), _BLOCK_VECTORS):
        yield order[start : start + _BLOCK_VECTORS]


def nearest(
    blocks: Iterable[np.ndarray], queries: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the vectors whose dot products with each query are the largest.

    Args:
      blocks: float32 [any, W]; all blocks together are the N vectors.
      queries: float32 [Q, W], at least one.
      count: results wanted for each query; K is the smaller of `count` and N.

    Returns:
      Indices of vectors, int64 [Q, K], and their products, float32 [Q, K], in descending order.
      Vectors with equal products keep their order.
    """
    indices = [np.empty(0, np.int64)] * len(queries)
    products = [np.empty(0, np.float32)] * len(queries)
    start = 0
    for block in blocks:
        for first in range(0, len(queries), _BLOCK_QUERIES):
            block_products = queries[first : first + _BLOCK_QUERIES] @ block.T
            for query, row in enumerate(block_products, first):
                nearest_in_block = largest_indices(row, count)
                candidates = np.concatenate([products[query], row[nearest_in_block]])
                best = largest_indices(candidates, count)
                indices[query] = np.concatenate([indices[query], start + nearest_in_block])[best]
                products[query] = candidates[best]
        start += len(block)
    return np.stack(indices), np.stack(products)


def largest_indices(values: np.ndarray, count: int) -> np.ndarray:
    """Returns indices of the largest values, in descending order; equal values in their order."""
    if count < len(values):
        indices = np.flatnonzero(values >= np.partition(values, -count)[-count])
    else:
        indices = np.arange(len(values))
    return indices[np.argsort(-values[indices], kind="stable")][:count]
