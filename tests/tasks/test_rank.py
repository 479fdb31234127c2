"""The kind `rank`: losses against sentence-transformers (`make_rank.py`), rows, scores, runs."""

import dataclasses
import json
import pathlib

import broken  # runs commands
import jax
import kinds  # tasks without files
import numpy as np
import pytest
import tuned  # a base, and runs fine-tuned from it
from test_steps import assert_same, train

import bert_jax
from bert_jax.config import Adapt, Parallelism, Task
from bert_jax.embeddings import retrieval
from bert_jax.errors import InputError
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import rank
from bert_jax.tasks.examples import Candidates
from bert_jax.tasks.rank import Rank, RankObjective
from bert_jax.tasks.rows import eval_batches

GOLDEN = np.load(pathlib.Path(__file__).with_name("rank.npz"))
LOSSES = ("binary_cross_entropy", "mse", "list_net")
COLUMNS = {"text_column": "query", "second_column": "docs", "label_column": "labels"}


def task(loss="list_net", source="jsonl:x", **fields):
    fields = {"max_sequence_length": 40, "ranking_loss": loss} | COLUMNS | fields
    return Task(kind="rank", train=(source,), validation=(source,), **fields)


def objective(loss="list_net", adapt=None, model=kinds.MODEL):
    shape = {"learns": "numbers", "reads": "pooled", "outputs": 1, "rows_per_example": 1}
    return RankObjective(model, **shape, adapt=adapt or Adapt(), ranking_loss=loss)


def candidates(*scores, query="wa", text="wb {}"):
    texts = tuple(text.format(kinds.WORDS[i % 20]) for i in range(len(scores)))
    return Candidates("f:1", query, texts, tuple(map(float, scores)))


@pytest.mark.parametrize("loss", LOSSES)
def test_losses_and_gradients_equal_those_of_sentence_transformers(loss):
    logits, scores = GOLDEN["logits"], GOLDEN["scores"]
    batch = {"targets": np.repeat(scores, scores.shape[1], axis=0)}
    batch["row_weights"] = np.ones(scores.size, np.float32)
    goal = objective(loss)

    def value_of(logits):
        return goal.loss(goal.measure(logits, batch), goal.counts(batch))

    value, gradient = jax.jit(jax.value_and_grad(value_of))(logits.reshape(-1, 1))
    assert value == pytest.approx(float(GOLDEN[f"{loss}_loss"]), rel=1e-6)
    expected = GOLDEN[f"{loss}_gradient"].reshape(-1, 1)
    np.testing.assert_allclose(gradient, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("loss", LOSSES)
def test_padding_and_rows_without_weight_change_no_loss(loss):
    """A list of two texts counts the same alone, and padded to four beside a list of weight 0."""
    kind = Rank(task(loss), (), kinds.TOKENIZER)
    short, long = candidates(1, 0), candidates(0, 1, 0.5, 0)
    logits = np.arange(12, dtype=np.float32)[:, None] / 7
    goal, sums = objective(loss), []
    for examples in (short,), (short, long):
        rows = kind.rows(examples)
        ((_, batch),) = eval_batches(rows, 0, len(rows.ids))
        batch["row_weights"] = (batch["rows"] < rows.rows_per_example).astype(np.float32)
        sums.append(goal.measure(logits[batch["rows"]], batch)["loss"])
    assert len(rows.ids) == 8
    np.testing.assert_allclose(sums[1], sums[0], rtol=1e-6)


def test_rows_hold_the_query_with_each_text():
    kind = Rank(task(), (), kinds.TOKENIZER)
    rows = kind.rows([candidates(1, 0), candidates(0, 0, 2)])
    assert rows.rows_per_example == 3
    expected = ["[CLS] wa [SEP] wb wa [SEP]", "[CLS] wa [SEP] wb wb [SEP]", "[CLS] wa [SEP] [SEP]"]
    assert [row.tolist() for row in rows.ids[:3]] == [kinds.ids(text) for text in expected]
    assert rows.first_lengths[:3].tolist() == [3, 3, 3]
    np.testing.assert_array_equal(rows.row_arrays["targets"][1], [1, 0, np.nan])
    # A query that fills a row leaves the text as many tokens as it keeps itself.
    (long,) = kind.rows([candidates(1, query="wa " * 60, text="wb " * 60)]).ids[:1]
    assert len(long) == 40 and (long == kinds.ids("wb")[0]).sum() == 18


def test_unlabelled_lists_have_a_row_for_each_text():
    """A batch of a prediction is of single rows: a list of any length needs no larger one."""
    kind = Rank(task(), (), kinds.TOKENIZER)
    kind.rows([candidates(0, 0, 2)])  # a longer, labelled list
    lists = [dataclasses.replace(candidates(*[0] * n), scores=None) for n in (1, 200, 2)]
    rows = kind.rows(lists)
    assert (len(rows.ids), rows.rows_per_example) == (203, 1)
    outputs = [np.array([value], np.float32) for value in range(203)]
    ranked = [[x["index"] for x in y["ranking"]] for y in kind.answers(outputs, rows, lists)]
    assert ranked == [[0], [*range(199, -1, -1)], [1, 0]]


def test_scores_equal_those_of_trec_eval():
    """`make_rank_scores.py` has the rankings; texts that are no candidates count as missed."""
    for case in json.loads(pathlib.Path(__file__).with_name("rank.json").read_text()):
        kind = Rank(task(score="map"), (), kinds.TOKENIZER)
        examples, outputs = [], []
        for query in case["queries"]:
            example = candidates(*query["grades"])
            examples.append(dataclasses.replace(example, missed=tuple(query["missed"])))
        width = max(len(query["grades"]) for query in case["queries"])
        for query in case["queries"]:
            padded = query["outputs"] + [99.0] * (width - len(query["outputs"]))
            outputs += [np.array([value], np.float32) for value in padded]
        found = kind.scores(outputs, kind.rows(examples), examples)
        assert found == pytest.approx(case["scores"], abs=1e-12)


def test_a_model_that_gives_all_texts_one_output_scores_worst():
    kind, example = Rank(task(), (), kinds.TOKENIZER), candidates(1, 0, 0)
    outputs = [np.zeros(1, np.float32)] * 3
    assert kind.scores(outputs, kind.rows([example]), [example])["mrr@10"] == 1 / 3


REFUSED = {
    "an empty query": {"query": " "},
    "no texts": {"docs": [], "labels": []},
    "a text instead of a list": {"docs": "wa"},
    "lists of unequal lengths": {"labels": [1]},
    "a blank text": {"docs": ["wa", ""]},
    "a score that is not a number": {"labels": [1, float("nan")]},
    "a score as a boolean": {"labels": [1, True]},
    "one text for list_net": {"docs": ["wa"], "labels": [1]},
}


@pytest.mark.parametrize("fields", REFUSED.values(), ids=REFUSED)
def test_bad_examples_are_refused_by_file_and_line(fields, tmp_path):
    good = {"query": "wa", "docs": ["wa", "wb"], "labels": [1, 0]}
    file = tmp_path / "x.jsonl"
    file.write_text(f"{json.dumps(good)}\n{json.dumps(good | fields)}\n")
    with pytest.raises(InputError, match=r"x\.jsonl:2: "):
        examples_lib.read(task(), (f"jsonl:{file}",), "labelled")


def test_a_grade_above_one_is_no_probability(tmp_path):
    (tmp_path / "x").write_text('{"query": "wa", "docs": ["wa"], "labels": [2]}\n')
    source = (f"jsonl:{tmp_path / 'x'}",)
    assert examples_lib.read(task("mse"), source, "labelled")
    with pytest.raises(InputError, match=r"x:1: .*ranking_loss"):
        examples_lib.read(task("binary_cross_entropy"), source, "labelled")


@pytest.mark.long
@pytest.mark.parametrize("loss", ["list_net", "mse"])
def test_lists_are_learned_alike_on_four_devices(loss):
    """Texts of one query must meet on one device; lists of different lengths count as one batch."""
    rng = np.random.default_rng(0)
    lists = [candidates(*rng.uniform(0, 1, 2 + i % 3)) for i in range(6)]
    rows = Rank(task(loss), (), kinds.TOKENIZER).rows(lists)
    found = train(objective(loss), rows, Parallelism(accumulation=2))
    expected = train(objective(loss), rows, devices=1)
    for state in (found[0], expected[0]):
        # list_net adds it to all texts alike, so that its gradient is rounding.
        state["params"]["head"].pop("bias", None)
    assert_same(found, expected)


# --- runs -----------------------------------------------------------------------------------------


def write_lists(path, count):
    """Lists of two to four texts, of which those with the query's word are relevant."""
    lines = []
    for i in range(count):
        query, others = tuned.GOOD[i % 4], tuned.BAD
        docs = [f"{others[(i + j) % 4]} {others[j]}" for j in range(1 + i % 3)] + [f"{query} wb"]
        docs = docs[i % 2 :] + docs[: i % 2]
        labels = [float(query in doc.split()) for doc in docs]
        lines.append(json.dumps({"query": query, "docs": docs, "labels": labels}) + "\n")
    pathlib.Path(path).write_text("".join(lines))


FIELDS = "".join(f'{name}="{value}", ' for name, value in COLUMNS.items())


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run that has learned to find the query's word, in the current folder."""
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    write_lists("train", 32)
    write_lists("test", 9)
    text = tuned.FILE.format(kind="rank", source="jsonl:", how="full", epochs=6, fields=FIELDS)
    pathlib.Path("task.py").write_text(text.replace("5e-2", "1e-2"))
    return tuned.finetune()


@pytest.mark.long
def test_a_run_ranks_better_than_before_and_sorts_texts(run):
    first, *_, last = [line for line in tuned.lines("run/metrics.jsonl") if "ndcg@10" in line]
    assert last["ndcg@10"] > 0.9 and last["loss"] < first["loss"]
    (answer,) = tuned.predict("wa", "xa xb", "wa wb", "xc")
    assert answer["query"] == "wa"
    ranking = answer["ranking"]
    assert [text["index"] for text in ranking] == [
        ["xa xb", "wa wb", "xc"].index(text["text"]) for text in ranking
    ]
    scores = [text["score"] for text in ranking]
    assert scores == sorted(scores, reverse=True) and 0 <= scores[-1] <= scores[0] <= 1
    tuned_model = bert_jax.load("run")
    assert tuned_model.predict([["wa", "xa xb", "wa wb", "xc"], ["wb", "xa"]])[0] == answer | {
        "ranking": [text | {"score": pytest.approx(text["score"], rel=1e-6)} for text in ranking]
    }
    typed = tuned.predict(stdin=b"wa\txa xb\twa wb\txc\n")
    assert typed == [answer]
    (score,) = tuned.predict("--score")
    assert score["ndcg@10"] == pytest.approx(last["ndcg@10"])
    assert "padding" in broken.said("show --workdir run --rows 16")  # of short lists
    broken.said("predict --workdir run --input jsonl:test --out copy.jsonl")
    copied, source = tuned.lines("copy.jsonl"), tuned.lines("test")
    assert [{n: v for n, v in line.items() if n != "predicted"} for line in copied] == source
    assert len(copied[0]["predicted"]) == len(source[0]["docs"])


def write_beir(folder):
    """Queries of one word, whose text has it; one text has the id of a query."""
    (folder / "qrels").mkdir(parents=True)
    texts = [f"{a} {b}" for a in tuned.GOOD for b in tuned.BAD[:2]]
    corpus = [{"_id": f"t{i}", "text": text} for i, text in enumerate(texts)]
    corpus.append({"_id": "q0", "text": "wa wa"})
    queries = [{"_id": f"q{i}", "text": word} for i, word in enumerate(tuned.GOOD)]
    for name, records in (("corpus", corpus), ("queries", queries)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    lines = "".join(f"q{i}\tt{2 * i + 1}\t{1 + i}\n" for i in range(4))
    (folder / "qrels" / "test.tsv").write_text("query\ttext\tscore\n" + lines)


def test_a_beir_folder_gives_what_bm25_finds(tmp_path, monkeypatch):
    """Texts with equal scores are in the order of trec_eval, as for the scores of BM25 itself."""
    write_beir(tmp_path)
    monkeypatch.setattr(rank, "_CANDIDATES", 2)
    source = f"beir:{tmp_path}:test"
    read = Task(kind="rank", train=("jsonl:x",), validation=(source,), second_column="docs")
    examples = examples_lib.read(read, (source,), "labelled")
    assert [x.candidates for x in examples[:2]] == [("wa xb", "wa xa"), ("wb xb", "wb xa")]
    assert examples[3].scores == (4.0, 0.0) and examples[3].missed == ()
    kind = Rank(read, (), kinds.TOKENIZER)
    assert kind.baseline(examples) == ("BM25", 1.0)
    passages = retrieval.read(str(tmp_path), "test")
    assert retrieval.bm25_scores(passages)["ndcg@10"] == 1.0
    monkeypatch.setattr(rank, "_CANDIDATES", 1)
    (tmp_path / "qrels/test.tsv").write_text("query\ttext\tscore\nq0\tt0\t3\nq0\tt1\t1\n")
    (example,) = examples_lib.read(read, (source,), "labelled")
    assert (example.scores, example.missed) == ((1.0,), (3.0,))
    assert kind.rows([example]).row_arrays["targets"].tolist() == [[1.0]]


@pytest.mark.long
def test_a_run_is_scored_on_a_beir_folder_beside_bm25(run):
    write_beir(pathlib.Path("beir"))
    (scores,) = tuned.predict("--score", "--source", "beir:beir:test")
    assert scores["examples"] == 4 and 0 < scores["ndcg@10"] <= 1
    text = pathlib.Path("task.py").read_text().replace('("jsonl:test",)', '("beir:beir:test",)')
    pathlib.Path("task.py").write_text(text)
    assert "; BM25: ndcg@10 1.0000" in tuned.finetune("--workdir", "other")


@pytest.mark.long
def test_a_search_is_sorted_again_by_a_run(run):
    pathlib.Path("texts.txt").write_text("xa xb\n\nwa wb\nxc\nxa wa\n")
    command = "search texts.txt --workdir base --top 2 --rerank run"
    lines = broken.said(command, "wa").splitlines()
    (answer,) = tuned.predict("wa", "xa xb", "wa wb", "xc", "xa wa")
    first = answer["ranking"][:2]
    assert [line.split(": ")[1] for line in lines[-2:]] == [text["text"] for text in first]
    assert [float(line.split()[0]) for line in lines[-2:]] == pytest.approx(
        [text["score"] for text in first], abs=1e-3
    )
    pathlib.Path("queries").write_text("wa\nxb\n")
    broken.said(command, "--queries", "queries", "--out", "out.jsonl")
    found = tuned.lines("out.jsonl")
    assert [hit["text"] for hit in found[0]["nearest"]] == [text["text"] for text in first]
    assert len(found[1]["nearest"]) == 2
    broken.said(command.replace("--top 2", "--top 1 --candidates 1"), "wa")
    pathlib.Path("one").write_text("wa wb\n")
    for query in ("", "wa " * 500):  # no words, and more tokens than both models read
        code, printed, errors = broken.asked(command.replace("texts.txt", "one"), query)
        assert (code, printed.splitlines()[-1].split(": ")[1]) == (0, "wa wb")
        assert ("truncated to 64 tokens: 1 of the queries" in errors) == bool(query)
    broken.fails(["predict", "--workdir", "run", "", "wa wb"], "text 1")
    broken.fails("search texts.txt --workdir base --rerank base wa", "--rerank base")


@pytest.mark.long
def test_an_export_says_what_a_cross_encoder_applies(run):
    for loss, end in (("binary_cross_entropy", "Sigmoid"), ("list_net", "Identity")):
        text = pathlib.Path("task.py").read_text()
        pathlib.Path("task.py").write_text(text.replace(FIELDS, f"{FIELDS}ranking_loss={loss!r},"))
        tuned.finetune("--workdir", loss, "--set", "epochs=0.1")
        pathlib.Path("task.py").write_text(text)
        broken.said(f"export --workdir {loss} --out {loss}-folder")
        fields = json.loads(pathlib.Path(f"{loss}-folder/config.json").read_text())
        assert fields["sentence_transformers"]["activation_fn"].endswith(f".{end}")
        assert list(fields["id2label"]) == ["0"]
        assert "CrossEncoder" in pathlib.Path(f"{loss}-folder/README.md").read_text()
