"""Files of weights in the safetensors format, read and written whole."""

import hashlib
import json
import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from etils import epath
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from bert_jax.errors import InputError
from bert_jax.storage.workdir import named_errors

_FLOATS = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}


def read(path: epath.Path) -> dict[str, np.ndarray]:
    """All tensors of a file by name; float32, float16 and bfloat16 as float32, which loses nothing.

    Other types are kept as raw bytes: whoever wants such a tensor sees a `uint8` array.

    Raises:
      InputError: no such file, or damaged.
    """
    with named_errors(path):
        content = path.read_bytes()
    try:
        found = deserialize(content)
    except SafetensorError as error:
        raise InputError(
            f"{path}: damaged or cut off, not readable as safetensors ({error}); put the whole "
            "file back"
        ) from error
    tensors = {}
    for name, tensor in found:
        dtype = _FLOATS.get(tensor["dtype"])
        if dtype is None:
            tensors[name] = np.frombuffer(tensor["data"], np.uint8)
        else:
            values = np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])
            tensors[name] = values.astype(np.float32)
    return tensors


def read_shards(index: epath.Path) -> dict[str, np.ndarray]:
    """As `read`, of files that an index lists: {"weight_map": {NAME OF TENSOR: FILE BESIDE IT}}.

    Raises:
      InputError: an index that cannot be read or names a file elsewhere, or a file that is missing,
        damaged, or does not hold just what it is listed for.
    """
    listed = _listed(index)
    tensors: dict[str, np.ndarray] = {}
    for file in sorted(set(listed.values())):
        shard = index.parent / file
        if not shard.exists():
            raise InputError(f"{shard}: no such file, and {index.name} lists it; put it there")
        found = read(shard)
        held = {name for name, where in listed.items() if where == file}
        for name in sorted(held ^ found.keys()):
            held_not = "lists" if name in held else "does not list"
            has_not = "does not hold" if name in held else "holds"
            raise InputError(
                f"{shard}: {has_not} tensor {name!r}, which {index.name} {held_not} there; put the "
                "files there that belong together"
            )
        tensors |= found
    return tensors


def _listed(index: epath.Path) -> dict[str, str]:
    """The file of each tensor."""
    with named_errors(index):
        content = index.read_bytes()
    try:
        listed = json.loads(content)["weight_map"]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise InputError(f"{index}: damaged, no JSON object with a weight_map") from error
    if not isinstance(listed, dict) or not listed:
        raise InputError(f"{index}: damaged, its weight_map lists no tensors")
    for name, file in listed.items():
        # A plain name: anything else may lie elsewhere.
        if not isinstance(file, str) or file != pathlib.PurePath(file).name or "\\" in file:
            raise InputError(f"{index}: tensor {name!r}: {file!r} is no file beside the index")
        if not file.endswith(".safetensors"):
            raise InputError(f"{index}: tensor {name!r}: {file!r} is no .safetensors file")
    return listed


def write(path: epath.Path, tensors: Mapping[str, np.ndarray], metadata: dict[str, str]) -> None:
    """Writes tensors of any layout; equal tensors give equal bytes, with one metadata entry."""
    # The library writes memory as it lies, whatever the strides say.
    whole = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    content = save(whole, metadata)
    with named_errors(path):
        path.write_bytes(content)


def sha256(path: epath.Path) -> str:
    """Of the file's bytes.

    Raises:
      InputError: it cannot be read.
    """
    digest = hashlib.sha256()
    with named_errors(path), path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()
