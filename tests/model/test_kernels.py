"""The TPU's kernels, in Pallas's interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bert_jax.model import kernels

CPU = jax.devices("cpu")[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        (48, 128),
        (2, 24, 384),  # flattened to rows
        (20, 20_480),  # several blocks of rows, the last one partly filled
        (512,),
    ],
)
def test_add_part_gives_the_bits_of_a_sum(shape, dtype):
    rng = np.random.default_rng(0)
    parts = jnp.asarray(rng.standard_normal((3, *shape)), dtype)
    received = jnp.asarray(rng.standard_normal(shape), dtype)
    # Rounded once: float64 holds the sum of two of these exactly enough to tell.
    expected = np.asarray(received, np.float64) + np.asarray(parts[1], np.float64)
    total = jax.jit(kernels.add_part)(parts, received, jnp.uint32(1))
    assert total.dtype == received.dtype and total.shape == shape
    np.testing.assert_array_equal(np.asarray(total), np.asarray(jnp.asarray(expected, dtype)))
