"""The golden PyTorch model's weights and batch under our names."""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import Model
from bert_jax.conformance import golden
from bert_jax.interop import names

Batch = dict[str, jax.Array]

CONFIG = Model(
    **{name: value for name, value in golden.config().items() if name in Model.__dataclass_fields__}
)


def convert(tensors: dict[str, np.ndarray]) -> dict:
    """PyTorch's tensors in our tree."""
    return names.to_ours(tensors, CONFIG, "hf_bert_tiny")[0]


def batch(raw: dict[str, np.ndarray]) -> Batch:
    """PyTorch's batch as data.batches lays it out; every position is a prediction or weighs 0."""
    labels = raw["labels"]
    made = {
        "input_ids": raw["input_ids"],
        "segment_ids": raw["token_type_ids"],
        "input_mask": raw["attention_mask"],
        "masked_lm_positions": np.broadcast_to(np.arange(labels.shape[1]), labels.shape),
        "masked_lm_ids": np.maximum(labels, 0),
        "masked_lm_weights": (labels != -100).astype(np.float32),
        "next_sentence_labels": raw["next_sentence_label"],
        "row_weights": np.ones(len(labels), np.float32),
    }
    return {
        name: jnp.asarray(value, jnp.float32 if "weight" in name else jnp.int32)
        for name, value in made.items()
    }
