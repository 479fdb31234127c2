"""Collectives for one parameter and its gradient over DATA, inside the step's `shard_map`.

`all_gather` makes a sharded parameter whole; its gradient is a `reduce_scatter`, which leaves each
device its shard of the sum over devices. Which collectives overlap with computation
differs between generations of TPUs, so METHODS has a method for each. All methods compute the same,
up to the order of summation.
"""

import functools
import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax import hardware
from bert_jax.model import kernels

# Columns of a vector register.
_LANES = 128

CompilerOptions = tuple[tuple[str, bool | int], ...]


class Method(NamedTuple):
    """The collectives of parameters and gradients on a kind of device.

    `plan --out` writes the names of these fields and their values.
    """

    # All-gather along one axis of the torus after another, or along all of them at once.
    gather: Literal["by_axis", "at_once"] = "by_axis"
    # Reduce-scatter along each axis by the compiler, or around a ring of neighbours.
    scatter: Literal["reduce_scatter", "ring"] = "reduce_scatter"
    # The axis that a reduction begins with, and a gather ends with: the `outermost`, the
    # `innermost`, or each axis for its share of the parameters (`balanced`). It carries whole
    # gradients, the others only the shards that remain. `cores_first` begins with the innermost
    # axis, the cores of a chip, and goes on with each other axis for its share.
    order: Literal["outermost", "innermost", "balanced", "cores_first"] = "outermost"
    # A layer's parameter of at most this many gathered bytes is gathered for all layers before the
    # first layer runs; a larger one is gathered in each layer, for each pass.
    prefetch_bytes: int = 0
    # When a layer's gradients are summed over slices: with the next layer's work, or after all.
    sums: Literal["by_layer", "in_the_end"] = "by_layer"
    compiler_options: CompilerOptions = ()  # for all steps on such devices


# v2 and v3 overlap nothing: all of BERT-Large is prefetched. Their innermost axis holds the two
# cores of a chip. If a gather ends with it, a chip receives each byte once for both cores.
_TWO_CORES = Method(order="innermost", prefetch_bytes=8 * 2**20, sums="in_the_end")
_AT_ONCE = Method(
    gather="at_once",
    scatter="ring",
    order="balanced",
    prefetch_bytes=2 * 2**20,
    compiler_options=(("xla_tpu_prefer_async_allgather_to_allreduce", True),),
)
# On v6e and TPU7x a gather over all axes is asynchronous if a SparseCore does it, which then uses
# all axes in both directions.
_BY_SPARSE_CORE = _AT_ONCE._replace(
    compiler_options=(
        *_AT_ONCE.compiler_options,
        ("xla_tpu_enable_sparse_core_collective_offload_all_gather", True),
        ("xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", True),
        ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", False),
        ("xla_tpu_use_tc_device_shape_on_sc", True),
    ),
)
# On v4 and v5p a gather along all axes becomes an all-reduce with all options that we tried; along
# one axis, these options make the larger gathers asynchronous.
_RINGS = Method(
    scatter="ring",
    order="balanced",
    prefetch_bytes=8 * 2**20,
    compiler_options=(
        ("xla_enable_async_all_gather", True),
        ("xla_tpu_enable_async_collective_fusion", True),
        ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", True),
        ("xla_tpu_enable_async_collective_fusion_multiple_steps", True),
    ),
)
# By `device_kind`; all others, such as CPUs and GPUs, use `Method()`.
METHODS = {
    hardware.TPUS["v2"].kind: _TWO_CORES,
    hardware.TPUS["v3"].kind: _TWO_CORES,
    hardware.TPUS["v4"].kind: _RINGS,
    # No option makes a reduce-scatter asynchronous; permutations always are. With the
    # option of `_AT_ONCE` a gather over all axes is asynchronous and uses all links; without that
    # option it becomes an all-reduce.
    hardware.TPUS["v5e"].kind: _AT_ONCE,
    hardware.TPUS["v6e"].kind: _BY_SPARSE_CORE,
    hardware.TPUS["v5p"].kind: _RINGS,
    # The cores of a chip have a link that is six times as fast as those between chips.
    hardware.TPUS["tpu7x"].kind: _BY_SPARSE_CORE._replace(order="cores_first"),
}


# With these options a sum over slices inside a loop overlaps with the next iteration.
_SLICE_OPTIONS = (
    ("xla_tpu_enable_data_parallel_all_reduce_opt", True),
    ("xla_tpu_data_parallel_opt_different_sized_ops", True),
)


def method_of(device_kind: str, slices: int = 1) -> Method:
    """Returns the method for a kind of device, with options for a run on several slices."""
    method = METHODS.get(device_kind, Method())
    options = _SLICE_OPTIONS if slices > 1 and device_kind in METHODS else ()
    return method._replace(compiler_options=method.compiler_options + options)


class Collectives(NamedTuple):
    """The settings of the collectives of a parameter and its gradient over DATA."""

    axes: tuple[
        str, ...
    ]  # of DATA, in the order in which they split a dimension, the coarsest first
    gather_dtype: str  # in which parameters are gathered
    reduce_dtype: str  # in which gradients are added up
    method: Method
    slice_axes: tuple[str, ...] = ()  # the axis between slices
    # Whether a sum over slices follows each reduce-scatter; else one sum follows all of them.
    reduces_slices_early: bool = False

    def is_prefetched(self, shard: jax.Array) -> bool:
        """Returns whether a layer's parameter with such shards is gathered before all layers."""
        size = math.prod(map(lax.axis_size, self.axes)) * shard.size
        return size * jnp.dtype(self.gather_dtype).itemsize <= self.method.prefetch_bytes


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def all_gather(
    shard: jax.Array, dimension: int, collectives: Collectives, gathered: jax.Array | None = None
) -> jax.Array:
    """All-gathers a float32 shard in `gather_dtype`; returns the result as float32.

    `gathered` is the result of an earlier `gather_without_gradient`. Then nothing is communicated
    but the gradient in the backward pass.
    """
    if gathered is None:
        gathered = gather_without_gradient(shard, dimension, collectives)
    # Matrix products cast back to `gather_dtype`; compilers remove both casts.
    return gathered.astype(jnp.float32)


def gather_without_gradient(
    shard: jax.Array, dimension: int, collectives: Collectives
) -> jax.Array:
    """All-gathers a float32 shard in `gather_dtype`, the type of the result."""
    gathered = lax.stop_gradient(shard).astype(collectives.gather_dtype)
    if collectives.method.gather == "at_once":
        return lax.all_gather(gathered, collectives.axes, axis=dimension, tiled=True)
    for axis in reversed(collectives.axes):
        gathered = lax.all_gather(gathered, axis, axis=dimension, tiled=True)
    return gathered


def reduce_scatter(gradient: jax.Array, dimension: int, collectives: Collectives) -> jax.Array:
    """Reduce-scatters a float32 gradient: this device's shard of the sum over devices, float32."""
    gradient = gradient.astype(collectives.reduce_dtype)
    for axis in collectives.axes:
        # The array gets a separate dimension for the devices: on a TPU the reduce-scatter of a
        # dimension that is larger than the number of devices becomes an all-reduce.
        before, after = gradient.shape[:dimension], gradient.shape[dimension + 1 :]
        parts = gradient.reshape(*before, lax.axis_size(axis), -1, *after)
        if collectives.method.scatter == "ring":
            gradient = _ring_reduce_scatter(parts, dimension, axis)
        else:
            gradient = lax.psum_scatter(parts, axis, scatter_dimension=dimension)
    return gradient.astype(jnp.float32)


def reduce_across_slices(shard: jax.Array, collectives: Collectives) -> jax.Array:
    """Adds up a float32 shard over slices, if there are any, in the dtype of reductions."""
    if not collectives.slice_axes:
        return shard
    return lax.psum(shard.astype(collectives.reduce_dtype), collectives.slice_axes).astype(
        jnp.float32
    )


def _all_gather_backward(
    dimension: int, collectives: Collectives, _: None, gradient: jax.Array
) -> tuple[jax.Array, None]:
    shard = reduce_scatter(gradient, dimension, collectives)
    if collectives.reduces_slices_early:
        shard = reduce_across_slices(shard, collectives)
    return shard, None


all_gather.defvjp(lambda *args: (all_gather(*args), None), _all_gather_backward)


def folded_ring(size: int) -> tuple[int, ...]:
    """Returns the devices of a line as a ring: even ones on the way up, odd ones on the way back.

    Neighbours in the ring are at most two links apart, and each direction of each link carries one
    transfer at a time, as if the line were closed.
    """
    return (*range(0, size, 2), *range(size - 1 - size % 2, 0, -2))


def _ring_reduce_scatter(parts: jax.Array, dimension: int, axis: str) -> jax.Array:
    """Reduce-scatters parts over the devices of an axis, from neighbour to neighbour.

    Permutations overlap with other work where reduce-scatters do not. A device receives the partial
    sum of another device's part, adds its own share and sends the sum to its neighbour. `parts` has
    a part for each device along `dimension`, which the result lacks.
    """
    size = lax.axis_size(axis)
    ring = folded_ring(size)
    to_next = [(device, ring[(index + 1) % size]) for index, device in enumerate(ring)]

    def predecessor(distance: int) -> jax.Array:
        """Returns the device this many places before the present one in the ring."""
        devices = [ring[ring.index(device) - distance] for device in range(size)]
        return jnp.array(devices)[lax.axis_index(axis)]

    total = lax.dynamic_index_in_dim(parts, predecessor(1), dimension, keepdims=False)
    for distance in range(2, size + 1):
        owner = predecessor(distance)  # to whose part the received sum belongs; in the end our own
        total = _add_part(parts, dimension, owner, lax.ppermute(total, axis, to_next))
    return total


def _add_part(
    parts: jax.Array, dimension: int, number: jax.Array, received: jax.Array
) -> jax.Array:
    """Adds the part `number` along `dimension` to the received sum."""
    fits_kernel = dimension == 0 and received.ndim > 1 and received.shape[-1] % _LANES == 0
    # The compiler cannot partition a kernel over automatic axes.
    if fits_kernel and not jax.sharding.get_abstract_mesh().auto_axes:
        return kernels.add_part(parts, received, number)
    return received + lax.dynamic_index_in_dim(parts, number, dimension, keepdims=False)
