"""Tensors under others' names as our tree and back, and as a base.

They keep each layer's tensors apart and kernels as [out, in], in ModernBERT some of them in one;
ours are stacked along a first dimension L and lie as [in, out]. Rows of our vocabulary are padded
(model.encoder).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import names
from bert_jax.interop.names import Naming, Part, Say, Tensor
from bert_jax.model import heads
from bert_jax.model.encoder import padded_vocab_size
from bert_jax.text.tokenizer import Tokenizer

# Others pad the vocabulary's tables to a multiple of one of these.
_MULTIPLES = (8, 64, 128, 256, 512, 1024)
_FRESH_SEED = 0


def to_ours(
    theirs: Mapping[str, np.ndarray], cfg: Model, where: str, naming: Naming | None = None
) -> tuple[dict[str, Any], tuple[Part, ...]]:
    """Returns our tree of the parts that are there, and the names of the parts that are not.

    Args:
      theirs: float32 by canonical names, without copies.
      cfg: the shape; its vocabulary has no padding, and rows of theirs beyond it are left out.
      where: the file, for errors.
      naming: whose names they are; None: Hugging Face's.
    """
    naming = naming or names.HUGGING_FACE[names.family(cfg)]
    wanted: dict[str, list[Tensor]] = {}
    for tensor in naming.tensors(cfg):
        if tensor.part == "encoder":  # at once: the configuration may name any number of layers
            _require_shape(tensor, theirs, where, naming.config)
        wanted.setdefault(tensor.name, []).append(tensor)
    for name in theirs:
        if name not in wanted:
            raise InputError(f"{where}: tensor {name!r} is none of {naming.model}")
    there = {"encoder", *(wanted[name][0].part for name in theirs)}
    held = [tensor for shares in wanted.values() for tensor in shares if tensor.part in there]
    for tensor in held:
        _require_shape(tensor, theirs, where, naming.config)
    params: dict[str, Any] = {}
    for tensor in held:
        value = theirs[tensor.name]
        if not np.isfinite(value).all():
            raise InputError(
                f"{where}: tensor {tensor.name!r} holds values that are no numbers; take another "
                "checkpoint"
            )
        if tensor.is_vocabulary:
            value = value[: cfg.vocab_size]
        number, count = tensor.share
        value = np.split(value, count)[number]
        _leaf(params, tensor, cfg)[...] = value.T if tensor.is_kernel else value
    if cfg.kind == "modern":  # of a single layer they have none
        unused = {"scale": np.ones((cfg.num_hidden_layers, cfg.hidden_size), np.float32)}
        params["encoder"]["layers"].setdefault("attention_layer_norm", unused)
    missing = tuple(part for part in names.PARTS["BertForPreTraining"] if part not in there)
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
    """Returns the place of a tensor in our tree, made at its first use."""
    *above, name = tensor.path
    node = params
    for key in above:
        node = node.setdefault(key, {})
    shape = (tensor.shape[0] // tensor.share[1], *tensor.shape[1:])
    shape = shape[::-1] if tensor.is_kernel else shape
    if tensor.is_vocabulary:
        shape = (padded_vocab_size(cfg), *shape[1:])
    if tensor.layer is not None:
        shape = (cfg.num_hidden_layers, *shape)
    if name not in node:
        # A norm that theirs do not have leaves what it is given as it is.
        node[name] = np.full(shape, name == "scale", np.float32)
    leaf = node[name] if tensor.layer is None else node[name][tensor.layer]
    return leaf[: cfg.vocab_size] if tensor.is_vocabulary else leaf


def to_theirs(
    params: Mapping[str, Any], cfg: Model, architecture: str, first: int | None = None
) -> dict[str, np.ndarray]:
    """Returns their tensors, float32, as the class `architecture` names them, without padding.

    A RoBERTa's positions begin in the row `first` of their table; None: as ours do.
    """
    parts, head = names.HEADS.get(architecture) or (names.PARTS[architecture], "")
    naming, theirs = names.HUGGING_FACE[names.family(cfg)], dict[str, np.ndarray]()
    prefix = "" if head or "masked_lm" in parts else naming.prefix  # left out
    for tensor in naming.tensors(cfg):
        # Below the head of a task masked LM has no output.
        is_output = tensor.is_vocabulary and tensor.part == "masked_lm"
        if tensor.part not in parts or (head and is_output):
            continue
        value: Any = params
        for key in tensor.path:
            value = value[key]
        value = np.asarray(value)
        if tensor.layer is not None:
            value = value[tensor.layer]
        if tensor.is_vocabulary:
            value = value[: cfg.vocab_size]
        if first is not None and cfg.position_offset and "position" in tensor.path:
            more = first - cfg.position_offset  # of the rows before, which nothing reads
            value = np.pad(value, ((max(more, 0), 0), (0, 0)))[max(-more, 0) :]
        name = tensor.name.removeprefix(prefix)
        value = value.T if tensor.is_kernel else value
        theirs[name] = np.concatenate([theirs[name], value]) if tensor.share[0] else value
    if head == names.ROBERTA_HEAD:
        theirs = {key.replace(*names.ROBERTA_POOLER): theirs[key] for key in theirs}
    if head:
        ours = jax.device_get(params["head"])
        theirs |= {f"{head}.weight": ours["kernel"].T, f"{head}.bias": ours["bias"]}
    return theirs


def without_head(
    tensors: Mapping[str, np.ndarray], cfg: Model, architecture: str
) -> dict[str, np.ndarray]:
    """Returns what one of their classes for tasks has below its head, under pre-training's names.

    ModernBERT's masked LM has no output there: a bias of zeros takes its place.
    """
    parts, name = names.HEADS[architecture]
    below = {key: tensors[key] for key in tensors if not key.startswith(f"{name}.")}
    if name == names.ROBERTA_HEAD:
        theirs, ours = reversed(names.ROBERTA_POOLER)
        below = {
            ours + key.removeprefix(theirs) if key.startswith(theirs) else key: below[key]
            for key in below
            if not key.startswith(ours)  # a pooler that their head does not read
        }
    if "masked_lm" in parts:
        rows = len(below.get(names.MODERN_WORD_EMBEDDINGS, ()))
        below[names.MODERN_OUTPUT_BIAS] = np.zeros(rows, np.float32)
    return below


def thin_to_theirs(thin: Mapping[str, Any], cfg: Model) -> dict[str, np.ndarray]:
    """Returns thin matrices next to kernels as PEFT names them next to theirs, lora_A and lora_B.

    Of each kernel, by its name, `thin` has `down`, float32 [L, inputs, rank], and `up`, [L, rank,
    outputs].

    Returns:
      float32 [n rank, inputs] and [outputs, n rank], n being how many of these kernels lie in the
      tensor: each has ranks of its own there, which add nothing to the rows of the others.
    """
    theirs: dict[str, np.ndarray] = {}
    for tensor in names.HUGGING_FACE[names.family(cfg)].tensors(cfg):
        if tensor.layer is None or not tensor.is_kernel or tensor.path[-2] not in thin:
            continue
        of = thin[tensor.path[-2]]
        down, up = (np.asarray(of[name][tensor.layer]).T for name in ("down", "up"))
        number, count = tensor.share
        rows = np.zeros((count, *up.shape), np.float32)
        rows[number] = up
        module = tensor.name.removesuffix(".weight")
        for name, value, axis in (
            ("lora_A", down, 0),
            ("lora_B", rows.reshape(tensor.shape[0], -1), 1),
        ):
            name = f"{module}.{name}.weight"
            held = [theirs[name]] if name in theirs else []
            theirs[name] = np.concatenate([*held, value], axis)
    return theirs


def fitted(
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    stated: Model,
    tokenizer: Tokenizer,
    file: epath.Path,
    source: str,
    say: Say,
) -> Base:
    """Fits tensors of others to a base: rows of padding go, and parts that are missing are fresh.

    Args:
      tensors: float32 by the names of `naming`, without copies.
      stated: their shape as the configuration next to them has it, padding included.
      source: in words, where they come from.
      say: is given rows left out and parts freshly initialised.
    """
    cfg = _without_padding(stated, tokenizer.size, tensors, naming, file, say)
    params, missing = to_ours(tensors, cfg, str(file), naming)
    if missing:
        # The values of a seed, so that the same source makes the same base.
        key = jax.random.key(_FRESH_SEED, impl="threefry2x32")
        fresh = jax.device_get(heads.init_params(cfg, key))
        for part in missing:
            params[part] = fresh[part]
            held = ", ".join(f"{part}/{path}" for path in base_lib.flat(params[part]))
            say(f"not in {file.name}, freshly initialised: {held}")
    return Base(cfg, params, tokenizer, source, missing)


def _without_padding(
    stated: Model,
    size: int,
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    file: epath.Path,
    say: Say,
) -> Model:
    """Returns the model with as many pieces as the vocabulary has; the rows beyond are padding."""
    name, rows = naming.word_embeddings, stated.vocab_size
    for table in (name, naming.output_bias):
        if table in tensors and tensors[table].shape[:1] != (rows,):
            raise InputError(
                f"{file}: tensor {table!r} has the shape {list(tensors[table].shape)}, "
                f"{naming.config} says vocab_size={rows}"
            )
    if rows < size:
        raise InputError(
            f"{file}: tensor {name!r} has {rows} rows, the vocabulary next to it "
            f"has {size} pieces; put the vocabulary there that belongs to these weights"
        )
    if rows != size:
        is_usual = rows in {-(-size // multiple) * multiple for multiple in _MULTIPLES}
        line = f"the vocabulary has {size} pieces: rows {size} to {rows - 1} of the table left out"
        doubt = "; no usual padding: look whether this vocabulary belongs to these weights"
        say(line if is_usual else f"warning: {line}{doubt}")
    return dataclasses.replace(stated, vocab_size=size)
