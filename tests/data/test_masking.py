"""Masks: which, and whole words. How many and by what: `bert_jax.conformance.data_rules`."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from bert_jax.data import draws, masking

PAD, CLS, SEP, MASK, FIRST = 0, 2, 3, 4, 5
VOCAB = 60
# Every third piece goes on a word.
CONTINUES = (np.arange(VOCAB) % 3 == 0) & (np.arange(VOCAB) >= FIRST)
SEQUENCE = 64

# A busy machine is slow now and then, which is no failure.
settings.register_profile("patient", deadline=None, database=None)
settings.load_profile("patient")

lengths = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 31)), min_size=1, max_size=12
)  # of A and B


def rows_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    input_ids = np.full((len(lengths), SEQUENCE), PAD, np.int32)
    for row, (a, b) in zip(input_ids, lengths, strict=True):
        row[: a + b + 3] = rng.integers(FIRST, VOCAB, a + b + 3)
        row[[0, a + 1, a + b + 2]] = CLS, SEP, SEP
    return input_ids


def mask(input_ids, lengths, words="piece", seed=0, **changes):
    a_length, b_length = np.array(lengths, np.int64).T
    options = {"masked_lm_prob": 0.15, "max_predictions": 9, "vocab_size": VOCAB, **changes}
    return masking.mask(
        input_ids,
        a_length,
        b_length,
        draws.Counter((7, seed), np.arange(len(input_ids))),
        mask_id=MASK,
        continues=CONTINUES if words == "whole_word" else None,
        **options,
    )


def wanted(a, b, most=9):
    """Number to predict, as the reference writes it; round() is half to even in Python 3."""
    return min(most, max(1, int(round((a + b + 3) * 0.15))))  # noqa: RUF046


@settings(max_examples=50)
@given(lengths=lengths, seed=st.integers(0, 99), words=st.sampled_from(["piece", "whole_word"]))
def test_positions_rise_and_labels_are_what_stood_there(lengths, seed, words):
    input_ids = rows_of(lengths, seed)
    before = input_ids.copy()
    found = mask(input_ids, lengths, words, seed)
    np.testing.assert_array_equal(input_ids, before)
    for row, (a, b) in enumerate(lengths):
        count = int(found.weights[row].sum())
        positions = found.positions[row, :count].tolist()
        assert positions == sorted(set(positions))
        # Never [CLS], either [SEP], or padding.
        assert set(positions) <= {*range(1, a + 1), *range(a + 2, a + b + 2)}
        assert found.ids[row, :count].tolist() == before[row, positions].tolist()
        # Behind the last all is zero, and nothing else was changed.
        assert not found.positions[row, count:].any()
        assert not found.ids[row, count:].any()
        others = np.setdiff1d(np.arange(SEQUENCE), positions)
        np.testing.assert_array_equal(found.input_ids[row, others], before[row, others])


def test_every_candidate_is_masked_equally_often():
    n, a, b = 4000, 12, 15
    found = mask(rows_of([(a, b)] * n), [(a, b)] * n)
    share = np.bincount(found.positions[found.weights > 0], minlength=SEQUENCE) / n
    candidates = share[[*range(1, a + 1), *range(a + 2, a + b + 2)]]
    expected = 4 / (a + b)
    assert np.abs(candidates - expected).max() < 4.5 * np.sqrt(expected / n)


def test_the_table_s_width_is_respected():
    lengths = [(30, 31)] * 50  # 15 % of 64 is 10
    for width in (1, 4, 9, 10, 12):
        for words in ("piece", "whole_word"):
            found = mask(rows_of(lengths), lengths, words, max_predictions=width)
            assert found.positions.shape == (50, width)
            assert found.weights.sum(axis=1).max() <= min(width, 10)


def words_of(row, a, b):
    """Positions of each word; a continuation joins the word before, over the [SEP] too."""
    words = []
    for position in [*range(1, a + 1), *range(a + 2, a + b + 2)]:
        if words and CONTINUES[row[position]]:
            words[-1].append(position)
        else:
            words.append([position])
    return words


@settings(max_examples=100)
@given(lengths=lengths, seed=st.integers(0, 99))
def test_whole_words_stay_whole(lengths, seed):
    input_ids = rows_of(lengths, seed)
    found = mask(input_ids, lengths, "whole_word", seed)
    for row, (a, b) in enumerate(lengths):
        positions = set(found.positions[row, found.weights[row] > 0].tolist())
        words = words_of(input_ids[row], a, b)
        for word in words:
            assert len(positions & set(word)) in (0, len(word))
        # A word that does not fit is passed over for a later one: what is left out is too long.
        left = wanted(a, b) - len(positions)
        assert left >= 0
        assert all(len(word) > left for word in words if not positions & set(word))


def test_rows_in_which_no_word_fits_have_no_predictions():
    # Two words of two pieces, and one piece to predict; in a batch of its own, and beside another.
    alone = np.array([[CLS, 7, 9, SEP, 7, 9, SEP]], np.int32)
    found = mask(alone, [(2, 2)], "whole_word")
    np.testing.assert_array_equal(found.input_ids, alone)
    assert not found.weights.any()
    beside = np.array([[CLS, 7, 9, SEP, 7, 7, SEP], alone[0]], np.int32)
    assert mask(beside, [(2, 2)] * 2, "whole_word").weights.sum(axis=1).tolist() == [1, 0]
