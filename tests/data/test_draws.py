"""Random choices: the generator, its independence from the batch, and the laws of the answers."""

import random

import numpy as np
import pytest

from bert_jax.data import draws

KEY = draws.key_of("test")

# What this version draws.
KEY_OF_TRAIN = (2273245784, 3022185559)
PERMUTATION = [2, 3, 1, 6, 5, 7, 0, 4]
FRONT_CUTS = [[3, 31], [21, 0]]
ORDER = [[0, 1, 2, 5, 4, 3], [3, 5, 1, 4, 0, 2]]
TARGETS = [107, 81]
SPLITS, ARE_RANDOM = [6, 4, 8, 3], [False, False, True, False]
OTHERS, STARTS = [607, 289, 159, 100], [4, 97, 28, 4]
SPANS = [[2, 2, 4, 2, 7, 2, 8, 1], [5, 1, 1, 7, 9, 7, 5, 1]]
RANDOM_IDS = [[14317, 10480, 16783], [7698, 18482, 8919]]


def counter(rows):
    return draws.CounterDraws(KEY, np.asarray(rows))


def removals(from_a, from_b):
    """Tokens removed, of which A and B lose so many, where A's lead is what B loses less."""
    from_a, from_b = np.asarray(from_a), np.asarray(from_b)
    return draws.Removals(from_a > from_b, np.abs(from_a - from_b), 2 * np.minimum(from_a, from_b))


@pytest.mark.parametrize(
    ("counter_words", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([2**32 - 1] * 4, [2**32 - 1] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        # Digits of pi, as all of Random123's test vectors.
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_philox_gives_the_published_vectors(counter_words, key, expected):
    words = draws.philox(*map(np.uint64, counter_words), tuple(key))
    assert " ".join(f"{word:08x}" for word in words) == expected


def answers(rows):
    """All arrays that CounterDraws give for these rows, each row's parameters by its number."""
    rows = np.asarray(rows)
    c = counter(rows)
    lengths, chosen = 3 + rows % 40, 1 + rows % 5
    front_a, front_b = c.front_cuts(removals(rows % 700, rows % 7))
    order = c.candidate_order(lengths)
    kinds, ids = c.replacements(chosen, 1000, 0.8, 0.1)
    spans = c.span_lengths(lengths)
    return [
        (a, b, o[:n].tolist(), s[:n].tolist(), k[:m].tolist(), t[:m].tolist())
        for a, b, o, s, n, k, t, m in zip(
            front_a, front_b, order, spans, lengths, kinds, ids, chosen, strict=True
        )
    ]


def test_answers_depend_on_the_row_alone():
    rows = np.random.default_rng(0).permutation(3000)[:500]
    whole = dict(zip(rows.tolist(), answers(rows), strict=True))
    for part in (rows[::-1], rows[:1], rows[100:103], np.sort(rows)[::7]):
        assert answers(part) == [whole[row] for row in part.tolist()]


def test_rows_beyond_32_bits_have_draws_of_their_own():
    orders = counter([5, 5 + 2**32]).candidate_order(np.array([50, 50]))
    assert orders[0].tolist() != orders[1].tolist()


def test_how_many_rows_are_handled_at_once_changes_nothing(monkeypatch):
    rows = np.arange(200)
    whole = answers(rows)
    monkeypatch.setattr(draws, "_BLOCK", 3)
    assert answers(rows) == whole
    order = draws.permutation(KEY, 1, 1001)
    monkeypatch.undo()
    assert order.tolist() == draws.permutation(KEY, 1, 1001).tolist()


def test_seeds_splits_phases_and_purposes_have_other_draws():
    keys = {draws.key_of(s, split, p) for s in (0, 1) for split in "tv" for p in (0, 1)}
    assert len(keys) == 8
    assert all(0 <= word < 2**32 for key in keys for word in key)
    words = [counter([0])._uint32s(purpose, 8).tolist() for purpose in range(8)]
    assert len({str(w) for w in words}) == 8


@pytest.mark.parametrize("trials", [0, 1, 31, 32, 33, 127, 128, 129, 1000])
def test_front_cuts_are_binomial(trials):
    n = 4000
    lost = np.full(n, trials)
    a, b = counter(np.arange(n)).front_cuts(removals(lost, lost))
    for cuts in (a, b):
        assert cuts.min() >= 0
        assert cuts.max() <= trials
        sigma = np.sqrt(trials / 4)
        assert abs(cuts.mean() - trials / 2) <= 4 * sigma / np.sqrt(n)
        # The variance of a variance: (mu4 - sigma**4) / n, and mu4 <= 3 sigma**4.
        assert abs(cuts.var() - trials / 4) <= 4 * sigma**2 * np.sqrt(2 / n)
    if trials:
        assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(n)


def test_candidate_order_is_a_permutation_and_each_is_first_equally_often():
    counts = np.random.default_rng(1).integers(1, 130, 300)
    order = counter(np.arange(300)).candidate_order(counts)
    assert order.shape == (300, counts.max())
    for row, count in zip(order, counts, strict=True):
        assert sorted(row[:count].tolist()) == list(range(count))
    n = 20_000
    assert_uniform(counter(np.arange(n)).candidate_order(np.full(n, 10))[:, 0], 10)


@pytest.mark.parametrize("shares", [(0.8, 0.1), (1.0, 0.0), (0.5, 0.5), (0.0, 0.0)])
def test_replacements_have_the_shares_they_are_given_within_4_sigma(shares):
    rows, columns, vocab_size = 5000, 20, 50
    n = rows * columns
    many, _ = counter(np.arange(rows)).replacements(np.full(rows, columns), vocab_size, *shares)
    one_by_one = draws.SequentialDraws(random.Random(0)).replacements([n], vocab_size, *shares)[0]
    for kinds in (many, one_by_one):
        for kind, share in zip((draws.MASK, draws.RANDOM), shares, strict=True):
            assert abs((kinds == kind).mean() - share) <= 4 * np.sqrt(share * (1 - share) / n)


def test_random_pieces_are_any_of_the_vocabulary_equally_often():
    rows = 5000
    kinds, ids = counter(np.arange(rows)).replacements(np.full(rows, 20), 50, 0.8, 0.1)
    assert_uniform(ids[kinds == draws.RANDOM], 50)


def test_spans_are_geometric_up_to_ten_words():
    rows, columns = 5000, 20
    weights = [0.2 * 0.8**k for k in range(10)]
    found = counter(np.arange(rows)).span_lengths(np.full(rows, columns))
    assert (found.min(), found.max()) == (1, 10)
    for length, weight in enumerate(weights, 1):
        share = weight / sum(weights)
        sigma = np.sqrt(share * (1 - share) / found.size)
        assert abs((found == length).mean() - share) <= 4 * sigma


# --- Of plans ---


def chunk_answers(sentences):
    """What CounterDraws say of chunks that begin with these sentences, one tuple a chunk."""
    sentences = np.asarray(sentences)
    c, asked = counter(sentences), np.ones(len(sentences), bool)
    answers = (
        c.split_point(2 + sentences % 30),
        c.draw_random_next(asked),
        c.other_document(3, sentences % 3, asked),
        c.start_sentence(1 + sentences % 50, asked),
    )
    return list(zip(*(a.tolist() for a in answers), strict=True))


@pytest.mark.parametrize("first", [0, 2**32 - 100, 2**40 + 3])
def test_a_chunk_s_draws_depend_on_its_first_sentence_alone(first):
    sentences = first + np.arange(997)
    whole = dict(zip(sentences.tolist(), chunk_answers(sentences), strict=True))
    assert len(set(whole.values())) > 500
    for part in (sentences[::-1], sentences[5:6], sentences[::71], sentences[3:50]):
        assert chunk_answers(part) == [whole[sentence] for sentence in part.tolist()]


def assert_uniform(values, bound):
    """Chi-squared within 4 sigma."""
    found = np.bincount(values, minlength=bound)
    assert len(found) == bound
    expected = len(values) / bound
    assert ((found - expected) ** 2 / expected).sum() < bound - 1 + 4 * np.sqrt(2 * (bound - 1))


def test_one_document_in_so_many_has_short_pairs_of_any_length():
    n, most, share = 40_000, 30, 0.3
    targets = counter(np.arange(n)).target_length(most, share)
    short = targets[targets < most]
    # One short target of 29 is the most.
    expected = share * 28 / 29
    assert abs(len(short) / n - expected) <= 4 * np.sqrt(expected * (1 - expected) / n)
    assert_uniform(short - 2, most - 2)
    assert (counter(np.arange(100)).target_length(most, 0.0) == most).all()
    assert (counter(np.arange(100)).target_length(2, 1.0) == 2).all()


def test_a_chunk_is_split_anywhere_and_half_of_all_b_are_random():
    n = 40_000
    c, asked = counter(np.arange(n)), np.ones(n, bool)
    split, random_next = c.split_point(np.full(n, 8)), c.draw_random_next(asked)
    assert_uniform(split - 1, 7)
    assert abs(random_next.mean() - 0.5) <= 4 * 0.5 / np.sqrt(n)
    assert abs(np.corrcoef(split, random_next)[0, 1]) < 4 / np.sqrt(n)
    assert (c.split_point(np.ones(n, int)) == 1).all()
    assert (c.split_point(np.full(n, 2)) == 1).all()


def test_a_random_b_starts_anywhere_in_any_other_document():
    n, documents = 40_000, 7
    c, asked, this = counter(np.arange(n)), np.ones(n, bool), np.full(n, 2)
    other, start = c.other_document(documents, this, asked), c.start_sentence(np.full(n, 9), asked)
    assert (other != 2).all()
    assert_uniform(other - (other > 2), documents - 1)
    assert_uniform(start, 9)
    assert abs(np.corrcoef(other, start)[0, 1]) < 4 / np.sqrt(n)


def test_after_ten_vain_draws_it_is_the_same_document():
    n = 200_000
    asked, this = np.ones(n, bool), np.zeros(n, int)
    assert (counter(np.arange(n)).other_document(1, this, asked) == 0).all()
    vain = (counter(np.arange(n)).other_document(2, this, asked) == 0).mean()
    expected = 2.0**-10
    assert abs(vain - expected) <= 4 * np.sqrt(expected / n)


def test_a_permutation_is_of_its_key_and_epoch():
    for count in (1, 2, 5, 1000):
        order = draws.permutation(KEY, 3, count)
        assert sorted(order.tolist()) == list(range(count))
    others = draws.permutation(KEY, 4, count), draws.permutation(draws.key_of("x"), 3, count)
    for other in (*others, np.arange(count)):
        assert (order == other).sum() < 10


def test_the_draws_of_this_version_are_those_of_the_last():
    # Other words would change the batches of every run that is resumed.
    assert draws.key_of(0, "train", 0) == KEY_OF_TRAIN
    assert draws.permutation(KEY, 0, 8).tolist() == PERMUTATION
    c = counter([0, 2**40])
    assert [a.tolist() for a in c.front_cuts(removals([9, 50], [40, 3]))] == FRONT_CUTS
    assert c.candidate_order(np.array([6, 6])).tolist() == ORDER
    assert c.replacements(np.array([3, 3]), 30_522, 0.8, 0.1)[1].tolist() == RANDOM_IDS
    assert c.span_lengths(np.array([8, 8])).tolist() == SPANS
    sentences = counter([0, 1, 2, 2**33])
    asked = np.ones(4, bool)
    assert counter([0, 1]).target_length(125, 1.0).tolist() == TARGETS
    assert sentences.split_point(np.full(4, 9)).tolist() == SPLITS
    assert sentences.draw_random_next(asked).tolist() == ARE_RANDOM
    assert sentences.other_document(1000, np.zeros(4, int), asked).tolist() == OTHERS
    assert sentences.start_sentence(np.full(4, 100), asked).tolist() == STARTS
