"""ModernBERT's encoder (Warner et al. 2024): pre-norm layers with rotary positions and windows.

Numerics and layout follow transformers' ModernBertModel. A layer norm comes after the embeddings,
before each part of a layer (not before the first attention) and at the end; none has a bias, and
no product. Layers 0, n, 2n, ... attend to whole rows, n being `model.global_every`, the others to a
window around each token. No token knows which segment it is of.

The layers' parameters are stacked along a first dimension L and scanned, as `model.encoder` does;
what differs between them is chosen by their number.

Shape letters: B batch, S sequence, D width, F feed-forward, H heads, L layers, V vocabulary.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.config import Model
from bert_jax.model import attention, layers, rotary_kernels
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import (
    PRODUCT,
    Embedding,
    Loop,
    Scores,
    initializer,
    layer_initializers,
    look_up,
    padded_vocab_size,
    run_layers,
)
from bert_jax.model.kernels import Kernels


class Embeddings(nnx.Module):
    """Token embeddings, normalised."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        init, width = initializer(cfg), cfg.hidden_size
        self.word = Embedding(cfg.vocab_size, width, init, rngs=rngs, rows=padded_vocab_size(cfg))
        self.layer_norm = layers.ScaleNorm(width)

    def __call__(self, input_ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
        """int32 [B, S] -> float32 [B, S, D]; words as they are in the compute type."""
        return self.layer_norm(look_up(self.word.embedding[...], input_ids, dtype))


class Layer(nnx.Module):
    """Attention and a gated feed-forward part, each after a layer norm of what it adds to.

    The first layer's attention has no norm before it: that scale is not used, and stays 1.
    """

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        width, inner = cfg.hidden_size, cfg.intermediate_size
        init, output_init = layer_initializers(cfg, _output_initializer(cfg))
        self.attention_layer_norm = layers.ScaleNorm(width)
        self.query = layers.Linear(width, width, init, rngs=rngs)
        self.key = layers.Linear(width, width, init, rngs=rngs)
        self.value = layers.Linear(width, width, init, rngs=rngs)
        self.attention_output = layers.Linear(width, width, output_init, rngs=rngs)
        self.output_layer_norm = layers.ScaleNorm(width)
        self.intermediate = layers.Linear(width, inner, init, rngs=rngs)
        self.gate = layers.Linear(width, inner, init, rngs=rngs)
        self.output = layers.Linear(inner, width, output_init, rngs=rngs)


def _output_initializer(cfg: Model) -> nnx.Initializer:
    """Returns the reference's distribution of what adds to the residual, 2 L times in all."""
    return jax.nn.initializers.truncated_normal(
        cfg.initializer_range / (2 * cfg.num_hidden_layers) ** 0.5
    )


class Encoder(nnx.Module):
    """Embeddings, L layers and a norm."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        # One `Layer` whose parameters carry a first dimension L.
        self.layers = jax.vmap(lambda key: Layer(cfg, rngs=nnx.Rngs(params=key)))(keys)
        self.final_layer_norm = layers.ScaleNorm(cfg.hidden_size)


class Transform(nnx.Module):
    """The layers below every head of the reference; `model.heads.transformed` runs them."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        width, init = cfg.hidden_size, _output_initializer(cfg)
        self.transform = layers.Linear(width, width, init, rngs=rngs)
        self.layer_norm = layers.ScaleNorm(width)


class MaskedLM(Transform):
    """Transform and output bias; the output weights are the word embeddings."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        self.output_bias = nnx.Param(jnp.zeros(padded_vocab_size(cfg), jnp.float32))


def rotations(cfg: Model, positions: jax.Array) -> jax.Array:
    """Returns cosines and sines of the angles by which pairs are turned (Su et al. 2021).

    Args:
      cfg: whose bases they are of.
      positions: int32 [..., S].

    Returns:
      float32 [2, 2, ..., S, 1, D / H / 2]: of layers that attend to whole rows, and of the others,
      cosines and sines.
    """
    width = cfg.hidden_size // cfg.num_attention_heads
    bases = np.array([[cfg.global_rotary_base], [cfg.local_rotary_base]])
    steps = jnp.asarray(bases ** -(np.arange(0, width, 2) / width), jnp.float32)
    steps = steps.reshape(2, *[1] * (positions.ndim + 1), -1)
    angles = positions.astype(jnp.float32)[..., None, None] * steps
    return jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)


@jax.custom_vjp
def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Turns pairs of x, each half a head apart; they are turned in float32.

    Args:
      x: [B, S, H, D / H], any float type.
      rotation: cosines and sines, float32 [2, ..., S, 1, D / H / 2].

    Returns:
      The same shape and type as x.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = rotation
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _rotate_forward(x: jax.Array, rotation: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rotate(x, rotation), rotation


def _rotate_backward(rotation: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    cosine, sine = rotation
    return rotate(gradient, jnp.stack([cosine, -sine])), None


rotate.defvjp(_rotate_forward, _rotate_backward)


def run_layer(
    layer: Layer,
    cfg: Model,
    number: jax.Array,
    x: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    rotations: jax.Array,
    noise: layers.Noise | None,
    scores: Scores,
    kernels: Kernels | None = None,
) -> jax.Array:
    """Runs one layer, the `number`-th from 0: [B, S, D] in the compute type -> the same.

    With `kernels` attention runs in them, and `rotations` are laid out for them.
    """
    at = (lambda site: None) if noise is None else noise.at
    b, s, d = x.shape
    heads = (b, s, cfg.num_attention_heads, d // cfg.num_attention_heads)

    def product(linear: layers.Linear, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return checkpoint_name(linear(x).astype(x.dtype).reshape(shape), PRODUCT)

    is_global = number % cfg.global_every == 0
    before = jnp.where(number == 0, x, layer.attention_layer_norm(x).astype(x.dtype))
    if kernels is not None:
        projected = (
            product(linear, before, x.shape) for linear in (layer.query, layer.key, layer.value)
        )
        shared = isinstance(input_mask, Shared)
        context = rotary_kernels.attention(
            kernels,
            *projected,
            rotations,
            input_mask.numbers if shared else input_mask,
            is_global,
            cfg.num_attention_heads,
            "shared" if shared else "alone",
            _half(cfg),
            (_wholes(cfg), cfg.num_hidden_layers),
        )
    else:
        rotation = jnp.where(is_global, rotations[0], rotations[1])
        query, key = (
            rotate(product(linear, before, heads), rotation) for linear in (layer.query, layer.key)
        )
        value = product(layer.value, before, heads)
        longest = input_mask.tokens.shape[1] if isinstance(input_mask, Packing) else s
        window = _window(cfg, is_global, longest)
        if isinstance(input_mask, Packing):
            context = attention.attend_packed(query, key, value, input_mask, window)
        else:
            attend = attention.attend if scores == "kept" else attention.attend_recomputed
            rate = cfg.attention_probs_dropout_prob
            context = attend(query, key, value, input_mask, at(0), rate, window)
    attended = product(layer.attention_output, context.reshape(b, s, d), x.shape)
    attended = layers.dropout(attended.astype(jnp.float32), at(1), cfg.hidden_dropout_prob)
    x = (x + attended).astype(x.dtype)
    before = layer.output_layer_norm(x).astype(x.dtype)
    inner = product(layer.intermediate, before, (b, s, -1)).astype(jnp.float32)
    gate = product(layer.gate, before, (b, s, -1)).astype(jnp.float32)
    inner = (layers.activation(cfg.hidden_act, inner) * gate).astype(x.dtype)
    outer = product(layer.output, inner, x.shape).astype(jnp.float32)
    return (x + layers.dropout(outer, at(2), cfg.hidden_dropout_prob)).astype(x.dtype)


def _wholes(cfg: Model) -> int:
    """Returns how many layers attend to whole rows."""
    return -(-cfg.num_hidden_layers // cfg.global_every)


def _half(cfg: Model) -> int:
    """Returns how far a window reaches on each side; 0 if every layer attends to whole rows."""
    return 0 if cfg.global_every == 1 else cfg.local_window // 2


def _window(cfg: Model, is_global: jax.Array, length: int) -> jax.Array | None:
    """Returns which keys a query attends to, bool [S, S]; None if every layer attends to all."""
    half = _half(cfg)
    left = attention.to_the_left(length) if cfg.direction == "left_to_right" else None
    if not half or length <= half + 1:
        return left
    place = jnp.arange(length)
    near = is_global | (jnp.abs(place[:, None] - place) <= half)
    return near if left is None else near & left


def encode(
    encoder: Encoder,
    cfg: Model,
    input_ids: jax.Array,
    segment_ids: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    noise: layers.Noise | None,
    loop: Loop,
    outputs: Literal["last", "all"] = "last",
) -> jax.Array:
    """Runs the encoder, see `model.kinds`; segments are not looked at.

    Without its upper layers it is not normalised at the end either.
    """
    del segment_ids
    dtype = jnp.dtype(cfg.compute_dtype)
    shared = isinstance(input_mask, Shared | Packing)
    positions = input_mask.positions if shared else jnp.arange(input_ids.shape[1])
    x = encoder.embeddings(input_ids, dtype)
    embedding_noise = None if noise is None else noise.at(cfg.num_hidden_layers)
    x = layers.dropout(x, embedding_noise, cfg.hidden_dropout_prob).astype(dtype)
    turns = rotations(cfg, positions)
    kernels = _kernels(cfg, x.shape, input_mask, noise, loop)
    if kernels is not None:
        turns = rotary_kernels.turns(turns, x.shape[-1] // cfg.num_attention_heads)

    def run(
        layer: Layer, number: jax.Array, x: jax.Array, noise: layers.Noise | None, scores: Scores
    ) -> jax.Array:
        return run_layer(layer, cfg, number, x, input_mask, turns, noise, scores, kernels)

    last, every = run_layers(run, encoder.layers, x, noise, loop, outputs)
    if len(jax.tree.leaves(encoder.layers)[0]) == cfg.num_hidden_layers:
        last = encoder.final_layer_norm(last).astype(dtype)
        every = None if every is None else every.at[-1].set(last)
    return last if every is None else every


def _kernels(
    cfg: Model,
    shape: tuple[int, ...],
    input_mask: jax.Array | Shared | Packing,
    noise: layers.Noise | None,
    loop: Loop,
) -> Kernels | None:
    """Returns how kernels are made for attention; None if XLA's form is to compute it.

    They drop no probabilities and attend to both sides. Without noise nothing is gained, and texts
    that are by themselves are no rows.
    """
    if loop.kernels is None or noise is None or isinstance(input_mask, Packing):
        return None
    if cfg.direction == "left_to_right":
        return None
    sizes = cfg.num_attention_heads, *shape[1:], _half(cfg)
    fits = not cfg.attention_probs_dropout_prob and rotary_kernels.fits(loop.kernels, *sizes)
    return loop.kernels if fits else None


def attention_probabilities(encoder: Encoder, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Computes where the pieces of a text look in each layer: see `model.kinds`."""
    count, length, width = hidden.shape
    numbers = jnp.arange(count)
    turns = rotations(cfg, jnp.arange(length))

    def of_layer(layer: Layer, number: jax.Array, x: jax.Array) -> jax.Array:
        is_global = number % cfg.global_every == 0
        rotation = jnp.where(is_global, turns[0], turns[1])
        before = jnp.where(number == 0, x, layer.attention_layer_norm(x))
        shape = (length, cfg.num_attention_heads, width // cfg.num_attention_heads)
        query, key = (
            rotate(linear(before).reshape(shape), rotation) for linear in (layer.query, layer.key)
        )
        scores = jnp.einsum("qhd,khd->hqk", query, key) / shape[-1] ** 0.5
        window = _window(cfg, is_global, length)
        seen = scores if window is None else jnp.where(window, scores, -jnp.inf)
        return jax.nn.softmax(seen, axis=-1)

    return jax.vmap(of_layer)(encoder.layers, numbers, hidden)


def token_flops(cfg: Model, sequence_length: int) -> int:
    """Counts the operations of a forward pass through all layers, a token of so long a row."""
    width, inner, count = cfg.hidden_size, cfg.intermediate_size, cfg.num_hidden_layers
    wholes = _wholes(cfg)
    half = min(cfg.local_window // 2, sequence_length - 1)
    # A window is cut off at both ends of a row: half (half + 1) keys are missing in all.
    near = 2 * half + 1 - half * (half + 1) / sequence_length
    keys = wholes * sequence_length + (count - wholes) * near
    # Query, key, value, output; feed-forward and gate; scores and their product with the values.
    return round(count * 2 * (4 * width * width + 3 * width * inner) + 4 * keys * width)
