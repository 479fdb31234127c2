"""Pooling of texts into vectors, and losses of vectors: pairs of a sum and a count, in float32.

Candidates are the texts of all devices. Inside a `shard_map`, `axes` are the axes of the mesh over
which examples are sharded; otherwise they are ().

Shape letters: E examples of a shard, A examples of all shards, N texts after the anchor, D width.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Pooling = Literal["mean", "cls", "last"]
Axes = tuple[str, ...]

# Computes the scores of all pairs: vectors of n queries, arrays [n, ...], and of m texts, arrays
# [m, ...], -> float32 [n, m].
Score = Callable[[Any, Any], jax.Array]

_EXCLUDED = -1e9  # the logit of an excluded candidate
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
    weights: jax.Array  # float32 [E], 0 for an unused example


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
    forward, hits = batch_losses(
        dot_products, (vectors[:, 0], vectors[:, 1:]), keys, weights, scale, axes
    )
    all_keys, all_weights = _gather(keys, axes), _gather(weights, axes)
    anchors, anchor_keys = _gather(vectors[:, 0], axes), all_keys[:, 0]
    excluded = _are_equal(keys[:, 0], anchor_keys) | _are_equal(keys[:, 1], all_keys[:, 1])
    excluded |= _are_equal(keys[:, 1], anchor_keys)
    own = _own_examples(len(keys), axes)
    backward = _mask(scale * dot_products(vectors[:, 1], anchors), excluded, all_weights, own)
    loss = (forward + _cross_entropy(backward, own)) / 2
    total = weights.sum()
    return jnp.stack([(weights * loss).sum(), total]), jnp.stack([(weights * hits).sum(), total])


def batch_losses(
    score: Score,
    texts: tuple[Any, Any],
    keys: jax.Array,
    weights: jax.Array,
    scale: jax.Array | float,
    axes: Axes = (),
) -> tuple[jax.Array, jax.Array]:
    """Computes the cross-entropy of each positive among all texts except anchors.

    A text equal to the positive or to the anchor, and the positive of an equal anchor in another
    example, are not used as negatives.

    Args:
      score: computes the scores of all pairs.
      texts: vectors of the anchors, arrays [E, ...], and of the N others, arrays [E, N, ...].
      keys: uint32 [E, 1 + N], equal for equal texts; 0: there is no text.
      weights: float32 [E], 0 for an unused example.
      scale: factor of scores: 1 / temperature.
      axes: the mesh axes over which examples are sharded.

    Returns:
      Losses in nats, float32 [E], and whether the positive has the highest score, float32 [E].
    """
    anchors, others = texts
    count = keys.shape[1] - 1
    gathered = jax.tree.map(lambda x: _gather(x, axes), others)
    candidates = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), gathered)
    all_keys, all_weights = _gather(keys, axes), _gather(weights, axes)
    candidate_keys, own = all_keys[:, 1:].reshape(-1), _own_examples(len(keys), axes) * count
    # The positive of an equal anchor in another example is excluded; its negatives are not.
    is_positive = jnp.arange(len(candidate_keys)) % count == 0
    excluded = _are_equal(keys[:, 0], candidate_keys) | _are_equal(keys[:, 1], candidate_keys)
    same_anchor = _are_equal(keys[:, 0], all_keys[:, 0])
    excluded |= jnp.repeat(same_anchor, count, axis=1) & is_positive
    used = jnp.repeat(all_weights, count) * (candidate_keys > 0)
    logits = _mask(scale * score(anchors, candidates), excluded, used, own)
    positive = jnp.take_along_axis(logits, own[:, None], axis=1)[:, 0]
    hits = (positive >= logits.max(axis=1)).astype(jnp.float32)
    return _cross_entropy(logits, own), hits


def _own_examples(count: int, axes: Axes) -> jax.Array:
    """Returns the indices of this shard's `count` examples among all, int32 [count]."""
    own = jnp.arange(count)
    return own + lax.axis_index(axes) * count if axes else own


def score_distillation(
    loss: Literal["margin_mse", "kl_divergence"],
    scores: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    temperature: float,
) -> jax.Array:
    """Computes the error of scores against a teacher's: (sum, count).

    `margin_mse` is the squared error of the differences between the first score and each other one
    (Hofstätter et al. 2020); its count is that of differences. `kl_divergence` is the divergence of
    the softmax over the texts of an example, times the squared temperature (Hinton et al. 2015);
    its count is that of examples.

    Args:
      scores: float32 [E, N].
      targets: scores of the teacher, float32 [E, N]; nan where an example has fewer texts.
      weights: of the examples, float32 [E]; 0 for an unused example.
      temperature: divisor of both scores.
    """
    is_text = jnp.isfinite(targets)
    targets = jnp.where(is_text, targets, _EXCLUDED)
    if loss == "margin_mse":
        weights = weights[:, None] * is_text[:, 1:]
        errors = (scores[:, :1] - scores[:, 1:]) - (targets[:, :1] - targets[:, 1:])
        errors = jnp.square(jnp.where(is_text[:, 1:], errors, 0.0))
    else:
        scores = jnp.where(is_text, scores, _EXCLUDED)
        log_target = jax.nn.log_softmax(targets / temperature)
        gaps = log_target - jax.nn.log_softmax(scores / temperature)
        errors = (jnp.exp(log_target) * gaps).sum(axis=1) * temperature**2
    return jnp.stack([(weights * errors).sum(), weights.sum()])


# --- sparse vectors, and vectors of tokens --------------------------------------------------------


def max_logits(logits: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Returns the maximum over the tokens of each text.

    Maps the logits of masked LM, float32 [B, S, V], and `input_mask`, int32 [B, S], 0 for padding,
    to float32 [B, V].
    """
    return jnp.where(input_mask[..., None] > 0, logits, _EXCLUDED).max(axis=1)


def saturate(max_logits: jax.Array) -> jax.Array:
    """Returns sparse vectors, log(1 + relu(maximum over tokens)) (Formal et al. 2021)."""
    return jnp.log1p(jax.nn.relu(max_logits))


def dot_products(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the dot products of all pairs: [n, D] and [m, D] -> float32 [n, m]."""
    return jnp.matmul(a, b.T, preferred_element_type=jnp.float32)


def flops_penalty(vectors: jax.Array, weights: jax.Array, axes: Axes = ()) -> jax.Array:
    """Returns this shard's part of the penalty FLOPS (Paria et al. 2020), float32 [].

    The penalty is the sum of the squared means of each of the V weights over the texts of all
    shards: tokens that are active in many texts cost most, as in the search of an inverted index.

    Args:
      vectors: float32 [B, V], at least 0.
      weights: float32 [B], 0 excludes a text.
      axes: the mesh axes over which texts are sharded.
    """
    count = _gather(weights.sum(keepdims=True), axes).sum()
    own = weights @ vectors / jnp.maximum(count, 1.0)
    return (own * _gather(own[None], axes).sum(axis=0)).sum()


def apply_dense(
    vectors: jax.Array, dense: Mapping[str, jax.Array], activation: Literal["identity", "tanh"]
) -> jax.Array:
    """Applies the layer after the pooling: float32 [..., D] -> [..., W]."""
    outputs = jnp.matmul(vectors, dense["kernel"]) + dense["bias"]
    return jnp.tanh(outputs) if activation == "tanh" else outputs


def project(hidden: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns the vectors of tokens, of length 1: [B, S, D] and [D, P] -> float32 [B, S, P]."""
    return normalize(jnp.matmul(hidden.astype(jnp.float32), kernel))


def max_similarities(
    queries: tuple[jax.Array, jax.Array], texts: tuple[jax.Array, jax.Array]
) -> jax.Array:
    """Returns the score MaxSim of each text for each query (Khattab and Zaharia 2020).

    It is the sum over the query's tokens of the largest dot product with a token of the text.
    Queries are compared one after the other, forward and backward, so that only one query's
    products with all texts are in memory at a time.

    Args:
      queries: vectors float32 [n, S, D], and weights [n, S], 0 for tokens without a vector.
      texts: the same, [m, T, D] and [m, T].

    Returns:
      float32 [n, m].
    """
    vectors, weights = texts

    @jax.checkpoint
    def score(query: tuple[jax.Array, jax.Array]) -> jax.Array:
        products = jnp.einsum("sd,mtd->mst", query[0], vectors, preferred_element_type=jnp.float32)
        products = jnp.where(weights[:, None] > 0, products, _EXCLUDED)
        return products.max(axis=2) @ query[1]

    return lax.map(score, queries)


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
    weight `geometry` / D: the mean, over all texts, of the squared difference between the cosines
    of the vector and of its target to that text. So D times the sum is the squared distance plus
    `geometry` times the second error.

    Args:
      vectors, targets: float32 [B, D], of length 1.
      weights: float32 [B], 0 for an unused row.
      geometry: the weight of the second error, before the division by D.
      axes: the mesh axes over which texts are sharded.
    """
    errors = jnp.square(vectors - targets).sum(axis=-1)
    if geometry:
        all_vectors, all_targets, used = (_gather(x, axes) for x in (vectors, targets, weights))
        differences = jnp.square(
            dot_products(vectors, all_vectors) - dot_products(targets, all_targets)
        )
        errors = errors + geometry * (differences * used).sum(axis=1) / used.sum()
    return jnp.stack([(weights * errors).sum() / vectors.shape[1], weights.sum()])


def _gather(values: jax.Array, axes: Axes) -> jax.Array:
    """Returns the values of all shards in the order of the shards: [E, ...] -> [A, ...]."""
    return lax.all_gather(values, axes, tiled=True) if axes else values


def _are_equal(keys: jax.Array, candidates: jax.Array) -> jax.Array:
    return keys[:, None] == candidates[None]


def _mask(logits: jax.Array, excluded: jax.Array, used: jax.Array, own: jax.Array) -> jax.Array:
    """Masks the logits [E, C] of all candidates except the target and its negatives."""
    is_own = jnp.arange(logits.shape[1])[None] == own[:, None]
    return jnp.where(is_own | (~excluded & (used > 0)[None]), logits, _EXCLUDED)


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    target_logits = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - target_logits
