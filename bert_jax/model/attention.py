"""Scaled dot-product attention, in two ways that differ in what the backward pass finds; and of
texts that share rows.

Matrix products run in the type of their input and add up in float32; scores and softmax are
float32.

Shape letters: B batch, S sequence (Q queries, K keys), D width, H heads; N texts of all rows,
K places for the tokens of a text.
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
# Columns of a TPU's matrix unit at least.
_LANES = 128
_LOG_SUMS, _CONTEXT = "attention_log_sums", "attention_context"
# Under these names a policy of recomputation finds what `attend` needs to go back.
KEPT = (_LOG_SUMS, _CONTEXT)

# Whether the backward pass finds attention's probabilities, or computes them again.
Scores = Literal["kept", "recomputed"]


class Shared(NamedTuple):
    """Several examples in a row, one behind the other with no padding between them."""

    numbers: jax.Array  # int32 [B, S], of the example that each token is of, from 1; 0 for padding
    positions: jax.Array  # int32 [B, S], of each token in its example


class Packing(NamedTuple):
    """Texts that share rows, each by itself for attention.

    What is done to each token by itself takes rows as they are. Tokens are counted through all
    rows, B * S of them.
    """

    positions: jax.Array  # int32 [B, S], of each token in its text
    tokens: jax.Array  # int32 [N, K], of each text, in order; B * S where there is none
    # int32 [B, S], of each token in `tokens`, counted through all N * K; any for padding at the end
    # of a row.
    places: jax.Array

    @property
    def mask(self) -> jax.Array:
        """Returns int32 [N, K], 0 where there is no token."""
        return (self.tokens < self.positions.size).astype(jnp.int32)

    def unpack(self, x: jax.Array) -> jax.Array:
        """Returns each text by itself: [B, S, ...] -> [N, K, ...], zero where there is no token."""
        rows = x.reshape(self.positions.size, *x.shape[2:])
        return jnp.take(rows, self.tokens, axis=0, mode="fill", fill_value=0)

    def pack(self, x: jax.Array) -> jax.Array:
        """Returns rows as they were before `unpack`: [N, K, ...] -> [B, S, ...]."""
        return jnp.take(x.reshape(self.tokens.size, *x.shape[2:]), self.places, axis=0, mode="clip")


def causal_mask(length: int) -> jax.Array:
    """Returns bool [S, S], True for keys that stand no further right than the query."""
    place = jnp.arange(length)
    return place <= place[:, None]


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    input_mask: jax.Array | Shared,
    noise: Noise | None,
    rate: float,
    window: jax.Array | None = None,
    kept: Scores = "kept",
) -> jax.Array:
    """Computes scaled dot-product attention with dropout on the probabilities.

    Where they are `recomputed`, nothing of size [S, S] is kept for the backward pass: it computes
    the probabilities again from the logarithm of their sum, and the gradient of the softmax from
    the result (the identities of Dao et al. 2022, FlashAttention, section 3.1).

    Args:
      query: [B, S, H, D / H].
      key: as query.
      value: as query.
      input_mask: [B, S], 1 for real tokens, 0 for padding; or which examples share the rows, none
        of which sees another.
      noise: of the probabilities; None drops nothing.
      rate: share of probabilities dropped.
      window: bool [S, S], which keys a query attends to; None: to all.

    Returns:
      [B, S, H, D / H], in the type of value.
    """
    noise = noise if rate else None
    if kept == "recomputed":
        return _attend_recomputed(rate, query, key, value, _unseen(input_mask), noise, window)
    scores = _scores(query, key, _unseen(input_mask), window)
    probs = jax.nn.softmax(scores, axis=-1).astype(value.dtype)
    if noise is not None:
        probs = jnp.where(_kept(noise, probs.shape, rate), probs, jnp.zeros_like(probs))
        value = _scaled(value, noise.scale(rate))
    return _product("bhqk,bkhd->bqhd", probs, value).astype(value.dtype)


def attend_packed(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    packing: Packing,
    window: jax.Array | None = None,
) -> jax.Array:
    """Computes `attend` without dropout, each text by itself: [B, S, H, D / H] each -> the same.

    `window`: bool [K, K].
    """
    # Heads before places: else a CPU turns all scores around.
    query, key, value = (jnp.swapaxes(packing.unpack(x), 1, 2) for x in (query, key, value))
    factor = 1.0 / math.sqrt(query.shape[-1])
    scores = _product("nhqd,nhkd->nhqk", query, key) * factor + _padding(packing.mask)
    scores = _within(window, scores)
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
    unseen: jax.Array,
    noise: Noise | None,
    window: jax.Array | None,
) -> tuple[jax.Array, tuple[Any, ...]]:
    scores = _scores(query, key, unseen, window)
    highest = scores.max(axis=-1, keepdims=True)
    weights = jnp.exp(scores - highest).astype(value.dtype)
    sums = _row_sums(weights)
    scale = 1.0
    if noise is not None:
        weights = jnp.where(_kept(noise, weights.shape, rate), weights, jnp.zeros_like(weights))
        scale = noise.scale(rate)
    # Divided afterwards: a row of the context is shorter than one of the weights.
    context = _product("bhqk,bkhd->bqhd", weights, value) * jnp.swapaxes(scale / sums, 1, 2)
    context = checkpoint_name(context.astype(value.dtype), _CONTEXT)
    log_sums = checkpoint_name((highest + jnp.log(sums))[..., 0], _LOG_SUMS)
    return context, (query, key, value, unseen, noise, window, log_sums, context)


def _attend_recomputed_backward(
    rate: float, kept: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, None, None, None]:
    query, key, value, unseen, noise, window, log_sums, context = kept
    dtype = value.dtype
    # Here [B, H, K, Q], queries last, as bits are drawn: the TPU compilers' choice otherwise is to
    # copy the bits into another order, which costs a tenth of a step.
    scores = jnp.swapaxes(_scores(query, key, unseen, window), 2, 3)
    probs = jnp.exp(scores - log_sums[:, :, None, :])
    # The softmax's gradient subtracts sum(p * dp) over keys, which is sum(context * gradient).
    inner = (gradient.astype(jnp.float32) * context.astype(jnp.float32)).sum(axis=-1)
    inner = jnp.swapaxes(inner, 1, 2)[:, :, None, :]
    keep, dropped, scaled = None, probs.astype(dtype), gradient
    if noise is not None:
        keep = noise.keep(probs.shape, rate)
        dropped = jnp.where(keep, dropped, jnp.zeros_like(dropped))
        # Folded into a factor of each product: a scale between a mask and a product is more than
        # the compiler for TPU v6e survives.
        value, scaled = (_scaled(x, noise.scale(rate)) for x in (value, gradient))
    d_probs = _product("bkhd,bqhd->bhkq", value, gradient)
    if keep is not None:
        d_probs = jnp.where(keep, d_probs, jnp.zeros_like(d_probs))
    d_scores = (probs * (d_probs - inner)).astype(dtype)
    factor = 1.0 / math.sqrt(query.shape[-1])
    d_query = _product("bhkq,bkhd->bqhd", d_scores, key) * factor
    d_key = _product("bhkq,bqhd->bkhd", d_scores, query * jnp.asarray(factor, dtype))
    d_value = _product("bhkq,bqhd->bkhd", dropped, scaled)
    return d_query.astype(dtype), d_key.astype(dtype), d_value.astype(dtype), None, None, None


_attend_recomputed.defvjp(_attend_recomputed_forward, _attend_recomputed_backward)


def _unseen(input_mask: jax.Array | Shared) -> jax.Array:
    """Returns what `_scores` takes: of padding float32 [B, 1, 1, K], of examples their numbers."""
    if isinstance(input_mask, Shared):
        return input_mask.numbers
    return _padding(input_mask)


def _padding(input_mask: jax.Array) -> jax.Array:
    """Returns what scores of padding are lowered by: [B, K], 1 or 0 -> float32 [B, 1, 1, K]."""
    return ((1.0 - input_mask.astype(jnp.float32)) * MASKED_SCORE)[:, None, None, :]


def _scores(
    query: jax.Array, key: jax.Array, unseen: jax.Array, window: jax.Array | None
) -> jax.Array:
    """Computes scores of [B, Q, H, D / H] and [B, K, H, D / H]: float32 [B, H, Q, K].

    `unseen` is float32, added to the scores; or int32 [B, K], by which tokens know each other: made
    into what is added here, since no [Q, K] of it then need be kept.
    """
    if unseen.dtype == jnp.int32:
        same = unseen[:, :, None] == unseen[:, None, :]
        unseen = jnp.where(same, 0.0, MASKED_SCORE)[:, None]
    factor = 1.0 / math.sqrt(query.shape[-1])
    return _within(window, _product("bqhd,bkhd->bhqk", query, key) * factor + unseen)


def _within(window: jax.Array | None, scores: jax.Array) -> jax.Array:
    """Lowers scores [..., Q, K] of keys outside of a query's window."""
    return scores if window is None else scores + jnp.where(window, 0.0, MASKED_SCORE)


def _scaled(x: jax.Array, scale: float) -> jax.Array:
    """Returns x times scale, in the type of x; the scale itself is not rounded to it.

    In bfloat16 1 / 0.9 would be 1.109375, and all that is scaled by it 0.16 % too small.
    """
    return (x.astype(jnp.float32) * scale).astype(x.dtype)


def _kept(noise: Noise, shape: tuple[int, ...], rate: float) -> jax.Array:
    """Draws bool `shape` = [B, H, Q, K] for scores; bits are in the order of [B, H, K, Q]."""
    b, h, q, k = shape
    return jnp.swapaxes(noise.keep((b, h, k, q), rate), 2, 3)


def _row_sums(weights: jax.Array) -> jax.Array:
    """Sums rows: [B, H, Q, K] -> float32 [B, H, Q, 1]."""
    if weights.dtype != jnp.bfloat16:
        return weights.sum(axis=-1, keepdims=True)
    # A product with ones, which a TPU's matrix unit does next to the next one.
    ones = jnp.ones((weights.shape[-1], _LANES), weights.dtype)
    return _product("bhqk,kn->bhqn", weights, ones)[..., :1]


def _product(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=jnp.float32)
