"""A decoder over an encoder of kind `bert`, and the text that both write: teacher forcing, search.

Its layers are the encoder's with a causal mask, and each attends to what the encoder gives (Rothe
et al. 2020, section 2): both may begin with the weights of one pre-trained encoder, of which only
that cross-attention has none. Embeddings are shared, and are the output's weights too.

Shape letters: B batch, S source, T target, D width, H heads, L layers, V vocabulary rows; N texts
that are searched for, K beams.
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
# Of the penalty for short texts (Wu et al. 2016, equation 14; Rothe et al. take the same).
_ALPHA = 0.6


class DecoderLayer(transformer.Layer):
    """A layer of the encoder that attends to a source between its two halves."""

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
    """L layers: one `DecoderLayer` whose parameters carry a first dimension L."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        self.layers = jax.vmap(lambda key: DecoderLayer(cfg, rngs=nnx.Rngs(params=key)))(keys)


class Generator(nnx.Module):
    """An encoder, a decoder, and what scores pieces."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.encoder = transformer.Encoder(cfg, rngs=rngs)
        self.decoder = Decoder(cfg, rngs=rngs)
        self.masked_lm = transformer.MaskedLM(cfg, rngs=rngs)


def init_params(cfg: Model, key: jax.Array) -> dict[str, Any]:
    """Returns fresh parameters as nested dicts of float32 arrays."""
    return params_of(Generator(cfg, rngs=nnx.Rngs(params=key)))


def merge_params(cfg: Model, params: dict[str, Any]) -> Generator:
    """Returns the module that holds these parameters."""
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

    `attend` and `attend_to_source` take queries [B, T, H, D / H] to what they find in the target,
    and in the source, of the same shape; sites 0 and 3 of the noise are theirs.
    """
    at = (lambda site: None) if noise is None else noise.at
    own = layer.query, layer.attention_output, layer.attention_layer_norm, attend, 1
    cross = layer.cross_query, layer.cross_output, layer.cross_layer_norm, attend_to_source, 4
    for query, output, norm, look, site in (own, cross):
        context = look(_by_heads(cfg, query, x)).reshape(x.shape)
        added = transformer.product(output, context, x.shape).astype(jnp.float32)
        x = norm(x + layers.dropout(added, at(site), cfg.hidden_dropout_prob)).astype(x.dtype)
    return transformer.feed_forward(layer, cfg, x, noise)


def _by_heads(cfg: Model, dense: layers.Linear, x: jax.Array) -> jax.Array:
    """Returns queries, keys or values: [B, S, D] -> [B, S, H, D / H]."""
    number = cfg.num_attention_heads
    return transformer.product(dense, x, (*x.shape[:2], number, x.shape[2] // number))


def target_logits(
    generator: Generator, cfg: Model, batch: Batch, noise: layers.Noise | None, loop: Loop
) -> jax.Array:
    """Scores the piece behind each of a text that is given: float32 [B, T, V].

    `batch` has `input_ids`, `segment_ids` and `input_mask` of the source, int32 [B, S], and
    `decoder_ids` int32 [B, T], beginning with [CLS], anything behind the text.
    """
    source, mask = _read(generator, cfg, batch, noise, loop), batch["input_mask"]
    # Places below are the encoder's and those of heads.
    noise = None if noise is None else noise.at(cfg.num_hidden_layers + 2)
    ids, dtype = batch["decoder_ids"], source.dtype
    x = generator.encoder.embeddings(ids, jnp.zeros_like(ids), dtype)
    of_embeddings = None if noise is None else noise.at(cfg.num_hidden_layers)
    x = layers.dropout(x, of_embeddings, cfg.hidden_dropout_prob).astype(dtype)
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
        key, value = (_by_heads(cfg, dense, x) for dense in (layer.key, layer.value))
        cross = (layer.cross_key, layer.cross_value)
        source_key, source_value = (_by_heads(cfg, dense, source) for dense in cross)
        # Padding stands to the right of what is scored.
        window = attention.causal_mask(x.shape[1])
        return _run_layer(
            layer,
            cfg,
            x,
            lambda query: attend(query, key, value, ones, at(0), rate, window, scores),
            lambda query: attend(query, source_key, source_value, mask, at(3), rate, None, scores),
            noise,
        )

    # A decoder's layers are gathered before, kernels attend to both sides.
    loop = Loop(loop.remat, loop.layers)
    x, _ = run_layers(run, generator.decoder.layers, x, noise, loop, "last")
    return heads.piece_logits(generator, cfg, x)


def _read(
    generator: Generator, cfg: Model, batch: Batch, noise: layers.Noise | None, loop: Loop
) -> jax.Array:
    """Returns what the encoder gives of the source, [B, S, D]."""
    ids = batch["input_ids"], batch["segment_ids"]
    return encode(generator.encoder, cfg, *ids, batch["input_mask"], noise, loop)


# --- search -------------------------------------------------------------------------------------


class DecoderCache(NamedTuple):
    """The keys and values that need not be computed again for the next piece."""

    keys: jax.Array  # of the pieces so far, [L, N, K, T, H, D / H]
    values: jax.Array
    source_keys: jax.Array  # [L, N, S, H, D / H]
    source_values: jax.Array
    source_mask: jax.Array  # int32 [N, S], 0 for padding


def begin(
    generator: Generator, cfg: Model, batch: Batch, loop: Loop, beams: int, length: int
) -> DecoderCache:
    """Reads the source, and returns a cache with room for K = `beams` texts of `length` pieces."""
    source = _read(generator, cfg, batch, None, loop)
    stacked = generator.decoder.layers
    source_keys, source_values = lax.map(
        lambda layer: [_by_heads(cfg, d, source) for d in (layer.cross_key, layer.cross_value)],
        stacked,
    )
    count, number = cfg.num_hidden_layers, cfg.num_attention_heads
    shape = (count, len(source), beams, length, number, source.shape[2] // number)
    empty = jnp.zeros(shape, source.dtype)
    return DecoderCache(empty, empty, source_keys, source_values, batch["input_mask"])


def next_logits(
    generator: Generator, cfg: Model, cache: DecoderCache, ids: jax.Array, place: jax.Array
) -> tuple[jax.Array, DecoderCache]:
    """Scores the next piece of each beam: float32 [N, K, V], and the cache with this one.

    `cache` has all pieces before this one; `ids` int32 [N, K] are the newest, at first [CLS], and
    stand at `place`, int32, from 0.
    """
    dtype, length = cache.keys.dtype, cache.keys.shape[3]
    positions = jnp.full_like(ids, place)
    x = generator.encoder.embeddings(ids, jnp.zeros_like(ids), dtype, positions).astype(dtype)
    ones = jnp.ones((ids.size, length), jnp.int32)
    window = (jnp.arange(length) <= place)[None]

    def run(x: jax.Array, of_layer: tuple[Any, ...]) -> tuple[jax.Array, tuple[Any, ...]]:
        layer, keys, values, source_key, source_value = of_layer
        key, value = (_by_heads(cfg, dense, x) for dense in (layer.key, layer.value))
        keys = lax.dynamic_update_index_in_dim(keys, key, place, axis=2)
        values = lax.dynamic_update_index_in_dim(values, value, place, axis=2)

        def attend(query: jax.Array) -> jax.Array:
            alone = query.reshape(ids.size, 1, *query.shape[2:])
            each_key, each_value = (
                array.reshape(ids.size, *array.shape[2:]) for array in (keys, values)
            )
            return attention.attend(alone, each_key, each_value, ones, None, 0.0, window)

        def attend_to_source(query: jax.Array) -> jax.Array:
            return attention.attend(query, source_key, source_value, cache.source_mask, None, 0.0)

        return _run_layer(layer, cfg, x, attend, attend_to_source, None), (keys, values)

    of_layers = generator.decoder.layers, *cache[:4]
    x, (keys, values) = lax.scan(run, x, of_layers)
    return heads.piece_logits(generator, cfg, x), cache._replace(keys=keys, values=values)


class _Best(NamedTuple):
    """The best beginnings so far of N texts, the best of each first."""

    place: jax.Array  # int32, pieces that were looked for
    ids: jax.Array  # int32 [N, K, T]; behind the last piece all are the last
    total: jax.Array  # float32 [N, K], logarithm of the probability
    length: jax.Array  # int32 [N, K], in pieces
    done: jax.Array  # bool [N, K], whether the last piece stands there
    cache: DecoderCache  # of all but the newest pieces


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
    """Looks for the likeliest texts by beam search; with one beam it takes the likeliest piece.

    Beginnings are ranked by their log probability over ((5 + pieces) / 6)^0.6 (Wu et al. 2016);
    one that has ended keeps its rank, and its place among the K until better ones take it.

    Args:
      batch: the source, as of `target_logits`.
      beams: K.
      length: T, of the text at most.
      first: the piece that texts begin with; it is not of the result.
      last: the piece that ends them.

    Returns:
      int32 [N, T], `last` from the end on, and the ranks of these, float32 [N].
    """
    count = len(batch["input_ids"])
    cache = begin(generator, cfg, batch, loop, beams, length)
    best = _Best(
        jnp.int32(0),
        jnp.full((count, beams, length), last, jnp.int32),
        # All but one are copies at first.
        jnp.broadcast_to(jnp.where(jnp.arange(beams) > 0, -jnp.inf, 0.0), (count, beams)),
        jnp.zeros((count, beams), jnp.int32),
        jnp.zeros((count, beams), bool),
        cache,
    )

    def ranks(total: jax.Array, length: jax.Array) -> jax.Array:
        return total / ((5.0 + length) / 6.0) ** _ALPHA

    def goes_on(best: _Best) -> jax.Array:
        return (best.place < length) & ~best.done.all()

    def step(best: _Best) -> _Best:
        before = lax.dynamic_index_in_dim(
            best.ids, jnp.maximum(best.place - 1, 0), axis=2, keepdims=False
        )
        newest = jnp.where(best.place > 0, before, first)
        logits, cache = next_logits(generator, cfg, best.cache, newest, best.place)
        pieces = logits.shape[-1]
        ended = jnp.where(jnp.arange(pieces) == last, 0.0, -jnp.inf)
        more = jnp.where(best.done[..., None], ended, jax.nn.log_softmax(logits))
        total = best.total[..., None] + more
        lengths = best.length + ~best.done
        _, which = lax.top_k(ranks(total, lengths[..., None]).reshape(count, beams * pieces), beams)
        parent, piece = which // pieces, which % pieces

        def of_parent(array: jax.Array, axis: int = 1) -> jax.Array:
            if beams == 1:
                return array
            shape = [1] * array.ndim
            shape[axis - 1 : axis + 1] = parent.shape
            return jnp.take_along_axis(array, parent.reshape(shape), axis=axis)

        ids = lax.dynamic_update_index_in_dim(of_parent(best.ids), piece, best.place, axis=2)
        keys, values = of_parent(cache.keys, 2), of_parent(cache.values, 2)
        return _Best(
            best.place + 1,
            ids,
            jnp.take_along_axis(total.reshape(count, -1), which, axis=1),
            of_parent(lengths),
            of_parent(best.done) | (piece == last),
            cache._replace(keys=keys, values=values),
        )

    best = lax.while_loop(goes_on, step, best)
    return best.ids[:, 0], ranks(best.total, best.length)[:, 0]
