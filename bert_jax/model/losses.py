"""The fused pre-training loss as sums and counts, all in float32.

Shape letters: B batch, P predictions, V vocabulary rows, C classes.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# {name: float32 [2]}, a sum and a count. Both are summed over micro-batches, devices and steps; the
# reader divides them once.
Metrics = dict[str, jax.Array]

# Tasks that predict tokens or classify pairs: the prefix of their metrics' names, and a label.
TOKENS = {
    "masked_lm": "masked LM",
    "next_piece": "next piece",
}
PAIRS = {"next_sentence": "next sentence", "sentence_order": "sentence order"}
# The tasks of each `data.objective`.
TASKS = {
    "mlm_nsp": ("masked_lm", "next_sentence"),
    "mlm_sop": ("masked_lm", "sentence_order"),
    "mlm": ("masked_lm",),
    "causal": ("next_piece",),
}

# The reference's guard against a batch without predictions (run_pretraining.py).
MASKED_LM_EPS = 1e-5

# On CPUs XLA computes an argmax one element at a time, so hits are found with a maximum. Up to this
# number of classes ties are resolved: the first class wins. More classes are tokens, without ties.
_MAX_TIED_CLASSES = 64


def classification(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes cross-entropy and accuracy. With few classes the first of equal scores wins.

    Args:
      logits: float32 [..., C].
      labels: int32 [...].
      weights: float32 [...]; 0 excludes an entry.

    Returns:
      (sum of weighted losses in nats, sum of weights) and (weighted hits, sum of weights).
    """
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - label_logits
    constant = lax.stop_gradient(logits)
    hits = label_logits >= constant.max(axis=-1)
    if logits.shape[-1] <= _MAX_TIED_CLASSES:
        is_before = jnp.arange(logits.shape[-1]) < labels[..., None]
        hits &= label_logits > jnp.where(is_before, constant, -jnp.inf).max(axis=-1)
    hits = hits.astype(jnp.float32)
    count = weights.sum()
    return jnp.stack([(weights * nll).sum(), count]), jnp.stack([(weights * hits).sum(), count])


def names(objective: str) -> tuple[str, ...]:
    """Returns the names of an objective's metrics: loss and accuracy of each task."""
    return tuple(f"{task}_{value}" for task in TASKS[objective] for value in ("loss", "accuracy"))


def find_task(line: Mapping[str, Any], tasks: Mapping[str, str]) -> str:
    """Returns the one of `tasks` whose loss a line of metrics.jsonl has; "" if there is none."""
    return next((task for task in tasks if f"{task}_loss" in line), "")


def is_known(name: str) -> bool:
    """Returns whether a metric belongs to `TOKENS` or `PAIRS`, not to a custom objective."""
    return name.startswith(tuple(f"{task}_" for task in (*TOKENS, *PAIRS)))


def token_metrics(line: Mapping[str, Any]) -> tuple[float, float]:
    """Returns loss and accuracy of the predicted tokens from a line of metrics.jsonl."""
    task = find_task(line, TOKENS)
    return line[f"{task}_loss"], line[f"{task}_accuracy"]


def pretraining(
    tokens: jax.Array, pairs: jax.Array, batch: dict[str, jax.Array], objective: str = "mlm_nsp"
) -> Metrics:
    """Computes losses and accuracies of an objective's tasks (Devlin et al. 2018, section 3.1).

    Args:
      tokens: logits of tokens, float32 [B, P, V].
      pairs: logits of pairs, float32 [B, 2].
      batch: a batch of data.batches.
      objective: `data.objective`.
    """
    sums = classification(tokens, batch["masked_lm_ids"], batch["masked_lm_weights"])
    return add_pair_metrics(sums, pairs, batch, objective)


def add_pair_metrics(
    sums: tuple[jax.Array, ...],
    pairs: jax.Array,
    batch: dict[str, jax.Array],
    objective: str,
) -> Metrics:
    """Returns the metrics of an objective from those of its tokens and the logits of pairs."""
    if len(TASKS[objective]) > 1:
        sums += classification(pairs, batch["next_sentence_labels"], batch["row_weights"])
    return dict(zip(names(objective), sums, strict=True))
