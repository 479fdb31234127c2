import ctypes
import gc
import os
import pathlib
import shutil
import signal
import sys

import pytest

TESTS = pathlib.Path(__file__).parent
sys.path.insert(0, str(TESTS))

import damage  # noqa: E402
import small_run  # noqa: E402

# Before jax starts. Four devices on a CPU: what shards here shards on a pod.
os.environ.update(small_run.settings(devices=4))
# A path that is not here may be the name of a model: no test asks the real hub for it.
os.environ["HF_HUB_OFFLINE"] = "1"

from bert_jax.process import prepare_process  # noqa: E402
from bert_jax.running.environment import enable_compilation_cache  # noqa: E402

# Tests call what the command line calls. Those of the library start processes of their own.
prepare_process()
# What this process compiles is found by the commands that it starts.
enable_compilation_cache()
# Programs that jax keeps are many small objects, and looking through them again and again for
# garbage takes a tenth of the time.
gc.set_threshold(100_000, 20, 50)
# A shell's background jobs ignore Ctrl-C, and under nohup the end of the terminal; so would the
# commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The files that take minutes: begun first, so that none is left alone at the end.
LONGEST = (
    *("running/test_resume", "distributed/test_processes", "tools/verify/test_verify_resume"),
    *("running/test_divergence", "running/test_trainer", "storage/test_fault_table"),
    *("tools/conformance/test_rules", "tasks/test_runs", "interop/test_init_from"),
    *("training/test_step", "training/test_sharding", "checkpoints/test_checkpoint"),
    *("tasks/test_predict", "launch/test_rehearsal", "test_bucket"),
)


# Bytes that a worker may take before it gives back what it can: after a file, for it takes half a
# second to look for them, and within one. And what it had then.
SOME, MUCH = 250_000_000, 500_000_000
kept = {"bytes": 0}


def pytest_collection_modifyitems(items):
    """Keeps the order within each file."""
    place = {TESTS / f"{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))


@pytest.fixture(scope="module", autouse=True)
def _programs_dropped():
    """Gives back, after a file, the memory of programs: a worker stays below 2 GB."""
    yield
    if resident() > kept["bytes"] + SOME:
        give_back()


@pytest.fixture(autouse=True)
def _not_too_many_programs():
    """The same within a file, once its tests have left many."""
    yield
    if resident() > kept["bytes"] + MUCH:
        give_back()


def resident() -> int:
    """Bytes of memory of this process; 0 where nobody says."""
    if sys.platform != "linux":
        return 0
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def give_back():
    """Without it jax keeps every program, and the C library every page that one was compiled in."""
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()
        if sys.platform == "linux":
            ctypes.CDLL("libc.so.6").malloc_trim(0)
    kept["bytes"] = resident()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error):
    """Says why a worker ended; the test that it was at is reported as failed."""
    if error:
        code = node.gateway._io.popen.wait()
        why = (
            "killed, as the kernel does when memory is short" if code == -signal.SIGKILL else error
        )
        print(f"\nworker {node.gateway.id} ended with {code}: {why}", file=sys.stderr)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A folder with text, an experiment, its corpus and its finished run."""
    import broken  # after jax's settings

    return broken.finished_run(tmp_path_factory.mktemp("finished"))


@pytest.fixture
def copy_of_run(finished_run, tmp_path, monkeypatch):
    """A copy of the finished run, to be broken; the current folder."""
    shutil.copytree(finished_run, tmp_path / "copy")
    monkeypatch.chdir(tmp_path / "copy")
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    return tmp_path / "copy"


@pytest.fixture
def run(copy_of_run):
    """A finished run to be broken, with checkpoints 16, 20 and 22."""
    return copy_of_run / "run"


@pytest.fixture(scope="session")
def bucket_server():
    """One for all tests of a process: clients keep their connections."""
    pytest.importorskip("gcsfs")
    import fake_gcs
    import fsspec

    with fake_gcs.serve() as (server, environment):
        yield server, environment, fsspec.config.conf


@pytest.fixture
def objects(bucket_server, tmp_path, monkeypatch):
    """An empty server of buckets that works as it should, a cache of its own, and short waits."""
    import math
    import types

    from bert_jax.storage import buckets, retry

    import gcsfs.retry  # isort: skip

    server, environment, config = bucket_server
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    # This process has read that part of its environment before.
    monkeypatch.setitem(config.setdefault("gs", {}), "token", "anon")
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(buckets, "_granted", set())
    monkeypatch.setattr(retry, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(retry, "LONGEST_WAIT", 0.05)
    monkeypatch.setattr(retry.control, "deadline", math.inf)

    async def briefly(seconds):
        del seconds

    monkeypatch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=briefly))
    server.reset()
    yield server
    server.reset()


def pytest_terminal_summary(terminalreporter):
    """How many damaged inputs `make fuzz` tried, of each kind."""
    if damage.EXAMPLES:
        for kind, count in sorted(damage.TRIED.items()):
            terminalreporter.write_line(f"{count:7} {kind}")
        terminalreporter.write_line(f"{sum(damage.TRIED.values()):7} damaged inputs")
