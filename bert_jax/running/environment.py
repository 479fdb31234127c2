"""The code, machine and libraries that arithmetic depends on; compiled programs, kept for each."""

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
from bert_jax import foreign, system
from bert_jax.process import logger
from bert_jax.storage.workdir import cache_folder

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a step is made of."""
    # The metadata of a checkout says what it was when it was installed.
    of_others = {name: importlib.metadata.version(name) for name in _PACKAGES}
    return {"bert-jax": bert_jax.__version__, **of_others}


# Of the package, what no run depends on: a launcher and experiments, which a wheel holds, too.
_NOT_CODE = ("launch", "experiments")


@functools.cache
def code() -> str:
    """Returns a hash of this package's sources, names and bytes."""
    digest = hashlib.sha256()
    folder = pathlib.Path(bert_jax.__file__).parent
    for path in sorted(folder.rglob("*.py")):
        name = path.relative_to(folder)
        if name.parts[0] not in _NOT_CODE:
            digest.update(name.as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def environment() -> dict[str, Any]:
    """Returns what arithmetic depends on except the run: equal environments give equal bits."""
    settings = jax.config.values
    return {
        "code": code(),
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


def changes(saved: dict[str, Any]) -> str:
    """Returns in one line how the environment differs from a saved one; "" if it does not.

    What an earlier version has not saved is passed over.
    """
    now, then = _flat(environment()), _flat(saved)
    changed = [name for name, value in now.items() if name in then and then[name] != value]
    if not changed:
        return ""
    words = (f"{name} {then[name] or 'none'} -> {now[name] or 'none'}" for name in changed)
    effect = "batches exact, arithmetic to rounding"
    if "code" in changed:
        effect = "batches and arithmetic are those of the code that runs now"
    return f"{', '.join(words)}: {effect}"


def _flat(tree: dict[str, Any]) -> dict[str, str]:
    """Returns the values of nested objects as text, by their own names."""
    values = traverse_util.flatten_dict(tree).items()
    return {k[-1]: " x ".join(map(str, v)) if isinstance(v, list) else str(v) for k, v in values}


def _cpu_model() -> str:
    """Returns the CPU's name and what it can do: on rented machines the name alone says little."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            fields = dict(line.split(":", 1) for line in file.read().split("\n\n")[0].splitlines())
        cpu = {name.strip(): value.strip() for name, value in fields.items()}
        features = hashlib.sha256(cpu["flags"].encode()).hexdigest()[:8]
        return f"{cpu['model name']} ({features})"
    except (OSError, ValueError, KeyError):
        return platform.processor() or platform.machine()


# Of all compiled programs that are kept; the ones not used for longest go first.
_COMPILED_BYTES = 2**30


class CompilationCache(foreign.compilation_cache_class()):
    """Keeps compiled programs as jax does, but behind checksums: jax runs a damaged one."""

    environment = ""  # a hash of what programs depend on that jax's keys leave out

    def get(self, key: str) -> bytes | None:
        """Returns a program; None where there is none, and of a damaged one, which is removed."""
        entry = super().get(self._name(key))
        if entry is None:
            return None
        if hashlib.sha256(entry[32:]).digest() == entry[:32]:
            return entry[32:]
        path = self.path / f"{self._name(key)}-cache"
        path.unlink(missing_ok=True)
        logger.warning("%s: damaged, and removed; compiling again", path)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Keeps a program."""
        super().put(self._name(key), hashlib.sha256(value).digest() + value)

    def _name(self, key: str) -> str:
        return f"{key}-{self.environment}-sha256"


def keep_compiled_programs() -> None:
    """Keeps what is compiled from now on, and finds what was compiled before, on this machine.

    Those who can write a program can run code: none is read from a bucket or a workdir. Of several
    processes jax lets the first alone write. JAX_COMPILATION_CACHE_DIR names another place than the
    user's cache folder; empty: none.
    """
    foreign.use_compilation_cache(CompilationCache)
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    # What a program is jax knows by itself, whichever code has built it.
    of = {name: value for name, value in environment().items() if name != "code"}
    if jax.default_backend() == "cpu":
        foreign.hash_devices_only()  # the environment says what of the machine matters
    else:
        # A CPU's programs use what that very CPU can do; hosts of other devices share theirs.
        of = {name: value for name, value in of.items() if name not in ("cpu", "threads")}
    CompilationCache.environment = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:16]
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))
    jax.config.update("jax_compilation_cache_max_size", _COMPILED_BYTES)
