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
from bert_jax.model.attention import ProbabilityPolicy
from bert_jax.model.encoder import Loop, fill_params, params_of, run_layers

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

    def keys_and_values(self, x: jax.Array) -> list[jax.Array]:
        """Returns keys and values of self-attention: [..., D] -> [..., H, D / H] each."""
        return [self.project_heads(dense, x) for dense in (self.key, self.value)]

    def source_keys_and_values(self, source: jax.Array) -> list[jax.Array]:
        """Returns keys and values of cross-attention: [..., D] -> [..., H, D / H] each."""
        return [self.project_heads(dense, source) for dense in (self.cross_key, self.cross_value)]

    def decode(
        self,
        x: jax.Array,
        attend: Callable[[jax.Array], jax.Array],
        attend_to_source: Callable[[jax.Array], jax.Array],
        noise: layers.Noise | None,
    ) -> jax.Array:
        """Runs the layer: [B, T, D] in the compute type -> the same.

        `attend` and `attend_to_source` compute self- and cross-attention with sites 0 and 3 of the
        noise: queries [B, T, H, D / H] -> the same shape.
        """
        own = self.query, self.attention_output, self.attention_layer_norm, attend, 1
        cross = self.cross_query, self.cross_output, self.cross_layer_norm, attend_to_source, 4
        for query, output, norm, compute_context, site in (own, cross):
            context = compute_context(self.project_heads(query, x)).reshape(x.shape)
            added = self.dropout(transformer.apply_linear(output, context, x.shape), noise, site)
            x = norm(x + added).astype(x.dtype)
        return self.feed_forward(x, noise)


class Decoder(nnx.Module):
    """L layers: one `DecoderLayer` whose parameters have a first dimension L."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        self.layers = jax.vmap(lambda key: DecoderLayer(cfg, rngs=nnx.Rngs(params=key)))(keys)


class Generator(nnx.Module):
    """An encoder, a decoder, and the output layer that scores tokens."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.cfg = cfg
        self.encoder = transformer.Encoder(cfg, rngs=rngs)
        self.decoder = Decoder(cfg, rngs=rngs)
        self.masked_lm = transformer.MaskedLM(cfg, rngs=rngs)

    def encode(self, batch: Batch, noise: layers.Noise | None, loop: Loop) -> jax.Array:
        """Returns the encoder's output for the source, [B, S, D]."""
        ids = batch["input_ids"], batch["segment_ids"]
        return self.encoder(*ids, batch["input_mask"], noise, loop)


def init_params(cfg: Model, key: jax.Array) -> dict[str, Any]:
    """Returns fresh parameters as nested dicts of float32 arrays."""
    return params_of(Generator(cfg, rngs=nnx.Rngs(params=key)))


def merge_params(cfg: Model, params: dict[str, Any]) -> Generator:
    """Returns the module with these parameters."""
    return fill_params(params, Generator, cfg)


def target_logits(
    generator: Generator, batch: Batch, noise: layers.Noise | None, loop: Loop
) -> jax.Array:
    """Scores the next token at each position of a target (teacher forcing): float32 [B, T, V].

    `batch` has `input_ids`, `segment_ids` and `input_mask` of the source, int32 [B, S], and
    `decoder_ids` of the target, int32 [B, T], which begin with [CLS] and end with any padding.
    """
    cfg, source, mask = generator.cfg, generator.encode(batch, noise, loop), batch["input_mask"]
    # The encoder and the heads use the sites with smaller numbers.
    noise = layers.noise_at(noise, cfg.num_hidden_layers + 2)
    ids, dtype = batch["decoder_ids"], source.dtype
    x = generator.encoder.embeddings(ids, jnp.zeros_like(ids), dtype)
    embedding_noise = layers.noise_at(noise, cfg.num_hidden_layers)
    x = layers.dropout(x, embedding_noise, cfg.hidden_dropout_prob).astype(dtype)
    rate, ones = cfg.attention_probs_dropout_prob, jnp.ones_like(ids)

    def run(
        layer: DecoderLayer,
        number: jax.Array,
        x: jax.Array,
        noise: layers.Noise | None,
        scores: ProbabilityPolicy,
    ) -> jax.Array:
        del number
        key, value = layer.keys_and_values(x)
        source_key, source_value = layer.source_keys_and_values(source)
        # The causal mask hides padding, too: padding comes after all scored tokens.
        window = attention.causal_mask(x.shape[1])

        def attend(query: jax.Array) -> jax.Array:
            site = layers.noise_at(noise, 0)
            return attention.attend(query, key, value, ones, site, rate, window, scores)

        def attend_to_source(query: jax.Array) -> jax.Array:
            site = layers.noise_at(noise, 3)
            return attention.attend(query, source_key, source_value, mask, site, rate, None, scores)

        return layer.decode(x, attend, attend_to_source, noise)

    # The decoder's layers are gathered already, and kernels have no causal mask.
    loop = Loop(loop.remat, loop.layers)
    x, _ = run_layers(run, generator.decoder.layers, x, noise, loop, "last")
    return heads.token_logits(generator, cfg, x)


# --- search -------------------------------------------------------------------------------------


class SearchSettings(NamedTuple):
    """Settings of a beam search; one beam is greedy decoding."""

    beams: int  # K
    length: int  # T, maximum number of tokens of a text
    first: int  # the start token, which is not part of the result
    last: int  # the end token


class DecoderCache(NamedTuple):
    """The keys and values of earlier tokens and of the source."""

    keys: jax.Array  # of the tokens so far, [L, N, K, T, H, D / H]
    values: jax.Array
    source_keys: jax.Array  # [L, N, S, H, D / H]
    source_values: jax.Array
    source_mask: jax.Array  # int32 [N, S], 0 for padding


def begin(generator: Generator, batch: Batch, loop: Loop, beams: int, length: int) -> DecoderCache:
    """Encodes the source and returns a cache for K = `beams` texts of `length` tokens."""
    cfg, source = generator.cfg, generator.encode(batch, None, loop)

    def project(layer: DecoderLayer) -> list[jax.Array]:
        return layer.source_keys_and_values(source)

    source_keys, source_values = lax.map(project, generator.decoder.layers)
    count, head_count = cfg.num_hidden_layers, cfg.num_attention_heads
    shape = (count, len(source), beams, length, head_count, source.shape[2] // head_count)
    empty = jnp.zeros(shape, source.dtype)
    return DecoderCache(empty, empty, source_keys, source_values, batch["input_mask"])


def next_logits(
    generator: Generator, cache: DecoderCache, ids: jax.Array, position: jax.Array
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
        key, value = layer.keys_and_values(x)
        keys = lax.dynamic_update_index_in_dim(keys, key, position, axis=2)
        values = lax.dynamic_update_index_in_dim(values, value, position, axis=2)

        def attend(query: jax.Array) -> jax.Array:
            flat_query = query.reshape(ids.size, 1, *query.shape[2:])
            flat_keys, flat_values = (x.reshape(ids.size, *x.shape[2:]) for x in (keys, values))
            return attention.attend(flat_query, flat_keys, flat_values, ones, None, 0.0, window)

        def attend_to_source(query: jax.Array) -> jax.Array:
            return attention.attend(query, source_key, source_value, cache.source_mask, None, 0.0)

        return layer.decode(x, attend, attend_to_source, None), (keys, values)

    x, (keys, values) = lax.scan(run, x, (generator.decoder.layers, *cache[:4]))
    logits = heads.token_logits(generator, generator.cfg, x)
    return logits, cache._replace(keys=keys, values=values)


class _Beams(NamedTuple):
    """The K best beams of N texts, the best beam first."""

    position: jax.Array  # int32, the number of steps done
    ids: jax.Array  # int32 [N, K, T]; the end token and all positions after it have its id
    total: jax.Array  # float32 [N, K], logarithm of the probability
    length: jax.Array  # int32 [N, K], in tokens
    done: jax.Array  # bool [N, K], whether the text has ended
    cache: DecoderCache  # of all tokens except the newest


def search(
    generator: Generator, batch: Batch, loop: Loop, settings: SearchSettings
) -> tuple[jax.Array, jax.Array]:
    """Generates the most probable texts by beam search.

    Beams are ranked by log probability / ((5 + tokens) / 6)^0.6 (Wu et al. 2016). A finished text
    keeps its rank, and stays among the K beams until better ones replace it.

    Returns:
      int32 [N, T], padded with the end token, and the ranking scores of these texts, float32 [N].
    """
    beams, length, _, last = settings
    count = len(batch["input_ids"])
    cache = begin(generator, batch, loop, beams, length)
    start = _Beams(
        jnp.int32(0),
        jnp.full((count, beams, length), last, jnp.int32),
        # At first all beams are equal, so all except one are excluded.
        jnp.broadcast_to(jnp.where(jnp.arange(beams) > 0, -jnp.inf, 0.0), (count, beams)),
        jnp.zeros((count, beams), jnp.int32),
        jnp.zeros((count, beams), bool),
        cache,
    )

    def is_unfinished(best: _Beams) -> jax.Array:
        return (best.position < length) & ~best.done.all()

    best = lax.while_loop(is_unfinished, lambda best: _extend(generator, settings, best), start)
    return best.ids[:, 0], _ranks(best.total, best.length)[:, 0]


def _ranks(total: jax.Array, length: jax.Array) -> jax.Array:
    return total / ((5.0 + length) / 6.0) ** _ALPHA


def _extend(generator: Generator, settings: SearchSettings, best: _Beams) -> _Beams:
    """Returns the K best texts that are one token longer, or have ended."""
    (count, beams, _), last = best.ids.shape, settings.last
    previous = lax.dynamic_index_in_dim(
        best.ids, jnp.maximum(best.position - 1, 0), axis=2, keepdims=False
    )
    newest = jnp.where(best.position > 0, previous, settings.first)
    logits, cache = next_logits(generator, best.cache, newest, best.position)
    size = logits.shape[-1]
    ended = jnp.where(jnp.arange(size) == last, 0.0, -jnp.inf)
    added = jnp.where(best.done[..., None], ended, jax.nn.log_softmax(logits))
    total = best.total[..., None] + added
    lengths = best.length + ~best.done
    _, indices = lax.top_k(_ranks(total, lengths[..., None]).reshape(count, beams * size), beams)
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
