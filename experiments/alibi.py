"""BERT without position embeddings: attention with linear biases (Press et al. 2022), at the size
of tiny_paper, as an encoder of an experiment's own. docs/extending.md goes through the file.

Source: Press et al. 2022, section 3, for text that is read in both directions: each head lowers its
scores by a slope of its own times the distance; slopes 2**(-8 h / H). All else is BERT's.
Hardware: a CPU.
Expected: as tiny; rows may be longer than any it was trained on.
Command: bert-jax pretrain experiments/alibi.py
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax import config
from bert_jax.config import Experiment, Model
from bert_jax.model import encoder as bert
from bert_jax.model import layers, transformer
from bert_jax.model.attention import MASKED_SCORE, Packing, Shared
from bert_jax.model.kinds import OwnEncoder
from bert_jax.training import sharding


class Embeddings(nnx.Module):
    """The sum of token and segment embeddings, normalised."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        init, width = bert.initializer(cfg), cfg.hidden_size
        rows = bert.padded_vocab_size(cfg)
        self.word = bert.Embedding(cfg.vocab_size, width, init, rngs=rngs, rows=rows)
        self.segment = bert.Embedding(cfg.type_vocab_size, width, init, rngs=rngs)
        self.layer_norm = layers.LayerNorm(width)

    def __call__(self, input_ids, segment_ids, dtype):
        """int32 [B, S] each -> float32 [B, S, D]."""
        word = bert.look_up(self.word.embedding[...], input_ids, dtype)
        return self.layer_norm(word + self.segment.embedding[...][segment_ids])


class Encoder(nnx.Module):
    """The embeddings, and BERT's layers."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        self.layers = jax.vmap(lambda key: transformer.Layer(cfg, rngs=nnx.Rngs(params=key)))(keys)


def biases(heads: int, length: int) -> jax.Array:
    """What scores are lowered by, float32 [H, S, S]."""
    slopes = 2.0 ** (-8.0 * jnp.arange(1, heads + 1) / heads)
    places = jnp.arange(length)
    return -slopes[:, None, None] * jnp.abs(places[:, None] - places)


def scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """[..., S, H, D / H] each -> float32 [..., H, S, S]."""
    heads, width = query.shape[-2:]
    products = jnp.einsum("...qhd,...khd->...hqk", query, key, preferred_element_type=jnp.float32)
    return products / width**0.5 + biases(heads, query.shape[-3])


def attend(query, key, value, input_mask, noise, rate):
    """[B, S, H, D / H] each -> the same; of texts that share rows, each by itself."""
    if isinstance(input_mask, Packing):
        apart = (input_mask.unpack(x) for x in (query, key, value))
        return input_mask.pack(attend(*apart, input_mask.mask, noise, rate))
    if isinstance(input_mask, Shared):
        numbers = input_mask.numbers
        seen = (numbers[:, :, None] == numbers[:, None, :])[:, None]
    else:
        seen = (input_mask > 0)[:, None, None, :]
    lowered = scores(query, key) + jnp.where(seen, 0.0, MASKED_SCORE)
    probs = jax.nn.softmax(lowered, axis=-1)
    if noise is not None and rate:
        b, h, q, k = probs.shape
        keep = jnp.swapaxes(noise.keep((b, h, k, q), rate), 2, 3)
        probs = jnp.where(keep, probs * noise.scale(rate), 0.0)
    probs = probs.astype(value.dtype)
    context = jnp.einsum("bhqk,bkhd->bqhd", probs, value, preferred_element_type=jnp.float32)
    return context.astype(value.dtype)


def run_layer(layer: transformer.Layer, cfg: Model, x: jax.Array, input_mask, noise) -> jax.Array:
    """[B, S, D] in the compute type -> the same."""
    at = (lambda site: None) if noise is None else noise.at
    split = (*x.shape[:2], cfg.num_attention_heads, -1)
    projections = (layer.query, layer.key, layer.value)
    vectors = (dense(x).astype(x.dtype).reshape(split) for dense in projections)
    context = attend(*vectors, input_mask, at(0), cfg.attention_probs_dropout_prob)
    attended = layer.attention_output(context.reshape(x.shape))
    attended = layers.dropout(attended, at(1), cfg.hidden_dropout_prob)
    x = layer.attention_layer_norm(x + attended).astype(x.dtype)
    inner = layers.activation(cfg.hidden_act, layer.intermediate(x)).astype(x.dtype)
    outer = layers.dropout(layer.output(inner), at(2), cfg.hidden_dropout_prob)
    return layer.output_layer_norm(x + outer).astype(x.dtype)


def encode(encoder, cfg, input_ids, segment_ids, input_mask, noise, loop, outputs="last"):
    """See `bert_jax.model.kinds.encode`."""
    dtype = jnp.dtype(cfg.compute_dtype)
    first = None if noise is None else noise.at(cfg.num_hidden_layers)
    x = encoder.embeddings(input_ids, segment_ids, dtype)
    x = layers.dropout(x, first, cfg.hidden_dropout_prob).astype(dtype)

    def run(layer, number, x, noise, kept):
        del number, kept
        return run_layer(layer, cfg, x, input_mask, noise)

    last, every = bert.run_layers(run, encoder.layers, x, noise, loop, outputs)
    return last if every is None else every


def attention_probabilities(encoder, cfg, hidden: jax.Array) -> jax.Array:
    """See `bert_jax.model.kinds.attention_probabilities`."""

    def of_layer(layer: transformer.Layer, x: jax.Array) -> jax.Array:
        split = (len(x), cfg.num_attention_heads, -1)
        query, key = (dense(x).reshape(split) for dense in (layer.query, layer.key))
        return jax.nn.softmax(scores(query, key), axis=-1)

    return jax.vmap(of_layer)(encoder.layers, hidden)


def alibi() -> OwnEncoder:
    """The encoder of `model.code`."""
    rules = tuple(rule for rule in sharding.ENCODERS["bert"] if "position" not in rule.path)
    return OwnEncoder(Encoder, encode, attention_probabilities, rules)


def experiment() -> Experiment:
    """As tiny_paper, but for the encoder."""
    import tiny_paper

    parent = tiny_paper.experiment()
    model = dataclasses.replace(parent.model, code=config.own(alibi))
    return dataclasses.replace(parent, name="alibi", model=model)
