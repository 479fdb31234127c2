"""The few primitives of the encoder, with their numerics, and its noise.

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
# Of norms without biases, as ModernBERT has them.
_SCALE_NORM_EPS = 1e-5


class Linear(nnx.Module):
    """A linear map, y = x W: kernel [inputs, outputs]."""

    bias: nnx.Param[jax.Array]  # set by `Dense` alone

    def __init__(self, inputs: int, outputs: int, init: nnx.Initializer, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(init(rngs.params(), (inputs, outputs), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., inputs] in any float type -> float32 [..., outputs]."""
        return linear(x, self.kernel[...], self.bias[...] if hasattr(self, "bias") else None)


class Dense(Linear):
    """An affine map, y = x W + b: kernel [inputs, outputs], bias [outputs]."""

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
    y = _times(x, kernel, 0 if kernel_is == "inputs_outputs" else 1)
    # A bias added in bfloat16 has a gradient summed over all tokens in bfloat16.
    return (y, (x, kernel, None)) if bias is None else (y + bias, (x, kernel, ()))


def _linear_backward(
    kernel_is: str, kept: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns gradients of x, kernel and bias as differentiation does, laid out for CPUs too."""
    x, kernel, biased = kept
    d_bias = None if biased is None else _column_sums(gradient, x.dtype)
    gradient = gradient.astype(x.dtype)
    if kernel_is == "inputs_outputs":
        dx, d_kernel = _times(gradient, kernel, 1), _outer(x, gradient)
    else:
        dx, d_kernel = _times(gradient, kernel, 0), _outer(gradient, x)
    return dx.astype(x.dtype), d_kernel, d_bias


linear.defvjp(_linear_forward, _linear_backward)

# CPUs get one tall matrix, whose products their compiler takes; a TPU's compiler lays out batch and
# sequence as attention wants them, if they stay dimensions of their own.


def _product(a: jax.Array, b: jax.Array, a_axes: Sequence[int], b_axes: Sequence[int]) -> jax.Array:
    """Multiplies, and sums over the same number of axes of each, in float32."""
    contract = ((tuple(a_axes), tuple(b_axes)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _rows(x: jax.Array) -> jax.Array:
    """Flattens all but the last axis: [..., N] -> [R, N]."""
    return x.reshape(-1, x.shape[-1])


def _by_rows(x: jax.Array) -> jax.Array:
    """Has a matrix lie row by row, whatever the compiler would choose."""
    return with_layout_constraint(x, Layout((0, 1)))


def _times(x: jax.Array, kernel: jax.Array, axis: int) -> jax.Array:
    """Multiplies [..., N] by a matrix whose `axis` is N -> float32 [..., M]."""

    def on_cpu(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _product(_rows(x), kernel, [1], [axis]).reshape(*x.shape[:-1], -1)

    def elsewhere(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _product(x, kernel, [x.ndim - 1], [axis])

    return lax.platform_dependent(x, kernel, cpu=on_cpu, default=elsewhere)


def _column_sums(x: jax.Array, compute_dtype: jnp.dtype) -> jax.Array:
    """Sums columns: float32 [..., M] -> float32 [M]."""

    def on_cpu(x: jax.Array) -> jax.Array:
        # As a product, since XLA adds up columns slowly; its numbers are rounded, their sum is not.
        rows = _rows(x).astype(compute_dtype)
        return _product(jnp.ones((1, len(rows)), compute_dtype), rows, [1], [0])[0]

    def elsewhere(x: jax.Array) -> jax.Array:
        return x.sum(axis=tuple(range(x.ndim - 1)))

    return lax.platform_dependent(x, cpu=on_cpu, default=elsewhere)


def _outer(a: jax.Array, b: jax.Array) -> jax.Array:
    """Sums outer products over all but the last axis: [..., N], [..., M] -> float32 [N, M]."""

    def on_cpu(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = _rows(a), _rows(b)
        # XLA multiplies at its full rate only if the first operand lies row by row. In float32 it
        # is cheaper to turn the narrower one, and the product back.
        if a.dtype == jnp.bfloat16 or a.shape[1] <= b.shape[1]:
            return _product(_by_rows(a.T), b, [1], [0])
        return _by_rows(_by_rows(_product(_by_rows(b.T), a, [1], [0])).T)

    def elsewhere(a: jax.Array, b: jax.Array) -> jax.Array:
        summed = range(a.ndim - 1)
        return _product(a, b, summed, summed)

    return lax.platform_dependent(a, b, cpu=on_cpu, default=elsewhere)


class ScaleNorm(nnx.Module):
    """A layer norm with biased variance and no bias; scale [D]."""

    bias: nnx.Param[jax.Array]  # set by `LayerNorm` alone

    def __init__(self, width: int, eps: float = _SCALE_NORM_EPS):
        self.eps = eps
        self.scale = nnx.Param(jnp.ones(width, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] in any float type -> float32 [..., D]."""
        x = x.astype(jnp.float32)
        centred = x - x.mean(axis=-1, keepdims=True)
        variance = jnp.square(centred).mean(axis=-1, keepdims=True)
        return centred * lax.rsqrt(variance + self.eps) * self.scale[...]


class LayerNorm(ScaleNorm):
    """A layer norm with biased variance, of `model.layer_norm_eps`; scale and bias [D]."""

    def __init__(self, width: int, eps: float = _LAYER_NORM_EPS):
        super().__init__(width, eps)
        self.bias = nnx.Param(jnp.zeros(width, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[..., D] in any float type -> float32 [..., D]."""
        return super().__call__(x) + self.bias[...]


def activation(name: str, x: jax.Array) -> jax.Array:
    """Computes GELU: `gelu` by erf (the paper's checkpoints), `gelu_tanh` by its approximation."""
    if name == "gelu_tanh":
        return jax.nn.gelu(x, approximate=True)
    # As the reference writes it (modeling.py, gelu): jax.nn's erfc costs twice as much on a CPU.
    return 0.5 * x * (1.0 + lax.erf(x * math.sqrt(0.5)))


def dropout(x: jax.Array, noise: "Noise | None", rate: float) -> jax.Array:
    """Zeroes a share of x and scales the rest up; with `noise` None nothing happens.

    Any float type -> float32: in bfloat16 the scale itself would be rounded.
    """
    x = x.astype(jnp.float32)
    if noise is None or not rate:
        return x
    return jnp.where(noise.keep(x.shape, rate), x * noise.scale(rate), jnp.zeros_like(x))


# --- noise ------------------------------------------------------------------------------------


class Noise(Protocol):
    """Random bits for dropout. Each place that uses them folds in numbers of its own."""

    def at(self, place: int | jax.Array) -> "Noise":
        """Returns noise of its own for a layer, or for a site within it."""

    def keep(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        """Draws bool `shape` = [B, ...], False for about `rate` of it."""

    def scale(self, rate: float) -> float:
        """Returns one over the probability with which `keep` is really True."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RowNoise(Noise):
    """The `threefry8` noise: 8 bits an element, from a key a row.

    It is the same on any mesh and micro-batch.
    """

    keys: jax.Array  # threefry keys [B]

    @classmethod
    def of(cls, key: jax.Array, rows: jax.Array) -> "RowNoise":
        """Returns noise for the rows with these numbers, uint32 [B]."""
        return cls(jax.vmap(lambda row: jax.random.fold_in(key, row))(rows))

    def at(self, place: int | jax.Array) -> Self:
        """Returns noise of its own for a layer, or for a site within it."""
        fold = jax.vmap(functools.partial(jax.random.fold_in, data=place))
        return dataclasses.replace(self, keys=fold(self.keys))

    def keep(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        """Draws bool `shape` = [B, ..., D]."""
        # Whole words, taken apart: asking for 8-bit draws is ten times slower.
        words = (*shape[1:-1], _words_of(shape[-1]))
        bits = jax.vmap(lambda key: jax.random.bits(key, words, jnp.uint32))(self.keys)
        return _kept(bits, shape, rate)

    def scale(self, rate: float) -> float:
        """Returns one over the probability with which `keep` is really True."""
        return 256 / (256 - round(rate * 256))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TextNoise(RowNoise):
    """The `threefry8` noise of an `attention.Packing`: each text has the bits of a row of its own.

    A threefry word is a function of a key and of the word's number, and so can be had for any
    token: the text's key, and the number that the word has where the text is alone in a row.
    `RowNoise` draws as many; here `keys` are [N], of all texts.
    """

    numbers: jax.Array  # int32 [B, S], of the text that each token is of, from 0
    positions: jax.Array  # int32 [B, S], of each token in its text

    def keep(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        """Draws bool `shape` = [B, S, D], or for scores [N, H, K, Q]."""
        if len(shape) == 4:
            return RowNoise.keep(self, shape, rate)
        words = _words_of(shape[-1])
        word = self.positions[:, :, None] * words + jnp.arange(words)
        keys = jax.random.key_data(self.keys)[self.numbers]
        return _kept(_words(keys[:, :, None], word), shape, rate)


def _words_of(draws: int) -> int:
    """Returns how many words hold so many draws of 8 bits; what is left of the last is not used."""
    return (draws + 3) // 4


def _kept(words: jax.Array, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Takes words apart: uint32 [..., W] -> bool `shape` = [..., D]."""
    bits = lax.bitcast_convert_type(words, jnp.uint8).reshape(*shape[:-1], -1)
    return bits[..., : shape[-1]] >= jnp.uint8(round(rate * 256))


def _words(keys: jax.Array, numbers: jax.Array) -> jax.Array:
    """Computes the words of `jax.random.bits` with these numbers, below 2**32, of its array.

    Keys uint32 [..., 2], which broadcast against numbers int32 [...] -> uint32, of their shape.
    """
    low = numbers.astype(jnp.uint32)
    first, second = (jnp.broadcast_to(keys[..., i], low.shape) for i in (0, 1))
    first, second = threefry2x32_p.bind(first, second, jnp.zeros_like(low), low)
    return first ^ second


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ShardNoise(Noise):
    """The `rbg16` noise: 16 bits an element from one generator a shard.

    It is fast on TPU and depends on the mesh. It is that of `in_kernel` too, whose kernels draw
    their own bits, beginning with two words of the key.
    """

    key: jax.Array  # an rbg key, the shard's own

    def at(self, place: int | jax.Array) -> "ShardNoise":
        """Returns noise of its own for a layer, or for a site within it."""
        return ShardNoise(jax.random.fold_in(self.key, place))

    def words(self) -> jax.Array:
        """Returns int32 [2], from which a kernel draws the bits of a site."""
        return lax.bitcast_convert_type(jax.random.key_data(self.key)[:2], jnp.int32)

    def keep(self, shape: tuple[int, ...], rate: float) -> jax.Array:
        """Draws bool `shape`, False for about `rate` of it."""
        return jax.random.bits(self.key, shape, jnp.uint16) >= jnp.uint16(round(rate * 65_536))

    def scale(self, rate: float) -> float:
        """Returns one over the probability with which `keep` is really True."""
        return 65_536 / (65_536 - round(rate * 65_536))
