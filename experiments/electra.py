"""ELECTRA (Clark et al. 2020) at the size of tiny, as an objective of an experiment's own.

A small generator learns masked pieces; what it draws for them stands in the text that the encoder
reads, which learns of each piece whether it was replaced. All positions teach, not 15 %.

Source: Clark et al. 2020, section 3: the generator shares the embeddings, and is a third of the
encoder, here in layers; lambda 50. Pieces to be predicted are all [MASK].
Hardware: a CPU.
Expected: the share of replaced pieces that is seen through leaves 0.
Command: bert-jax pretrain experiments/electra.py
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax import config
from bert_jax.config import Data, Experiment, Model
from bert_jax.errors import InputError
from bert_jax.model import heads, layers
from bert_jax.model.encoder import Loop, initializer
from bert_jax.model.kinds import encode
from bert_jax.model.losses import classification
from bert_jax.training import sharding
from bert_jax.training.sharding import Rule

# Of the loss of replaced pieces, next to that of the generator (section 3.2).
LAMBDA = 50.0
# Bits of the number by which a piece is drawn; places of noise, over those of all layers.
BITS, _GENERATOR, _DRAWN = 24, 1_000, 1_001


@dataclass(frozen=True)
class Electra:
    """Replaced token detection; see `bert_jax.training.objective.Objective`."""

    model: Model
    metrics: tuple[str, ...] = (
        *("generator_loss", "generator_accuracy"),
        *("replaced_loss", "replaced_accuracy", "replaced_found"),
    )
    losses: tuple[str, ...] = ("generator_loss", "replaced_loss")

    @property
    def small(self) -> Model:
        """The generator."""
        return replace(self.model, num_hidden_layers=max(self.model.num_hidden_layers // 3, 1))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Of the encoder as ever; the generator's and the head's are never cut over DATA."""
        own = [Rule("generator/.*"), Rule("replaced/(kernel|bias)")]
        return (*sharding.encoder_rules(self.model), *own)

    def init_params(self, key: jax.Array):
        """The encoder, the generator's layers and head, and the head that tells pieces apart."""
        encoder = heads.init_params(self.model, key)["encoder"]
        small = heads.init_params(self.small, jax.random.fold_in(key, 1))
        generator = {"layers": small["encoder"]["layers"], "masked_lm": small["masked_lm"]}
        rngs = nnx.Rngs(params=jax.random.fold_in(key, 2))
        head = layers.Dense(self.model.hidden_size, 1, initializer(self.model), rngs=rngs)
        replaced = nnx.to_pure_dict(nnx.state(head, nnx.Param))
        return {"encoder": encoder, "generator": generator, "replaced": replaced}

    def forward(self, params, fixed, batch, noise, loop: Loop):
        """Sums and counts of both parts; without noise the generator's likeliest piece is taken."""
        del fixed
        at = (lambda place: None) if noise is None else noise.at
        logits = self._generated(params, batch, at(_GENERATOR), loop)
        labels, weights = batch["masked_lm_ids"], batch["masked_lm_weights"]
        loss, accuracy = classification(logits, labels, weights)

        pieces = jax.lax.stop_gradient(logits)[..., : self.model.vocab_size]
        drawn = _drawn(pieces, at(_DRAWN))
        read = _put(batch, drawn)
        is_replaced = (read != _put(batch, labels)).astype(jnp.float32)
        encoder = heads.build_model(self.model, {"encoder": params["encoder"]}).encoder
        inputs = (read, batch["segment_ids"], batch["input_mask"])
        hidden = encode(encoder, self.model, *inputs, noise, loop)
        score = layers.linear(hidden, **params["replaced"])[..., 0]
        seen = batch["input_mask"].astype(jnp.float32)
        nats = jax.nn.softplus(jnp.where(is_replaced > 0, -score, score))
        right = ((score > 0) == (is_replaced > 0)).astype(jnp.float32)

        def pair(values: jax.Array, where: jax.Array) -> jax.Array:
            return jnp.stack([(values * where).sum(), where.sum()])

        return {
            "generator_loss": loss,
            "generator_accuracy": accuracy,
            "replaced_loss": pair(LAMBDA * nats, seen),
            "replaced_accuracy": pair(right, seen),
            "replaced_found": pair(right, seen * is_replaced),
        }

    def counts(self, batch):
        """Masked pieces, and pieces."""
        return batch["masked_lm_weights"].sum(), batch["input_mask"].astype(jnp.float32).sum()

    def loss(self, metrics, counts):
        """The generator's mean, and lambda times that of replaced pieces."""
        sums = metrics["generator_loss"][0], metrics["replaced_loss"][0]
        return sums[0] / jnp.maximum(counts[0], 1.0) + sums[1] / jnp.maximum(counts[1], 1.0)

    def _generated(self, params, batch, noise, loop: Loop) -> jax.Array:
        own = params["generator"]
        encoder = params["encoder"] | {"layers": own["layers"]}  # all else is shared
        module = heads.build_model(self.small, {"encoder": encoder, "masked_lm": own["masked_lm"]})
        names = ("input_ids", "segment_ids", "input_mask")
        # Its layers are not those that the loop may have to gather.
        whole = loop._replace(gather=Loop().gather)
        hidden = encode(module.encoder, self.small, *(batch[n] for n in names), noise, whole)
        return heads.masked_lm_logits(module, self.small, hidden, batch["masked_lm_positions"])


def _drawn(logits: jax.Array, noise: layers.Noise | None) -> jax.Array:
    """A piece for each position, int32 [B, P], by a number of the row's own noise."""
    if noise is None:
        return logits.argmax(axis=-1)
    bits = noise.keep((*logits.shape[:2], BITS), 0.5)
    number = (bits * 2.0 ** -jnp.arange(1, BITS + 1)).sum(axis=-1, keepdims=True)
    below = jnp.cumsum(jax.nn.softmax(logits), axis=-1) <= number
    return jnp.minimum(below.sum(axis=-1), logits.shape[-1] - 1)


def _put(batch, pieces: jax.Array) -> jax.Array:
    """The batch's ids with these pieces where some are to be predicted; unused places write 0."""
    rows = jnp.arange(len(pieces))[:, None]
    ids, where = batch["input_ids"], batch["masked_lm_positions"]
    change = (pieces - jnp.take_along_axis(ids, where, axis=1)) * (batch["masked_lm_weights"] > 0)
    return ids.at[rows, where].add(change)


def electra(model: Model, data: Data) -> Electra:
    """The objective of `data.code`; `Electra.forward` takes a row to be one example."""
    if data.attention != "whole_row":
        raise InputError("data.attention: electra takes rows that are one example")
    return Electra(model)


def experiment() -> Experiment:
    """As tiny, all of whose pieces to be predicted are [MASK]."""
    import tiny

    parent = tiny.experiment()
    data = replace(parent.data, code=config.own(electra), mask_share=1.0, random_share=0.0)
    run = replace(parent.run, watch=())
    adamw = replace(parent.optimizer, name="adamw")
    return replace(parent, name="electra", data=data, optimizer=adamw, run=run)
