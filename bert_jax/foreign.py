"""Private names of other libraries: the one module that uses them, so that an upgrade breaks one.

Each function says why no public name does. Imports are inside the functions, which keeps
`import bert_jax` and the start of the command line quick.
"""

import argparse
import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax._src.clusters.slurm_cluster import SlurmCluster
    from jax._src.distributed import State
    from jax._src.lru_cache import LRUCache
    from rich.console import Console


class _SharedChange:
    """A change of a library that is made for the first of its users and undone after the last."""

    def __init__(self):
        self._lock, self._users = threading.Lock(), 0
        self._made = contextlib.ExitStack()

    @contextlib.contextmanager
    def use(self, change: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        """Keeps the change while entered."""
        with self._lock:
            if self._users == 0:
                self._made.enter_context(change())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._made.close()


_bucket_clients, _flags = _SharedChange(), _SharedChange()

# --- jax -----------------------------------------------------------------------------------------


def distributed_state() -> "State":
    """Returns this process's number, the number of processes, and the coordinator's client.

    The public functions start the devices, which must not happen before all processes are there,
    and none gives the client or starts the notice of preemption.
    """
    from jax._src import distributed

    return distributed.global_state


def slurm_cluster() -> "type[SlurmCluster]":
    """Returns what reads SLURM's variables.

    `jax.distributed.initialize` is public, but assigns one GPU to each process.
    """
    from jax._src.clusters.slurm_cluster import SlurmCluster

    return SlurmCluster


def compilation_cache_class() -> "type[LRUCache]":
    """Returns the class that stores compiled programs: the public settings name only its folder."""
    from jax._src import lru_cache

    return lru_cache.LRUCache


def use_compilation_cache(cache: "type[LRUCache]") -> None:
    """Makes jax store compiled programs by this class, for which there is no setting."""
    from jax._src import compilation_cache

    compilation_cache.LRUCache = cache


def hash_devices_only() -> None:
    """Makes jax's key of a program name its devices instead of their topology.

    On CPUs the topology is the same in processes that own different devices. No setting adds
    anything to the key.
    """
    from jax._src import cache_key

    # The functions differ in a parameter's name, and jax passes it by position.
    cache_key._hash_accelerator_config = cache_key._hash_devices  # pyrefly: ignore[bad-assignment]


# --- Orbax and etils -----------------------------------------------------------------------------


def barrier(key: str, timeout_ms: int) -> None:
    """Waits at Orbax's barrier of a save, which a barrier of one's own has to call in the end."""
    from orbax.checkpoint._src.multihost import multihost

    multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


@contextlib.contextmanager
def operations_uncounted() -> Iterator[None]:
    """Resets Orbax's count of operations on exit; nothing public reads or sets it."""
    from orbax.checkpoint._src.futures import synchronization

    generator = synchronization.OperationIdGenerator
    operation_id = generator._operation_id
    try:
        yield
    finally:
        generator._operation_id = operation_id
        generator._operation_id_counter = itertools.count(operation_id + 1)


def bucket_client(make: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Has Orbax read and write gs:// through a file system of fsspec that `make` returns.

    Orbax takes no file system: it uses etils, which opens the one that is registered globally and
    keeps it. Orbax would also ask for the bucket itself, which rights on objects do not allow.
    (Where a bucket has folders, those of removed checkpoints stay, empty.)
    """
    return _bucket_clients.use(lambda: _replaced_client(make()))


@contextlib.contextmanager
def _replaced_client(client: Any) -> Iterator[None]:
    from etils.epath.backend import fsspec_backend
    from orbax.checkpoint._src.path import gcs_utils

    opened, asked = fsspec_backend._get_filesystem, gcs_utils.is_hierarchical_namespace_enabled
    # On the instance, whose class keeps the method. Its cache is not wanted here.
    # pyrefly: ignore[bad-assignment]
    fsspec_backend._get_filesystem = lambda name: client if name == "gcs" else opened(name)
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False
    try:
        yield
    finally:
        del fsspec_backend._get_filesystem
        gcs_utils.is_hierarchical_namespace_enabled = asked


# --- absl, gcsfs and rich -------------------------------------------------------------------------


def parsed_flags() -> contextlib.AbstractContextManager[None]:
    """Has absl's flags count as parsed while entered, as Grain's workers need it.

    `unparse_flags` is public, but gives all flags their defaults.
    """
    return _flags.use(_marked_flags)


@contextlib.contextmanager
def _marked_flags() -> Iterator[None]:
    from absl import flags

    known = vars(flags.FLAGS)
    before = known["__flags_parsed"]
    known["__flags_parsed"] = True
    try:
        yield
    finally:
        known["__flags_parsed"] = before


def single_request() -> Callable[..., Any]:
    """Returns gcsfs's method for one request, without its decorator, which tries six times.

    The number of attempts is a constant of the decorator.
    """
    from gcsfs.core import GCSFileSystem

    return GCSFileSystem._request.__wrapped__


def on_write_error(console: "Console", handle: Callable[[OSError], None]) -> None:
    """Calls `handle` if what a rich console shows cannot be written, and drops the text.

    The public hook, `on_broken_pipe`, is called for a broken pipe only.
    """
    write = console._check_buffer

    def check_buffer() -> None:
        try:
            write()
        except OSError as error:
            del console._buffer[:]
            handle(error)

    console._check_buffer = check_buffer


# --- argparse ------------------------------------------------------------------------------------


def accept_negative_lists(parser: argparse.ArgumentParser) -> None:
    """Makes a parser take -4,-3 for a value: only a single negative number is no flag to it."""
    parser._negative_number_matcher = re.compile(r"-[\d.]")
