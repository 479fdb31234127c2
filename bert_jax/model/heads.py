"""The two heads of pre-training, and the encoder below them.

Shape letters: B batch, S sequence, P predictions, D width, V vocabulary rows (padded).
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import Model
from bert_jax.model import layers, losses, token_loss, transformer
from bert_jax.model.attention import Shared
from bert_jax.model.encoder import Loop, fill_params, initializer, params_of
from bert_jax.model.kinds import encode, encoder_functions

# Bias of vocabulary rows that stand for no token, so that their probability is 0.
_PADDING_BIAS = -1e9

Params = dict[str, Any]


class PretrainingModel(nnx.Module):
    """The encoder and the heads of pre-training.

    The path of a parameter is its name in checkpoints and in the rules of sharding.
    """

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.encoder = encoder_functions(cfg).encoder(cfg, rngs=rngs)
        self.pooler = layers.Dense(cfg.hidden_size, cfg.hidden_size, initializer(cfg), rngs=rngs)
        self.masked_lm = transformer.MaskedLM(cfg, rngs=rngs)
        self.next_sentence = layers.Dense(cfg.hidden_size, 2, initializer(cfg), rngs=rngs)


def init_params(cfg: Model, key: jax.Array) -> Params:
    """Draws fresh parameters, nested dicts of float32 arrays."""
    return params_of(PretrainingModel(cfg, rngs=nnx.Rngs(params=key)))


def merge(cfg: Model, params: Params) -> PretrainingModel:
    """Returns the module with these parameters. Custom code of saved runs calls it by this name."""
    return fill_params(params, PretrainingModel, cfg)


def add_missing_heads(cfg: Model, params: Params) -> tuple[Params, tuple[str, ...]]:
    """Returns parameters with all heads, and the names of the heads that are newly initialized.

    Further parameters, which custom objectives have, are left out.
    """
    shapes = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    missing = tuple(sorted(shapes.keys() - params.keys()))
    fresh = init_params(cfg, jax.random.key(0)) if missing else {}
    return {name: (fresh if name in missing else params)[name] for name in shapes}, missing


class TokenModel(Protocol):
    """A model with a head that computes logits of tokens."""

    encoder: Any  # also custom code: a module with `embeddings.word`
    masked_lm: transformer.MaskedLM


def masked_lm_logits(
    model: PretrainingModel, cfg: Model, hidden: jax.Array, positions: jax.Array
) -> jax.Array:
    """Computes logits over the vocabulary at the predicted positions.

    Hidden states of the last layer [B, S, D], positions int32 [B, P] -> float32 [B, P, V].
    """
    return token_logits(model, cfg, jnp.take_along_axis(hidden, positions[:, :, None], axis=1))


def token_logits(model: TokenModel, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Computes logits over the vocabulary: hidden states [..., D] -> float32 [..., V]."""
    return layers.linear(*_output_projection(model, cfg, hidden), "outputs_inputs")


def _output_projection(
    model: TokenModel, cfg: Model, hidden: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the inputs [..., D], weights [V, D] and biases [V] of the product that gives logits.

    The weights are `model.masked_lm.output` if the model has it, else the word embeddings.
    """
    table = getattr(model.masked_lm, "output", model.encoder.embeddings.word).embedding[...]
    transformed = model.masked_lm(hidden)
    bias = model.masked_lm.output_bias[...]
    bias = jnp.where(jnp.arange(len(bias)) < cfg.vocab_size, bias, _PADDING_BIAS)
    return transformed, table, bias


def pretraining_logits(
    cfg: Model,
    params: Params,
    batch: dict[str, jax.Array],
    noise: layers.Noise | None,
    loop: Loop,
) -> tuple[jax.Array, jax.Array]:
    """Computes both heads' logits for a batch of `data.batches`: [B, P, V] and [B, 2], float32."""
    model = merge(cfg, params)
    hidden = _encode_batch(model, cfg, batch, noise, loop)
    masked_lm = masked_lm_logits(model, cfg, hidden, batch["masked_lm_positions"])
    return masked_lm, _pair_logits(model, hidden)


def pretraining_metrics(
    cfg: Model,
    params: Params,
    batch: dict[str, jax.Array],
    noise: layers.Noise | None,
    loop: Loop,
    objective: str,
) -> losses.Metrics:
    """Computes the metrics of the tasks of `data.objective` for a batch of `data.batches`."""
    if loop.token_loss == "all_logits":
        logits = pretraining_logits(cfg, params, batch, noise, loop)
        return losses.pretraining(*logits, batch, objective)
    model = merge(cfg, params)
    hidden = _encode_batch(model, cfg, batch, noise, loop)
    predicted = jnp.take_along_axis(hidden, batch["masked_lm_positions"][:, :, None], axis=1)
    sums = token_loss.loss_and_hits(
        *_output_projection(model, cfg, predicted),
        batch["masked_lm_ids"],
        batch["masked_lm_weights"],
    )
    return losses.add_pair_metrics(sums, _pair_logits(model, hidden), batch, objective)


def _encode_batch(
    model: PretrainingModel,
    cfg: Model,
    batch: dict[str, jax.Array],
    noise: layers.Noise | None,
    loop: Loop,
) -> jax.Array:
    """Computes the hidden states of the last layer for a batch of `data.batches`: [B, S, D]."""
    input_mask: jax.Array | Shared = batch["input_mask"]
    if "example_numbers" in batch:
        input_mask = Shared(batch["example_numbers"], batch["positions"])
    ids = batch["input_ids"], batch["segment_ids"]
    return encode(model.encoder, cfg, *ids, input_mask, noise, loop)


def _pair_logits(model: PretrainingModel, hidden: jax.Array) -> jax.Array:
    """Computes logits of pairs from [CLS]: hidden states [B, S, D] -> float32 [B, 2].

    Class 0: B follows A. Class 1: B is random, or A and B are swapped.
    """
    pooled = jnp.tanh(model.pooler(hidden[:, 0])).astype(hidden.dtype)
    return model.next_sentence(pooled)
