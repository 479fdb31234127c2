"""What others computed, as it lies in this package.

Instances and tokens are google-research/bert's own (Python 3.11), the model's numbers PyTorch's
BertForPreTraining (float32, no dropout), the trajectory the paper's Adam in float64.
"""

import functools
import gzip
import json
import pathlib
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from bert_jax.text.tokenizer import Case, WordPiece

FOLDER = pathlib.Path(__file__).parent / "files"

# Made from sample_text.txt.
INSTANCES = (
    "instances_sample_text_seq128_dupe1_wwm.jsonl.gz",
    "instances_sample_text_seq128_dupe5.jsonl.gz",
    "instances_sample_text_seq512_dupe5.jsonl.gz",
)


@functools.cache
def vocabulary() -> list[str]:
    """The 30,522 pieces of the released uncased models."""
    text = gzip.decompress((FOLDER / "bert_base_uncased_vocab.txt.gz").read_bytes()).decode()
    return text.split("\n")[:-1]


def tokenizer(case: Case) -> WordPiece:
    """Ours, with the released vocabulary."""
    return WordPiece(vocabulary(), case)


def tokens() -> list[dict[str, Any]]:
    """Rows of `text`, `lower` (ids, uncased), `lower_tokens` and `cased_tokens`."""
    return json.loads((FOLDER / "tokenization_uncased_vocab.json").read_text("utf-8"))


def instances(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The settings and the instances of a file of `INSTANCES`."""
    lines = gzip.decompress((FOLDER / name).read_bytes()).decode().splitlines()
    settings, *rows = map(json.loads, lines)
    return settings, rows


def trajectory() -> dict[str, np.ndarray]:
    """Twenty steps of Adam: init.*, grads.*, params.*, learning_rate."""
    return dict(np.load(FOLDER / "paper_adam_trajectory.npz"))


def pytorch(name: str) -> dict[str, np.ndarray]:
    """Of PyTorch's model: `batch`, `outputs` or `grads`; `model` gives its weights."""
    folder = FOLDER / "hf_bert_tiny"
    if name == "model":
        return load_file(folder / "model.safetensors")
    return dict(np.load(folder / f"{name}.npz"))


def config() -> dict[str, Any]:
    """The config.json of PyTorch's model."""
    return json.loads((FOLDER / "hf_bert_tiny" / "config.json").read_text("utf-8"))
