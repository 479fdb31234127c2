"""What a task adds to an encoder: one layer, over [CLS] or over every piece.

Shape letters: B rows, S sequence, D width, O outputs.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from bert_jax.config import Model
from bert_jax.model import layers
from bert_jax.model.encoder import Encoder, Loop, encode, initializer

Reads = Literal["pooled", "tokens"]


class Tuned(nnx.Module):
    """An encoder with the head of a task. The pooler is there only if the head reads it."""

    def __init__(self, cfg: Model, reads: Reads, outputs: int, *, rngs: nnx.Rngs):
        self.encoder = Encoder(cfg, rngs=rngs)
        if reads == "pooled":
            width = cfg.hidden_size
            self.pooler = layers.Dense(width, width, initializer(cfg), rngs=rngs)
        self.head = layers.Dense(cfg.hidden_size, outputs, initializer(cfg), rngs=rngs)


def init_params(cfg: Model, reads: Reads, outputs: int, key: jax.Array) -> dict[str, Any]:
    """Fresh parameters as nested dicts of float32 arrays."""
    module = Tuned(cfg, reads, outputs, rngs=nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def task_logits(
    cfg: Model,
    reads: Reads,
    outputs: int,
    params: dict[str, Any],
    batch: dict[str, jax.Array],
    noise: layers.Noise | None,
    head_dropout_prob: float,
    loop: Loop,
) -> jax.Array:
    """Scores: float32 [B, O] from what [CLS] comes to, or [B, S, O] from every piece.

    Args:
      cfg: the encoder's shape.
      reads: what the head reads.
      outputs: how many scores it gives.
      params: as `init_params` gives them.
      batch: `input_ids`, `segment_ids` and `input_mask`, int32 [B, S].
      noise: of dropout; None drops nothing.
      head_dropout_prob: of what the head reads.
      loop: how the layers are run.
    """
    graph, state = nnx.split(
        nnx.eval_shape(lambda: Tuned(cfg, reads, outputs, rngs=nnx.Rngs(params=jax.random.key(0)))),
        nnx.Param,
    )
    nnx.replace_by_pure_dict(state, params)
    tuned = nnx.merge(graph, state)
    ids = (batch[name] for name in ("input_ids", "segment_ids", "input_mask"))
    hidden = encode(tuned.encoder, cfg, *ids, noise, loop)
    if reads == "pooled":
        hidden = jnp.tanh(tuned.pooler(hidden[:, 0])).astype(hidden.dtype)
    # The layers have the numbers before, the embeddings the next.
    site = None if noise is None else noise.at(cfg.num_hidden_layers + 1)
    return tuned.head(layers.dropout(hidden, site, head_dropout_prob).astype(hidden.dtype))
