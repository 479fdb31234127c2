"""Attention in two ways, one answer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close

from bert_jax.model import attention, layers

SHAPE = (3, 16, 2, 8)
attend_recomputed = functools.partial(attention.attend, policy="recomputed")


def inputs(dtype, shape=SHAPE):
    keys = jax.random.split(jax.random.key(3), 4)
    query, key, value, weights = (jax.random.normal(k, shape) for k in keys)
    mask = jnp.arange(shape[1])[None] < jnp.array([16, 9, 4])[:, None] * shape[1] // 16
    return [x.astype(dtype) for x in (query, key, value)], mask.astype(jnp.int32), weights


def noises():
    return {
        "none": None,
        "threefry8": layers.RowNoise.of(jax.random.key(1), jnp.arange(3, dtype=jnp.uint32)),
        "rbg16": layers.ShardNoise(jax.random.key(1, impl="rbg")),
    }


@pytest.mark.long
@pytest.mark.parametrize("noise", ["none", "threefry8", "rbg16"])
def test_nothing_kept_gives_the_same_context_and_gradients(noise):
    drawn = noises()[noise]
    (query, key, value), mask, weights = inputs(jnp.float32)

    def run(attend):
        def loss(*qkv):
            context = attend(*qkv, mask, drawn, 0.25)
            return (context * weights).sum(), context

        (_, context), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(
            query, key, value
        )
        return {"context": context, "gradients": gradients}

    assert_close(run(attend_recomputed), run(attention.attend), 1e-5)


@pytest.mark.parametrize("kept", ["kept", "recomputed"])
def test_only_what_is_kept_has_a_place_for_each_two_pieces(kept):
    qkv, mask, _ = inputs(jnp.float32)
    attend = functools.partial(attention.attend, policy=kept)
    _, backward = jax.vjp(lambda *qkv: attend(*qkv, mask, None, 0.0), *qkv)
    shapes = {leaf.shape[-2:] for leaf in jax.tree.leaves(backward)}
    assert ((16, 16) in shapes) == (kept == "kept")


def test_in_bfloat16_both_are_near_float64():
    (query, key, value), mask, _ = inputs(jnp.bfloat16)
    q, k, v = (np.asarray(x, np.float64) for x in (query, key, value))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(8)
    scores = np.where(np.asarray(mask)[:, None, None, :], scores, -1e9)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    exact = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)
    for attend in (attention.attend, attend_recomputed):
        found = np.asarray(attend(query, key, value, mask, None, 0.0), np.float64)
        # Two roundings to 8 bits, of weights and of the result.
        assert np.abs(found - exact).max() < 2 * 2**-8 * np.abs(v).max()


@pytest.mark.long
@pytest.mark.parametrize("noise", ["threefry8", "rbg16"])
@pytest.mark.parametrize("attend", [attention.attend, attend_recomputed])
def test_in_bfloat16_dropout_leaves_the_scale(attend, noise):
    """Rounded to bfloat16, 1 / 0.9 is 0.16 % too small: more than roundings that cancel."""
    qkv, mask, weights = inputs(jnp.bfloat16, (3, 128, 8, 32))

    def run(dtype):
        def loss(*qkv):
            context = attend(*qkv, mask, noises()[noise], 0.1).astype(jnp.float32)
            return (context * weights).sum(), context

        arrays = [x.astype(dtype) for x in qkv]
        (_, context), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arrays)
        return {"context": context, **dict(zip("qkv", gradients, strict=True))}

    exact, found = run(jnp.float32), run(jnp.bfloat16)
    for name in exact:
        x, y = (np.asarray(tree[name], np.float64) for tree in (exact, found))
        assert abs((x * y).sum() / (x * x).sum() - 1) < 5e-4, name
