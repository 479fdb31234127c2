"""What each layer knows: scores against NumPy, the page, and what is refused."""

import json
import pathlib
import re

import broken
import numpy as np
import pytest
import samples
import tuned
from scipy import stats

import bert_jax
from bert_jax import config
from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Parallelism
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks import probes
from bert_jax.tasks.adaptation import ModelRunner
from bert_jax.tasks.examples import Sentence
from bert_jax.tasks.rows import eval_batches
from bert_jax.tasks.task_kind import make_kind
from bert_jax.tools import layer_scores

NAMES = ("classify", "regress", "tag")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A base, and tasks of some kinds; texts of the first have one, two or three words."""
    here = tmp_path_factory.mktemp("layers")
    tuned.write_base(here / "base")
    for name in (*NAMES, "generate"):
        (here / name).mkdir()
        tuned.write_task(here / name, name)
        text = (here / name / "task.py").read_text().replace("small", name)
        text = text.replace("jsonl:t", f"jsonl:{here / name}/t")
        (here / f"{name}.py").write_text(text)
    for part in ("train", "test"):
        path = here / "classify" / part
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for number, row in enumerate(rows):
            row["sentence"] = " ".join(row["sentence"].split()[:1] * (1 + number % 3))
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return here


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.fixture(scope="module")
def asked(folder):
    files = [str(folder / f"{name}.py") for name in NAMES]
    done: list[str] = []
    trained = LoadedModel.of(open_workdir(folder / "base"))
    known = layer_scores.score_layers(files, trained, done.append)
    assert len(done) == 4
    return {one["name"]: one for one in known["tasks"]}


def rows(folder, name, part):
    return [json.loads(line) for line in (folder / name / part).read_text().splitlines()]


@pytest.mark.long
def test_tasks_are_read_off_every_layer_as_numpy_would(folder, asked):
    """Solved again by ridge regression on what the library gives of one text at a time."""
    assert list(asked) == ["length", *NAMES]
    model = bert_jax.load(str(folder / "base"))
    labels, hidden = {}, {}
    for part in ("train", "test"):
        there = rows(folder, "classify", part)
        labels[part] = np.array([row["label"] == "good" for row in there]).astype(int)
        texts = [row["sentence"] for row in there]
        hidden[part] = model.layer_outputs(texts, layers=(0, 1))
    # What is read of rows of several lengths, padded together.
    reader = ModelRunner(model.model, model.tokenizer, Parallelism(), samples.mesh_of(1), 8)
    task = config.load(str(folder / "classify.py"), config.Finetuning).task
    texts = [Sentence("", (row["sentence"],), None) for row in there]
    made = make_kind(task, ("bad", "good"), model.tokenizer).rows(texts)
    ((which, batch), *_) = eval_batches(made, model.tokenizer.pad_id, 8)
    read = np.asarray(probes.jit_features(reader, "pooled", "all")(model.params, None, batch))
    expected = [hidden["test"][i] for i in which]
    expected = [np.concatenate([x[:, 0], x.mean(1)], axis=1).ravel() for x in expected]
    np.testing.assert_allclose(read, expected, atol=1e-5)
    for layer in (0, 1):
        inputs = {
            part: np.stack([np.concatenate([x[layer, 0], x[layer].mean(0)]) for x in values])
            for part, values in hidden.items()
        }
        weights, bias = probes.ridge(inputs["train"], labels["train"], 2)
        right = (inputs["test"] @ weights + bias).argmax(1) == labels["test"]
        assert asked["classify"]["scores"][layer] == pytest.approx(right.mean(), abs=1e-6)


@pytest.mark.long
def test_a_similarity_is_the_cosine_of_means(folder, asked):
    model = bert_jax.load(str(folder / "base"))
    there = rows(folder, "regress", "test")
    truth = [row["value"] for row in there]
    for layer in (0, 1):
        sides = [
            [x[0].mean(0) for x in model.layer_outputs([row[name] for row in there], (layer,))]
            for name in ("sentence", "b")
        ]
        cosines = [
            a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(*sides, strict=True)
        ]
        expected = stats.spearmanr(truth, cosines).statistic
        assert asked["regress"]["scores"][layer] == pytest.approx(expected, abs=1e-6)
    assert asked["regress"]["guess"] == 0


def test_a_similarity_is_of_means_whatever_its_base_pools(folder, asked):
    trained = LoadedModel.of(open_workdir(folder / "base"))
    trained.vectors = TextVectors("cls")
    there = rows(folder, "regress", "test")
    pairs = [Sentence("", (row["sentence"], row["b"]), row["value"]) for row in there]
    found = layer_scores._similarity("spearman", pairs, trained)
    assert found == pytest.approx(asked["regress"]["scores"], abs=1e-6)


def test_the_length_of_texts_is_asked_in_bins(asked):
    """One, two or three words; who counts none says the commonest."""
    assert asked["length"]["guess"] == pytest.approx(4 / 11)
    assert max(asked["length"]["scores"]) > 0.8


def test_the_centre_counts_what_each_layer_adds():
    known = layer_scores.layer_record("x", "accuracy", 0.5, (0.4, 0.6, 0.6, 0.9, 0.8))
    assert known["best"] == 3
    assert known["centre"] == pytest.approx((1 * 0.2 + 3 * 0.3) / 0.5)
    assert layer_scores.layer_record("x", "accuracy", 0.5, (0.4, 0.4, 0.3))["centre"] == 0


@pytest.mark.long
def test_the_command_prints_a_table_and_writes_a_page(here):
    words = "layers --workdir base --tasks classify.py regress.py --attention 'wa xb'"
    out = [x for x in broken.said(words).splitlines() if not x.startswith("layers: ")]
    assert out[0].split() == ["task", "score", "0", "1", "guess", "best", "centre"]
    assert [line.split()[0] for line in out[1:]] == ["length", "classify", "regress"]
    page = pathlib.Path("base/layers.html").read_text()
    assert "What each layer knows" in page and "Attention of each head" in page
    assert "<span>[CLS]</span><span>wa</span><span>xb</span><span>[SEP]</span>" in page
    kept = json.loads(Workdir("base").layers.read_text())
    assert [one["name"] for one in kept["tasks"]] == ["length", "classify", "regress"]
    # Later a text alone: what was asked stays on the page.
    broken.said("layers --workdir base --attention xa")
    assert "What each layer knows" in pathlib.Path("base/layers.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--tasks generate.py", "--tasks: generate.py: task.kind=generate is not supported"),
        ("--tasks length.py", "--tasks: the name length is taken"),
        ("--tasks empty.py", "--tasks: "),
        ("--tasks constant.py", "--tasks: constant: all validation pairs have the same score"),
        ("--attention=", "--attention: a text is needed"),
        ("--tasks classify.py --attention=" + "xa," * 99, "--attention: text of"),
    ],
)
def test_what_cannot_be_asked_is_refused(here, words, message):
    text = pathlib.Path("classify.py").read_text()
    pathlib.Path("length.py").write_text(text.replace('"classify",\n', '"length",\n', 1))
    pathlib.Path("empty").write_text("")
    pathlib.Path("empty.py").write_text(re.sub('jsonl:[^"]*/train', "jsonl:empty", text))
    text = pathlib.Path("regress.py").read_text().replace('"regress",\n', '"constant",\n', 1)
    pathlib.Path("constant.py").write_text(re.sub('jsonl:[^"]*/test', "jsonl:constant", text))
    rows_ = [row | {"value": 1.0} for row in rows(pathlib.Path(), "regress", "test")]
    pathlib.Path("constant").write_text("".join(json.dumps(row) + "\n" for row in rows_))
    kept = Workdir("base").layers
    before = kept.read_bytes() if kept.exists() else None
    broken.fails(f"layers --workdir base {words}", message)
    assert (kept.read_bytes() if kept.exists() else None) == before
