"""Compiled programs are found again, on this machine alone, and a damaged one is not run."""

import json
import pathlib
import re
import sys

import pytest
from jax._src import cache_key, compilation_cache
from small_run import on_two

from bert_jax.running import environment as environment_lib

# Compiles two programs, one of which adds up over both processes; prints [asked for, found].
PROGRAM = """
import collections, json
import jax, jax.numpy as jnp, numpy as np
from bert_jax.config import Parallelism
from bert_jax.distributed import peers\nfrom bert_jax.running import environment as environment_lib
from bert_jax.training import mesh as mesh_lib

counts = collections.Counter()
jax.monitoring.register_event_listener(lambda event, **_: counts.update([event]))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
with peers.connect_processes() as all_of_them:
    mesh = mesh_lib.make_mesh(Parallelism())
    environment_lib.enable_compilation_cache()
    all_of_them.connect_devices(mesh)
    rows = jax.make_array_from_callback(
        (2,), mesh_lib.batch_sharding(mesh), lambda index: np.ones(1, np.float32)
    )
    assert float(jax.jit(lambda x: jnp.sin(x).sum())(rows)) > 1.6
names = ("compile_requests_use_cache", "cache_hits")
print(json.dumps([counts[f"/jax/compilation_cache/{name}"] for name in names]))
"""


def flip(entry: pathlib.Path, bit: int) -> None:
    content = bytearray(entry.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    entry.write_bytes(content)


def test_programs_are_kept_on_this_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cache_key, "_hash_accelerator_config", None)
    kept = {}
    monkeypatch.setattr(environment_lib.jax.config, "update", kept.__setitem__)
    environment_lib.enable_compilation_cache()
    assert kept["jax_compilation_cache_dir"].startswith(f"{tmp_path}/")
    assert kept["jax_compilation_cache_max_size"] == 2**30


@pytest.mark.parametrize("damage", [0, 300, "cut", "empty"])
def test_a_damaged_program_is_named_removed_and_kept_anew(damage, tmp_path, capsys):
    """A bit of the checksum, of the program, and the last."""
    environment_lib.enable_compilation_cache()
    programs, _ = compilation_cache.get_file_cache(str(tmp_path))
    program = bytes(range(200))
    for _ in range(2):
        programs.put("step", program)
        assert programs.get("step") == program
        (entry,) = tmp_path.glob("*-cache")
        if isinstance(damage, int):
            flip(entry, damage % (8 * entry.stat().st_size))
        else:
            entry.write_bytes(entry.read_bytes()[: 100 * (damage == "cut")])
        assert programs.get("step") is None
        assert capsys.readouterr().err.count(str(entry)) == 1
        assert programs.get("step") is None and not entry.exists()


def test_an_entry_without_a_checksum_is_not_read(tmp_path):
    """One that jax wrote for itself."""
    (tmp_path / "step-cache").write_bytes(bytes(100))
    assert environment_lib.CompilationCache(str(tmp_path), max_size=-1).get("step") is None


def both(tmp_path) -> list[tuple[int, int]]:
    """Two processes with one cache folder; what each prints."""
    cache = "env", "-u", "JAX_COMPILATION_CACHE_DIR", f"BERT_JAX_CACHE_DIR={tmp_path}"
    said = on_two(*cache, sys.executable, "-c", PROGRAM)
    numbered = sorted(line for line in said.splitlines() if re.match(r"\[\d\] \[\d", line))
    return [tuple(json.loads(line[4:])) for line in numbered]


@pytest.mark.long
def test_processes_of_a_machine_compile_once_and_again_what_is_damaged(tmp_path):
    # The second process finds what the first, which alone writes, has compiled by then.
    assert both(tmp_path)[0] == (2, 0)
    assert both(tmp_path) == [(2, 2), (2, 2)]
    entries = sorted(tmp_path.rglob("*-cache"))
    assert len(entries) == 2
    for entry in entries:
        flip(entry, 4 * entry.stat().st_size)
    assert both(tmp_path)[0] == (2, 0)
    assert both(tmp_path) == [(2, 2), (2, 2)]
