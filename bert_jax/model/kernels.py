"""What a TPU's own compiler does badly, as Pallas kernels. They are for TPUs alone.

On a CPU they run in Pallas's interpreter, which is slow and for tests.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Of one operand of `add_part` at a time: six of them, since the next block of each arrives while
# one is worked on, are little of the 16 MiB of VMEM that a kernel has on any generation.
_ADDED_BYTES = 2**20
# Rows of a block are a multiple of this, which no type's tile exceeds.
_TILE_ROWS = 32


def add_part(parts: jax.Array, received: jax.Array, index: jax.Array) -> jax.Array:
    """Adds one of several parts to what was received, in one pass over memory.

    The part is read where it lies; XLA would copy it out first. Sums are float32, rounded once: the
    bits of `received + parts[index]`.

    Args:
      parts: [N, ..., C], any float type.
      received: [..., C], as one part; may be overwritten.
      index: int32 [], which part.

    Returns:
      [..., C], in the type of received.
    """
    columns = received.shape[-1]
    flat = received.reshape(-1, columns)
    rows = len(flat)
    most = _ADDED_BYTES // (columns * received.dtype.itemsize)
    block = min(rows, max(most // _TILE_ROWS, 1) * _TILE_ROWS)
    here = pl.BlockSpec((block, columns), lambda i, index: (i, 0))
    there = pl.BlockSpec((1, block, columns), lambda i, index: (index[0], i, 0))
    total = _call(
        _add_part_kernel,
        "ring_add",
        [index.astype(jnp.int32).reshape(1), parts.reshape(-1, rows, columns), flat],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, block),),
            in_specs=[there, here],
            out_specs=here,
        ),
        out_shape=jax.ShapeDtypeStruct(flat.shape, received.dtype),
        input_output_aliases={2: 0},
        cost_estimate=pl.CostEstimate(
            flops=flat.size, bytes_accessed=3 * received.nbytes, transcendentals=0
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )
    return total.reshape(received.shape)


def _add_part_kernel(index_ref: Any, parts_ref: Any, received_ref: Any, total_ref: Any) -> None:
    total = received_ref[...].astype(jnp.float32) + parts_ref[0].astype(jnp.float32)
    total_ref[...] = total.astype(total_ref.dtype)


def _call(kernel: Callable[..., None], name: str, operands: Sequence[Any], **how: Any) -> Any:
    """Runs a kernel on a TPU, or on a CPU in the interpreter.

    Args:
      kernel: takes references to operands and results.
      name: that of its operation in a plan.
      operands: arrays.
      how: for `pallas_call`.
    """

    def call(*operands: jax.Array, **more: Any) -> Any:
        return pl.pallas_call(kernel, name=name, **how, **more)(*operands)

    interpreted = functools.partial(call, interpret=True)
    return lax.platform_dependent(*operands, cpu=interpreted, default=call)
