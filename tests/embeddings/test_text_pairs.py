"""Pairs of a corpus: which texts they are, and that a row depends on its number alone."""

import numpy as np
import pytest

from bert_jax.data import stream
from bert_jax.data.batches import Ids
from bert_jax.embeddings.text_pairs import CorpusPairs
from bert_jax.errors import InputError

CLS, SEP = 2, 3


def documents(count=20):
    """Documents of sentences of ids that name them: 100 a document, 10 a sentence."""
    rng = np.random.default_rng(0)
    return [
        [
            [1000 + 100 * d + 10 * s + i for i in range(rng.integers(3, 10))]
            for s in range(2 + d % 7)
        ]
        for d in range(count)
    ]


def pairs_of(how, prefixes=((), ()), examples=16, length=40, seed=0):
    made = stream.make_stream(documents())
    continues = np.zeros(8000, bool)
    ids = Ids(0, CLS, SEP, 4, 8000, continues)
    return CorpusPairs(made, ids, how, tuple(map(list, prefixes)), examples, length, seed)


def texts_of(batch):
    rows = zip(batch["input_ids"], batch["input_mask"], strict=True)
    return [ids[mask > 0].tolist() for ids, mask in rows]


@pytest.mark.parametrize("how", ["neighbours", "crops", "twice"])
def test_both_texts_are_of_one_document_and_each_sentence_comes_once_an_epoch(how):
    pairs = pairs_of(how)
    seen = []
    for step in range(3 * pairs.total // 16):
        batch = pairs.batch(step, np.arange(32))
        texts = texts_of(batch)
        for a, b in zip(texts[::2], texts[1::2], strict=True):
            assert a[0] == b[0] == CLS and a[-1] == b[-1] == SEP and len(a) <= 40
            of = {piece // 100 for piece in a[1:-1] + b[1:-1]}
            assert len(of) == 1
            seen.append((tuple(a[1:-1]), tuple(b[1:-1])))
    if how == "neighbours":
        assert pairs.total == sum(len(d) - 1 for d in documents())
        for a, b in seen:  # B begins the sentence behind the one that A ends with, or is cut from
            assert b[0] % 10 == 0 and b[0] // 10 == a[-1] // 10 + 1
        first = [b[0] for _, b in seen[: pairs.total]]
        assert len(set(first)) == pairs.total
        assert [b[0] for _, b in seen[pairs.total :]][: pairs.total] != first
    if how == "twice":
        assert all(a == b for a, b in seen)
    if how == "crops":
        assert np.mean([a == b for a, b in seen]) < 0.3


@pytest.mark.parametrize("how", ["neighbours", "crops", "twice"])
def test_a_row_is_the_same_whoever_asks_for_it(how):
    whole = pairs_of(how).batch(3, np.arange(32))
    for part in (np.arange(8, 24), np.array([31, 2, 3])):
        some = pairs_of(how).batch(3, part)
        for name, values in some.items():
            np.testing.assert_array_equal(values, whole[name][part])
    other = pairs_of(how, seed=1).batch(3, np.arange(32))
    assert other["input_ids"].shape != whole["input_ids"].shape or np.any(
        other["input_ids"] != whole["input_ids"]
    )


def test_prefixes_stand_before_the_texts_and_keys_are_of_the_texts():
    plain, led = pairs_of("twice"), pairs_of("twice", ((7, 8), (9,)), length=42)
    a, b = (pairs.batch(0, np.arange(32)) for pairs in (plain, led))
    for row, text in enumerate(texts_of(b)):
        assert text[1 : 2 + (row % 2 == 0)] == ([7, 8] if row % 2 == 0 else [9])
    assert (b["keys"][::2] == b["keys"][1::2]).all()
    assert len(set(a["keys"].tolist())) == 16


def test_keys_are_equal_if_and_only_if_whole_texts_are_equal():
    """The documents differ only in their last token."""
    beginning = list(range(100, 109))
    documents = stream.make_stream([[[*beginning, 200 + d // 2]] for d in range(16)])
    ids = Ids(0, CLS, SEP, 4, 8000, np.zeros(8000, bool))
    batch = CorpusPairs(documents, ids, "twice", ([], []), 16, 40, 0).batch(0, np.arange(32))
    texts, keys = list(map(tuple, texts_of(batch))), batch["keys"].tolist()
    assert len(set(texts)) == len(set(keys)) == len(set(zip(texts, keys, strict=True))) < 16
    assert len({text for text in texts if len(text) == 12}) > 1


def test_rows_without_room_are_refused():
    with pytest.raises(InputError, match="max_sequence_length"):
        pairs_of("twice", length=9)


def test_documents_of_one_sentence_have_no_neighbours():
    alone = stream.make_stream([[[5, 6, 7]], [[8, 9]]])
    ids = Ids(0, CLS, SEP, 4, 16, np.zeros(16, bool))
    with pytest.raises(InputError, match="neighbours"):
        CorpusPairs(alone, ids, "neighbours", ([], []), 2, 40, 0)
    assert CorpusPairs(alone, ids, "crops", ([], []), 2, 40, 0).total == 2


def test_the_start_of_a_crop_does_not_depend_on_its_length():
    """The start is drawn uniformly from all positions where a crop of its length fits."""
    long = stream.make_stream([[list(range(100, 400))]] * 16)
    ids = Ids(0, CLS, SEP, 4, 8000, np.zeros(8000, bool))
    pairs = CorpusPairs(long, ids, "crops", ([], []), 16, 102, 0)
    texts = [text for step in range(40) for text in texts_of(pairs.batch(step, np.arange(32)))]
    lengths = np.array([len(text) - 2 for text in texts])
    # A passage has 200 tokens, as many as the two longest crops; its first token id is 100.
    shares = (np.array([text[1] for text in texts]) - 100) / (200 - lengths)
    assert abs(np.corrcoef(lengths, shares)[0, 1]) < 4 / np.sqrt(len(texts))
    assert abs(shares.mean() - 0.5) < 4 * np.sqrt(1 / 12 / len(texts))
