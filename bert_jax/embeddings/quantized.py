"""Vectors in a quarter and in a thirty-second of the bytes, as stores of vectors take them.

`int8`: 127 is the largest number of each vector, so that cosines stay to about a hundredth.
`binary`: a bit a number, 1 where it is above 0, eight to a byte, the first the highest; of two
vectors the fewer bits differ, the nearer they are (Shakir et al. 2024).

Shape letters: N vectors, W width.
"""

from typing import Literal

import numpy as np

Quantize = Literal["none", "int8", "binary"]

# Of so many vectors the neighbours are looked for, and so many neighbours.
SAMPLE, _NEAREST = 2_000, 10
# By which nothing is divided that is less.
_TINY = np.finfo(np.float32).tiny


def dtype_and_width(how: Quantize, width: int) -> tuple[np.dtype, int]:
    """Returns of which numbers vectors of a width are made, and of how many."""
    if how == "binary":
        return np.dtype("u1"), -(-width // 8)
    return np.dtype("i1" if how == "int8" else "<f4"), width


def quantized(vectors: np.ndarray, how: Quantize) -> np.ndarray:
    """Returns vectors, float32 [N, W], as int8 [N, W] or uint8 [N, W / 8], see above."""
    if how == "binary":
        return np.packbits(vectors > 0, axis=1)
    if how == "int8":
        largest = np.abs(vectors).max(axis=1, keepdims=True, initial=_TINY)
        return np.rint(vectors / largest * 127).astype(np.int8)
    return vectors


def recall(vectors: np.ndarray, how: Quantize) -> float:
    """Returns how many of the ten nearest to each vector are found by what stands for them.

    Args:
      vectors: float32 [N, W], at least two.
      how: what stands for them.

    Near is by the cosine; bits are ones and minus ones, so that the nearer differ in fewer.
    """
    stand_in = np.where(vectors > 0, 1.0, -1.0) if how == "binary" else quantized(vectors, how)
    near = [_nearest(each.astype(np.float32)) for each in (vectors, stand_in)]
    return float((near[0][:, :, None] == near[1][:, None, :]).any(axis=2).mean())


def _nearest(vectors: np.ndarray) -> np.ndarray:
    """Returns which others are nearest to each vector, int [N, 10 or N - 1], in any order."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(lengths, _TINY)
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    depth = min(_NEAREST, len(vectors) - 1)
    return np.argpartition(-cosines, depth - 1, axis=1)[:, :depth]
