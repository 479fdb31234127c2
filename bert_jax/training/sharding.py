"""Which dimension of each parameter is cut over which devices; how a cut one becomes whole.

`zero1` and `zero3` cut parameters and the optimizer's moments over DATA, in each slice alike;
`parallelism.tensor` cuts heads, feed-forward and vocabulary over the devices that share rows. One
table says where.

Inside the step's `shard_map`, which is manual over slices and DATA, `collectives.gather` makes a
cut parameter whole.
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
from bert_jax.model.kinds import encoder_of
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.collectives import (
    Collectives,
    gather,
    gathered_copy,
    method_of,
    reduce_across_slices,
    scatter,
)

Tree = Any
Module = TypeVar("Module")


class Rule(NamedTuple):
    """The dimensions in which the parameters of these paths are cut."""

    path: str  # regular expression of whole paths
    # Dimensions that DATA may cut, the first that `tensor` leaves free; none: never cut, for what
    # is so small that all of it travels in one vector.
    data: tuple[int, ...] = ()
    # The dimension that `tensor` cuts; None: whole on all devices that share rows.
    tensor: int | None = None


_LAYER = "encoder/layers/"

_SEGMENTS = Rule("encoder/embeddings/segment/embedding")

# Stacked layers have their first dimension for the layers.
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
# Of pre-training's heads, by `model.kind`.
HEADS = {
    kind: (*POOLER, *masked_lm, _OUTPUT_BIAS, Rule("next_sentence/(kernel|bias)"))
    for kind, masked_lm in _MASKED_LM.items()
}


def below_rules(model: Model) -> dict[str, Sequence[Rule]]:
    """Returns the rules of what may stand below a task's head, by the part's name."""
    return {"pooler": POOLER, "masked_lm": _MASKED_LM[model.kind]}


def encoder_rules(model: Model) -> Sequence[Rule]:
    """Returns the rules of an encoder's parameters: the kind's, or those of code of its own."""
    if model.code:
        return encoder_of(model).rules
    without = () if model.type_vocab_size else (_SEGMENTS,)  # DistilBERT's
    return [rule for rule in ENCODERS[model.kind] if rule not in without]


def pretraining_rules(model: Model) -> Sequence[Rule]:
    """Returns the rules of an encoder and both heads."""
    own = [_OUTPUT_TABLE] * (model.output_table == "own")
    return (*encoder_rules(model), *HEADS[model.kind], *own)


def generator_rules(model: Model) -> Sequence[Rule]:
    """Returns the rules of an encoder of kind `bert`, its decoder, and the head of pieces."""
    return (*encoder_rules(model), *_DECODER, *_MASKED_LM["bert"], _OUTPUT_BIAS)


class Partition(NamedTuple):
    """The dimensions in which a parameter is cut, for DATA and for `tensor`; None: it is not."""

    data: int | None  # cut by DATA
    tensor: int | None  # cut by `tensor`
    # Of DATA, in the order in which they cut it, the coarsest first; () if they do not.
    axes: tuple[str, ...] = ()


def partitions(
    shapes: Tree, parallelism: Parallelism, mesh: jax.sharding.Mesh, rules: Sequence[Rule]
) -> Tree:
    """Returns a `Partition` for every parameter.

    Args:
      shapes: nested dict of arrays or ShapeDtypeStructs.
      parallelism: how the state is laid over devices.
      mesh: the devices.
      rules: the table; each parameter has exactly one rule, each rule a parameter.

    Raises:
      ValueError: the table does not fit the parameters.
    """
    used = set()

    def of_leaf(path: tuple[Any, ...], leaf: Any) -> Partition:
        name = "/".join(key.key for key in path)
        matching = [rule for rule in rules if re.fullmatch(rule.path, name)]
        if len(matching) != 1:
            which = ", ".join(rule.path for rule in matching) or "none"
            raise ValueError(f"{name}: one sharding rule is wanted, there is {which}")
        used.add(matching[0])
        return _partition(name, leaf.shape, matching[0], parallelism, mesh)

    tree = jax.tree.map_with_path(of_leaf, shapes)
    unused = [rule.path for rule in rules if rule not in used]
    if unused:
        raise ValueError(f"sharding rules that no parameter has: {', '.join(unused)}")
    return _with_axes(tree, shapes, mesh)


def _partition(
    name: str, shape: tuple[int, ...], rule: Rule, parallelism: Parallelism, mesh: jax.sharding.Mesh
) -> Partition:
    tensor = rule.tensor if parallelism.tensor > 1 else None
    data = None
    if parallelism.state != "replicated" and rule.data:
        free = [dimension for dimension in rule.data if dimension != tensor]
        if not free:
            raise ValueError(f"{name}: dimension {tensor} cannot be cut by DATA and tensor both")
        data = free[0]
    for field, dimension, parts in (
        (f"parallelism.state={parallelism.state}", data, mesh_lib.data_shards(mesh)),
        (f"parallelism.tensor={parallelism.tensor}", tensor, parallelism.tensor),
    ):
        if dimension is not None and shape[dimension] % parts:
            raise InputError(
                f"{field}: {name} has {shape[dimension]} in dimension {dimension}, which "
                f"{parts} devices do not divide; take another number, or leave this setting out"
            )
    return Partition(data, tensor)


def _with_axes(partition: Tree, shapes: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """Returns the partitions with the axes of those that DATA cuts.

    Where the load is to be balanced, the largest choose first, each the axis that has least to
    carry; stacked layers, which travel by themselves, and the others each among themselves.
    """
    axes = mesh_lib.data_axes(mesh)
    orders = {
        "outermost": [axes],
        "innermost": [axes[::-1]],
        "balanced": [axes[n:] + axes[:n] for n in range(len(axes))],
    }[method_of(mesh_lib.device_kind(mesh)).order]
    load: collections.Counter[tuple[bool, tuple[str, ...]]] = collections.Counter()
    paths = [path for path, _ in jax.tree.leaves_with_path(shapes)]
    leaves, tree = jax.tree.flatten(partition, is_leaf=lambda x: isinstance(x, Partition))
    sizes = [leaf.size for leaf in jax.tree.leaves(shapes)]
    for i in sorted(range(len(leaves)), key=lambda i: -sizes[i]):
        if leaves[i].data is None:
            continue
        stacked = any(key.key == "layers" for key in paths[i])
        chosen = min(orders, key=lambda order: load[stacked, order])
        load[stacked, chosen] += sizes[i]
        leaves[i] = leaves[i]._replace(axes=chosen)
    return jax.tree.unflatten(tree, leaves)


def specs(partition: Tree) -> Tree:
    """Returns the specs of the parameters for `shard_map`, to which `tensor` is no axis."""
    return _map(lambda c: _spec({c.data: c.axes}), partition)


def shardings(partition: Tree, mesh: jax.sharding.Mesh) -> Tree:
    """Returns the sharding of each parameter."""

    tensor = mesh_lib.TENSOR
    return _map(lambda c: NamedSharding(mesh, _spec({c.data: c.axes, c.tensor: tensor})), partition)


def like_params(tree: Tree, of_params: Tree, other: Any) -> Tree:
    """Returns, for a tree that holds trees like the parameters, their values; else `other`."""
    leaves = jax.tree.leaves_with_path(of_params)
    flat = {tuple(key.key for key in path): value for path, value in leaves}

    def find(path: tuple[Any, ...], _: Any) -> Any:
        names = tuple(key.key for key in path if isinstance(key, jax.tree_util.DictKey))
        return flat.get(names, other)

    return jax.tree.map_with_path(find, tree)


def _map(function: Callable[[Partition], Any], partition: Tree) -> Tree:
    return jax.tree.map(function, partition, is_leaf=lambda x: isinstance(x, Partition))


def _spec(dimensions: dict[int | None, Any]) -> PartitionSpec:
    cut = {dimension: axes for dimension, axes in dimensions.items() if dimension is not None}
    return PartitionSpec(*(cut.get(d) for d in range(max(cut, default=-1) + 1)))


# --- inside shard_map --------------------------------------------------------------------------


def gathered(params: Tree, partition: Tree, collectives: Collectives) -> Tree:
    """Returns parameters as devices compute with them; their gradient arrives partitioned."""

    def one(shard: jax.Array, c: Partition) -> jax.Array:
        return shard if c.data is None else gather(shard, c.data, collectives.along(c.axes))

    return jax.tree.map(one, params, partition)


def gathered_ahead(
    stacked: Module, partition: Tree, collectives: Collectives
) -> list[jax.Array | None]:
    """Returns copies of those parameters that are gathered of all layers before the first."""

    def one(shard: jax.Array, c: Partition) -> jax.Array | None:
        if c.data is None or not collectives.goes_ahead(shard[0]):
            return None
        return gathered_copy(shard, c.data, collectives.along(c.axes))

    return [one(*leaf) for leaf in _leaves(stacked, partition)]


def all_gather_layer(
    layer: Module, copies: Sequence[jax.Array | None], partition: Tree, collectives: Collectives
) -> Module:
    """Returns one layer of stacked ones, whose partition it is, as `gathered`.

    `copies` are the layer's of those that were gathered ahead.
    """

    def one(shard: jax.Array, c: Partition, copy: jax.Array | None) -> jax.Array:
        if c.data is None:
            return shard
        return gather(shard, c.data - 1, collectives.along(c.axes), copy)

    each = zip(_leaves(layer, partition), copies, strict=True)
    return jax.tree.unflatten(jax.tree.structure(layer), [one(*leaf, copy) for leaf, copy in each])


def _leaves(layer: Module, partition: Tree) -> list[tuple[jax.Array, Partition]]:
    """Returns the parameters of a layer, or of stacked ones, each with how it is cut."""
    pairs = []
    for path, leaf in jax.tree.leaves_with_path(layer):
        c = partition
        for key in path[:-1]:  # the last names what a parameter holds
            c = c[key.name]
        pairs.append((leaf, c))
    return pairs


def all_reduce(gradients: Tree, collectives: Collectives) -> Tree:
    """Sums whole gradients over devices."""
    return jax.tree.map(
        lambda g: lax.psum(g.astype(collectives.reduction), collectives.axes).astype(jnp.float32),
        gradients,
    )


def reduce_scatter(gradients: Tree, partition: Tree, collectives: Collectives) -> Tree:
    """Sums gradients of partitioned parameters over devices, each keeping its shard.

    Stacked layers go one after the other: the TPU compiler makes a reduce-scatter of all of them,
    hundreds of megabytes, an all-reduce of all of them.
    """

    def scatter_all(tree: Tree, partition: Tree, stacked: int) -> Tree:
        def one(gradient: jax.Array, c: Partition) -> jax.Array:
            if c.data is None:
                return gradient
            return scatter(gradient, c.data - stacked, collectives.along(c.axes))

        return jax.tree.map(one, tree, partition)

    encoder, encoder_partitions = dict(gradients["encoder"]), dict(partition["encoder"])
    layers, layer_partitions = encoder.pop("layers"), encoder_partitions.pop("layers")
    rest = scatter_all(
        gradients | {"encoder": encoder}, partition | {"encoder": encoder_partitions}, 0
    )
    rest["encoder"]["layers"] = lax.map(
        lambda layer: scatter_all(layer, layer_partitions, 1), layers
    )
    return rest


def all_reduce_fused(
    gradients: Tree, partition: Tree, collectives: Collectives, between: tuple[str, ...] = ()
) -> Tree:
    """Sums the gradients of parameters that are not cut over devices, in one float32 vector.

    Alone, each would be a collective of its own, and the compiler merges them as it likes. Sums of
    slices are added up along the axis `between` them, each byte of them by one device of a slice:
    those of cut parameters, unless their scatter has, and of the vector a part each.
    """
    leaves, tree = jax.tree.flatten(gradients)
    dims = jax.tree.leaves(_map(lambda c: -1 if c.data is None else c.data, partition))
    small = [i for i, dim in enumerate(dims) if dim < 0]
    vector = jnp.concatenate([leaves[i].reshape(-1) for i in small])
    vector, start = lax.psum(vector, collectives.axes), 0
    if between:
        size, parts = len(vector), math.prod(map(lax.axis_size, collectives.axes))
        each = jnp.pad(vector, (0, -size % parts)).reshape(parts, -1)
        mine = lax.psum(each[lax.axis_index(collectives.axes)], between)
        vector = gather(mine, 0, collectives._replace(copy="float32"))[:size]
    if between and not collectives.between:
        late = collectives._replace(between=between)
        leaves = [
            g if dim < 0 else reduce_across_slices(g, late)
            for g, dim in zip(leaves, dims, strict=True)
        ]
    for i in small:
        end = start + leaves[i].size
        leaves[i], start = vector[start:end].reshape(leaves[i].shape), end
    return jax.tree.unflatten(tree, leaves)
