"""ELMo (Peters et al. 2018) at the size of tiny, as an encoder and an objective of an experiment's
own: LSTMs from left to right and from right to left, which predict each piece from both sides.

Source: Peters et al. 2018, section 3; numerics as in allenai/bilm-tf, training.py: states are
projected, layers after the first add to what they read, and dropout comes before each layer and
before the softmax. What differs: pieces have a table of vectors, which both directions share and
the softmax reads, in place of convolutions over characters; the softmax is whole; and every row
begins with states of zero.
Hardware: a CPU.
Expected: about 185 steps in 150 CPU seconds, see tables/objectives.py.
Command: bert-jax pretrain experiments/elmo.py

The halves of D are the two directions, each of which sees its own half alone.

Shape letters: B batch, S sequence, P predictions, D width, V vocabulary.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax import config
from bert_jax.config import Data, Experiment, Model
from bert_jax.errors import InputError
from bert_jax.model import encoder as parts
from bert_jax.model import heads, layers, losses, lstm
from bert_jax.model.attention import Packing
from bert_jax.model.kinds import OwnEncoder, encode
from bert_jax.training import sharding
from bert_jax.training.sharding import Rule

# --- the encoder ----------------------------------------------------------------------------------


class Embeddings(nnx.Module):
    """Vectors of pieces, half as wide as the encoder."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        rows, half = parts.padded_vocab_size(cfg), cfg.hidden_size // 2
        init = parts.initializer(cfg)
        self.word = parts.Embedding(cfg.vocab_size, half, init, rngs=rngs, rows=rows)


class Encoder(nnx.Module):
    """Embeddings and L layers of `model.intermediate_size` cells in each direction."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        half, cells = cfg.hidden_size // 2, cfg.intermediate_size

        def layer(key: jax.Array) -> lstm.Direction:
            return lstm.both_directions(half, cells, half, rngs=nnx.Rngs(params=key))

        # A layer whose parameters carry the first dimensions [L, 2].
        self.layers = jax.vmap(layer)(keys)


def run_encoder(encoder, cfg, input_ids, segment_ids, input_mask, noise, loop, outputs="last"):
    """See `bert_jax.model.kinds.encode`; layer 0 is the embeddings twice, once a direction."""
    del segment_ids
    dtype = jnp.dtype(cfg.compute_dtype)
    word = parts.look_up(encoder.embeddings.word.embedding[...], input_ids, dtype).astype(dtype)

    def run(layer, number, x, noise, kept):
        del kept
        x = layers.dropout(x, noise, cfg.hidden_dropout_prob).astype(dtype)
        if isinstance(input_mask, Packing):
            halves = jnp.stack(jnp.split(input_mask.unpack(x), 2, axis=-1))
            read = input_mask.pack(lstm.run_both(layer, halves, input_mask.mask))
        else:
            read = lstm.run_both(layer, jnp.stack(jnp.split(x, 2, axis=-1)), input_mask)
        return (read + jnp.where(number == 0, 0.0, x.astype(jnp.float32))).astype(dtype)

    twice = jnp.concatenate([word, word], axis=-1)
    last, every = parts.run_layers(run, encoder.layers, twice, noise, loop, outputs)
    return last if every is None else every


def of_text(hidden: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Of each direction where it ends: [B, S, D] -> [B, D]."""
    half = hidden.shape[-1] // 2
    last = jnp.maximum(input_mask.sum(axis=1) - 1, 0)
    at_last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return jnp.concatenate([at_last[:, :half], hidden[:, 0, half:]], axis=-1)


def encoder() -> OwnEncoder:
    """The encoder of `model.code`."""
    rules = (
        Rule("encoder/embeddings/word/embedding", data=(0, 1)),
        # Both directions are stacked, too.
        Rule("encoder/layers/(gates|projection)/kernel", data=(2,)),
        Rule("encoder/layers/gates/bias"),
    )
    return OwnEncoder(Encoder, run_encoder, None, rules, of_text)


# --- the objective --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Languages:
    """Each piece from what is left of it, and from what is right of it (section 3.1); see
    `bert_jax.training.objective.Objective`.
    """

    model: Model
    metrics: tuple[str, ...] = (
        *("next_piece_loss", "next_piece_accuracy"),
        *("previous_piece_loss", "previous_piece_accuracy"),
    )
    losses: tuple[str, ...] = ("next_piece_loss", "previous_piece_loss")

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Those of the encoder; the softmax's bias is never cut."""
        return (*sharding.encoder_rules(self.model), Rule("softmax/output_bias"))

    def init_params(self, key: jax.Array):
        """The encoder, and the softmax's bias; its weights are the word embeddings."""
        bias = jnp.zeros(parts.padded_vocab_size(self.model), jnp.float32)
        encoder = heads.init_params(self.model, key)["encoder"]
        return {"encoder": encoder, "softmax": {"output_bias": bias}}

    def logits(self, params, ids: jax.Array, input_mask: jax.Array, noise, loop) -> jax.Array:
        """Scores of all pieces but a row's first and last, by what is left and right of each.

        int32 [B, S] each -> float32 [2, B, S - 2, V].
        """
        cfg = self.model
        encoder = heads.build_model(cfg, {"encoder": params["encoder"]}).encoder
        hidden = encode(encoder, cfg, ids, jnp.zeros_like(ids), input_mask, noise, loop)
        site = None if noise is None else noise.at(cfg.num_hidden_layers)
        hidden = layers.dropout(hidden, site, cfg.hidden_dropout_prob).astype(hidden.dtype)
        left, right = jnp.split(hidden, 2, axis=-1)
        bias = params["softmax"]["output_bias"]
        bias = jnp.where(jnp.arange(len(bias)) < cfg.vocab_size, bias, -1e9)
        seen, table = jnp.stack([left[:, :-2], right[:, 2:]]), encoder.embeddings.word.embedding
        return layers.linear(seen, table[...], bias, "outputs_inputs")

    def forward(self, params, fixed, batch, noise, loop):
        """Sums and counts of both directions, over all pieces but specials."""
        del fixed
        ids, weights = _whole(batch)
        labels = ids[:, 1:-1]
        sums: tuple[jax.Array, ...] = ()
        for logits in self.logits(params, ids, batch["input_mask"], noise, loop):
            sums += losses.classification(logits, labels, weights)
        return dict(zip(self.metrics, sums, strict=True))

    def counts(self, batch):
        """Predicted pieces, by which both losses are divided."""
        count = _whole(batch)[1].sum()
        return count, count

    def loss(self, metrics, counts):
        """The sum of both means."""
        both = sum(metrics[name][0] for name in self.losses)
        return both / (counts[0] + losses.MASKED_LM_EPS)


def _whole(batch) -> tuple[jax.Array, jax.Array]:
    """Rows without masks, int32 [B, S], and where they have text, float32 [B, S - 2]."""
    ids, where = batch["input_ids"], batch["masked_lm_positions"]
    change = batch["masked_lm_ids"] - jnp.take_along_axis(ids, where, axis=1)
    rows = jnp.arange(len(ids))[:, None]
    ids = ids.at[rows, where].add(change * (batch["masked_lm_weights"] > 0))
    # Rows begin with [CLS] and end with [SEP], which stands between documents, too.
    last = batch["input_mask"].sum(axis=1, keepdims=True) - 1
    special = (ids == ids[:, :1]) | (ids == jnp.take_along_axis(ids, last, axis=1))
    text = ~special & (batch["input_mask"] > 0)
    return ids, text[:, 1:-1] * batch["row_weights"][:, None]


def languages(model: Model, data: Data) -> Languages:
    """The objective of `data.code`."""
    if data.units != "sentences" or data.attention != "whole_row":
        raise InputError(
            "data.objective, data.attention: elmo takes rows of full sentences, data.objective=mlm "
            "and data.attention=whole_row"
        )
    return Languages(model)


def experiment() -> Experiment:
    """As tiny, but for what learns and what is learned; a layer is twice as wide."""
    import tiny

    parent = tiny.experiment()
    model = Model(
        code=config.own(encoder),
        vocab_size=parent.model.vocab_size,
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=1,
        intermediate_size=256,
        max_position_embeddings=128,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    data = replace(parent.data, objective="mlm", code=config.own(languages))
    changed = {"optimizer": replace(parent.optimizer, name="adamw"), "model": model, "data": data}
    return replace(parent, name="elmo", run=replace(parent.run, watch=()), **changed)
