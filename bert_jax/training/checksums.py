"""Checksums of arrays, computed on their devices: the same on any mesh.

Each element's bits are hashed with the element's index, and the hashes are added up modulo 2**32;
two different hashes give 64 bits. A sum has no order, so shards are summed independently. The hash
is not linear, so changes do not cancel out; in a weighted sum two flipped signs would. The hash is
the finalizer of MurmurHash3 (Appleby 2011).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Odd multipliers, which lose no bit: from the golden ratio and the square root of 3.
_INDEX, _SECOND = 0x9E3779B9, 0xBB67AE85
_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def checksums(tree: Any) -> dict[str, str]:
    """Returns the checksum of each array of a tree: {path: 16 hexadecimal digits}.

    Args:
      tree: arrays with elements of at most 32 bits; the same tree on every process.

    Returns:
      Paths are joined by "/"; a checksum does not depend on shape and dtype.
    """
    leaves = jax.tree.leaves_with_path(tree)
    sums = jax.device_get(_sums([leaf for _, leaf in leaves]))
    return {
        path_of(path): f"{int(high):08x}{int(low):08x}"
        for (path, _), (low, high) in zip(leaves, sums, strict=True)
    }


def path_of(path: tuple[Any, ...]) -> str:
    """Returns a path of a tree as a key of `checksums`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


@jax.jit
def _sums(arrays: list[jax.Array]) -> list[tuple[jax.Array, jax.Array]]:
    return [array_checksum(array) for array in arrays]


def array_checksum(array: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two halves of an array's checksum, uint32 [] each."""
    bits = lax.bitcast_convert_type(array, _WORDS[array.dtype.itemsize]).astype(jnp.uint32)
    index = jnp.zeros(array.shape, jnp.uint32)
    for axis in range(array.ndim):
        stride = math.prod(array.shape[axis + 1 :]) % 2**32
        index += lax.broadcasted_iota(jnp.uint32, array.shape, axis) * jnp.uint32(stride)
    first = _hash(bits ^ (index * jnp.uint32(_INDEX)))
    second = (first ^ (first >> 15)) * jnp.uint32(_SECOND)
    second ^= second >> 13
    return first.sum(dtype=jnp.uint32), second.sum(dtype=jnp.uint32)


def _hash(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
