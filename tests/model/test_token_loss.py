"""The loss in chunks of the vocabulary: against float64, and against that of all logits."""

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
from bert_jax.model.encoder import VOCAB_MULTIPLE as CHUNK
from bert_jax.model.encoder import Loop
from bert_jax.training.objective import Pretraining

WIDTH = 16
# The first and the last tokens of three chunks.
LABELS = np.array([[0, CHUNK - 1, CHUNK], [2 * CHUNK - 1, 2 * CHUNK, 3 * CHUNK - 1]])
WEIGHTS = np.array([[1.0, 0.0, 1.0], [2.0, 1.0, 0.5]])


def make_inputs(dtype):
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(*LABELS.shape, WIDTH)), dtype)
    # Each chunk has larger logits than the chunk before, so the maximum changes.
    table = rng.normal(size=(3 * CHUNK, WIDTH)) * np.repeat([[0.5], [1.0], [2.0]], CHUNK, axis=0)
    for place in ((0, 2), (1, 0)):  # two hits: their labels have the largest logits
        table[LABELS[place]] = 9 * np.asarray(hidden[place], np.float64)
    bias = rng.normal(size=3 * CHUNK)
    return hidden, jnp.asarray(table, jnp.float32), jnp.asarray(bias, jnp.float32)


def compute_in_float64(hidden, table, bias):
    """Returns (loss, hits), and the gradients of the loss."""
    x, rows, bias = (np.asarray(a, np.float64) for a in (hidden, table, bias))
    x, labels, weights = x.reshape(-1, WIDTH), LABELS.ravel(), WEIGHTS.ravel()
    logits, predictions = x @ rows.T + bias, np.arange(labels.size)
    maximum = logits.max(axis=1, keepdims=True)
    denominators = np.exp(logits - maximum).sum(axis=1, keepdims=True)
    losses = (maximum + np.log(denominators))[:, 0] - logits[predictions, labels]
    d_logits = np.exp(logits - maximum) / denominators
    d_logits[predictions, labels] -= 1
    d_logits *= weights[:, None]
    hits = logits.argmax(axis=1) == labels
    gradients = (d_logits @ rows).reshape(hidden.shape), d_logits.T @ x, d_logits.sum(axis=0)
    return (weights @ losses, weights @ hits), gradients


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loss_hits_and_gradients_equal_those_in_float64(dtype):
    hidden, table, bias = make_inputs(dtype)
    labels, weights = jnp.asarray(LABELS), jnp.asarray(WEIGHTS, jnp.float32)

    @functools.partial(jax.value_and_grad, argnums=(0, 1, 2), has_aux=True)
    def differentiate(hidden, table, bias):
        loss, hits = token_loss.loss_and_hits(hidden, table, bias, labels, weights)
        return loss[0], (loss, hits)

    (_, (loss, hits)), gradients = jax.jit(differentiate)(hidden, table, bias)
    rounded = table.astype(dtype)  # as before the products
    (expected_loss, expected_hits), expected = compute_in_float64(hidden, rounded, bias)
    np.testing.assert_allclose(loss, [expected_loss, WEIGHTS.sum()], rtol=1e-6)
    np.testing.assert_array_equal(hits, [expected_hits, WEIGHTS.sum()])
    assert expected_hits == 3.0
    assert [g.dtype for g in gradients] == [np.dtype(dtype), np.float32, np.float32]
    assert_close(list(gradients), list(expected), 1e-5 if dtype == "float32" else 2**-7)
    assert_close(gradients[2], expected[2], 1e-5)  # a sum in float32 in either type


@pytest.mark.parametrize("tasks", ["mlm_nsp", "mlm"])
def test_metrics_and_gradients_equal_those_of_all_logits(tasks):
    model = dataclasses.replace(samples.MODEL, vocab_size=2_000, compute_dtype="bfloat16")
    objective = Pretraining(model, tasks)
    shape = batches.BatchShape(sequence_length=20, max_predictions=3, batch_size=8)
    batch = samples.train_batches(shape).batch(0, np.arange(8))
    params = objective.init_params(jax.random.key(0))

    def loss(params, how):
        metrics = objective.forward(params, None, batch, noise=None, loop=Loop(token_loss=how))
        return objective.loss(metrics, objective.counts(batch)), metrics

    differentiate = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)
    gradient, metrics = differentiate(params, "by_chunk")
    expected_gradient, expected_metrics = differentiate(params, "all_logits")
    assert_close(metrics, expected_metrics, 1e-6)
    # The probabilities differ by float32 rounding, so some gradients of logits round differently.
    assert_close(gradient["masked_lm"], expected_gradient["masked_lm"], 0.01)
    assert_close(gradient["encoder"], expected_gradient["encoder"], 0.03)
    if tasks == "mlm_nsp":
        heads = (
            {name: g[name] for name in ("pooler", "next_sentence")}
            for g in (gradient, expected_gradient)
        )
        assert_close(*heads, 0.01)
    text = differentiate.lower(params, "by_chunk").as_text()
    assert "24x1024xf32" in text and "x2048xf32" not in text  # 24 = 8 x 3 predictions
