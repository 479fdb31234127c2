"""One vector a text, and what is learned by comparing them, as sums and counts in float32.

Candidates are the texts of all devices: `axes` names those of the mesh over which examples are cut,
inside a `shard_map`; () of examples that are all here.

Shape letters: E examples of a shard, A those of all shards, N texts behind the first, D width.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

Pooling = Literal["mean", "cls", "last"]
Axes = tuple[str, ...]

# The logit of a candidate that is no negative.
_NONE = -1e9
# Added to squares before roots, so that no gradient is infinite.
_TINY = 1e-24


def pooled(hidden: jax.Array, input_mask: jax.Array, pooling: Pooling) -> jax.Array:
    """Returns a vector a text: float32 [B, D] of [B, S, D], not scaled.

    Args:
      hidden: what the encoder gives.
      input_mask: int32 [B, S], 0 for padding, which comes last.
      pooling: the mean of all pieces, or the vector of the first or of the last.
    """
    hidden = hidden.astype(jnp.float32)
    if pooling == "cls":
        return hidden[:, 0]
    if pooling == "last":
        last = jnp.maximum(input_mask.sum(axis=1) - 1, 0)
        return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    weights = input_mask.astype(jnp.float32)[..., None]
    return (hidden * weights).sum(axis=1) / jnp.maximum(weights.sum(axis=1), 1.0)


def unit(vectors: jax.Array) -> jax.Array:
    """Returns vectors scaled to length 1; zeros stay zeros."""
    return vectors / jnp.sqrt(jnp.square(vectors).sum(axis=-1, keepdims=True) + _TINY)


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts of a shard's examples: one that asks, one that answers it, others that do not."""

    vectors: jax.Array  # float32 [E, 1 + N, D], of any length
    keys: jax.Array  # uint32 [E, 1 + N], alike where texts are
    weights: jax.Array  # float32 [E], 0 where there is no example


def contrastive(
    texts: Texts, scale: jax.Array | float, axes: Axes = ()
) -> tuple[jax.Array, jax.Array]:
    """Computes how well texts are known from all others by the cosine (van den Oord et al. 2018).

    The loss is the mean of two cross-entropies: of each answer among the texts behind all first
    ones, and of each first text among all first ones. A text like the one that is looked for, or
    of an example whose other side is alike, is nobody's negative.

    Args:
      texts: of this shard.
      scale: by which cosines are multiplied: one over the temperature.
      axes: see above.

    Returns:
      (sum of losses in nats, sum of weights) and (answers that are nearest, sum of weights).
    """
    vectors, keys, weights = unit(texts.vectors), texts.keys, texts.weights
    count, behind = keys.shape[0], keys.shape[1] - 1
    all_vectors, all_keys, there = (_of_all(x, axes) for x in (vectors, keys, weights))
    own = jnp.arange(count)
    if axes:
        own = own + lax.axis_index(axes) * count

    firsts, others = all_vectors[:, 0], all_vectors[:, 1:].reshape(-1, vectors.shape[-1])
    first_keys, other_keys = all_keys[:, 0], all_keys[:, 1:].reshape(-1)
    same_first, same_answer = _alike(keys[:, 0], first_keys), _alike(keys[:, 1], all_keys[:, 1])
    # Of the texts behind another like first one its answer alone is an answer here, too.
    is_answer = jnp.arange(len(other_keys)) % behind == 0
    alike = _alike(keys[:, 0], other_keys) | _alike(keys[:, 1], other_keys)
    alike |= jnp.repeat(same_first, behind, axis=1) & is_answer
    asked = scale * _cosines(vectors[:, 0], others)
    asked = _masked(asked, alike, jnp.repeat(there, behind), own * behind)
    alike = same_first | same_answer | _alike(keys[:, 1], first_keys)
    answered = _masked(scale * _cosines(vectors[:, 1], firsts), alike, there, own)

    loss = (_cross_entropy(asked, own * behind) + _cross_entropy(answered, own)) / 2
    best = jnp.take_along_axis(asked, (own * behind)[:, None], axis=1)[:, 0]
    hits = (best >= asked.max(axis=1)).astype(jnp.float32)
    total = weights.sum()
    return jnp.stack([(weights * loss).sum(), total]), jnp.stack([(weights * hits).sum(), total])


def scored(texts: Texts, scores: jax.Array) -> jax.Array:
    """Returns the squared distance of the cosine of two texts from a score: (sum, count).

    `scores` is float32 [E], from -1 to 1.
    """
    vectors = unit(texts.vectors)
    errors = jnp.square((vectors[:, 0] * vectors[:, 1]).sum(axis=-1) - scores)
    return jnp.stack([(texts.weights * errors).sum(), texts.weights.sum()])


def distilled(
    vectors: jax.Array, wanted: jax.Array, weights: jax.Array, geometry: float, axes: Axes = ()
) -> jax.Array:
    """Returns how far vectors are from a teacher's: (sum, count).

    The error of a text is the mean over the D squared differences of two vectors (Reimers and
    Gurevych 2020, section 2; `MSELoss` of sentence-transformers). A second error is added with the
    weight `geometry` / D: the mean, over all texts, of the squared difference of the two cosines to
    that text. So D times the sum is the squared distance plus `geometry` times the second error.

    Args:
      vectors, wanted: float32 [B, D], of length 1.
      weights: float32 [B], 0 where there is no text.
      geometry: the weight of the second error, before the division by D.
      axes: see above.
    """
    errors = jnp.square(vectors - wanted).sum(axis=-1)
    if geometry:
        all_vectors, all_wanted, there = (_of_all(x, axes) for x in (vectors, wanted, weights))
        differences = jnp.square(_cosines(vectors, all_vectors) - _cosines(wanted, all_wanted))
        errors = errors + geometry * (differences * there).sum(axis=1) / there.sum()
    return jnp.stack([(weights * errors).sum() / vectors.shape[1], weights.sum()])


def _of_all(values: jax.Array, axes: Axes) -> jax.Array:
    """Returns the values of all shards in the order of the shards: [E, ...] -> [A, ...]."""
    return lax.all_gather(values, axes, tiled=True) if axes else values


def _cosines(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b.T, preferred_element_type=jnp.float32)


def _alike(keys: jax.Array, candidates: jax.Array) -> jax.Array:
    return keys[:, None] == candidates[None]


def _masked(logits: jax.Array, alike: jax.Array, there: jax.Array, own: jax.Array) -> jax.Array:
    """Returns logits [E, C] without the candidates that are no negatives."""
    is_own = jnp.arange(logits.shape[1])[None] == own[:, None]
    return jnp.where(is_own | (~alike & (there > 0)[None]), logits, _NONE)


def _cross_entropy(logits: jax.Array, own: jax.Array) -> jax.Array:
    wanted = jnp.take_along_axis(logits, own[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - wanted
