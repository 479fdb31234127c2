"""What differs between kinds of encoders: `model.kind` is a key of one table."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import jax
from flax import nnx

from bert_jax.config import Model
from bert_jax.model import encoder as bert
from bert_jax.model import layers, modern
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import Loop


class Kind(NamedTuple):
    """One kind of encoder.

    Attributes:
      encoder: a module with its parameters, `embeddings` and stacked `layers` among them; made
        from a `Model`.
      encode, attention_probabilities: see the functions of these names.
      masked_lm: a module with `transform`, `layer_norm` and `output_bias`.
      token_flops: operations of a forward pass through all layers, of a `Model` and the length of
        a row, a token.
    """

    encoder: Callable[..., nnx.Module]
    encode: Callable[..., jax.Array]
    attention_probabilities: Callable[..., jax.Array]
    masked_lm: Callable[..., nnx.Module]
    token_flops: Callable[[Model, int], int]


KINDS = {
    "bert": Kind(
        bert.Encoder, bert.encode, bert.attention_probabilities, bert.MaskedLM, bert.token_flops
    ),
    "modern": Kind(
        modern.Encoder,
        modern.encode,
        modern.attention_probabilities,
        modern.MaskedLM,
        modern.token_flops,
    ),
}


def make_encoder(cfg: Model, *, rngs: nnx.Rngs) -> nnx.Module:
    """Returns the parameters of an encoder, freshly drawn."""
    return KINDS[cfg.kind].encoder(cfg, rngs=rngs)


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
    run = KINDS[cfg.kind].encode
    return run(encoder, cfg, input_ids, segment_ids, input_mask, noise, loop, outputs)


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
    return KINDS[cfg.kind].attention_probabilities(encoder, cfg, hidden)
