"""The two heads of pre-training, over the encoder they share it with.

Shape letters: B batch, S sequence, P predictions, D width, V vocabulary rows (padded).
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import Model
from bert_jax.model import layers, transformer
from bert_jax.model.attention import Shared
from bert_jax.model.encoder import Loop, fill_params, initializer, params_of
from bert_jax.model.kinds import encode, encoder_of

# Of rows of the vocabulary that stand for no piece.
_NO_PIECE = -1e9

Params = dict[str, Any]


class Pretrainer(nnx.Module):
    """All parameters of pre-training. Their paths in the tree are their names everywhere."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.encoder = encoder_of(cfg).encoder(cfg, rngs=rngs)
        self.pooler = layers.Dense(cfg.hidden_size, cfg.hidden_size, initializer(cfg), rngs=rngs)
        self.masked_lm = transformer.MaskedLM(cfg, rngs=rngs)
        self.next_sentence = layers.Dense(cfg.hidden_size, 2, initializer(cfg), rngs=rngs)


def init_params(cfg: Model, key: jax.Array) -> Params:
    """Draws fresh parameters, nested dicts of float32 arrays."""
    return params_of(Pretrainer(cfg, rngs=nnx.Rngs(params=key)))


def merge(cfg: Model, params: Params) -> Pretrainer:
    """Returns the module that holds these parameters, see `fill_params`."""
    return fill_params(params, Pretrainer, cfg)


def completed(cfg: Model, params: Params) -> tuple[Params, tuple[str, ...]]:
    """Returns an encoder with all heads, and which of them are fresh, since `params` lack them.

    What an objective of its own has next to them is left out.
    """
    shapes = jax.eval_shape(lambda: init_params(cfg, jax.random.key(0)))
    fresh = tuple(sorted(shapes.keys() - params.keys()))
    drawn = init_params(cfg, jax.random.key(0)) if fresh else {}
    return {name: (drawn if name in fresh else params)[name] for name in shapes}, fresh


class PieceModel(Protocol):
    """A model that scores tokens with the word embeddings or with a table of its own."""

    encoder: Any  # also custom code: a module with `embeddings.word`
    masked_lm: transformer.MaskedLM


def masked_lm_logits(
    model: Pretrainer, cfg: Model, hidden: jax.Array, positions: jax.Array
) -> jax.Array:
    """Computes scores of all pieces at the positions of which one is predicted, nowhere else.

    The last layer's [B, S, D], positions int32 [B, P] -> float32 [B, P, V].
    """
    return piece_logits(model, cfg, jnp.take_along_axis(hidden, positions[:, :, None], axis=1))


def piece_logits(model: PieceModel, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Computes scores of all pieces: [..., D] of a layer -> float32 [..., V].

    `model` has `masked_lm` and an `encoder`, whose word embeddings are the output's weights if
    `masked_lm` has no `output` of its own.
    """
    table = getattr(model.masked_lm, "output", model.encoder.embeddings.word).embedding[...]
    below = transformed(model.masked_lm, cfg, hidden)
    bias = model.masked_lm.output_bias[...]
    # Rows that stand for no piece get no probability.
    bias = jnp.where(jnp.arange(len(bias)) < cfg.vocab_size, bias, _NO_PIECE)
    return layers.linear(below, table, bias, "outputs_inputs")


def transformed(head: transformer.Transform, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Runs what masked LM has below its output, which ModernBERT's other heads have, too.

    `head` has `transform` and `layer_norm`; [..., D] of a layer -> the same, in the same type.
    """
    below = layers.activation(cfg.hidden_act, head.transform(hidden))
    return head.layer_norm(below).astype(hidden.dtype)


def pretraining_logits(
    cfg: Model,
    params: Params,
    batch: dict[str, jax.Array],
    noise: layers.Noise | None,
    loop: Loop,
) -> tuple[jax.Array, jax.Array]:
    """Computes both heads' scores for a batch of data.batches: [B, P, V] and [B, 2], float32."""
    model = merge(cfg, params)
    input_mask: jax.Array | Shared = batch["input_mask"]
    if "example_numbers" in batch:
        input_mask = Shared(batch["example_numbers"], batch["positions"])
    ids = batch["input_ids"], batch["segment_ids"]
    hidden = encode(model.encoder, cfg, *ids, input_mask, noise, loop)
    masked_lm = masked_lm_logits(model, cfg, hidden, batch["masked_lm_positions"])
    # "B follows A" and "B is random", or "they were swapped", from [CLS].
    pooled = jnp.tanh(model.pooler(hidden[:, 0])).astype(hidden.dtype)
    return masked_lm, model.next_sentence(pooled)
