"""Pooling of texts into vectors, and losses that compare vectors, as sums and counts in float32.

Candidates are the texts of all devices. Inside a `shard_map`, `axes` are the axes of the mesh over
which examples are sharded; otherwise they are ().

Shape letters: E examples of a shard, A examples of all shards, N texts after the anchor, D width.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Pooling = Literal["mean", "cls", "last"]
Axes = tuple[str, ...]

# The logit of an excluded candidate.
_EXCLUDED = -1e9
# Added to squares before roots, so that no gradient is infinite.
_TINY = 1e-24


def pool(hidden: jax.Array, input_mask: jax.Array, pooling: Pooling) -> jax.Array:
    """Returns one vector for each text, not scaled: [B, S, D] -> float32 [B, D].

    Args:
      hidden: the encoder's output.
      input_mask: int32 [B, S], 0 for padding, which comes last.
      pooling: the mean of all tokens, or the vector of the first or last token.
    """
    hidden = hidden.astype(jnp.float32)
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        last = jnp.maximum(input_mask.sum(axis=1) - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    weights = input_mask.astype(jnp.float32)[..., None]
    return (hidden * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)


def normalize(vectors: jax.Array) -> jax.Array:
    """Returns vectors scaled to length 1; zeros stay zeros."""
    return vectors / jnp.sqrt(jnp.square(vectors).sum(axis=-1, keepdims=True) + _TINY)


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of a shard's examples: an anchor, its positive, and negatives."""

    vectors: jax.Array  # float32 [E, 1 + N, D], of any length
    keys: jax.Array  # uint32 [E, 1 + N], equal for equal texts
    weights: jax.Array  # float32 [E], 0 for an unused row


def contrastive_loss(
    texts: Texts, scale: jax.Array | float, axes: Axes = ()
) -> tuple[jax.Array, jax.Array]:
    """Computes the contrastive loss of cosines, InfoNCE (van den Oord et al. 2018).

    The loss is the mean of two cross-entropies: of each positive among all texts except anchors,
    and of each anchor among all anchors. A text equal to the target, or paired in its example with
    a text equal to the other side, is not used as a negative.

    Args:
      texts: the texts of this shard.
      scale: factor of cosines: 1 / temperature.
      axes: the mesh axes over which examples are sharded.

    Returns:
      (sum of losses in nats, sum of weights) and (positives that are nearest, sum of weights).
    """
    vectors, keys, weights = normalize(texts.vectors), texts.keys, texts.weights
    count, others = keys.shape[0], keys.shape[1] - 1
    all_vectors, all_keys, all_weights = (_gather(x, axes) for x in (vectors, keys, weights))
    own = jnp.arange(count)
    if axes:
        own = own + lax.axis_index(axes) * count

    anchors, candidates = all_vectors[:, 0], all_vectors[:, 1:].reshape(-1, vectors.shape[-1])
    anchor_keys, candidate_keys = all_keys[:, 0], all_keys[:, 1:].reshape(-1)
    same_anchor = _are_equal(keys[:, 0], anchor_keys)
    same_positive = _are_equal(keys[:, 1], all_keys[:, 1])
    # The positive of an equal anchor in another example is excluded; its negatives are not.
    is_positive = jnp.arange(len(candidate_keys)) % others == 0
    excluded = _are_equal(keys[:, 0], candidate_keys) | _are_equal(keys[:, 1], candidate_keys)
    excluded |= jnp.repeat(same_anchor, others, axis=1) & is_positive
    forward = scale * _cosines(vectors[:, 0], candidates)
    forward = _mask(forward, excluded, jnp.repeat(all_weights, others), own * others)
    excluded = same_anchor | same_positive | _are_equal(keys[:, 1], anchor_keys)
    backward = _mask(scale * _cosines(vectors[:, 1], anchors), excluded, all_weights, own)

    loss = (_cross_entropy(forward, own * others) + _cross_entropy(backward, own)) / 2
    positive = jnp.take_along_axis(forward, (own * others)[:, None], axis=1)[:, 0]
    hits = (positive >= forward.max(axis=1)).astype(jnp.float32)
    total = weights.sum()
    return jnp.stack([(weights * loss).sum(), total]), jnp.stack([(weights * hits).sum(), total])


def cosine_loss(texts: Texts, scores: jax.Array) -> jax.Array:
    """Computes the squared error of the cosine of two texts against a score: (sum, count).

    `scores` is float32 [E], from -1 to 1.
    """
    vectors = normalize(texts.vectors)
    errors = jnp.square((vectors[:, 0] * vectors[:, 1]).sum(axis=-1) - scores)
    return jnp.stack([(texts.weights * errors).sum(), texts.weights.sum()])


def distillation_loss(
    vectors: jax.Array, targets: jax.Array, weights: jax.Array, geometry: float, axes: Axes = ()
) -> jax.Array:
    """Computes the error of vectors against a teacher's vectors: (sum, count).

    The error of a text is the mean over the D squared differences of two vectors (Reimers and
    Gurevych 2020, section 2; `MSELoss` of sentence-transformers). A second error is added with the
    weight `geometry` / D: the mean, over all texts, of the squared difference of the two cosines to
    that text. So D times the sum is the squared distance plus `geometry` times the second error.

    Args:
      vectors, targets: float32 [B, D], of length 1.
      weights: float32 [B], 0 for an unused row.
      geometry: the weight of the second error, before the division by D.
      axes: the mesh axes over which texts are sharded.
    """
    errors = jnp.square(vectors - targets).sum(axis=-1)
    if geometry:
        all_vectors, all_targets, used = (_gather(x, axes) for x in (vectors, targets, weights))
        differences = jnp.square(_cosines(vectors, all_vectors) - _cosines(targets, all_targets))
        errors = errors + geometry * (differences * used).sum(axis=1) / used.sum()
    return jnp.stack([(weights * errors).sum() / vectors.shape[1], weights.sum()])


def _gather(values: jax.Array, axes: Axes) -> jax.Array:
    """Returns the values of all shards in the order of the shards: [E, ...] -> [A, ...]."""
    return lax.all_gather(values, axes, tiled=True) if axes else values


def _cosines(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b.T, preferred_element_type=jnp.float32)


def _are_equal(keys: jax.Array, candidates: jax.Array) -> jax.Array:
    return keys[:, None] == candidates[None]


def _mask(logits: jax.Array, excluded: jax.Array, used: jax.Array, own: jax.Array) -> jax.Array:
    """Masks the logits [E, C] of all candidates except the target and its negatives."""
    is_own = jnp.arange(logits.shape[1])[None] == own[:, None]
    return jnp.where(is_own | (~excluded & (used > 0)[None]), logits, _EXCLUDED)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - target_logits
