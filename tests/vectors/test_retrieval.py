"""Scores of rankings, against the formulas one text after the other; and BEIR's files."""

import json
import math

import numpy as np
import pytest

from bert_jax.errors import InputError
from bert_jax.vectors import retrieval


def reference(cosines, texts, relevant):
    """The same from whole sorted lists: by score, of equal ones the larger id first."""
    values = []
    for row, wanted in zip(cosines, relevant, strict=True):
        order = sorted(zip(row, texts, strict=True), reverse=True)
        gains = [wanted.get(text, 0) for _, text in order]
        top = gains[:10]
        ideal = sorted(wanted.values(), reverse=True)[:10]

        def dcg(values):
            return sum(v / math.log2(i + 2) for i, v in enumerate(values))

        first = next((1 / (i + 1) for i, v in enumerate(top) if v), 0)
        found = sum(v > 0 for v in top) / len(wanted)
        values.append([(gains[0] > 0) / len(wanted), found, first, dcg(top) / dcg(ideal)])
    return np.mean(values, axis=0)


@pytest.mark.parametrize("count", [5, 300])
def test_scores_equal_those_of_sorted_lists_with_ties(count):
    rng = np.random.default_rng(count)
    texts = [f"d{i}" for i in rng.permutation(count)]
    cosines = rng.integers(0, 12, (40, count)) / 12  # so few values that many are equal
    relevant = [
        {texts[i]: int(rng.integers(1, 4)) for i in rng.choice(count, rng.integers(1, 5), False)}
        for _ in range(40)
    ]
    found = retrieval.scores(cosines, texts, relevant)
    assert list(found) == ["recall@1", "recall@10", "mrr@10", "ndcg@10"]
    np.testing.assert_allclose(list(found.values()), reference(cosines, texts, relevant))


@pytest.fixture
def folder(tmp_path):
    texts = [
        {"_id": "a", "title": "Ants", "text": "walk"},
        {"_id": "b", "title": None, "text": "B\ud800"},
    ]
    queries = [{"_id": "1", "text": "who walks"}, {"_id": "2", "text": "not judged"}]
    for name, records in (("corpus", texts), ("queries", queries)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    (tmp_path / "qrels").mkdir()
    (tmp_path / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n1\ta\t2\n1\tb\t0\n")
    return tmp_path


def test_beir_s_files_as_they_come(folder):
    query, a, b = retrieval.read(str(folder), "test")
    assert (query.text, query.relevant) == ("who walks", {"a": 2})
    assert (a.text, b.text, a.relevant) == ("Ants walk", "B\ufffd", None)


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("qrels/test.tsv", "q\tc\ts\n1\tz\t1\n", "test.tsv:2: 'z'"),
        ("qrels/test.tsv", "q\tc\ts\n9\ta\t1\n", "queries.jsonl: has no query '9'"),
        ("qrels/test.tsv", "q\tc\ts\n1\ta\n", "test.tsv"),
        ("qrels/test.tsv", "q\tc\ts\n1\ta\t0\n", "test.tsv"),
        ("corpus.jsonl", '{"_id": "a", "text": " "}\n', "corpus.jsonl:1"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n' * 2, "corpus.jsonl"),
        ("corpus.jsonl", "{", "corpus.jsonl"),
        ("corpus.jsonl", '{"_id": "a", "text": 5}\n', "corpus.jsonl:1"),
        ("corpus.jsonl", '{"_id": "a", "title": ["x"], "text": "x"}\n', "corpus.jsonl:1"),
        ("queries.jsonl", '{"_id": "1", "text": null}\n', "queries.jsonl:1"),
    ],
)
def test_what_is_wrong_is_named(folder, file, text, named):
    (folder / file).write_text(text)
    with pytest.raises(InputError) as error:
        retrieval.read(str(folder), "test")
    assert named in str(error.value)
