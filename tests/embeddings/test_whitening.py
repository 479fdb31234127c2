"""Whitened vectors against Mahalanobis products by SciPy, and the command `whiten`."""

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
    """A folder with a base of 16 numbers for each vector, and a file with texts."""
    monkeypatch.chdir(tmp_path)
    base_lib.write(sentences.base_of("mean", False, 0, "identity"), epath.Path("base"))
    pathlib.Path("texts.txt").write_text("\n".join(TEXTS) + "\n")
    return epath.Path("base")


def test_cosines_are_those_of_mahalanobis():
    """With all components kept, x W W^T y is the product of centred x and y by the inverse of the
    covariance, to which the mean variance times D / N is added."""
    rng = np.random.default_rng(0)
    mixed = rng.normal(size=(6, 6)) * [9, 5, 2, 1, 0.3, 0.1]
    vectors = rng.normal(size=(400, 6)) @ mixed + rng.normal(size=6)
    mean, covariance = vectors.mean(axis=0), np.cov(vectors, rowvar=False, bias=True)
    layer = whitening_layer(mean, covariance, 400, 6)
    new = vectors @ layer["kernel"] + layer["bias"]
    added = 6 / 400 * np.diag(covariance).mean() * np.eye(6)
    centred = vectors - mean
    expected = centred @ scipy.linalg.solve(covariance + added, centred.T, assume_a="pos")
    np.testing.assert_allclose(new @ new.T, expected, rtol=1e-4, atol=1e-4)
    narrow = whitening_layer(mean, covariance, 400, 2)
    for name, values in narrow.items():
        np.testing.assert_array_equal(values, layer[name][..., :2])  # the largest components


def test_a_whitened_base_is_made_used_and_exported(base):
    said = broken.said("whiten texts.txt --workdir base --out new --dimensions 3")
    assert said == "new: a base whose vectors of 3 numbers are whitened by 12 texts\n"
    old, new = (bert_jax.load(folder) for folder in (base, "new"))
    pooled = old.embed(TEXTS, normalize=False).astype(np.float64)
    mean, covariance = pooled.mean(axis=0), np.cov(pooled, rowvar=False, bias=True)
    layer = whitening_layer(mean, covariance, len(TEXTS), 3)
    expected = pooled @ layer["kernel"] + layer["bias"]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(new.embed(TEXTS), expected, atol=2e-4)
    assert new.source == "base, step 0, whitened by 12 texts"
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
            "TEXT_FILE: the vectors of 9 texts do not differ; give thousands of texts",
        ),
        ("", "wa\n", "TEXT_FILE: the vectors of 1 text do not differ"),
        ("", "", "TEXT_FILE: the vectors of 0 texts do not differ"),
        ("--dimensions 17", "wa\nwb\n", "--dimensions 17: the vectors have 16 numbers"),
        ("--dimensions -1", "wa\nwb\n", "--dimensions: -1 must be at least 0"),
        ("--workdir dense", "wa\nwb\n", "--workdir: the model's vectors have a Dense layer"),
    ],
)
def test_what_cannot_be_whitened_is_named(words, text, message, base):
    base_lib.write(sentences.base_of("mean", False, 6, "tanh"), epath.Path("dense"))
    pathlib.Path("texts.txt").write_text(text)
    broken.fails(f"whiten texts.txt --workdir base --out new {words}", message)
    assert not pathlib.Path("new").exists()


def test_nothing_is_overwritten(base):
    before = (base / "params.safetensors").read_bytes()
    broken.fails("whiten texts.txt --workdir base --out base", "base: is there already")
    assert (base / "params.safetensors").read_bytes() == before
