"""Attention with rotary positions in the TPU's kernels, in Pallas's interpreter."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from test_kernels import TOLERANCE, numpy_attention
from test_kernels import products_that_a_cpu_computes as products_that_a_cpu_computes

from bert_jax.config import Model
from bert_jax.model import kernels, layers, rotary_kernels, transformer
from bert_jax.model.attention import Shared
from bert_jax.model.encoder import Loop, rotary_cos_sin

HOW = kernels.Kernels()
LENGTH, WIDTH, HEADS, HALF = 512, 128, 2, 40
CFG = Model(
    kind="modern",
    vocab_size=64,
    hidden_size=WIDTH,
    num_hidden_layers=4,
    num_attention_heads=HEADS,
    intermediate_size=64,
    max_position_embeddings=LENGTH,
    local_window=2 * HALF,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    dropout_rng="in_kernel",
)


def numpy_rotated(x, positions, base, sign=1.0):
    """Turns pairs half a head apart as complex numbers: [B, S, H, N], float64.

    By the angles that float32 has: what is tested is not how exact they are.
    """
    half = x.shape[-1] // 2
    steps = (base ** (-np.arange(half) / half)).astype(np.float32)
    angles = (positions[..., None].astype(np.float32) * steps).astype(np.float64)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * sign * angles)[:, :, None]
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize(
    ("dtype", "layer", "part"),
    [
        ("bfloat16", "global", None),
        ("float32", "local", None),
        ("float32", "global", 128),
        pytest.param("float32", "global", None, marks=pytest.mark.long),
        pytest.param("bfloat16", "local", None, marks=pytest.mark.long),
    ],
)
def test_attention_and_its_gradients(dtype, layer, part, monkeypatch):
    """A full row, and one of three texts and padding: positions are those of each text.

    With `part` keys are taken in so many at a time, as those of long rows are.
    """
    if part is not None:
        monkeypatch.setattr(rotary_kernels, "_MAX_KEYS", part)
        monkeypatch.setattr(rotary_kernels, "_PART", part)
    rng = np.random.default_rng(3)
    arrays = [jnp.asarray(rng.standard_normal((2, LENGTH, WIDTH)), dtype) for _ in range(4)]
    *inputs, gradient = arrays
    numbers = np.ones((2, LENGTH), np.int32)
    numbers[1, 140:400], numbers[1, 400:415], numbers[1, 415:] = 2, 3, 0
    place = np.arange(LENGTH)
    firsts = np.array([np.flatnonzero(row == n)[0] for row in numbers for n in row])
    positions = place - firsts.reshape(2, LENGTH)
    turns = rotary_kernels.lay_out_angles(
        rotary_cos_sin(CFG, jnp.asarray(positions)), WIDTH // HEADS
    )
    static = rotary_kernels.RotaryAttentionShape(HOW, WIDTH // HEADS, "shared", HALF, 2, 4)
    known = turns, jnp.asarray(numbers), jnp.asarray(layer == "global")
    context, pullback = jax.vjp(lambda *x: rotary_kernels.attention(static, *x, *known), *inputs)
    assert context.dtype == dtype
    seen = numbers[:, :, None] == numbers[:, None, :]
    base = CFG.global_rotary_base
    if layer == "local":
        seen, base = seen & (np.abs(place[:, None] - place) <= HALF), CFG.local_rotary_base
    split = [np.float64(x).reshape(2, LENGTH, HEADS, -1) for x in (*inputs, gradient)]
    split[:2] = (numpy_rotated(x, positions, base) for x in split[:2])
    expected = numpy_attention(*split, seen)
    expected[1:3] = (numpy_rotated(x, positions, base, -1.0) for x in expected[1:3])
    expected = [x.reshape(2, LENGTH, WIDTH) for x in expected]
    for mine, theirs in zip((context, *pullback(gradient)), expected, strict=True):
        atol = TOLERANCE[dtype] * np.abs(theirs).max()
        np.testing.assert_allclose(np.asarray(mine, np.float64), theirs, rtol=0, atol=atol)


@pytest.mark.long
@pytest.mark.parametrize("rows", ["alone", "shared"])
def test_an_encoder_of_kernels_computes_what_xla_computes(rows):
    """Four layers, the first and the last of which attend to whole rows; its gradients, too.

    The window is odd, and the positions of both are stretched.
    """
    cfg = dataclasses.replace(
        CFG,
        local_window=2 * HALF + 1,
        global_rotary_scaling="yarn:200:4",
        local_rotary_scaling="linear:2",
    )
    graph, params = nnx.split(transformer.Encoder(cfg, rngs=nnx.Rngs(0)))
    params = jax.tree.map(lambda x: 3 * x, params)  # else every token is attended to alike
    rng = np.random.default_rng(6)
    ids = jnp.asarray(rng.integers(0, 64, (2, LENGTH)), jnp.int32)
    real = np.arange(LENGTH) < np.array([[390], [LENGTH]])
    mask = jnp.asarray(real, jnp.int32)
    if rows == "shared":
        place = np.arange(LENGTH)
        numbers = jnp.asarray(real * (1 + place // 200), jnp.int32)
        positions = jnp.broadcast_to(jnp.asarray(place % 200), numbers.shape)
        mask = Shared(numbers, positions)
    noise = layers.ShardNoise(jax.random.key(1, impl="rbg"))
    weights = jnp.asarray(rng.standard_normal((2, LENGTH, WIDTH)), jnp.float32) * real[:, :, None]

    def value(params, loop):
        hidden = nnx.merge(graph, params)(ids, ids, mask, noise, loop)
        return (hidden * weights).sum(), hidden * real[:, :, None]

    run = jax.jit(jax.value_and_grad(value, has_aux=True), static_argnums=1)
    (_, expected), theirs = run(params, Loop("dots"))
    (_, found), ours = run(params, Loop("dots", kernels=HOW))
    assert "rotary_backward_window" in str(run.trace(params, Loop("dots", kernels=HOW)).jaxpr)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    for mine, reference in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        atol = 2e-5 * max(np.abs(reference).max(), 1.0)
        np.testing.assert_allclose(mine, reference, rtol=0, atol=atol)


@pytest.mark.parametrize(
    ("length", "width", "heads", "half", "memory", "fit"),
    [
        (1_024, 768, 12, 64, 64, True),
        (2_048, 1_024, 16, 64, 64, True),
        (512, 768, 12, 0, 64, True),
        (256, 768, 12, 64, 64, True),
        (256, 768, 12, 128, 64, False),  # a window as long as the row
        (384, 768, 12, 64, 64, False),
        (8_192, 768, 12, 64, 64, True),
        (2_304, 768, 12, 64, 64, False),
        (16_384, 768, 12, 64, 64, False),
        (1_024, 192, 3, 64, 64, False),
        (1_024, 768, 12, 64, 14, False),
    ],
)
def test_what_does_not_tile_runs_no_kernels(length, width, heads, half, memory, fit):
    how = kernels.Kernels(memory=memory * 2**20)
    assert rotary_kernels.fits(how, heads, length, width, half) is fit


def test_tpu7x_runs_kernels_for_all_rows():
    tpu7x = kernels.BY_DEVICE["TPU7x"]
    for length in (1_024, 4_096, 8_192):
        assert rotary_kernels.fits(tpu7x, 12, length, 768, 64)
    assert not rotary_kernels.fits(tpu7x._replace(long_row_memory=2**20), 12, 8_192, 768, 64)


def test_long_rows_with_one_buffer_give_the_same_numbers(monkeypatch):
    rng = np.random.default_rng(4)
    inputs = [jnp.asarray(rng.standard_normal((1, LENGTH, WIDTH)), "float32") for _ in range(3)]
    angles = rotary_cos_sin(CFG, jnp.arange(LENGTH))
    turns = rotary_kernels.lay_out_angles(angles, WIDTH // HEADS)
    known = turns, jnp.ones((1, LENGTH), jnp.int32), jnp.asarray(False)
    monkeypatch.setattr(rotary_kernels, "_LONG", LENGTH - 1)

    def run(how):
        static = rotary_kernels.RotaryAttentionShape(how, WIDTH // HEADS, "alone", HALF, 2, 4)
        block = rotary_kernels._input_row(rotary_kernels._blocks(static, inputs[0]))
        found = jax.grad(lambda *x: rotary_kernels.attention(static, *x, *known).sum(), (0, 1, 2))
        return block.pipeline_mode, found(*inputs)

    two, expected = run(HOW)
    one, found = run(HOW._replace(long_row_memory=56 * 2**20))
    assert two is None and one.buffer_count == 1
    for mine, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_dropped_probabilities_are_xlas():
    cfg = dataclasses.replace(CFG, attention_probs_dropout_prob=0.1)
    noise = layers.ShardNoise(jax.random.key(1, impl="rbg"))
    for model, kernel in ((CFG, HOW), (cfg, None)):
        given = (2, LENGTH, WIDTH), jnp.ones((2, LENGTH), jnp.int32), noise, Loop(kernels=HOW)
        assert transformer._kernels(model, *given) is kernel
