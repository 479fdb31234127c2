"""The layer against products by the inverse covariance (SciPy), and the command `whiten`."""

import json
import pathlib

import broken
import jax
import numpy as np
import pytest
import scipy.linalg
import sentences
from etils import epath

import bert_jax
from bert_jax.checkpoints import base as base_lib
from bert_jax.embeddings.whitening import whitening_layer

TEXTS = [f"{a} {b} {c}" for a in ("wa", "wb") for b in ("xa", "?", "wd") for c in ("xb", "wc wa")]


@pytest.fixture
def base(tmp_path, monkeypatch):
    """A base whose vectors have 16 numbers; texts.txt has texts."""
    monkeypatch.chdir(tmp_path)
    base_lib.write(sentences.base_of("mean", False, 0, "identity"), epath.Path("base"))
    pathlib.Path("texts.txt").write_text("\n".join(TEXTS) + "\n")
    return epath.Path("base")


def test_products_are_those_by_the_inverse_covariance():
    """With all components, f(x)·f(y) = (x - mean) C^-1 (y - mean) for the layer f (Mahalanobis).
    C is the covariance, whose trace / N is added to its diagonal."""
    rng = np.random.default_rng(0)
    mixing = rng.normal(size=(6, 6)) * [9, 5, 2, 1, 0.3, 0.1]
    vectors = rng.normal(size=(400, 6)) @ mixing + rng.normal(size=6)
    mean, covariance = vectors.mean(axis=0), np.cov(vectors, rowvar=False, bias=True)
    layer = whitening_layer(mean, covariance, 400, 6)
    new = vectors @ layer["kernel"] + layer["bias"]
    added = np.trace(covariance) / 400 * np.eye(6)
    centred = vectors - mean
    expected = centred @ scipy.linalg.solve(covariance + added, centred.T, assume_a="pos")
    np.testing.assert_allclose(new @ new.T, expected, rtol=1e-4, atol=1e-4)
    # The signs of components are chosen, so that all machines compute the same layer.
    largest = np.abs(layer["kernel"]).argmax(axis=0)
    assert (layer["kernel"][largest, np.arange(6)] > 0).all()
    narrow = whitening_layer(mean, covariance, 400, 2)
    for name, values in narrow.items():
        np.testing.assert_array_equal(values, layer[name][..., :2])


def test_a_whitened_base_is_made_used_and_exported(base):
    said = broken.said("whiten texts.txt --workdir base --out new --dimensions 3")
    assert said == "new: a base with whitened vectors of 3 numbers, from 12 texts\n"
    old, new = (bert_jax.load(folder) for folder in (base, "new"))
    pooled = old.embed(TEXTS, normalize=False).astype(np.float64)
    mean, covariance = pooled.mean(axis=0), np.cov(pooled, rowvar=False, bias=True)
    layer = whitening_layer(mean, covariance, len(TEXTS), 3)
    expected = pooled @ layer["kernel"] + layer["bias"]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(new.embed(TEXTS), expected, atol=2e-4)
    assert new.source == "base, step 0, whitened with 12 texts"
    for path, leaf in base_lib.flatten(old.params).items():
        np.testing.assert_array_equal(base_lib.flatten(new.params)[path], jax.device_get(leaf))
    again = bert_jax.whiten(old, TEXTS, "again", 3)
    np.testing.assert_array_equal(again.params["dense"]["kernel"], new.params["dense"]["kernel"])
    broken.said("export --workdir new --as encoder --out out")
    modules = [
        module["path"] for module in json.loads(pathlib.Path("out/modules.json").read_text())
    ]
    assert modules[-2:] == ["2_Dense", "3_Normalize"]


@pytest.mark.parametrize(
    ("words", "text", "message"),
    [
        (
            "",
            "wa\n" * 9,
            "9 texts: the vectors are all equal; give texts that differ",
        ),
        ("", "wa\n", "1 text: the vectors are all equal"),
        ("", "", "0 texts: the vectors are all equal"),
        (
            "--dimensions 17",
            "wa\nwb\n",
            "dimensions: 17 must be from 0 to 16, the model's hidden size",
        ),
        ("--dimensions -1", "wa\nwb\n", "--dimensions: -1 must be at least 0"),
        ("--workdir dense", "wa\nwb\n", "dense, step 0: has a Dense layer already"),
    ],
)
def test_what_cannot_be_whitened_is_named(words, text, message, base):
    base_lib.write(sentences.base_of("mean", False, 6, "tanh"), epath.Path("dense"))
    pathlib.Path("texts.txt").write_text(text)
    broken.fails(f"whiten texts.txt --workdir base --out new {words}", message)
    assert not pathlib.Path("new").exists()


def test_truncated_texts_are_reported(base):
    pathlib.Path("texts.txt").write_text("wa wb\n" + "xa " * 30 + "\n")
    said = broken.said("whiten texts.txt --workdir base --out new")
    assert said.splitlines()[1:] == ["truncated to 12 tokens: 1 of 2 texts"]


def test_nothing_is_overwritten(base):
    before = (base / "params.safetensors").read_bytes()
    broken.fails("whiten texts.txt --workdir base --out base", "base: is there already")
    assert (base / "params.safetensors").read_bytes() == before
