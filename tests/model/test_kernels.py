"""The TPU's kernels, in Pallas's interpreter, against NumPy in float64 and against XLA's form.

The interpreter's generator draws zeros: bits are given. That the seeds of a run differ is tested
apart; what a core makes of them only a TPU shows.
"""

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from bert_jax.config import Model
from bert_jax.model import attention_kernels, kernels, layers
from bert_jax.model.attention_kernels import AttentionShape
from bert_jax.model.encoder import Loop
from bert_jax.model.transformer import Encoder
from bert_jax.training import step

# Of the largest number of an array. float32: sums of hundreds of terms, in another order. bfloat16
# has 8 bits: operands and results are each rounded by up to 1/512, three or four times in a row.
TOLERANCE = {"float32": 2e-6, "bfloat16": 1.5e-2}
RATE = 0.1
SEED = jnp.zeros(2, jnp.int32)
HOW = {"float32": kernels.Kernels(operands="float32"), "bfloat16": kernels.Kernels()}


def kept(bits: jax.Array, rate: float) -> np.ndarray:
    """What bits are multiplied by: 0 for the lowest of them, else the rest's share made up for."""
    share = round(rate * 65_536) / 65_536
    return (np.asarray(bits) >= share * 2**32) / (1 - share)


def random_bits(seed: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2**32, shape), jnp.uint32)


def assert_near(ours, reference, dtype):
    for mine, theirs in zip(ours, reference, strict=True):
        mine = np.asarray(mine, np.float64)
        assert mine.shape == theirs.shape
        np.testing.assert_allclose(
            mine, theirs, rtol=0, atol=TOLERANCE[dtype] * np.abs(theirs).max()
        )


@pytest.fixture(autouse=True)
def products_that_a_cpu_computes(monkeypatch):
    """Some of bfloat16 it does not; as float32 their terms are exact, as in a TPU's matrix unit."""
    product = kernels.dot

    def wide(a, b, *axes):
        return product(a.astype(jnp.float32), b.astype(jnp.float32), *axes)

    monkeypatch.setattr(kernels, "dot", wide)


# --- dropout ---


def test_seeds_differ_by_step_micro_batch_shard_layer_site_and_program():
    key = jax.random.key(7, impl="rbg")

    def seed(place):
        folded = key
        for value in place[:3]:  # as `training.step` folds in step, micro-batch and shard
            folded = jax.random.fold_in(folded, value)
        return layers.ShardNoise(folded).at(place[3]).at(place[4]).kernel_seed()

    grid = jnp.asarray(
        list(itertools.product((0, 1, 99_999), (0, 1), (0, 1, 63), range(4), range(3)))
    )
    seeds = np.asarray(jax.vmap(seed)(grid), np.int64)
    programs = np.arange(64)
    given = np.stack(
        np.broadcast_arrays(*kernels.program_seed((seeds[:, :1], seeds[:, 1:]), programs)), axis=-1
    )
    assert len(np.unique(given.reshape(-1, 2), axis=0)) == len(grid) * len(programs)
    # The first word alone tells sites apart, whatever the generator makes of the second.
    assert len(np.unique(seeds[:, 0])) == len(grid)


def test_forward_and_backward_kernels_draw_for_the_same_programs(monkeypatch):
    """Each asks the generator for the same seeds, in the same shapes, program for program."""
    asked = []

    def keep(rate, seed, bits, program, shape):
        jax.debug.callback(lambda number: asked[-1].append((int(number), shape)), program)
        return jnp.ones(shape, bool)

    monkeypatch.setattr(kernels, "draw_keep", keep)
    how, x, vector = HOW["float32"], jnp.ones((2, 128, 256)), jnp.ones(256)

    def attend(x):
        arrays = x, x, x, jnp.ones((3, 256)), jnp.ones((2, 128), jnp.int32), SEED, None
        return attention_kernels.attention(AttentionShape(how, 64, RATE, "alone"), *arrays)

    def norm(x):
        flat = x.reshape(-1, 256)
        arrays = flat, flat, vector, vector, vector, SEED, None
        return kernels.residual_norm(kernels.Norm(how, RATE, 1e-12), *arrays)

    for function, programs in ((attend, 8), (norm, 1)):
        asked[:] = [[]]
        value, pullback = jax.vjp(function, x)
        jax.effects_barrier()
        asked.append([])
        pullback(value)
        jax.effects_barrier()
        assert sorted(asked[0]) == sorted(asked[1])
        assert sorted({number for number, _ in asked[0]}) == list(range(programs))


# --- attention ---


class Inputs(NamedTuple):
    query: jax.Array
    key: jax.Array
    value: jax.Array
    biases: jax.Array


def attention_inputs(dtype, width=256, rows=2, length=128):
    rng = np.random.default_rng(3)
    arrays = [jnp.asarray(rng.standard_normal((rows, length, width)), dtype) for _ in range(4)]
    return Inputs(*arrays[:3], jnp.asarray(rng.standard_normal((3, width)) * 0.3)), arrays[3]


def numpy_attention(query, key, value, gradient, seen, keep=1.0):
    """Forward and backward in float64: context and the gradients of the inputs, [B, S, H, N] each.

    Args:
      seen: bool [B, Q, K].
      keep: float64 [B, H, Q, K], what probabilities are multiplied by.
    """
    q, k, v, do = (np.asarray(x, np.float64).swapaxes(1, 2) for x in (query, key, value, gradient))
    factor = q.shape[-1] ** -0.5
    scores = np.where(seen[:, None], q @ k.swapaxes(2, 3) * factor, -np.inf)
    probs = np.exp(scores - scores.max(axis=-1, keepdims=True))
    probs /= probs.sum(axis=-1, keepdims=True)
    dp = keep * (do @ v.swapaxes(2, 3))
    ds = probs * (dp - (probs * dp).sum(axis=-1, keepdims=True)) * factor
    context, dv = (probs * keep) @ v, (probs * keep).swapaxes(2, 3) @ do
    return [x.swapaxes(1, 2) for x in (context, ds @ k, ds.swapaxes(2, 3) @ q, dv)]


@pytest.mark.parametrize(
    ("dtype", "heads", "rate"),
    [
        ("float32", 4, RATE),  # 2 heads a program
        ("bfloat16", 4, RATE),
        pytest.param("float32", 8, RATE, marks=pytest.mark.long),
        pytest.param("float32", 2, 0.0, marks=pytest.mark.long),
        pytest.param("bfloat16", 4, 0.0, marks=pytest.mark.long),
    ],
)
def test_attention_and_its_gradients(dtype, heads, rate):
    """A full row, and one of three examples and padding."""
    inputs, gradient = attention_inputs(dtype)
    numbers = np.ones((2, 128), np.int32)
    numbers[1, 40:100], numbers[1, 100:115], numbers[1, 115:] = 2, 3, 0
    bits = random_bits(2, (2, heads, 128, 128))
    static = AttentionShape(HOW[dtype], 256 // heads, rate, "shared")
    context, pullback = jax.vjp(
        lambda *x: attention_kernels.attention(static, *x, jnp.asarray(numbers), SEED, bits),
        *inputs,
    )
    keep = kept(bits, rate).swapaxes(2, 3)
    seen = numbers[:, :, None] == numbers[:, None, :]
    assert context.dtype == dtype
    ours = (context, *pullback(gradient))
    biased = (np.float64(x) + b for x, b in zip(inputs[:3], inputs.biases, strict=True))
    split = (x.reshape(2, 128, heads, -1) for x in (*biased, np.float64(gradient)))
    theirs = [x.reshape(2, 128, 256) for x in numpy_attention(*split, seen, keep)]
    d_biases = np.stack([x.sum(axis=(0, 1)) for x in theirs[1:]])
    assert_near(ours, [*theirs, d_biases], dtype)


# --- layer norm ---


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rate", [0.0, RATE])
def test_layer_norm_and_its_gradients(dtype, rate):
    rng = np.random.default_rng(4)
    x, y, gradient = (jnp.asarray(rng.standard_normal((384, 128)), dtype) for _ in range(3))
    bias, scale, shift = (jnp.asarray(rng.standard_normal(128)) for _ in range(3))
    bits = random_bits(5, (384, 128))
    static = kernels.Norm(HOW[dtype], rate, 1e-12)
    normed, pullback = jax.vjp(
        lambda *x: kernels.residual_norm(static, *x, SEED, bits), x, y, bias, scale, shift
    )
    ours = (normed, *pullback(gradient))
    assert normed.dtype == dtype
    keep = kept(bits, rate)
    x, y, bias, scale, shift, do = (
        np.asarray(a, np.float64) for a in (x, y, bias, scale, shift, gradient)
    )
    total = x + (y + bias) * keep
    deviation = np.sqrt(total.var(axis=1, keepdims=True) + 1e-12)
    normal = (total - total.mean(axis=1, keepdims=True)) / deviation
    a = do * scale
    dx = a - a.mean(axis=1, keepdims=True) - normal * (a * normal).mean(axis=1, keepdims=True)
    dx /= deviation
    sums = (dx * keep).sum(axis=0), (do * normal).sum(axis=0), do.sum(axis=0)
    assert_near(ours, (normal * scale + shift, dx, dx * keep, *sums), dtype)


# --- an encoder ---

CFG = Model(
    vocab_size=64,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=256,
    max_position_embeddings=128,
    dropout_rng="in_kernel",
)


@pytest.mark.long
def test_an_encoder_of_kernels_computes_what_xla_computes():
    cfg = dataclasses.replace(CFG, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    encoder = Encoder(cfg, rngs=nnx.Rngs(0))
    graph, params = nnx.split(encoder)
    rng = np.random.default_rng(6)
    ids = jnp.asarray(rng.integers(0, 64, (2, 128)), jnp.int32)
    mask = jnp.asarray(np.arange(128) < np.array([[90], [128]]), jnp.int32)
    noise = layers.ShardNoise(jax.random.key(1, impl="rbg"))
    weights = jnp.asarray(rng.standard_normal((2, 128, 128)), jnp.float32) * mask[:, :, None]

    def value(params, loop):
        hidden = nnx.merge(graph, params)(ids, ids * 0, mask, noise, loop)
        return (hidden * weights).sum(), hidden * mask[:, :, None]

    run = jax.jit(jax.value_and_grad(value, has_aux=True), static_argnums=1)
    (_, expected), theirs = run(params, Loop("dots"))
    (_, found), ours = run(params, Loop("dots", kernels=HOW["bfloat16"]))
    loop = Loop(kernels=HOW["bfloat16"])
    assert "norm_forward" in str(jax.make_jaxpr(lambda p: value(p, loop))(params))
    np.testing.assert_allclose(found, expected, atol=1e-5)
    leaves = [[np.asarray(x) for x in jax.tree.leaves(tree)] for tree in (ours, theirs)]
    for mine, reference in zip(*leaves, strict=True):
        # A key's bias changes no softmax: its gradient is a sum of roundings, near 1e-5.
        atol = 1e-5 * max(np.abs(reference).max(), 1.0)
        np.testing.assert_allclose(mine, reference, rtol=0, atol=atol)


def test_erf_is_exact_in_float32_and_without_kernels():
    tpu7x = kernels.BY_DEVICE["TPU7x"]
    assert kernels.erf_in(tpu7x, jnp.bfloat16) == "by_tanh"
    assert kernels.erf_in(tpu7x, jnp.float32) == kernels.erf_in(None, jnp.bfloat16) == "exact"


@pytest.mark.parametrize(
    ("length", "width", "heads", "fit"),
    [
        (128, 768, 12, True),
        (512, 1024, 16, True),
        (384, 256, 8, True),
        (120, 768, 12, False),
        (1024, 768, 12, False),
        (128, 192, 3, False),
        (128, 768, 8, False),  # heads of 96
    ],
)
def test_what_does_not_tile_runs_no_kernels(length, width, heads, fit):
    assert kernels.fits(heads, 2, length, width) is fit


def test_elsewhere_in_kernel_draws_as_rbg16_does():
    """On a CPU the step has no kernel, and the same noise."""
    keys = [
        step.phase_key(dataclasses.replace(CFG, dropout_rng=word), 3, 1)
        for word in ("in_kernel", "rbg16")
    ]
    np.testing.assert_array_equal(*(jax.random.key_data(key) for key in keys))
    assert jax.devices()[0].device_kind not in kernels.BY_DEVICE


# --- rings ---


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        (48, 128),
        (2, 24, 384),  # flattened to rows
        (20, 20_480),  # several blocks of rows, the last one partly filled
        (512,),
    ],
)
def test_add_part_gives_the_bits_of_a_sum(shape, dtype):
    rng = np.random.default_rng(0)
    parts = jnp.asarray(rng.standard_normal((3, *shape)), dtype)
    received = jnp.asarray(rng.standard_normal(shape), dtype)
    # Rounded once: float64 holds the sum of two of these exactly enough to tell.
    expected = np.asarray(received, np.float64) + np.asarray(parts[1], np.float64)
    total = jax.jit(kernels.add_part)(parts, received, jnp.uint32(1))
    assert total.dtype == received.dtype and total.shape == shape
    np.testing.assert_array_equal(np.asarray(total), np.asarray(jnp.asarray(expected, dtype)))
