"""From the command to the first step: compiled afresh, and compiled before.

`python -m benchmarks.start EXPERIMENT`. Runs the command `bert-jax pretrain` on prepared text in a
fresh workdir until it has shown its first step, and ends it. Cold: with an empty folder of compiled
programs; warm: with the one that the cold run filled. CPU seconds are those of the process and all
of its threads.
"""

import itertools
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from benchmarks import measure


def main() -> None:
    """Measures cold and warm starts in turns."""
    parser = measure.parser(__doc__, set=([], "as of bert-jax"), rounds=3)
    parser.add_argument("experiment", nargs="?", default="experiments/tiny.py")
    flags = parser.parse_args()
    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        settings = [*flags.set, "run.log_every=1", f"run.corpus_dir={folder / 'corpus'}"]
        given = [flags.experiment, *(word for text in settings for word in ("--set", text))]

        def command(verb: str, workdir: str) -> list[str]:
            words = [verb, *given, "--workdir", str(folder / workdir)]
            return [sys.executable, "-m", "bert_jax.cli", *words]

        subprocess.run(command("prepare", "0"), cwd=measure.ROOT, check=True)
        for number, kind in itertools.product(range(flags.rounds), ("cold", "warm")):
            run = command("pretrain", f"{kind}{number}")
            for clock, value in first_step(run, folder / f"compiled{number}").items():
                seconds.setdefault(f"{kind}_{clock}", []).append(value)
    best, median = measure.times_faster(seconds["warm_cpu"], seconds["cold_cpu"])
    figures = {f"{kind}_seconds": min(values) for kind, values in seconds.items()}
    figures |= {"cold_over_warm_cpu": best, "cold_over_warm_cpu_median": median}
    details = {"experiment": flags.experiment, "settings": flags.set, "seconds": seconds}
    measure.report("start", figures, details, flags.out)


def first_step(command: list[str], compiled: pathlib.Path) -> dict[str, float]:
    """CPU and wall seconds until the command has shown its first step; it is ended then."""
    start = time.perf_counter()
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    environment["JAX_COMPILATION_CACHE_DIR"] = str(compiled)
    with subprocess.Popen(
        command, cwd=measure.ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        for line in process.stdout or ():
            if line.startswith("step 1/"):
                cpu, wall = measure.cpu_seconds(process.pid), time.perf_counter() - start
                process.kill()
                return {"cpu": cpu, "wall": wall}
    raise RuntimeError(f"{' '.join(command)}: ended before its first step")


if __name__ == "__main__":
    main()
