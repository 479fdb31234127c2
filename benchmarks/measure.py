"""What the benchmarks share: flags, turns, processes that answer, and how a result is kept.

Imports nothing but the standard library, so that it runs in any environment. Time is CPU time of
the process: on a machine that others use, wall time says more about them.
"""

import argparse
import contextlib
import datetime
import gzip
import importlib.metadata
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

Ask = Callable[..., Any]
Memory = Literal["kept", "shipped"]

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SAMPLE = f"jsonl:{ROOT / 'experiments' / 'sample_text' / 'speeches.jsonl.gz'}"
TORCH = ".venv-torch/bin/python", "with torch"  # as a flag's default

_FILES = ROOT / "bert_jax" / "tools" / "conformance" / "files"
_VOCABULARY = _FILES / "bert_base_uncased_vocab.txt.gz"
_ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# Freed memory is kept, as `running.session` asks of the C library.
_KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_ARENA_MAX": "1"}
_KEPT |= {"MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)}


def parser(doc: str | None, **options: Any) -> argparse.ArgumentParser:
    """Returns a parser of `--out` and of these flags: `some_name=5` is `--some-name`.

    `(5, "of both")` says what for; a list takes what is given several times.
    """
    made = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    options["out"] = "", "folder of the result; default: results/"
    for name, option in options.items():
        default, about = option if isinstance(option, tuple) else (option, None)
        how = {"action": "append"} if default == [] else {"type": type(default)}
        made.add_argument(f"--{name.replace('_', '-')}", default=default, help=about, **how)
    return made


def environment(threads: int, memory: Memory = "kept", device: str = "cpu") -> dict[str, str]:
    """Environment variables of a process: threads of its libraries, its memory, jax's device.

    Freed memory is kept, or given back as the C library is shipped.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if threads == 1 and _ONE_THREAD not in flags:
        flags = f"{flags} {_ONE_THREAD}".strip()
    ours = dict.fromkeys(("NPROC", "OMP_NUM_THREADS", "RAYON_NUM_THREADS"), str(threads))
    ours |= {"TOKENIZERS_PARALLELISM": "false" if threads == 1 else "true"}
    ours |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": device}
    return os.environ | ours | (_KEPT if memory == "kept" else {})


def restart_with(threads: int, memory: Memory = "kept", device: str = "cpu") -> None:
    """Starts this benchmark again, on that many cores and with `environment`, unless it is so.

    What it starts is kept to the same cores.
    """
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-threads:])
    wanted = environment(threads, memory, device)
    if wanted != dict(os.environ):
        module = sys.modules["__main__"].__spec__.name
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]], wanted)


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    """CPU and wall seconds of this process that a piece of work takes."""
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def in_turns(turns: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list]:
    """What each of some pieces of work returns, round by round, which is shown.

    Every other round goes backwards, so that none always follows the same one.
    """
    found: dict[str, list] = {name: [] for name in turns}
    for number in range(rounds):
        for name in list(turns)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(turns[name]())
            print(f"round {number}, {name}: {found[name][-1]}", flush=True)
    return found


def times_faster(ours: Sequence[float], *peers: Sequence[float]) -> tuple[float, float]:
    """The fastest peer's seconds over ours: best over best, median over median."""
    best, median = (min(map(of, peers)) / of(ours) for of in (min, statistics.median))
    return best, median


def cpu_seconds(pid: int) -> float:
    """CPU seconds that another process has used so far."""
    # The command's name, in brackets, may hold blanks.
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident(pid: int) -> tuple[float, float]:
    """Bytes that a process and those that it started hold, and have mapped from files."""
    held, mapped = 0.0, 0.0
    with contextlib.suppress(OSError):  # it has ended
        lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
        sizes = {line.split()[0]: 1024.0 * int(line.split()[1]) for line in lines if "kB" in line}
        held, mapped = sizes.get("RssAnon:", 0.0), sizes.get("RssFile:", 0.0)
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                more = resident(int(child))
                held, mapped = held + more[0], mapped + more[1]
    return held, mapped


@contextlib.contextmanager
def peer(python: str, name: str, threads: int, memory: Memory = "kept") -> Iterator[Ask]:
    """Starts a class of `benchmarks.peer` in another environment, on the cores of this process.

    It measures while this one waits. What is yielded calls one of its methods, with arguments and
    an answer that are JSON; RuntimeError if that ends it.
    """
    with subprocess.Popen(
        [python, "-m", "benchmarks.peer", name],
        cwd=ROOT,
        env=environment(threads, memory),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:

        def ask(method: str, **arguments: Any) -> Any:
            print(json.dumps([method, arguments]), file=process.stdin, flush=True)
            if not (line := process.stdout.readline()):
                raise RuntimeError(f"{name}: ended with {process.wait()} when asked to {method}")
            return json.loads(line)

        yield ask


def answer(target: object) -> None:
    """Answers what `peer` asks with the methods of `target`, until it asks no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    for line in sys.stdin:
        method, arguments = json.loads(line)
        print(json.dumps(getattr(target, method)(**arguments)), file=answers, flush=True)


def require_room(folder: pathlib.Path, wanted: float) -> None:
    """Ends the benchmark if the disk lacks room for so many bytes; those in the folder count."""
    folder.mkdir(parents=True, exist_ok=True)
    wanted -= sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    if (free := shutil.disk_usage(folder).free) < wanted:
        gigabytes = f"needs {wanted / 1e9:.1f} GB more and the disk has {free / 1e9:.1f}"
        sys.exit(f"{folder} {gigabytes}; name another with --folder")


def vocabulary() -> str:
    """The vocabulary of BERT-Base, uncased, a piece a line."""
    return gzip.decompress(_VOCABULARY.read_bytes()).decode()


def report(name: str, figures: dict[str, Any], details: dict[str, Any], kept: str) -> None:
    """Prints `name: key=value ...`; keeps it and its details in a folder, or `results/`."""
    from bert_jax.running.environment import environment as made_on  # of our own process alone

    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    made = {"date": today, "commit": commit.strip(), "load": os.getloadavg()[0]} | made_on()
    rounded = {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in figures.items()}
    record = {"name": name, "figures": rounded, "made_on": made, "details": details}
    folder = pathlib.Path(kept or RESULTS)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n")
    print(f"{name}:", *(f"{key}={value}" for key, value in rounded.items()), flush=True)


def versions(*packages: str) -> dict[str, str]:
    """Versions of packages of this environment."""
    return {name: importlib.metadata.version(name) for name in packages}
