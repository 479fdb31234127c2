"""Tensors of others, fitted into a base: the vocabulary's rows, and parts that are not there."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import numpy as np
from etils import epath

from bert_jax import base as base_lib
from bert_jax.base import Base
from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.interop import names
from bert_jax.interop.names import Naming
from bert_jax.model import heads
from bert_jax.text.tokenizer import Tokenizer

# Others pad the vocabulary's tables to a multiple of one of these.
_MULTIPLES = (8, 64, 128, 256, 512, 1024)
_FRESH_SEED = 0

Say = Callable[[str], None]


def base_of(
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    claimed: Model,
    tokenizer: Tokenizer,
    file: epath.Path,
    source: str,
    say: Say,
) -> Base:
    """A base of these tensors.

    Args:
      tensors: float32 by the names of `naming`, without copies.
      naming: whose names they are.
      claimed: their shape as the configuration beside them says it, padding included.
      tokenizer: whose ids their rows are.
      file: where they were read.
      source: in words, where they come from.
      say: is told of rows left out and of parts freshly initialised.

    Raises:
      InputError: tensors, configuration and vocabulary do not fit together.
    """
    cfg = _without_padding(claimed, tokenizer.size, tensors, naming, file, say)
    params, missing = names.to_ours(tensors, cfg, str(file), naming)
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
    claimed: Model,
    size: int,
    tensors: Mapping[str, np.ndarray],
    naming: Naming,
    file: epath.Path,
    say: Say,
) -> Model:
    """The model with as many pieces as the vocabulary has; the rows beyond are padding.

    Raises:
      InputError: the vocabulary, the configuration and the word embeddings do not fit together.
    """
    name = naming.word_embeddings
    word = tensors.get(name)
    if word is None:
        raise InputError(f"{file}: tensor {name!r} is missing")
    rows = claimed.vocab_size
    if word.shape[:1] != (rows,):
        raise InputError(
            f"{file}: tensor {name!r} has the shape {list(word.shape)}, "
            f"{naming.config} says vocab_size={rows}"
        )
    padded = {-(-size // multiple) * multiple for multiple in _MULTIPLES}
    if rows != size and rows not in padded:
        raise InputError(
            f"{file}: tensor {name!r} has {rows} rows, the vocabulary beside it "
            f"has {size} pieces; put the vocabulary there that belongs to these weights"
        )
    bias = tensors.get(naming.output_bias)
    if bias is not None and bias.shape != (rows,):
        raise InputError(
            f"{file}: tensor {naming.output_bias!r} has the shape {list(bias.shape)}, "
            f"{naming.config} says vocab_size={rows}"
        )
    if rows != size:
        say(f"the vocabulary has {size} pieces: rows {size} to {rows - 1} of the table left out")
    return dataclasses.replace(claimed, vocab_size=size)
