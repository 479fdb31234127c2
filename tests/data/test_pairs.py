"""Pairs: a plan is the reference's loop, and truncation. Its laws: `conformance.data_rules`."""

import collections
import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.data import draws, pairs, stream

# --- The laws of a plan ---

corpora = st.lists(
    st.lists(st.integers(1, 12), min_size=1, max_size=9), min_size=1, max_size=6
)  # lengths of sentences, by document


def of_lengths(corpus):
    """A stream whose ids are their own places."""
    numbers = iter(range(10**6))
    return stream.from_documents(
        [[[next(numbers) for _ in range(n)] for n in document] for document in corpus], np.uint32
    )


Row = collections.namedtuple("Row", pairs.ROW_DTYPE.names)


def plan(small, seed=0, length=16, short_seq_prob=0.3):
    key = draws.key_of(seed)
    chunks = pairs.plan(small, length, short_seq_prob, key)
    rows = pairs.rows(small, chunks, draws.Counter(key, chunks["sentence"]))
    return [Row(*row) for row in rows.tolist()]


def document_of(small, offset):
    """The document in which a place in `ids` lies."""
    starts = small.sentence_offsets[small.document_offsets[:-1].astype(np.int64)]
    return int(np.searchsorted(starts, offset, "right")) - 1


@given(corpus=corpora, seed=st.integers(0, 99), length=st.integers(8, 40))
def test_how_much_is_planned_at_once_changes_nothing(corpus, seed, length):
    """Blocks end within documents and within chunks."""
    small = of_lengths(corpus)
    whole = plan(small, seed, length)
    before, pairs._BLOCK = pairs._BLOCK, 3
    try:
        assert plan(small, seed, length) == whole
    finally:
        pairs._BLOCK = before


def test_a_sample_is_of_whole_documents_of_the_plan():
    rng = np.random.default_rng(0)
    small = of_lengths([rng.integers(1, 12, rng.integers(1, 9)).tolist() for _ in range(600)])
    key = draws.key_of(0)
    rows = collections.Counter(plan(small))
    sampled = [Row(*row) for row in pairs.sample(small, 16, 0.3, key, 10**6).tolist()]
    assert collections.Counter(sampled) == rows
    few = pairs.sample(small, 16, 0.3, key, 100)
    assert [Row(*row) for row in few.tolist()] == sampled[:100]
    documents = [document_of(small, row.a_offset) for row in sampled[:100]]
    assert len(set(documents)) > 20
    assert max(documents) > 400  # from all over


class Answers(draws.Sequential):
    """What a Counter says of the chunk that is asked for, one at a time, with `one_by_one`."""

    def __init__(self, small, key):
        self.key, self.document = key, -1
        self.bounds = small.document_offsets.tolist()

    def target_length(self, *asked):
        self.document += 1
        return draws.Counter(self.key, np.array([self.document])).target_length(*asked)

    def at(self, sentence):
        self.chunk = draws.Counter(self.key, np.array([sentence]))

    def split_point(self, sentences):
        return self.chunk.split_point(sentences)

    def is_random(self, asked):
        return self.chunk.is_random(asked)

    def other_document(self, *asked):
        return self.chunk.other_document(*asked)

    def start(self, *asked):
        return self.chunk.start(*asked)


@given(corpus=corpora, seed=st.integers(0, 99), length=st.integers(8, 40))
def test_a_plan_is_what_the_reference_makes_of_the_same_answers(corpus, seed, length):
    """The reference's loop, document by document and chunk by chunk, asked with the same draws."""
    small, key = of_lengths(corpus), draws.key_of(seed)
    answers = Answers(small, key)
    slow = slow_plan(corpus, length - pairs.SPECIAL_TOKENS, 0.3, answers)
    assert [
        (r.a_offset, r.a_length, r.b_offset, r.b_length, r.is_random_next)
        for r in plan(small, seed, length)
    ] == slow
    # And so does `one_by_one`, with which conformance asks.
    answers = Answers(small, key)
    found, sentence = [], np.searchsorted(small.sentence_offsets, 0)
    source = pairs.one_by_one(small, length, 0.3, answers)
    while True:
        answers.at(sentence)
        row = next(source, None)
        if row is None:
            break
        found.append(row[0].tolist())
        used = row["a_length"] + np.where(row["is_random_next"], 0, row["b_length"])
        sentence = int(np.searchsorted(small.sentence_offsets, row["a_offset"] + used)[0])
    assert found == slow


def slow_plan(corpus, most, short_seq_prob, draw):
    """`create_instances_from_document`, with places in the stream for ids."""
    one = np.array([True])
    starts = np.cumsum([0, *(length for document in corpus for length in document)]).tolist()
    first_of = np.cumsum([0, *map(len, corpus)]).tolist()
    rows = []
    for number, document in enumerate(corpus):
        target = int(draw.target_length(most, short_seq_prob)[0])
        chunk, length, i = [], 0, 0
        while i < len(document):
            chunk.append(first_of[number] + i)
            length += document[i]
            if i == len(document) - 1 or length >= target:
                draw.at(chunk[0])
                count = int(draw.split_point(np.array([len(chunk)]))[0])
                a = chunk[:count]
                a_length = starts[a[-1] + 1] - starts[a[0]]
                random_next = len(chunk) == 1 or bool(draw.is_random(one)[0])
                if random_next:
                    other = int(draw.other_document(len(corpus), np.array([number]), one)[0])
                    begin = first_of[other] + int(
                        draw.start(np.array([len(corpus[other])]), one)[0]
                    )
                    b = []
                    for j in range(begin, first_of[other + 1]):
                        b.append(j)
                        if starts[j + 1] - starts[begin] >= target - a_length:
                            break
                    i -= len(chunk) - count
                else:
                    b = chunk[count:]
                rows.append(
                    (
                        starts[a[0]],
                        a_length,
                        starts[b[0]],
                        starts[b[-1] + 1] - starts[b[0]],
                        random_next,
                    )
                )
                chunk, length = [], 0
            i += 1
    return rows


def test_a_sentence_of_70000_tokens_is_one_pair_s_a():
    small = of_lengths([[70_000], [3, 4]])
    rows = [row for row in plan(small) if row.a_length == 70_000]
    assert [(row.a_offset, row.is_random_next) for row in rows] == [(0, True)]


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
    a=st.integers(1, 60), b=st.integers(1, 60), length=st.integers(8, 70), seed=st.integers(0, 99)
)
def test_truncation_equals_the_loop_over_tokens(a, b, length, seed):
    row = np.array([(100, a, 500, b, False)], pairs.ROW_DTYPE)
    generator = random.Random(seed)
    slow = slow_truncate(range(100, 100 + a), range(500, 500 + b), length - 3, generator.random)
    draw = draws.Sequential(random.Random(seed))
    cut = pairs.truncate(row, length, draw)
    for expected, start, size in (
        (slow[0], cut.a_start, cut.a_length),
        (slow[1], cut.b_start, cut.b_length),
    ):
        assert list(range(start[0], start[0] + size[0])) == expected
    # And it drew as many numbers.
    assert draw._rng.random() == generator.random()


@given(
    lengths=st.lists(st.tuples(st.integers(1, 400), st.integers(1, 400)), min_size=1, max_size=20),
    length=st.integers(8, 130),
)
def test_many_rows_are_truncated_as_one(lengths, length):
    rows = np.array([(1000, a, 5000, b, True) for a, b in lengths], pairs.ROW_DTYPE)
    cut = pairs.truncate(rows, length, draws.Counter((1, 2), np.arange(len(rows))))
    for i, (a, b) in enumerate(lengths):
        slow = slow_truncate(range(a), range(b), length - 3, lambda: 0.0)
        assert (cut.a_length[i], cut.b_length[i]) == (len(slow[0]), len(slow[1]))
        assert cut.a_start[i] >= 1000
        assert cut.a_start[i] + cut.a_length[i] <= 1000 + a
        assert cut.b_start[i] >= 5000
        assert cut.b_start[i] + cut.b_length[i] <= 5000 + b
