"""Primitives of the encoder with their numerics, and the noise of dropout.

Matrix products run in the type of their input and add up in float32; biases, normalisation,
softmax and activations are float32. A layer returns float32 and its caller rounds.

Shape letters: B batch, D width; N inputs, M outputs, R rows.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, Protocol, Self

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.random import threefry2x32_p

_LAYER_NORM_EPS = 1e-12
_BIASLESS_NORM_EPS = 1e-5  # for norms without biases, as in ModernBERT


class Linear(nnx.Module):
    """A layer without a bias, y = x W: kernel [inputs, outputs]."""

    bias: nnx.Param[jax.Array]  # declared for type checkers; only `Dense` has it

    def __init__(self, inputs: int, outputs: int, init: nnx.Initializer, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] in any float type -> float32 [..., outputs]."""
        return linear(x, self.kernel[...], self.bias[...] if hasattr(self, "bias") else None)


class Dense(Linear):
    """A layer with a bias, y = x W + b: kernel [inputs, outputs], bias [outputs]."""

    def __init__(self, inputs: int, outputs: int, init: nnx.Initializer, *, rngs: nnx.Rngs):
        super().__init__(inputs, outputs, init, rngs=rngs)
        self.bias = nnx.Param(jnp.zeros(outputs, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def linear(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    kernel_is: Literal["inputs_outputs", "outputs_inputs"] = "inputs_outputs",
) -> jax.Array:
    """Computes x W + b: the product in the type of x, sums and the bias in float32.

    Args:
      x: [..., N], any float type.
      kernel: float32 [N, M], or [M, N] if `kernel_is` says so; rounded to the type of x.
      bias: float32 [M]; None adds none.
      kernel_is: which dimension of the kernel comes first.

    Returns:
      float32 [..., M].
    """
    return _linear_forward(x, kernel, bias, kernel_is)[0]


def _linear_forward(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, kernel_is: str
) -> tuple[jax.Array, tuple[Any, ...]]:
    kernel = kernel.astype(x.dtype)
    y = _matmul(x, kernel, 0 if kernel_is == "inputs_outputs" else 1)
    # The bias is added in float32: otherwise its gradient would be summed in bfloat16. The last
    # item tells the backward pass whether there is a bias: () or None, which hold no arrays.
    return (y, (x, kernel, None)) if bias is None else (y + bias, (x, kernel, ()))


def _linear_backward(
    kernel_is: str, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns gradients of x, kernel and bias, computed by products that are fast on CPUs, too."""
    x, kernel, bias_flag = saved
    d_bias = None if bias_flag is None else _column_sums(gradient, x.dtype)
    gradient = gradient.astype(x.dtype)
    if kernel_is == "inputs_outputs":
        dx, d_kernel = _matmul(gradient, kernel, 1), _outer(x, gradient)
    else:
        dx, d_kernel = _matmul(gradient, kernel, 0), _outer(gradient, x)
    return dx.astype(x.dtype), d_kernel, d_bias


linear.defvjp(_linear_forward, _linear_backward)

# On CPUs operands are flattened to matrices, for which XLA has fast code. On TPUs batch and
# sequence stay separate dimensions, so that the compiler can choose the layout for attention.


def _contract(
    a: jax.Array, b: jax.Array, a_axes: Sequence[int], b_axes: Sequence[int]
) -> jax.Array:
    """Contracts `a_axes` of a with `b_axes` of b; sums are float32."""
    contract = ((tuple(a_axes), tuple(b_axes)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _rows(x: jax.Array) -> jax.Array:
    """Flattens all but the last axis: [..., N] -> [R, N]."""
    return x.reshape(-1, x.shape[-1])


def force_row_major(x: jax.Array) -> jax.Array:
    """Stores an array in row-major order, whatever layout the compiler would choose."""
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _matmul(x: jax.Array, kernel: jax.Array, axis: int) -> jax.Array:
    """Contracts the last axis of x with `axis` of the kernel: [..., N] -> float32 [..., M]."""

    def on_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _contract(_rows(x), kernel, [1], [axis]).reshape(*x.shape[:-1], -1)

    def elsewhere(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _contract(x, kernel, [x.ndim - 1], [axis])

    return lax.platform_dependent(x, kernel, cpu=on_cpu, default=elsewhere)


def _column_sums(x: jax.Array, compute_dtype: jnp.dtype) -> jax.Array:
    """Sums columns: float32 [..., M] -> float32 [M]."""

    def on_cpu(x: jax.Array) -> jax.Array:
        # A product with ones, since XLA sums columns slowly; only its operands are rounded.
        rows = _rows(x).astype(compute_dtype)
        return _contract(jnp.ones((1, len(rows)), compute_dtype), rows, [1], [0])[0]

    def elsewhere(x: jax.Array) -> jax.Array:
        return x.sum(axis=tuple(range(x.ndim - 1)))

    return lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def _outer(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums outer products over all but the last axis: [..., N], [..., M] -> float32 [N, M]."""

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = _rows(a), _rows(b)
        # XLA multiplies at full speed only if the first operand is row-major. In float32, if b
        # is the narrower operand, it is cheaper to transpose b, and then the product.
        if a.dtype == jnp.bfloat16 or a.shape[1] <= b.shape[1]:
            return _contract(force_row_major(a.T), b, [1], [0])
        product = _contract(force_row_major(b.T), a, [1], [0])
        return force_row_major(force_row_major(product).T)

    def elsewhere(a: jax.Array, b: jax.Array) -> jax.Array:
        axes = range(a.ndim - 1)
        return _contract(a, b, axes, axes)

    return lax.platform_dependent(a, b, cpu=on_cpu, default=elsewhere)


class BiaslessLayerNorm(nnx.Module):
    """A layer norm without a bias parameter: scale [D]. The variance is divided by D."""

    bias: nnx.Param[jax.Array]  # declared for type checkers; only `LayerNorm` has it

    def __init__(self, width: int, eps: float = _BIASLESS_NORM_EPS):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] in any float type -> float32 [..., D]."""
        x = x.astype(jnp.float32)
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        return centred * lax.rsqrt(variance + self.eps) * self.scale[...]


class LayerNorm(BiaslessLayerNorm):
    """A layer norm: scale and bias [D]. The variance is divided by D."""

    def __init__(self, width: int, eps: float = _LAYER_NORM_EPS):
        super().__init__(width, eps)
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] in any float type -> float32 [..., D]."""
        return super().__call__(x) + self.bias[...]


def activation(name: str, x: jax.Array, erf: Literal["exact", "by_tanh"] = "exact") -> jax.Array:
    """Computes GELU: `gelu` with erf, as in BERT's released code, `gelu_tanh` approximately.

    Any float type -> float32. With `erf="by_tanh"`, `gelu` is computed by `gelu_by_tanh`.
    """
    x = x.astype(jnp.float32)
    if name == "gelu_tanh":
        return jax.nn.gelu(x, approximate=True)
    if erf == "by_tanh":
        return gelu_by_tanh(x)
    # As in google-research/bert, modeling.py, gelu; jax.nn.gelu is twice as slow on CPUs.
    return 0.5 * x * (1.0 + lax.erf(x * math.sqrt(0.5)))


# Coefficients of x, x^3 and x^5 in a polynomial whose tanh approximates erf(x / sqrt(2)). They were
# fitted to the smallest error of GELU.
_ERF_COEFFICIENTS = (0.7975078, 0.03700569, -0.000351524)
# Where x^2 is larger, erf(x / sqrt(2)) is 1 or -1 in bfloat16.
_LARGEST_SQUARE = 36.0


@jax.custom_jvp
def gelu_by_tanh(x: jax.Array) -> jax.Array:
    """Computes GELU with erf, float32, with errors below 3e-5, and its slope below 1.2e-4.

    These errors are smaller than the rounding of GELU's values near 1 to bfloat16. TPUs have an
    instruction for tanh, but take dozens for erf.
    """
    half = 0.5 * x
    return half + half * _erf_by_tanh(x)[0]


def _erf_by_tanh(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns an approximation of erf(x / sqrt(2)), and x^2, which is at most `_LARGEST_SQUARE`."""
    a, b, c = _ERF_COEFFICIENTS
    square = jnp.minimum(x * x, _LARGEST_SQUARE)
    return jnp.tanh(x * (a + square * (b + c * square))), square


@gelu_by_tanh.defjvp
def _gelu_by_tanh_jvp(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    a, b, c = _ERF_COEFFICIENTS
    erf, square = _erf_by_tanh(x)
    erf_slope = (1.0 - erf * erf) * (a + square * (3.0 * b + 5.0 * c * square))
    half = 0.5 * x
    return half + half * erf, tangent * (0.5 + 0.5 * erf + half * erf_slope)


def dropout(x: jax.Array, noise: "Noise | None", rate: float) -> jax.Array:
    """Zeroes a share of x and scales up the rest; without noise returns x.

    Any float type -> float32: in bfloat16 the scale would be rounded.
    """
    x = x.astype(jnp.float32)
    if noise is None or not rate:
        return x
    return jnp.where(noise.keep(x.shape, rate), x * noise.scale(rate), jnp.zeros_like(x))


# --- dropout noise ----------------------------------------------------------------------------


class Noise(Protocol):
    """Random bits for dropout. Each layer, and each site of dropout in a layer, folds its
    index into a key.
    """

    def at(self, index: int | jax.Array) -> "Noise":
        """Returns the noise of the layer with this index, or of the site within a layer."""

    def keep(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        """Draws bool `shape` = [B, ...], False for a share of about `rate`."""

    def scale(self, rate: float) -> float:
        """Returns 1 / the exact probability that `keep` draws True."""


def noise_at(noise: Noise | None, index: int | jax.Array) -> Noise | None:
    """Returns `noise.at(index)`; None without noise."""
    return None if noise is None else noise.at(index)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowNoise(Noise):
    """The `threefry8` noise: 8 bits for each element, from a key for each row.

    The bits are the same on any mesh and for any micro-batch size.
    """

    keys: jax.Array  # threefry keys [B]

    @classmethod
    def of(cls, key: jax.Array, rows: jax.Array) -> "RowNoise":
        """Returns noise for the rows with these numbers, uint32 [B]."""
        return cls(jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))

    def at(self, index: int | jax.Array) -> Self:
        fold = jax.vmap(functools.partial(jax.random.fold_in, data=index))
        return dataclasses.replace(self, keys=fold(self.keys))

    def keep(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        # Words of 32 bits are drawn and split: drawing 8 bits at a time is ten times slower.
        word_shape = (*shape[1:-1], _count_words(shape[-1]))
        words = jax.vmap(lambda key: jax.random.bits(key, word_shape, jnp.uint32))(self.keys)
        return _keep_mask(words, shape, rate)

    def scale(self, rate: float) -> float:
        return 256 / (256 - round(rate * 256))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextNoise(RowNoise):
    """The `threefry8` noise of texts that share rows (`attention.Packing`).

    Each text gets the bits that it would get in a row of its own. This is possible because each
    32-bit word that threefry draws depends only on the key and on the word's index: here the key of
    the text, and the index that the word would have in the text's own row. `keys` are [N], one for
    each text.
    """

    numbers: jax.Array  # int32 [B, S], the number of each token's text, from 0
    positions: jax.Array  # int32 [B, S], of each token in its text

    def keep(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        """Draws bool `shape`: [B, S, D] for rows, [N, D] or [N, H, K, Q] for N unpacked texts."""
        if len(shape) != 3:
            return RowNoise.keep(self, shape, rate)
        words_per_token = _count_words(shape[-1])
        indices = self.positions[:, :, None] * words_per_token + jnp.arange(words_per_token)
        keys = jax.random.key_data(self.keys)[self.numbers]
        return _keep_mask(_draw_words(keys[:, :, None], indices), shape, rate)


def _count_words(draws: int) -> int:
    """Returns the number of 32-bit words for a number of 8-bit draws."""
    return (draws + 3) // 4


def _keep_mask(words: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Compares the bytes of words with a rate: uint32 [..., W] -> bool `shape` = [..., D]."""
    draws = lax.bitcast_convert_type(words, jnp.uint8).reshape(*shape[:-1], -1)
    return draws[..., : shape[-1]] >= jnp.uint8(round(rate * 256))


def _draw_words(keys: jax.Array, indices: jax.Array) -> jax.Array:
    """Computes single words of the arrays that `jax.random.bits` draws.

    It does so with `jax_threefry_partitionable`, the default: a word's counter is its flat index.
    Keys uint32 [..., 2], and indices into the flat array, int32 [...] -> uint32 [...].
    """
    low = indices.astype(jnp.uint32)
    first, second = (jnp.broadcast_to(keys[..., i], low.shape) for i in (0, 1))
    first, second = threefry2x32_p.bind(first, second, jnp.zeros_like(low), low)
    return first ^ second


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardNoise(Noise):
    """The `rbg16` noise: 16 bits for each element, from one generator for each shard.

    It is fast on TPUs, and depends on the mesh. With `model.dropout_rng="in_kernel"` kernels draw
    their own bits, seeded with two words of this key.
    """

    key: jax.Array  # the shard's rbg key

    def at(self, index: int | jax.Array) -> "ShardNoise":
        return ShardNoise(jax.random.fold_in(self.key, index))

    def kernel_seed(self) -> jax.Array:
        """Returns int32 [2], the seed for the kernel of a site."""
        return lax.bitcast_convert_type(jax.random.key_data(self.key)[:2], jnp.int32)

    def keep(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        return jax.random.bits(self.key, shape, jnp.uint16) >= jnp.uint16(round(rate * 65_536))

    def scale(self, rate: float) -> float:
        return 65_536 / (65_536 - round(rate * 65_536))
