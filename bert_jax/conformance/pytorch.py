"""The golden PyTorch model's weights and batch under our names."""

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import Model
from bert_jax.conformance import golden

Batch = dict[str, jax.Array]

CONFIG = Model(
    **{name: value for name, value in golden.config().items() if name in Model.__dataclass_fields__}
)

_LAYER = {
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "attention_output": "attention.output.dense",
    "attention_layer_norm": "attention.output.LayerNorm",
    "intermediate": "intermediate.dense",
    "output": "output.dense",
    "output_layer_norm": "output.LayerNorm",
}


def convert(tensors: dict[str, np.ndarray]) -> dict:
    """PyTorch's names and [out, in] kernels to our nested dict."""

    def dense(name):
        return {"kernel": tensors[f"{name}.weight"].T, "bias": tensors[f"{name}.bias"]}

    def norm(name):
        return {"scale": tensors[f"{name}.weight"], "bias": tensors[f"{name}.bias"]}

    def layer(i):
        named = {k: f"bert.encoder.layer.{i}.{v}" for k, v in _LAYER.items()}
        return {k: norm(v) if k.endswith("norm") else dense(v) for k, v in named.items()}

    layers = [layer(i) for i in range(CONFIG.num_hidden_layers)]
    stacked = {
        name: {leaf: np.stack([each[name][leaf] for each in layers]) for leaf in layers[0][name]}
        for name in _LAYER
    }
    rows = -(-CONFIG.vocab_size // 1024) * 1024 - CONFIG.vocab_size

    def table(name):
        return {"embedding": tensors[f"bert.embeddings.{name}.weight"]}

    word = np.pad(table("word_embeddings")["embedding"], ((0, rows), (0, 0)))
    return {
        "encoder": {
            "embeddings": {
                "word": {"embedding": word},
                "position": table("position_embeddings"),
                "segment": table("token_type_embeddings"),
                "layer_norm": norm("bert.embeddings.LayerNorm"),
            },
            "layers": stacked,
        },
        "pooler": dense("bert.pooler.dense"),
        "masked_lm": {
            "transform": dense("cls.predictions.transform.dense"),
            "layer_norm": norm("cls.predictions.transform.LayerNorm"),
            "output_bias": np.pad(tensors["cls.predictions.bias"], (0, rows)),
        },
        "next_sentence": dense("cls.seq_relationship"),
    }


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
