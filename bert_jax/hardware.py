"""What devices can do at most: the denominators of utilisation.

Peaks are dense, per jax device, in floating-point operations a second, as the makers publish them:
Cloud TPU's system architecture pages, NVIDIA's data sheets of the V100, A100, H100 and H200 (SXM).
A jax device is a chip, but on TPU v2 and v3 one of a chip's two cores. Products of float32 are
multiplied as XLA does by default: in bfloat16 on a TPU, in TF32 on a GPU from the A100 on.
"""

import time

import jax
import jax.numpy as jnp

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

# Wide enough for the full rate of a few cores, and over in hundredths of a second.
_WIDTH = 1024
_TRIES = 10


def peak_flops(compute_dtype: str) -> float | None:
    """The most operations a second that all devices of all processes can do.

    Known devices are looked up. On a CPU it is what a large float32 product reaches now, whatever
    the compute dtype: its virtual devices share the cores.

    Args:
      compute_dtype: of the matrix products, "float32" or "bfloat16".

    Returns:
      None for a device that is not in the table: nothing is guessed.
    """
    device = jax.devices()[0]
    if device.platform == "cpu":
        return jax.process_count() * measured_matmul_flops()
    peak = PEAK_FLOPS.get(device.device_kind, {}).get(compute_dtype)
    return None if peak is None else peak * jax.device_count()


def measured_matmul_flops(width: int = _WIDTH, dtype: str = "float32") -> float:
    """Operations a second of a square product on one device of this process, the best of a few.

    Args:
      width: of the two matrices.
      dtype: of the two matrices; sums are float32.
    """
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
