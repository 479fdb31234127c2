"""Compiling ahead of time for TPU slices that need not be there.

libtpu, an ordinary package for Linux on x86-64, holds the compiler. One process a compilation: it
has been seen to crash, and must not take the command with it. What came of a compilation is kept
in the user's cache folder under a hash of all that it depends on.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from etils import epath

from bert_jax import config, system
from bert_jax.config import Experiment
from bert_jax.errors import InputError
from bert_jax.plan.program import Collective, Kernel, Program
from bert_jax.plan.topology import Topology
from bert_jax.plan.variants import variant_of
from bert_jax.storage.workdir import cache_folder, made, named_errors, write_atomic

_PACKAGE = pathlib.Path(__file__).parents[1]
_COMMAND = (sys.executable, "-m", "bert_jax.plan.worker")
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",  # else it asks, for half a minute, which machine of a pod this is
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# A compilation takes a core and a half, and a gigabyte or two.
AT_ONCE = 2
# What a compilation and its reading are made of.
_SOURCES = (
    "config",
    "hardware.py",
    "model",
    "plan/checks.py",
    "plan/hlo.py",
    "plan/program.py",
    "plan/topology.py",
    "plan/worker.py",
    "training",
)
_KEPT_SECONDS = 30 * 24 * 3600.0


@dataclasses.dataclass(frozen=True)
class Job:
    """The training step of one phase on one slice."""

    experiment: Experiment
    phase: int
    topology: Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a job.

    Attributes:
      kind: "too large" did not fit; "refused" cannot be laid over the slice; "failed" is the
        compiler's refusal for another reason; "crashed" took the process down.
      message: one line; "" if it compiled.
      wanted: bytes of a device that did not fit; None if unsaid.
      available: bytes of a device that there were; None if unsaid.
      memory: bytes of a device: peak, arguments, temporaries, code, donated. Empty unless compiled.
      program: what it does; None unless compiled.
      places: of the devices, in the order of the mesh: chip coordinates, number on the chip.
      parameters: a line for each, see worker.parameter_table.
      whole_batch: see checks.whole_batch_arrays.
    """

    kind: Literal["compiled", "too large", "refused", "failed", "crashed"]
    message: str = ""
    wanted: float | None = None
    available: float | None = None
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    program: Program | None = None
    places: tuple[tuple[int, ...], ...] = ()
    parameters: tuple[str, ...] = ()
    whole_batch: tuple[str, ...] | None = None

    @classmethod
    def of(cls, value: dict[str, Any]) -> "Outcome":
        """Reads what the worker wrote."""
        if value["kind"] != "compiled":
            return cls(**value)
        read = dict(value["program"])
        read["kernels"] = tuple(Kernel(**kernel) for kernel in read["kernels"])
        read["collectives"] = tuple(
            Collective(**one | {"group": tuple(one["group"])}) for one in read["collectives"]
        )
        whole = value["whole_batch"]
        return cls(
            kind="compiled",
            memory=value["memory"],
            program=Program(**read),
            places=tuple(map(tuple, value["places"])),
            parameters=tuple(value["parameters"]),
            whole_batch=None if whole is None else tuple(whole),
        )


def versions() -> dict[str, str]:
    """Of the packages that a compilation depends on.

    Raises:
      InputError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "plan: libtpu, which holds the compiler, is not installed; install the extra [tpu] "
            "(pip install 'bert-jax[tpu]'), on any Linux machine with an x86-64 processor"
        )
    return {name: importlib.metadata.version(name) for name in ("libtpu", "jax", "jaxlib")}


def compile_all(
    jobs: Sequence[Job],
    say: Callable[[str], None],
    refusals: Literal["raise", "return"] = "raise",
    seconds: float | None = None,
) -> list[Outcome]:
    """Compiles jobs, two at a time; those done before are looked up.

    Args:
      jobs: what to compile.
      say: is told what is begun.
      refusals: what becomes of an experiment that cannot be laid over its slice.
      seconds: after so many, what is under way is ended; None: however long it takes.

    Raises:
      TimeoutError: not all was done in time; what was is kept.
      InputError: libtpu is not installed; or such an experiment, unless it is to be returned.
    """
    versions()
    compiler = _Compiler(say, refusals)
    width = min(AT_ONCE, system.cores())  # `taskset` holds it to one
    with concurrent.futures.ThreadPoolExecutor(width) as pool:
        futures = [pool.submit(compiler.outcome, job) for job in jobs]
        try:
            concurrent.futures.wait(futures, seconds, concurrent.futures.FIRST_EXCEPTION)
            return [future.result(None if seconds is None else 0) for future in futures]
        except BaseException:
            compiler.stop()
            for future in futures:
                future.cancel()
            raise


class _Compiler:
    """Runs workers, and ends them all at once if asked to."""

    def __init__(self, say: Callable[[str], None], refusals: str):
        self.say, self.refusals = say, refusals
        self.running: set[subprocess.Popen] = set()
        self.lock = threading.Lock()
        self.stopped = False

    def stop(self) -> None:
        with self.lock:
            self.stopped = True
            for process in self.running:
                process.kill()

    def outcome(self, job: Job) -> Outcome:
        kept = cache_folder() / "plans" / f"{key(job)}.json"
        with contextlib.suppress(FileNotFoundError, ValueError):
            return Outcome.of(json.loads(kept.read_text()))
        experiment = job.experiment
        self.say(
            f"compiling {experiment.name} for {job.topology.name}, phase {job.phase}: "
            f"{experiment.model.num_hidden_layers} layers, "
            f"{experiment.phases[job.phase].sequence_length} long, "
            f"{variant_of(experiment, job.phase)}"
        )
        value = self._run(job)
        outcome = Outcome.of(value)
        if outcome.kind == "refused" and self.refusals == "raise":
            raise InputError(f"{job.topology.name}: {outcome.message}")
        if outcome.kind in ("compiled", "too large"):  # else this machine may be at fault
            _keep(kept, value)
        return outcome

    def _run(self, job: Job) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(prefix="bert_jax_plan") as folder:
            asked, answer = os.path.join(folder, "job.json"), os.path.join(folder, "outcome.json")
            pathlib.Path(asked).write_text(
                json.dumps(
                    {
                        "experiment": json.loads(config.to_json(job.experiment)),
                        "phase": job.phase,
                        "topology": job.topology.name,
                    }
                )
            )
            with open(os.path.join(folder, "noise"), "w+b") as noise:
                with self._worker([asked, answer], noise) as process:
                    process.wait()
                noise.seek(0)
                told = noise.read().decode("utf-8", "replace")
            if os.path.exists(answer):
                return json.loads(pathlib.Path(answer).read_text())
        if process.returncode < 0:
            name = signal.Signals(-process.returncode).name
            return {"kind": "crashed", "message": f"the compiler crashed ({name})"}
        last = (told.strip().split("\n") or [""])[-1]
        raise RuntimeError(f"compiling for {job.topology.name}: {last}")

    @contextlib.contextmanager
    def _worker(self, arguments: list[str], noise: Any) -> Iterator[subprocess.Popen]:
        path = os.pathsep.join(filter(None, [str(_PACKAGE.parent), os.environ.get("PYTHONPATH")]))
        environment = os.environ | _ENVIRONMENT | {"PYTHONPATH": path}
        environment.pop("XLA_FLAGS", None)  # a plan is of the compiler as it comes
        with self.lock:
            if self.stopped:
                raise RuntimeError("stopped")
            process = subprocess.Popen(
                [*_COMMAND, *arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=noise,
                stderr=noise,
            )
            self.running.add(process)
        try:
            yield process
        finally:
            process.kill()
            process.wait()
            with self.lock:
                self.running.discard(process)


def key(job: Job) -> str:
    """A hash of all that the outcome of a job depends on, this code included."""
    experiment = job.experiment
    parts_of_step = experiment.parallelism.accumulation_of(job.phase)
    mesh = dataclasses.replace(experiment.parallelism, accumulation=(parts_of_step,))
    sections = (experiment.model, experiment.optimizer, mesh, experiment.phases[job.phase])
    parts = [
        *(config.flatten(section) for section in sections),
        experiment.total_steps,
        job.topology.name,
        versions(),
        _code_version(),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
    ]
    return hashlib.sha256(json.dumps(parts, default=list).encode()).hexdigest()


@functools.cache
def _code_version() -> str:
    digest = hashlib.sha256()
    for name in _SOURCES:
        path = _PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.relative_to(_PACKAGE).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()


def _keep(path: epath.Path, value: dict[str, Any]) -> None:
    with made(path.parent), named_errors(path.parent):
        write_atomic(path, json.dumps(value))
        for other in pathlib.Path(path.parent).glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                if time.time() - other.stat().st_mtime > _KEPT_SECONDS:
                    other.unlink()
