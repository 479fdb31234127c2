"""How one parameter and its gradient travel over DATA, inside the step's `shard_map`.

A cut parameter is made whole by `gather`, whose gradient is a `scatter`: this device's part of the
sum over devices. What a compiler hides behind other work differs from one generation of TPU to the
next, and so does the way in which they are done: `METHODS`. They compute the same, up to the order
in which a sum is added up.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax import hardware
from bert_jax.model import kernels

# Columns of a register.
_LANES = 128

CompilerOptions = tuple[tuple[str, bool | int], ...]


class Method(NamedTuple):
    """The way in which devices of a kind exchange parameters and gradients."""

    # Along one axis of the torus after another, or along all of them at once.
    gather: Literal["by_axis", "at_once"] = "by_axis"
    # By the compiler's own reduce-scatter along each axis, or from neighbour to neighbour in a ring
    # along it.
    scatter: Literal["reduce_scatter", "ring"] = "reduce_scatter"
    # Which axis carries all of a gradient, and the others what it leaves of it: the `outermost`,
    # the `innermost`, or each its share of the parameters (`balanced`).
    order: Literal["outermost", "innermost", "balanced"] = "outermost"
    # A parameter of a layer that is gathered in so many bytes at most is so for all layers at once,
    # before the first, and only its gradient travels in the loop; a larger one is gathered in each
    # layer, for each pass.
    ahead: int = 0
    # Whether slices add up a layer's gradients behind the next layer's work, or all in the end.
    sums: Literal["by_layer", "in_the_end"] = "by_layer"
    compiler_options: CompilerOptions = ()  # of all steps on such devices


# v2 and v3 hide nothing: all of BERT-Large goes ahead. Their innermost axis holds the two cores of
# a chip: with it in the end a chip fetches each byte once, for both.
_TWO_CORES = Method(order="innermost", ahead=8 * 2**20, sums="in_the_end")
_AT_ONCE = Method(
    gather="at_once",
    scatter="ring",
    order="balanced",
    ahead=2 * 2**20,
    compiler_options=(("xla_tpu_prefer_async_allgather_to_allreduce", True),),
)
# On v6e such a gather is asynchronous if a SparseCore does it, along both axes, both ways round.
_BY_SPARSE_CORE = _AT_ONCE._replace(
    compiler_options=(
        *_AT_ONCE.compiler_options,
        ("xla_tpu_enable_sparse_core_collective_offload_all_gather", True),
        ("xla_tpu_enable_sparse_core_collective_offload_2d_all_gather", True),
        ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", False),
        ("xla_tpu_use_tc_device_shape_on_sc", True),
    ),
)
# On v4 and v5p a gather along all axes is an all-reduce, whatever the options tried; along one,
# these make the larger ones asynchronous.
_RINGS = Method(
    scatter="ring",
    order="balanced",
    ahead=8 * 2**20,
    compiler_options=(
        ("xla_enable_async_all_gather", True),
        ("xla_tpu_enable_async_collective_fusion", True),
        ("xla_tpu_enable_async_collective_fusion_fuse_all_gather", True),
        ("xla_tpu_enable_async_collective_fusion_multiple_steps", True),
    ),
)
# By `device_kind`; all others, CPUs and GPUs among them, do as `Method()` says.
METHODS = {
    hardware.TPUS["v2"].kind: _TWO_CORES,
    hardware.TPUS["v3"].kind: _TWO_CORES,
    hardware.TPUS["v4"].kind: _RINGS,
    # No option makes a reduce-scatter asynchronous, permutations always are. Without this option a
    # gather along all axes becomes an all-reduce; with it, it is asynchronous and uses all links.
    hardware.TPUS["v5e"].kind: _AT_ONCE,
    hardware.TPUS["v6e"].kind: _BY_SPARSE_CORE,
    hardware.TPUS["v5p"].kind: _RINGS,
}


# With these a sum over slices in a loop begins in the next round, and is waited for at its end.
_BETWEEN_SLICES = (
    ("xla_tpu_enable_data_parallel_all_reduce_opt", True),
    ("xla_tpu_data_parallel_opt_different_sized_ops", True),
)


def method_of(device_kind: str, slices: int = 1) -> Method:
    """Returns how so many slices of devices of a kind, as jax names it, exchange parameters."""
    method = METHODS.get(device_kind, Method())
    between = _BETWEEN_SLICES if slices > 1 and device_kind in METHODS else ()
    return method._replace(compiler_options=method.compiler_options + between)


class Collectives(NamedTuple):
    """The way in which a parameter and its gradient travel over DATA."""

    axes: tuple[str, ...]  # of DATA, in the order in which they cut a dimension, the coarsest first
    copy: str  # the type in which parameters are gathered
    reduction: str  # the type in which gradients are added up
    method: Method  # as the devices do it best
    # The axis between slices if each scatter adds up along it, too; else that is done in the end.
    between: tuple[str, ...] = ()

    def goes_ahead(self, shard: jax.Array) -> bool:
        """Returns whether a layer's parameter of such shards is gathered before the first layer."""
        size = math.prod(map(lax.axis_size, self.axes)) * shard.size
        return size * jnp.dtype(self.copy).itemsize <= self.method.ahead

    def along(self, axes: tuple[str, ...]) -> "Collectives":
        """Returns the same in this order of axes."""
        return self._replace(axes=axes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(
    shard: jax.Array, dimension: int, collectives: Collectives, copy: jax.Array | None = None
) -> jax.Array:
    """All-gathers a float32 shard: float32 with the values of the type that travelled.

    With a `gathered_copy` of before, nothing travels but the gradient.
    """
    if copy is None:
        copy = gathered_copy(shard, dimension, collectives)
    # A product rounds it to that type again, which compilers see to be nothing.
    return copy.astype(jnp.float32)


def gathered_copy(shard: jax.Array, dimension: int, collectives: Collectives) -> jax.Array:
    """All-gathers a float32 shard, in the type that travels; it has no gradient."""
    copy = lax.stop_gradient(shard).astype(collectives.copy)
    if collectives.method.gather == "at_once":
        copy = lax.all_gather(copy, collectives.axes, axis=dimension, tiled=True)
    else:
        for axis in reversed(collectives.axes):
            copy = lax.all_gather(copy, axis, axis=dimension, tiled=True)
    return copy


def scatter(gradient: jax.Array, dimension: int, collectives: Collectives) -> jax.Array:
    """Reduce-scatters a float32 gradient: this device's shard of the sum over devices, float32."""
    gradient = gradient.astype(collectives.reduction)
    for axis in collectives.axes:
        # The devices as a dimension of their own: cut within one, a large array's reduce-scatter
        # becomes an all-reduce of it all on a TPU.
        before, after = gradient.shape[:dimension], gradient.shape[dimension + 1 :]
        parts = gradient.reshape(*before, lax.axis_size(axis), -1, *after)
        if collectives.method.scatter == "ring":
            gradient = _ring_scatter(parts, dimension, axis)
        else:
            gradient = lax.psum_scatter(parts, axis, scatter_dimension=dimension)
    return gradient.astype(jnp.float32)


def reduce_across_slices(shard: jax.Array, collectives: Collectives) -> jax.Array:
    """Adds up a float32 shard over the slices, if there are any, in the type of reductions."""
    if not collectives.between:
        return shard
    return lax.psum(shard.astype(collectives.reduction), collectives.between).astype(jnp.float32)


def _gather_forward(*args: Any) -> tuple[jax.Array, None]:
    return gather(*args), None


def _gather_backward(
    dimension: int, collectives: Collectives, kept: None, gradient: jax.Array
) -> tuple[jax.Array, None]:
    del kept
    return reduce_across_slices(scatter(gradient, dimension, collectives), collectives), None


gather.defvjp(_gather_forward, _gather_backward)


def folded_ring(size: int) -> tuple[int, ...]:
    """Returns devices of a line as a ring whose neighbours are two places apart at most.

    So each direction of each link carries one transfer at a time, as in a line that is closed.
    """
    return (*range(0, size, 2), *range(size - 1 - size % 2, 0, -2))


def _ring_scatter(parts: jax.Array, dimension: int, axis: str) -> jax.Array:
    """Sums parts over the devices of an axis, each keeping its own, from neighbour to neighbour.

    Permutations overlap with other work where reduce-scatters do not. What arrives is the sum so
    far of the part of a device further on; this device adds its own share and sends it on.
    `parts` has one for each along `dimension`, which the sum is without.
    """
    size = lax.axis_size(axis)
    ring = folded_ring(size)
    onwards = [(device, ring[(place + 1) % size]) for place, device in enumerate(ring)]

    def behind(places: int) -> jax.Array:
        """Returns the device so many places behind this one in the ring."""
        devices = [ring[ring.index(device) - places] for device in range(size)]
        return jnp.array(devices)[lax.axis_index(axis)]

    total = lax.dynamic_index_in_dim(parts, behind(1), dimension, keepdims=False)
    for places in range(2, size + 1):
        total = _add_part(parts, dimension, behind(places), lax.ppermute(total, axis, onwards))
    return total


def _add_part(
    parts: jax.Array, dimension: int, number: jax.Array, received: jax.Array
) -> jax.Array:
    """Adds the part of this number along `dimension` to what was received."""
    tiles = dimension == 0 and received.ndim > 1 and received.shape[-1] % _LANES == 0
    # A kernel is not cut by the compiler, over axes that are left to it.
    if tiles and not jax.sharding.get_abstract_mesh().auto_axes:
        return kernels.add_part(parts, received, number)
    return received + lax.dynamic_index_in_dim(parts, number, dimension, keepdims=False)
