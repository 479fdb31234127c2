"""Pairs that follow each other, half of them swapped (Lan et al. 2019): the laws of their plans."""

import numpy as np
import pytest
import test_pairs
from hypothesis import assume, given
from hypothesis import strategies as st
from test_pairs import Row, corpora, of_lengths

from bert_jax.data import draws, pairs
from bert_jax.errors import InputError


def plan(small, seed=0, length=16):
    key = draws.key_of(seed)
    chunks = pairs.plan(small, length, 0.3, key, "swapped_pairs")
    rows = pairs.rows(small, chunks, draws.Counter(key, chunks["sentence"]), "swapped_pairs")
    return [Row(*row) for row in rows.tolist()]


def in_order(row):
    """The two runs of a pair as they stand in the text: (start, end) each."""
    runs = [
        (row.a_offset, row.a_offset + row.a_length),
        (row.b_offset, row.b_offset + row.b_length),
    ]
    return runs[::-1] if row.is_random_next else runs


@given(corpus=corpora, seed=st.integers(0, 99), length=st.integers(8, 40))
def test_a_pair_is_two_runs_of_sentences_one_behind_the_other(corpus, seed, length):
    """Together they are every sentence once, of documents that have two."""
    assume(any(len(document) > 1 for document in corpus))
    small = of_lengths(corpus)
    bounds, covered = set(small.sentence_offsets.tolist()), []
    for row in plan(small, seed, length):
        (start, middle), (same, end) = in_order(row)
        assert middle == same and start < middle < end
        assert {start, middle, end} <= bounds
        assert test_pairs.document_of(small, start) == test_pairs.document_of(small, end - 1)
        covered += range(start, end)
    expected = [
        place
        for place in range(len(small.ids))
        if len(corpus[test_pairs.document_of(small, place)]) > 1
    ]
    assert covered == expected


def test_half_of_the_pairs_are_swapped_wherever_they_stand():
    rng = np.random.default_rng(0)
    small = of_lengths([rng.integers(1, 12, rng.integers(2, 9)).tolist() for _ in range(3_000)])
    swapped = np.array([row.is_random_next for row in plan(small)])
    error = 0.5 / len(swapped) ** 0.5
    assert abs(swapped.mean() - 0.5) < 4 * error
    assert abs((swapped[1:] == swapped[:-1]).mean() - 0.5) < 4 * error


def test_blocks_of_the_plan_join(monkeypatch):
    rng = np.random.default_rng(0)
    small = of_lengths([rng.integers(1, 9, rng.integers(1, 8)).tolist() for _ in range(60)])
    whole = plan(small)
    for block in (1, 7, 100):
        monkeypatch.setattr(pairs, "_BLOCK", block)
        assert plan(small) == whole


def test_a_sample_is_of_whole_documents_of_the_plan():
    rng = np.random.default_rng(0)
    small = of_lengths([rng.integers(1, 12, rng.integers(1, 9)).tolist() for _ in range(600)])
    sampled = pairs.sample(small, 16, 0.3, draws.key_of(0), 10**6, "swapped_pairs")
    assert sorted(Row(*row) for row in sampled.tolist()) == sorted(plan(small))


def test_documents_of_one_sentence_alone_are_named():
    with pytest.raises(InputError, match="no document has two sentences"):
        plan(of_lengths([[3], [5], [2]]))
    with pytest.raises(InputError, match="no held-out document has two sentences"):
        pairs.sample(of_lengths([[3], [5]]), 16, 0.3, draws.key_of(0), 10, "swapped_pairs")
