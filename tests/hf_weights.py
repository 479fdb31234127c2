"""The golden PyTorch model's weights under our names."""

import pathlib

import numpy as np

from bert_jax.config import Model

FOLDER = pathlib.Path(__file__).parent / "data" / "hf_bert_tiny"

CONFIG = Model(
    vocab_size=1000,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=256,
    max_position_embeddings=128,
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


def convert(tensors: dict[str, np.ndarray], cfg: Model = CONFIG) -> dict:
    """PyTorch's names and [out, in] kernels to our nested dict."""

    def dense(name):
        return {"kernel": tensors[f"{name}.weight"].T, "bias": tensors[f"{name}.bias"]}

    def norm(name):
        return {"scale": tensors[f"{name}.weight"], "bias": tensors[f"{name}.bias"]}

    def layer(i):
        named = {k: f"bert.encoder.layer.{i}.{v}" for k, v in _LAYER.items()}
        return {k: norm(v) if k.endswith("norm") else dense(v) for k, v in named.items()}

    layers = [layer(i) for i in range(cfg.num_hidden_layers)]
    stacked = {
        name: {leaf: np.stack([each[name][leaf] for each in layers]) for leaf in layers[0][name]}
        for name in _LAYER
    }
    rows = -(-cfg.vocab_size // 1024) * 1024 - cfg.vocab_size

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
