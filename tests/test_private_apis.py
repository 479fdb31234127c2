"""Private names of other libraries are used in one module, and are what it takes them for."""

import argparse
import ast
import contextlib
import errno
import functools
import io
import threading
import types

import pytest
from test_imports import MODULES

from bert_jax import private_apis

PRIVATE_APIS = "bert_jax.private_apis"
# What only looks private: of named tuples, of `os`.
PUBLIC = {"_replace", "_asdict", "_fields", "_exit"}


def private_names(tree: ast.AST, own: set[str]) -> set[str]:
    """The private names in a module that the package does not define itself."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            name = node.attr
            is_private = name == "__wrapped__" or (name.startswith("_") and name[:2] != "__")
            if is_private and name not in own | PUBLIC:
                found.add(ast.unparse(node))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            base = getattr(node, "module", None) or ""
            for alias in node.names:
                parts = f"{base}.{alias.name}".strip(".").split(".")
                if parts[0] not in ("__future__", "bert_jax") and any(p[0] == "_" for p in parts):
                    found.add(".".join(parts))
    return found


def defined(tree: ast.AST) -> set[str]:
    """The private names that a module defines: functions, classes, variables, attributes."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found |= {node.attr} if ast.unparse(node.value) == "self" else set()
    return found


def users(sources: dict[str, str]) -> dict[str, set[str]]:
    """The private names of others in each module but `private_apis`."""
    trees = {name: ast.parse(text) for name, text in sources.items() if name != PRIVATE_APIS}
    own = set().union(*map(defined, trees.values()))
    found = {name: private_names(tree, own) for name, tree in trees.items()}
    return {name: names for name, names in found.items() if names}


def test_no_other_module_uses_private_names():
    assert not users({name: path.read_text() for name, path in MODULES.items()})


# --- One test for each function ------------------------------------------------------------------


def test_distributed_state_knows_this_process():
    state = private_apis.distributed_state()
    assert (state.process_id, state.num_processes, state.client) == (0, 1, None)
    assert callable(state.initialize_preemption_sync_manager)


def test_slurm_cluster_reads_variables(monkeypatch):
    step = private_apis.slurm_cluster()
    assert not step.is_env_present()
    settings = {"SLURM_JOB_ID": "70000", "SLURM_STEP_NODELIST": "host[1-2]", "SLURM_NTASKS": "2"}
    settings |= {"SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "2"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert step.is_env_present()
    assert (step.get_process_id(), step.get_process_count()) == (1, 2)
    assert step.get_coordinator_address(None, "1234") == "host1:1234"


def test_compiled_programs_are_kept_by_a_class_of_ours(tmp_path, monkeypatch):
    from jax._src import compilation_cache

    class Cache(private_apis.compilation_cache_class()):
        pass

    monkeypatch.setattr(compilation_cache, "LRUCache", None)
    private_apis.use_compilation_cache(Cache)
    cache, _ = compilation_cache.get_file_cache(str(tmp_path))
    assert isinstance(cache, Cache)
    cache.put("a", b"program")
    assert cache.get("a") == b"program" and cache.get("b") is None
    assert [*cache.path.glob("a-cache")]


def test_keys_of_programs_name_devices(monkeypatch):
    import hashlib

    import jax
    import numpy as np
    from jax._src import cache_key

    monkeypatch.setattr(cache_key, "_hash_accelerator_config", None)
    private_apis.hash_devices_only()

    def key(devices):
        digest = hashlib.sha256()
        cache_key._hash_accelerator_config(digest, np.array(devices))
        return digest.digest()

    devices = jax.devices()
    assert key(devices) == key(devices)
    renamed = [types.SimpleNamespace(device_kind="another", id=5)]
    assert key(renamed) != key(devices)


def test_no_cudnn_has_no_version():
    assert private_apis.cudnn_version() is None


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_attention_by_cudnn_is_asked_for_without_a_gradient_of_the_bias(has_bias, is_causal):
    import jax
    import jax.numpy as jnp

    vector, bias = jnp.zeros((2, 8, 1, 16), jnp.bfloat16), jnp.zeros((2, 1, 8, 8), jnp.bfloat16)
    lengths = None if is_causal else jnp.ones(2, jnp.int32)
    inputs = private_apis.CudnnInputs(*[vector] * 3, bias if has_bias else None, lengths, is_causal)

    def run(function, *arguments):
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()

    name = "fmhaScaleBiasSoftmax" if has_bias else "fmhaSoftmax"
    mask = "CAUSAL" if is_causal else "PADDING"
    forward = run(lambda: private_apis.cudnn_attention(inputs))
    context, sums = jax.eval_shape(lambda: private_apis.cudnn_attention(inputs))
    assert (context.shape, sums.shape, sums.dtype) == (vector.shape, (2, 1, 8), jnp.float32)
    gradients = functools.partial(private_apis.cudnn_attention_gradients, inputs)
    backward = run(gradients, jnp.zeros((2, 1, 8)), vector, vector)
    for text, name_of_call in ((forward, name), (backward, f"{name}Backward")):
        assert text.count("__cudnn$") == 1 and f"@__cudnn${name_of_call}(" in text
        assert f"mask_type\\22: \\22{mask}\\22" in text
    results = backward.partition("__cudnn$")[2].splitlines()[0].rpartition("->")[2]
    assert results.count("tensor<") == 4  # three gradients and the workspace


def test_operations_are_not_counted():
    from orbax.checkpoint._src.futures.synchronization import OperationIdGenerator

    before = OperationIdGenerator.next_operation_id()
    with pytest.raises(KeyError), private_apis.preserve_operation_ids():
        OperationIdGenerator.next_operation_id()
        raise KeyError
    assert OperationIdGenerator.get_current_operation_id() == str(before)
    assert OperationIdGenerator.next_operation_id() == before + 1


def test_bucket_client_is_etils_and_orbax_s_until_the_last_user_has_left():
    fsspec = pytest.importorskip("fsspec")
    from etils import epath
    from etils.epath.backend import fsspec_backend
    from orbax.checkpoint._src.path import gcs_utils

    asked = gcs_utils.is_hierarchical_namespace_enabled
    files = fsspec.filesystem("memory")
    files.pipe_file("memory://bucket/a", b"text")
    client = types.SimpleNamespace(exists=lambda path: path == "gs://bucket/a")
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        first.enter_context(private_apis.use_bucket_client(lambda: client))
        second.enter_context(private_apis.use_bucket_client(lambda: None))
        first.close()
        assert epath.Path("gs://bucket/a").exists() and not epath.Path("gs://bucket/b").exists()
        assert not gcs_utils.is_hierarchical_namespace_enabled("gs://bucket/a")
    assert "_get_filesystem" not in vars(fsspec_backend)
    assert gcs_utils.is_hierarchical_namespace_enabled is asked
    assert epath.Path(__file__).exists()


def test_flags_of_absl_count_as_parsed():
    from absl import flags

    before = flags.FLAGS.is_parsed()
    with private_apis.mark_flags_as_parsed(), private_apis.mark_flags_as_parsed():
        assert flags.FLAGS.is_parsed()
    assert flags.FLAGS.is_parsed() == before


def test_single_request_is_gcsfs_s_without_its_attempts():
    core = pytest.importorskip("gcsfs.core")
    assert private_apis.request_method_without_retries().__name__ == "_request"
    assert private_apis.request_method_without_retries() is not core.GCSFileSystem._request
    assert {"_call", "_request", "_set_session"} <= {*dir(core.GCSFileSystem)}  # as gcs.py has it


@pytest.mark.parametrize("thread", [False, True])
def test_what_a_console_cannot_write_is_handled(thread):
    from rich.console import Console

    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "full")

    console, errors = Console(file=Full()), []
    private_apis.on_write_error(console, errors.append)

    def show():
        console.print("one")
        console.file = io.StringIO()
        console.print("two")

    if thread:
        (worker := threading.Thread(target=show)).start()
        worker.join()
    else:
        show()
    assert [error.errno for error in errors] == [errno.ENOSPC]
    assert console.file.getvalue() == "two\n"


def test_a_list_of_negative_numbers_is_a_value():
    parser = argparse.ArgumentParser()
    parser.add_argument("--layers")
    private_apis.accept_negative_lists(parser)
    assert parser.parse_args(["--layers", "-4,-3"]).layers == "-4,-3"
