"""What of a base learns a task: all of it, nothing, or thin matrices beside its kernels.

The parameters that learn are all that a run keeps; with those of the base they make the model.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import Adapt, Parallelism
from bert_jax.errors import InputError
from bert_jax.training import sharding

Tree = dict[str, Any]

_HEAD_RULE = sharding.Rule("head/(kernel|bias)")
_LORA_RULE = sharding.Rule("lora/[a-z_]+/(down|up)")


def learns(adapt: Adapt, whole: Tree, fresh_parts: tuple[str, ...], key: jax.Array) -> Tree:
    """Of freshly made parameters those that learn; with `lora`, its matrices.

    Args:
      adapt: how.
      whole: as tasks.heads.init_params gives them.
      fresh_parts: of the base, what it never learned: it learns with the head.
      key: of the matrices.
    """
    if adapt.how == "full":
        return whole
    learning = {name: whole[name] for name in ("head", *fresh_parts) if name in whole}
    if adapt.how == "lora":
        layers = whole["encoder"]["layers"]
        learning["lora"] = {
            name: _thin(layers[name]["kernel"], adapt.lora_rank, jax.random.fold_in(key, number))
            for number, name in enumerate(sorted(adapt.lora_targets))
        }
    return learning


def _thin(kernel: jax.Array, rank: int, key: jax.Array) -> Tree:
    """Two matrices for each layer whose product is zero (Hu et al. 2021, section 4.1)."""
    layers, inputs, outputs = kernel.shape
    down = jax.random.normal(key, (layers, inputs, rank), jnp.float32) / inputs**0.5
    return {"down": down, "up": jnp.zeros((layers, rank, outputs), jnp.float32)}


def whole(adapt: Adapt, learning: Tree, fixed: Tree | None) -> Tree:
    """The parameters of the model: the base's, with what learns laid over them.

    Args:
      adapt: how.
      learning: see `learns`.
      fixed: the base's encoder, and its pooler if the head reads it; None with `full`.
    """
    if fixed is None:
        return learning
    params = {**fixed, **{name: tree for name, tree in learning.items() if name != "lora"}}
    if adapt.how == "lora":
        encoder = dict(params["encoder"])
        layers = dict(encoder["layers"])
        scale = adapt.lora_alpha / adapt.lora_rank
        for name, thin in learning["lora"].items():
            more = scale * jnp.einsum("lir,lro->lio", thin["down"], thin["up"])
            layers[name] = {**layers[name], "kernel": layers[name]["kernel"] + more}
        params["encoder"] = {**encoder, "layers": layers}
    return params


def require_parallelism(adapt: Adapt, parallelism: Parallelism) -> None:
    """Raises InputError if what learns is cut although it is small."""
    if adapt.how != "full" and parallelism.state != "replicated":
        raise InputError(
            f"parallelism.state={parallelism.state}: adapt.how={adapt.how} learns so little that "
            "it lies whole on every device; leave this setting out"
        )


def rules(adapt: Adapt, pooled: bool, fresh_parts: tuple[str, ...]) -> list[sharding.Rule]:
    """Where the parameters that learn are cut.

    Args:
      adapt: how.
      pooled: whether the head reads the pooler.
      fresh_parts: see `learns`.
    """
    if adapt.how == "full":
        return [*sharding.ENCODER, *(sharding.POOLER if pooled else ()), _HEAD_RULE]
    found = [_HEAD_RULE]
    if pooled and "pooler" in fresh_parts:
        found += sharding.POOLER
    return found + [_LORA_RULE] * (adapt.how == "lora")
