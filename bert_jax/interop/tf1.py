"""TensorFlow 1 checkpoints as google-research/bert writes them, read without TensorFlow.

PREFIX.index, PREFIX.data-*    the variables; PREFIX is bert_model.ckpt or the name of a release
bert_config.json, vocab.txt    in the same folder
tokenizer_config.json          an extra file of ours: whether text is lower-cased

Kernels are [in, out], except the next-sentence kernel, which is [out, in].
PREFIX.index is a table of LevelDB (its doc/table_format.md): blocks of keys, each with a checksum.
Its values are protocol buffers of tensorflow/core/protobuf/tensor_bundle.proto.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, Literal

import google_crc32c
import ml_dtypes
import numpy as np
from etils import epath

from bert_jax.checkpoints.base import Base
from bert_jax.config import Model
from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.interop import configs, names, vocabularies, weights
from bert_jax.interop.names import Naming, Report, Tensor
from bert_jax.interop.vocabularies import read_object, require
from bert_jax.storage.workdir import translate_os_errors

_CONFIG, _PREFIX = "bert_config.json", "bert_model.ckpt"
# A key of ours in bert_config.json, which google-research/bert ignores.
_GELU_FORM = "gelu_form"
_FORMS: dict[str, Literal["gelu", "gelu_tanh"]] = {"erf": "gelu", "tanh": "gelu_tanh"}
# Default of type_vocab_size in a bert_config.json.
_DEFAULT_SEGMENTS = 16
# Variables that are not imported: the step and Adam's moments.
_TRAINING_STATE = ("global_step", "/adam_m", "/adam_v")
_NSP = "cls.seq_relationship"


def find(source: epath.Path) -> epath.Path | None:
    """Returns the prefix of a checkpoint's files; None if `source` is not a checkpoint.

    `source` is that prefix, with or without .index, or a folder with one checkpoint and no
    safetensors.
    """
    if source.is_dir():
        if any(source.glob("*.safetensors*")):
            return None
        prefixes = sorted(path.name.removesuffix(".index") for path in source.glob("*.ckpt*.index"))
        if len(prefixes) > 1 and _PREFIX not in prefixes:
            raise InputError(f"{source}: several checkpoints; add /NAME: {', '.join(prefixes)}")
        if not prefixes:
            return None
        return source / (_PREFIX if _PREFIX in prefixes else prefixes[0])
    name = source.name.removesuffix(".index")
    if not name:
        return None
    prefix = source.with_name(name)
    return prefix if prefix.with_name(f"{prefix.name}.index").exists() else None


def read(prefix: epath.Path, report: Report) -> Base:
    """Reads the weights of a checkpoint as a base."""
    folder = prefix.parent
    model = read_config(folder / _CONFIG, report)
    tokenizer = vocabularies.read_plain(folder, report)
    params = read_variables(prefix, lambda name: not name.endswith(_TRAINING_STATE))
    for name, value in params.items():
        if value.dtype != np.float32:
            raise InputError(f"{prefix}: variable {name!r} is {value.dtype}; only float32 is read")
    source = f"TensorFlow checkpoint {prefix.name} of {folder.absolute().name}"
    return weights.make_base(params, NAMING, model, tokenizer, prefix, source, report)


def read_config(path: epath.Path, report: Report) -> Model:
    """Reads a bert_config.json as a Model section.

    `gelu` means erf in the code of the released models, and tanh since February 2019; the key
    `gelu_form` says which. Without the key it means erf, as in transformers.
    """
    fields = {"type_vocab_size": _DEFAULT_SEGMENTS} | read_object(path)
    form = require(path, _GELU_FORM, fields.get(_GELU_FORM), [None, *_FORMS])
    if form is None and fields.get("hidden_act", "gelu") == "gelu":
        report(
            f"{path.name}: gelu means erf, as in the released models; if these weights were "
            f'trained by the code since February 2019, add "{_GELU_FORM}": "tanh"'
        )
    cfg = configs.build_bert(path, fields)
    return cfg if form is None else dataclasses.replace(cfg, hidden_act=_FORMS[form])


# --- names ----------------------------------------------------------------------------------------


def _tensors(cfg: Model) -> Iterator[Tensor]:
    for tensor in names.bert_tensors(cfg):
        if tensor.is_transposed and not tensor.name.startswith(_NSP):
            tensor = dataclasses.replace(tensor, shape=tensor.shape[::-1], is_transposed=False)
        yield dataclasses.replace(tensor, name=_tf1_name(tensor.name))


def _tf1_name(hf_name: str) -> str:
    above, _, leaf = hf_name.rpartition(".")
    if above.endswith("_embeddings"):
        above, _, leaf = above.rpartition(".")
    elif above.endswith("LayerNorm"):
        leaf = {"weight": "gamma", "bias": "beta"}[leaf]
    elif above == _NSP:
        leaf = {"weight": "output_weights", "bias": "output_bias"}[leaf]
    elif hf_name == names.OUTPUT_BIAS:
        leaf = "output_bias"
    else:
        leaf = {"weight": "kernel", "bias": "bias"}[leaf]
    return re.sub(r"layer\.(\d+)", r"layer_\1", f"{above}.{leaf}").replace(".", "/")


NAMING = Naming(_tensors, _tf1_name(names.WORD_EMBEDDINGS), _tf1_name(names.OUTPUT_BIAS), _CONFIG)

# --- files ----------------------------------------------------------------------------------------

_MAGIC, _FOOTER = 0xDB4775248B80FB57, 48
# Fields of BundleHeaderProto, BundleEntryProto and TensorShapeProto, and numbers of DataType.
_SHARDS, _ENDIANNESS = 1, 2
_DTYPE, _SHAPE, _SHARD, _OFFSET, _SIZE, _CHECKSUM, _SLICES = range(1, 8)
_DIM, _DIM_SIZE = 2, 1
_DTYPES = {
    **{1: np.float32, 2: np.float64, 3: np.int32, 4: np.uint8, 9: np.int64, 10: np.bool_},
    **{14: ml_dtypes.bfloat16, 19: np.float16},
}


def read_variables(prefix: epath.Path, wanted: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """Reads the variables whose names are `wanted`, in their own types."""
    index = prefix.with_name(f"{prefix.name}.index")
    with translate_os_errors(index):
        content = index.read_bytes()
    with translate_parser_errors(prefix, "restore its complete files"):
        entries = dict(_table(content))
        header = dict(_fields(entries.pop(b"")))
        if header.get(_ENDIANNESS):
            raise ValueError("big-endian numbers are not read")

    @functools.cache
    def shard(number: int) -> np.ndarray:
        data = prefix.with_name(f"{prefix.name}.data-{number:05}-of-{header[_SHARDS]:05}")
        with translate_os_errors(data):
            return np.memmap(data, np.uint8, "r")

    values = {}
    with translate_parser_errors(prefix, "restore its complete files"):
        for key, value in sorted(entries.items()):
            # The slices of partitioned variables have entries whose keys begin with a zero byte.
            if key[0] and wanted(name := key.decode()):
                entry = dict(_fields(value))
                if _SLICES in entry:
                    raise InputError(f"{prefix}: variable {name!r} is sliced; save it whole")
                values[name] = _tensor(name, entry, shard)
    return values


def _tensor(name: str, entry: dict[int, Any], shard: Callable[[int], np.ndarray]) -> np.ndarray:
    dtype = np.dtype(_DTYPES[entry[_DTYPE]])
    offset, size = entry.get(_OFFSET, 0), entry.get(_SIZE, 0)
    data = shard(entry.get(_SHARD, 0))[offset : offset + size].tobytes()
    if len(data) != size or _mask_crc(google_crc32c.value(data)) != entry[_CHECKSUM]:
        raise ValueError(f"the checksum of variable {name!r} is wrong")
    dims = [value for number, value in _fields(entry.get(_SHAPE, b"")) if number == _DIM]
    shape = [dict(_fields(dim)).get(_DIM_SIZE, 0) for dim in dims]
    return np.frombuffer(data, dtype).reshape(shape)


def _table(content: bytes) -> Iterator[tuple[bytes, bytes]]:
    footer = content[-_FOOTER:]
    if len(footer) < _FOOTER or int.from_bytes(footer[-8:], "little") != _MAGIC:
        raise ValueError("not the index of a TensorFlow checkpoint, or cut off")
    _, offset = _varint(footer, 0)  # the handle of the metaindex block
    _, offset = _varint(footer, offset)
    for _, handle in _block(content, footer, offset):
        yield from _block(content, handle, 0)


def _block(content: bytes, handle: bytes, offset: int) -> Iterator[tuple[bytes, bytes]]:
    """Yields the keys and values of the block whose offset and size are in `handle`."""
    start, offset = _varint(handle, offset)
    size, _ = _varint(handle, offset)
    block = content[start : start + size]
    kind, checksum = content[start + size], content[start + size + 1 :][:4]
    if _mask_crc(google_crc32c.value(block + bytes([kind]))) != int.from_bytes(checksum, "little"):
        raise ValueError("the checksum of the index is wrong")
    if kind:
        raise ValueError("the index is compressed, which is not supported")
    end = size - 4 - 4 * int.from_bytes(block[-4:], "little")  # where restart points begin
    offset, key = 0, b""
    while offset < end:
        shared, offset = _varint(block, offset)
        added, offset = _varint(block, offset)
        length, offset = _varint(block, offset)
        key = key[:shared] + block[offset : offset + added]
        yield key, block[offset + added : offset + added + length]
        offset += added + length


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields the fields of a protocol buffer: their numbers, and integers or bytes."""
    offset = 0
    while offset < len(data):
        tag, offset = _varint(data, offset)
        number, kind = tag >> 3, tag & 7
        if kind == 0:
            value, offset = _varint(data, offset)
        else:
            length = {1: 8, 5: 4}.get(kind)
            if length is None:
                length, offset = _varint(data, offset)
            value, offset = data[offset : offset + length], offset + length
            if kind in (1, 5):
                value = int.from_bytes(value, "little")
        yield number, value


def _varint(data: bytes, offset: int) -> tuple[int, int]:
    """Returns a number with seven bits in each byte, and the offset after the number."""
    value, shift = 0, 0
    while True:
        byte = data[offset]
        value, offset = value | (byte & 127) << shift, offset + 1
        if byte < 128:
            return value, offset
        shift += 7


def _mask_crc(crc: int) -> int:
    """Returns a checksum as LevelDB stores it."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
