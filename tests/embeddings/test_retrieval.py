"""Retrieval scores, compared with trec_eval (`make_retrieval.py`), and reading of BEIR folders."""

import json
import pathlib

import numpy as np
import pytest

from bert_jax.embeddings import retrieval
from bert_jax.embeddings.forms import DENSE
from bert_jax.errors import InputError


def write(folder, texts, queries, judged):
    """Writes a folder in BEIR's format."""
    for name, records in (("corpus", texts), ("queries", queries)):
        lines = (json.dumps(record) + "\n" for record in records)
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "qrels").mkdir()
    lines = ("\t".join(map(str, line)) + "\n" for line in judged)
    (folder / "qrels" / "test.tsv").write_text("query-id\tcorpus-id\tscore\n" + "".join(lines))


def scores_of(case, folder):
    """Returns the scores of a case of `make_retrieval`, from files and vectors."""
    texts, queries = (
        [{"_id": name, "text": "x"} for name in case[side]] for side in ("texts", "queries")
    )
    write(folder, texts, queries, case["judged"])
    products = np.array(case["products"], np.float32) / 16
    query_vectors = dict(zip(case["queries"], np.eye(len(products), dtype=np.float32), strict=True))
    text_vectors = dict(zip(case["texts"], products.T, strict=True))
    passages = retrieval.read(str(folder), "test")
    vectors = [(text_vectors if p.relevant is None else query_vectors)[p.id] for p in passages]
    return retrieval.scores(vectors, passages)


CASES = json.loads(pathlib.Path(__file__).with_name("retrieval.json").read_text())


@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("block", [65_536, 3])
def test_scores_equal_those_of_trec_eval(number, block, tmp_path, monkeypatch):
    """Cases have ties, shared ids, grades, negative or repeated judgements, or no relevant text."""
    monkeypatch.setattr(DENSE, "block_texts", block)
    scores = scores_of(CASES[number], tmp_path)
    assert list(scores) == ["recall@1", "recall@10", "mrr@10", "ndcg@10"]
    assert scores == pytest.approx(CASES[number]["scores"], abs=1e-12)


@pytest.fixture
def folder(tmp_path):
    texts = [
        {"_id": "a", "title": "Ants", "text": "walk"},
        {"_id": "b", "title": None, "text": "B\ud800"},
    ]
    queries = [{"_id": "1", "text": "who walks"}, {"_id": "2", "text": "not judged"}]
    write(tmp_path, texts, queries, [("1", "a", 2), ("1", "b", 0)])
    return tmp_path


def test_read_takes_files_in_beir_format(folder):
    query, a, b = retrieval.read(str(folder), "test")
    assert (query.text, query.relevant) == ("who walks", {"a": 2})
    assert (a.text, b.text, a.relevant) == ("Ants walk", "B\ufffd", None)


@pytest.mark.parametrize(
    ("file", "text", "named"),
    [
        ("qrels/test.tsv", "q\tc\ts\n1\tz\t1\n", "test.tsv:2: 'z'"),
        ("qrels/test.tsv", "q\tc\ts\n9\ta\t1\n", "queries.jsonl: no query '9'"),
        ("qrels/test.tsv", "q\tc\ts\n1\ta\n", "test.tsv"),
        ("qrels/test.tsv", "q\tc\ts\n1\ta\t0\n", "test.tsv"),
        ("corpus.jsonl", '{"_id": "a", "text": " "}\n', "corpus.jsonl:1"),
        ("corpus.jsonl", '{"_id": "a", "text": "x"}\n' * 2, "corpus.jsonl"),
        ("corpus.jsonl", "{", "corpus.jsonl"),
        ("corpus.jsonl", '{"_id": "a", "text": 5}\n', "corpus.jsonl:1"),
        ("corpus.jsonl", '{"_id": "a", "title": ["x"], "text": "x"}\n', "corpus.jsonl:1"),
        ("queries.jsonl", '{"_id": "1", "text": null}\n', "queries.jsonl:1"),
        ("queries.jsonl", '{"_id": "1", "text": "x"}\n' * 2, "queries.jsonl:2"),
    ],
)
def test_errors_name_the_file(folder, file, text, named):
    (folder / file).write_text(text)
    with pytest.raises(InputError) as error:
        retrieval.read(str(folder), "test")
    assert named in str(error.value)
