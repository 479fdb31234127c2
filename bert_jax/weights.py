"""Files of weights in the safetensors format, read and written whole."""

import hashlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np
from etils import epath
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from bert_jax.config import InputError
from bert_jax.workdir import named_errors

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
