"""The transformer encoder of BERT and of ModernBERT, selected by `model.kind`.

`bert` (Devlin et al. 2018, section 3), with numerics and layout of google-research/bert,
modeling.py: a layer norm follows the embeddings and each residual addition. Vectors of positions
and segments are added to the token embeddings.

`modern` (Warner et al. 2024), as transformers' ModernBertModel: a layer norm follows the
embeddings, precedes each part of a layer (except the first attention) and ends the encoder. Norms
and products have no bias. Positions are rotary, the feed-forward part has a gate. Layers 0, n, 2n,
... with n = `model.global_every` are global: they attend to whole rows. The other layers are local:
they attend to a window around each token. There are no segments.

Shape letters: B batch, S sequence, D width, F feed-forward, H heads, L layers, V vocabulary.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.config import Model
from bert_jax.model import attention, attention_kernels, layers, rotary_kernels
from bert_jax.model import kernels as kernels_lib
from bert_jax.model.attention import Packing, Scores, Shared
from bert_jax.model.encoder import (
    PRODUCT,
    Embedding,
    Loop,
    initializer,
    look_up,
    padded_vocab_size,
    rope_angles,
    rotate,
    run_layers,
)
from bert_jax.model.kernels import Kernels

# --- parameters -------------------------------------------------------------------------------


def _is_modern(cfg: Model) -> bool:
    return cfg.kind == "modern"


def _norm(cfg: Model) -> layers.LayerNorm | layers.ScaleNorm:
    """Returns a layer norm as wide as the encoder."""
    if _is_modern(cfg):
        return layers.ScaleNorm(cfg.hidden_size)
    return layers.LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)


def _dense(cfg: Model) -> type[layers.Dense | layers.Linear]:
    """Returns the class of products: with or without a bias."""
    return layers.Linear if _is_modern(cfg) else layers.Dense


def _output_initializer(cfg: Model) -> nnx.Initializer:
    """Returns the reference's distribution for kernels that add to the residual stream."""
    if not _is_modern(cfg):
        return initializer(cfg)
    deviation = cfg.initializer_range / (2 * cfg.num_hidden_layers) ** 0.5  # for 2 L additions
    return jax.nn.initializers.truncated_normal(deviation)


def layer_initializers(cfg: Model) -> tuple[nnx.Initializer, nnx.Initializer]:
    """Returns the initializers of kernels that read x, and of kernels that add to x."""
    if cfg.initialization == "reference":
        return initializer(cfg), _output_initializer(cfg)
    scaled = jax.nn.initializers.truncated_normal(cfg.hidden_size**-0.5)
    return scaled, jax.nn.initializers.zeros


class Embeddings(nnx.Module):
    """Normalised token embeddings; `bert` adds segment and position embeddings."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        init, width = initializer(cfg), cfg.hidden_size
        self.word = Embedding(cfg.vocab_size, width, init, rngs=rngs, rows=padded_vocab_size(cfg))
        if not _is_modern(cfg):
            rows = cfg.position_offset + cfg.max_position_embeddings
            self.position = Embedding(rows, width, init, rngs=rngs)
            if cfg.type_vocab_size:
                self.segment = Embedding(cfg.type_vocab_size, width, init, rngs=rngs)
        self.position_offset = cfg.position_offset
        self.layer_norm = _norm(cfg)

    def __call__(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array,
        dtype: jnp.dtype,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """int32 [B, S] each -> float32 [B, S, D]; word embeddings are rounded to `dtype`.

        Without `positions` they count from 0 in each row.
        """
        word = look_up(self.word.embedding[...], input_ids, dtype)
        if not hasattr(self, "position"):
            return self.layer_norm(word)
        first = self.position_offset
        if positions is None:
            position = self.position.embedding[first : first + input_ids.shape[1]]
        else:
            position = self.position.embedding[positions + first if first else positions]
        if not hasattr(self, "segment"):
            return self.layer_norm(word + position)
        table = self.segment.embedding[...]
        if len(table) == 1:  # both segments share it
            return self.layer_norm(word + position + table[0])
        # A product with one-hot rows: its gradient is a product too, not a scatter into two rows.
        one_hot = jax.nn.one_hot(segment_ids.reshape(-1), len(table), dtype=jnp.float32)
        segment = (one_hot @ table).reshape(word.shape)
        return self.layer_norm(word + position + segment)


class Layer(nnx.Module):
    """Attention and feed-forward, each followed by a layer norm, or in `modern` preceded by one.

    The first layer of `modern` has no norm before its attention: the scale is unused and stays 1.
    """

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        width, inner, dense = cfg.hidden_size, cfg.intermediate_size, _dense(cfg)
        init, output_init = layer_initializers(cfg)
        self.query = dense(width, width, init, rngs=rngs)
        self.key = dense(width, width, init, rngs=rngs)
        self.value = dense(width, width, init, rngs=rngs)
        self.attention_output = dense(width, width, output_init, rngs=rngs)
        self.attention_layer_norm = _norm(cfg)
        self.intermediate = dense(width, inner, init, rngs=rngs)
        if _is_modern(cfg):
            self.gate = dense(width, inner, init, rngs=rngs)
        self.output = dense(inner, width, output_init, rngs=rngs)
        self.output_layer_norm = _norm(cfg)


class Encoder(nnx.Module):
    """Embeddings, L layers, and in `modern` a final norm."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        # One `Layer` whose parameters have a first dimension L.
        self.layers = jax.vmap(lambda key: Layer(cfg, rngs=nnx.Rngs(params=key)))(keys)
        if _is_modern(cfg):
            self.final_layer_norm = _norm(cfg)


class Transform(nnx.Module):
    """The layers before the output's product; `model.heads.apply_transform` runs it."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        width = cfg.hidden_size
        self.transform = _dense(cfg)(width, width, _output_initializer(cfg), rngs=rngs)
        self.layer_norm = _norm(cfg)


class MaskedLM(Transform):
    """Transform and output bias; the output weights are the word embeddings, or `output`."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        rows = padded_vocab_size(cfg)
        self.output_bias = nnx.Param(jnp.zeros(rows, jnp.float32))
        if cfg.output_table == "own":
            init = _output_initializer(cfg)
            self.output = Embedding(cfg.vocab_size, cfg.hidden_size, init, rngs=rngs, rows=rows)


# --- windows ----------------------------------------------------------------------------------


def _global_every(cfg: Model) -> int:
    """Returns n; the layers 0, n, 2n, ... are global."""
    return cfg.global_every if _is_modern(cfg) else 1


def _global_layers(cfg: Model) -> int:
    """Returns the number of global layers."""
    return -(-cfg.num_hidden_layers // _global_every(cfg))


def _half_window(cfg: Model) -> int:
    """Returns the positions of a window on each side; 0 if every layer is global."""
    return 0 if _global_every(cfg) == 1 else cfg.local_window // 2


def _window(cfg: Model, is_global: jax.Array | None, length: int) -> jax.Array | None:
    """Returns the keys that a query attends to, bool [S, S]; None: every layer attends to all."""
    half_window = _half_window(cfg)
    causal = attention.causal_mask(length) if cfg.direction == "left_to_right" else None
    if not half_window or is_global is None or length <= half_window + 1:
        return causal
    position = jnp.arange(length)
    near = is_global | (jnp.abs(position[:, None] - position) <= half_window)
    return near if causal is None else near & causal


# --- layers -----------------------------------------------------------------------------------


def product(dense: layers.Linear, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns W x + b of this shape, in the type of x. `remat="dots"` saves the product."""
    return checkpoint_name(dense(x).astype(x.dtype).reshape(shape), PRODUCT)


def _attention_input(layer: Layer, cfg: Model, number: jax.Array, x: jax.Array) -> jax.Array:
    """Returns the input of attention in the `number`-th layer, in the type of x."""
    if not _is_modern(cfg):
        return x
    return jnp.where(number == 0, x, layer.attention_layer_norm(x).astype(x.dtype))


def _queries_and_keys(
    layer: Layer,
    x: jax.Array,
    heads: tuple[int, ...],
    is_global: jax.Array | None,
    angles: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """Returns queries and keys of shape `heads`, rotated by `angles` unless None."""
    if angles is None or is_global is None:
        return product(layer.query, x, heads), product(layer.key, x, heads)
    rotation = jnp.where(is_global, angles[0], angles[1])
    query = rotate(product(layer.query, x, heads), rotation)
    return query, rotate(product(layer.key, x, heads), rotation)


def run_layer(
    layer: Layer,
    cfg: Model,
    number: jax.Array,
    x: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    angles: jax.Array | None,
    noise: layers.Noise | None,
    scores: Scores,
    kernels: Kernels | None = None,
) -> jax.Array:
    """Runs one layer, the `number`-th from 0: [B, S, D] in the compute type -> the same.

    `angles` are `rope_angles`, for `modern`; with `kernels`, which then compute attention, they
    are laid out by `rotary_kernels.lay_out_angles`.
    """
    at = (lambda site: None) if noise is None else noise.at
    b, s, d = x.shape
    heads = (b, s, cfg.num_attention_heads, d // cfg.num_attention_heads)
    is_global = None if angles is None else number % _global_every(cfg) == 0
    inputs = _attention_input(layer, cfg, number, x)
    if kernels is not None:
        assert not isinstance(input_mask, Packing)  # `_kernels` returns None for it
        rows, numbers = _rows_and_numbers(input_mask)
        windows = _half_window(cfg), _global_layers(cfg), cfg.num_hidden_layers
        static = rotary_kernels.RotaryAttentionShape(kernels, heads[-1], rows, *windows)
        projections = (layer.query, layer.key, layer.value)
        vectors = (product(dense, inputs, x.shape) for dense in projections)
        context = rotary_kernels.attention(static, *vectors, angles, numbers, is_global)
    else:
        query, key = _queries_and_keys(layer, inputs, heads, is_global, angles)
        value = product(layer.value, inputs, heads)
        longest = input_mask.tokens.shape[1] if isinstance(input_mask, Packing) else s
        window = _window(cfg, is_global, longest)
        options = at(0), cfg.attention_probs_dropout_prob, window, scores
        if not isinstance(input_mask, Packing):
            context = attention.attend(query, key, value, input_mask, *options)
        elif noise is None:
            context = attention.attend_packed(query, key, value, input_mask, window)
        else:
            query, key, value = map(input_mask.unpack, (query, key, value))
            mask = input_mask.mask
            context = input_mask.pack(attention.attend(query, key, value, mask, *options))
    attended = product(layer.attention_output, context.reshape(b, s, d), x.shape)
    attended = layers.dropout(attended.astype(jnp.float32), at(1), cfg.hidden_dropout_prob)
    added = x + attended
    added = added if _is_modern(cfg) else layer.attention_layer_norm(added)
    return feed_forward(layer, cfg, added.astype(x.dtype), noise)


def feed_forward(layer: Layer, cfg: Model, x: jax.Array, noise: layers.Noise | None) -> jax.Array:
    """Runs the second part of a layer: [B, S, D] in the compute type -> the same.

    Dropout uses site 2 of the layer's noise.
    """
    at = (lambda site: None) if noise is None else noise.at
    inputs = layer.output_layer_norm(x).astype(x.dtype) if _is_modern(cfg) else x
    inner = product(layer.intermediate, inputs, (*x.shape[:2], -1)).astype(jnp.float32)
    gate = product(layer.gate, inputs, inner.shape).astype(jnp.float32) if _is_modern(cfg) else None
    inner = layers.activation(cfg.hidden_act, inner)
    inner = inner if gate is None else inner * gate
    outer = product(layer.output, inner.astype(x.dtype), x.shape).astype(jnp.float32)
    added = x + layers.dropout(outer, at(2), cfg.hidden_dropout_prob)
    return (added if _is_modern(cfg) else layer.output_layer_norm(added)).astype(x.dtype)


def run_layer_in_kernels(
    layer: Layer,
    cfg: Model,
    x: jax.Array,
    input_mask: jax.Array | Shared,
    noise: layers.ShardNoise,
    kernels: Kernels,
) -> jax.Array:
    """Runs one layer of `bert` as `run_layer` does, with kernels for all except its products.

    Kernels that read a product add its bias.
    """

    def product(dense: layers.Linear, x: jax.Array) -> jax.Array:
        kernel = dense.kernel[...]
        no_bias = jnp.zeros(kernel.shape[1], jnp.float32)
        return checkpoint_name(layers.linear(x, kernel, no_bias).astype(x.dtype), PRODUCT)

    def residual_norm(dense: layers.Linear, inner: jax.Array, norm: layers.ScaleNorm, site: int):
        """The layer norm of x + dropout(dense(inner))."""
        flat = (array.reshape(-1, x.shape[-1]) for array in (x, product(dense, inner)))
        vectors = dense.bias[...], norm.scale[...], norm.bias[...]
        seed = noise.at(site).words()
        static = kernels_lib.Norm(kernels, cfg.hidden_dropout_prob, norm.eps)
        return kernels_lib.residual_norm(static, *flat, *vectors, seed, None).reshape(x.shape)

    projections = (layer.query, layer.key, layer.value)
    size, (rows, numbers) = x.shape[-1] // cfg.num_attention_heads, _rows_and_numbers(input_mask)
    context = attention_kernels.attention(
        attention_kernels.AttentionShape(kernels, size, cfg.attention_probs_dropout_prob, rows),
        *(product(dense, x) for dense in projections),
        jnp.stack([dense.bias[...] for dense in projections]),
        numbers,
        noise.at(0).words(),
        None,
    )
    x = residual_norm(layer.attention_output, context, layer.attention_layer_norm, 1)
    inner = checkpoint_name(layer.intermediate(x).astype(x.dtype), PRODUCT)
    inner = layers.activation(cfg.hidden_act, inner.astype(jnp.float32)).astype(x.dtype)
    return residual_norm(layer.output, inner, layer.output_layer_norm, 2)


def _rows_and_numbers(
    input_mask: jax.Array | Shared,
) -> tuple[Literal["alone", "shared"], jax.Array]:
    """Returns a mask as kernels read it: `AttentionShape.rows`, and the numbers."""
    if isinstance(input_mask, Shared):
        return "shared", input_mask.numbers
    return "alone", input_mask


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
    """Runs the encoder: see `model.kinds`. Truncated encoders of `modern` have no final norm."""
    dtype = jnp.dtype(cfg.compute_dtype)
    positions = input_mask.positions if isinstance(input_mask, Shared | Packing) else None
    if _is_modern(cfg) and positions is None:
        positions = jnp.arange(input_ids.shape[1])
    x = encoder.embeddings(input_ids, segment_ids, dtype, positions)
    embedding_noise = None if noise is None else noise.at(cfg.num_hidden_layers)
    x = layers.dropout(x, embedding_noise, cfg.hidden_dropout_prob).astype(dtype)
    angles = None if positions is None or not _is_modern(cfg) else rope_angles(cfg, positions)
    kernels = _kernels(cfg, x.shape, input_mask, noise, loop)
    if kernels is not None and angles is not None:
        angles = rotary_kernels.lay_out_angles(angles, x.shape[-1] // cfg.num_attention_heads)

    def run(
        layer: Layer, number: jax.Array, x: jax.Array, noise: layers.Noise | None, scores: Scores
    ) -> jax.Array:
        if kernels is not None and not _is_modern(cfg):
            # `_kernels` returns None for `Packing`; kernels seed their bits from the shard's key.
            assert isinstance(noise, layers.ShardNoise) and not isinstance(input_mask, Packing)
            return run_layer_in_kernels(layer, cfg, x, input_mask, noise, kernels)
        return run_layer(layer, cfg, number, x, input_mask, angles, noise, scores, kernels)

    last, states = run_layers(run, encoder.layers, x, noise, loop, outputs)
    if _is_modern(cfg) and len(jax.tree.leaves(encoder.layers)[0]) == cfg.num_hidden_layers:
        last = encoder.final_layer_norm(last).astype(dtype)
        states = None if states is None else states.at[-1].set(last)
    return last if states is None else states


def _kernels(
    cfg: Model,
    shape: tuple[int, ...],
    input_mask: jax.Array | Shared | Packing,
    noise: layers.Noise | None,
    loop: Loop,
) -> Kernels | None:
    """Returns the settings of kernels; None if XLA computes the layers.

    Kernels have no causal mask, and rotary ones no dropout of probabilities. They are not faster
    without noise, and do not support `Packing`.
    """
    if loop.kernels is None or noise is None or isinstance(input_mask, Packing):
        return None
    if cfg.direction == "left_to_right":
        return None
    if _is_modern(cfg):
        sizes = cfg.num_attention_heads, *shape[1:], _half_window(cfg)
        fits = not cfg.attention_probs_dropout_prob and rotary_kernels.fits(loop.kernels, *sizes)
    else:
        fits = kernels_lib.fits(cfg.num_attention_heads, *shape)
    return loop.kernels if fits else None


def attention_probabilities(encoder: Encoder, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Computes the attention probabilities of a text in each layer: see `model.kinds`."""
    count, length, width = hidden.shape
    heads = (length, cfg.num_attention_heads, width // cfg.num_attention_heads)
    angles = rope_angles(cfg, jnp.arange(length)) if _is_modern(cfg) else None

    def layer_probabilities(layer: Layer, number: jax.Array, x: jax.Array) -> jax.Array:
        is_global = number % _global_every(cfg) == 0
        inputs = _attention_input(layer, cfg, number, x)
        query, key = _queries_and_keys(layer, inputs, heads, is_global, angles)
        scores = jnp.einsum("qhd,khd->hqk", query, key) / heads[-1] ** 0.5
        window = _window(cfg, is_global, length)
        scores = scores if window is None else jnp.where(window, scores, -jnp.inf)
        return jax.nn.softmax(scores, axis=-1)

    return jax.vmap(layer_probabilities)(encoder.layers, jnp.arange(count), hidden)


def token_flops(cfg: Model, sequence_length: int) -> int:
    """Counts the operations for one token of a row in a forward pass through all layers."""
    width, count = cfg.hidden_size, cfg.num_hidden_layers
    global_layers = _global_layers(cfg)
    half = min(_half_window(cfg), sequence_length - 1)
    # The windows at both ends of a row lack half (half + 1) keys in all.
    near = 2 * half + 1 - half * (half + 1) / sequence_length
    keys = global_layers * sequence_length + (count - global_layers) * near
    # Query, key, value, output; feed-forward and gate; scores and their product with the values.
    inner = (3 if _is_modern(cfg) else 2) * cfg.intermediate_size
    return round(count * 2 * (4 * width + inner) * width + 4 * keys * width)
