"""Losses of vectors, compared with sentence-transformers (`make_similar.py`)."""

import pathlib

import jax
import kinds
import numpy as np
import pytest

from bert_jax.config import Adapt, Vectors
from bert_jax.tasks.similar import SimilarObjective

GOLDEN = np.load(pathlib.Path(__file__).with_name("similar.npz"))
CASES = {
    "pairs": Vectors(),
    "triples": Vectors(),
    "triples_cut": Vectors(dimensions=(4, 16)),
    "scores": Vectors(loss="cosine"),
    "scores_cut": Vectors(loss="cosine", dimensions=(4, 16)),
    "teacher": Vectors(loss="distil", teacher="t"),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_equal_those_of_sentence_transformers(name):
    vectors, how = GOLDEN[f"{name}_vectors"], CASES[name]
    count, texts, width = vectors.shape
    shape = "labels", "vectors", width * (how.loss == "distil"), texts, Adapt()
    objective = SimilarObjective(kinds.MODEL, *shape, settings=how)
    batch = {
        "keys": np.arange(count * texts, dtype=np.uint32),
        "row_weights": np.ones(count * texts, np.float32),
        "scores": np.repeat(GOLDEN["scores"], texts),
        "teacher_vectors": GOLDEN["taught"],
    }

    def loss(rows):
        metrics = objective.compare(rows, {}, None, batch, None, None)
        return objective.loss(metrics, objective.counts(batch)), metrics["loss"][1]

    run = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, counted), gradient = run(vectors.reshape(-1, width))
    assert counted == count
    assert value == pytest.approx(float(GOLDEN[f"{name}_loss"]), rel=1e-6)
    expected = GOLDEN[f"{name}_gradient"].reshape(-1, width)
    np.testing.assert_allclose(gradient, expected, atol=1e-6 * np.abs(expected).max())
