"""From the command to the first step: compiled afresh, and compiled before.

`python -m benchmarks.start EXPERIMENT`. Runs the command `bert-jax pretrain` on prepared text in a
fresh workdir until it has shown its first step, and ends it. Cold: with an empty folder of compiled
programs; warm: with the one that the cold run filled. CPU seconds are those of the process and all
of its threads.
"""

import argparse
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks import measure


def main() -> None:
    """Measures cold and warm starts in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("experiment", nargs="?", default="experiments/tiny.py")
    parser.add_argument("--set", action="append", default=[], help="as of bert-jax")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        settings = [*flags.set, "run.log_every=1", f"run.corpus_dir={folder / 'corpus'}"]
        command = [sys.executable, "-m", "bert_jax.cli"]
        arguments = [flags.experiment, *(word for text in settings for word in ("--set", text))]
        prepare = [*command, "prepare", *arguments, "--workdir", str(folder / "prepared")]
        subprocess.run(prepare, cwd=measure.ROOT, stdout=subprocess.DEVNULL, check=True)
        for number in range(flags.rounds):
            for kind in ("cold", "warm"):
                workdir = folder / f"{kind}{number}"
                run = [*command, "pretrain", *arguments, "--workdir", str(workdir)]
                cpu, wall = first_step(run, folder / f"compiled{number}")
                seconds.setdefault(f"{kind}_cpu", []).append(cpu)
                seconds.setdefault(f"{kind}_wall", []).append(wall)
    found = {kind: measure.spread(values) for kind, values in seconds.items()}
    figures: dict[str, Any] = {f"{kind}_seconds": value["min"] for kind, value in found.items()}
    figures["cold_over_warm_cpu"] = found["cold_cpu"]["min"] / found["warm_cpu"]["min"]
    figures["cold_over_warm_cpu_median"] = found["cold_cpu"]["median"] / found["warm_cpu"]["median"]
    details = {"experiment": flags.experiment, "settings": flags.set, "seconds": seconds}
    measure.report("start", figures, details, flags.out)


def first_step(command: list[str], compiled: pathlib.Path) -> tuple[float, float]:
    """CPU and wall seconds until the command has shown its first step; it is ended then."""
    start = time.perf_counter()
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compiled),
        "PYTHONUNBUFFERED": "1",
    }
    process = subprocess.Popen(
        command, cwd=measure.ROOT, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout
    try:
        for line in process.stdout:
            if line.startswith("step 1/"):
                return measure.cpu_seconds(process.pid), time.perf_counter() - start
    finally:
        process.kill()
        process.communicate()
    raise RuntimeError(f"{' '.join(command)}: ended before its first step")


if __name__ == "__main__":
    main()
