"""Checksums of arrays wherever they lie: the same on any mesh, computed on its devices.

Each element's bits are mixed with its place and added up modulo 2**32, twice with other mixtures:
64 bits in all. What is added can be added in any order, so that a shard needs to know nothing of
the others; and since the mixture is no linear one, changes do not cancel out as in a weighted sum,
where two flipped signs would. The mixture is the finalizer of MurmurHash3 (Appleby 2011).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Odd, so that no bit is lost: from the golden ratio and the square root of 3.
_PLACE, _SECOND = 0x9E3779B9, 0xBB67AE85
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(tree: Any) -> dict[str, str]:
    """Returns the checksum of each array of a tree: {path: 16 hexadecimal digits}.

    Args:
      tree: of arrays whose elements have at most 32 bits; every process has the same.

    Returns:
      Paths are joined by "/"; shapes and types are no part of a checksum.
    """
    leaves = jax.tree.leaves_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    return {
        path_of(path): f"{int(high):08x}{int(low):08x}"
        for (path, _), (low, high) in zip(leaves, sums, strict=True)
    }


def path_of(path: tuple[Any, ...]) -> str:
    """Returns a path of a tree as checksums name it."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [sum_of(array) for array in arrays]


def sum_of(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two halves of an array's checksum, uint32 []."""
    bits = lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    place = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        stride = math.prod(array.shape[axis + 1 :]) % 2**32
        place += lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride)
    first = _mixed(bits ^ (place * jnp.uint32(_PLACE)))
    second = (first ^ (first >> 15)) * jnp.uint32(_SECOND)
    second ^= second >> 13
    return first.sum(dtype=jnp.uint32), second.sum(dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
