"""The primitives against float64, and hits against NumPy's argmax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close

from bert_jax.model import layers, losses


def sample(rows, inputs, outputs, dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows // 4, 4, inputs)), dtype)
    kernel = jnp.asarray(rng.normal(size=(inputs, outputs)) * 0.02, jnp.float32)
    bias = jnp.asarray(rng.normal(size=outputs), jnp.float32)
    gradient = jnp.asarray(rng.normal(size=(rows // 4, 4, outputs)), jnp.float32)
    return x, kernel, bias, gradient


@pytest.mark.parametrize("kernel_is", ["inputs_outputs", "outputs_inputs"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(8, 12, 20), (256, 128, 512), (256, 512, 128)])
def test_linear_and_its_gradients_equal_those_of_float64(shape, dtype, kernel_is):
    """Errors of a float32 sum grow as the square root of its length; a rounding to bfloat16, of
    an operand, is 2^-9 of it."""
    x, kernel, bias, gradient = sample(*shape, dtype)
    stored = kernel if kernel_is == "inputs_outputs" else kernel.T

    @jax.jit
    def both(x, stored, bias):
        y, pull = jax.vjp(lambda *args: layers.linear(*args, kernel_is), x, stored, bias)
        return y, pull(gradient)

    y, (dx, dkernel, dbias) = both(x, stored, bias)
    assert y.dtype == dkernel.dtype == dbias.dtype == jnp.float32 and dx.dtype == x.dtype
    x64, kernel64, gradient64 = (np.asarray(a, np.float64) for a in (x, kernel, gradient))
    rows, gradient64 = x64.reshape(-1, x64.shape[-1]), gradient64.reshape(-1, len(bias))
    dkernel = dkernel if kernel_is == "inputs_outputs" else dkernel.T
    found = {"y": y.reshape(-1, len(bias)), "x": dx.reshape(rows.shape), "kernel": dkernel}
    wanted = {
        "y": rows @ kernel64 + np.asarray(bias, np.float64),
        "x": gradient64 @ kernel64.T,
        "kernel": rows.T @ gradient64,
    }
    found["bias"], wanted["bias"] = dbias, gradient64.sum(0)
    bound = 2**-23 * math.sqrt(max(shape)) if dtype == "float32" else 2**-7
    for name in wanted:
        assert_close({name: np.asarray(found[name], np.float64)}, {name: wanted[name]}, bound)


def test_a_bias_gradient_in_bfloat16_is_summed_in_float32():
    """16,384 equal numbers: a sum in bfloat16 stops growing at 256."""
    x = jnp.ones((16_384, 4), jnp.bfloat16)
    bias = jax.grad(lambda b: layers.linear(x, jnp.ones((4, 2)), b).sum())(jnp.zeros(2))
    assert bias.tolist() == [16_384, 16_384]


def test_gelu_by_tanh_and_its_slope_are_those_of_float64_with_erf():
    """At all numbers of bfloat16: their errors are smaller than the rounding of numbers near 1."""
    x = jnp.arange(2**16, dtype=jnp.uint16).view(jnp.bfloat16).astype(jnp.float32)
    x = x[jnp.isfinite(x)]
    y, pull = jax.vjp(lambda x: layers.activation("gelu", x, "by_tanh"), x)
    (slope,) = pull(jnp.ones_like(y))
    x64 = np.asarray(x, np.float64)
    probability = np.array([0.5 * math.erfc(-x / math.sqrt(2)) for x in x64])
    density = np.exp(-np.minimum(x64**2 / 2, 700)) / math.sqrt(2 * math.pi)
    far = np.abs(x64) > 6
    np.testing.assert_allclose(y[far], np.where(x64 > 0, x64, 0)[far], rtol=2e-7, atol=3e-6)
    np.testing.assert_allclose(y[~far], (x64 * probability)[~far], rtol=0, atol=3e-5)
    np.testing.assert_allclose(slope, probability + x64 * density, rtol=0, atol=1.2e-4)


def test_dropout_in_bfloat16_is_scaled_in_float32():
    """Rounded to bfloat16, 1 / 0.9 is 0.16 % too small."""
    noise = layers.ShardNoise(jax.random.key(1, impl="rbg"))
    found = layers.dropout(jnp.ones((4, 64), jnp.bfloat16), noise, 0.1)
    assert set(np.unique(found)) == {0.0, np.float32(noise.scale(0.1))}


@pytest.mark.parametrize("classes", [2, 64])
def test_of_equal_scores_the_first_is_the_answer(classes):
    """ProbabilityPolicy are few whole numbers, so that most rows have several at the top."""
    rng = np.random.default_rng(classes)
    logits = rng.integers(0, 3, (500, classes)).astype(np.float32)
    labels = rng.integers(0, classes, 500).astype(np.int32)
    _, hits = losses.classification(logits, labels, np.ones(500, np.float32))
    assert hits.tolist() == [np.sum(logits.argmax(axis=-1) == labels), 500]
