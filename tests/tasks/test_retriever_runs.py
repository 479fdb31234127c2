"""The kinds `sparse` and `multi_vector`: rows, schedules, whole runs, and what is refused."""

import json
import pathlib

import broken
import kinds
import numpy as np
import pytest
import tuned
from scipy import sparse

import bert_jax
from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Finetuning, SparseVectors, Task
from bert_jax.errors import InputError
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.examples import Candidates
from bert_jax.tasks.retrievers.multi_vector import MultiVector
from bert_jax.tasks.retrievers.retriever import candidates_from_cells
from bert_jax.tasks.retrievers.sparse import SparseBatches

COLUMNS = {"text_column": "query", "second_column": "docs", "label_column": "labels"}


def task(kind="sparse", **fields):
    fields = {"max_sequence_length": 12} | COLUMNS | fields
    return Task(kind=kind, train=("jsonl:x",), validation=("jsonl:x",), **fields)


def candidates(query, *texts):
    return Candidates("f:1", query, texts, None)


def rows_of(*examples, **fields):
    vectors = TextVectors(form="multi_vector", skipped_tokens="punctuation", **fields)
    return MultiVector(task("multi_vector"), (), kinds.TOKENIZER, vectors).rows(examples)


def test_rows_hold_a_query_and_each_text():
    """Shorter lists are padded, equal texts have equal keys, prompts are no part of a key."""
    fields = {"query_length": 5, "query_prefix": "wq ", "text_prefix": "wr "}
    rows = rows_of(candidates("wa", "wb .", "wa"), candidates("wb wc", "wd"), **fields)
    assert rows.rows_per_example == 3
    expected = ["[CLS] wq wa [SEP] [MASK]", "[CLS] wr wb . [SEP]", "[CLS] wr wa [SEP]"]
    expected += ["[CLS] wq wb wc [SEP]", "[CLS] wr wd [SEP]", "[CLS] wr [SEP]"]
    assert [row.tolist() for row in rows.ids] == [kinds.ids(text) for text in expected]
    keys = rows.row_arrays["keys"]
    assert keys[0] == keys[2] and keys[5] == 0 and len(set(keys.tolist())) == 5
    weights = [row.tolist() for row in rows.token_arrays["token_weights"]]
    assert weights[:2] == [[1] * 5, [1, 1, 1, 0, 1]]


def test_a_query_that_is_too_long_is_truncated():
    rows = rows_of(candidates("wa " * 40, "wb " * 40), query_length=6)
    assert [len(ids) for ids in rows.ids] == [6, 12]
    assert rows.ids[0][-1] == kinds.ids("[SEP]")[0] == rows.ids[1][-1]


def test_penalties_rise_with_the_square_of_steps():
    """As SpladeRegularizerWeightSchedulerCallback of sentence-transformers."""
    rows = rows_of(*[candidates("wa", "wb")] * 12)
    how = SparseVectors(penalty_warmup=1 / 3)
    experiment = Finetuning(name="x", task=task(), sparse=how, batch_size=4, epochs=4.0)
    batches = SparseBatches(rows, 0, experiment)  # 12 steps, of which 4 rise
    shares = [batches.batch(step, np.arange(2))["penalty_share"] for step in range(6)]
    expected = np.repeat([[0], [1 / 16], [4 / 16], [9 / 16], [1], [1]], 2, axis=1)
    np.testing.assert_allclose(shares, expected)


REFUSED = {
    "an empty query": {"query": " "},
    "no texts": {"docs": []},
    "a blank text": {"docs": ["wa", ""]},
    "lists of unequal lengths": {"labels": [1]},
    "a score that is not a number": {"labels": [1, float("nan")]},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_bad_examples_are_refused_by_file_and_line(fields, tmp_path):
    good = {"query": "wa", "docs": ["wa", "wb"], "labels": [1, 0]}
    file = tmp_path / "x.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(good | fields)}\n")
    with pytest.raises(InputError, match=r"x\.jsonl:2: "):
        examples_lib.read(task(), (f"jsonl:{file}",), "labelled")


def test_a_cell_holds_a_text_or_a_list():
    triple = task(negative_column="other")
    found = candidates_from_cells(triple, "f:1", ["wa", "wb", "wc"], [])
    assert found == candidates("wa", "wb", "wc")
    assert candidates_from_cells(task(), "f:1", ["wa", ["wb"]], []) == candidates("wa", "wb")


TASK = """
from bert_jax.config import Finetuning, MultiVectors, Optimizer, Run, SparseVectors, Task


def experiment():
    return Finetuning(
        name="small",
        task=Task(kind="{kind}", train=("jsonl:train",), validation=("jsonl:train",),
                  text_column="query", second_column="docs", label_column="labels",
                  max_sequence_length=32, query_prefix="wa "),
        {kind}={how},
        epochs=6, batch_size=4,
        optimizer=Optimizer(name="adamw", peak_learning_rate=2e-2, warmup_steps=0),
        run=Run(log_every=4, eval_every=8, checkpoint_every=8, eval_batch_size=8),
    )
"""
# Of 14 tokens, few would be active with the default `initial_share`.
HOW = {
    "sparse": 'SparseVectors(loss="{loss}", initial_share=0.5)',
    "multi_vector": 'MultiVectors(loss="{loss}")',
}


def write_files(kind, loss="contrastive"):
    """A text of the query's own words is first, and one of other words second."""
    tuned.write_base("base")
    lines = []
    for i in range(16):
        own, other = (tuned.GOOD, tuned.BAD)[:: 1 - 2 * (i % 2)]
        texts = [f"{own[i % 4]} {own[i // 2 % 4]} ?", f"{other[i % 4]} {other[i // 3 % 4]}"]
        lines.append(json.dumps({"query": own[i // 4], "docs": texts, "labels": [1.0, 0.0]}))
    pathlib.Path("train").write_text("\n".join(lines) + "\n")
    pathlib.Path("task.py").write_text(TASK.format(kind=kind, how=HOW[kind].format(loss=loss)))


@pytest.mark.long
@pytest.mark.parametrize("kind", HOW)
def test_a_run_learns_and_its_vectors_are_used(kind, tmp_path, monkeypatch):
    """Commands and Python give the same scores."""
    monkeypatch.chdir(tmp_path)
    write_files(kind)
    tuned.finetune()
    losses = [x["loss"] for x in tuned.lines("run/metrics.jsonl") if x["kind"] == "train"]
    assert losses[-1] < losses[0]
    (scored,) = tuned.predict("--score")
    assert scored["score"] == scored["ndcg@10"] > 0.9
    (answer,) = tuned.predict("wb", "xa xb", "wa wb ?")
    assert [text["index"] for text in answer["ranking"]] == [1, 0]
    pathlib.Path("texts").write_text("xa xb\nwa wb ?\n")
    said = broken.said("search --workdir run texts wb '' --top 5")
    assert f"{answer['ranking'][0]['score']:.3f}  line 2: wa wb ?" in said
    model = bert_jax.load("run")
    hits = bert_jax.search(model, ["xa xb", "wa wb ?"], ["wb"])
    expected = [text["score"] for text in answer["ranking"]]
    np.testing.assert_allclose([hit.score for hit in hits[0]], expected, rtol=1e-5)
    broken.said("embed texts --workdir run --out v.npz")
    vectors = model.embed(["xa xb", "wa wb ?"])
    if kind == "sparse":
        stored = sparse.load_npz("v.npz")
        np.testing.assert_array_equal(stored.toarray(), vectors.toarray())
        broken.said("embed texts --workdir run --out v.jsonl")
        line = tuned.lines("v.jsonl")[0]
        np.testing.assert_array_equal(line["indices"], stored[[0]].indices)
    else:
        stored, tokens = np.load("v.npz"), ["[CLS]", "xa", "xb", "[SEP]"]
        kept = ["[CLS]", "wa", "wb", "[SEP]"]  # without punctuation
        np.testing.assert_array_equal(stored["vectors"], vectors.vectors)
        assert stored["pieces"].tolist() == [*tokens, *kept]
    broken.fails("embed texts --workdir run --out q.npz --quantize int8", "--quantize")
    broken.fails("embed texts --workdir run --out q.npz --layers 1", "--layers")
    code, _, errors = broken.asked("search --workdir run texts", "wb " * 500)
    assert code == 0 and "truncated to 32 tokens: 1 of the queries" in errors
    broken.fails(["predict", "--workdir", "run", "", "wa wb"], "text 1")
    if kind == "multi_vector":
        broken.fails("serve --workdir run", kind)
    broken.said("embed texts --workdir run --out dense.npz --pooling mean --layers 1")
    assert np.load("dense.npz")["vectors"].shape == (2, tuned.MODEL.hidden_size)


@pytest.mark.long
def test_a_run_is_shown_beside_three_baselines(tmp_path, monkeypatch):
    """BM25, and the model and the mean vectors of its base before training."""
    monkeypatch.chdir(tmp_path)
    write_files("multi_vector")
    pathlib.Path("beir/qrels").mkdir(parents=True)
    texts = [f"{a} {b}" for a in tuned.GOOD for b in tuned.BAD]
    for name, end in (("corpus", 5), ("queries", 2)):  # a query is the first word of its text
        lines = [json.dumps({"_id": str(i), "text": x[:end]}) for i, x in enumerate(texts)]
        pathlib.Path(f"beir/{name}.jsonl").write_text("\n".join(lines))
    judged = "".join(f"{i}\t{i}\t1\n" for i in range(len(texts)))
    pathlib.Path("beir/qrels/test.tsv").write_text("query\ttext\tscore\n" + judged)
    said = tuned.finetune("--set", "task.validation=beir:beir:test", "--set", "epochs=1")
    lines = tuned.lines("run/predictions.jsonl")
    assert [line["kind"] for line in lines] == ["task", "untrained", "mean_vectors"]
    for name, score in (line["guess"] for line in lines):
        assert f"; {name}: ndcg@10 {score:.4f}" in said


@pytest.mark.long
@pytest.mark.parametrize("kind", HOW)
def test_one_text_cannot_be_compared_with_others(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_files(kind, "margin_mse")
    line = {"query": "wa", "docs": ["wb"], "labels": [1.0]}
    with pathlib.Path("train").open("a") as file:
        file.write(json.dumps(line) + "\n")
    broken.fails(tuned.FINETUNE, "train:17: ")


@pytest.mark.long
def test_a_stopped_run_of_sparse_vectors_ends_at_the_same_bits(tmp_path, monkeypatch):
    """It keeps the biases that it started with."""
    monkeypatch.chdir(tmp_path)
    write_files("sparse")
    assert "sparse: " in tuned.finetune()
    whole = pathlib.Path("run").rename("whole")
    with tuned.signal_before(3):
        assert broken.call(tuned.FINETUNE)[0] == 75
    assert "sparse: " not in tuned.finetune()
    assert (whole / "metrics.jsonl").read_text() == pathlib.Path("run/metrics.jsonl").read_text()
