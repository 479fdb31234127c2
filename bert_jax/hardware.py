"""Peak rates of devices, the denominators of utilisation.

Peaks are dense floating-point operations per second of a JAX device, as published: in Cloud TPU's
system architecture pages, and NVIDIA's data sheets of the V100, A100, H100 and H200 (SXM). A JAX
device is a chip, but on TPU v2, v3 and TPU7x one of a chip's two cores. Float32 products are
computed as XLA does by default: in bfloat16 on a TPU, in TF32 on a GPU since the A100.

`TPUS` has the rates for plans. Memory and its bandwidth: the architecture pages of each generation;
for v2 and v3 Jouppi et al., "A Domain-Specific Supercomputer for Training Deep Neural Networks"
(CACM 2020), and Norrie et al. (IEEE Micro 2021). Clocks: peak / (2 x multipliers in the matrix
units of a chip). Links: one way. v4 to v6e: 2,400, 4,800, 1,600 and 3,200 Gbit/s per chip of the
architecture pages, divided by the number of links, minus the tenth that is missing in practice
according to "How to Scale Your Model" (not in all editions). v2 and v3: 496 and 656 Gbit/s per link
of the CACM article; the 340 TB/s of an all-reduce on 1,024 v3 chips on the page of v3 are 83 GB/s
per link. `published_link_bandwidth` is the highest published rate: that of the pages; for v3 that
of "How to Scale Your Model", the bisection of a pod, 6.4 TB/s, divided by its 64 links. Network
between slices: the architecture pages' 50 Gbit/s per chip of v5p, and 6.4 and 25.6 Tbit/s per pod
of 256 chips of v5e and v6e. Rings: v4 and v5p close an axis if every axis is a multiple of 4, since
their slices are then whole cubes of optical switches; v5e and v6e close only axes of 16; slices of
v2 and v3 are parts of one fixed torus, 16 x 16 and 32 x 32, and close axes of its full length.
v3:128x32 cannot be rented: it is four pods in a row, on which MLPerf v0.7 was run (Kumar et al.
2021, "Exploring the Limits of Concurrency in ML Training on Google TPUs").

TPU7x (Ironwood): cloud.google.com/tpu/docs/tpu7x. The clock follows from the multipliers of v6e in
each core. Links: the page's 1,200 GB/s per chip are of both directions, so half of them, divided by
six links, minus a tenth; Google's benchmarks (tpu-recipes, ironwood) measured 178.8 GB/s for a
gather over two axes. The two cores of a chip have a link that is six times as fast. The network is
100 Gbit/s per chip. Axes close as on v5p.
"""

import dataclasses
import functools
import math
import time
from typing import Any, Literal

_TERA = 1e12

# From device_kind in JAX to the peak by compute dtype.
PEAK_FLOPS = {
    "TPU v2": {"bfloat16": 23 * _TERA, "float32": 23 * _TERA},
    "TPU v3": {"bfloat16": 61.5 * _TERA, "float32": 61.5 * _TERA},
    "TPU v4": {"bfloat16": 275 * _TERA, "float32": 275 * _TERA},
    "TPU v5 lite": {"bfloat16": 197 * _TERA, "float32": 197 * _TERA},
    "TPU v5": {"bfloat16": 459 * _TERA, "float32": 459 * _TERA},
    "TPU v6 lite": {"bfloat16": 918 * _TERA, "float32": 918 * _TERA},
    "TPU7x": {"bfloat16": 1_153.5 * _TERA, "float32": 1_153.5 * _TERA},
    "Tesla V100-SXM2-16GB": {"float32": 15.7 * _TERA},
    "NVIDIA A100-SXM4-40GB": {"bfloat16": 312 * _TERA, "float32": 156 * _TERA},
    "NVIDIA A100-SXM4-80GB": {"bfloat16": 312 * _TERA, "float32": 156 * _TERA},
    "NVIDIA H100 80GB HBM3": {"bfloat16": 989.4 * _TERA, "float32": 494.7 * _TERA},
    "NVIDIA H200": {"bfloat16": 989.4 * _TERA, "float32": 494.7 * _TERA},
}


@dataclasses.dataclass(frozen=True)
class Tpu:
    """A generation of TPUs with the slices that can be rented."""

    kind: str  # device_kind in JAX
    devices_per_chip: int  # JAX devices on a chip
    cores_per_device: int  # tensor cores that work as one device
    clock_hz: float  # of a core
    memory_bytes: float  # of a chip
    memory_bandwidth: float  # of a chip, bytes per second
    link_bandwidth: float  # of one link between chips, one way, bytes per second
    published_link_bandwidth: float  # the same, the highest published rate
    # Bandwidth of a chip between slices, one way, bytes per second; None: not published.
    network_bandwidth: float | None
    # Length of the axes that close to rings; "cubes": all axes do if each is a multiple of 4.
    ring: int | Literal["cubes"]
    slices: tuple[str, ...]  # chips along each axis


_GIGA = 1e9
_V2 = ("2x2", "4x4", "8x8", "8x16", "16x16")
_V3 = (*_V2, "16x32", "32x32", "128x32")
_FLAT = ("1x1", "2x2", "2x4", "4x4", "4x8", "8x8", "8x16", "16x16")
_CUBES = ("2x2x1", "2x2x2", "2x2x4", "2x4x4", "4x4x4", "4x4x8", "4x8x8", "8x8x8", "8x8x16")


def _tpu(
    kind: str, devices: int, cores: int, ghz: float, gib: int, *rates: Any, **more: Any
) -> Tpu:
    """Returns a generation; `rates` are in GB/s, in the order of the class."""
    bytes_per_second = (rate and rate * _GIGA for rate in rates)
    return Tpu(kind, devices, cores, ghz * _GIGA, gib * 2**30, *bytes_per_second, **more)


TPUS = {
    "v2": _tpu("TPU v2", 2, 1, 0.7, 16, 700, 62, 62, None, ring=16, slices=_V2),
    "v3": _tpu("TPU v3", 2, 1, 0.94, 32, 900, 82, 100, None, ring=32, slices=_V3),
    "v4": _tpu("TPU v4", 1, 2, 1.05, 32, 1_200, 45, 50, None, ring="cubes", slices=_CUBES),
    "v5e": _tpu("TPU v5 lite", 1, 1, 1.5, 16, 819, 45, 50, 3.125, ring=16, slices=_FLAT),
    "v5p": _tpu("TPU v5", 1, 2, 1.75, 95, 2_765, 90, 100, 6.25, ring="cubes", slices=_CUBES),
    "v6e": _tpu("TPU v6 lite", 1, 1, 1.75, 32, 1_640, 90, 100, 12.5, ring=16, slices=_FLAT),
    "tpu7x": _tpu("TPU7x", 2, 1, 2.2, 192, 7_380, 90, 100, 12.5, ring="cubes", slices=_CUBES),
}


def chips(kind: str, devices: int) -> int | None:
    """Returns the number of chips, which is what one pays for; None for unknown devices."""
    if kind not in PEAK_FLOPS:
        return None
    devices_per_chip = {tpu.kind: tpu.devices_per_chip for tpu in TPUS.values()}
    return math.ceil(devices / devices_per_chip.get(kind, 1))


# A width that reaches the full rate of a few cores within hundredths of a second.
_WIDTH = 1024
_TRIES = 10


def peak_flops(compute_dtype: str) -> float | None:
    """Returns the peak operations per second of all devices of all processes.

    Known devices are looked up by the dtype of the products; for others it is None. For a CPU it is
    measured with a large float32 product, since virtual devices share cores.
    """
    import jax  # not at the top: the names of slices are needed without JAX

    device = jax.devices()[0]
    if device.platform == "cpu":
        return jax.process_count() * measured_matmul_flops()
    peak = PEAK_FLOPS.get(device.device_kind, {}).get(compute_dtype)
    return None if peak is None else peak * jax.device_count()


@functools.lru_cache
def measured_matmul_flops() -> float:
    """Measures operations per second of a float32 product, once per process; the best of ten."""
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
