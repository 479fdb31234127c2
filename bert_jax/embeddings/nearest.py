"""The nearest of many vectors, exactly and in bounded memory.

Every query is compared with every vector, as a search and the scores of a retrieval task need it.
Vectors come in blocks, and queries are taken some at a time. So what is in memory grows with the
results, and not with queries times vectors.

Shape letters: Q queries, N vectors, K results of a query, W width.
"""

from collections.abc import Iterable, Iterator

import numpy as np

# The products of a block of vectors and a block of queries are in memory at a time: 64 MiB.
_VECTORS, _QUERIES = 65_536, 256


def parts(order: np.ndarray) -> Iterator[np.ndarray]:
    """Yields consecutive parts of an array of numbers, as many as make a block of vectors."""
    for start in range(0, len(order), _VECTORS):
        yield order[start : start + _VECTORS]


def nearest(
    blocks: Iterable[np.ndarray], queries: np.ndarray, count: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the vectors with the largest products with each query.

    Args:
      blocks: float32 [any, W], together the N vectors.
      queries: float32 [Q, W], at least one.
      count: K, or more than that where there are fewer vectors.

    Returns:
      Numbers of vectors, int64 [Q, K], and their products, float32 [Q, K]: the largest first, and
      where products are equal the vector that comes first.
    """
    numbers = [np.empty(0, np.int64)] * len(queries)
    products = [np.empty(0, np.float32)] * len(queries)
    start = 0
    for block in blocks:
        for first in range(0, len(queries), _QUERIES):
            of_block = queries[first : first + _QUERIES] @ block.T
            for query, row in enumerate(of_block, first):
                near = _largest(row, count)
                values = np.concatenate([products[query], row[near]])
                kept = _largest(values, count)
                numbers[query] = np.concatenate([numbers[query], start + near])[kept]
                products[query] = values[kept]
        start += len(block)
    return np.stack(numbers), np.stack(products)


def _largest(values: np.ndarray, count: int) -> np.ndarray:
    """Returns the places of the largest values, the largest first, of equal ones the first."""
    if count < len(values):
        places = np.flatnonzero(values >= np.partition(values, -count)[-count])
    else:
        places = np.arange(len(values))
    return places[np.argsort(-values[places], kind="stable")][:count]
