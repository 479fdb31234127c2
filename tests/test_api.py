"""What a notebook calls: a model is loaded from anywhere and asked; batches and runs by value."""

import contextlib
import dataclasses
import itertools
import pathlib
import subprocess
import sys

import jax
import kinds
import numpy as np
import pytest
from compare import assert_identical
from etils import epath

import bert_jax
from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import TextVectors
from bert_jax.errors import InputError
from bert_jax.interop import huggingface
from bert_jax.model import heads, layers
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.storage.mirror import open_workdir


@pytest.fixture(scope="module")
def model(finished_run):
    """What the library returns when it goes on with a finished run."""
    with contextlib.chdir(finished_run):
        return bert_jax.pretrain("small.py", "run")


@pytest.fixture(autouse=True)
def here(finished_run, monkeypatch):
    monkeypatch.chdir(finished_run)


def test_the_package_offers_them_and_loads_jax_only_then():
    code = (
        "import sys, bert_jax; assert {'load', 'batches', 'pretrain'} <= set(dir(bert_jax));"
        "assert 'jax' not in sys.modules; bert_jax.load; assert 'jax' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="train_bert"):
        _ = bert_jax.train_bert


@pytest.mark.long
def test_a_run_a_base_and_a_folder_of_transformers_give_the_same(model, tmp_path):
    folder = tmp_path / "theirs"
    huggingface.write_folder(
        LoadedModel.of(open_workdir("run")), "pretraining", "float32", epath.Path(folder)
    )
    theirs = bert_jax.load(folder)
    ours = bert_jax.load("run")
    assert (ours.step, theirs.step) == (model.step, 0) == (22, 0)
    assert repr(ours).startswith("<bert_jax model small, step 22, ")
    text = "wa wb [MASK] xc ."
    for one in (ours, theirs):
        assert one.tokenize(text) == ["wa", "wb", "[MASK]", "xc", "."]
        np.testing.assert_allclose(one.embed([text]), model.embed([text]), rtol=1e-6)
        pairs = zip(one.fill(text).masks[0], model.fill(text).masks[0], strict=True)
        for (piece, share), (other, its) in pairs:
            assert piece == other and share == pytest.approx(its, rel=1e-5)


def test_hidden_states_are_those_that_embed_pools(model):
    texts = ["wa wb wc", "xa wd we wf wg wh wi wj"]
    hidden = model.layer_outputs(texts, layers=(0, -1))
    assert [h.shape for h in hidden] == [(2, 5, 16), (2, 10, 16)]
    means = np.stack([h[-1].mean(axis=0) for h in hidden])
    np.testing.assert_allclose(model.embed(texts), means, rtol=2e-5, atol=1e-6)
    assert model.embed([]).shape == (0, 16)


def test_attention_leads_from_one_layer_to_the_next(model):
    """The layer's own arithmetic in NumPy, from its input and the probabilities to its output."""
    text = "wa wb wc xd"
    pieces, maps = model.attention(text)
    assert pieces == ["[CLS]", "wa", "wb", "wc", "xd", "[SEP]"] and maps.shape == (1, 2, 6, 6)
    np.testing.assert_allclose(maps.sum(axis=-1), 1, rtol=1e-6)
    before, after = model.layer_outputs(text, layers=(0, 1))[0].astype(np.float64)
    layer = jax.tree.map(lambda leaf: np.float64(leaf[0]), model.params["encoder"]["layers"])

    def dense(name, x):
        return x @ layer[name]["kernel"] + layer[name]["bias"]

    def norm(name, x):
        centred = x - x.mean(-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-12)
        return scaled * layer[name]["scale"] + layer[name]["bias"]

    value = dense("value", before).reshape(6, 2, 8)
    context = np.einsum("hqk,khd->qhd", maps[0], value).reshape(6, 16)
    x = norm("attention_layer_norm", before + dense("attention_output", context))
    inner = np.asarray(layers.activation("gelu", dense("intermediate", x)), np.float64)
    np.testing.assert_allclose(
        norm("output_layer_norm", x + dense("output", inner)), after, atol=1e-5
    )


def test_batches_are_those_of_the_run_and_apply_computes_its_loss(model):
    experiment = config.load("small.py")
    batch = bert_jax.batches(experiment, 15, "run")
    theirs = PreparedCorpus.open(epath.Path("corpus")).train_batches(experiment, 1)
    for name, array in theirs.batch(1, np.arange(4)).items():
        np.testing.assert_array_equal(batch[name], array)
    masked_lm, next_sentence = model.apply(model.params, batch)
    expected = heads.pretraining_logits(model.model, model.params, batch, None, heads.Loop())
    np.testing.assert_allclose(masked_lm, expected[0], atol=1e-5)
    np.testing.assert_allclose(next_sentence, expected[1], atol=1e-5)
    with pytest.raises(InputError, match="step 22: the run has steps 0 to 21"):
        bert_jax.batches("small.py", 22, "run")


def test_a_list_of_texts_is_filled_text_by_text(model):
    texts, seconds = ["wa [MASK]", "xb"], ["wb", "[MASK] xd ."]
    assert model.fill(texts) == [model.fill(text) for text in texts]
    pairs = zip(texts, seconds, strict=True)
    assert model.fill(texts, seconds, top=2) == [model.fill(a, b, 2) for a, b in pairs]
    assert model.fill([]) == []


def test_what_cannot_be_asked_is_named(model, tmp_path):
    for call, words in (
        (lambda: model.fill(["wa", None]), r"text\[1\]: None"),
        (lambda: model.fill(None), "text: None"),
        (lambda: model.fill(["wa"], ["wb", "wc"]), "next_text: 2 texts"),
        (lambda: model.fill("wa", 3), "next_text: 3"),
        (lambda: model.embed(["wa", None]), r"texts\[1\]: None"),
        (lambda: model.embed(7), "texts: 7"),
        (lambda: model.layer_outputs(["wa", b"wb"]), r"texts\[1\]: b'wb'"),
        (lambda: model.tokenize(["wa"]), "text: "),
        (lambda: model.attention(None), "text: None"),
        (lambda: model.layer_outputs("wa", layers=(2,)), "--layers 2"),
        (lambda: model.layer_outputs("wa " * 40), "42 tokens; the model reads 32"),
        (lambda: bert_jax.load(tmp_path), "no run here"),
        (lambda: bert_jax.load("run", checkpoint="3"), "3"),
        (lambda: bert_jax.pretrain(tmp_path / "none.py"), "no such experiment file"),
    ):
        with pytest.raises(InputError, match=words):
            call()


def test_predict_and_embed_take_generators_and_give_what_the_methods_give(model):
    texts = ["wa [MASK]", "xb [MASK] xd ."]
    answers = bert_jax.predict(model, (text for text in texts))
    assert [answer["masks"] for answer in answers] == [p.masks for p in model.fill(texts)]
    assert bert_jax.predict(model, texts[0]) == answers[:1]
    (pair,) = bert_jax.predict("run", [("wa wb", "xc xd")])
    assert pair == {"masks": [], "is_next": model.fill("wa wb", "xc xd").is_next}
    vectors = bert_jax.embed(model, (text for text in texts), normalize=True)
    np.testing.assert_array_equal(vectors, model.embed(texts, normalize=True))
    for call, words in (
        (lambda: bert_jax.predict(model, ["wa", None]), r"texts\[1\]: None"),
        (lambda: bert_jax.predict(model, [("wa", 3)]), r"texts\[0\]\[1\]: 3"),
        (lambda: bert_jax.predict(model, [("wa", "wb", "wc")]), r"texts\[0\]: has 3"),
        (lambda: bert_jax.pretrain("small.py", "run", "seed=1"), "settings: 'seed=1' is one text"),
        (lambda: bert_jax.load("run", base="run"), "base: run is not a fine-tuned run"),
        (lambda: bert_jax.import_weights("run", "new", keep=3), "keep: requires vocabulary"),
        (lambda: bert_jax.search(model, ["wa"], "wa", vectors="v"), "vectors: "),
        (lambda: bert_jax.search(model, ["wa"], "wa", top=0), "top: 0"),
        (lambda: bert_jax.search(model, ["wa"], "wa", top=-1), "top: -1"),
        (lambda: bert_jax.predict(model, None), "texts: None"),
        (lambda: bert_jax.embed(model, ["wa"], role="text"), "role: 'text'"),
        (lambda: bert_jax.embed(model, ["wa"], pooling="max"), "pooling: 'max'"),
        (lambda: bert_jax.export(model, "new", "masked_lm", "int8"), "dtype: 'int8'"),
        (lambda: bert_jax.export(model, "new", "onnx"), "'onnx'"),
    ):
        with pytest.raises(InputError, match=words):
            call()
    assert not pathlib.Path("new").exists()


def test_the_role_selects_the_prompt(model):
    prompted = dataclasses.replace(
        model, vectors=TextVectors(query_prefix="wa ", text_prefix="xa ")
    )
    for role, prefix in (("document", "xa "), ("query", "wa ")):
        vectors = bert_jax.embed(prompted, ["wb"], role)
        np.testing.assert_allclose(vectors, model.embed([f"{prefix}wb"]), rtol=1e-5)
    document = bert_jax.embed(prompted, ["wb"], "document", normalize=True)[0]
    query = bert_jax.embed(prompted, ["wb"], "query", normalize=True)[0]
    ((hit,),) = bert_jax.search(prompted, ["wb"], "wb")
    assert hit.score == pytest.approx(document @ query, abs=1e-5) and hit.score < 0.999


def test_evaluate_gives_the_metrics_of_the_last_line(model):
    scores = bert_jax.evaluate("run")
    assert scores["step"] == 22 and scores["loss"] == pytest.approx(model.evaluation["loss"])


def test_search_finds_the_same_in_a_file_and_in_a_list(model, tmp_path):
    texts = ["wa wb wc", "xa xb xc", "wa wb wd", "xd xe"]
    (tmp_path / "texts").write_text("\n".join(texts) + "\n")
    queries = ["wa wb wc", "xa xb"]
    found = bert_jax.search(model, texts, queries, top=2)
    kept = bert_jax.search(model, tmp_path / "texts", queries, top=2)
    assert [[(hit.line, hit.text) for hit in hits] for hits in found] == [
        [(hit.line, hit.text) for hit in hits] for hits in kept
    ]
    best = found[0][0]
    assert (best.line, best.text) == (1, texts[0]) and best.score == pytest.approx(1, abs=1e-5)
    assert len(bert_jax.search(model, texts, "wa", top=9)[0]) == 4
    assert bert_jax.search(model, [], ["wa"]) == [[]]


def test_an_export_is_imported_again(model, tmp_path):
    assert bert_jax.export(model, tmp_path / "out", "masked_lm") == "BertForMaskedLM"
    base = bert_jax.import_weights(tmp_path / "out", tmp_path / "base")
    np.testing.assert_allclose(base.embed(["wa wb"]), model.embed(["wa wb"]), rtol=1e-6)
    for call, words in (
        (lambda: bert_jax.export(model, tmp_path / "more"), "choose pretraining or masked_lm"),
        (lambda: bert_jax.export(model, tmp_path / "more", "task"), "is not fine-tuned"),
        (lambda: bert_jax.export(model, tmp_path / "out", "masked_lm"), "out"),
    ):
        with pytest.raises(InputError, match=words):
            call()
    assert not (tmp_path / "more").exists()


@pytest.mark.long
def test_a_fine_tuned_model_predicts_embeds_and_scores(model, tmp_path, capfd):
    rows = [
        (f"w{a} w{b}" if n % 2 else f"x{a} x{b}", "wx"[n % 2 == 0])
        for n, (a, b) in enumerate(itertools.product("abcd", "abcd"))
    ]
    (tmp_path / "train.tsv").write_text("".join(f"{text}\t{label}\n" for text, label in rows))
    task = config.Task(
        kind="classify",
        train=(f"tsv:{tmp_path}/train.tsv",),
        validation=(f"tsv:{tmp_path}/train.tsv",),
        header="none",
        text_column="0",
        label_column="1",
        max_sequence_length=32,
    )
    tuning = config.Finetuning(name="wx", task=task, epochs=2, batch_size=4)
    settings = ["optimizer.peak_learning_rate=3e-3", "seed=3"]
    tuned = bert_jax.finetune(tuning, "run", tmp_path / "tuned", settings, progress=True)
    captured = capfd.readouterr()
    assert captured.out == "" and "8/8" in captured.err
    answers = tuned.predict(text for text, _ in rows)
    assert tuned.labels == ("w", "x") and {answer["label"] for answer in answers} <= {"w", "x"}
    share = np.mean(
        [answer["label"] == label for answer, (_, label) in zip(answers, rows, strict=True)]
    )
    assert tuned.score()["accuracy"] == pytest.approx(share)
    assert tuned.score(task.validation[0]) == tuned.score(task.validation) == tuned.score()
    again = bert_jax.load(tmp_path / "tuned")
    assert isinstance(again, bert_jax.FinetunedModel) and again.step == tuned.step == 8
    assert bert_jax.predict(again, [rows[0][0]]) == answers[:1]
    assert bert_jax.evaluate(tmp_path / "tuned")["accuracy"] == pytest.approx(share)
    assert again.embed(["wa"]).shape == (1, 16)
    assert bert_jax.export(again, tmp_path / "out") == "BertForSequenceClassification"
    for call, words in (
        (lambda: again.fill("wa [MASK]"), "masked_lm head is untrained"),
        (lambda: again.predict([("wa", "wb")]), r"texts\[0\]: has 2 texts"),
        (lambda: again.predict(["wa", None]), r"texts\[1\]: None"),
    ):
        with pytest.raises(InputError, match=words):
            call()


@pytest.mark.long
def test_a_base_is_known_by_its_weights_and_by_the_moments_next_to_them(tmp_path):
    params = jax.device_get(heads.init_params(kinds.MODEL, jax.random.key(0)))
    for name, moments in (("bare", None), ("full", base_lib.Moments(5, params, params))):
        made = base_lib.Base(kinds.MODEL, params, kinds.TOKENIZER, moments=moments)
        base_lib.write(made, epath.Path(tmp_path / name))
    bare, full = (base_lib.read(epath.Path(tmp_path / name)) for name in ("bare", "full"))
    assert_identical(bare.params, params)
    assert_identical(full.moments.square, params)
    assert bare.sha256 != full.sha256 and bare.moments is None
