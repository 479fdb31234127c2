"""Compiled programs, kept on this machine: what starts again need not compile again."""

import contextlib
import hashlib
import json
import os
import re
import time

import jax
from etils import epath

from bert_jax.storage.workdir import cache_folder
from bert_jax.training.environment import environment

# Of compiled programs kept for one environment; the ones not used for longest go first.
_COMPILED_BYTES = 2**30
# An environment whose programs nobody used for a month.
_COMPILED_SECONDS = 30 * 24 * 3600
_ENVIRONMENT = re.compile(r"[0-9a-f]{16}")


def keep_compiled_programs() -> None:
    """Keeps what is compiled from now on in the user's cache folder, and finds it there.

    JAX_COMPILATION_CACHE_DIR names another place (a bucket that hosts share, say); empty: none.
    """
    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        return
    # A CPU's programs use what that very CPU can do; home folders are shared between machines.
    name = hashlib.sha256(json.dumps(environment()).encode()).hexdigest()[:16]
    forget_old_environments(cache_folder(), name)
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / name))
    jax.config.update("jax_compilation_cache_max_size", _COMPILED_BYTES)


def forget_old_environments(cache: epath.Path, ours: str) -> None:
    """Removes the programs of environments that were not used for long: of old versions, mostly."""
    with contextlib.suppress(OSError):  # another process may remove the same, or nothing is there
        for folder in cache.iterdir():
            if folder.name == ours or not _ENVIRONMENT.fullmatch(folder.name):
                continue
            # jax writes a file at each use of a program.
            used = max((path.stat().mtime for path in folder.iterdir()), default=0)
            if used < time.time() - _COMPILED_SECONDS:
                folder.rmtree()
