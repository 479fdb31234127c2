"""Text generation with an encoder of kind `bert` and a decoder: teacher forcing and beam search.

The decoder's layers are the encoder's, with a causal mask and with cross-attention to the encoder's
output (Rothe et al. 2020, section 2). So encoder and decoder can be initialized from the same
pre-trained encoder, except the cross-attention. Both share the embeddings with the output.

Shape letters: B batch, S source, T target, D width, H heads, L layers, V vocabulary rows; N texts
of a search, K beams.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from bert_jax.config import Model
from bert_jax.model import attention, heads, layers, transformer
from bert_jax.model.attention import Scores
from bert_jax.model.encoder import Loop, fill_params, params_of, run_layers
from bert_jax.model.kinds import encode

Batch = dict[str, jax.Array]
# Exponent of the length penalty (Wu et al. 2016, equation 14; also used by Rothe et al.).
_ALPHA = 0.6


class DecoderLayer(transformer.Layer):
    """A layer of the encoder with cross-attention between self-attention and feed-forward."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        super().__init__(cfg, rngs=rngs)
        width = cfg.hidden_size
        init, output_init = transformer.layer_initializers(cfg)
        self.cross_query = layers.Dense(width, width, init, rngs=rngs)
        self.cross_key = layers.Dense(width, width, init, rngs=rngs)
        self.cross_value = layers.Dense(width, width, init, rngs=rngs)
        self.cross_output = layers.Dense(width, width, output_init, rngs=rngs)
        self.cross_layer_norm = layers.LayerNorm(width)


class Decoder(nnx.Module):
    """L layers: one `DecoderLayer` whose parameters have a first dimension L."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        self.layers = jax.vmap(lambda key: DecoderLayer(cfg, rngs=nnx.Rngs(params=key)))(keys)


class Generator(nnx.Module):
    """An encoder, a decoder, and the output layer that scores tokens."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.encoder = transformer.Encoder(cfg, rngs=rngs)
        self.decoder = Decoder(cfg, rngs=rngs)
        self.masked_lm = transformer.MaskedLM(cfg, rngs=rngs)


def init_params(cfg: Model, key: jax.Array) -> dict[str, Any]:
    """Returns fresh parameters as nested dicts of float32 arrays."""
    return params_of(Generator(cfg, rngs=nnx.Rngs(params=key)))


def merge_params(cfg: Model, params: dict[str, Any]) -> Generator:
    """Returns the module with these parameters."""
    return fill_params(params, Generator, cfg)


def _run_layer(
    layer: DecoderLayer,
    cfg: Model,
    x: jax.Array,
    attend: Callable[[jax.Array], jax.Array],
    attend_to_source: Callable[[jax.Array], jax.Array],
    noise: layers.Noise | None,
) -> jax.Array:
    """Runs one layer: [B, T, D] in the compute type -> the same.

    `attend` and `attend_to_source` compute self- and cross-attention with sites 0 and 3 of the
    noise: queries [B, T, H, D / H] -> the same shape.
    """
    at = (lambda site: None) if noise is None else noise.at
    own = layer.query, layer.attention_output, layer.attention_layer_norm, attend, 1
    cross = layer.cross_query, layer.cross_output, layer.cross_layer_norm, attend_to_source, 4
    for query, output, norm, compute_context, site in (own, cross):
        context = compute_context(_project_heads(cfg, query, x)).reshape(x.shape)
        added = transformer.product(output, context, x.shape).astype(jnp.float32)
        x = norm(x + layers.dropout(added, at(site), cfg.hidden_dropout_prob)).astype(x.dtype)
    return transformer.feed_forward(layer, cfg, x, noise)


def _project_heads(cfg: Model, dense: layers.Linear, x: jax.Array) -> jax.Array:
    """Returns queries, keys or values: [B, S, D] -> [B, S, H, D / H]."""
    count = cfg.num_attention_heads
    return transformer.product(dense, x, (*x.shape[:2], count, x.shape[2] // count))


def target_logits(
    generator: Generator, cfg: Model, batch: Batch, noise: layers.Noise | None, loop: Loop
) -> jax.Array:
    """Scores the next token at each position of a target (teacher forcing): float32 [B, T, V].

    `batch` has `input_ids`, `segment_ids` and `input_mask` of the source, int32 [B, S], and
    `decoder_ids` of the target, int32 [B, T], which begin with [CLS] and end with any padding.
    """
    source, mask = _encode_source(generator, cfg, batch, noise, loop), batch["input_mask"]
    # The encoder and the heads use the sites with smaller numbers.
    noise = None if noise is None else noise.at(cfg.num_hidden_layers + 2)
    ids, dtype = batch["decoder_ids"], source.dtype
    x = generator.encoder.embeddings(ids, jnp.zeros_like(ids), dtype)
    embedding_noise = None if noise is None else noise.at(cfg.num_hidden_layers)
    x = layers.dropout(x, embedding_noise, cfg.hidden_dropout_prob).astype(dtype)
    rate, ones = cfg.attention_probs_dropout_prob, jnp.ones_like(ids)

    def run(
        layer: DecoderLayer,
        number: jax.Array,
        x: jax.Array,
        noise: layers.Noise | None,
        scores: Scores,
    ) -> jax.Array:
        del number
        at = (lambda site: None) if noise is None else noise.at
        attend = attention.attend
        key, value = (_project_heads(cfg, dense, x) for dense in (layer.key, layer.value))
        cross = (layer.cross_key, layer.cross_value)
        source_key, source_value = (_project_heads(cfg, dense, source) for dense in cross)
        # The causal mask hides padding, too: padding comes after all scored tokens.
        window = attention.causal_mask(x.shape[1])
        return _run_layer(
            layer,
            cfg,
            x,
            lambda query: attend(query, key, value, ones, at(0), rate, window, scores),
            lambda query: attend(query, source_key, source_value, mask, at(3), rate, None, scores),
            noise,
        )

    # The decoder's layers are gathered already, and kernels have no causal mask.
    loop = Loop(loop.remat, loop.layers)
    x, _ = run_layers(run, generator.decoder.layers, x, noise, loop, "last")
    return heads.token_logits(generator, cfg, x)


def _encode_source(
    generator: Generator, cfg: Model, batch: Batch, noise: layers.Noise | None, loop: Loop
) -> jax.Array:
    """Returns the encoder's output for the source, [B, S, D]."""
    ids = batch["input_ids"], batch["segment_ids"]
    return encode(generator.encoder, cfg, *ids, batch["input_mask"], noise, loop)


# --- search -------------------------------------------------------------------------------------


class DecoderCache(NamedTuple):
    """The keys and values of earlier tokens and of the source."""

    keys: jax.Array  # of the tokens so far, [L, N, K, T, H, D / H]
    values: jax.Array
    source_keys: jax.Array  # [L, N, S, H, D / H]
    source_values: jax.Array
    source_mask: jax.Array  # int32 [N, S], 0 for padding


def begin(
    generator: Generator, cfg: Model, batch: Batch, loop: Loop, beams: int, length: int
) -> DecoderCache:
    """Encodes the source and returns a cache for K = `beams` texts of `length` tokens."""
    source = _encode_source(generator, cfg, batch, None, loop)

    def project(layer: DecoderLayer) -> list[jax.Array]:
        return [_project_heads(cfg, d, source) for d in (layer.cross_key, layer.cross_value)]

    source_keys, source_values = lax.map(project, generator.decoder.layers)
    count, head_count = cfg.num_hidden_layers, cfg.num_attention_heads
    shape = (count, len(source), beams, length, head_count, source.shape[2] // head_count)
    empty = jnp.zeros(shape, source.dtype)
    return DecoderCache(empty, empty, source_keys, source_values, batch["input_mask"])


def next_logits(
    generator: Generator, cfg: Model, cache: DecoderCache, ids: jax.Array, position: jax.Array
) -> tuple[jax.Array, DecoderCache]:
    """Scores the next token of each beam: float32 [N, K, V]. Also returns the updated cache.

    `ids` int32 [N, K] are the newest tokens, at first [CLS], and `position` is their position,
    int32, from 0. `cache` has all tokens before them.
    """
    dtype, length = cache.keys.dtype, cache.keys.shape[3]
    positions = jnp.full_like(ids, position)
    x = generator.encoder.embeddings(ids, jnp.zeros_like(ids), dtype, positions).astype(dtype)
    ones = jnp.ones((ids.size, length), jnp.int32)
    window = (jnp.arange(length) <= position)[None]

    def run(x: jax.Array, arrays: tuple[Any, ...]) -> tuple[jax.Array, tuple[Any, ...]]:
        layer, keys, values, source_key, source_value = arrays
        key, value = (_project_heads(cfg, dense, x) for dense in (layer.key, layer.value))
        keys = lax.dynamic_update_index_in_dim(keys, key, position, axis=2)
        values = lax.dynamic_update_index_in_dim(values, value, position, axis=2)

        def attend(query: jax.Array) -> jax.Array:
            flat_query = query.reshape(ids.size, 1, *query.shape[2:])
            flat_keys, flat_values = (x.reshape(ids.size, *x.shape[2:]) for x in (keys, values))
            return attention.attend(flat_query, flat_keys, flat_values, ones, None, 0.0, window)

        def attend_to_source(query: jax.Array) -> jax.Array:
            return attention.attend(query, source_key, source_value, cache.source_mask, None, 0.0)

        return _run_layer(layer, cfg, x, attend, attend_to_source, None), (keys, values)

    x, (keys, values) = lax.scan(run, x, (generator.decoder.layers, *cache[:4]))
    return heads.token_logits(generator, cfg, x), cache._replace(keys=keys, values=values)


class _Beams(NamedTuple):
    """The K best beams of N texts, the best beam first."""

    position: jax.Array  # int32, the number of steps done
    ids: jax.Array  # int32 [N, K, T]; the end token and all positions after it have its id
    total: jax.Array  # float32 [N, K], logarithm of the probability
    length: jax.Array  # int32 [N, K], in tokens
    done: jax.Array  # bool [N, K], whether the text has ended
    cache: DecoderCache  # of all tokens except the newest


def search(
    generator: Generator,
    cfg: Model,
    batch: Batch,
    loop: Loop,
    beams: int,
    length: int,
    first: int,
    last: int,
) -> tuple[jax.Array, jax.Array]:
    """Generates the most probable texts by beam search; one beam is greedy decoding.

    Beams are ranked by log probability / ((5 + tokens) / 6)^0.6 (Wu et al. 2016). A finished text
    keeps its rank, and stays among the K beams until better ones replace it.

    Args:
      batch: the source, as for `target_logits`.
      beams: K.
      length: T, maximum number of tokens of a text.
      first: the start token, which is not part of the result.
      last: the end token.

    Returns:
      int32 [N, T], padded with `last`, and the ranking scores of these texts, float32 [N].
    """
    count = len(batch["input_ids"])
    cache = begin(generator, cfg, batch, loop, beams, length)
    best = _Beams(
        jnp.int32(0),
        jnp.full((count, beams, length), last, jnp.int32),
        # At first all beams are equal, so all except one are excluded.
        jnp.broadcast_to(jnp.where(jnp.arange(beams) > 0, -jnp.inf, 0.0), (count, beams)),
        jnp.zeros((count, beams), jnp.int32),
        jnp.zeros((count, beams), bool),
        cache,
    )

    def ranks(total: jax.Array, length: jax.Array) -> jax.Array:
        return total / ((5.0 + length) / 6.0) ** _ALPHA

    def is_unfinished(best: _Beams) -> jax.Array:
        return (best.position < length) & ~best.done.all()

    def step(best: _Beams) -> _Beams:
        previous = lax.dynamic_index_in_dim(
            best.ids, jnp.maximum(best.position - 1, 0), axis=2, keepdims=False
        )
        newest = jnp.where(best.position > 0, previous, first)
        logits, cache = next_logits(generator, cfg, best.cache, newest, best.position)
        size = logits.shape[-1]
        ended = jnp.where(jnp.arange(size) == last, 0.0, -jnp.inf)
        added = jnp.where(best.done[..., None], ended, jax.nn.log_softmax(logits))
        total = best.total[..., None] + added
        lengths = best.length + ~best.done
        _, indices = lax.top_k(ranks(total, lengths[..., None]).reshape(count, beams * size), beams)
        parent, token = indices // size, indices % size

        def take_parent(array: jax.Array, axis: int = 1) -> jax.Array:
            if beams == 1:
                return array
            shape = [1] * array.ndim
            shape[axis - 1 : axis + 1] = parent.shape
            return jnp.take_along_axis(array, parent.reshape(shape), axis=axis)

        ids = lax.dynamic_update_index_in_dim(take_parent(best.ids), token, best.position, axis=2)
        keys, values = take_parent(cache.keys, 2), take_parent(cache.values, 2)
        return _Beams(
            best.position + 1,
            ids,
            jnp.take_along_axis(total.reshape(count, -1), indices, axis=1),
            take_parent(lengths),
            take_parent(best.done) | (token == last),
            cache._replace(keys=keys, values=values),
        )

    best = lax.while_loop(is_unfinished, step, best)
    return best.ids[:, 0], ranks(best.total, best.length)[:, 0]
