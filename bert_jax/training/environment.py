"""What arithmetic depends on beside the run."""

import hashlib
import importlib.metadata
import os
import platform
from typing import Any

import jax

from bert_jax import system

_PACKAGES = ("bert-jax", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Of the packages that a step is made of."""
    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def environment() -> dict[str, Any]:
    """What arithmetic depends on beside the run: equal environments give equal bits."""
    return {
        "versions": versions(),
        "python": platform.python_version(),
        "devices": [jax.devices()[0].device_kind, jax.device_count()],
        "processes": jax.process_count(),
        "cpu": _cpu_model(),
        "threads": system.cores(),
        "flags": {
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "jax_threefry_partitionable": jax.config.jax_threefry_partitionable,
            "jax_default_matmul_precision": str(jax.config.jax_default_matmul_precision),
        },
    }


def _cpu_model() -> str:
    """Its name and what it can do: on rented machines the name alone says little."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines())
        found = {name.strip(): value.strip() for name, value in fields.items()}
        features = hashlib.sha256(found["flags"].encode()).hexdigest()[:8]
        return f"{found['model name']} ({features})"
    except (OSError, ValueError, KeyError):
        return platform.processor() or platform.machine()
