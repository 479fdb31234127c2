"""The kinds of encoders: the transformer, or the custom code of an experiment (`model.code`)."""

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
    """The functions that define an encoder. The function that `model.code` names returns one.

    That function has no arguments. Heads and the count of operations stay those of `model.kind`.
    """

    # Builds the module from a `Model` and `rngs`. The module has `embeddings` with a
    # `word.embedding` [V, D], V padded, and stacked `layers`, whose parameters have a first
    # dimension L.
    encoder: Callable[..., nnx.Module]
    # See the function `encode`; use `model.encoder.run_layers` to run the layers.
    encode: Callable[..., jax.Array]
    # See the function of this name; None: the encoder has no attention.
    attention_probabilities: Callable[..., jax.Array] | None
    # How its parameters are sharded (`training.sharding.Rule`): a rule for each path, which begins
    # with `encoder/`.
    rules: Sequence[Any]
    # Computes the vector of a text from hidden states and `input_mask`, [B, S, D] and [B, S] ->
    # [B, D]; None: the vector of the first token.
    of_text: Callable[[jax.Array, jax.Array], jax.Array] | None = None


# The sharding rules of each `model.kind` are in `training.sharding`.
_TRANSFORMER = OwnEncoder(
    transformer.Encoder,
    lambda encoder, cfg, *inputs: encoder(*inputs),
    lambda encoder, cfg, hidden: encoder.attention_probabilities(hidden),
    (),
)


def encoder_functions(cfg: Model) -> OwnEncoder:
    """Returns the functions of the encoder: the transformer's, or those of custom code."""
    return code.load_function(cfg.code)() if cfg.code else _TRANSFORMER


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
      encoder: the module; it may have only the first layers.
      cfg: its configuration.
      input_ids: int32 [B, S].
      segment_ids: int32 [B, S].
      input_mask: int32 [B, S], 0 for padding, which comes last; `Shared` or `Packing` if several
        examples or texts share a row. In both, tokens attend only to those of their own example:
        `Shared` masks the others, `Packing` moves each text to a place of its own for attention.
      noise: dropout noise; None drops nothing.
      loop: settings of the loop over layers.
      outputs: `last`, or `all`: the embeddings and every layer.

    Returns:
      [B, S, D] or [L + 1, B, S, D], in the compute type.
    """
    run = encoder_functions(cfg).encode
    return run(encoder, cfg, input_ids, segment_ids, input_mask, noise, loop, outputs)


def text_vector(cfg: Model, hidden: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Returns the vector of a token that has attended to the whole text: [B, S, D] -> [B, D].

    The token is [CLS], or with a causal mask the last [SEP] (Radford et al. 2018).

    Args:
      cfg: configuration of the encoder.
      hidden: output of the encoder.
      input_mask: int32 [B, S], 0 for padding, which comes last.
    """
    if custom := encoder_functions(cfg).of_text:
        return custom(hidden, input_mask)
    if cfg.direction == "both":
        return hidden[:, 0]
    last = jnp.maximum(input_mask.sum(axis=1) - 1, 0)
    return jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]


def attention_probabilities(encoder: nnx.Module, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Computes the attention probabilities of a text in each layer, without dropout.

    Args:
      encoder: the module.
      cfg: its configuration.
      hidden: float32 [L, S, D], the inputs of the layers for one text without padding: `encode`
        with `outputs="all"`, without the last output.

    Returns:
      float32 [L, H, S, S], of each token over all tokens; rows sum to 1.
    """
    run = encoder_functions(cfg).attention_probabilities
    if run is None:
        raise InputError(f"model.code={cfg.code}: has no attention to show; use another encoder")
    return run(encoder, cfg, hidden)
