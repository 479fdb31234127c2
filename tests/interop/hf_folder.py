"""The golden PyTorch model as the folder that save_pretrained would have written."""

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

from bert_jax import conformance

GOLDEN = pathlib.Path(conformance.__file__).parent / "files" / "hf_bert_tiny"
PIECES = 1000

TENSORS = load_file(GOLDEN / "model.safetensors")
CONFIG = json.loads((GOLDEN / "config.json").read_text())
VOCAB = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(5, PIECES))]


def write(
    folder: pathlib.Path,
    tensors: dict[str, np.ndarray] = TENSORS,
    config: dict | None = None,
    vocab: list[str] = VOCAB,
) -> pathlib.Path:
    """config.json with some fields changed, the weights, and vocab.txt."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
    (folder / "vocab.txt").write_text("\n".join(vocab) + "\n")
    save_file(
        {name: np.ascontiguousarray(t) for name, t in tensors.items()},
        folder / "model.safetensors",
    )
    return folder
