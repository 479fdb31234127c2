"""ELECTRA (Clark et al. 2020) at the size of tiny: an objective that the experiment file defines.

A small generator learns to predict masked tokens. Tokens sampled from its predictions replace the
masks, and the encoder, as a discriminator, learns which tokens were replaced. The loss is over all
tokens, not over 15 % of them.

Source: Clark et al. 2020, section 3. The generator shares the embeddings and has a third of the
encoder's layers; lambda is 50. All tokens to predict are replaced by [MASK].
Hardware: a CPU.
Expected: `replaced_found`, the share of replaced tokens that are recognized, rises above 0.
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

# The weight of the discriminator's loss; the generator's has weight 1 (section 3.2).
LAMBDA = 50.0
# A token is sampled by a random number of so many bits.
BITS = 24
# Sites of random bits; the encoder's sites have smaller numbers.
_GENERATOR_SITE, _SAMPLE_SITE = 1_000, 1_001


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
    def generator(self) -> Model:
        """The config of the generator."""
        return replace(self.model, num_hidden_layers=max(self.model.num_hidden_layers // 3, 1))

    @property
    def rules(self) -> tuple[Rule, ...]:
        """How parameters are sharded: the generator's and the head's not over the data axis."""
        own = [Rule("generator/.*"), Rule("replaced/(kernel|bias)")]
        return (*sharding.encoder_rules(self.model), *own)

    def init_params(self, key: jax.Array):
        """Returns parameters of the encoder, the generator and the discriminator's head."""
        encoder = heads.init_params(self.model, key)["encoder"]
        generator = heads.init_params(self.generator, jax.random.fold_in(key, 1))
        layers_and_head = {
            "layers": generator["encoder"]["layers"],
            "masked_lm": generator["masked_lm"],
        }
        rngs = nnx.Rngs(params=jax.random.fold_in(key, 2))
        head = layers.Dense(self.model.hidden_size, 1, initializer(self.model), rngs=rngs)
        replaced = nnx.to_pure_dict(nnx.state(head, nnx.Param))
        return {"encoder": encoder, "generator": layers_and_head, "replaced": replaced}

    def forward(self, params, fixed, batch, noise, loop: Loop):
        """Returns each metric as a sum and a count, float32 [2].

        Without noise, as in an evaluation, the generator's likeliest tokens replace the masks.
        """
        del fixed
        at = (lambda site: None) if noise is None else noise.at
        logits = self._run_generator(params, batch, at(_GENERATOR_SITE), loop)
        labels, weights = batch["masked_lm_ids"], batch["masked_lm_weights"]
        generator_loss, generator_accuracy = classification(logits, labels, weights)

        token_logits = jax.lax.stop_gradient(logits)[..., : self.model.vocab_size]
        input_ids = _fill_masks(batch, _sample_tokens(token_logits, at(_SAMPLE_SITE)))
        # A sampled token that is the original one counts as not replaced (section 3.1).
        is_replaced = (input_ids != _fill_masks(batch, labels)).astype(jnp.float32)
        encoder = heads.merge(self.model, {"encoder": params["encoder"]}).encoder
        inputs = (input_ids, batch["segment_ids"], batch["input_mask"])
        hidden = encode(encoder, self.model, *inputs, noise, loop)
        score = layers.linear(hidden, **params["replaced"])[..., 0]
        is_token = batch["input_mask"].astype(jnp.float32)
        nats = jax.nn.softplus(jnp.where(is_replaced > 0, -score, score))
        is_right = ((score > 0) == (is_replaced > 0)).astype(jnp.float32)

        def sum_and_count(values: jax.Array, weights: jax.Array) -> jax.Array:
            return jnp.stack([(values * weights).sum(), weights.sum()])

        return {
            "generator_loss": generator_loss,
            "generator_accuracy": generator_accuracy,
            "replaced_loss": sum_and_count(LAMBDA * nats, is_token),
            "replaced_accuracy": sum_and_count(is_right, is_token),
            "replaced_found": sum_and_count(is_right, is_token * is_replaced),
        }

    def counts(self, batch):
        """Returns the numbers of masked tokens and of all tokens."""
        return batch["masked_lm_weights"].sum(), batch["input_mask"].astype(jnp.float32).sum()

    def loss(self, metrics, counts):
        """Returns the sum of both mean losses; `replaced_loss` is already multiplied by lambda."""
        sums = metrics["generator_loss"][0], metrics["replaced_loss"][0]
        return sums[0] / jnp.maximum(counts[0], 1.0) + sums[1] / jnp.maximum(counts[1], 1.0)

    def _run_generator(self, params, batch, noise, loop: Loop) -> jax.Array:
        """Returns the generator's logits for the masked tokens, float32 [B, P, V]."""
        cfg, own = self.generator, params["generator"]
        encoder = params["encoder"] | {"layers": own["layers"]}  # the embeddings are shared
        module = heads.merge(cfg, {"encoder": encoder, "masked_lm": own["masked_lm"]})
        inputs = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
        # `loop.gather` gathers the encoder's layers. The generator's are never sharded.
        loop = loop._replace(gather=Loop().gather)
        hidden = encode(module.encoder, cfg, *inputs, noise, loop)
        return heads.masked_lm_logits(module, cfg, hidden, batch["masked_lm_positions"])


def _sample_tokens(logits: jax.Array, noise: layers.Noise | None) -> jax.Array:
    """Samples a token for each position from its softmax, int32 [B, P]; without noise the argmax.

    With `model.dropout_rng=threefry8` the random numbers of a row do not depend on the devices.
    """
    if noise is None:
        return logits.argmax(axis=-1)
    bits = noise.keep((*logits.shape[:2], BITS), 0.5)
    number = (bits * 2.0 ** -jnp.arange(1, BITS + 1)).sum(axis=-1, keepdims=True)
    is_below = jnp.cumsum(jax.nn.softmax(logits), axis=-1) <= number
    return jnp.minimum(is_below.sum(axis=-1), logits.shape[-1] - 1)


def _fill_masks(batch, tokens: jax.Array) -> jax.Array:
    """Returns the batch's ids with `tokens`, int32 [B, P], at the masked positions."""
    rows = jnp.arange(len(tokens))[:, None]
    ids, positions = batch["input_ids"], batch["masked_lm_positions"]
    change = tokens - jnp.take_along_axis(ids, positions, axis=1)
    # Unused predictions have weight 0 and position 0; the token there must not change.
    return ids.at[rows, positions].add(change * (batch["masked_lm_weights"] > 0))


def electra(model: Model, data: Data) -> Electra:
    """Returns the objective for `data.code`; its rows must be one example each."""
    if data.attention != "whole_row":
        raise InputError("data.attention: electra needs rows of one example; set it to whole_row")
    return Electra(model)


def experiment() -> Experiment:
    """Returns tiny with this objective; all tokens to predict are replaced by [MASK].

    The optimizer is AdamW instead of Muon. No sample sentences are watched, since the model has no
    masked LM head to fill their [MASK]s.
    """
    import tiny

    parent = tiny.experiment()
    data = replace(parent.data, code=config.own(electra), mask_share=1.0, random_share=0.0)
    run = replace(parent.run, watch=())
    adamw = replace(parent.optimizer, name="adamw")
    return replace(parent, name="electra", data=data, optimizer=adamw, run=run)
