"""Compiled programs are found again, by all hosts."""

import importlib.util
import json
import os
import socket
import subprocess
import sys

import fake_gcs
import pytest
from etils import epath
from jax._src import cache_key
from small_run import settings

from bert_jax.training import environment as environment_lib

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs the [gcs] extra"
)

# Compiles two programs, one of which adds up over both processes; prints [asked for, found].
PROGRAM = """
import collections, json, sys
import jax, jax.numpy as jnp, numpy as np
from etils import epath
from bert_jax.config import Parallelism
from bert_jax.training import environment as environment_lib, peers
from bert_jax.training import mesh as mesh_lib

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
with peers.connected() as all_of_them:
    mesh = mesh_lib.make_mesh(Parallelism())
    environment_lib.keep_compiled_programs(epath.Path(sys.argv[1]))
    all_of_them.connect(mesh)
    rows = jax.make_array_from_callback(
        (2,), mesh_lib.batch_sharding(mesh), lambda index: np.ones(1, np.float32)
    )
    assert float(jax.jit(lambda x: jnp.sin(x).sum())(rows)) > 1.6
names = ("compile_requests_use_cache", "cache_hits")
print(json.dumps([counts[f"/jax/compilation_cache/{name}"] for name in names]))
"""


def test_programs_are_kept_in_the_bucket_of_the_run_else_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache_key, "_hash_accelerator_config", None)
    kept = {}
    monkeypatch.setattr(environment_lib.jax.config, "update", kept.__setitem__)
    environment_lib.keep_compiled_programs(None)
    here = kept["jax_compilation_cache_dir"]
    assert here.startswith(f"{tmp_path}/") and kept["jax_compilation_cache_max_size"] == 2**30
    environment_lib.keep_compiled_programs(epath.Path("gs://bucket/run/compiled"))
    there = kept["jax_compilation_cache_dir"]
    assert there == f"gs://bucket/run/compiled/{here.rpartition('/')[2]}"
    assert kept["jax_compilation_cache_max_size"] == -1, "else jax would lock the folder"


def both(tmp_path, folder: str, server: dict[str, str]) -> list[tuple[int, int]]:
    """Two hosts with a cache folder each; what each prints."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    processes = []
    for number in range(2):
        environment = os.environ | settings(1) | server
        environment |= {
            "JAX_COORDINATOR_ADDRESS": address,
            "JAX_NUM_PROCESSES": "2",
            "JAX_PROCESS_ID": str(number),
            "BERT_JAX_CACHE_DIR": str(tmp_path / f"host{number}"),
        }
        del environment["JAX_COMPILATION_CACHE_DIR"]
        command = [sys.executable, "-c", PROGRAM, folder]
        out = subprocess.PIPE
        processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
    said = [process.communicate(timeout=120) for process in processes]
    assert [p.returncode for p in processes] == [0, 0], said[0][1].decode() + said[1][1].decode()
    return [tuple(json.loads(out.splitlines()[-1])) for out, _ in said]


@pytest.mark.long
def test_hosts_that_share_a_bucket_compile_once(tmp_path):
    folder = "gs://bucket/run/compiled"
    with fake_gcs.serve() as (objects, server):
        first = both(tmp_path, folder, server)
        assert first == [(2, 0), (2, 0)]
        names = [name for name in objects.files() if name.startswith("run/compiled/")]
        assert names and not [name for name in names if "lock" in name]
        assert both(tmp_path, folder, server) == [(2, 2), (2, 2)]
        # A bucket that refuses costs the time to compile and no more.
        objects.fault = lambda *_: fake_gcs.Fault(403)
        assert both(tmp_path, folder, server) == [(2, 0), (2, 0)]
