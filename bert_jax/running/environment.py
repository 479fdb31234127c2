"""The code, machine and libraries that arithmetic depends on, and a cache of compiled programs."""

import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import platform
from typing import Any

import jax
from flax import traverse_util

import bert_jax
from bert_jax import private_apis, system
from bert_jax.process import logger
from bert_jax.storage.workdir import cache_folder

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Returns the versions of the packages that compute a step."""
    # Not by the metadata of bert_jax: in a checkout they hold the version that was installed.
    others = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"bert-jax": bert_jax.__version__, **others}


# Folders of the package that no run depends on.
_NOT_CODE = ("launch", "experiments")


@functools.cache
def code_hash() -> str:
    """Returns a hash of the names and bytes of this package's source files."""
    digest = hashlib.sha256()
    folder = pathlib.Path(bert_jax.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if name.parts[0] not in _NOT_CODE:
            digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def environment() -> dict[str, Any]:
    """Returns what a run's arithmetic depends on: equal environments give equal bits."""
    settings = jax.config.values
    return {
        "code": code_hash(),
        "versions": versions(),
        "python": platform.python_version(),
        "devices": [jax.devices()[0].device_kind, jax.device_count()],
        "processes": jax.process_count(),
        "cpu": _cpu_model(),
        "threads": system.cores(),
        "flags": {
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
            "jax_threefry_partitionable": settings["jax_threefry_partitionable"],
            "jax_default_matmul_precision": str(settings["jax_default_matmul_precision"]),
        },
    }


def describe_changes(saved: dict[str, Any]) -> str:
    """Returns one line about how the environment differs from a saved one; "" if it does not.

    Ignores names that an earlier version did not save.
    """
    new, old = _flatten(environment()), _flatten(saved)
    changed = [name for name, value in new.items() if name in old and old[name] != value]
    if not changed:
        return ""
    descriptions = (f"{name} {old[name] or 'none'} -> {new[name] or 'none'}" for name in changed)
    effect = "batches exact, arithmetic to rounding"
    if "code" in changed:
        effect = "batches and arithmetic are those of the code that runs now"
    return f"{', '.join(descriptions)}: {effect}"


def _flatten(tree: dict[str, Any]) -> dict[str, str]:
    """Returns the leaves of nested dicts as text, by the innermost key."""
    values = traverse_util.flatten_dict(tree).items()
    return {k[-1]: " x ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in values}


def _cpu_model() -> str:
    """Returns the CPU's name and a hash of its features, which the name alone does not tell."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines())
        cpu = {name.strip(): value.strip() for name, value in fields.items()}
        features = hashlib.sha256(cpu["flags"].encode()).hexdigest()[:8]
        return f"{cpu['model name']} ({features})"
    except (OSError, ValueError, KeyError):
        return platform.processor() or platform.machine()


# Largest size of the cache; programs that were not used for longest are removed first.
_COMPILED_BYTES = 2**30


class CompilationCache(private_apis.compilation_cache_class()):
    """JAX's cache of compiled programs, with checksums: JAX would run a damaged program."""

    environment = ""  # a hash of what programs depend on that JAX's keys leave out

    def get(self, key: str) -> bytes | None:
        """Returns a program; None if it is missing, or damaged and removed."""
        entry = super().get(self._name(key))
        if entry is None:
            return None
        if hashlib.sha256(entry[32:]).digest() == entry[:32]:
            return entry[32:]
        path = self.path / f"{self._name(key)}-cache"
        path.unlink(missing_ok=True)
        logger.warning("%s: damaged, removed; compiling the program again", path)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Saves a program."""
        super().put(self._name(key), hashlib.sha256(value).digest() + value)

    def _name(self, key: str) -> str:
        return f"{key}-{self.environment}-sha256"


def enable_compilation_cache() -> None:
    """Saves compiled programs in the user's cache folder and loads them from there.

    Who can write a program there can run code, so the cache is never in a bucket or a workdir. With
    several processes, JAX lets only the first one write. JAX_COMPILATION_CACHE_DIR names another
    folder; an empty value disables the cache.
    """
    private_apis.use_compilation_cache(CompilationCache)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    # JAX's keys hash the program itself, so the code that built the program does not matter.
    facts = {name: value for name, value in environment().items() if name != "code"}
    if jax.default_backend() == "cpu":
        private_apis.hash_devices_only()  # the facts describe this machine
    else:
        # Programs of GPUs and TPUs do not depend on the CPU of their host.
        facts = {name: value for name, value in facts.items() if name not in ("cpu", "threads")}
    CompilationCache.environment = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_compilation_cache_max_size", _COMPILED_BYTES)
