"""What is lost by smaller vectors, against bits that are counted one by one."""

import numpy as np
import pytest

from bert_jax.embeddings import quantized


@pytest.mark.parametrize("count", [2, 7, 60])
def test_recall_is_the_share_of_neighbours_that_stay(count):
    vectors = np.random.default_rng(count).standard_normal((count, 16)).astype(np.float32)
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors, axis=1, keepdims=True)
    bits = np.unpackbits(quantized.quantize_vectors(vectors, "binary"), axis=1).astype(int)
    kept, depth = [], min(10, count - 1)
    for i in range(count):
        others = [j for j in range(count) if j != i]
        near = sorted(others, key=lambda j: -unit[i] @ unit[j])[:depth]
        apart = [int((bits[i] != bits[j]).sum()) for j in others]
        # Of those that are as far as the last of the nearest any may be taken.
        last = sorted(apart)[depth - 1]
        sure = {j for j, far in zip(others, apart, strict=True) if far < last}
        maybe = {j for j, far in zip(others, apart, strict=True) if far == last}
        low = len(sure & {*near})
        kept.append((low, min(low + len(maybe & {*near}), depth)))
    least, most = (sum(column) / count / depth for column in zip(*kept, strict=True))
    assert least - 1e-9 <= quantized.recall(vectors, "binary") <= most + 1e-9
    assert quantized.recall(vectors, "int8") > 0.95


def test_zeros_stay_zeros():
    zeros = np.zeros((2, 8), np.float32)
    assert not quantized.quantize_vectors(zeros, "int8").any()
    assert not quantized.quantize_vectors(zeros, "binary").any()


def test_bits_equal_those_of_sentence_transformers():
    """The expected bits are from `quantize_embeddings(vectors, precision="ubinary")` of 6.2.0."""
    mixed = [0.5, -0.1, 0, 1e-9, -0.0, 2, -3, 0.1, -1, 1]
    vectors = np.array([mixed, [-1] * 9 + [0.1]], np.float32)
    assert quantized.quantize_vectors(vectors, "binary").tolist() == [[149, 64], [0, 64]]
