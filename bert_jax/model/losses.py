"""The fused pre-training loss as sums and counts, all in float32.

Shape letters: B batch, P predictions, V vocabulary rows, C classes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# {name: float32 [2]}, a sum and the count to divide it by. Added across micro-batches, devices
# and steps; divided once, by those who read them.
Metrics = dict[str, jax.Array]

# What is learned of pieces and of pairs, in words, by what the names of its metrics begin with.
PIECES = {
    "masked_lm": "masked LM",
    "next_piece": "next piece",
}
PAIRS = {"next_sentence": "next sentence", "sentence_order": "sentence order"}
# By `data.objective`.
LEARNED = {
    "mlm_nsp": ("masked_lm", "next_sentence"),
    "mlm_sop": ("masked_lm", "sentence_order"),
    "mlm": ("masked_lm",),
    "causal": ("next_piece",),
}

# The reference's guard against a batch without predictions (run_pretraining.py).
MASKED_LM_EPS = 1e-5

# Compilers for CPUs do an argmax one element at a time, so a hit is known by a maximum. Of so few
# classes several may share it, and the first is the answer; of more, which are pieces, none do.
_FEW = 64


def classification(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes cross-entropy and accuracy; of few classes the first of equal scores is the answer.

    Args:
      logits: float32 [..., C].
      labels: int32 [...].
      weights: float32 [...]; 0 leaves an entry out.

    Returns:
      (sum of weighted losses in nats, sum of weights) and (weighted hits, sum of weights).
    """
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - label_logits
    fixed = lax.stop_gradient(logits)
    hits = label_logits >= fixed.max(axis=-1)
    if logits.shape[-1] <= _FEW:
        is_before = jnp.arange(logits.shape[-1]) < labels[..., None]
        hits &= label_logits > jnp.where(is_before, fixed, -jnp.inf).max(axis=-1)
    hits = hits.astype(jnp.float32)
    count = weights.sum()
    return jnp.stack([(weights * nll).sum(), count]), jnp.stack([(weights * hits).sum(), count])


def names(objective: str) -> tuple[str, ...]:
    """Returns the names of an objective's metrics: loss and accuracy of what is learned."""
    return tuple(f"{task}_{what}" for task in LEARNED[objective] for what in ("loss", "accuracy"))


def learned(line: Mapping[str, Any], tasks: Mapping[str, str]) -> str:
    """Returns which of `PIECES` or `PAIRS` a line of metrics.jsonl has a loss of; "" if none."""
    return next((task for task in tasks if f"{task}_loss" in line), "")


def is_known(name: str) -> bool:
    """Returns whether a metric is of `PIECES` or `PAIRS`, and of no experiment's own."""
    return name.startswith(tuple(f"{task}_" for task in (*PIECES, *PAIRS)))


def of_pieces(line: Mapping[str, Any]) -> tuple[float, float]:
    """Returns loss and accuracy of pieces that a line of metrics.jsonl has."""
    task = learned(line, PIECES)
    return line[f"{task}_loss"], line[f"{task}_accuracy"]


def pretraining(
    pieces: jax.Array, pairs: jax.Array, batch: dict[str, jax.Array], objective: str = "mlm_nsp"
) -> Metrics:
    """Computes losses and accuracies of what is learned (Devlin et al. 2018, section 3.1).

    Args:
      pieces: float32 [B, P, V].
      pairs: float32 [B, 2].
      batch: as data.batches makes it.
      objective: `data.objective`.
    """
    sums = classification(pieces, batch["masked_lm_ids"], batch["masked_lm_weights"])
    if len(LEARNED[objective]) > 1:
        sums += classification(pairs, batch["next_sentence_labels"], batch["row_weights"])
    return dict(zip(names(objective), sums, strict=True))
