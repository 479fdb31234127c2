"""The loss by parts of the vocabulary: against float64, and against the loss of whole logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from compare import assert_close

from bert_jax.data import batches
from bert_jax.model import token_loss
from bert_jax.model.encoder import Loop
from bert_jax.training.objective import Pretraining

PART, WIDTH = 1_024, 16
# The first and the last token of parts; the last part has the largest logits.
LABELS = np.array([[0, PART - 1, PART], [2 * PART - 1, 2 * PART, 3 * PART - 1]])
WEIGHTS = np.array([[1.0, 0.5, 1.0], [2.0, 1.0, 0.0]])


def _sample(dtype):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(*LABELS.shape, WIDTH)), dtype)
    table = rng.normal(size=(3 * PART, WIDTH)) * np.repeat([[0.5], [1.0], [2.0]], PART, axis=0)
    for place in ((0, 2), (1, 0)):  # these labels have the largest logits
        table[LABELS[place]] = 9 * np.asarray(hidden[place], np.float64)
    bias = rng.normal(size=3 * PART)
    return hidden, jnp.asarray(table, jnp.float32), jnp.asarray(bias, jnp.float32)


def _in_float64(hidden, table, bias):
    """Returns the sums, and the gradients of the sum of losses."""
    x, rows, bias = (np.asarray(a, np.float64) for a in (hidden, table, bias))
    x, labels, weights = x.reshape(-1, WIDTH), LABELS.ravel(), WEIGHTS.ravel()
    logits = x @ rows.T + bias
    largest = logits.max(axis=1, keepdims=True)
    sums = np.exp(logits - largest).sum(axis=1, keepdims=True)
    losses = (largest + np.log(sums))[:, 0] - logits[np.arange(6), labels]
    d_logits = np.exp(logits - largest) / sums
    d_logits[np.arange(6), labels] -= 1
    d_logits *= weights[:, None]
    hits = logits.argmax(axis=1) == labels
    gradients = (d_logits @ rows).reshape(hidden.shape), d_logits.T @ x, d_logits.sum(axis=0)
    return (weights @ losses, weights @ hits), gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_and_gradients_equal_those_of_float64(dtype):
    hidden, table, bias = _sample(dtype)
    labels, weights = jnp.asarray(LABELS), jnp.asarray(WEIGHTS, jnp.float32)

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def loss(hidden, table, bias):
        loss, hits = token_loss.classify_by_part(hidden, table, bias, labels, weights)
        return loss[0], (loss, hits)

    (_, (loss, hits)), gradients = jax.jit(loss)(hidden, table, bias)
    rounded = table.astype(dtype)  # as in the products
    (expected_loss, expected_hits), expected = _in_float64(hidden, rounded, bias)
    np.testing.assert_allclose(loss, [expected_loss, WEIGHTS.sum()], rtol=1e-6)
    np.testing.assert_array_equal(hits, [expected_hits, WEIGHTS.sum()])
    assert expected_hits == 3.0
    assert [g.dtype for g in gradients] == [np.dtype(dtype), np.float32, np.float32]
    assert_close(list(gradients), list(expected), 1e-5 if dtype == "float32" else 2**-7)
    assert_close(gradients[2], expected[2], 1e-5)  # a sum in float32 in either type


@pytest.mark.parametrize("learns", ["mlm_nsp", "mlm"])
def test_metrics_and_gradients_equal_those_of_whole_logits(learns):
    model = dataclasses.replace(samples.MODEL, vocab_size=2_000, compute_dtype="bfloat16")
    objective = Pretraining(model, learns)
    shape = batches.BatchShape(sequence_length=20, max_predictions=3, batch_size=8)
    batch = samples.train_batches(shape).batch(0, np.arange(8))
    params = objective.init_params(jax.random.key(0))

    def loss(params, logits):
        metrics = objective.forward(params, None, batch, None, Loop(logits=logits))
        return objective.loss(metrics, objective.counts(batch)), metrics

    differentiate = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    gradient, metrics = differentiate(params, "by_part")
    expected_gradient, expected_metrics = differentiate(params, "whole")
    assert_close(metrics, expected_metrics, 1e-6)
    assert_close(gradient["masked_lm"], expected_gradient["masked_lm"], 0.01)
    assert_close(gradient["encoder"], expected_gradient["encoder"], 0.03)
    text = differentiate.lower(params, "by_part").as_text()
    assert "x1024xf32" in text and "x2048xf32" not in text
