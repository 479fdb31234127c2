"""Pairs: a plan is the reference's loop, swapped pairs, and truncation.

The laws of a plan: `conformance.data_rules`.
"""

import collections

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from bert_jax.data import draws, pairs, stream
from bert_jax.errors import InputError

# --- The laws of a plan ---

corpora = st.lists(
    st.lists(st.integers(1, 12), min_size=1, max_size=9), min_size=1, max_size=6
)  # lengths of sentences, by document


def of_lengths(corpus):
    """A stream whose ids are their own places."""
    numbers = iter(range(10**6))
    return stream.make_stream(
        [[[next(numbers) for _ in range(n)] for n in document] for document in corpus], np.uint32
    )


Row = collections.namedtuple("Row", pairs.ROW_DTYPE.names)
UNITS = ("pairs", "swapped_pairs")


def plan(small, seed=0, length=16, units="pairs"):
    key = draws.key_of(seed)
    chunks = pairs.plan(small, length, 0.3, key, units)
    rows = pairs.rows(small, chunks, draws.CounterDraws(key, chunks["sentence"]), units)
    return [Row(*row) for row in rows.tolist()]


def document_of(small, offset):
    """The document in which a place in `ids` lies."""
    starts = small.sentence_offsets[small.document_offsets[:-1].astype(np.int64)]
    return int(np.searchsorted(starts, offset, "right")) - 1


@pytest.mark.parametrize("units", UNITS)
@given(corpus=corpora, seed=st.integers(0, 99), length=st.integers(8, 40))
def test_how_much_is_planned_at_once_changes_nothing(units, corpus, seed, length):
    """Blocks end within documents and within chunks."""
    assume(units == "pairs" or any(len(document) > 1 for document in corpus))
    small = of_lengths(corpus)
    whole = plan(small, seed, length, units)
    before, pairs._BLOCK = pairs._BLOCK, 3
    try:
        assert plan(small, seed, length, units) == whole
    finally:
        pairs._BLOCK = before


@pytest.mark.parametrize("units", UNITS)
def test_a_sample_is_of_whole_documents_of_the_plan(units):
    rng = np.random.default_rng(0)
    small = of_lengths([rng.integers(1, 12, rng.integers(1, 9)).tolist() for _ in range(600)])
    key = draws.key_of(0)
    sampled = [Row(*row) for row in pairs.sample(small, 16, 0.3, key, 10**6, units).tolist()]
    assert sorted(sampled) == sorted(plan(small, units=units))
    few = pairs.sample(small, 16, 0.3, key, 100, units)
    assert [Row(*row) for row in few.tolist()] == sampled[:100]
    documents = [document_of(small, row.a_offset) for row in sampled[:100]]
    assert len(set(documents)) > 20
    assert max(documents) > 400  # from all over


class Answers(draws.SequentialDraws):
    """What CounterDraws say of the chunk that is asked for, for `reference_pairs`."""

    def __init__(self, small, key):
        self.key, self.document = key, -1
        self.bounds = small.document_offsets.tolist()

    def target_length(self, *asked):
        self.document += 1
        return draws.CounterDraws(self.key, np.array([self.document])).target_length(*asked)

    def at(self, sentence):
        self.chunk = draws.CounterDraws(self.key, np.array([sentence]))

    def split_point(self, sentences):
        return self.chunk.split_point(sentences)

    def draw_random_next(self, asked):
        return self.chunk.draw_random_next(asked)

    def other_document(self, *asked):
        return self.chunk.other_document(*asked)

    def start_sentence(self, *asked):
        return self.chunk.start_sentence(*asked)


@given(corpus=corpora, seed=st.integers(0, 99), length=st.integers(8, 40))
def test_a_plan_is_what_the_reference_s_loop_makes_of_the_same_answers(corpus, seed, length):
    """The loop is `reference_pairs`, which conformance holds to the reference's own instances."""
    small, key = of_lengths(corpus), draws.key_of(seed)
    answers, found, sentence = Answers(small, key), [], 0
    source = pairs.reference_pairs(small, length, 0.3, answers)
    while True:
        answers.at(sentence)
        row = next(source, None)
        if row is None:
            break
        found.append(row[0].tolist())
        used = row["a_length"] + np.where(row["is_random_next"], 0, row["b_length"])
        sentence = int(np.searchsorted(small.sentence_offsets, row["a_offset"] + used)[0])
    assert found == plan(small, seed, length)


# --- Pairs that follow each other, half of them swapped (Lan et al. 2019) ---


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
    for row in plan(small, seed, length, "swapped_pairs"):
        (start, middle), (same, end) = in_order(row)
        assert middle == same and start < middle < end
        assert {start, middle, end} <= bounds
        assert document_of(small, start) == document_of(small, end - 1)
        covered += range(start, end)
    expected = [
        place for place in range(len(small.ids)) if len(corpus[document_of(small, place)]) > 1
    ]
    assert covered == expected


def test_half_of_the_pairs_are_swapped_wherever_they_stand():
    rng = np.random.default_rng(0)
    small = of_lengths([rng.integers(1, 12, rng.integers(2, 9)).tolist() for _ in range(3_000)])
    swapped = np.array([row.is_random_next for row in plan(small, units="swapped_pairs")])
    error = 0.5 / len(swapped) ** 0.5
    assert abs(swapped.mean() - 0.5) < 4 * error
    assert abs((swapped[1:] == swapped[:-1]).mean() - 0.5) < 4 * error


def test_documents_of_one_sentence_alone_are_named():
    with pytest.raises(InputError, match="no document has two sentences"):
        plan(of_lengths([[3], [5], [2]]), units="swapped_pairs")
    with pytest.raises(InputError, match="no held-out document has two sentences"):
        pairs.sample(of_lengths([[3], [5]]), 16, 0.3, draws.key_of(0), 10, "swapped_pairs")


# --- Truncation ---


def slow_truncate(a, b, most, random_draw):
    """truncate_seq_pair, token by token."""
    a, b = list(a), list(b)
    while len(a) + len(b) > most:
        longer = a if len(a) > len(b) else b
        if random_draw() < 0.5:
            del longer[0]
        else:
            longer.pop()
    return a, b


@given(
    lengths=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=20),
    length=st.integers(8, 130),
)
def test_many_rows_are_truncated_as_one(lengths, length):
    rows = np.array([(1000, a, 5000, b, True) for a, b in lengths], pairs.ROW_DTYPE)
    cut = pairs.truncate(rows, length, draws.CounterDraws((1, 2), np.arange(len(rows))))
    for i, (a, b) in enumerate(lengths):
        slow = slow_truncate(range(a), range(b), length - 3, lambda: 0.0)
        assert (cut.a_length[i], cut.b_length[i]) == (len(slow[0]), len(slow[1]))
        assert cut.a_start[i] >= 1000
        assert cut.a_start[i] + cut.a_length[i] <= 1000 + a
        assert cut.b_start[i] >= 5000
        assert cut.b_start[i] + cut.b_length[i] <= 5000 + b
