"""BERT's encoder: embeddings and post-norm transformer layers (Devlin et al. 2018, section 3).

Numerics and layout follow google-research/bert, modeling.py. The layers' parameters are stacked
along a first dimension L and scanned.

Shape letters: B batch, S sequence, D width, F feed-forward, H heads, L layers, V vocabulary.
"""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from bert_jax.config import Model
from bert_jax.model import attention, layers
from bert_jax.model import kernels as kernels_lib
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.kernels import Kernels

# Rows of the vocabulary's tables are a multiple of this on every mesh, so that they can be
# sharded anywhere and a checkpoint fits everywhere.
VOCAB_MULTIPLE = 1_024
# Under this name `remat="dots"` finds what it keeps, already rounded to the compute type.
PRODUCT = "product"

# Whether the backward pass finds attention's probabilities, or computes them again.
Scores = Literal["kept", "recomputed"]


class Loop(NamedTuple):
    """The way in which the layers are run."""

    remat: Literal["none", "dots", "full"] = "none"  # what is kept for the backward pass
    layers: Literal["scan", "unroll"] = "scan"  # scanned or unrolled
    # How kernels for the devices are made; None: there are none, and XLA does it all.
    kernels: Kernels | None = None
    # Makes the parameters of a layer whole that lie cut over devices; called within what the
    # backward pass computes again, so that no more than one layer is whole at a time.
    gather: Callable[["Layer"], "Layer"] = lambda layer: layer


def padded_vocab_size(cfg: Model) -> int:
    """Returns how many rows the word embeddings and the output bias have."""
    return -(-cfg.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def initializer(cfg: Model) -> nnx.Initializer:
    """Returns a normal distribution, cut off at two deviations and not widened for it.

    The reference draws its weights so; a deviation is `initializer_range`.
    """
    return jax.nn.initializers.truncated_normal(cfg.initializer_range)


def layer_initializers(
    cfg: Model, output_init: nnx.Initializer
) -> tuple[nnx.Initializer, nnx.Initializer]:
    """Returns how the kernels of a layer are drawn: those that read x, and those that add to it.

    Args:
      cfg: whose `initialization` it is.
      output_init: by which the kind's reference draws the latter.
    """
    if cfg.initialization == "reference":
        return initializer(cfg), output_init
    scaled = jax.nn.initializers.truncated_normal(cfg.hidden_size**-0.5)
    return scaled, jax.nn.initializers.zeros


class Embedding(nnx.Module):
    """A table of vectors, `embedding` [rows, D]; rows beyond `used` are zero."""

    def __init__(
        self, used: int, width: int, init: nnx.Initializer, *, rngs: nnx.Rngs, rows: int = 0
    ):
        table = init(rngs.params(), (used, width), jnp.float32)
        self.embedding = nnx.Param(jnp.pad(table, ((0, max(rows - used, 0)), (0, 0))))


class Embeddings(nnx.Module):
    """The sum of token, segment and position embeddings, normalised."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        init, width = initializer(cfg), cfg.hidden_size
        self.word = Embedding(cfg.vocab_size, width, init, rngs=rngs, rows=padded_vocab_size(cfg))
        self.position = Embedding(cfg.max_position_embeddings, width, init, rngs=rngs)
        self.segment = Embedding(cfg.type_vocab_size, width, init, rngs=rngs)
        self.layer_norm = layers.LayerNorm(width)

    def __call__(
        self,
        input_ids: jax.Array,
        segment_ids: jax.Array,
        dtype: jnp.dtype,
        positions: jax.Array | None = None,
    ) -> jax.Array:
        """int32 [B, S] each -> float32 [B, S, D]; words as they are in the compute type.

        Positions rise from 0 in each row if none are given.
        """
        word = look_up(self.word.embedding[...], input_ids, dtype)
        position = self.position.embedding
        position = position[: input_ids.shape[1]] if positions is None else position[positions]
        # A product with one-hot rows: its gradient is a product too, not a scatter into two rows.
        table = self.segment.embedding[...]
        one_hot = jax.nn.one_hot(segment_ids.reshape(-1), len(table), dtype=jnp.float32)
        segment = (one_hot @ table).reshape(word.shape)
        return self.layer_norm(word + position + segment)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Reads rows of a table, rounded to a type beforehand; the gradient adds up in float32.

    The output's product reads the rounded table too, so that no other need exist.

    Args:
      table: float32 [V, D].
      ids: int32 [...].
      dtype: to round to.

    Returns:
      float32 [..., D].
    """
    return jnp.take(table.astype(dtype), ids, axis=0).astype(jnp.float32)


def _look_up_forward(
    table: jax.Array, ids: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return look_up(table, ids, dtype), (ids, len(table))


def _look_up_backward(
    dtype: jnp.dtype, kept: tuple[jax.Array, int], gradient: jax.Array
) -> tuple[jax.Array, None]:
    del dtype
    ids, rows = kept
    zeros = jnp.zeros((rows, gradient.shape[-1]), jnp.float32)
    return zeros.at[ids].add(gradient), None


look_up.defvjp(_look_up_forward, _look_up_backward)


class Layer(nnx.Module):
    """Attention and feed-forward, each followed by dropout, the residual and a layer norm."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        width, inner = cfg.hidden_size, cfg.intermediate_size
        init, output_init = layer_initializers(cfg, initializer(cfg))
        self.query = layers.Dense(width, width, init, rngs=rngs)
        self.key = layers.Dense(width, width, init, rngs=rngs)
        self.value = layers.Dense(width, width, init, rngs=rngs)
        self.attention_output = layers.Dense(width, width, output_init, rngs=rngs)
        self.attention_layer_norm = layers.LayerNorm(width)
        self.intermediate = layers.Dense(width, inner, init, rngs=rngs)
        self.output = layers.Dense(inner, width, output_init, rngs=rngs)
        self.output_layer_norm = layers.LayerNorm(width)


def run_layer(
    layer: Layer,
    cfg: Model,
    x: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    noise: layers.Noise | None,
    scores: Scores,
) -> jax.Array:
    """Runs one layer: [B, S, D] in the compute type -> the same."""
    at = (lambda site: None) if noise is None else noise.at
    b, s, d = x.shape
    heads = (b, s, cfg.num_attention_heads, d // cfg.num_attention_heads)
    query, key, value = (
        product(dense, x, heads) for dense in (layer.query, layer.key, layer.value)
    )
    attend = attention.attend if scores == "kept" else attention.attend_recomputed
    if isinstance(input_mask, Packing):
        window = _window(cfg, input_mask.tokens.shape[1])
        context = attention.attend_packed(query, key, value, input_mask, window)
    else:
        rate = cfg.attention_probs_dropout_prob
        context = attend(query, key, value, input_mask, at(0), rate, _window(cfg, s))
    attended = product(layer.attention_output, context.reshape(b, s, d), x.shape).astype(
        jnp.float32
    )
    attended = layers.dropout(attended, at(1), cfg.hidden_dropout_prob)
    x = layer.attention_layer_norm(x + attended).astype(x.dtype)
    return feed_forward(layer, cfg, x, noise)


def feed_forward(layer: Layer, cfg: Model, x: jax.Array, noise: layers.Noise | None) -> jax.Array:
    """Runs the second half of a layer: [B, S, D] in the compute type -> the same.

    Of the layer's noise it takes site 2.
    """
    at = (lambda site: None) if noise is None else noise.at
    inner = product(layer.intermediate, x, (*x.shape[:2], -1))
    inner = layers.activation(cfg.hidden_act, inner.astype(jnp.float32)).astype(x.dtype)
    outer = product(layer.output, inner, x.shape)
    outer = layers.dropout(outer.astype(jnp.float32), at(2), cfg.hidden_dropout_prob)
    return layer.output_layer_norm(x + outer).astype(x.dtype)


def product(dense: layers.Dense, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns W x + b of this shape, in the type of x, which `remat="dots"` keeps."""
    return checkpoint_name(dense(x).astype(x.dtype).reshape(shape), PRODUCT)


def _window(cfg: Model, length: int) -> jax.Array | None:
    """Returns which keys a query attends to, bool [S, S]; None: to all."""
    return attention.to_the_left(length) if cfg.direction == "left_to_right" else None


def run_layer_in_kernels(
    layer: Layer,
    cfg: Model,
    x: jax.Array,
    input_mask: jax.Array | Shared,
    noise: layers.Noise,
    kernels: Kernels,
) -> jax.Array:
    """Runs one layer as `run_layer` does, with all but its products in kernels.

    The biases of products that kernels read are added there.
    """
    rate = cfg.hidden_dropout_prob

    def product(dense: layers.Dense, x: jax.Array) -> jax.Array:
        kernel = dense.kernel[...]
        nothing = jnp.zeros(kernel.shape[1], jnp.float32)
        return checkpoint_name(layers.linear(x, kernel, nothing).astype(x.dtype), PRODUCT)

    def normed(dense: layers.Dense, inner: jax.Array, norm: layers.LayerNorm, site: int):
        """The layer norm of x and what `dense` makes of `inner`."""
        flat = (array.reshape(-1, x.shape[-1]) for array in (x, product(dense, inner)))
        vectors = dense.bias[...], norm.scale[...], norm.bias[...]
        seed = noise.at(site).words()
        return kernels_lib.residual_norm(kernels, *flat, *vectors, seed, rate).reshape(x.shape)

    projections = (layer.query, layer.key, layer.value)
    shared = isinstance(input_mask, Shared)
    context = kernels_lib.attention(
        kernels,
        *(product(dense, x) for dense in projections),
        jnp.stack([dense.bias[...] for dense in projections]),
        input_mask.numbers if shared else input_mask,
        noise.at(0).words(),
        cfg.num_attention_heads,
        cfg.attention_probs_dropout_prob,
        "shared" if shared else "alone",
    )
    x = normed(layer.attention_output, context, layer.attention_layer_norm, 1)
    inner = checkpoint_name(layer.intermediate(x).astype(x.dtype), PRODUCT)
    inner = layers.activation(cfg.hidden_act, inner.astype(jnp.float32)).astype(x.dtype)
    return normed(layer.output, inner, layer.output_layer_norm, 2)


class Encoder(nnx.Module):
    """Embeddings and L layers."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        # One `Layer` whose parameters carry a first dimension L.
        self.layers = jax.vmap(lambda key: Layer(cfg, rngs=nnx.Rngs(params=key)))(keys)


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
    """Runs the encoder: see `model.kinds`."""
    dtype = jnp.dtype(cfg.compute_dtype)
    positions = input_mask.positions if isinstance(input_mask, Shared | Packing) else None
    x = encoder.embeddings(input_ids, segment_ids, dtype, positions)
    embedding_noise = None if noise is None else noise.at(cfg.num_hidden_layers)
    x = layers.dropout(x, embedding_noise, cfg.hidden_dropout_prob).astype(dtype)

    # Without noise nothing is gained, and texts that are by themselves are no rows. Kernels attend
    # to both sides.
    fits = kernels_lib.fits(cfg.num_attention_heads, *x.shape) and cfg.direction == "both"
    gains = noise is not None and not isinstance(input_mask, Packing)
    kernels = loop.kernels if fits and gains else None

    def run(
        layer: Layer, number: jax.Array, x: jax.Array, noise: layers.Noise | None, scores: Scores
    ) -> jax.Array:
        del number
        if kernels is not None:
            return run_layer_in_kernels(layer, cfg, x, input_mask, noise, kernels)
        return run_layer(layer, cfg, x, input_mask, noise, scores)

    last, every = run_layers(run, encoder.layers, x, noise, loop, outputs)
    return last if every is None else every


def run_layers(
    run: Callable[[nnx.Module, jax.Array, jax.Array, layers.Noise | None, Scores], jax.Array],
    stacked: nnx.Module,
    x: jax.Array,
    noise: layers.Noise | None,
    loop: Loop,
    outputs: Literal["last", "all"],
) -> tuple[jax.Array, jax.Array | None]:
    """Runs stacked layers, one after the other.

    Args:
      run: takes a layer, its number, [B, S, D], the layer's noise, and what becomes of scores.
      stacked: a layer whose parameters carry a first dimension L.
      x: [B, S, D], what the first one reads.
      noise: of dropout; None drops nothing.
      loop: how they are run.
      outputs: what is kept.

    Returns:
      What the last one gives, [B, S, D]; with `all`, x and what every one gives, [L + 1, B, S, D].
    """
    scores: Scores = "recomputed" if loop.remat == "dots" else "kept"

    def body(
        x: jax.Array, layer_and_number: tuple[nnx.Module, jax.Array]
    ) -> tuple[jax.Array, jax.Array | None]:
        layer, number = layer_and_number
        layer_noise = None if noise is None else noise.at(number)
        x = run(loop.gather(layer), number, x, layer_noise, scores)
        return x, x if outputs == "all" else None

    if loop.remat != "none":
        policies = jax.checkpoint_policies
        policy = {
            "dots": policies.save_only_these_names(PRODUCT, *attention.KEPT),
            "full": policies.nothing_saveable,
        }[loop.remat]
        body = jax.checkpoint(body, policy=policy, prevent_cse=loop.layers == "unroll")
    count = len(jax.tree.leaves(stacked)[0])
    unroll = count if loop.layers == "unroll" else 1
    last, every = jax.lax.scan(body, x, (stacked, jnp.arange(count)), unroll=unroll)
    return last, None if every is None else jnp.concatenate([x[None], every])


def attention_probabilities(encoder: Encoder, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Computes where the pieces of a text look in each layer: see `model.kinds`."""
    number = cfg.num_attention_heads
    heads = (*hidden.shape[:2], number, hidden.shape[2] // number)

    def project(dense: layers.Dense) -> jax.Array:
        product = jnp.einsum("lsd,lde->lse", hidden, dense.kernel[...])
        return (product + dense.bias[...][:, None]).reshape(heads)

    query, key = project(encoder.layers.query), project(encoder.layers.key)
    scores = jnp.einsum("lqhd,lkhd->lhqk", query, key) / heads[-1] ** 0.5
    window = _window(cfg, hidden.shape[1])
    seen = scores if window is None else jnp.where(window, scores, -jnp.inf)
    return jax.nn.softmax(seen, axis=-1)


class MaskedLM(nnx.Module):
    """Transform and output bias; the output weights are the word embeddings."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.transform = layers.Dense(cfg.hidden_size, cfg.hidden_size, initializer(cfg), rngs=rngs)
        self.layer_norm = layers.LayerNorm(cfg.hidden_size)
        self.output_bias = nnx.Param(jnp.zeros(padded_vocab_size(cfg), jnp.float32))


def token_flops(cfg: Model, sequence_length: int) -> int:
    """Counts the operations of a forward pass through all layers, a token of so long a row."""
    width, inner = cfg.hidden_size, cfg.intermediate_size
    # Query, key, value, output; feed-forward; scores and their product with the values.
    token = 2 * (4 * width * width + 2 * width * inner + 2 * sequence_length * width)
    return cfg.num_hidden_layers * token
