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
from typing import Any, Literal

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


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A generation of TPU, and the slices it is rented in."""

    kind: str  # as jax names its devices
    devices_per_chip: int  # jax devices on a chip
    cores_per_device: int  # tensor cores that work as one device
    clock_hz: float  # of a core
    memory_bytes: float  # of a chip
    memory_bandwidth: float  # of a chip, bytes a second
    link_bandwidth: float  # of one link between chips, one way, bytes a second
    published_link_bandwidth: float  # the same, the most that is published
    # Of the network between slices, a chip's share, one way, bytes a second; None: not published.
    network_bandwidth: float | None
    # Axes that are closed to rings: those as long as this number; or all, where each is a multiple
    # of 4 ("cubes").
    ring: int | Literal["cubes"]
    slices: tuple[str, ...]  # chips along each axis, as they are offered


_GIGA = 1e9
_V2 = ("2x2", "4x4", "8x8", "8x16", "16x16")
_V3 = (*_V2, "16x32", "32x32", "128x32")
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")


def _tpu(
    kind: str, devices: int, cores: int, ghz: float, gib: int, *rates: Any, **more: Any
) -> Tpu:
    """Returns a generation; of `rates`, in GB/s, the order is the class's."""
    per_second = (rate and rate * _GIGA for rate in rates)
    return Tpu(kind, devices, cores, ghz * _GIGA, gib * 2**30, *per_second, **more)


TPUS = {
    "v2": _tpu("TPU v2", 2, 1, 0.7, 16, 700, 62, 62, None, ring=16, slices=_V2),
    "v3": _tpu("TPU v3", 2, 1, 0.94, 32, 900, 82, 100, None, ring=32, slices=_V3),
    "v4": _tpu("TPU v4", 1, 2, 1.05, 32, 1_200, 45, 50, None, ring="cubes", slices=_CUBES),
    "v5e": _tpu("TPU v5 lite", 1, 1, 1.5, 16, 819, 45, 50, 3.125, ring=16, slices=_FLAT),
    "v5p": _tpu("TPU v5", 1, 2, 1.75, 95, 2_765, 90, 100, 6.25, ring="cubes", slices=_CUBES),
    "v6e": _tpu("TPU v6 lite", 1, 1, 1.75, 32, 1_640, 90, 100, 12.5, ring=16, slices=_FLAT),
}


def chips(kind: str, devices: int) -> int | None:
    """Returns how many chips, what one pays for, devices of a kind are; None: it is not known."""
    if kind not in PEAK_FLOPS:
        return None
    on_a_chip = {tpu.kind: tpu.devices_per_chip for tpu in TPUS.values()}
    return math.ceil(devices / on_a_chip.get(kind, 1))


# Wide enough for the full rate of a few cores, and over in hundredths of a second.
_WIDTH = 1024
_TRIES = 10


def peak_flops(compute_dtype: str) -> float | None:
    """Returns the most operations a second that all devices of all processes can do.

    Known devices are looked up, by the dtype of the products; None of others: nothing is guessed.
    On a CPU it is what a large float32 product reaches now, since its virtual devices share cores.
    """
    import jax  # not above: the names of slices are read without a device

    device = jax.devices()[0]
    if device.platform == "cpu":
        return jax.process_count() * measured_matmul_flops()
    peak = PEAK_FLOPS.get(device.device_kind, {}).get(compute_dtype)
    return None if peak is None else peak * jax.device_count()


@functools.lru_cache
def measured_matmul_flops() -> float:
    """Measures, once a process, operations a second of a float32 product; the best of a few."""
    import jax
    import jax.numpy as jnp

    device = jax.local_devices()[0]
    x = jax.device_put(jnp.ones((_WIDTH, _WIDTH), jnp.float32), device)
    product = jax.jit(jnp.matmul)
    product(x, x).block_until_ready()
    best = float("inf")
    for _ in range(_TRIES):
        start = time.perf_counter()
        product(x, x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * _WIDTH**3 / best
