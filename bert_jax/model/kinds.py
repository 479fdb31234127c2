"""The encoder of a model: the transformer, or one that an experiment brings (`model.code`)."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import Model, code
from bert_jax.errors import InputError
from bert_jax.model import layers, transformer
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import Loop


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
    # See the function of this name; None: there is no attention.
    attention_probabilities: Callable[..., jax.Array] | None
    # Where its parameters are cut (`training.sharding.Rule`), one for each path, which begins with
    # `encoder/`.
    rules: Sequence[Any]
    # Takes hidden states and `input_mask` to the vector that has seen a whole text, [B, S, D] and
    # [B, S] -> [B, D]; None: that of the first piece.
    of_text: Callable[[jax.Array, jax.Array], jax.Array] | None = None


# Its rules are a table by `model.kind`, in `training.sharding`.
_TRANSFORMER = OwnEncoder(
    transformer.Encoder, transformer.encode, transformer.attention_probabilities, ()
)


def encoder_of(cfg: Model) -> OwnEncoder:
    """Returns the encoder's functions: the transformer's, or those of the experiment's own code."""
    return code.function(cfg.code)() if cfg.code else _TRANSFORMER


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
      encoder: its parameters; the upper layers may be left out.
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

    It is that of [CLS]; read from left to right, that of the last [SEP] (Radford et al. 2018).

    Args:
      cfg: of the encoder.
      hidden: what it gives.
      input_mask: int32 [B, S], 0 for padding, which comes last.
    """
    if own := encoder_of(cfg).of_text:
        return own(hidden, input_mask)
    if cfg.direction == "both":
        return hidden[:, 0]
    last = jnp.maximum(input_mask.sum(axis=1) - 1, 0)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


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
    run = encoder_of(cfg).attention_probabilities
    if run is None:
        raise InputError(f"model.code={cfg.code}: has no attention to show; ask another encoder")
    return run(encoder, cfg, hidden)
