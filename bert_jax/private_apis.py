"""Every use of a private name of another library, so that an upgrade can break this module only.

Each function says why no public name is enough. Imports are inside the functions, which keeps
`import bert_jax` and the start of the command line quick.
"""

import argparse
import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, cast

if TYPE_CHECKING:
    import jax
    from jax._src.clusters.slurm_cluster import SlurmCluster
    from jax._src.distributed import State
    from jax._src.lru_cache import LRUCache
    from rich.console import Console


class _SharedPatch:
    """A patch of a library. The first of its users applies it, and the last one undoes it."""

    def __init__(self):
        self._lock, self._users = threading.Lock(), 0
        self._applied = contextlib.ExitStack()

    @contextlib.contextmanager
    def use(self, patch: Callable[[], contextlib.AbstractContextManager[None]]) -> Iterator[None]:
        """Keeps the patch applied while the context is entered."""
        with self._lock:
            if self._users == 0:
                self._applied.enter_context(patch())
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._applied.close()


_client_patch, _flags_patch = _SharedPatch(), _SharedPatch()

# --- jax -----------------------------------------------------------------------------------------


def distributed_state() -> "State":
    """Returns jax's distributed state: number of this process, number of processes, client.

    The public functions initialize the devices, which must not happen before all processes are
    connected. No public function returns the coordinator's client or starts the preemption
    notifier.
    """
    from jax._src import distributed

    return distributed.global_state


def slurm_cluster() -> "type[SlurmCluster]":
    """Returns jax's class that detects a SLURM cluster by its environment variables.

    `jax.distributed.initialize` is public, but assigns one GPU to each process.
    """
    from jax._src.clusters.slurm_cluster import SlurmCluster

    return SlurmCluster


def compilation_cache_class() -> "type[LRUCache]":
    """Returns jax's compilation cache. The public settings choose its folder only."""
    from jax._src import lru_cache

    return lru_cache.LRUCache


def use_compilation_cache(cache: "type[LRUCache]") -> None:
    """Makes jax use this class as its compilation cache; there is no setting for it."""
    from jax._src import compilation_cache

    compilation_cache.LRUCache = cache


def hash_devices_only() -> None:
    """Makes the keys of jax's compilation cache depend on the devices instead of the topology.

    On CPUs, processes that own different devices have the same topology, so their keys would
    collide. No setting adds anything to the keys.
    """
    from jax._src import cache_key

    # The functions differ in a parameter's name, and jax passes it by position.
    cache_key._hash_accelerator_config = cache_key._hash_devices  # pyrefly: ignore[bad-assignment]


class CudnnInputs(NamedTuple):
    """The inputs of attention by cuDNN, in both passes."""

    query: "jax.Array"  # bfloat16 [B, Q, heads, width]
    key: "jax.Array"  # bfloat16 [B, K, heads, width]
    value: "jax.Array"  # as key
    bias: "jax.Array | None"  # bfloat16 [B or 1, 1, Q, K], added to the scores; has no gradient
    # int32 [B]: after so many queries and keys a row has padding; None if it is causal.
    lengths: "jax.Array | None"
    is_causal: bool  # whether query i attends to keys 0 to i only


def cudnn_version() -> int | None:
    """Returns the version of cuDNN that jax uses, such as 91002; None: jax has no CUDA.

    No public name returns it.
    """
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cudnn_get_version()


def cudnn_attention(inputs: CudnnInputs) -> "tuple[jax.Array, jax.Array]":
    """Returns softmax(query key / width^0.5 + bias) value, and the softmax's log-sum-exp.

    They are bfloat16 [B, Q, heads, width] and float32 [B, heads, Q]. The public
    `jax.nn.dot_product_attention` also computes a gradient of the bias, the largest of all results.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    arrays, compute = _cudnn_arrays(inputs), cast(Any, fused._dot_product_attention_fwd_rule)
    context, saved = compute(*arrays, *_cudnn_settings(inputs))
    return context, saved[len(arrays)]


def cudnn_attention_gradients(
    inputs: CudnnInputs, sums: "jax.Array", context: "jax.Array", gradient: "jax.Array"
) -> "tuple[jax.Array, jax.Array, jax.Array]":
    """Returns the gradients of query, key and value, given that of the context.

    `context` and `sums`, the log-sum-exp, are the results of `cudnn_attention`.
    """
    from jax._src.cudnn import fused_attention_stablehlo as fused

    saved, compute = (*_cudnn_arrays(inputs), sums, context), fused._dot_product_attention_bwd_rule
    return cast(Any, compute)(*_cudnn_settings(inputs), saved, gradient)[:3]


def _cudnn_arrays(inputs: CudnnInputs) -> "tuple[jax.Array, ...]":
    """Returns the arrays that jax's functions take first."""
    import jax.numpy as jnp

    absent = jnp.zeros(0, inputs.query.dtype)
    bias = absent if inputs.bias is None else inputs.bias
    lengths = (absent if inputs.lengths is None else inputs.lengths,) * 2  # of queries, of keys
    # Offsets of queries and of keys, two page tables.
    return inputs.query, inputs.key, inputs.value, bias, *lengths, *(absent,) * 4


def _cudnn_settings(inputs: CudnnInputs) -> tuple[Any, ...]:
    """Returns the settings that jax's functions take after the arrays, or before saved arrays."""
    from jax._src.cudnn.fused_attention_stablehlo import AttentionLayout, MaskType

    mask = MaskType.CAUSAL if inputs.is_causal else MaskType.NO_MASK
    mask = mask if inputs.lengths is None else MaskType.PADDING
    has_bias, layout = inputs.bias is not None, AttentionLayout.BTNH.value
    # Scale, seed and rate of dropout; whether there is a bias, and a gradient of it; mask, layout,
    # window, version; whether to return the sums.
    scale = inputs.query.shape[-1] ** -0.5
    version = cudnn_version() or 0
    return scale, 0, 0.0, (has_bias, False), mask, layout, None, version, False


# --- Orbax and etils -----------------------------------------------------------------------------


@contextlib.contextmanager
def preserve_operation_ids() -> Iterator[None]:
    """Leaves Orbax's counter of operations as on entry; no public name reads or sets it."""
    from orbax.checkpoint._src.futures import synchronization

    generator = synchronization.OperationIdGenerator
    operation_id = generator._operation_id
    try:
        yield
    finally:
        generator._operation_id = operation_id
        generator._operation_id_counter = itertools.count(operation_id + 1)


def use_bucket_client(make: Callable[[], Any]) -> contextlib.AbstractContextManager[None]:
    """Makes Orbax read and write gs:// through an fsspec file system that `make` returns.

    Orbax has no argument for it: Orbax uses etils, which opens the globally registered file system
    and keeps it. The patch also stops Orbax from reading the bucket's metadata, which a role with
    rights on objects only may not do. So in a bucket with a hierarchical namespace, empty folders
    of removed checkpoints remain.
    """
    return _client_patch.use(lambda: _replace_client(make()))


@contextlib.contextmanager
def _replace_client(client: Any) -> Iterator[None]:
    from etils.epath.backend import fsspec_backend
    from orbax.checkpoint._src.path import gcs_utils

    get_filesystem = fsspec_backend._get_filesystem
    has_namespace = gcs_utils.is_hierarchical_namespace_enabled
    # An attribute of the instance hides the class's cached method, and `del` shows it again.
    # pyrefly: ignore[bad-assignment]
    fsspec_backend._get_filesystem = lambda name: client if name == "gcs" else get_filesystem(name)
    gcs_utils.is_hierarchical_namespace_enabled = lambda path: False
    try:
        yield
    finally:
        del fsspec_backend._get_filesystem
        gcs_utils.is_hierarchical_namespace_enabled = has_namespace


# --- absl, gcsfs and rich -------------------------------------------------------------------------


def mark_flags_as_parsed() -> contextlib.AbstractContextManager[None]:
    """Marks absl's flags as parsed while the context is entered: Grain's workers require it.

    The public `unparse_flags` would also reset all flags to their defaults.
    """
    return _flags_patch.use(_mark_flags)


@contextlib.contextmanager
def _mark_flags() -> Iterator[None]:
    from absl import flags

    state = vars(flags.FLAGS)
    was_parsed = state["__flags_parsed"]
    state["__flags_parsed"] = True
    try:
        yield
    finally:
        state["__flags_parsed"] = was_parsed


def request_method_without_retries() -> Callable[..., Any]:
    """Returns gcsfs's method for a request without its decorator, which retries six times.

    The number of retries is a constant in the decorator.
    """
    from gcsfs.core import GCSFileSystem

    return GCSFileSystem._request.__wrapped__


def on_write_error(console: "Console", handle: Callable[[OSError], None]) -> None:
    """Makes a rich console discard output that it cannot write, and call `handle` with the error.

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
    """Makes a parser accept -4,-3 as a value; argparse accepts single negative numbers only."""
    parser._negative_number_matcher = re.compile(r"-[\d.]")
