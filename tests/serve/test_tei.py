"""The paths that clients of Text Embeddings Inference (TEI) use, asked through sockets.

Fields, defaults and answers are those of router/src/http/types.rs in TEI 1.9.
"""

import dataclasses
import json
import pathlib

import numpy as np
import pytest
import samples
import tuned
from test_serve import ask, is_error, running

from bert_jax.checkpoints.base import TextVectors
from bert_jax.embeddings import embed
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.serve import endpoints, tei
from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks.finetuned_model import TaskModel

TEXTS = ["wa wb", "", "xa " * 90]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tei") / "base"
    tuned.write_base(folder)
    return LoadedModel.of(open_workdir(folder))


def embedder_of(trained, **options):
    vectors = TextVectors(query_prefix="wa ", text_prefix="xb ", **options)
    model = dataclasses.replace(trained, vectors=vectors)
    return embed.Embedder(model, embed.VectorOptions(), samples.mesh_of(1))


@pytest.fixture(scope="module")
def embedder(trained):
    return embedder_of(trained)


@pytest.fixture(scope="module")
def port(embedder):
    with running(endpoints.EmbedEndpoint("base", embedder)) as port:
        yield port


@pytest.fixture(scope="module")
def sparse_embedder(trained):
    return embedder_of(trained, form="sparse")


@pytest.fixture(scope="module")
def sparse_port(sparse_embedder):
    with running(tei.SparseEndpoint("base", sparse_embedder)) as port:
        yield port


def test_embed_answers_with_vectors_of_length_one_unless_asked(port, embedder):
    roles = {None: "prompted", "query": "query", "document": "document"}  # None adds no prompt
    for name, role in roles.items():
        (part,) = embedder.embed(TEXTS, role)
        for normalize in (True, False):
            body = {"inputs": TEXTS, "normalize": normalize, "prompt_name": name}
            status, headers, found = ask(port, body | {"truncate": True}, "/embed")
            assert (status, headers["content-type"]) == (200, "application/json")
            lengths = np.linalg.norm(part.vectors, axis=1, keepdims=True) if normalize else 1
            np.testing.assert_allclose(found, part.vectors / lengths, rtol=1e-6, atol=1e-7)
    status, _, (found,) = ask(port, {"inputs": TEXTS[0], "dimensions": 5}, "/embed/")
    assert status == 200 and len(found) == 5
    assert np.linalg.norm(found) == pytest.approx(1)
    assert ask(port, {"input": TEXTS}, "/v1/embeddings")[0] == 200


def test_embed_sparse_lists_weights_that_are_not_0(sparse_port, sparse_embedder):
    for name, role in ((None, "prompted"), ("query", "query")):
        (part,) = sparse_embedder.embed(TEXTS, role)
        body = {"inputs": TEXTS, "prompt_name": name}
        status, _, found = ask(sparse_port, body, "/embed_sparse")
        assert status == 200 and len(found) == 3
        expected = part.vectors.toarray()
        for pairs, row in zip(found, expected, strict=True):
            assert [pair["index"] for pair in pairs] == np.flatnonzero(row).tolist()
            np.testing.assert_allclose([pair["value"] for pair in pairs], row[row > 0], rtol=1e-6)
    assert len(ask(sparse_port, {"inputs": "wa"}, "/embed_sparse")[2]) == 1


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 400, "inputs"),
        ({"inputs": []}, 400, "inputs"),
        ({"inputs": [1, 2]}, 400, "inputs"),
        ({"inputs": ["wa"] * 2049}, 413, "inputs"),
        ({"inputs": "wa", "prompt_name": "ask"}, 400, "prompt_name"),
        ({"inputs": "wa", "dimensions": 17}, 400, "dimensions"),
        ({"inputs": "wa", "truncation_direction": "Left"}, 400, "truncation_direction"),
    ],
)
def test_what_embed_cannot_do_is_an_error_of_the_request(body, status, param, port, sparse_port):
    assert is_error(ask(port, body, "/embed"), status)["param"] == param
    if param != "dimensions":  # the format of sparse vectors has none
        assert is_error(ask(sparse_port, body, "/embed_sparse"), status)["param"] == param
    assert "/embed" in is_error(ask(port, body, "/rerank"), 404)["message"]


def test_vectors_of_length_one_cannot_be_given_as_they_were(trained):
    with running(endpoints.EmbedEndpoint("unit", embedder_of(trained, normalize=True))) as port:
        assert ask(port, {"inputs": "wa"}, "/embed")[0] == 200
        answer = ask(port, {"inputs": "wa", "normalize": False}, "/embed")
        assert is_error(answer, 400)["param"] == "normalize"


@pytest.mark.long
@pytest.mark.parametrize("loss", ["binary_cross_entropy", "list_net"])
def test_rerank_sorts_texts_by_the_score_of_the_run(loss, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    lists = [
        {"query": good, "docs": [f"{good} {bad}", bad], "labels": [1, 0]}
        for good, bad in zip(tuned.GOOD, tuned.BAD, strict=True)
    ]
    for name in ("train", "test"):
        pathlib.Path(name).write_text("".join(json.dumps(line) + "\n" for line in lists))
    fields = 'text_column="query", second_column="docs", label_column="labels",'
    fields += f'ranking_loss="{loss}",'
    text = tuned.FILE.format(kind="rank", source="jsonl:", how="full", epochs=1, fields=fields)
    pathlib.Path("task.py").write_text(text)
    tuned.finetune()
    model, texts = TaskModel(open_workdir("run")), ["xa xb", "wa wb", "wa " * 90]
    (answer,) = tuned.predict("wa", *texts)
    order, given = ([text[key] for text in answer["ranking"]] for key in ("index", "score"))
    if loss == "binary_cross_entropy":
        probabilities, outputs = given, [np.log(p / (1 - p)) for p in given]
    else:
        probabilities, outputs = [1 / (1 + np.exp(-x)) for x in given], given
    with running(endpoints.PredictEndpoint(model)) as port:
        body = {"query": "wa", "texts": texts}
        status, _, found = ask(port, body, "/rerank")
        assert status == 200 and [set(rank) for rank in found] == [{"index", "score"}] * 3
        assert [rank["index"] for rank in found] == order
        scores = [rank["score"] for rank in found]
        np.testing.assert_allclose(scores, probabilities, rtol=1e-4)
        _, _, found = ask(port, body | {"raw_scores": True, "return_text": True}, "/rerank")
        assert [rank["text"] for rank in found] == [texts[i] for i in order]
        np.testing.assert_allclose([rank["score"] for rank in found], outputs, rtol=1e-4, atol=1e-5)
        assert len(ask(port, body | {"texts": texts[:1]}, "/rerank")[2]) == 1
        for wrong, param in (
            ({"query": ""}, "texts"),
            ({"query": 1}, "query"),
            ({"texts": []}, "texts"),
            ({"texts": ["wa"] * 3000}, "texts"),
        ):
            status = 413 if len(str(wrong)) > 999 else 400
            assert is_error(ask(port, body | wrong, "/rerank"), status)["param"] == param
        answer = ask(port, {"inputs": ["wa", "xb"]}, "/predict")  # scores, not labels
        assert is_error(answer, 400)["param"] == "input"


@pytest.mark.long
def test_predict_lists_labels_the_most_probable_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    tuned.write_task(tmp_path, "classify")
    tuned.finetune()
    answers = tuned.predict("wa wb"), tuned.predict("xa xb")
    with running(endpoints.PredictEndpoint(TaskModel(open_workdir("run")))) as port:
        status, _, labels = ask(port, {"inputs": "wa wb"}, "/predict")
        assert status == 200
        _, _, batch = ask(port, {"inputs": [["wa wb"], ["xa xb"]]}, "/predict")
        for found, (answer,) in zip((labels, *batch), (answers[0], *answers), strict=True):
            expected = answer["probabilities"]
            assert [pair["label"] for pair in found] == sorted(expected, key=lambda x: -expected[x])
            for pair in found:
                assert pair["score"] == pytest.approx(expected[pair["label"]], rel=1e-4)
        for wrong in ({"inputs": ["wa", "wb"]}, {"inputs": []}, {"inputs": [["wa"], 1]}):
            assert is_error(ask(port, wrong, "/predict"), 400)["param"] == "inputs"
        wrong = {"inputs": "wa", "raw_scores": True}
        assert is_error(ask(port, wrong, "/predict"), 400)["param"] == "raw_scores"
