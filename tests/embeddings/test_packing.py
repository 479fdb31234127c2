"""Rows of texts: whole, once each, and in their places."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.embeddings import packing

LENGTHS = st.lists(st.integers(2, 300), max_size=60)


@given(LENGTHS, st.sampled_from([300, 512, 1024]), st.integers(1, 4))
def test_each_text_stands_in_one_row_and_fits(lengths, row_tokens, shards):
    seen, sizes = [], {}
    for slot_tokens, slots, rows in packing.batches(lengths, row_tokens, 300, shards):
        assert len(rows) == shards and rows[0]
        assert sizes.setdefault(slot_tokens, slots) == slots
        for row in rows:
            assert len(row) <= slots
            assert sum(lengths[i] for i in row) <= row_tokens
            assert all(lengths[i] <= slot_tokens for i in row)
            seen += row
    assert sorted(seen) == list(range(len(lengths)))
    assert len(sizes) <= 6


@given(st.lists(st.integers(2, 12), max_size=8))
def test_a_row_says_where_its_texts_stand(lengths):
    rng = np.random.default_rng(len(lengths))
    texts = [rng.integers(5, 1000, n).astype(np.int32) for n in lengths]
    row = packing.pack(texts, 100, slots=9, slot_tokens=13)
    whole = np.append(row["input_ids"], -1)  # at 100, where there is none
    for text, tokens in zip(texts, row["row_indices"], strict=False):
        np.testing.assert_array_equal(
            whole[tokens], np.pad(text, (0, 13 - len(text)), constant_values=-1)
        )
        np.testing.assert_array_equal(row["positions"][tokens[: len(text)]], np.arange(len(text)))
    assert (row["row_indices"][len(texts) :] == 100).all()
    used, flat = sum(lengths), row["row_indices"].ravel()
    np.testing.assert_array_equal(flat[row["slot_indices"][:used]], np.arange(used))
    assert {name: values.shape for name, values in row.items()} == {
        "input_ids": (100,),
        "positions": (100,),
        "row_indices": (9, 13),
        "slot_indices": (100,),
    }
    assert all(values.dtype == np.int32 for values in row.values())


def test_real_lengths_leave_little_of_a_row_empty():
    """Sentences: lognormal lengths around 25 tokens, as in the sample text."""
    lengths = np.clip(np.random.default_rng(0).lognormal(3.1, 0.65, 5_000).astype(int), 3, 256)
    rows = sum(len(rows) for _, _, rows in packing.batches(lengths.tolist(), 512, 256, 1))
    assert rows * 512 < 1.02 * lengths.sum()
