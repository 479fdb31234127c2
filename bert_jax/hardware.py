"""What devices can do at most: the denominators of utilisation.

Peaks are dense, per jax device, in floating-point operations a second, as the makers publish them:
Cloud TPU's system architecture pages, NVIDIA's data sheets of the V100, A100, H100 and H200 (SXM).
A jax device is a chip, but on TPU v2 and v3 one of a chip's two cores. Products of float32 are
multiplied as XLA does by default: in bfloat16 on a TPU, in TF32 on a GPU from the A100 on.

`TPUS` is what a plan computes with. Memory and its bandwidth: the architecture pages of each
generation; v2 and v3 as in Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural
Networks" (CACM 2020), and Norrie et al. (IEEE Micro 2021). Clocks: peak over twice the
multipliers of a chip's matrix units. Links: one way. v4 to v6e are the 2,400, 4,800, 1,600 and
3,200 Gbit/s a chip of the architecture pages over its links, less the tenth that "How to Scale
Your Model" finds missing in practice (some of its editions do not). v2 and v3 are the 496 and 656
Gbit/s a link of the CACM article, one way: the 340 TB/s at which a pod of 1,024 v3 chips adds,
as its page says, are 83 GB/s a link. `published_link_bandwidth` is the most that is published: the
pages' rates whole; for v3 that of "How to Scale Your Model", which is a pod's bisection of 6.4 TB/s
over its 64 links. The network between slices: the architecture pages' 50 Gbit/s a chip of v5p, and
6.4 and 25.6 Tbit/s a pod of 256 chips of v5e and v6e. Rings: v4 and v5p close an axis where every
axis is a multiple of 4, since their slices are then whole cubes of optical switches; v5e and v6e
close axes of 16 alone; v2 and v3 are cut out of one fixed torus, of 16 x 16 and 32 x 32, and close
the axes that are as long as it. v3:128x32 is not for rent: four pods in a row, on which MLPerf v0.7
was run (Kumar et al. 2021, "Exploring the Limits of Concurrency in ML Training on Google TPUs").
"""

import dataclasses
import functools
import math
import time
from typing import Literal

_TERA = 1e12

# device_kind as jax reports it: peak by compute dtype.
PEAK_FLOPS = {
    "TPU v2": {"bfloat16": 23 * _TERA, "float32": 23 * _TERA},
    "TPU v3": {"bfloat16": 61.5 * _TERA, "float32": 61.5 * _TERA},
    "TPU v4": {"bfloat16": 275 * _TERA, "float32": 275 * _TERA},
    "TPU v5 lite": {"bfloat16": 197 * _TERA, "float32": 197 * _TERA},
    "TPU v5": {"bfloat16": 459 * _TERA, "float32": 459 * _TERA},
    "TPU v6 lite": {"bfloat16": 918 * _TERA, "float32": 918 * _TERA},
    "Tesla V100-SXM2-16GB": {"float32": 15.7 * _TERA},
    "NVIDIA A100-SXM4-40GB": {"bfloat16": 312 * _TERA, "float32": 156 * _TERA},
    "NVIDIA A100-SXM4-80GB": {"bfloat16": 312 * _TERA, "float32": 156 * _TERA},
    "NVIDIA H100 80GB HBM3": {"bfloat16": 989.4 * _TERA, "float32": 494.7 * _TERA},
    "NVIDIA H200": {"bfloat16": 989.4 * _TERA, "float32": 494.7 * _TERA},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tpu:
    """A generation of TPU, and the slices it is rented in."""

    kind: str  # as jax names its devices
    devices_per_chip: int = 1  # jax devices on a chip
    cores_per_device: int = 1  # tensor cores that work as one device
    clock_hz: float  # of a core
    memory_bytes: float  # of a chip
    memory_bandwidth: float  # of a chip, bytes a second
    link_bandwidth: float  # of one link between chips, one way, bytes a second
    published_link_bandwidth: float  # the same, the most that is published
    # Of the network between slices, a chip's share, one way, bytes a second; None: not published.
    network_bandwidth: float | None = None
    # Axes that are closed to rings: those as long as this number; or all, where each is a multiple
    # of 4 ("cubes").
    ring: int | Literal["cubes"]
    slices: tuple[str, ...]  # chips along each axis, as they are offered


_GIGA = 1e9
_GIB = 2**30
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")

TPUS = {
    "v2": Tpu(
        kind="TPU v2",
        devices_per_chip=2,
        clock_hz=0.7 * _GIGA,
        memory_bytes=16 * _GIB,
        memory_bandwidth=700 * _GIGA,
        link_bandwidth=62 * _GIGA,
        published_link_bandwidth=62 * _GIGA,
        ring=16,
        slices=("2x2", "4x4", "8x8", "8x16", "16x16"),
    ),
    "v3": Tpu(
        kind="TPU v3",
        devices_per_chip=2,
        clock_hz=0.94 * _GIGA,
        memory_bytes=32 * _GIB,
        memory_bandwidth=900 * _GIGA,
        link_bandwidth=82 * _GIGA,
        published_link_bandwidth=100 * _GIGA,
        ring=32,
        slices=("2x2", "4x4", "8x8", "8x16", "16x16", "16x32", "32x32", "128x32"),
    ),
    "v4": Tpu(
        kind="TPU v4",
        cores_per_device=2,
        clock_hz=1.05 * _GIGA,
        memory_bytes=32 * _GIB,
        memory_bandwidth=1_200 * _GIGA,
        link_bandwidth=45 * _GIGA,
        published_link_bandwidth=50 * _GIGA,
        ring="cubes",
        slices=_CUBES,
    ),
    "v5e": Tpu(
        kind="TPU v5 lite",
        clock_hz=1.5 * _GIGA,
        memory_bytes=16 * _GIB,
        memory_bandwidth=819 * _GIGA,
        link_bandwidth=45 * _GIGA,
        published_link_bandwidth=50 * _GIGA,
        network_bandwidth=3.125 * _GIGA,
        ring=16,
        slices=_FLAT,
    ),
    "v5p": Tpu(
        kind="TPU v5",
        cores_per_device=2,
        clock_hz=1.75 * _GIGA,
        memory_bytes=95 * _GIB,
        memory_bandwidth=2_765 * _GIGA,
        link_bandwidth=90 * _GIGA,
        published_link_bandwidth=100 * _GIGA,
        network_bandwidth=6.25 * _GIGA,
        ring="cubes",
        slices=_CUBES,
    ),
    "v6e": Tpu(
        kind="TPU v6 lite",
        clock_hz=1.75 * _GIGA,
        memory_bytes=32 * _GIB,
        memory_bandwidth=1_640 * _GIGA,
        link_bandwidth=90 * _GIGA,
        published_link_bandwidth=100 * _GIGA,
        network_bandwidth=12.5 * _GIGA,
        ring=16,
        slices=_FLAT,
    ),
}


def chips(kind: str, devices: int) -> int | None:
    """Returns how many chips so many devices are: what one pays for.

    Args:
      kind: as jax names the devices.
      devices: of all processes.

    Returns:
      None for devices that are not in the table, a CPU's among them: nothing is guessed.
    """
    if kind not in PEAK_FLOPS:
        return None
    on_a_chip = {tpu.kind: tpu.devices_per_chip for tpu in TPUS.values()}
    return math.ceil(devices / on_a_chip.get(kind, 1))


# Wide enough for the full rate of a few cores, and over in hundredths of a second.
_WIDTH = 1024
_TRIES = 10


def peak_flops(compute_dtype: str) -> float | None:
    """Returns the most operations a second that all devices of all processes can do.

    Known devices are looked up. On a CPU it is what a large float32 product reaches now, whatever
    the compute dtype: its virtual devices share the cores.

    Args:
      compute_dtype: of the matrix products, "float32" or "bfloat16".

    Returns:
      None for a device that is not in the table: nothing is guessed.
    """
    import jax  # not above: the names of slices are read without a device

    device = jax.devices()[0]
    if device.platform == "cpu":
        return jax.process_count() * measured_matmul_flops()
    peak = PEAK_FLOPS.get(device.device_kind, {}).get(compute_dtype)
    return None if peak is None else peak * jax.device_count()


@functools.lru_cache
def measured_matmul_flops(width: int = _WIDTH, dtype: str = "float32") -> float:
    """Measures, once a process, operations a second of a square product on one device.

    The best of a few is returned.

    Args:
      width: of the two matrices.
      dtype: of the two matrices; sums are float32.
    """
    import jax
    import jax.numpy as jnp

    device = jax.local_devices()[0]
    x = jax.device_put(jnp.ones((width, width), dtype), device)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * width**3 / best
