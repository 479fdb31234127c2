"""What the benchmarks share: threads, statistics, and how a result is kept.

Imports nothing but the standard library, so that it runs in any environment. Time is CPU time of
the process: on a machine that others use, wall time says more about them.
"""

import datetime
import importlib.metadata
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"

_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
_PACKAGES = ("jax", "jaxlib", "numpy", "tokenizers", "orbax-checkpoint")


Memory = Literal["kept", "shipped"]
Device = Literal["cpu", "cuda"]

# Freed memory is kept, as `running.session` asks of the C library.
_KEPT = {
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1),
    "MALLOC_ARENA_MAX": "1",
}


def environment(threads: int, memory: Memory = "kept", device: Device = "cpu") -> dict[str, str]:
    """Environment variables that keep a process's libraries to this many threads.

    Args:
      threads: of each library.
      memory: `kept`, freed memory is kept; `shipped`, as the C library is shipped.
      device: on which jax computes.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if threads == 1 and _ONE_THREAD not in flags:
        flags = f"{flags} {_ONE_THREAD}".strip()
    return (
        os.environ
        | {
            "NPROC": str(threads),
            "OMP_NUM_THREADS": str(threads),
            "RAYON_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false" if threads == 1 else "true",
            "XLA_FLAGS": flags,
            "JAX_PLATFORMS": device,
        }
        | (_KEPT if memory == "kept" else {})
    )


def restart_with(threads: int) -> None:
    """Starts this benchmark again, on that many cores and with `environment`, unless it is so."""
    pin(threads)
    wanted = environment(threads)
    if wanted != dict(os.environ):
        module = sys.modules["__main__"].__spec__.name
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], wanted)


def pin(threads: int) -> None:
    """Keeps this process, and what it starts, to that many of its cores."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds of this process that a piece of work takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def cpu_seconds(pid: int) -> float:
    """CPU seconds that another process has used so far."""
    # The command's name, in brackets, may hold blanks.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """Least, median and greatest of some rounds."""
    return {
        "min": min(seconds),
        "median": statistics.median(seconds),
        "max": max(seconds),
        "rounds": len(seconds),
    }


def report(name: str, figures: dict[str, Any], details: dict[str, Any], kept: str) -> None:
    """Prints `name: key=value ...` and keeps it: see `keep`."""
    rounded = keep(name, figures, details, kept)
    print(f"{name}:", *(f"{key}={value}" for key, value in rounded.items()), flush=True)


def keep(name: str, figures: dict[str, Any], details: dict[str, Any], kept: str) -> dict[str, Any]:
    """Writes a result's file; returns the figures, rounded.

    Args:
      name: of the benchmark.
      figures: a few numbers.
      details: whatever they were computed from.
      kept: the file's folder; empty: `benchmarks/results`.
    """
    folder = pathlib.Path(kept) if kept else RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
    record = {"name": name, "figures": rounded, "made_on": machine(), "details": details}
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    return rounded


def machine() -> dict[str, Any]:
    """What a figure depends on."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    models = [line for line in cpuinfo.read_text().splitlines() if line.startswith("model name")]
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "changed_files": len(_git("status", "--porcelain", "--untracked-files=no").splitlines()),
        "python": platform.python_version(),
        "versions": versions(_PACKAGES),
        "cpu": models[0].partition(":")[2].strip() if models else platform.machine(),
        "cores": len(models),
        "load": os.getloadavg()[0],
    }


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions of those that are installed in this environment."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
