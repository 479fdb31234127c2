"""Relative positions as a bias of attention scores. Their numbers: `interop/test_families.py`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples

from bert_jax.config import Model
from bert_jax.embeddings import packing as packing_lib
from bert_jax.errors import InputError
from bert_jax.model import cudnn_attention, heads
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import encode

CFG = dataclasses.replace(samples.MODEL, relative_position_buckets=8, type_vocab_size=0)
LENGTHS = (7, 12, 3)


@pytest.fixture(scope="module")
def params():
    """With biases that matter."""
    tree = heads.init_params(CFG, jax.random.key(0))
    table = tree["encoder"]["relative_positions"]["embedding"]
    tree["encoder"]["relative_positions"]["embedding"] = 50 * table
    return tree


def texts():
    rng = np.random.default_rng(0)
    return [rng.integers(5, 20, length).astype(np.int32) for length in LENGTHS]


def hidden_of(params, ids, mask, loop=None, noise=None):
    encoder = heads.merge(CFG, params).encoder
    return encode(encoder, CFG, ids, 0 * ids, mask, noise, loop or Loop())


@pytest.mark.parametrize("shares", ["masked", "packed"])
def test_texts_that_share_a_row_are_as_those_alone(shares, params):
    row = packing_lib.pack(texts(), 32, 4, 16)
    arrays = {name: jnp.asarray(value)[None] for name, value in row.items()}
    if shares == "packed":
        indices = arrays["row_indices"][0], arrays["slot_indices"]
        together: Packing | Shared = Packing(arrays["positions"], *indices)
    else:
        numbers = np.repeat(np.arange(4) + 1, [*LENGTHS, 32 - sum(LENGTHS)])
        numbers[sum(LENGTHS) :] = 0
        together = Shared(jnp.asarray(numbers, jnp.int32)[None], arrays["positions"])
    found, start = hidden_of(params, arrays["input_ids"], together)[0], 0
    for ids in texts():
        alone = hidden_of(params, jnp.asarray(ids)[None], jnp.ones((1, len(ids)), jnp.int32))
        np.testing.assert_allclose(found[start : start + len(ids)], alone[0], atol=1e-5)
        start += len(ids)


def test_the_gradient_of_biases_is_the_difference_of_losses(params):
    """Also where the backward pass recomputes what the forward pass did not keep."""
    ids = jnp.asarray(texts()[1])[None]
    weights = jax.random.normal(jax.random.key(3), (1, ids.shape[1], CFG.hidden_size))

    def loss(table, loop):
        relative = {"relative_positions": {"embedding": table}}
        changed = params | {"encoder": params["encoder"] | relative}
        return (weights * hidden_of(changed, ids, ids * 0 + 1, loop)).sum()

    table = params["encoder"]["relative_positions"]["embedding"]
    gradient = jax.grad(loss)(table, Loop())
    step = 0.1 * jax.random.normal(jax.random.key(4), table.shape)
    difference = loss(table + step, Loop()) - loss(table - step, Loop())
    np.testing.assert_allclose(2 * (gradient * step).sum(), difference, rtol=1e-2)
    # Distances of 0, 1, and 2 to 15, to keys before the query, and of 1, and 2 to 15 after it.
    assert np.flatnonzero(np.abs(gradient).max(axis=1)).tolist() == [0, 1, 2, 5, 6]
    for remat in ("dots", "full"):
        again = jax.grad(loss)(table, Loop(remat=remat))
        np.testing.assert_allclose(again, gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "fields",
    [
        {"relative_position_buckets": 30},
        {"relative_position_buckets": 32, "direction": "left_to_right"},
        {"relative_position_buckets": 32, "kind": "modern"},
    ],
)
def test_other_biases_are_refused_by_name(fields):
    with pytest.raises(InputError, match="relative_position_buckets"):
        Model(**fields)


def test_cudnn_computes_no_bias(monkeypatch):
    monkeypatch.setattr(cudnn_attention.private_apis, "cudnn_version", lambda: 91_000)
    device = type("Gpu", (), {"platform": "gpu", "compute_capability": "9.0"})()
    parallelism = type("Auto", (), {"attention": "auto", "tensor": 1})()
    model = Model(compute_dtype="bfloat16")
    assert cudnn_attention.refusal(model, device, parallelism) is None
    biased = dataclasses.replace(model, relative_position_buckets=32)
    assert "relative" in cudnn_attention.refusal(biased, device, parallelism)
