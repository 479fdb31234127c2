"""Scaled dot-product attention: with saved or recomputed probabilities, and over packed texts.

Matrix products run in the type of their input and add up in float32; scores and softmax are
float32.

Shape letters: B batch, S sequence (Q queries, K keys), D width, H heads; for packed texts N slots,
one for each text of all rows, and K tokens of a slot.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from bert_jax.model.layers import Noise

# The reference adds this to scores of padding (modeling.py, attention_layer).
MASKED_SCORE = -10_000.0
# Minimum number of columns of a TPU's matrix unit.
_LANES = 128
_LOG_SUM_EXP, _CONTEXT = "attention_log_sums", "attention_context"
# Names under which a recomputation policy saves what the backward pass of `attend` needs.
SAVED_NAMES = (_LOG_SUM_EXP, _CONTEXT)

# Whether attention probabilities are kept for the backward pass, or recomputed there.
ProbabilityPolicy = Literal["kept", "recomputed"]


class Shared(NamedTuple):
    """Several texts in a row, without padding between them; a mask keeps them apart."""

    numbers: jax.Array  # int32 [B, S], the number of each token's text, from 1; 0 for padding
    positions: jax.Array  # int32 [B, S], of each token in its text


class Packing(NamedTuple):
    """Texts that share rows, each of which is moved to a slot of its own for attention.

    Unlike with `Shared`, attention computes no scores between texts. Operations on single tokens
    take the rows as they are. The two arrays of indices map tokens between the flat positions of
    the rows, 0 to B * S - 1, and those of the slots, 0 to N * K - 1.
    """

    positions: jax.Array  # int32 [B, S], of each token in its text
    row_indices: (
        jax.Array
    )  # int32 [N, K], where each slot's tokens lie in the rows; B * S: no token
    slot_indices: jax.Array  # int32 [B, S], where each token lies in the slots; padding: any value

    @property
    def mask(self) -> jax.Array:
        """Returns int32 [N, K], 0 where a slot has no token."""
        return (self.row_indices < self.positions.size).astype(jnp.int32)

    def unpack(self, x: jax.Array) -> jax.Array:
        """Moves each text into its own slot: [B, S, ...] -> [N, K, ...], filled up with zeros."""
        rows = x.reshape(self.positions.size, *x.shape[2:])
        return jnp.take(rows, self.row_indices, axis=0, mode="fill", fill_value=0)

    def pack(self, x: jax.Array) -> jax.Array:
        """Moves texts back into rows, the inverse of `unpack`: [N, K, ...] -> [B, S, ...]."""
        return jnp.take(
            x.reshape(self.row_indices.size, *x.shape[2:]), self.slot_indices, axis=0, mode="clip"
        )


def causal_mask(length: int) -> jax.Array:
    """Returns bool [S, S], True for keys at or before the query's position."""
    position = jnp.arange(length)
    return position <= position[:, None]


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    noise: Noise | None,
    rate: float,
    window: jax.Array | None = None,
    policy: ProbabilityPolicy = "kept",
) -> jax.Array:
    """Computes scaled dot-product attention with dropout on the probabilities.

    With the policy `recomputed` nothing of size [S, S] is saved: the backward pass recomputes the
    probabilities from the scores and their saved log-sum-exp, and computes the gradient of the
    softmax from the saved context (Dao et al. 2022, FlashAttention, section 3.1).

    Args:
      query: [B, S, H, D / H].
      key: as query.
      value: as query.
      input_mask: [B, S], 1 for real tokens, 0 for padding; or the texts that share the rows, which
        do not attend to each other.
      noise: dropout noise for the probabilities; None drops nothing.
      rate: share of probabilities dropped.
      window: bool [Q, K], True where a query may attend to a key; or a bias of the scores, float32
        [H, Q, K], with a gradient; None: everywhere, without a bias.
      policy: what the backward pass recomputes; `Packing` without noise keeps all.

    Returns:
      [B, S, H, D / H], in the type of value.
    """
    if isinstance(input_mask, Packing):
        if noise is None:
            return _attend_packed(query, key, value, input_mask, window)
        query, key, value = map(input_mask.unpack, (query, key, value))
        context = attend(query, key, value, input_mask.mask, noise, rate, window, policy)
        return input_mask.pack(context)
    noise = noise if rate else None
    # `_attend_recomputed` has no gradient for a bias.
    if policy == "recomputed" and (window is None or window.dtype == jnp.bool):
        return _attend_recomputed(rate, query, key, value, _key_mask(input_mask), noise, window)
    scores = _scores(query, key, _key_mask(input_mask), window)
    probs = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    if noise is not None:
        probs = jnp.where(_draw_keep(noise, probs.shape, rate), probs, jnp.zeros_like(probs))
        value = _scale(value, noise.scale(rate))
    return _product("bhqk,bkhd->bqhd", probs, value).astype(value.dtype)


def _attend_packed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    packing: Packing,
    window: jax.Array | None = None,
) -> jax.Array:
    """Computes `attend` without dropout for each text: [B, S, H, D / H] each -> the same."""
    # Heads come before tokens: otherwise a CPU transposes all scores.
    query, key, value = (jnp.swapaxes(packing.unpack(x), 1, 2) for x in (query, key, value))
    factor = 1.0 / math.sqrt(query.shape[-1])
    scores = _product("nhqd,nhkd->nhqk", query, key) * factor + _padding_bias(packing.mask)
    scores = _mask_window(scores, window)
    weights = jnp.exp(scores - scores.max(axis=-1, keepdims=True)).astype(value.dtype)
    context = _product("nhqk,nhkd->nhqd", weights, value) / _row_sums(weights)
    return packing.pack(jnp.swapaxes(context, 1, 2).astype(value.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_recomputed(rate: float, *arrays: Any) -> jax.Array:
    return _attend_recomputed_forward(rate, *arrays)[0]


def _attend_recomputed_forward(
    rate: float,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    key_mask: jax.Array,
    noise: Noise | None,
    window: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    scores = _scores(query, key, key_mask, window)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest).astype(value.dtype)
    sums = _row_sums(weights)
    scale = 1.0
    if noise is not None:
        keep = _draw_keep(noise, weights.shape, rate)
        weights = jnp.where(keep, weights, jnp.zeros_like(weights))
        scale = noise.scale(rate)
    # The context is divided, not the weights, because it is smaller.
    context = _product("bhqk,bkhd->bqhd", weights, value) * jnp.swapaxes(scale / sums, 1, 2)
    context = checkpoint_name(context.astype(value.dtype), _CONTEXT)
    log_sum_exp = checkpoint_name((highest + jnp.log(sums))[..., 0], _LOG_SUM_EXP)
    return context, (query, key, value, key_mask, noise, window, log_sum_exp, context)


def _attend_recomputed_backward(
    rate: float, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, None]:
    query, key, value, key_mask, noise, window, log_sum_exp, context = saved
    dtype = value.dtype
    # The layout is [B, H, K, Q], queries last, as the bits are drawn: otherwise the TPU compilers
    # copy the bits into another layout, which costs a tenth of a step.
    scores = jnp.swapaxes(_scores(query, key, key_mask, window), 2, 3)
    probs = jnp.exp(scores - log_sum_exp[:, :, None, :])
    # The softmax's gradient subtracts sum(p * dp) over keys, which is sum(context * gradient).
    inner = (gradient.astype(jnp.float32) * context.astype(jnp.float32)).sum(axis=-1)
    inner = jnp.swapaxes(inner, 1, 2)[:, :, None, :]
    keep, dropped_probs, scaled_gradient = None, probs.astype(dtype), gradient
    if noise is not None:
        keep = noise.keep(probs.shape, rate)
        dropped_probs = jnp.where(keep, dropped_probs, jnp.zeros_like(dropped_probs))
        # `value` and the gradient are scaled, not the operands that are masked: the compiler for
        # TPU v6e crashes on a scale between a mask and a product.
        value, scaled_gradient = (_scale(x, noise.scale(rate)) for x in (value, gradient))
    d_probs = _product("bkhd,bqhd->bhkq", value, gradient)
    if keep is not None:
        d_probs = jnp.where(keep, d_probs, jnp.zeros_like(d_probs))
    d_scores = (probs * (d_probs - inner)).astype(dtype)
    factor = 1.0 / math.sqrt(query.shape[-1])
    d_query = _product("bhkq,bkhd->bqhd", d_scores, key) * factor
    d_key = _product("bhkq,bqhd->bkhd", d_scores, query * jnp.asarray(factor, dtype))
    d_value = _product("bhkq,bqhd->bkhd", dropped_probs, scaled_gradient)
    return d_query.astype(dtype), d_key.astype(dtype), d_value.astype(dtype), None, None, None


_attend_recomputed.defvjp(_attend_recomputed_forward, _attend_recomputed_backward)


def _key_mask(input_mask: jax.Array | Shared) -> jax.Array:
    """Returns the argument `key_mask` of `_scores`: a bias, or the numbers of the texts."""
    if isinstance(input_mask, Shared):
        return input_mask.numbers
    return _padding_bias(input_mask)


def _padding_bias(input_mask: jax.Array) -> jax.Array:
    """Returns the bias of scores, which masks padding: [B, K], 1 or 0 -> float32 [B, 1, 1, K]."""
    return ((1.0 - input_mask.astype(jnp.float32)) * MASKED_SCORE)[:, None, None, :]


def _scores(
    query: jax.Array, key: jax.Array, key_mask: jax.Array, window: jax.Array | None
) -> jax.Array:
    """Computes scores of [B, Q, H, D / H] and [B, K, H, D / H]: float32 [B, H, Q, K].

    `key_mask` is float32 [B, 1, 1, K], a bias of the scores; or int32 [B, K], the numbers of the
    texts; the dtype tells which. The bias between texts is computed here, so that nothing of size
    [Q, K] is saved for the backward pass.
    """
    if key_mask.dtype == jnp.int32:
        same = key_mask[:, :, None] == key_mask[:, None, :]
        key_mask = jnp.where(same, 0.0, MASKED_SCORE)[:, None]
    factor = 1.0 / math.sqrt(query.shape[-1])
    return _mask_window(_product("bqhd,bkhd->bhqk", query, key) * factor + key_mask, window)


def _mask_window(scores: jax.Array, window: jax.Array | None) -> jax.Array:
    """Lowers the scores [..., Q, K] of keys outside a query's window, or adds a bias."""
    if window is None:
        return scores
    return scores + (jnp.where(window, 0.0, MASKED_SCORE) if window.dtype == jnp.bool else window)


def _scale(x: jax.Array, scale: float) -> jax.Array:
    """Returns x times scale, in the type of x, without rounding the scale to that type.

    In bfloat16 1 / 0.9 would be 1.109375, and the products 0.16 % too small.
    """
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _draw_keep(noise: Noise, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Draws bool `shape` = [B, H, Q, K] for scores; the bits are drawn as [B, H, K, Q]."""
    b, h, q, k = shape
    return jnp.swapaxes(noise.keep((b, h, k, q), rate), 2, 3)


def _row_sums(weights: jax.Array) -> jax.Array:
    """Sums rows: [B, H, Q, K] -> float32 [B, H, Q, 1]."""
    if weights.dtype != jnp.bfloat16:
        return weights.sum(axis=-1, keepdims=True)
    # A product with ones, which runs on a TPU's matrix unit.
    ones = jnp.ones((weights.shape[-1], _LANES), weights.dtype)
    return _product("bhqk,kn->bhqn", weights, ones)[..., :1]


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
