"""Sparse vectors and vectors of tokens: scores, records, and which tokens have a vector."""

import kinds
import numpy as np
import pytest
from scipy.sparse import csr_array, random_array

from bert_jax.checkpoints.base import TextVectors
from bert_jax.embeddings import nearest
from bert_jax.embeddings.forms import FORMS, TokenSelection, TokenVectors


def token_vectors(counts, width=6, seed=0):
    rng = np.random.default_rng(seed)
    vectors = rng.normal(size=(sum(counts), width)).astype(np.float32)
    return TokenVectors(vectors, np.array(counts))


def sparse_vectors(texts, width=50, seed=0):
    matrix = random_array((texts, width), density=0.2, rng=np.random.default_rng(seed))
    return csr_array(matrix.astype(np.float32))


def test_scores_of_tokens_are_sums_of_largest_products():
    queries, texts = token_vectors([2, 4], seed=1), token_vectors([3, 1, 5])
    expected = [
        [(q.astype(np.float64) @ d.T).max(axis=1).sum() for d in texts.split()]
        for q in queries.split()
    ]
    found = FORMS["multi_vector"].score(queries, texts)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_scores_of_sparse_vectors_are_products():
    queries, texts = sparse_vectors(3, seed=1), sparse_vectors(40)
    expected = queries.toarray().astype(np.float64) @ texts.toarray().T
    np.testing.assert_allclose(FORMS["sparse"].score(queries, texts), expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("form", "vectors", "width"),
    [("sparse", sparse_vectors(4), 50), ("multi_vector", token_vectors([2, 1, 3, 2]), 6)],
)
def test_records_and_slices_hold_the_same_vectors(form, vectors, width):
    form = FORMS[form]
    records, counts = form.split_records(vectors)
    assert records.dtype.itemsize * records[:1].size == form.record_dtype(width).itemsize
    again = form.join_records(records, counts, width)
    parts = form.concatenate([again[0:3], again[3:4]])
    for other in (again, parts):
        np.testing.assert_array_equal(form.score(vectors, other), form.score(vectors, vectors))


def test_the_nearest_of_a_million_streamed_texts_are_found():
    """A text has one token, its number modulo 997; only text 654,321 has a larger weight."""

    def blocks():
        for start in range(0, 1_000_000, 65_536):
            numbers = np.arange(start, min(start + 65_536, 1_000_000))
            weights = np.where(numbers == 654_321, 2.0, 1.0).astype(np.float32)
            content = weights, numbers % 997, np.arange(len(numbers) + 1)
            yield csr_array(content, shape=(len(numbers), 997))

    token = 654_321 % 997
    query = csr_array((np.ones(1, np.float32), ([0], [token])), shape=(1, 997))
    found, scores = nearest.nearest(blocks(), query, 3, FORMS["sparse"].score)
    assert found.tolist() == [[654_321, token, token + 997]]
    assert scores.tolist() == [[2.0, 1.0, 1.0]]


def test_a_text_without_weights_has_the_score_0():
    empty = csr_array((1, 50), dtype=np.float32)
    scores = FORMS["sparse"].score(empty, sparse_vectors(3))
    assert scores.tolist() == [[0.0, 0.0, 0.0]]


def test_queries_have_a_fixed_length_and_punctuation_of_texts_no_vector():
    vectors = TextVectors(form="multi_vector", query_length=6, skipped_tokens="punctuation")
    selection = TokenSelection(kinds.TOKENIZER, vectors)
    assert selection.skipped_tokens == [".", ",", "(", ")"]

    def fit(text):
        return selection.resize_query(np.array(kinds.ids(text))).tolist()

    assert fit("[CLS] wa [SEP]") == kinds.ids("[CLS] wa [SEP] [MASK] [MASK] [MASK]")
    assert fit("[CLS] [SEP]") == kinds.ids("[CLS] [SEP] [MASK] [MASK] [MASK] [MASK]")
    assert fit("[CLS] wa wb wc wd we [SEP]") == kinds.ids("[CLS] wa wb wc wd [SEP]")
    row = np.array(kinds.ids("[CLS] wa . ( wb [SEP]"))
    assert selection.has_vector(row, False).tolist() == [True, True, False, False, True, True]
    assert selection.has_vector(row, True).all()
