"""The nearest vectors, against a whole sort."""

import tracemalloc
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.embeddings import nearest


@given(data=st.data())
def test_the_nearest_are_those_of_a_whole_sort_and_of_equals_the_first(data):
    drawn = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count, queries, top = (data.draw(st.integers(1, most)) for most in (40, 5, 12))
    vectors = drawn.integers(-2, 3, (50, 2)).astype(np.float32)  # many products are equal
    order, asked = drawn.permutation(50)[:count], drawn.integers(-2, 3, (queries, 2))
    sizes = {"_VECTORS": data.draw(st.integers(1, 9)), "_QUERIES": data.draw(st.integers(1, 4))}
    with mock.patch.multiple(nearest, **sizes):
        blocks = (vectors[part] for part in nearest.parts(order))
        numbers, products = nearest.nearest(blocks, asked.astype(np.float32), top)
    every = asked.astype(np.float64) @ vectors[order].astype(np.float64).T
    for row, found, values in zip(every, numbers, products, strict=True):
        expected = sorted(range(count), key=lambda number: (-row[number], number))[:top]
        assert found.tolist() == expected
        assert values.tolist() == row[expected].tolist()


def test_memory_does_not_grow_with_queries_times_vectors(monkeypatch):
    """Of 300 queries and 8,000 vectors all products are 10 MB."""
    monkeypatch.setattr(nearest, "_VECTORS", 1_000)
    monkeypatch.setattr(nearest, "_QUERIES", 10)
    vectors, queries = np.ones((8_000, 1), np.float32), np.ones((300, 1), np.float32)
    tracemalloc.start()
    nearest.nearest((vectors[part] for part in nearest.parts(np.arange(8_000))), queries, 11)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6
