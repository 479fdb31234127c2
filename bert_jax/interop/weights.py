"""Conversion between Hugging Face tensors and parameter trees, and to a base.

Hugging Face has separate tensors for each layer and kernels [out, in], some of which ModernBERT
concatenates. Parameter trees have tensors stacked along a first dimension L, kernels [in, out], and
vocabulary tables with padding rows (model.encoder).
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
from bert_jax.interop.names import Naming, Part, Report, Tensor
from bert_jax.model import heads
from bert_jax.model.encoder import padded_vocab_size
from bert_jax.text.tokenizer import Tokenizer

# Other libraries pad the vocabulary's tables to a multiple of one of these.
_MULTIPLES = (8, 64, 128, 256, 512, 1024)
_FRESH_SEED = 0
# A command that converts a pickle to safetensors without running its code.
_CONVERT = (
    'python -c "import torch, safetensors.torch as s; s.save_file({k: v.clone() for k, v in '
    "torch.load('pytorch_model.bin', weights_only=True).items()}, 'model.safetensors')\""
)


def find_file(folder: epath.Path) -> epath.Path:
    """Returns the file of the weights, or the index of several files."""
    for name in ("model.safetensors", "model.safetensors.index.json"):
        if (folder / name).exists():
            return folder / name
    saved = "load it in transformers and save it with save_pretrained"
    instead = {
        "pytorch_model.bin": f"a pickle, which may run code: not read; with torch: `{_CONVERT}`",
        "tf_model.h5": f"TensorFlow's weights: not read; {saved}",
        "flax_model.msgpack": f"Flax's weights: not read; {saved}",
    }
    for name, reason in instead.items():
        if (folder / name).exists():
            raise InputError(f"{folder / name}: {reason}")
    raise InputError(f"{folder / 'model.safetensors'}: no such file")


def import_tensors(
    tensors: Mapping[str, np.ndarray], cfg: Model, file: str, naming: Naming | None = None
) -> tuple[dict[str, Any], tuple[Part, ...]]:
    """Returns the parameter tree of the parts that tensors have, and the names of missing parts.

    Args:
      tensors: float32 by canonical names, without copies.
      cfg: the model, its vocabulary without padding; rows from `vocab_size` on are left out.
      naming: the names of the tensors; None: Hugging Face's.
    """
    naming = naming or names.HUGGING_FACE[names.family(cfg)]
    expected: dict[str, list[Tensor]] = {}
    for tensor in naming.tensors(cfg):
        if tensor.part == "encoder":  # checked in the loop: a damaged file may state many layers
            _require_shape(tensor, tensors, file, naming.config_file)
        expected.setdefault(tensor.name, []).append(tensor)
    for name in tensors:
        if name not in expected:
            raise InputError(f"{file}: tensor {name!r} is not part of {naming.model_label}")
    parts = {"encoder", *(expected[name][0].part for name in tensors)}
    present = [tensor for shares in expected.values() for tensor in shares if tensor.part in parts]
    for tensor in present:
        _require_shape(tensor, tensors, file, naming.config_file)
    params: dict[str, Any] = {}
    for tensor in present:
        value = tensors[tensor.name]
        if not np.isfinite(value).all():
            raise InputError(
                f"{file}: tensor {tensor.name!r} has values that are not finite; use another "
                "checkpoint"
            )
        if tensor.is_vocabulary:
            value = value[: cfg.vocab_size]
        number, count = tensor.share
        value = np.split(value, count)[number]
        _leaf(params, tensor, cfg)[...] = value.T if tensor.is_transposed else value
    if cfg.kind == "modern":  # layer 0 has no such norm, and may be the only one
        unused = {"scale": np.ones((cfg.num_hidden_layers, cfg.hidden_size), np.float32)}
        params["encoder"]["layers"].setdefault("attention_layer_norm", unused)
    missing = tuple(part for part in names.PARTS["BertForPreTraining"] if part not in parts)
    return params, missing


def _require_shape(
    tensor: Tensor, tensors: Mapping[str, np.ndarray], file: str, config: str
) -> None:
    if tensor.name not in tensors:
        raise InputError(f"{file}: tensor {tensor.name!r} of {list(tensor.shape)} is missing")
    shape = tensors[tensor.name].shape
    if tensor.is_vocabulary and len(shape) == len(tensor.shape):
        shape = (min(shape[0], tensor.shape[0]), *shape[1:])
    if shape != tensor.shape:
        raise InputError(
            f"{file}: tensor {tensor.name!r} has the shape {list(tensors[tensor.name].shape)}, "
            f"{config} and the vocabulary say {list(tensor.shape)}"
        )


def _leaf(params: dict[str, Any], tensor: Tensor, cfg: Model) -> np.ndarray:
    """Returns the part of the tree that holds a tensor, allocated at its first use."""
    *above, name = tensor.path
    node = params
    for key in above:
        node = node.setdefault(key, {})
    shape = (tensor.shape[0] // tensor.share[1], *tensor.shape[1:])
    shape = shape[::-1] if tensor.is_transposed else shape
    if tensor.is_vocabulary:
        shape = (padded_vocab_size(cfg), *shape[1:])
    if tensor.layer is not None:
        shape = (cfg.num_hidden_layers, *shape)
    if name not in node:
        # A norm without a tensor, before the first attention of ModernBERT, keeps the scale 1.
        node[name] = np.full(shape, name == "scale", np.float32)
    leaf = node[name] if tensor.layer is None else node[name][tensor.layer]
    return leaf[: cfg.vocab_size] if tensor.is_vocabulary else leaf


def export_tensors(
    params: Mapping[str, Any], cfg: Model, architecture: str, position: int | None = None
) -> dict[str, np.ndarray]:
    """Returns the tensors of the class `architecture`, float32, without padding.

    `position` is the row of RoBERTa's first position in the exported table; None: as in `params`.
    """
    parts, head = names.HEADS.get(architecture) or (names.PARTS[architecture], "")
    naming, tensors = names.HUGGING_FACE[names.family(cfg)], dict[str, np.ndarray]()
    prefix = "" if head or "masked_lm" in parts else naming.prefix  # removed from names
    for tensor in naming.tensors(cfg):
        # Classes for tasks have the transform of masked LM, but not its output.
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
        if position is not None and cfg.position_offset and "position" in tensor.path:
            added = position - cfg.position_offset  # unused rows before the first position
            value = np.pad(value, ((max(added, 0), 0), (0, 0)))[max(-added, 0) :]
        name = tensor.name.removeprefix(prefix)
        value = value.T if tensor.is_transposed else value
        tensors[name] = np.concatenate([tensors[name], value]) if tensor.share[0] else value
    if head == names.ROBERTA_HEAD:
        prefixes = f"{naming.prefix}pooler.", names.ROBERTA_HEAD_PREFIX
        tensors = {key.replace(*prefixes): tensors[key] for key in tensors}
    if head:
        leaves = jax.device_get(params["head"])
        tensors |= {f"{head}.weight": leaves["kernel"].T, f"{head}.bias": leaves["bias"]}
    return tensors


def without_head(
    tensors: Mapping[str, np.ndarray], cfg: Model, architecture: str
) -> dict[str, np.ndarray]:
    """Returns the tensors of a class for tasks without its head, under the names of pre-training.

    ModernBERT's classes for tasks have no output of masked LM: its bias becomes zeros.
    """
    parts, name = names.HEADS[architecture]
    below = {key: tensors[key] for key in tensors if not key.startswith(f"{name}.")}
    if name == names.ROBERTA_HEAD:
        task_prefix = names.ROBERTA_HEAD_PREFIX
        prefix = f"{names.HUGGING_FACE[names.family(cfg)].prefix}pooler."
        below = {
            prefix + key.removeprefix(task_prefix) if key.startswith(task_prefix) else key: value
            for key, value in below.items()
            if not key.startswith(prefix)  # a pooler that the head does not read
        }
    if "masked_lm" in parts:
        rows = len(below.get(names.MODERN_WORD_EMBEDDINGS, ()))
        below[names.MODERN_OUTPUT_BIAS] = np.zeros(rows, np.float32)
    return below


def export_lora(lora: Mapping[str, Any], cfg: Model) -> dict[str, np.ndarray]:
    """Returns the low-rank matrices of kernels under PEFT's names, lora_A and lora_B.

    For each kernel, by its name, `lora` has `down`, float32 [L, inputs, rank], and `up`, [L, rank,
    outputs].

    Returns:
      lora_A, float32 [n * rank, inputs], and lora_B, [outputs, n * rank], for a tensor of n
      concatenated kernels. lora_B is block-diagonal: each kernel has its own ranks.
    """
    tensors: dict[str, np.ndarray] = {}
    for tensor in names.HUGGING_FACE[names.family(cfg)].tensors(cfg):
        if tensor.layer is None or not tensor.is_transposed or tensor.path[-2] not in lora:
            continue
        matrices = lora[tensor.path[-2]]
        down, up = (np.asarray(matrices[name][tensor.layer]).T for name in ("down", "up"))
        number, count = tensor.share
        rows = np.zeros((count, *up.shape), np.float32)
        rows[number] = up
        module = tensor.name.removesuffix(".weight")
        for matrix, value, axis in (
            ("lora_A", down, 0),
            ("lora_B", rows.reshape(tensor.shape[0], -1), 1),
        ):
            name = f"{module}.{matrix}.weight"
            earlier = [tensors[name]] if name in tensors else []
            tensors[name] = np.concatenate([*earlier, value], axis)
    return tensors


def make_base(
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    padded_model: Model,
    tokenizer: Tokenizer,
    file: epath.Path,
    source: str,
    report: Report,
) -> Base:
    """Makes a base of tensors: padding rows are removed, missing parts freshly initialised.

    Args:
      tensors: float32 by the names of `naming`, without copies.
      padded_model: the model of the configuration, whose vocabulary includes padding.
      source: a description of where the tensors come from.
      report: prints the removed rows and the initialised parts.
    """
    cfg = _without_padding(padded_model, tokenizer.size, tensors, naming, file, report)
    params, missing = import_tensors(tensors, cfg, str(file), naming)
    if missing:
        # A constant seed: the same source makes the same base.
        key = jax.random.key(_FRESH_SEED, impl="threefry2x32")
        fresh = jax.device_get(heads.init_params(cfg, key))
        for part in missing:
            params[part] = fresh[part]
            leaves = ", ".join(f"{part}/{path}" for path in base_lib.flatten(params[part]))
            report(f"not in {file.name}, freshly initialised: {leaves}")
    return Base(cfg, params, tokenizer, source, missing)


def _without_padding(
    padded_model: Model,
    size: int,
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    file: epath.Path,
    report: Report,
) -> Model:
    """Returns the model with the size of the vocabulary; later rows of tables are padding."""
    name, rows = naming.word_embeddings, padded_model.vocab_size
    for table in (name, naming.output_bias):
        if table in tensors and tensors[table].shape[:1] != (rows,):
            raise InputError(
                f"{file}: tensor {table!r} has the shape {list(tensors[table].shape)}, "
                f"{naming.config_file} says vocab_size={rows}"
            )
    if rows < size:
        raise InputError(
            f"{file}: tensor {name!r} has {rows} rows, the vocabulary next to it "
            f"has {size} tokens; replace it with the vocabulary of these weights"
        )
    if rows != size:
        is_usual = rows in {-(-size // multiple) * multiple for multiple in _MULTIPLES}
        line = f"the vocabulary has {size} tokens: rows {size} to {rows - 1} of the table left out"
        doubt = "; not a usual padding: check that the vocabulary belongs to these weights"
        report(line if is_usual else f"warning: {line}{doubt}")
    return dataclasses.replace(padded_model, vocab_size=size)
