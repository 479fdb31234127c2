"""Hugging Face's names and shapes of BERT's tensors, and ours. The one place that knows both.

They keep each layer's tensors apart and kernels as [out, in]; ours are stacked along a first
dimension L and lie as [in, out]. Rows of our vocabulary are padded (model.encoder).
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np

from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.model.encoder import padded_vocab_size

Part = Literal["encoder", "pooler", "masked_lm", "next_sentence"]

# What each of their classes holds.
PARTS: dict[str, tuple[Part, ...]] = {
    "BertForPreTraining": ("encoder", "pooler", "masked_lm", "next_sentence"),
    "BertForMaskedLM": ("encoder", "masked_lm"),
    "BertModel": ("encoder", "pooler"),
}
WORD_EMBEDDINGS = "bert.embeddings.word_embeddings.weight"
OUTPUT_BIAS = "cls.predictions.bias"
# Copies that a file may hold of what stands elsewhere in it.
TIED = {
    "cls.predictions.decoder.weight": WORD_EMBEDDINGS,
    "cls.predictions.decoder.bias": OUTPUT_BIAS,
}
# Numbers 0, 1, 2, ... and zeros that older versions saved with the weights.
IGNORED = ("bert.embeddings.position_ids", "bert.embeddings.token_type_ids")

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


@dataclasses.dataclass(frozen=True)
class Tensor:
    """One tensor of theirs.

    Attributes:
      name: theirs, with the prefix `bert.`.
      shape: theirs.
      path: of the leaf of our tree that holds it.
      part: what it belongs to.
      layer: its place along the leaf's first dimension; None if the leaf is not stacked.
      is_kernel: whether ours lies transposed.
      is_vocabulary: whether ours has rows of padding.
    """

    name: str
    shape: tuple[int, ...]
    path: tuple[str, ...]
    part: Part
    layer: int | None = None
    is_kernel: bool = False
    is_vocabulary: bool = False


@dataclasses.dataclass(frozen=True)
class Naming:
    """How others call the same tensors.

    Attributes:
      tensors: all of a model, the embeddings first.
      word_embeddings: the name of the table that has a row a piece.
      output_bias: the name of the other one.
      config: the file that says the sizes.
    """

    tensors: Callable[[Model], Iterator[Tensor]]
    word_embeddings: str
    output_bias: str
    config: str


def tensors(cfg: Model) -> Iterator[Tensor]:
    """All of BertForPreTraining, but for copies."""
    width, inner = cfg.hidden_size, cfg.intermediate_size
    above = ("encoder", "embeddings")
    rows = {"position": cfg.max_position_embeddings, "segment": cfg.type_vocab_size}
    for ours, theirs in (("position", "position"), ("segment", "token_type")):
        name = f"bert.embeddings.{theirs}_embeddings.weight"
        yield Tensor(name, (rows[ours], width), (*above, ours, "embedding"), "encoder")
    word = (*above, "word", "embedding")
    shape = (cfg.vocab_size, width)
    yield Tensor(WORD_EMBEDDINGS, shape, word, "encoder", is_vocabulary=True)
    yield from _norm("bert.embeddings.LayerNorm", (*above, "layer_norm"), "encoder", width)
    sizes = {"intermediate": (inner, width), "output": (width, inner)}
    for layer in range(cfg.num_hidden_layers):
        for ours, theirs in _LAYER.items():
            name, path = f"bert.encoder.layer.{layer}.{theirs}", ("encoder", "layers", ours)
            if ours.endswith("norm"):
                yield from _norm(name, path, "encoder", width, layer)
            else:
                out, into = sizes.get(ours, (width, width))
                yield from _dense(name, path, "encoder", out, into, layer)
    yield from _dense("bert.pooler.dense", ("pooler",), "pooler", width, width)
    transform = "cls.predictions.transform"
    yield from _dense(f"{transform}.dense", ("masked_lm", "transform"), "masked_lm", width, width)
    yield from _norm(f"{transform}.LayerNorm", ("masked_lm", "layer_norm"), "masked_lm", width)
    bias = ("masked_lm", "output_bias")
    yield Tensor(OUTPUT_BIAS, (cfg.vocab_size,), bias, "masked_lm", is_vocabulary=True)
    yield from _dense("cls.seq_relationship", ("next_sentence",), "next_sentence", 2, width)


def _dense(
    name: str, path: tuple[str, ...], part: Part, out: int, into: int, layer: int | None = None
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (out, into), (*path, "kernel"), part, layer, is_kernel=True)
    yield Tensor(f"{name}.bias", (out,), (*path, "bias"), part, layer)


def _norm(
    name: str, path: tuple[str, ...], part: Part, width: int, layer: int | None = None
) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (width,), (*path, "scale"), part, layer)
    yield Tensor(f"{name}.bias", (width,), (*path, "bias"), part, layer)


def canonical(name: str) -> str:
    """A name as newer versions write it, with its prefix."""
    if name.startswith(("embeddings.", "encoder.", "pooler.")):
        name = f"bert.{name}"
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(f"LayerNorm{old}"):
            name = name.removesuffix(old) + new
    return name


HUGGING_FACE = Naming(tensors, WORD_EMBEDDINGS, OUTPUT_BIAS, "config.json")


def to_ours(
    theirs: Mapping[str, np.ndarray], cfg: Model, where: str, naming: Naming = HUGGING_FACE
) -> tuple[dict[str, Any], tuple[Part, ...]]:
    """Our tree, of the parts that are there, and the names of the parts that are not.

    Args:
      theirs: float32 by canonical names, without copies.
      cfg: the shape; its vocabulary has no padding, and rows of theirs beyond it are left out.
      where: the file, for complaints.
      naming: whose names they are.

    Raises:
      InputError: a tensor is missing, too many, of another shape, or not finite.
    """
    wanted: dict[str, Tensor] = {}
    for tensor in naming.tensors(cfg):
        if tensor.part == "encoder":  # at once: the configuration may name any number of layers
            _require_shape(tensor, theirs, where, naming.config)
        wanted[tensor.name] = tensor
    for name in theirs:
        if name not in wanted:
            raise InputError(f"{where}: tensor {name!r} is none of BERT's pre-training model")
    there = {"encoder", *(wanted[name].part for name in theirs)}
    found = [tensor for tensor in wanted.values() if tensor.part in there]
    for tensor in found:
        _require_shape(tensor, theirs, where, naming.config)
    params: dict[str, Any] = {}
    for tensor in found:
        value = theirs[tensor.name]
        if not np.isfinite(value).all():
            raise InputError(
                f"{where}: tensor {tensor.name!r} holds values that are no numbers; take another "
                "checkpoint"
            )
        if tensor.is_vocabulary:
            value = value[: cfg.vocab_size]
        _leaf(params, tensor, cfg)[...] = value.T if tensor.is_kernel else value
    missing = tuple(part for part in PARTS["BertForPreTraining"] if part not in there)
    return params, missing


def _require_shape(
    tensor: Tensor, theirs: Mapping[str, np.ndarray], where: str, config: str
) -> None:
    if tensor.name not in theirs:
        raise InputError(f"{where}: tensor {tensor.name!r} of {list(tensor.shape)} is missing")
    shape = theirs[tensor.name].shape
    if tensor.is_vocabulary and len(shape) == len(tensor.shape):
        shape = (min(shape[0], tensor.shape[0]), *shape[1:])
    if shape != tensor.shape:
        raise InputError(
            f"{where}: tensor {tensor.name!r} has the shape {list(theirs[tensor.name].shape)}, "
            f"{config} and the vocabulary say {list(tensor.shape)}"
        )


def _leaf(params: dict[str, Any], tensor: Tensor, cfg: Model) -> np.ndarray:
    """The place of a tensor in our tree, made when it is first asked for."""
    *above, name = tensor.path
    node = params
    for key in above:
        node = node.setdefault(key, {})
    shape = tensor.shape[::-1] if tensor.is_kernel else tensor.shape
    if tensor.is_vocabulary:
        shape = (padded_vocab_size(cfg), *shape[1:])
    if tensor.layer is not None:
        shape = (cfg.num_hidden_layers, *shape)
    if name not in node:
        node[name] = np.zeros(shape, np.float32)
    leaf = node[name] if tensor.layer is None else node[name][tensor.layer]
    return leaf[: cfg.vocab_size] if tensor.is_vocabulary else leaf


def to_theirs(params: Mapping[str, Any], cfg: Model, architecture: str) -> dict[str, np.ndarray]:
    """Their tensors, float32, as the class `architecture` names them; no copies, no padding."""
    held = (tensor for tensor in tensors(cfg) if tensor.part in PARTS[architecture])
    found = values(params, cfg, held)
    if architecture == "BertModel":
        return {name.removeprefix("bert."): value for name, value in found.items()}
    return found


def values(
    params: Mapping[str, Any], cfg: Model, wanted: Iterable[Tensor]
) -> dict[str, np.ndarray]:
    """Arrays of our tree, or of one like it, by the names and in the shapes of `wanted`."""
    found = {}
    for tensor in wanted:
        value: Any = params
        for key in tensor.path:
            value = value[key]
        value = np.asarray(value)
        if tensor.layer is not None:
            value = value[tensor.layer]
        if tensor.is_vocabulary:
            value = value[: cfg.vocab_size]
        found[tensor.name] = value.T if tensor.is_kernel else value
    return found
