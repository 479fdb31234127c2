"""Checksums of arrays, against their definition in Python's integers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from jax.sharding import NamedSharding, PartitionSpec

from bert_jax.training.checksums import checksums


def reference(array: np.ndarray) -> str:
    """Written anew, in Python's integers.

    Two flips of one bit would cancel out in a sum of products with odd numbers.
    """

    def mixed(x: int) -> int:
        x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
        x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
        return x ^ x >> 16

    bits = array.reshape(-1).view(f"u{array.dtype.itemsize}")
    low = high = 0
    for place, word in enumerate(map(int, bits)):
        first = mixed(word ^ place * 0x9E3779B9 % 2**32)
        second = (first ^ first >> 15) * 0xBB67AE85 % 2**32
        low, high = low + first, high + (second ^ second >> 13)
    return f"{high % 2**32:08x}{low % 2**32:08x}"


@pytest.mark.parametrize("dtype", ["float32", "float16", "uint8"])
def test_checksums_equal_the_definition(dtype):
    array = np.random.default_rng(0).integers(0, 200, (3, 5, 7)).astype(dtype)
    assert checksums({"a": {"b": array}}) == {"a/b": reference(array)}


@pytest.mark.parametrize("spec", [("data_0",), (None, "data_0"), ()])
def test_checksums_are_the_same_on_any_mesh(spec):
    array = jnp.arange(64.0).reshape(8, 8)
    sharding = NamedSharding(samples.mesh_of(4), PartitionSpec(*spec))
    assert checksums([jax.device_put(array, sharding)]) == checksums([array])
