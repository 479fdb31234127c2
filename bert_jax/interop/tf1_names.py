"""google-research/bert's names and shapes of the same tensors, and of what its Adam keeps of them.

Kernels lie as ours, [in, out], but for those of the next sentence, which lie as Hugging Face's.
"""

import dataclasses
import re
from collections.abc import Iterator

from bert_jax.config import Model
from bert_jax.interop import names
from bert_jax.interop.names import Naming, Tensor

CONFIG = "bert_config.json"
STEP = "global_step"
# Means of the gradients and of their squares; `VARIABLE/adam_m`, `VARIABLE/adam_v`.
SLOTS = ("adam_m", "adam_v")

_NSP = "cls.seq_relationship"


def tensors(cfg: Model) -> Iterator[Tensor]:
    """All variables of a pre-training model."""
    for tensor in names.tensors(cfg):
        if tensor.is_kernel and not tensor.name.startswith(_NSP):
            tensor = dataclasses.replace(tensor, shape=tensor.shape[::-1], is_kernel=False)
        yield dataclasses.replace(tensor, name=_name(tensor.name))


def _name(theirs: str) -> str:
    """The variable's name for Hugging Face's of a tensor."""
    above, _, leaf = theirs.rpartition(".")
    if above.endswith("_embeddings"):
        above, _, leaf = above.rpartition(".")
    elif above.endswith("LayerNorm"):
        leaf = {"weight": "gamma", "bias": "beta"}[leaf]
    elif above == _NSP:
        leaf = {"weight": "output_weights", "bias": "output_bias"}[leaf]
    elif theirs == names.OUTPUT_BIAS:
        leaf = "output_bias"
    else:
        leaf = {"weight": "kernel", "bias": "bias"}[leaf]
    return re.sub(r"layer\.(\d+)", r"layer_\1", f"{above}.{leaf}").replace(".", "/")


def naming(slot: str = "") -> Naming:
    """Of the variables, or of one of their `SLOTS`."""
    ending = f"/{slot}" if slot else ""

    def ended(cfg: Model) -> Iterator[Tensor]:
        for tensor in tensors(cfg):
            yield dataclasses.replace(tensor, name=tensor.name + ending)

    word, bias = _name(names.WORD_EMBEDDINGS), _name(names.OUTPUT_BIAS)
    return Naming(ended, word + ending, bias + ending, CONFIG)
