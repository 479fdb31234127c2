"""BERT with attention with linear biases (ALiBi, Press et al. 2022) instead of position embeddings.

The experiment file defines the encoder, at the size of tiny_paper. docs/howto/write-an-objective.md
explains such files.

Source: Press et al. 2022, section 3, made symmetric for text that is read in both directions: head
h subtracts from its scores the distance of query and key times its slope, 2**(-8 h / H). Everything
else is BERT's.
Hardware: a CPU.
Expected: losses like tiny_paper's. Rows may be longer than those of the training.
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
    """The sum of token and segment embeddings, with layer normalization."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        init, width = bert.initializer(cfg), cfg.hidden_size
        table_size = bert.padded_vocab_size(cfg)
        self.word = bert.Embedding(cfg.vocab_size, width, init, rngs=rngs, rows=table_size)
        self.segment = bert.Embedding(cfg.type_vocab_size, width, init, rngs=rngs)
        self.layer_norm = layers.LayerNorm(width)

    def __call__(self, input_ids, segment_ids, dtype):
        """Embeds rows: int32 [B, S] each -> float32 [B, S, D]; tokens are looked up in `dtype`."""
        word = bert.look_up(self.word.embedding[...], input_ids, dtype)
        return self.layer_norm(word + self.segment.embedding[...][segment_ids])


class Encoder(nnx.Module):
    """The embeddings and BERT's layers."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        self.layers = jax.vmap(lambda key: transformer.Layer(cfg, rngs=nnx.Rngs(params=key)))(keys)


def linear_biases(heads: int, length: int) -> jax.Array:
    """Returns what is added to the scores, float32 [H, S, S]."""
    slopes = 2.0 ** (-8.0 * jnp.arange(1, heads + 1) / heads)
    positions = jnp.arange(length)
    return -slopes[:, None, None] * jnp.abs(positions[:, None] - positions)


def attention_scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Computes biased scores: [..., S, H, D / H] each -> float32 [..., H, S, S]."""
    heads, width = query.shape[-2:]
    products = jnp.einsum("...qhd,...khd->...hqk", query, key, preferred_element_type=jnp.float32)
    return products / width**0.5 + linear_biases(heads, query.shape[-3])


def attend(query, key, value, input_mask, noise, rate):
    """Computes attention: [B, S, H, D / H] each -> the same shape.

    Texts that share a row do not attend to each other. `input_mask` is int32 [B, S], a `Packing`,
    which gives each text its own row, or a `Shared`, which has the number of each token's text.
    """
    if isinstance(input_mask, Packing):
        unpacked = (input_mask.unpack(x) for x in (query, key, value))
        return input_mask.pack(attend(*unpacked, input_mask.mask, noise, rate))
    if isinstance(input_mask, Shared):
        numbers = input_mask.numbers
        may_attend = (numbers[:, :, None] == numbers[:, None, :])[:, None]
    else:
        may_attend = (input_mask > 0)[:, None, None, :]
    scores = attention_scores(query, key) + jnp.where(may_attend, 0.0, MASKED_SCORE)
    probs = jax.nn.softmax(scores, axis=-1)
    if noise is not None and rate:
        b, h, q, k = probs.shape
        # Drawn as [B, H, K, Q], as bert_jax's own attention does, so that the masks are the same.
        keep = jnp.swapaxes(noise.keep((b, h, k, q), rate), 2, 3)
        probs = jnp.where(keep, probs * noise.scale(rate), 0.0)
    probs = probs.astype(value.dtype)
    context = jnp.einsum("bhqk,bkhd->bqhd", probs, value, preferred_element_type=jnp.float32)
    return context.astype(value.dtype)


def run_layer(layer: transformer.Layer, cfg: Model, x: jax.Array, input_mask, noise) -> jax.Array:
    """Runs a layer: [B, S, D] in the compute type -> the same shape and type."""
    at = (lambda site: None) if noise is None else noise.at
    by_head = (*x.shape[:2], cfg.num_attention_heads, -1)
    projections = (layer.query, layer.key, layer.value)
    vectors = (dense(x).astype(x.dtype).reshape(by_head) for dense in projections)
    context = attend(*vectors, input_mask, at(0), cfg.attention_probs_dropout_prob)
    attended = layer.attention_output(context.reshape(x.shape))
    attended = layers.dropout(attended, at(1), cfg.hidden_dropout_prob)
    x = layer.attention_layer_norm(x + attended).astype(x.dtype)
    inner = layers.activation(cfg.hidden_act, layer.intermediate(x)).astype(x.dtype)
    outer = layers.dropout(layer.output(inner), at(2), cfg.hidden_dropout_prob)
    return layer.output_layer_norm(x + outer).astype(x.dtype)


def encode(encoder, cfg, input_ids, segment_ids, input_mask, noise, loop, outputs="last"):
    """Runs the encoder, see `bert_jax.model.kinds.encode`."""
    dtype = jnp.dtype(cfg.compute_dtype)
    embedding_noise = None if noise is None else noise.at(cfg.num_hidden_layers)
    x = encoder.embeddings(input_ids, segment_ids, dtype)
    x = layers.dropout(x, embedding_noise, cfg.hidden_dropout_prob).astype(dtype)

    def run_one(layer, number, x, noise, kept):
        del number, kept
        return run_layer(layer, cfg, x, input_mask, noise)

    last, every = bert.run_layers(run_one, encoder.layers, x, noise, loop, outputs)
    return last if every is None else every


def attention_probabilities(encoder, cfg, hidden: jax.Array) -> jax.Array:
    """Computes the probabilities of one text, see `bert_jax.model.kinds.attention_probabilities`.

    `hidden` are the inputs of the layers, [L, S, D] -> [L, H, S, S].
    """

    def layer_probabilities(layer: transformer.Layer, x: jax.Array) -> jax.Array:
        by_head = (len(x), cfg.num_attention_heads, -1)
        query, key = (dense(x).reshape(by_head) for dense in (layer.query, layer.key))
        return jax.nn.softmax(attention_scores(query, key), axis=-1)

    return jax.vmap(layer_probabilities)(encoder.layers, hidden)


def alibi() -> OwnEncoder:
    """Returns the encoder for `model.code`."""
    rules = tuple(rule for rule in sharding.ENCODERS["bert"] if "position" not in rule.path)
    return OwnEncoder(Encoder, encode, attention_probabilities, rules)


def experiment() -> Experiment:
    """Returns tiny_paper with this encoder."""
    import tiny_paper

    parent = tiny_paper.experiment()
    model = dataclasses.replace(parent.model, code=config.own(alibi))
    return dataclasses.replace(parent, name="alibi", model=model)
