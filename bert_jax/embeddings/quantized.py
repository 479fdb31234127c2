"""Quantization of vectors for vector databases, to 1/4 or 1/32 of the size.

`int8`: each vector is scaled so that its largest number is 127; cosines change by about 0.01.
`binary`: one bit for each number, 1 if it is above 0, packed with the most significant bit first;
the fewer bits of two vectors differ, the nearer the vectors are (Shakir et al. 2024).

Shape letters: N vectors, W width.
"""

from typing import Literal

import numpy as np

QuantizationMethod = Literal["none", "int8", "binary"]

# Vectors in the sample for `recall`, and how many neighbours of each vector are compared.
SAMPLE_VECTORS, _NEIGHBOURS = 2_000, 10
# The smallest divisor, for vectors of zeros.
_TINY = np.finfo(np.float32).tiny


def dtype_and_width(method: QuantizationMethod, width: int) -> tuple[np.dtype, int]:
    """Returns the type and the number of the elements of a quantized vector."""
    if method == "binary":
        return np.dtype("u1"), -(-width // 8)
    return np.dtype("i1" if method == "int8" else "<f4"), width


def quantize_vectors(vectors: np.ndarray, method: QuantizationMethod) -> np.ndarray:
    """Returns vectors, float32 [N, W], as int8 [N, W] or uint8 [N, W / 8]."""
    if method == "binary":
        return np.packbits(vectors > 0, axis=1)
    if method == "int8":
        largest = np.abs(vectors).max(axis=1, keepdims=True, initial=_TINY)
        return np.rint(vectors / largest * 127).astype(np.int8)
    return vectors


def recall(vectors: np.ndarray, method: QuantizationMethod) -> float:
    """Returns the share of the ten nearest neighbours of vectors that quantization preserves.

    Args:
      vectors: float32 [N, W], at least two.
      method: how the vectors are quantized. Bits count as 1 and -1: a larger cosine means fewer
        different bits.
    """
    signs = np.where(vectors > 0, 1.0, -1.0)
    approximate = signs if method == "binary" else quantize_vectors(vectors, method)
    exact, near = (_nearest(array.astype(np.float32)) for array in (vectors, approximate))
    return float((exact[:, :, None] == near[:, None, :]).any(axis=2).mean())


def _nearest(vectors: np.ndarray) -> np.ndarray:
    """Returns the indices of each vector's nearest, int [N, 10 or N - 1], in any order."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    vectors = vectors / np.maximum(lengths, _TINY)
    cosines = vectors @ vectors.T
    np.fill_diagonal(cosines, -np.inf)
    depth = min(_NEIGHBOURS, len(vectors) - 1)
    return np.argpartition(-cosines, depth - 1, axis=1)[:, :depth]
