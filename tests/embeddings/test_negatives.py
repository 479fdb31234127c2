"""Hard negatives against sentence-transformers (`make_negatives.py`), BM25, and both commands."""

import json
import math
import pathlib

import broken
import numpy as np
import pytest
import tuned

from bert_jax.config import Task
from bert_jax.embeddings import bm25, negatives, retrieval
from bert_jax.embeddings.retrieval import Passage
from bert_jax.errors import InputError
from bert_jax.tasks import examples as examples_lib

GOLDEN = json.loads(pathlib.Path(__file__).with_name("negatives.json").read_text())


def given_scores(queries, texts):
    """The first stage with the vectors of the golden file."""
    a, b = (np.array([GOLDEN["vectors"][x] for x in side], np.float32) for side in (queries, texts))
    yield from a @ b.T


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: str(case["limits"]))
def test_negatives_are_those_of_sentence_transformers(case):
    pairs, limits = (
        [tuple(pair) for pair in GOLDEN["pairs"]],
        negatives.MiningLimits(*case["limits"]),
    )
    mined = negatives.mine(pairs, GOLDEN["corpus"], given_scores, limits)
    found = {(one.query, one.positive): one.negatives for one in mined if one.negatives}
    assert found == {(query, answer): texts for query, answer, texts in case["mined"]}


def test_bm25_is_that_of_the_paper():
    """Lucene's variant of Robertson and Zaragoza 2009, in float64; a word of one letter is none."""
    texts = ["The cat sat; the cat ran.", "a dog", "DOG and cat and bird", "x y"]
    queries = ["the Cat", "dog, dog", "unknown", ""]
    words = [["the", "cat", "sat", "the", "cat", "ran"], ["dog"],
             ["dog", "and", "cat", "and", "bird"], []]  # fmt: skip
    mean, k1, b = 12 / 4, 1.5, 0.75

    def score(query, text):
        total = 0.0
        for word in query:
            frequency, having = text.count(word), sum(word in other for other in words)
            weight = math.log(1 + (len(words) - having + 0.5) / (having + 0.5))
            total += weight * frequency / (frequency + k1 * (1 - b + b * len(text) / mean))
        return total

    asked = [["the", "cat"], ["dog", "dog"], ["unknown"], []]
    expected = [[score(query, text) for text in words] for query in asked]
    np.testing.assert_allclose(list(bm25.all_scores(queries, texts)), expected, rtol=1e-5)
    indices, scores = bm25.nearest(queries, texts, 2)
    assert indices[1].tolist() == [1, 2] and indices[3].tolist() == [0, 1]
    assert scores[1, 0] > scores[1, 1] > 0


def test_texts_without_words_have_scores(tmp_path):
    assert [row.tolist() for row in bm25.all_scores(["cat"], ["x", "y"])] == [[0.0, 0.0]]


def test_without_the_library_there_is_no_baseline_and_one_message(monkeypatch, caplog):
    monkeypatch.setattr(bm25.importlib.util, "find_spec", lambda name: None)
    passages = [Passage("f:1", "1", "cat", {"a": 1}), Passage("f:2", "a", "cat")]
    assert retrieval.bm25_scores(passages) is None
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    with pytest.raises(InputError, match=r"bert-jax\[bm25\]"):
        list(bm25.all_scores(["cat"], ["cat"]))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A base, and pairs of queries and answers, of which two are alike."""
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    pairs = [("wa", "wa wb"), ("wb", "wb wc"), ("xa", "xa wb")]
    lines = (json.dumps({"query": q, "positive": a}) + "\n" for q, a in pairs)
    pathlib.Path("pairs.jsonl").write_text("".join(lines))
    pathlib.Path("more.txt").write_text("wb\n\nwa\n")
    return tmp_path


def test_mined_files_are_read_by_both_kinds(here):
    said = broken.said("mine pairs.jsonl --out mined.jsonl --margin 0")
    assert said.startswith("mined.jsonl: 3 pairs with ")
    source = ("jsonl:mined.jsonl",)
    similar = Task(kind="similar", train=source, validation=source, text_column="query",
                   second_column="positive", negative_column="negative")  # fmt: skip
    triples = examples_lib.read(similar, source, "unlabelled")
    assert triples[0].texts[:2] == ("wa", "wa wb") and triples[0].texts[2] in ("wb wc", "xa wb")
    rank = Task(kind="rank", train=source, validation=source, text_column="query",
                second_column="docs", label_column="labels")  # fmt: skip
    lists = examples_lib.read(rank, source, "labelled")
    assert {"wb wc", "xa wb"} == {*lists[0].candidates[1:]} and lists[0].scores == (1, 0, 0)


def test_vectors_choose_among_further_texts(here):
    said = broken.said(
        "mine pairs.jsonl --out mined.jsonl --margin 0 --corpus more.txt --workdir base "
        "--negatives 1 --depth 3"
    )
    assert "mined.jsonl: " in said and "without a negative" in said
    for line in tuned.lines("mined.jsonl"):
        assert line["negative"] not in (line["positive"], "") and len(line["docs"]) == 2


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("mine pairs.jsonl --out o.jsonl --skip 3 --depth 5", "--depth"),
        ("mine pairs.jsonl --out o.jsonl --pooling cls", "--pooling"),
        ("mine pairs.jsonl --out ./pairs.jsonl", "--out ./pairs.jsonl"),
        ("mine pairs.jsonl --out o.jsonl --margin 9", "--margin"),
        ("mine pairs.jsonl --out o.jsonl --query q", "pairs.jsonl:1"),
        ("mine more.txt --out o.jsonl", "more.txt"),
        ("mine empty.jsonl --out o.jsonl", "empty.jsonl: holds no pairs"),
        ("mine number.jsonl --out o.jsonl", "number.jsonl:1: column 'positive'"),
    ],
)
def test_what_mine_refuses_leaves_no_file(words, named, here):
    pathlib.Path("empty.jsonl").touch()
    pathlib.Path("number.jsonl").write_text('{"query": "wa", "positive": 3}\n')
    broken.fails(words, named)
    assert not pathlib.Path("o.jsonl").exists()
