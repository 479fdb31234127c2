"""How many floating-point operations a training step needs: the numerator of utilisation.

Matrix products alone are counted, two operations a multiply-add, and only those that the loss
depends on: predictions at the masked positions, no padding rows of the vocabulary, no
recomputation. Look-ups, normalisation and activations are left out, as is usual.
"""

from bert_jax.config import Model
from bert_jax.model.kinds import KINDS

# The gradients of a product's two inputs are two more products of its size.
_FORWARD_AND_BACKWARD = 3


def train_step_flops(
    model: Model, batch_size: int, sequence_length: int, max_predictions_per_seq: int
) -> int:
    """Counts the operations of a training step over a whole batch, as `forward_flops` counts."""
    return _FORWARD_AND_BACKWARD * forward_flops(
        model, batch_size, sequence_length, max_predictions_per_seq
    )


def forward_flops(
    model: Model, batch_size: int, sequence_length: int, max_predictions_per_seq: int
) -> int:
    """Counts the operations of a forward pass over a whole batch.

    Args:
      model: the shape.
      batch_size: rows.
      sequence_length: of each row, padding included.
      max_predictions_per_seq: masked positions of each row, unused ones included.
    """
    width = model.hidden_size
    prediction = 2 * (width * width + width * model.vocab_size)
    row = 2 * (width * width + 2 * width)
    return (
        batch_size * sequence_length * KINDS[model.kind].token_flops(model, sequence_length)
        + batch_size * max_predictions_per_seq * prediction
        + batch_size * row
    )
