"""Files of TensorFlow 1 checkpoints, by TensorFlow's own reader and writer; nothing else of it.

The only importer of TensorFlow, and only when a function here is called: it is an extra.
"""

import os
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from etils import epath

from bert_jax.errors import InputError


def read(prefix: epath.Path, wanted: Callable[[str], bool]) -> dict[str, np.ndarray]:
    """The variables whose names are wanted, as they were written.

    Args:
      prefix: the files' common beginning; PREFIX.index says what lies where.
      wanted: asked of every name.

    Raises:
      InputError: no TensorFlow, or a damaged checkpoint.
    """
    tf = tensorflow(str(prefix))
    try:
        reader = tf.train.load_checkpoint(os.fspath(prefix))
        found = sorted(name for name in reader.get_variable_to_shape_map() if wanted(name))
        return {name: np.asarray(reader.get_tensor(name)) for name in found}
    # What its reader raises for a file that is cut off, of none, or whose checksums fail.
    except (tf.errors.OpError, IndexError, RuntimeError, ValueError) as error:
        reason = str(error).split("\n")[0][:200]
        raise InputError(
            f"{prefix}: damaged or cut off, not readable as a TensorFlow checkpoint ({reason}); "
            "put its whole files back"
        ) from error


def write(prefix: epath.Path, variables: Mapping[str, np.ndarray]) -> None:
    """Writes PREFIX.index and PREFIX.data-00000-of-00001.

    Raises:
      InputError: no TensorFlow, or the files cannot be written.
    """
    tf = tensorflow(str(prefix))
    try:
        tf.raw_ops.SaveV2(
            prefix=os.fspath(prefix),
            tensor_names=list(variables),
            shape_and_slices=[""] * len(variables),
            tensors=list(variables.values()),
        )
    except tf.errors.OpError as error:
        raise InputError(f"{prefix}: cannot be written ({error.message})") from error


def tensorflow(where: str) -> Any:
    """The library.

    Raises:
      InputError: it is not installed; `where` says what needs it.
    """
    # Else it tells on standard error what its processor could do.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise InputError(
            f"{where}: TensorFlow checkpoints need the [tf] extra: pip install 'bert-jax[tf]' "
            f"({error})"
        ) from error
    return tf
