"""The transformer encoder of BERT and of ModernBERT, selected by `model.kind`.

`bert` (Devlin et al. 2018, section 3), with numerics and layout of google-research/bert,
modeling.py: a layer norm follows the embeddings and each residual addition. Vectors of positions
and segments are added to the token embeddings.

`modern` (Warner et al. 2024), as transformers' ModernBertModel: a layer norm follows the
embeddings, precedes each part of a layer (except the first attention) and ends the encoder. Norms
and linear layers have no bias. Positions are rotary, the feed-forward part has a gate. There are no
segments. Layers 0, n, 2n, ... with n = `model.global_every` are global: they attend to whole rows.
The other layers are local: they attend to a window around each token.

Shape letters: B batch, S sequence, D width, F feed-forward, H heads, L layers, V vocabulary.
"""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.config import Model
from bert_jax.model import attention, attention_kernels, cudnn_attention, layers, rotary_kernels
from bert_jax.model import kernels as kernels_lib
from bert_jax.model.attention import Packing, ProbabilityPolicy, Shared
from bert_jax.model.encoder import (
    LINEAR_OUTPUT,
    Embedding,
    Loop,
    attention_window,
    count_global_layers,
    global_every,
    half_window,
    initializer,
    look_up,
    padded_vocab_size,
    position_bias,
    rotary_cos_sin,
    rotate,
    run_layers,
)
from bert_jax.model.kernels import Kernels

# --- parameters -------------------------------------------------------------------------------


def _is_modern(cfg: Model) -> bool:
    return cfg.kind == "modern"


def _norm(cfg: Model) -> layers.LayerNorm | layers.BiaslessLayerNorm:
    """Returns a layer norm as wide as the encoder."""
    if _is_modern(cfg):
        return layers.BiaslessLayerNorm(cfg.hidden_size)
    return layers.LayerNorm(cfg.hidden_size, cfg.layer_norm_eps)


def _linear_class(cfg: Model) -> type[layers.Dense | layers.Linear]:
    """Returns the class of linear layers: with or without a bias."""
    return layers.Linear if _is_modern(cfg) else layers.Dense


def _output_initializer(cfg: Model) -> nnx.Initializer:
    """Returns the distribution of weights that write to the residual stream, and of outputs."""
    if not _is_modern(cfg):
        return initializer(cfg)
    deviation = cfg.initializer_range / (2 * cfg.num_hidden_layers) ** 0.5  # for 2 L additions
    return jax.nn.initializers.truncated_normal(deviation)


def layer_initializers(cfg: Model) -> tuple[nnx.Initializer, nnx.Initializer]:
    """Returns the initializers of weights that read, and that write to, the residual stream."""
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


class Transform(nnx.Module):
    """The layers before an output layer, in masked LM and in all of ModernBERT's heads."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.hidden_act = cfg.hidden_act
        width = cfg.hidden_size
        self.transform = _linear_class(cfg)(width, width, _output_initializer(cfg), rngs=rngs)
        self.layer_norm = _norm(cfg)

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """[..., D] -> the same, in the same type."""
        inner = layers.activation(self.hidden_act, self.transform(hidden))
        return self.layer_norm(inner).astype(hidden.dtype)


class MaskedLM(Transform):
    """The transform of masked LM, which a call computes, and parameters of the output layer.

    `heads.token_logits` computes the output layer, with the word embeddings or with `output`.
    """

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        rows = padded_vocab_size(cfg)
        self.output_bias = nnx.Param(jnp.zeros(rows, jnp.float32))
        if cfg.output_table == "own":
            init = _output_initializer(cfg)
            self.output = Embedding(cfg.vocab_size, cfg.hidden_size, init, rngs=rngs, rows=rows)


# --- layers -----------------------------------------------------------------------------------


def apply_linear(dense: layers.Linear, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Applies a linear layer; the result has this shape and the type of x.

    `remat="dots"` saves the result.
    """
    return checkpoint_name(dense(x).astype(x.dtype).reshape(shape), LINEAR_OUTPUT)


class LayerInputs(NamedTuple):
    """The inputs of every layer, besides hidden states."""

    mask: jax.Array | Shared | Packing  # see `kinds.encode`
    # Result of `rotary_cos_sin`, in the layout of kernels if there are any; None: not rotary.
    rotation: jax.Array | None
    kernels: Kernels | None  # settings of the TPU kernels that compute the layer, if any
    cudnn: bool  # whether cuDNN computes attention
    bias: jax.Array | None  # result of `position_bias`; None: no relative positions


class Layer(nnx.Module):
    """Attention and feed-forward, each followed by a layer norm, or in `modern` preceded by one.

    The first layer of `modern` has no norm before its attention: the scale is unused and stays 1.
    """

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.cfg = cfg
        width, inner, dense = cfg.hidden_size, cfg.intermediate_size, _linear_class(cfg)
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

    def __call__(
        self,
        number: jax.Array,
        x: jax.Array,
        noise: layers.Noise | None,
        policy: ProbabilityPolicy,
        inputs: LayerInputs,
    ) -> jax.Array:
        """Runs the layer, the `number`-th from 0: [B, S, D] in the compute type -> the same.

        Dropout uses sites 0 to 2 of the layer's noise.
        """
        if inputs.kernels is not None and not _is_modern(self.cfg):
            # `_kernels` returns None for `Packing`; kernels seed their bits from the shard's key.
            assert isinstance(noise, layers.ShardNoise) and not isinstance(inputs.mask, Packing)
            return self._run_in_kernels(x, inputs.mask, noise, inputs.kernels)
        context = self._attend(number, x, noise, policy, inputs).reshape(x.shape)
        attended = apply_linear(self.attention_output, context, x.shape)
        added = x + self.dropout(attended, noise, 1)
        added = added if _is_modern(self.cfg) else self.attention_layer_norm(added)
        return self.feed_forward(added.astype(x.dtype), noise, inputs.kernels)

    def _attend(
        self,
        number: jax.Array,
        x: jax.Array,
        noise: layers.Noise | None,
        policy: ProbabilityPolicy,
        inputs: LayerInputs,
    ) -> jax.Array:
        """Returns the heads' weighted values, [B, S, H, D / H], or from kernels [B, S, D]."""
        cfg, mask = self.cfg, inputs.mask
        is_global = self._is_global(number, inputs.rotation)
        x = self._attention_input(number, x)
        if inputs.kernels is not None:
            assert not isinstance(mask, Packing)  # `_kernels` returns None for it
            size, (rows, numbers) = x.shape[-1] // cfg.num_attention_heads, _rows_and_numbers(mask)
            windows = half_window(cfg), count_global_layers(cfg), cfg.num_hidden_layers
            static = rotary_kernels.RotaryAttentionShape(inputs.kernels, size, rows, *windows)
            linear_layers = self.query, self.key, self.value
            vectors = (apply_linear(dense, x, x.shape) for dense in linear_layers)
            return rotary_kernels.attention(static, *vectors, inputs.rotation, numbers, is_global)
        query, key = self._queries_and_keys(x, is_global, inputs.rotation)
        value = self.project_heads(self.value, x)
        if inputs.cudnn:
            return cudnn_attention.attend(cfg, query, key, value, mask, is_global)
        window = inputs.bias
        if window is None:
            window = attention_window(cfg, is_global, _attended_length(mask, x))
        noise, rate = layers.noise_at(noise, 0), cfg.attention_probs_dropout_prob
        return attention.attend(query, key, value, mask, noise, rate, window, policy)

    def _is_global(self, number: jax.Array, rotation: jax.Array | None) -> jax.Array | None:
        """Returns whether the `number`-th layer is global, bool []; None: every layer is."""
        return None if rotation is None else number % global_every(self.cfg) == 0

    def _attention_input(self, number: jax.Array, x: jax.Array) -> jax.Array:
        """Returns the input of attention in the `number`-th layer, in the type of x."""
        if not _is_modern(self.cfg):
            return x
        return jnp.where(number == 0, x, self.attention_layer_norm(x).astype(x.dtype))

    def project_heads(self, dense: layers.Linear, x: jax.Array) -> jax.Array:
        """Returns queries, keys or values: [..., D] -> [..., H, D / H]."""
        count = self.cfg.num_attention_heads
        return apply_linear(dense, x, (*x.shape[:-1], count, x.shape[-1] // count))

    def _queries_and_keys(
        self, x: jax.Array, is_global: jax.Array | None, rotation: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns queries and keys, rotated unless `rotation` is None."""
        if rotation is None or is_global is None:
            return self.project_heads(self.query, x), self.project_heads(self.key, x)
        own = jnp.where(is_global, rotation[0], rotation[1])
        query = rotate(self.project_heads(self.query, x), own)
        return query, rotate(self.project_heads(self.key, x), own)

    def attention_probabilities(
        self, number: jax.Array, x: jax.Array, rotation: jax.Array | None, bias: jax.Array | None
    ) -> jax.Array:
        """Computes the attention probabilities of one text: [S, D] -> [H, S, S]."""
        is_global = self._is_global(number, rotation)
        query, key = self._queries_and_keys(self._attention_input(number, x), is_global, rotation)
        scores = jnp.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
        scores = scores if bias is None else scores + bias
        window = attention_window(self.cfg, is_global, len(x))
        scores = scores if window is None else jnp.where(window, scores, -jnp.inf)
        return jax.nn.softmax(scores, axis=-1)

    def feed_forward(
        self, x: jax.Array, noise: layers.Noise | None, kernels: Kernels | None = None
    ) -> jax.Array:
        """Runs the second part of the layer: [B, S, D] in the compute type -> the same."""
        is_modern, shape = _is_modern(self.cfg), (*x.shape[:2], -1)
        inputs = self.output_layer_norm(x).astype(x.dtype) if is_modern else x
        inner = apply_linear(self.intermediate, inputs, shape).astype(jnp.float32)
        gate = apply_linear(self.gate, inputs, shape).astype(jnp.float32) if is_modern else None
        inner = layers.activation(self.cfg.hidden_act, inner, kernels_lib.erf_in(kernels, x.dtype))
        inner = inner if gate is None else inner * gate
        outer = apply_linear(self.output, inner.astype(x.dtype), x.shape)
        added = x + self.dropout(outer, noise, 2)
        return (added if is_modern else self.output_layer_norm(added)).astype(x.dtype)

    def dropout(self, x: jax.Array, noise: layers.Noise | None, site: int) -> jax.Array:
        """Applies dropout with a site of the layer's noise: any float type -> float32."""
        x, noise = x.astype(jnp.float32), layers.noise_at(noise, site)
        return layers.dropout(x, noise, self.cfg.hidden_dropout_prob)

    def _run_in_kernels(
        self, x: jax.Array, mask: jax.Array | Shared, noise: layers.ShardNoise, kernels: Kernels
    ) -> jax.Array:
        """Runs a layer of `bert` whose attention and residual norms are computed by kernels.

        A linear layer leaves out its bias if a kernel reads its result: the kernel adds the bias.
        """
        cfg = self.cfg

        def apply_without_bias(dense: layers.Linear, x: jax.Array) -> jax.Array:
            kernel = dense.kernel[...]
            no_bias = jnp.zeros(kernel.shape[1], jnp.float32)
            return checkpoint_name(layers.linear(x, kernel, no_bias).astype(x.dtype), LINEAR_OUTPUT)

        def residual_norm(
            dense: layers.Linear, inner: jax.Array, norm: layers.BiaslessLayerNorm, site: int
        ) -> jax.Array:
            """Returns the layer norm of x + dropout(dense(inner))."""
            arrays = x, apply_without_bias(dense, inner)
            flat = (array.reshape(-1, x.shape[-1]) for array in arrays)
            vectors = dense.bias[...], norm.scale[...], norm.bias[...]
            seed = noise.at(site).kernel_seed()
            static = kernels_lib.Norm(kernels, cfg.hidden_dropout_prob, norm.eps)
            return kernels_lib.residual_norm(static, *flat, *vectors, seed, None).reshape(x.shape)

        projections = (self.query, self.key, self.value)
        size, (rows, numbers) = x.shape[-1] // cfg.num_attention_heads, _rows_and_numbers(mask)
        context = attention_kernels.attention(
            attention_kernels.AttentionShape(kernels, size, cfg.attention_probs_dropout_prob, rows),
            *(apply_without_bias(dense, x) for dense in projections),
            jnp.stack([dense.bias[...] for dense in projections]),
            numbers,
            noise.at(0).kernel_seed(),
            None,
        )
        x = residual_norm(self.attention_output, context, self.attention_layer_norm, 1)
        inner = checkpoint_name(self.intermediate(x).astype(x.dtype), LINEAR_OUTPUT)
        inner = layers.activation(cfg.hidden_act, inner, kernels_lib.erf_in(kernels, x.dtype))
        return residual_norm(self.output, inner.astype(x.dtype), self.output_layer_norm, 2)


def _rows_and_numbers(
    input_mask: jax.Array | Shared,
) -> tuple[Literal["alone", "shared"], jax.Array]:
    """Returns `rows` and `numbers` of a mask, see `attention_kernels.AttentionShape`."""
    if isinstance(input_mask, Shared):
        return "shared", input_mask.numbers
    return "alone", input_mask


def _attended_length(input_mask: jax.Array | Shared | Packing, x: jax.Array) -> int:
    """Returns the length of the rows or slots in which tokens [B, S, D] attend to each other."""
    return input_mask.row_indices.shape[1] if isinstance(input_mask, Packing) else x.shape[1]


# --- encoder ----------------------------------------------------------------------------------


class Encoder(nnx.Module):
    """Embeddings, L layers, and in `modern` a final norm."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        # One `Layer` whose parameters have a first dimension L.
        self.layers = jax.vmap(lambda key: Layer(cfg, rngs=nnx.Rngs(params=key)))(keys)
        if _is_modern(cfg):
            self.final_layer_norm = _norm(cfg)
        if buckets := cfg.relative_position_buckets:
            count, init = cfg.num_attention_heads, initializer(cfg)
            self.relative_positions = Embedding(buckets, count, init, rngs=rngs)

    def __call__(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array,
        input_mask: jax.Array | Shared | Packing,
        noise: layers.Noise | None,
        loop: Loop,
        outputs: Literal["last", "all"] = "last",
    ) -> jax.Array:
        """Runs the encoder, see `kinds.encode`; a truncated one has no final norm."""
        cfg, dtype = self.cfg, jnp.dtype(self.cfg.compute_dtype)
        positions = input_mask.positions if isinstance(input_mask, Shared | Packing) else None
        if _is_modern(cfg) and positions is None:
            positions = jnp.arange(input_ids.shape[1])
        x = self.embeddings(input_ids, segment_ids, dtype, positions)
        embedding_noise = layers.noise_at(noise, cfg.num_hidden_layers)
        x = layers.dropout(x, embedding_noise, cfg.hidden_dropout_prob).astype(dtype)
        is_rotary = positions is not None and _is_modern(cfg)
        rotation = rotary_cos_sin(cfg, positions) if is_rotary else None
        kernels = _kernels(cfg, x.shape, input_mask, noise, loop)
        if kernels is not None and rotation is not None:
            rotation = rotary_kernels.lay_out_angles(
                rotation, x.shape[-1] // cfg.num_attention_heads
            )
        length, has_noise = _attended_length(input_mask, x), noise is not None
        cudnn = loop.cudnn and cudnn_attention.fits(cfg, length, has_noise)
        inputs = LayerInputs(input_mask, rotation, kernels, cudnn, self._position_bias(length))
        run = functools.partial(Layer.__call__, inputs=inputs)
        last, states = run_layers(run, self.layers, x, noise, loop, outputs)
        if _is_modern(cfg) and len(jax.tree.leaves(self.layers)[0]) == cfg.num_hidden_layers:
            last = self.final_layer_norm(last).astype(dtype)
            states = None if states is None else states.at[-1].set(last)
        return last if states is None else states

    def attention_probabilities(self, hidden: jax.Array) -> jax.Array:
        """Computes the attention probabilities of a text, see `kinds.attention_probabilities`."""
        count, length, _ = hidden.shape
        rotation = rotary_cos_sin(self.cfg, jnp.arange(length)) if _is_modern(self.cfg) else None

        compute = jax.vmap(Layer.attention_probabilities, in_axes=(0, 0, 0, None, None))
        bias = self._position_bias(length)
        return compute(self.layers, jnp.arange(count), hidden, rotation, bias)

    def _position_bias(self, length: int) -> jax.Array | None:
        """Returns the bias of scores, float32 [H, S, S]. It holds for each text of a shared row."""
        if not self.cfg.relative_position_buckets:
            return None
        return position_bias(self.relative_positions.embedding[...], length)


def _kernels(
    cfg: Model,
    shape: tuple[int, ...],
    input_mask: jax.Array | Shared | Packing,
    noise: layers.Noise | None,
    loop: Loop,
) -> Kernels | None:
    """Returns the settings of kernels; None if XLA computes the layers.

    Kernels have no causal mask and no bias, and rotary ones no dropout of probabilities. They are
    not faster without noise, and do not support `Packing`.
    """
    if loop.kernels is None or noise is None or isinstance(input_mask, Packing):
        return None
    if cfg.direction == "left_to_right" or cfg.relative_position_buckets:
        return None
    if _is_modern(cfg):
        sizes = cfg.num_attention_heads, *shape[1:], half_window(cfg)
        fits = not cfg.attention_probs_dropout_prob and rotary_kernels.fits(loop.kernels, *sizes)
    else:
        fits = kernels_lib.fits(cfg.num_attention_heads, *shape)
    return loop.kernels if fits else None
