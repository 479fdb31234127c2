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
from bert_jax.model.attention import Packing, Shared

# Rows of the vocabulary's tables are a multiple of this on every mesh, so that they can be
# sharded anywhere and a checkpoint fits everywhere.
VOCAB_MULTIPLE = 1_024
# Under this name `remat="dots"` finds what it keeps, already rounded to the compute type.
_PRODUCT = "product"


class Loop(NamedTuple):
    """The way in which the layers are run.

    Attributes:
      remat: what is kept for the backward pass.
      layers: scanned or unrolled.
      gather: makes the parameters of a layer whole that lie cut over devices; called within what
        the backward pass computes again, so that no more than one layer is whole at a time.
    """

    remat: Literal["none", "dots", "full"] = "none"
    layers: Literal["scan", "unroll"] = "scan"
    gather: Callable[["Layer"], "Layer"] = lambda layer: layer


def padded_vocab_size(cfg: Model) -> int:
    """Returns how many rows the word embeddings and the output bias have."""
    return -(-cfg.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def initializer(cfg: Model) -> nnx.Initializer:
    """Returns a normal distribution, cut off at two deviations and not widened for it.

    The reference draws its weights so; a deviation is `initializer_range`.
    """
    return jax.nn.initializers.truncated_normal(cfg.initializer_range)


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
        init, width, inner = initializer(cfg), cfg.hidden_size, cfg.intermediate_size
        self.query = layers.Dense(width, width, init, rngs=rngs)
        self.key = layers.Dense(width, width, init, rngs=rngs)
        self.value = layers.Dense(width, width, init, rngs=rngs)
        self.attention_output = layers.Dense(width, width, init, rngs=rngs)
        self.attention_layer_norm = layers.LayerNorm(width)
        self.intermediate = layers.Dense(width, inner, init, rngs=rngs)
        self.output = layers.Dense(inner, width, init, rngs=rngs)
        self.output_layer_norm = layers.LayerNorm(width)


def run_layer(
    layer: Layer,
    cfg: Model,
    x: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    noise: layers.Noise | None,
    scores: Literal["kept", "recomputed"],
) -> jax.Array:
    """Runs one layer: [B, S, D] in the compute type -> the same.

    `scores`: whether the backward pass finds attention's probabilities kept or recomputes them.
    """
    at = (lambda site: None) if noise is None else noise.at
    b, s, d = x.shape
    heads = (b, s, cfg.num_attention_heads, d // cfg.num_attention_heads)

    def product(dense: layers.Dense, x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return checkpoint_name(dense(x).astype(x.dtype).reshape(shape), _PRODUCT)

    query, key, value = (
        product(dense, x, heads) for dense in (layer.query, layer.key, layer.value)
    )
    attend = attention.attend if scores == "kept" else attention.attend_recomputed
    if isinstance(input_mask, Packing):
        context = attention.attend_packed(query, key, value, input_mask)
    else:
        rate = cfg.attention_probs_dropout_prob
        context = attend(query, key, value, input_mask, at(0), rate)
    attended = product(layer.attention_output, context.reshape(b, s, d), x.shape).astype(
        jnp.float32
    )
    attended = layers.dropout(attended, at(1), cfg.hidden_dropout_prob)
    x = layer.attention_layer_norm(x + attended).astype(x.dtype)
    inner = product(layer.intermediate, x, (b, s, -1))
    inner = layers.activation(cfg.hidden_act, inner.astype(jnp.float32)).astype(x.dtype)
    outer = product(layer.output, inner, x.shape)
    outer = layers.dropout(outer.astype(jnp.float32), at(2), cfg.hidden_dropout_prob)
    return layer.output_layer_norm(x + outer).astype(x.dtype)


class Encoder(nnx.Module):
    """Embeddings and L layers.

    Attributes:
      layers: one `Layer` whose parameters carry a first dimension L.
    """

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
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
    """Runs the encoder.

    Args:
      encoder: its parameters.
      cfg: its shape.
      input_ids: int32 [B, S].
      segment_ids: int32 [B, S].
      input_mask: int32 [B, S], 0 for padding; `Shared` if several examples share a row, `Packing`
        if nothing is dropped and each text is to be by itself.
      noise: of dropout; None drops nothing.
      loop: how the layers are run.
      outputs: `last`, or `all`: the embeddings and every layer.

    Returns:
      [B, S, D] or [L + 1, B, S, D], in the compute type.
    """
    dtype = jnp.dtype(cfg.compute_dtype)
    positions = input_mask.positions if isinstance(input_mask, Shared | Packing) else None
    x = encoder.embeddings(input_ids, segment_ids, dtype, positions)
    embedding_noise = None if noise is None else noise.at(cfg.num_hidden_layers)
    x = layers.dropout(x, embedding_noise, cfg.hidden_dropout_prob).astype(dtype)

    scores = "recomputed" if loop.remat == "dots" else "kept"

    def body(x: jax.Array, stacked: tuple[Layer, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
        layer, number = stacked
        layer_noise = None if noise is None else noise.at(number)
        x = run_layer(loop.gather(layer), cfg, x, input_mask, layer_noise, scores)
        return x, x if outputs == "all" else None

    if loop.remat != "none":
        policies = jax.checkpoint_policies
        policy = {
            "dots": policies.save_only_these_names(_PRODUCT, *attention.KEPT),
            "full": policies.nothing_saveable,
        }[loop.remat]
        body = jax.checkpoint(body, policy=policy, prevent_cse=loop.layers == "unroll")
    numbers = jnp.arange(cfg.num_hidden_layers)
    unroll = cfg.num_hidden_layers if loop.layers == "unroll" else 1
    last, every = jax.lax.scan(body, x, (encoder.layers, numbers), unroll=unroll)
    return last if outputs == "last" else jnp.concatenate([x[None], every])


def attention_probabilities(encoder: Encoder, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Computes where the pieces of a text look in each layer, without dropout.

    Args:
      encoder: its parameters.
      cfg: its shape.
      hidden: float32 [L, S, D], what each layer is given of one text without padding: `encode`
        with `outputs="all"`, except for the last layer's.

    Returns:
      float32 [L, H, S, S], of each piece over all pieces; rows add up to 1.
    """
    number = cfg.num_attention_heads
    heads = (*hidden.shape[:2], number, hidden.shape[2] // number)

    def project(dense: layers.Dense) -> jax.Array:
        product = jnp.einsum("lsd,lde->lse", hidden, dense.kernel[...])
        return (product + dense.bias[...][:, None]).reshape(heads)

    query, key = project(encoder.layers.query), project(encoder.layers.key)
    scores = jnp.einsum("lqhd,lkhd->lhqk", query, key) / heads[-1] ** 0.5
    return jax.nn.softmax(scores, axis=-1)
