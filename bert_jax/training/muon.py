"""Orthogonal updates of matrices (Jordan et al. 2024), each computed whole on one device.

A momentum matrix U S V^T becomes about U V^T by a few Newton-Schulz steps, which are only products.
Devices that hold parts of all matrices exchange them for some whole matrices, and back: the traffic
is that of two gathers, and each product is computed by one device.
"""

import collections
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax.model.layers import force_row_major
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.sharding import Partition, specs

Tree = Any
# Maps {path: momentum [L, in, out]} of stacked layers to their orthogonal updates.
Orthogonalize = Callable[[dict[str, jax.Array]], dict[str, jax.Array]]

# The polynomial a x + b x^3 + c x^5, which in five steps takes singular values to 0.7 to 1.2; the
# number of steps; the term added to norms (Jordan et al. 2024).
_COEFFICIENTS, _STEPS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


def is_layer_matrix(path: tuple[Any, ...], leaf: jax.Array) -> bool:
    """Returns whether a parameter holds the matrices of stacked layers."""
    return leaf.ndim == 3 and path[-1].key == "kernel" and any(k.key == "layers" for k in path)


def newton_schulz(matrices: jax.Array, dtype: str) -> jax.Array:
    """Returns approximately the nearest orthogonal matrices: float32 [N, in, out] -> the same.

    The inputs of matrix products are rounded to `dtype`, sums are float32.
    """
    if matrices.shape[1] > matrices.shape[2]:  # so that the Gram matrix is the smaller one
        return newton_schulz(_transpose(matrices, dtype), dtype).swapaxes(1, 2)
    norms = jnp.sqrt(jnp.sum(jnp.square(matrices), axis=(1, 2), keepdims=True))
    x, (a, b, c) = matrices / (norms + _EPS), _COEFFICIENTS
    for _ in range(_STEPS):
        gram = _multiply(x, x, 2, dtype)
        x = a * x + _multiply(b * gram + _multiply(c * gram, gram, 1, dtype), x, 1, dtype)
    return x


def _multiply(a: jax.Array, b: jax.Array, axis: int, dtype: str) -> jax.Array:
    """Multiplies stacked matrices: contracts axis 2 of a with `axis` of b; sums are float32."""
    dimensions = (((2,), (axis,)), ((0,), (0,)))
    return lax.dot_general(
        a.astype(dtype), b.astype(dtype), dimensions, preferred_element_type=jnp.float32
    )


def _transpose(matrices: jax.Array, dtype: str) -> jax.Array:
    """Transposes stacked matrices; on CPUs stores them row-major if products of `dtype` need it."""
    transposed = matrices.swapaxes(1, 2)
    if dtype == "float32":
        return transposed
    return lax.platform_dependent(transposed, cpu=force_row_major, default=lambda x: x)


def orthogonalize_local(
    momentum: dict[str, jax.Array], dtype: str = "float32"
) -> dict[str, jax.Array]:
    """Orthogonalises matrices that are whole on one device."""
    return {path: newton_schulz(stack, dtype) for path, stack in momentum.items()}


def make_orthogonalize(partition: Tree, mesh: jax.sharding.Mesh, dtype: str) -> Orthogonalize:
    """Returns a function that orthogonalises matrices, sharded or whole on a slice's devices.

    The inputs of matrix products are rounded to `dtype`.
    """
    if mesh_lib.data_shards(mesh) == 1:
        return functools.partial(orthogonalize_local, dtype=dtype)
    axes = mesh_lib.data_axes(mesh)
    leaves = jax.tree.leaves_with_path(partition, is_leaf=lambda x: isinstance(x, Partition))
    cuts = {jax.tree_util.keystr(path): cut for path, cut in leaves}

    def orthogonalize_shard(momentum: dict[str, jax.Array]) -> dict[str, jax.Array]:
        groups: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
        for path, shard in momentum.items():
            groups[(*shard.shape[1:], cuts[path])].append(path)
        updates = {}
        for (*_, cut), paths in groups.items():
            counts = [len(momentum[path]) for path in paths]
            stack = jnp.concatenate([momentum[p] for p in paths])
            stack = _orthogonalize_shards(stack, cut, axes, dtype)
            parts = jnp.split(stack, [sum(counts[:n]) for n in range(1, len(counts))])
            updates |= dict(zip(paths, parts, strict=True))
        return updates

    def orthogonalize(momentum: dict[str, jax.Array]) -> dict[str, jax.Array]:
        layout = specs({path: cuts[path] for path in momentum})
        return mesh_lib.map_shards(orthogonalize_shard, mesh, (layout,), layout)(momentum)

    return orthogonalize


def _orthogonalize_shards(
    matrices: jax.Array, cut: Partition, axes: tuple[str, ...], dtype: str
) -> jax.Array:
    """Orthogonalises matrices [N, in, out] that are cut alike; each device gets some whole ones."""
    order = cut.axes or axes
    count, devices = len(matrices), math.prod(map(lax.axis_size, order))
    each = -(-count // devices)
    matrices = jnp.pad(matrices, ((0, each * devices - count), (0, 0), (0, 0)))
    if cut.data is None:
        own = lax.dynamic_slice_in_dim(matrices, lax.axis_index(order) * each, each)
        return lax.all_gather(newton_schulz(own, dtype), order, axis=0, tiled=True)[:count]
    own = lax.all_to_all(matrices, order, 0, cut.data, tiled=True)
    return lax.all_to_all(newton_schulz(own, dtype), order, cut.data, 0, tiled=True)[:count]
