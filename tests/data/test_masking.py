"""Which positions are masked; `tools.conformance.data_rules` checks their number and kinds."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.data import draws, masking

PAD, CLS, SEP, MASK, FIRST = 0, 2, 3, 4, 5
VOCAB = 60
# Every third piece is a continuation (##).
CONTINUES = (np.arange(VOCAB) % 3 == 0) & (np.arange(VOCAB) >= FIRST)
SEQUENCE = 64

UNITS = ("piece", "whole_word", "span")

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


def mask(input_ids, lengths, units="piece", seed=0, width=9, **policy):
    a, b = np.array(lengths, np.int64).T[..., None]
    column = np.arange(input_ids.shape[1])
    text = (column > 0) & (column != a + 1) & (column < a + b + 2)
    return masking.mask(
        masking.Rows(input_ids, text, (a + b + 3)[:, 0]),
        draws.CounterDraws((7, seed), np.arange(len(input_ids))),
        masking.HELD_OUT._replace(unit=units, **policy),  # has the paper's shares
        width,
        masking.Ids(pad=PAD, cls=CLS, sep=SEP, mask=MASK, vocab_size=VOCAB, continues=CONTINUES),
    )


def prediction_count(a, b, max_predictions=9):
    """Number to predict, as the reference writes it; round() is half to even in Python 3."""
    return min(max_predictions, max(1, int(round((a + b + 3) * 0.15))))  # noqa: RUF046


@given(lengths=lengths, seed=st.integers(0, 99), units=st.sampled_from(UNITS))
def test_positions_rise_and_labels_are_what_stood_there(lengths, seed, units):
    input_ids = rows_of(lengths, seed)
    before = input_ids.copy()
    found = mask(input_ids, lengths, units, seed)
    np.testing.assert_array_equal(input_ids, before)
    for row, (a, b) in enumerate(lengths):
        count = int(found.weights[row].sum())
        positions = found.positions[row, :count].tolist()
        assert positions == sorted(set(positions))
        # Never [CLS], either [SEP], or padding.
        assert set(positions) <= {*range(1, a + 1), *range(a + 2, a + b + 2)}
        assert found.ids[row, :count].tolist() == before[row, positions].tolist()
        # Unused slots are zero; positions that are not masked are unchanged.
        assert not found.positions[row, count:].any()
        assert not found.ids[row, count:].any()
        others = np.setdiff1d(np.arange(SEQUENCE), positions)
        np.testing.assert_array_equal(found.input_ids[row, others], before[row, others])


def words_of(row, a, b):
    """Positions of each word; a continuation joins the word before it, even across the [SEP]."""
    words = []
    for position in [*range(1, a + 1), *range(a + 2, a + b + 2)]:
        if words and CONTINUES[row[position]]:
            words[-1].append(position)
        else:
            words.append([position])
    return words


@given(lengths=lengths, seed=st.integers(0, 99), units=st.sampled_from(["whole_word", "span"]))
def test_whole_words_stay_whole(lengths, seed, units):
    input_ids = rows_of(lengths, seed)
    found = mask(input_ids, lengths, units, seed)
    for row, (a, b) in enumerate(lengths):
        positions = set(found.positions[row, found.weights[row] > 0].tolist())
        words = words_of(input_ids[row], a, b)
        for word in words:
            assert len(positions & set(word)) in (0, len(word))
        # Words that do not fit are skipped: each word that is not masked exceeds what is left.
        left = prediction_count(a, b) - len(positions)
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


def spans_of(ids, a, b, generator, share, width):
    """The spans of one row, position lists, by the rule in the SpanBERT paper, literally."""
    words = words_of(ids, a, b)
    words_in_a = sum(word[0] <= a for word in words)
    order = generator.candidate_order(np.array([len(words)]))[0]
    lengths = generator.span_lengths(np.array([len(words)]))[0]
    left = min(width, max(1, int(np.rint((a + b + 3) * share))))
    taken, spans = set(), []
    for anchor in order.tolist():
        if anchor in taken:
            continue
        span = []
        for word in range(
            anchor, min(anchor + lengths[anchor], words_in_a if anchor < words_in_a else len(words))
        ):
            if word in taken:
                continue
            if len(words[word]) > left:
                break
            left -= len(words[word])
            taken.add(word)
            span += words[word]
        spans += [span] if span else []
    return spans


@given(lengths=lengths, seed=st.integers(0, 99), share=st.sampled_from([0.15, 0.5]))
def test_spans_are_those_of_the_rule_and_each_is_replaced_as_a_whole(lengths, seed, share):
    input_ids, width = rows_of(lengths, seed), 25
    found = mask(input_ids, lengths, "span", seed, width, share=share)
    for row, (a, b) in enumerate(lengths):
        generator = draws.CounterDraws((7, seed), np.array([row]))
        spans = spans_of(input_ids[row], a, b, generator, share, width)
        positions = sorted(position for span in spans for position in span)
        assert found.positions[row, : len(positions)].tolist() == positions
        assert found.weights[row].sum() == len(positions)
        kinds, ids = generator.replacements(np.array([len(positions)]), VOCAB, 0.8, 0.1)
        slot = 0
        for span in spans:
            kind = kinds[0, slot]
            for position in span:
                new = {draws.MASK: MASK, draws.KEEP: input_ids[row, position]}
                assert found.input_ids[row, position] == new.get(kind, ids[0, slot])
                slot += 1


def test_all_or_nothing_may_become_mask():
    lengths = [(20, 30)] * 20
    input_ids = rows_of(lengths)
    for shares, expected in (((1.0, 0.0), "mask"), ((0.0, 0.0), "kept")):
        found = mask(input_ids, lengths, mask_share=shares[0], random_share=shares[1])
        chosen = np.zeros(input_ids.shape, bool)
        chosen[np.nonzero(found.weights)[0], found.positions[found.weights > 0]] = True
        new = np.where(chosen, MASK, input_ids) if expected == "mask" else input_ids
        np.testing.assert_array_equal(found.input_ids, new)
