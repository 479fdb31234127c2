"""Orthogonal updates of matrices (Jordan et al. 2024), each made whole on one device.

A matrix of momentum U S V^T becomes about U V^T by a few steps of Newton and Schulz, which are
products alone. Devices that hold parts of all matrices exchange them for some whole ones, and back:
as much travels as two gathers of them, and the products are shared out.
"""

import collections
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax.training import mesh as mesh_lib
from bert_jax.training.sharding import Partition, specs

Tree = Any
# Takes {path: momentum [L, in, out]} of stacked layers to their orthogonal updates.
Orthogonalized = Callable[[dict[str, jax.Array]], dict[str, jax.Array]]

# Of the polynomial a x + b x^3 + c x^5, five of which take singular values to 0.7 to 1.2; and what
# is added to norms (Jordan et al. 2024).
_COEFFICIENTS, _STEPS, _EPS = (3.4445, -4.7750, 2.0315), 5, 1e-7


def is_matrix(path: tuple[Any, ...], leaf: jax.Array) -> bool:
    """Returns whether a parameter is the matrices of stacked layers."""
    return leaf.ndim == 3 and path[-1].key == "kernel" and any(k.key == "layers" for k in path)


def newton_schulz(matrices: jax.Array) -> jax.Array:
    """Returns the nearest orthogonal matrices, roughly: float32 [N, in, out] -> the same."""
    if matrices.shape[1] > matrices.shape[2]:  # the smaller Gram matrix
        return newton_schulz(matrices.swapaxes(1, 2)).swapaxes(1, 2)
    norms = jnp.sqrt(jnp.sum(jnp.square(matrices), axis=(1, 2), keepdims=True))
    x, (a, b, c) = matrices / (norms + _EPS), _COEFFICIENTS
    for _ in range(_STEPS):
        gram = x @ x.swapaxes(1, 2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def alone(momentum: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Orthogonalises matrices that lie whole on one device."""
    return jax.tree.map(newton_schulz, momentum)


def over(partition: Tree, mesh: jax.sharding.Mesh) -> Orthogonalized:
    """Returns what orthogonalises matrices that devices of a slice hold in parts, or all whole."""
    if mesh_lib.data_shards(mesh) == 1:
        return alone
    axes = mesh_lib.data_axes(mesh)
    leaves = jax.tree.leaves_with_path(partition, is_leaf=lambda x: isinstance(x, Partition))
    cuts = {jax.tree_util.keystr(path): cut for path, cut in leaves}

    def on_a_shard(momentum: dict[str, jax.Array]) -> dict[str, jax.Array]:
        groups: dict[tuple[Any, ...], list[str]] = collections.defaultdict(list)
        for path, shard in momentum.items():
            groups[(*shard.shape[1:], cuts[path])].append(path)
        done = {}
        for (*_, cut), paths in groups.items():
            counts = [len(momentum[path]) for path in paths]
            made = _exchanged(jnp.concatenate([momentum[path] for path in paths]), cut, axes)
            parts = jnp.split(made, [sum(counts[:n]) for n in range(1, len(counts))])
            done |= dict(zip(paths, parts, strict=True))
        return done

    def of_all(momentum: dict[str, jax.Array]) -> dict[str, jax.Array]:
        places = specs({path: cuts[path] for path in momentum})
        return mesh_lib.over_shards(on_a_shard, mesh, (places,), places)(momentum)

    return of_all


def _exchanged(matrices: jax.Array, cut: Partition, axes: tuple[str, ...]) -> jax.Array:
    """Orthogonalises a shard of matrices [N, in, out] that are cut alike: whole ones by turns."""
    order = cut.axes or axes
    count, devices = len(matrices), math.prod(map(lax.axis_size, order))
    each = -(-count // devices)
    matrices = jnp.pad(matrices, ((0, each * devices - count), (0, 0), (0, 0)))
    if cut.data is None:
        mine = lax.dynamic_slice_in_dim(matrices, lax.axis_index(order) * each, each)
        return lax.all_gather(newton_schulz(mine), order, axis=0, tiled=True)[:count]
    mine = lax.all_to_all(matrices, order, 0, cut.data, tiled=True)
    return lax.all_to_all(newton_schulz(mine), order, cut.data, 0, tiled=True)[:count]
