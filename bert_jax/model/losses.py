"""The fused pre-training loss as sums and counts, all in float32.

Shape letters: B batch, P predictions, V vocabulary rows, C classes.
"""

import jax
import jax.numpy as jnp
from jax import lax

# {name: float32 [2]}, a sum and the count to divide it by. Added across micro-batches, devices
# and steps; divided once, by those who read them.
Metrics = dict[str, jax.Array]

NAMES = (
    "masked_lm_loss",
    "masked_lm_accuracy",
    "next_sentence_loss",
    "next_sentence_accuracy",
)

# Without next sentences.
MASKED_LM_NAMES = NAMES[:2]

# The reference's guard against a batch without predictions (run_pretraining.py).
MASKED_LM_EPS = 1e-5


def classification(
    logits: jax.Array, labels: jax.Array, weights: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Computes cross-entropy and accuracy.

    Args:
      logits: float32 [..., C].
      labels: int32 [...].
      weights: float32 [...]; 0 leaves an entry out.

    Returns:
      (sum of weighted losses in nats, sum of weights) and (weighted hits, sum of weights).
    """
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    nll = jax.nn.logsumexp(logits, axis=-1) - label_logits
    # Not an argmax, which compilers for CPUs do one element at a time; they differ in ties alone.
    hits = (label_logits >= lax.stop_gradient(logits).max(axis=-1)).astype(jnp.float32)
    count = weights.sum()
    return jnp.stack([(weights * nll).sum(), count]), jnp.stack([(weights * hits).sum(), count])


def pretraining(
    masked_lm: jax.Array, next_sentence: jax.Array, batch: dict[str, jax.Array]
) -> Metrics:
    """Computes losses and accuracies of both tasks (Devlin et al. 2018, section 3.1).

    Args:
      masked_lm: float32 [B, P, V].
      next_sentence: float32 [B, 2].
      batch: as data.batches makes it.
    """
    mlm_loss, mlm_accuracy = classification(
        masked_lm, batch["masked_lm_ids"], batch["masked_lm_weights"]
    )
    nsp_loss, nsp_accuracy = classification(
        next_sentence, batch["next_sentence_labels"], batch["row_weights"]
    )
    return dict(zip(NAMES, (mlm_loss, mlm_accuracy, nsp_loss, nsp_accuracy), strict=True))


def masked_lm(logits: jax.Array, batch: dict[str, jax.Array]) -> Metrics:
    """Computes loss and accuracy of masked pieces alone; see `pretraining`."""
    pairs = classification(logits, batch["masked_lm_ids"], batch["masked_lm_weights"])
    return dict(zip(MASKED_LM_NAMES, pairs, strict=True))
