"""Rows of full sentences, against the rule written sentence by sentence."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.data import draws, sentences, stream
from bert_jax.errors import InputError

PAD, CLS, SEP = 0, 2, 3
documents = st.lists(
    st.lists(st.integers(1, 20), min_size=4, max_size=6), min_size=10, max_size=16
)  # lengths of their sentences


def made(lengths):
    """A stream of such documents, and their sentences; every token is another."""
    numbers = iter(range(5, 100_000))
    text = [[[next(numbers) for _ in range(n)] for n in document] for document in lengths]
    return stream.make_stream(text), text


def by_hand(text, width, first):
    """Rows as lists of ids, sentence by sentence, the first with so much room."""
    flat = [(number, s) for number, document in enumerate(text) for s in document]
    rows, at, room = [], 0, first
    while at < len(flat):
        begin, ids, document = at, [], flat[at][0]
        while at < len(flat):
            border = [SEP] if flat[at][0] != document else []
            if at > begin and len(ids) + len(border) + len(flat[at][1]) > room:
                break
            ids, document = ids + border + flat[at][1], flat[at][0]
            at += 1
        rows.append([CLS, *ids[: width - 2], SEP])
        room = width - 2
    return rows


@given(lengths=documents, width=st.integers(8, 40), seed=st.integers(0, 99))
def test_rows_are_those_of_the_rule(lengths, width, seed):
    small, text = made(lengths)
    key = draws.key_of(seed)
    first = int(draws.CounterDraws(key, np.zeros(1, np.int64)).first_length(width - 2)[0])
    found = sentences.rows(small, sentences.plan(small, width, key), width, PAD, CLS, SEP)
    expected = by_hand(text, width, first)
    assert found.rows.length.tolist() == [len(row) for row in expected]
    for row, ids in enumerate(expected):
        padding = [PAD] * (width - len(ids))
        assert found.rows.input_ids[row].tolist() == ids + padding
        is_text = [token not in (CLS, SEP) for token in ids]
        assert found.rows.is_candidate[row].tolist() == is_text + [False] * len(padding)
        document, position, places = 1, 0, []
        for token in ids:
            places.append((document, position))
            position += 1
            if token == SEP:
                document, position = document + 1, 0
        assert found.document[row].tolist() == [d for d, _ in places] + padding
        assert found.positions[row].tolist() == [p for _, p in places] + padding


def test_blocks_of_the_plan_join(monkeypatch):
    rng = np.random.default_rng(0)
    small, _ = made([rng.integers(1, 9, rng.integers(1, 8)).tolist() for _ in range(60)])
    whole = sentences.plan(small, 20, draws.key_of(1))
    for block in (1, 7, 64):
        monkeypatch.setattr(sentences, "_BLOCK", block)
        assert sentences.plan(small, 20, draws.key_of(1)).tolist() == whole.tolist()
    assert int(whole["of_a"].sum()) == len(small.sentence_offsets) - 1


@pytest.mark.parametrize("most", [6, 126])
def test_the_first_row_is_of_any_length(most):
    n = 20_000
    lengths = draws.CounterDraws(draws.key_of("test"), np.arange(n)).first_length(most)
    counts = np.bincount(lengths, minlength=most + 1)[1:]
    assert len(counts) == most
    assert ((counts - n / most) ** 2 / (n / most)).sum() < most - 1 + 4 * np.sqrt(2 * (most - 1))


def test_a_text_that_fills_no_row_is_named():
    small, _ = made([[3, 4], [5]])
    with pytest.raises(InputError, match="12 tokens of a split do not fill a row of 32"):
        sentences.plan(small, 32, draws.key_of(0))


def test_sizes_are_those_of_the_rows():
    rng = np.random.default_rng(0)
    small, _ = made([rng.integers(1, 40, 5).tolist() for _ in range(20)])
    plan = sentences.plan(small, 32, draws.key_of(0))
    kept, wanted = sentences.sizes(small, plan, 32)
    rows = sentences.rows(small, plan, 32, PAD, CLS, SEP)
    assert (kept + 2).tolist() == rows.rows.length.tolist()
    assert (wanted >= kept).all() and (wanted > kept).any()
    assert sentences.plan(small, 32, draws.key_of(0), 3).tolist() == plan[:3].tolist()
