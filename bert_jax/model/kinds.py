"""What differs between kinds of encoders: `model.kind` is a key of one table.

An experiment may bring an encoder of its own (`model.code`), which is then used instead.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import Model, code
from bert_jax.model import bilstm, layers, transformer
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import Loop


class Kind(NamedTuple):
    """One kind of encoder."""

    # A module with its parameters, `embeddings` and stacked `layers` among them; made from a
    # `Model`.
    encoder: Callable[..., nnx.Module]
    encode: Callable[..., jax.Array]  # see the functions of these names
    attention_probabilities: Callable[..., jax.Array]
    # A module with `transform`, `layer_norm` and `output_bias`; of `bilstm`, whose states are those
    # that predict, with the last alone.
    masked_lm: Callable[..., nnx.Module]
    # The part of pre-training that stands below a task's head, by what that head reads.
    below: Mapping[str, Literal["pooler", "masked_lm"]]
    # Operations of a forward pass through all layers, of a `Model` and the length of a row, a
    # token.
    token_flops: Callable[[Model, int], int]


class OwnEncoder(NamedTuple):
    """An encoder of an experiment's own: what the function that `model.code` names returns.

    It takes no arguments. Heads, and how operations are counted, stay those of `model.kind`.
    """

    # A module with its parameters, made from a `Model` and `rngs`: `embeddings` with a
    # `word.embedding` [V, D], V padded, and stacked `layers`, whose parameters carry a first
    # dimension L.
    encoder: Callable[..., nnx.Module]
    # See the function of this name; the layers are run by `model.encoder.run_layers`.
    encode: Callable[..., jax.Array]
    attention_probabilities: Callable[..., jax.Array]  # see the function of this name
    # Where its parameters are cut (`training.sharding.Rule`), one for each path, which begins with
    # `encoder/`.
    rules: Sequence[Any]


KINDS = {
    "bert": Kind(
        transformer.Encoder,
        transformer.encode,
        transformer.attention_probabilities,
        transformer.MaskedLM,
        {"pooled": "pooler"},
        transformer.token_flops,
    ),
    "modern": Kind(
        transformer.Encoder,
        transformer.encode,
        transformer.attention_probabilities,
        transformer.MaskedLM,
        {"pooled": "masked_lm", "tokens": "masked_lm"},
        transformer.token_flops,
    ),
    "bilstm": Kind(
        bilstm.Encoder,
        bilstm.encode,
        bilstm.attention_probabilities,
        bilstm.Softmax,
        {"pooled": "pooler"},
        bilstm.token_flops,
    ),
}


def encoder_of(cfg: Model) -> Kind | OwnEncoder:
    """Returns the encoder's functions: the kind's, or those of the experiment's own code."""
    return code.function(cfg.code)() if cfg.code else KINDS[cfg.kind]


def make_encoder(cfg: Model, *, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the parameters of an encoder, freshly drawn."""
    return encoder_of(cfg).encoder(cfg, rngs=rngs)


def encode(
    encoder: nnx.Module,
    cfg: Model,
    input_ids: jax.Array,
    segment_ids: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    noise: layers.Noise | None,
    loop: Loop,
    outputs: Literal["last", "all"] = "last",
) -> jax.Array:
    """Runs an encoder.

    Args:
      encoder: its parameters, of `make_encoder`; the upper layers may be left out.
      cfg: its shape.
      input_ids: int32 [B, S].
      segment_ids: int32 [B, S].
      input_mask: int32 [B, S], 0 for padding; `Shared` if several examples share a row, `Packing`
        if nothing is dropped and each text is to be by itself.
      noise: of dropout; None drops nothing.
      loop: how the layers are run.
      outputs: `last`, or `all`: the embeddings and every layer.

    Returns:
      [B, S, D] or [L + 1, B, S, D], in the compute type.
    """
    run = encoder_of(cfg).encode
    return run(encoder, cfg, input_ids, segment_ids, input_mask, noise, loop, outputs)


def of_text(cfg: Model, hidden: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Returns the vector that has seen a whole text: [B, S, D] -> [B, D].

    It is that of [CLS]; read from left to right, that of the last [SEP] (Radford et al. 2018). Of
    `bilstm` each direction has its own end.

    Args:
      cfg: of the encoder.
      hidden: what it gives.
      input_mask: int32 [B, S], 0 for padding, which comes last.
    """
    if not cfg.one_sided:
        return hidden[:, 0]
    last = jnp.maximum(input_mask.sum(axis=1) - 1, 0)
    at_last = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    if cfg.kind != "bilstm":
        return at_last
    half = cfg.hidden_size // 2
    return jnp.concatenate([at_last[:, :half], hidden[:, 0, half:]], axis=-1)


def attention_probabilities(encoder: nnx.Module, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Computes where the pieces of a text look in each layer, without dropout.

    Args:
      encoder: its parameters.
      cfg: its shape.
      hidden: float32 [L, S, D], what each layer is given of one text without padding: `encode`
        with `outputs="all"`, except for the last layer's.

    Returns:
      float32 [L, H, S, S], of each piece over all pieces; rows add up to 1.
    """
    return encoder_of(cfg).attention_probabilities(encoder, cfg, hidden)
