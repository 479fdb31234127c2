"""Nearest-neighbour search, compared with sorting all products."""

import tracemalloc
from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.embeddings import nearest


@given(data=st.data())
def test_results_equal_a_stable_sort_of_all_products(data):
    drawn = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    count, query_count, top = (data.draw(st.integers(1, most)) for most in (40, 5, 12))
    vectors = drawn.integers(-2, 3, (50, 2)).astype(np.float32)  # many products are equal
    order, queries = drawn.permutation(50)[:count], drawn.integers(-2, 3, (query_count, 2))
    block, few = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    with mock.patch.multiple(nearest, _BLOCK_QUERIES=few):
        blocks = (vectors[part] for part in nearest.split_indices(order, block))
        indices, products = nearest.nearest(blocks, queries.astype(np.float32), top)
    all_products = queries.astype(np.float64) @ vectors[order].astype(np.float64).T
    for row, found, values in zip(all_products, indices, products, strict=True):
        expected = sorted(range(count), key=lambda index: (-row[index], index))[:top]
        assert found.tolist() == expected
        assert values.tolist() == row[expected].tolist()


def test_memory_does_not_grow_with_queries_times_vectors(monkeypatch):
    """All products of 300 queries and 8,000 vectors take 10 MB."""
    monkeypatch.setattr(nearest, "_BLOCK_QUERIES", 10)
    vectors, queries = np.ones((8_000, 1), np.float32), np.ones((300, 1), np.float32)
    tracemalloc.start()
    blocks = (vectors[part] for part in nearest.split_indices(np.arange(8_000), 1_000))
    nearest.nearest(blocks, queries, 11)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2e6
