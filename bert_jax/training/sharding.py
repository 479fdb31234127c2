"""The sharding of each parameter over devices, and collectives over trees of parameters.

`zero1` and `zero3` shard parameters and the optimizer's state over DATA, each slice alike: `zero1`
gathers all parameters at the start of a step, `zero3` those of one layer at a time.
`parallelism.tensor` shards attention heads, feed-forward and vocabulary over the devices that
compute the same rows. The rules below say in which dimension.

Inside the step's `shard_map`, which is manual over slices and DATA, `collectives.all_gather` makes
a parameter whole.
"""

import collections
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.config import Model, Parallelism
from bert_jax.errors import InputError
from bert_jax.model.kinds import encoder_functions
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.collectives import (
    Collectives,
    all_gather,
    gather_without_gradient,
    method_of,
    reduce_across_slices,
    reduce_scatter,
)

Tree = Any
Module = TypeVar("Module")


class Rule(NamedTuple):
    """The dimensions in which the parameters with these paths are sharded."""

    path: str  # regular expression that matches the whole path
    # Candidates for the dimension that is sharded over DATA: the first that `tensor` does not take.
    # Empty: whole, for small parameters, whose gradients are summed together in one vector.
    data: tuple[int, ...] = ()
    # The dimension that is sharded over `tensor`; None: whole.
    tensor: int | None = None


_LAYER = "encoder/layers/"

_SEGMENTS = Rule("encoder/embeddings/segment/embedding")
_RELATIVE_POSITIONS = Rule("encoder/relative_positions/embedding")

# The first dimension of stacked layers is the layers.
_BERT = (
    Rule("encoder/embeddings/word/embedding", data=(0, 1), tensor=0),
    Rule("encoder/embeddings/position/embedding", data=(1,)),
    _SEGMENTS,
    Rule(_LAYER + "(query|key|value|intermediate)/kernel", data=(1,), tensor=2),
    Rule(_LAYER + "(query|key|value|intermediate)/bias", tensor=1),
    Rule(_LAYER + "(attention_output|output)/kernel", data=(1, 2), tensor=1),
    Rule(_LAYER + "(attention_output|output)/bias"),
    Rule(r"encoder/.*layer_norm/(scale|bias)"),
)
_MODERN = (
    Rule("encoder/embeddings/word/embedding", data=(0, 1), tensor=0),
    Rule(_LAYER + "(query|key|value|intermediate|gate)/kernel", data=(1,), tensor=2),
    Rule(_LAYER + "(attention_output|output)/kernel", data=(1, 2), tensor=1),
    Rule(r"encoder/.*layer_norm/scale"),
)
_DECODER = (
    Rule("decoder/layers/((cross_)?(query|key|value)|intermediate)/kernel", data=(1,), tensor=2),
    Rule("decoder/layers/((cross_)?(query|key|value)|intermediate)/bias", tensor=1),
    Rule("decoder/layers/(attention_output|cross_output|output)/kernel", data=(1, 2), tensor=1),
    Rule("decoder/layers/(attention_output|cross_output|output)/bias"),
    Rule(r"decoder/layers/.*layer_norm/(scale|bias)"),
)
# By `model.kind`.
ENCODERS = {"bert": _BERT, "modern": _MODERN}
POOLER = (Rule("pooler/kernel", data=(0,)), Rule("pooler/bias"))
_MASKED_LM = {
    "bert": (
        Rule("masked_lm/transform/kernel", data=(0,)),
        Rule("masked_lm/transform/bias"),
        Rule("masked_lm/layer_norm/(scale|bias)"),
    ),
    "modern": (Rule("masked_lm/transform/kernel", data=(0,)), Rule("masked_lm/layer_norm/scale")),
}
_OUTPUT_BIAS = Rule("masked_lm/output_bias", tensor=0)
_OUTPUT_TABLE = Rule("masked_lm/output/embedding", data=(0, 1), tensor=0)
# The heads of pre-training, by `model.kind`.
HEADS = {
    kind: (*POOLER, *masked_lm, _OUTPUT_BIAS, Rule("next_sentence/(kernel|bias)"))
    for kind, masked_lm in _MASKED_LM.items()
}


def optional_rules(model: Model) -> dict[str, Sequence[Rule]]:
    """Returns, by name, the rules of parts of pre-training that a task's head may stand on."""
    return {"pooler": POOLER, "masked_lm": _MASKED_LM[model.kind]}


def encoder_rules(model: Model) -> Sequence[Rule]:
    """Returns the rules of an encoder's parameters: by its kind, or those of custom code."""
    if model.code:
        return encoder_functions(model).rules
    missing = () if model.type_vocab_size else (_SEGMENTS,)  # DistilBERT has no segments
    relative = [_RELATIVE_POSITIONS] * bool(model.relative_position_buckets)
    return [*(rule for rule in ENCODERS[model.kind] if rule not in missing), *relative]


def pretraining_rules(model: Model) -> Sequence[Rule]:
    """Returns the rules of an encoder and both heads."""
    own = [_OUTPUT_TABLE] * (model.output_table == "own")
    return (*encoder_rules(model), *HEADS[model.kind], *own)


def masked_lm_rules(model: Model) -> Sequence[Rule]:
    """Returns the rules of an encoder and the masked-LM head."""
    own = [_OUTPUT_TABLE] * (model.output_table == "own")
    return (*encoder_rules(model), *_MASKED_LM[model.kind], _OUTPUT_BIAS, *own)


def generator_rules(model: Model) -> Sequence[Rule]:
    """Returns the rules of a model that generates text: an encoder, its decoder, and their head.

    The encoder is of kind `bert`; the head is that of masked LM.
    """
    return (*encoder_rules(model), *_DECODER, *_MASKED_LM["bert"], _OUTPUT_BIAS)


class Partition(NamedTuple):
    """The dimensions in which a parameter is sharded; None: in none."""

    data: int | None  # sharded over DATA
    tensor: int | None  # sharded over `tensor`
    # The axes of DATA in the order in which they split `data`, the coarsest first; or ().
    axes: tuple[str, ...] = ()


def partitions(
    shapes: Tree, parallelism: Parallelism, mesh: jax.sharding.Mesh, rules: Sequence[Rule]
) -> Tree:
    """Returns a `Partition` for every parameter.

    Args:
      shapes: nested dict of arrays or ShapeDtypeStructs.
      parallelism: how the state is sharded over devices.
      mesh: the devices.
      rules: the table; each parameter has exactly one rule, each rule at least one parameter.

    Raises:
      ValueError: the table does not fit the parameters.
    """
    used = set()

    def partition_leaf(path: tuple[Any, ...], leaf: Any) -> Partition:
        name = "/".join(key.key for key in path)
        matching = [rule for rule in rules if re.fullmatch(rule.path, name)]
        if len(matching) != 1:
            names = ", ".join(rule.path for rule in matching) or "none"
            raise ValueError(f"{name}: needs exactly one sharding rule, but there is {names}")
        used.add(matching[0])
        return _partition(name, leaf.shape, matching[0], parallelism, mesh)

    tree = jax.tree.map_with_path(partition_leaf, shapes)
    unused = [rule.path for rule in rules if rule not in used]
    if unused:
        raise ValueError(f"sharding rules without a parameter: {', '.join(unused)}; remove them")
    return _with_axes(tree, shapes, mesh)


def _partition(
    name: str, shape: tuple[int, ...], rule: Rule, parallelism: Parallelism, mesh: jax.sharding.Mesh
) -> Partition:
    tensor = rule.tensor if parallelism.tensor > 1 else None
    data = None
    if parallelism.state != "replicated" and rule.data:
        free = [dimension for dimension in rule.data if dimension != tensor]
        if not free:
            raise ValueError(
                f"{name}: dimension {tensor} cannot be sharded over both DATA and tensor"
            )
        data = free[0]
    for field, dimension, parts in (
        (f"parallelism.state={parallelism.state}", data, mesh_lib.data_shards(mesh)),
        (f"parallelism.tensor={parallelism.tensor}", tensor, parallelism.tensor),
    ):
        if dimension is not None and shape[dimension] % parts:
            raise InputError(
                f"{field}: {name} has size {shape[dimension]} in dimension {dimension}, not a "
                f"multiple of {parts} devices; take another number, or remove this setting"
            )
    return Partition(data, tensor)


def _with_axes(partition: Tree, shapes: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """Sets `axes` of each partition that is sharded over DATA.

    If the method has several orders of axes, each parameter, the largest first, gets the order
    that has the fewest parameters so far. Stacked layers, which are reduced on their own, are
    counted apart.
    """
    axes = mesh_lib.data_axes(mesh)
    orders = {
        "outermost": [axes],
        "innermost": [axes[::-1]],
        "balanced": [axes[n:] + axes[:n] for n in range(len(axes))],
        "cores_first": [axes[-1:] + axes[n:-1] + axes[:n] for n in range(max(len(axes) - 1, 1))],
    }[method_of(mesh_lib.device_kind(mesh)).order]
    load: collections.Counter[tuple[bool, tuple[str, ...]]] = collections.Counter()
    paths = [path for path, _ in jax.tree.leaves_with_path(shapes)]
    leaves, tree = jax.tree.flatten(partition, is_leaf=lambda x: isinstance(x, Partition))
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    for i in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
        if leaves[i].data is None:
            continue
        stacked = any(key.key == "layers" for key in paths[i])
        lightest = min(orders, key=lambda order: load[stacked, order])
        load[stacked, lightest] += sizes[i]
        leaves[i] = leaves[i]._replace(axes=lightest)
    return jax.tree.unflatten(tree, leaves)


def specs(partition: Tree) -> Tree:
    """Returns the parameters' specs for `shard_map`, which is not manual over `tensor`."""
    return _map_partitions(lambda c: _spec({c.data: c.axes}), partition)


def shardings(partition: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """Returns the sharding of each parameter."""

    def shard(cut: Partition) -> NamedSharding:
        return NamedSharding(mesh, _spec({cut.data: cut.axes, cut.tensor: mesh_lib.TENSOR}))

    return _map_partitions(shard, partition)


def like_params(tree: Tree, values: Tree, default: Any) -> Tree:
    """Returns values for a tree that has subtrees like the parameters, as an optimizer's state has.

    A leaf whose keys are the path of a parameter gets its entry of `values`, others `default`.
    """
    leaves = jax.tree.leaves_with_path(values)
    flat = {tuple(key.key for key in path): value for path, value in leaves}

    def find(path: tuple[Any, ...], _: Any) -> Any:
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        return flat.get(names, default)

    return jax.tree.map_with_path(find, tree)


def _map_partitions(function: Callable[[Partition], Any], partition: Tree) -> Tree:
    return jax.tree.map(function, partition, is_leaf=lambda x: isinstance(x, Partition))


def _spec(dimensions: dict[int | None, Any]) -> PartitionSpec:
    cut = {dimension: axes for dimension, axes in dimensions.items() if dimension is not None}
    return PartitionSpec(*(cut.get(d) for d in range(max(cut, default=-1) + 1)))


# --- inside shard_map --------------------------------------------------------------------------


def all_gather_params(params: Tree, partition: Tree, collectives: Collectives) -> Tree:
    """Returns whole parameters; their gradients are reduce-scattered in the backward pass."""

    def gather_leaf(shard: jax.Array, cut: Partition) -> jax.Array:
        if cut.data is None:
            return shard
        return all_gather(shard, cut.data, collectives._replace(axes=cut.axes))

    return jax.tree.map(gather_leaf, params, partition)


def prefetch_layers(
    stacked: Module, partition: Tree, collectives: Collectives
) -> list[jax.Array | None]:
    """Gathers the small parameters of all layers at once; returns None for the others."""

    def prefetch(shard: jax.Array, cut: Partition) -> jax.Array | None:
        if cut.data is None or not collectives.is_prefetched(shard[0]):
            return None
        return gather_without_gradient(shard, cut.data, collectives._replace(axes=cut.axes))

    return [prefetch(*leaf) for leaf in _leaves(stacked, partition)]


def all_gather_layer(
    layer: Module,
    prefetched: Sequence[jax.Array | None],
    partition: Tree,
    collectives: Collectives,
) -> Module:
    """Returns one whole layer; `partition` is that of the stacked layers.

    `prefetched` are the layer's parameters from `prefetch_layers`.
    """

    def gather_leaf(shard: jax.Array, cut: Partition, gathered: jax.Array | None) -> jax.Array:
        if cut.data is None:
            return shard
        # Only the gradient is communicated if the parameter is gathered already.
        return all_gather(shard, cut.data - 1, collectives._replace(axes=cut.axes), gathered)

    leaves = zip(_leaves(layer, partition), prefetched, strict=True)
    return jax.tree.structure(layer).unflatten([gather_leaf(*leaf, it) for leaf, it in leaves])


def _leaves(layer: Module, partition: Tree) -> list[tuple[jax.Array, Partition]]:
    """Returns the parameters of a layer or of stacked layers, each with its partition."""
    pairs = []
    for path, leaf in jax.tree.leaves_with_path(layer):
        cut = partition
        for key in path[:-1]:  # the last key is that of the value of an `nnx.Param`
            cut = cut[key.name]
        pairs.append((leaf, cut))
    return pairs


def all_reduce_gradients(gradients: Tree, collectives: Collectives) -> Tree:
    """Sums whole gradients over devices."""
    return jax.tree.map(
        lambda g: lax.psum(g.astype(collectives.reduce_dtype), collectives.axes).astype(
            jnp.float32
        ),
        gradients,
    )


def reduce_scatter_gradients(gradients: Tree, partition: Tree, collectives: Collectives) -> Tree:
    """Sums gradients of partitioned parameters over devices; each device keeps its shard.

    Stacked layers are reduced one after the other: the TPU compiler turns a reduce-scatter of all
    layers, hundreds of megabytes, into an all-reduce.
    """

    def scatter_all(tree: Tree, partition: Tree, removed_dims: int) -> Tree:
        def scatter_leaf(gradient: jax.Array, cut: Partition) -> jax.Array:
            if cut.data is None:
                return gradient
            dimension = cut.data - removed_dims
            return reduce_scatter(gradient, dimension, collectives._replace(axes=cut.axes))

        return jax.tree.map(scatter_leaf, tree, partition)

    encoder, encoder_cuts = dict(gradients["encoder"]), dict(partition["encoder"])
    layers, layer_cuts = encoder.pop("layers"), encoder_cuts.pop("layers")
    rest = scatter_all(gradients | {"encoder": encoder}, partition | {"encoder": encoder_cuts}, 0)
    rest["encoder"]["layers"] = lax.map(lambda layer: scatter_all(layer, layer_cuts, 1), layers)
    return rest


def finish_reduction(gradients: Tree, partition: Tree, collectives: Collectives) -> Tree:
    """Sums the gradients of parameters that are whole over devices, and all gradients over slices.

    Gradients of whole parameters are summed as one float32 vector: otherwise each would be a
    collective, and the compiler would merge them unpredictably. Over slices each device sums only
    its own shards (unless that followed their reduce-scatter) and its part of the vector.
    """
    leaves, tree = jax.tree.flatten(gradients)
    dims = jax.tree.leaves(_map_partitions(lambda c: -1 if c.data is None else c.data, partition))
    small = [i for i, dim in enumerate(dims) if dim < 0]
    vector = jnp.concatenate([leaves[i].reshape(-1) for i in small])
    vector, start = lax.psum(vector, collectives.axes), 0
    if collectives.slice_axes:
        size, parts = len(vector), math.prod(map(lax.axis_size, collectives.axes))
        padded = jnp.pad(vector, (0, -size % parts)).reshape(parts, -1)
        own = lax.psum(padded[lax.axis_index(collectives.axes)], collectives.slice_axes)
        vector = all_gather(own, 0, collectives._replace(gather_dtype="float32"))[:size]
        if not collectives.reduces_slices_early:
            leaves = [
                g if dim < 0 else reduce_across_slices(g, collectives)
                for g, dim in zip(leaves, dims, strict=True)
            ]
    for i in small:
        end = start + leaves[i].size
        leaves[i], start = vector[start:end].reshape(leaves[i].shape), end
    return jax.tree.unflatten(tree, leaves)
