"""The loss of predicted tokens, computed for one part of the vocabulary after another.

All logits together are the largest array of a step: predictions x vocabulary in float32. On a CPU
with fast products in bfloat16, writing and reading it takes longer than the products. Here a part
of the logits is computed, used and forgotten, and computed again in the backward pass (Wijmans et
al. 2024, Cut Your Losses in Large-Vocabulary Language Models).

Shape letters: R predictions, D width, V vocabulary rows, N parts of the vocabulary, C rows of a
part.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax.model.encoder import VOCAB_MULTIPLE
from bert_jax.model.layers import force_row_major

_Saved = tuple[jax.Array, ...]


def classify_by_part(
    hidden: jax.Array,
    table: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes `losses.classification` of the logits `layers.linear(hidden, table, bias)`.

    Args:
      hidden: [..., D], any float type, which is that of the products.
      table: float32 [V, D].
      bias: float32 [V].
      labels: int32 [...].
      weights: float32 [...]; 0 excludes a prediction.

    Returns:
      (sum of weighted losses in nats, sum of weights) and (weighted hits, sum of weights).
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    weights = weights.reshape(-1)
    loss, hits = _sums(hidden, table, bias, labels, weights)
    count = weights.sum()
    return jnp.stack([loss, count]), jnp.stack([hits, count])


@jax.custom_vjp
def _sums(
    hidden: jax.Array, table: jax.Array, bias: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of weighted losses and of weighted hits of predictions [R, D]."""
    return _forward(hidden, table, bias, labels, weights)[0]


def _forward(
    hidden: jax.Array, table: jax.Array, bias: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    def add_part(sums: _Saved, part: _Saved) -> tuple[_Saved, None]:
        """Adds a part of the vocabulary to the maximum, the denominator and the label's logit."""
        maximum, denominator, label_logits = sums
        rows, biases, first = part
        logits = _logits(hidden, rows, biases)
        new = jnp.maximum(maximum, logits.max(axis=1))
        denominator *= jnp.exp(maximum - new)
        denominator += jnp.exp(logits - new[:, None]).sum(axis=1)
        columns = labels - first
        own = jnp.take_along_axis(logits, columns[:, None], axis=1, mode="clip")[:, 0]
        is_inside = (columns >= 0) & (columns < len(rows))
        return (new, denominator, jnp.where(is_inside, own, label_logits)), None

    zeros = jnp.zeros(len(hidden))
    start = jnp.full_like(zeros, -jnp.inf), zeros, zeros
    (maximum, denominator, label_logits), _ = lax.scan(add_part, start, _parts(table, bias))
    log_sums = maximum + jnp.log(denominator)
    sums = weights * (log_sums - label_logits), weights * (label_logits >= maximum)
    return jax.tree.map(jnp.sum, sums), (hidden, table, bias, labels, weights, log_sums)


def _backward(
    saved: _Saved, gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    hidden, table, bias, labels, weights, log_sums = saved
    scale = gradients[0] * weights

    def add_part(d_hidden: jax.Array, part: _Saved) -> tuple[jax.Array, _Saved]:
        """Adds a part's gradient of the hidden states; returns those of its rows and biases."""
        rows, biases, first = part
        shares = jnp.exp(_logits(hidden, rows, biases) - log_sums[:, None])
        is_label = jnp.arange(len(rows)) == (labels - first)[:, None]
        d_logits = (shares - is_label) * scale[:, None]
        d_biases = d_logits.sum(axis=0)
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden += _product(d_logits, rows.astype(hidden.dtype), 0)
        # Only a row-major first operand is multiplied at full speed, see `layers`.
        return d_hidden, (_product(force_row_major(d_logits.T), hidden, 0), d_biases)

    start = jnp.zeros(hidden.shape, jnp.float32)
    d_hidden, (d_table, d_bias) = lax.scan(add_part, start, _parts(table, bias))
    d_table, d_bias = d_table.reshape(table.shape), d_bias.reshape(bias.shape)
    return d_hidden.astype(hidden.dtype), d_table, d_bias, None, None


_sums.defvjp(_forward, _backward)


def _parts(table: jax.Array, bias: jax.Array) -> _Saved:
    """Cuts the vocabulary: float32 [N, C, D], [N, C], and the number of each part's first row."""
    count = len(table) // VOCAB_MULTIPLE
    firsts = jnp.arange(count) * VOCAB_MULTIPLE
    return table.reshape(count, VOCAB_MULTIPLE, -1), bias.reshape(count, VOCAB_MULTIPLE), firsts


def _logits(hidden: jax.Array, rows: jax.Array, biases: jax.Array) -> jax.Array:
    """Computes the logits of a part, float32 [R, C]."""
    return _product(hidden, rows.astype(hidden.dtype), 1) + biases


def _product(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Contracts the columns of a matrix with an axis of another; sums are float32."""
    dimensions: Any = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
