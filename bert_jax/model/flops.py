"""Floating-point operations of a training step: the numerator of utilisation.

Only matrix products that the loss depends on are counted, with two operations for a multiply-add:
predictions at the masked positions, no padding rows of the vocabulary, no recomputation. Look-ups,
normalisation and activations are not counted, as is usual.
"""

from bert_jax.config import Model, Phase
from bert_jax.model import encoder

# The gradients of a product's two inputs are two more products of its size.
_FORWARD_AND_BACKWARD = 3


def phase_step_flops(model: Model, phase: Phase) -> int:
    """Counts the operations of a step of a phase."""
    shape = phase.batch_size, phase.sequence_length, phase.max_predictions_per_seq
    return train_step_flops(model, *shape)


def train_step_flops(model: Model, batch_size: int, sequence_length: int, predictions: int) -> int:
    """Counts the operations of a training step over a whole batch, as `forward_flops` counts."""
    return _FORWARD_AND_BACKWARD * forward_flops(model, batch_size, sequence_length, predictions)


def forward_flops(model: Model, batch_size: int, sequence_length: int, predictions: int) -> int:
    """Counts the operations of a forward pass over a whole batch.

    Args:
      model: the shape.
      batch_size: rows.
      sequence_length: tokens of a row, including padding.
      predictions: masked positions of a row, including unused ones.
    """
    width = model.hidden_size
    prediction = 2 * (width * width + width * model.vocab_size)
    example = 2 * (width * width + 2 * width)
    return (
        batch_size * sequence_length * _token_flops(model, sequence_length)
        + batch_size * predictions * prediction
        + batch_size * example
    )


def _token_flops(model: Model, sequence_length: int) -> int:
    """Counts the operations for one token of a row in a forward pass through all layers."""
    width, count = model.hidden_size, model.num_hidden_layers
    global_layers = encoder.count_global_layers(model)
    half = min(encoder.half_window(model), sequence_length - 1)
    # The windows at both ends of a row lack half (half + 1) keys in all.
    near = 2 * half + 1 - half * (half + 1) / sequence_length
    keys = global_layers * sequence_length + (count - global_layers) * near
    # Query, key, value, output; feed-forward and gate; scores and their product with the values.
    inner = (3 if model.kind == "modern" else 2) * model.intermediate_size
    return round(count * 2 * (4 * width + inner) * width + 4 * keys * width)
