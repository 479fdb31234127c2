"""Results of other implementations, stored in this package.

Instances and tokens are from google-research/bert (Python 3.11), the model's numbers from PyTorch's
BertForPreTraining (Hugging Face, float32, no dropout), the trajectory from Adam in float64.
"""

import functools
import gzip
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from bert_jax.config import Model
from bert_jax.interop import weights
from bert_jax.text.tokenizer import Case, WordPiece

FOLDER = pathlib.Path(__file__).parent / "files"

# Files that were made from sample_text.txt.
INSTANCES = (
    "instances_sample_text_seq128_dupe1_wwm.jsonl.gz",
    "instances_sample_text_seq128_dupe5.jsonl.gz",
    "instances_sample_text_seq512_dupe5.jsonl.gz",
)


@functools.cache
def vocabulary() -> list[str]:
    """Returns the 30,522 tokens of the released uncased models."""
    text = gzip.decompress((FOLDER / "bert_base_uncased_vocab.txt.gz").read_bytes()).decode()
    return text.split("\n")[:-1]


def tokenizer(case: Case) -> WordPiece:
    """Returns this package's tokenizer with the released vocabulary."""
    return WordPiece(vocabulary(), case)


def tokens() -> list[dict[str, Any]]:
    """Returns rows of `text`, `lower` (ids, uncased), `lower_tokens` and `cased_tokens`."""
    return json.loads((FOLDER / "tokenization_uncased_vocab.json").read_text("utf-8"))


def instances(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Returns the settings and the instances of a file of `INSTANCES`."""
    lines = gzip.decompress((FOLDER / name).read_bytes()).decode().splitlines()
    settings, *rows = map(json.loads, lines)
    return settings, rows


def trajectory() -> dict[str, np.ndarray]:
    """Returns twenty steps of the paper's Adam: init.*, grads.*, params.*, learning_rate."""
    return dict(np.load(FOLDER / "paper_adam_trajectory.npz"))


def pytorch(name: str) -> dict[str, np.ndarray]:
    """Returns arrays of PyTorch's model: `batch`, `outputs`, `grads`, or weights (`model`)."""
    folder = FOLDER / "hf_bert_tiny"
    if name == "model":
        return load_file(folder / "model.safetensors")
    return dict(np.load(folder / f"{name}.npz"))


_FIELDS = json.loads((FOLDER / "hf_bert_tiny" / "config.json").read_text("utf-8"))
CONFIG = Model(**{name: _FIELDS[name] for name in _FIELDS if name in Model.__dataclass_fields__})


def params() -> dict:
    """Returns the weights of PyTorch's model as a parameter tree."""
    return jax.tree.map(jnp.asarray, convert(pytorch("model")))


def convert(tensors: dict[str, np.ndarray]) -> dict:
    """Returns PyTorch's tensors as a parameter tree of this package."""
    return weights.import_tensors(tensors, CONFIG, "hf_bert_tiny")[0]


def batch() -> dict[str, jax.Array]:
    """Returns PyTorch's batch with this package's names; positions without label have weight 0."""
    raw = pytorch("batch")
    labels = raw["labels"]
    arrays = {
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
        for name, value in arrays.items()
    }
