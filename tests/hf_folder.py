"""The golden PyTorch model as the folder that save_pretrained would have written."""

import json
import pathlib

import numpy as np
from safetensors.numpy import load_file, save_file

from bert_jax.checkpoints.base import Base
from bert_jax.interop import weights
from bert_jax.tools import conformance

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


def as_sentence_transformers(
    folder: pathlib.Path,
    pooling: dict | None = None,
    modules: tuple[str, ...] = ("Transformer", "Pooling"),
    kind: str = "sentence_transformers.models",
    **files: dict,
) -> pathlib.Path:
    """The same folder with what sentence-transformers reads next to it; files by their stems."""
    paths = ["" if name == "Transformer" else f"{i}_{name}" for i, name in enumerate(modules)]
    listed = [{"path": p, "type": f"{kind}.{n}"} for n, p in zip(modules, paths, strict=True)]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {}))
    for stem, fields in files.items():
        (folder / f"{stem}.json").write_text(json.dumps(fields))
    return folder


def cut_in_shards(folder: pathlib.Path, listed: dict[str, str] | None = None) -> None:
    """The folder's model.safetensors in three files, as save_pretrained cuts it.

    The index says what `listed` says, too.
    """
    tensors = load_file(folder / "model.safetensors")
    order = sorted(tensors)
    file = "model-{:05}-of-{:05}.safetensors".format
    map_ = {name: file(i * 3 // len(order) + 1, 3) for i, name in enumerate(order)}
    for shard in set(map_.values()):
        held = {name: tensors[name] for name in order if map_[name] == shard}
        save_file(held, folder / shard, {"format": "pt"})
    index = {"metadata": {"total_size": 0}, "weight_map": map_ | (listed or {})}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def names_of(base: Base) -> dict[str, np.ndarray]:
    """The tensors of a base by the names of this folder's."""
    return weights.export_tensors(base.params, base.model, "BertForPreTraining")
