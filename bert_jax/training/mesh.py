"""How arrays lie over devices.

Data axes are named data_0, data_1, ...; together they are DATA. The batch is cut along DATA, the
state is whole on every device.
"""

import contextlib
import os
import re
from collections.abc import Iterator

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from bert_jax.config import InputError, Mesh


def make_mesh(cfg: Mesh) -> jax.sharding.Mesh:
    """A mesh of all devices of all processes.

    Raises:
      InputError: a kind of parallelism that does not exist yet, or no device of the kind that
        JAX_PLATFORMS asks for.
    """
    if cfg.parallelism != "replicated":
        raise InputError(
            f"mesh.parallelism={cfg.parallelism}: sharded state is not built yet; "
            "use --set mesh.parallelism=replicated"
        )
    try:
        devices = jax.device_count()
    except (RuntimeError, AssertionError) as error:  # jax starts its backends here
        asked = os.environ.get("JAX_PLATFORMS", "")
        reason = str(error).split("\n")[0][:200]
        raise InputError(
            f"JAX_PLATFORMS={asked}: no such device can be used here"
            f"{f' ({reason})' if reason else ''}; install the extra [tpu] "
            "or [gpu] for it, or set JAX_PLATFORMS=cpu to run without one"
        ) from error
    return jax.make_mesh((devices,), ("data_0",), axis_types=(AxisType.Auto,))


@contextlib.contextmanager
def named_memory() -> Iterator[None]:
    """Raises InputError where the devices have too little memory for what is done meanwhile."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "Out of memory" not in text:
            raise
        wanted = re.search(r"allocat\w+ ([\d.]+ ?\w+)", text)
        raise InputError(
            "the devices have too little memory for this model and batch"
            f"{f' ({wanted[1]} more wanted)' if wanted else ''}: take a smaller model or "
            "phases.N.batch_size, or set mesh.accumulation or mesh.remat"
        ) from error


def data_axes(mesh: jax.sharding.Mesh) -> tuple[str, ...]:
    """DATA: the names of all axes the batch is cut along."""
    return tuple(name for name in mesh.axis_names if name.startswith("data_"))


def data_shards(mesh: jax.sharding.Mesh) -> int:
    """Into how many parts the batch is cut."""
    size = 1
    for axis in data_axes(mesh):
        size *= mesh.shape[axis]
    return size


def batch_spec(mesh: jax.sharding.Mesh) -> PartitionSpec:
    """Rows over DATA."""
    return PartitionSpec(data_axes(mesh))


def batch_sharding(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Rows over DATA."""
    return NamedSharding(mesh, batch_spec(mesh))


def replicated(mesh: jax.sharding.Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def require_divisible(batch_size: int, where: str, mesh: jax.sharding.Mesh, parts: int = 1) -> None:
    """Raises InputError unless the batch can be cut over DATA, each shard into `parts`."""
    shards = data_shards(mesh)
    if batch_size % (shards * parts):
        cuts = f"{shards} devices" + (f" x mesh.accumulation={parts}" if parts > 1 else "")
        raise InputError(f"{where}={batch_size}: not a multiple of {cuts}")
