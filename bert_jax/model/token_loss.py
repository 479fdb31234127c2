"""The cross-entropy of predicted tokens, computed in chunks of the vocabulary.

The array of all logits, float32 [predictions, vocabulary], is the largest of a training step. On a
CPU with fast matrix products in bfloat16, writing and reading it takes longer than the products.
Here the logits are computed one chunk at a time, and each chunk is discarded after use. The
backward pass computes them again (Wijmans et al. 2024, Cut Your Losses in Large-Vocabulary Language
Models).

Shape letters: P predictions, D width, V vocabulary rows (padded), N chunks, C tokens of a chunk.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax.model.encoder import VOCAB_MULTIPLE
from bert_jax.model.layers import force_row_major

_CHUNK = VOCAB_MULTIPLE  # tokens; every padded vocabulary has a multiple of them
_Arrays = tuple[jax.Array, ...]


def loss_and_hits(
    hidden: jax.Array,
    table: jax.Array,
    bias: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Equals `losses.classification` of all logits, hidden x table^T + bias.

    Args:
      hidden: [..., D], any float type, to which the table is rounded; sums are float32.
      table: float32 [V, D].
      bias: float32 [V].
      labels: int32 [...].
      weights: float32 [...]; 0 excludes a prediction. They get no gradient.

    Returns:
      float32 [2], the sum of weighted losses in nats and the sum of weights; and float32 [2], the
      sum of weighted hits and the sum of weights.
    """
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    weights = weights.reshape(-1)
    loss, hits = _loss_and_hits(hidden, table, bias, labels, weights)
    count = weights.sum()
    return jnp.stack([loss, count]), jnp.stack([hits, count])


@jax.custom_vjp
def _loss_and_hits(
    hidden: jax.Array, table: jax.Array, bias: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the sums of weighted losses and of weighted hits; hidden is [P, D]."""
    return _forward(hidden, table, bias, labels, weights)[0]


def _forward(
    hidden: jax.Array, table: jax.Array, bias: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], _Arrays]:
    def add_chunk(state: _Arrays, chunk: _Arrays) -> tuple[_Arrays, None]:
        """Updates the maximum, the sum of exponentials and the label's logit with a chunk."""
        old_maximum, sum_exp, label_logits = state
        rows, biases, offset = chunk
        logits = _logits(hidden, rows, biases)
        maximum = jnp.maximum(old_maximum, logits.max(axis=1))
        sum_exp *= jnp.exp(old_maximum - maximum)
        sum_exp += jnp.exp(logits - maximum[:, None]).sum(axis=1)
        columns = labels - offset
        is_inside = (columns >= 0) & (columns < _CHUNK)
        inside = jnp.take_along_axis(logits, columns[:, None], axis=1, mode="clip")[:, 0]
        return (maximum, sum_exp, jnp.where(is_inside, inside, label_logits)), None

    zeros = jnp.zeros(len(hidden))
    start = jnp.full_like(zeros, -jnp.inf), zeros, zeros
    (maximum, sum_exp, label_logits), _ = lax.scan(add_chunk, start, _chunks(table, bias))
    log_denominators = maximum + jnp.log(sum_exp)
    loss = (weights * (log_denominators - label_logits)).sum()
    hits = (weights * (label_logits >= maximum)).sum()
    return (loss, hits), (hidden, table, bias, labels, weights, log_denominators)


def _backward(
    saved: _Arrays, output_gradients: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array, None, None]:
    hidden, table, bias, labels, weights, log_denominators = saved
    scale = output_gradients[0] * weights  # hits have no gradient

    def add_chunk(d_hidden: jax.Array, chunk: _Arrays) -> tuple[jax.Array, _Arrays]:
        """Adds to the gradient of `hidden`; returns the gradients of a chunk's rows and biases."""
        rows, biases, offset = chunk
        probabilities = jnp.exp(_logits(hidden, rows, biases) - log_denominators[:, None])
        is_label = jnp.arange(_CHUNK) == (labels - offset)[:, None]
        d_logits = (probabilities - is_label) * scale[:, None]
        d_biases = d_logits.sum(axis=0)
        d_logits = d_logits.astype(hidden.dtype)
        d_hidden += _multiply(d_logits, rows.astype(hidden.dtype), 0)
        # On CPUs a product is fast only if its first matrix is row-major.
        d_rows = _multiply(force_row_major(d_logits.T), hidden, 0)
        return d_hidden, (d_rows, d_biases)

    start = jnp.zeros(hidden.shape, jnp.float32)
    d_hidden, (d_table, d_bias) = lax.scan(add_chunk, start, _chunks(table, bias))
    d_table, d_bias = d_table.reshape(table.shape), d_bias.reshape(bias.shape)
    return d_hidden.astype(hidden.dtype), d_table, d_bias, None, None


_loss_and_hits.defvjp(_forward, _backward)


def _chunks(table: jax.Array, bias: jax.Array) -> _Arrays:
    """Splits the vocabulary: rows [N, C, D], biases [N, C], and first token ids [N]."""
    offsets = jnp.arange(0, len(table), _CHUNK)
    return table.reshape(len(offsets), _CHUNK, -1), bias.reshape(-1, _CHUNK), offsets


def _logits(hidden: jax.Array, rows: jax.Array, biases: jax.Array) -> jax.Array:
    """Computes the logits of a chunk, float32 [P, C]."""
    return _multiply(hidden, rows.astype(hidden.dtype), 1) + biases


def _multiply(a: jax.Array, b: jax.Array, axis: int) -> jax.Array:
    """Multiplies matrices: contracts axis 1 of a with `axis` of b; sums are float32."""
    dimensions: Any = (((1,), (axis,)), ((), ()))
    return lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
