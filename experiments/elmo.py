"""ELMo (Peters et al. 2018) at the size of tiny: the experiment file defines encoder and objective.

Stacked LSTMs read each row from left to right and from right to left; each token is predicted from
the tokens before it and from those after it.

Source: Peters et al. 2018, section 3; details as in allenai/bilm-tf, training.py: states are
projected, layers after the first have residual connections, and dropout comes before each layer and
before the softmax. Differences: token embeddings, which both directions and the softmax share,
instead of convolutions over characters; a full softmax instead of a sampled one; states begin at 0
in each row.
Hardware: a CPU.
Expected: about 185 steps in 150 CPU seconds; tables/objectives.py compares the losses.
Command: bert-jax pretrain experiments/elmo.py

The first half of the D numbers of a vector belongs to the forward LSTMs, the second half to the
backward LSTMs. No operation mixes the halves.

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
    """Token embeddings, D / 2 wide: both directions read the same."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        rows, half = parts.padded_vocab_size(cfg), cfg.hidden_size // 2
        init = parts.initializer(cfg)
        self.word = parts.Embedding(cfg.vocab_size, half, init, rngs=rngs, rows=rows)


class Encoder(nnx.Module):
    """Embeddings, and L layers with `model.intermediate_size` LSTM units in each direction."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        half, cells = cfg.hidden_size // 2, cfg.intermediate_size

        def make_layer(key: jax.Array) -> lstm.Direction:
            return lstm.both_directions(half, cells, half, rngs=nnx.Rngs(params=key))

        # One module for all layers and both directions: its parameters have shape [L, 2, ...].
        self.layers = jax.vmap(make_layer)(keys)


def run_encoder(encoder, cfg, input_ids, segment_ids, input_mask, noise, loop, outputs="last"):
    """Runs the encoder, see `bert_jax.model.kinds.encode`.

    With every output asked for, the first is the embeddings, once for each direction.
    """
    del segment_ids
    dtype = jnp.dtype(cfg.compute_dtype)
    word = parts.look_up(encoder.embeddings.word.embedding[...], input_ids, dtype).astype(dtype)

    def run_layer(layer, number, x, noise, kept):
        del kept
        x = layers.dropout(x, noise, cfg.hidden_dropout_prob).astype(dtype)
        if isinstance(input_mask, Packing):
            halves = jnp.stack(jnp.split(input_mask.unpack(x), 2, axis=-1))
            output = input_mask.pack(lstm.run_both(layer, halves, input_mask.mask))
        else:
            output = lstm.run_both(layer, jnp.stack(jnp.split(x, 2, axis=-1)), input_mask)
        residual = jnp.where(number == 0, 0.0, x.astype(jnp.float32))
        return (output + residual).astype(dtype)

    both = jnp.concatenate([word, word], axis=-1)
    last, every = parts.run_layers(run_layer, encoder.layers, both, noise, loop, outputs)
    return last if every is None else every


def pool_final_states(hidden: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Returns the final state of each direction: [B, S, D] -> [B, D]."""
    half = hidden.shape[-1] // 2
    last = jnp.maximum(input_mask.sum(axis=1) - 1, 0)
    at_last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return jnp.concatenate([at_last[:, :half], hidden[:, 0, half:]], axis=-1)


def encoder() -> OwnEncoder:
    """Returns the encoder for `model.code`."""
    rules = (
        Rule("encoder/embeddings/word/embedding", data=(0, 1)),
        # Kernels have the shape [L, 2, inputs, outputs].
        Rule("encoder/layers/(gates|projection)/kernel", data=(2,)),
        Rule("encoder/layers/gates/bias"),
    )
    return OwnEncoder(Encoder, run_encoder, None, rules, pool_final_states)


# --- the objective --------------------------------------------------------------------------------


@dataclass(frozen=True)
class BidirectionalLanguageModel:
    """Predicts each token from those before it, and from those after it (section 3.1).

    It is a `bert_jax.training.objective.Objective`.
    """

    model: Model
    metrics: tuple[str, ...] = (
        *("next_piece_loss", "next_piece_accuracy"),
        *("previous_piece_loss", "previous_piece_accuracy"),
    )
    losses: tuple[str, ...] = ("next_piece_loss", "previous_piece_loss")

    @property
    def rules(self) -> tuple[Rule, ...]:
        """How parameters are sharded: the softmax's bias not at all."""
        return (*sharding.encoder_rules(self.model), Rule("softmax/output_bias"))

    def init_params(self, key: jax.Array):
        """Returns the encoder's parameters and the softmax's bias; embeddings are its weights."""
        bias = jnp.zeros(parts.padded_vocab_size(self.model), jnp.float32)
        encoder = heads.init_params(self.model, key)["encoder"]
        return {"encoder": encoder, "softmax": {"output_bias": bias}}

    def logits(self, params, ids: jax.Array, input_mask: jax.Array, noise, loop) -> jax.Array:
        """Returns logits for all tokens except a row's first and last: forward, then backward.

        int32 [B, S] each -> float32 [2, B, S - 2, V].
        """
        cfg = self.model
        encoder = heads.merge(cfg, {"encoder": params["encoder"]}).encoder
        hidden = encode(encoder, cfg, ids, jnp.zeros_like(ids), input_mask, noise, loop)
        output_noise = None if noise is None else noise.at(cfg.num_hidden_layers)
        hidden = layers.dropout(hidden, output_noise, cfg.hidden_dropout_prob).astype(hidden.dtype)
        forward, backward = jnp.split(hidden, 2, axis=-1)
        bias = params["softmax"]["output_bias"]
        bias = jnp.where(jnp.arange(len(bias)) < cfg.vocab_size, bias, -1e9)
        # Token i is predicted from the forward state of i - 1 and the backward state of i + 1.
        states = jnp.stack([forward[:, :-2], backward[:, 2:]])
        table = encoder.embeddings.word.embedding
        return layers.linear(states, table[...], bias, "outputs_inputs")

    def forward(self, params, fixed, batch, noise, loop):
        """Returns each metric as a sum and a count over all tokens except [CLS] and [SEP]."""
        del fixed
        ids, weights = _restore_tokens(batch)
        labels = ids[:, 1:-1]
        sums: tuple[jax.Array, ...] = ()
        for logits in self.logits(params, ids, batch["input_mask"], noise, loop):
            sums += losses.classification(logits, labels, weights)
        return dict(zip(self.metrics, sums, strict=True))

    def counts(self, batch):
        """Returns the number of predicted tokens for each of the two losses."""
        count = _restore_tokens(batch)[1].sum()
        return count, count

    def loss(self, metrics, counts):
        """Returns the sum of both mean losses."""
        total = sum(metrics[name][0] for name in self.losses)
        return total / (counts[0] + losses.MASKED_LM_EPS)


def _restore_tokens(batch) -> tuple[jax.Array, jax.Array]:
    """Undoes the masking: returns the original ids, int32 [B, S], and weights, float32 [B, S - 2].

    A weight is 0 for [CLS], [SEP] and padding, else the row's.
    """
    ids, positions = batch["input_ids"], batch["masked_lm_positions"]
    change = batch["masked_lm_ids"] - jnp.take_along_axis(ids, positions, axis=1)
    rows = jnp.arange(len(ids))[:, None]
    ids = ids.at[rows, positions].add(change * (batch["masked_lm_weights"] > 0))
    # A row begins with [CLS] and ends with [SEP], which also separates documents.
    last = batch["input_mask"].sum(axis=1, keepdims=True) - 1
    is_special = (ids == ids[:, :1]) | (ids == jnp.take_along_axis(ids, last, axis=1))
    is_text = ~is_special & (batch["input_mask"] > 0)
    return ids, is_text[:, 1:-1] * batch["row_weights"][:, None]


def languages(model: Model, data: Data) -> BidirectionalLanguageModel:
    """Returns the objective for `data.code`."""
    # data.objective=mlm fills rows with full sentences; `data.code` replaces what is learned.
    if data.row_kind != "sentences" or data.attention != "whole_row":
        raise InputError(
            "data.objective, data.attention: elmo needs rows of full sentences; set "
            "data.objective=mlm and data.attention=whole_row"
        )
    return BidirectionalLanguageModel(model)


def experiment() -> Experiment:
    """Returns tiny with this encoder, twice as wide, and this objective."""
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
