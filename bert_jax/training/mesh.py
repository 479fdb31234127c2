"""The mesh of devices, and the sharding of batches over it.

Axes `data_0`, `data_1`, ... are the dimensions of the devices' torus. Together we call them DATA:
parameters and the optimizer's state may be sharded over them. Each index of the outermost axis
`slice` is a group of devices that holds a full copy of the state: a slice of TPUs, or an equal part
of one. The batch is sharded over `slice` and DATA. Devices along the innermost axis `tensor` all
compute the same rows. `slice` and `tensor` exist only if they are larger than 1.
"""

import contextlib
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bert_jax import hardware
from bert_jax.config import Model, Parallelism
from bert_jax.errors import InputError, Unavailable

SLICE, TENSOR = "slice", "tensor"


def make_mesh(
    parallelism: Parallelism, devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
    """Returns a mesh of `devices`; None: of all devices of all processes."""
    slices = _slices(_all_devices() if devices is None else devices, parallelism.slices)
    count, grid = len(slices), slices[0]
    if grid.shape[-1] % parallelism.tensor:
        raise InputError(
            f"parallelism.tensor={parallelism.tensor}: does not divide the last dimension of the "
            f"devices' mesh, {' x '.join(map(str, grid.shape))}"
        )
    if parallelism.tensor > 1:
        data = [n for n in (*grid.shape[:-1], grid.shape[-1] // parallelism.tensor) if n > 1]
        if not data:  # XLA fails on a psum over an axis of size 1 next to an automatic one
            raise InputError(
                f"parallelism.tensor={parallelism.tensor}: each slice needs at least "
                f"{2 * parallelism.tensor} devices, but has {grid.size}; take a smaller number"
            )
        slices = slices.reshape(count, *data, parallelism.tensor)
    names = [SLICE, *(f"data_{i}" for i in range(slices.ndim - 1))]
    if parallelism.tensor > 1:
        names[-1] = TENSOR
    if count == 1:
        names, slices = names[1:], slices[0]
    return jax.sharding.Mesh(slices, names, axis_types=(AxisType.Auto,) * slices.ndim)


def one_device() -> jax.sharding.Mesh:
    """Returns a mesh of this process's first device."""
    local = [d for d in _all_devices() if d.process_index == jax.process_index()]
    return make_mesh(Parallelism(), local[:1])


def _all_devices() -> Sequence[jax.Device]:
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:  # jax starts its backends here
        platforms = os.environ.get("JAX_PLATFORMS", "")
        if re.search(r"\b(UNAVAILABLE|ABORTED|DEADLINE_EXCEEDED)\b", str(error)) or (
            "INTERNAL" in str(error) and "libtpu.so" not in str(error)  # it is not installed
        ):
            raise Unavailable(
                f"JAX_PLATFORMS={platforms}: the devices do not start ({error})"
            ) from error
        reason = str(error).split("\n")[0][:200]
        raise InputError(
            f"JAX_PLATFORMS={platforms}: no such device can be used here"
            f"{f' ({reason})' if reason else ''}; install the extra [tpu] "
            "or [gpu] for it, or set JAX_PLATFORMS=cpu to run without one"
        ) from error


def _slices(devices: Sequence[jax.Device], count: int) -> np.ndarray:
    """Returns the devices as slices: [slices, *slice shape].

    `count` is a multiple of the number of tori, whose outermost dimensions are cut first: a torus
    of 4 x 8 in 8 parts gives slices of 4, since [4, 8] -> [4, 1, 2, 4] -> [4, 2, 1, 4]. With 1
    each torus is a slice.
    """
    tori: dict[int, list[jax.Device]] = {}
    for device in devices:
        is_on_torus = hasattr(device, "coords")  # GPUs may have a slice_index, too
        tori.setdefault(getattr(device, "slice_index", 0) if is_on_torus else 0, []).append(device)
    grids = np.stack([_torus(tori[index]) for index in sorted(tori)])
    remaining, uneven = divmod(count, len(grids)) if count > 1 else (1, 0)
    shape = []
    for size in grids.shape[1:]:
        cut = math.gcd(size, max(remaining, 1))
        shape += [cut, size // cut]
        remaining //= cut
    if uneven or remaining != 1:
        raise InputError(
            f"parallelism.slices={count}: {len(grids)} x {' x '.join(map(str, grids.shape[1:]))} "
            f"devices cannot be split so; take {len(grids)}, or a multiple of it that divides them"
        )
    cuts = grids.reshape(len(grids), *shape)
    order = [0, *range(1, cuts.ndim, 2), *range(2, cuts.ndim, 2)]
    inner = [size for size in shape[1::2] if size > 1] or [1]
    return cuts.transpose(order).reshape(-1, *inner)


def _torus(devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns the devices in their physical order, one axis for each dimension of the torus.

    Devices without a torus have one axis. Dimensions are kept apart, since the compiler makes a
    reduce-scatter along one of them, but an all-reduce over a flat axis of all devices. The cores
    of a chip belong to the last dimension; on TPU7x, whose cores have a link of their own, they are
    another dimension.
    """
    flat = np.array(devices)
    if not hasattr(devices[0], "coords"):
        return flat
    coords = np.array([(*d.coords, d.core_on_chip) for d in devices])
    _, indices = zip(*(np.unique(column, return_inverse=True) for column in coords.T), strict=True)
    shape = [int(column.max()) + 1 for column in indices]
    if math.prod(shape) != len(devices):  # only some chips of a torus, as in a test
        return flat
    grid = np.empty(shape, object)
    grid[indices] = flat
    if devices[0].device_kind == hardware.TPUS["tpu7x"].kind:
        return grid.reshape([size for size in shape if size > 1])
    cores = shape.pop()
    *outer, last = [size for size in shape if size > 1] or [1]
    return grid.reshape(*outer, last * cores)


@contextlib.contextmanager
def translate_memory_errors(
    remedy: str = "take a smaller model or phases.N.batch_size, or set parallelism.accumulation, "
    "parallelism.remat or parallelism.state",
) -> Iterator[None]:
    """Raises InputError with a remedy if the devices run out of memory inside the context."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "Out of memory" not in text:
            raise
        size = re.search(r"allocat\w+ ([\d.]+ ?\w+)", text)
        raise InputError(
            "the devices have too little memory for this model and batch"
            f"{f' ({size[1]} more wanted)' if size else ''}: {remedy}"
        ) from error


def batch_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Returns the names of the axes of the batch: `slice`, if there is one, and DATA."""
    return tuple(name for name in mesh.axis_names if name != TENSOR)


def data_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """Returns DATA: the names of the axes over which the state may be sharded within a slice."""
    return tuple(name for name in batch_axes(mesh) if name != SLICE)


def device_kind(mesh: jax.sharding.Mesh) -> str:
    """Returns the kind of the devices, as jax names it."""
    return mesh.devices.flat[0].device_kind


def layer_loop(parallelism: Parallelism, mesh: jax.sharding.Mesh) -> Literal["scan", "unroll"]:
    """Returns `parallelism.layer_loop`, or for `auto` the value that suits the devices.

    It is `unroll` for a single CPU device, else `scan`. Several CPU devices usually emulate a pod,
    so they should compile its program.
    """
    if parallelism.layer_loop != "auto":
        return parallelism.layer_loop
    return "unroll" if _is_one_cpu_device(mesh) else "scan"


def token_loss(model: Model, mesh: jax.sharding.Mesh) -> Literal["all_logits", "by_chunk"]:
    """Returns the value of `Loop.token_loss`: `by_chunk` in bfloat16 on one CPU device."""
    is_faster = model.compute_dtype == "bfloat16" and _is_one_cpu_device(mesh)
    return "by_chunk" if is_faster else "all_logits"


def _is_one_cpu_device(mesh: jax.sharding.Mesh) -> bool:
    return mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"


def batch_shards(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of shards of the batch."""
    return math.prod(mesh.shape[axis] for axis in batch_axes(mesh))


def data_shards(mesh: jax.sharding.Mesh) -> int:
    """Returns the number of shards along DATA, of the batch within a slice and of the state."""
    return math.prod(mesh.shape[axis] for axis in data_axes(mesh))


def batch_spec(mesh: jax.sharding.Mesh) -> PartitionSpec:
    """Returns the spec of a batch: rows over slices and DATA."""
    return PartitionSpec(batch_axes(mesh))


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of a batch: rows over slices and DATA."""
    return NamedSharding(mesh, batch_spec(mesh))


def map_shards(
    function: Callable, mesh: jax.sharding.Mesh, in_specs: Any, out_specs: Any
) -> Callable:
    """Maps a function over all shards of the batch; XLA partitions it over `tensor`."""
    specs = {"in_specs": in_specs, "out_specs": out_specs, "axis_names": set(batch_axes(mesh))}
    return jax.shard_map(function, mesh=mesh, **specs, check_vma=False)


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Returns the sharding of arrays that are whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def require_divisible(batch_size: int, where: str, mesh: jax.sharding.Mesh, parts: int = 1) -> None:
    """Raises InputError unless the batch splits over the mesh, and each shard into `parts`."""
    shards = batch_shards(mesh)
    if batch_size % (shards * parts):
        cuts = f"{shards} devices" + (f" x parallelism.accumulation={parts}" if parts > 1 else "")
        raise InputError(f"{where}={batch_size}: not a multiple of {cuts}")


def manual_axes() -> tuple[str, ...]:
    """Returns the manual axes of the enclosing `shard_map`; () outside of any."""
    return tuple(jax.sharding.get_abstract_mesh().manual_axes)
