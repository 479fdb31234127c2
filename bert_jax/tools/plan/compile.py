"""Compiles the training step ahead of time for TPU slices that need not exist.

libtpu, an ordinary package for Linux on x86-64, contains the compiler. Each compilation has its own
process: the compiler sometimes crashes, and it reads only once, at its start, into which folder to
write the schedules of operations. The outcome is cached in the user's cache folder, under a hash of
everything that determines it.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import os
import pathlib
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import jax
from etils import epath
from jax.experimental import topologies

from bert_jax import config, system
from bert_jax.config import Experiment, code
from bert_jax.data.workers import Worker, WorkerDied, wait
from bert_jax.errors import InputError
from bert_jax.pretraining.pretraining_job import require_runnable
from bert_jax.storage.workdir import cache_folder, create_folder, translate_os_errors, write_atomic
from bert_jax.tools.plan import bundles, hlo, schedule
from bert_jax.tools.plan.topology import Topology, layout_of
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib
from bert_jax.training import step
from bert_jax.training.checksums import path_of
from bert_jax.training.collectives import CompilerOptions

_PACKAGE = pathlib.Path(__file__).parents[2]
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_ENABLE_COMPILATION_CACHE": "false",
    "TPU_SKIP_MDS_QUERY": "1",  # else libtpu tries for half a minute to find this machine's pod
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# Write the bundles of each operation: doubles the compiler's time, and needs 80 MB for files.
DUMP_FLAGS = (
    "--xla_jf_dump_to={} --xla_jf_dump_llo_text --xla_jf_dump_llo_pass_label_regex=.*final_bundles"
)
# Seconds between messages that compilations are still running.
_REPORT_SECONDS = 60.0
# Compilations at the same time; each takes a core and a half, and a gigabyte or two.
_AT_ONCE = 2
# Sources on which the outcome of a compilation depends.
_PLAN_MODULES = ("bundles", "compile", "hlo", "schedule", "topology", "work")
_SOURCES = (
    *("config", "hardware.py", "model", "training"),
    *(f"tools/plan/{name}.py" for name in _PLAN_MODULES),
)
_CACHE_SECONDS = 30 * 24 * 3600.0
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_SIZE = r"([\d.]+)([KMGT]?)"
# The compiler's messages. The first counts temporaries alone, the second all memory of a program.
_TOO_LARGE = (
    re.compile(rf"\({_SIZE}\) exceeds available HBM \({_SIZE}\)"),
    re.compile(rf"Used {_SIZE} of {_SIZE} hbm"),
)


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """The training step of one phase on one slice."""

    experiment: Experiment
    phase: int
    topology: Topology


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a job."""

    # "too large": does not fit into memory; "refused": the layout does not suit the slice, so the
    # compiler did not start; "failed": its other errors; "crashed": the process was killed.
    kind: Literal["compiled", "too large", "refused", "failed", "crashed"]
    message: str = ""  # one line; "" if it compiled
    wanted: float | None = None  # if too large: bytes that it needs on a device, if known
    available: float | None = None  # if too large: bytes that it may use there, if known
    # Bytes of a device: peak, arguments, temporaries, code, donated. Empty unless compiled.
    memory: dict[str, int] = dataclasses.field(default_factory=dict)
    program: schedule.Program | None = None  # None unless compiled
    # The location of each device, in the order of the mesh: chip coordinates, number on the chip.
    places: tuple[tuple[int, ...], ...] = ()
    parameters: tuple[str, ...] = ()  # a line for each parameter, see `parameter_table`
    whole_batch: tuple[str, ...] | None = None  # see `hlo.whole_batch_arrays`
    cpu_seconds: float = 0.0  # of the compilation, in all threads; 0 if not known

    @classmethod
    def from_json(cls, text: str) -> "Outcome":
        """Reads the JSON of `dataclasses.asdict`."""
        fields = _freeze(json.loads(text))
        if program := fields.get("program"):
            types = {"kernels": schedule.Kernel, "collectives": schedule.Collective}
            items = {name: tuple(item(**x) for x in program[name]) for name, item in types.items()}
            fields["program"] = schedule.Program(**program | items)
        return cls(**fields)


def _freeze(value: Any) -> Any:
    """Returns a JSON value with tuples instead of lists."""
    if isinstance(value, dict):
        return {key: _freeze(item) for key, item in value.items()}
    return tuple(map(_freeze, value)) if isinstance(value, list) else value


def versions() -> dict[str, str]:
    """Returns the versions of the packages that a compilation depends on."""
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            "plan: libtpu, which contains the compiler, is not installed; install the extra [tpu] "
            "(pip install 'bert-jax[tpu]') on any Linux machine with an x86-64 processor"
        )
    return {name: importlib.metadata.version(name) for name in ("libtpu", "jax", "jaxlib")}


# --- in the process of the command ---


def compile_all(
    jobs: Sequence[CompileJob],
    log: Callable[[str], None],
    refusals: Literal["raise", "return"] = "raise",
) -> list[Outcome]:
    """Compiles jobs that are not cached, two at a time; `refusals` are raised or returned."""
    versions()  # raises InputError without libtpu
    width = min(_AT_ONCE, system.cores())
    outcomes = {
        index: outcome for index, job in enumerate(jobs) if (outcome := _cached_outcome(job))
    }
    waiting = [index for index in range(len(jobs)) if index not in outcomes]
    running: dict[Worker, int] = {}
    start = time.time()  # of all jobs together
    with tempfile.TemporaryDirectory(prefix="bert_jax_plan") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < width:
                    index = waiting.pop(0)
                    job = jobs[index]
                    log(f"compiling {_describe(job)}, {layout_of(job.experiment, job.phase)}")
                    running[_start_worker(job, pathlib.Path(folder, f"{index}"))] = index
                ended = wait(running, _REPORT_SECONDS)
                if not ended:
                    names = "; ".join(_describe(jobs[index]) for index in running.values())
                    log(f"still compiling, for {(time.time() - start) / 60:.0f} minutes: {names}")
                for worker in ended:
                    index = running.pop(worker)
                    path = pathlib.Path(folder, f"{index}")
                    outcome = outcomes[index] = _collect_outcome(jobs[index], path, worker)
                    if minutes := outcome.cpu_seconds / 60:
                        log(f"{_describe(jobs[index])}: {minutes:.1f} CPU minutes")
                    if outcome.kind == "refused" and refusals == "raise":
                        raise InputError(f"{jobs[index].topology.name}: {outcome.message}")
        finally:
            for worker in running:
                worker.close()
    return [outcomes[index] for index in range(len(jobs))]


def _cached_outcome(job: CompileJob) -> Outcome | None:
    with contextlib.suppress(FileNotFoundError, LookupError, TypeError, ValueError):
        return Outcome.from_json(_cache_path(job).read_text())
    return None


def _cache_path(job: CompileJob) -> epath.Path:
    return cache_folder() / "compiled" / f"{cache_key(job)}.json"


def _describe(job: CompileJob) -> str:
    experiment, phase = job.experiment, job.experiment.phases[job.phase]
    return (
        f"{experiment.name} for {job.topology.name}, phase {job.phase}: "
        f"{experiment.model.num_hidden_layers} layers, {phase.sequence_length} long"
    )


def _start_worker(job: CompileJob, folder: pathlib.Path) -> Worker:
    """Starts to compile a job in a worker without devices, with its files in `folder`."""
    dump = folder / "dump"
    dump.mkdir(parents=True)
    arguments = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {DUMP_FLAGS.format(dump)}".strip()
    # Allows the files of code that this process may run, see `config.code`.
    environment = os.environ | code.environment() | _ENVIRONMENT | {"LIBTPU_INIT_ARGS": arguments}
    environment.pop("XLA_FLAGS", None)  # plans use the compiler's default flags
    with open(folder / "output", "wb") as output:
        worker = Worker(environment, output)
    worker.start(compile_job, job, str(dump))
    return worker


def _collect_outcome(job: CompileJob, folder: pathlib.Path, worker: Worker) -> Outcome:
    """Returns the outcome of a worker's job, and caches it."""
    try:
        outcome = worker.result()
    except WorkerDied as error:
        if error.code < 0:
            message = f"the compiler crashed ({signal.Signals(-error.code).name})"
            return Outcome(kind="crashed", message=message)
        last = (folder / "output").read_text("utf-8", "replace").strip().split("\n")[-1]
        raise RuntimeError(f"compiling for {job.topology.name}: {last}") from error
    finally:
        worker.close()
        shutil.rmtree(folder / "dump")
    if outcome.kind in ("compiled", "too large"):  # other outcomes may depend on this machine
        path = _cache_path(job)
        with create_folder(path.parent), translate_os_errors(path.parent):
            write_atomic(path, json.dumps(dataclasses.asdict(outcome)))
            for old in pathlib.Path(path.parent).glob("*.json"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - old.stat().st_mtime > _CACHE_SECONDS:
                        old.unlink()
    return outcome


def cache_key(job: CompileJob) -> str:
    """Returns a hash of everything that determines the outcome of a job, including this code."""
    experiment = job.experiment
    micro_batches = experiment.parallelism.accumulation_of(job.phase)
    parallelism = dataclasses.replace(experiment.parallelism, accumulation=(micro_batches,))
    phase = experiment.phases[job.phase]
    parts = [
        *map(config.flatten, (experiment.model, experiment.data, experiment.optimizer)),
        *map(config.flatten, (parallelism, phase)),
        # The objectives of all phases determine the metrics and the parameters.
        [phase.objective for phase in experiment.phases],
        *map(bool, (experiment.run.check_every, experiment.run.replay_every)),  # `_other_programs`
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


# --- in the worker process ---


def compile_job(job: CompileJob, dump: str) -> Outcome:
    """Compiles a job, in a process whose compiler writes its schedules into the folder `dump`."""
    topology = job.topology
    description = topologies.get_topology_desc(
        platform="tpu", topology_name=topology.slice_name, **topology.compiler_options
    )
    try:
        outcome = compile_step(job.experiment, job.phase, description.devices, dump)
    except InputError as error:
        return Outcome(kind="refused", message=str(error))
    except jax.errors.JaxRuntimeError as error:
        outcome = parse_failure(str(error))
    return dataclasses.replace(outcome, cpu_seconds=time.process_time())


def compile_step(
    experiment: Experiment, number: int, devices: Sequence[jax.Device], dump: str
) -> Outcome:
    """Compiles the training step of phase `number` for devices that need not exist.

    Raises:
      jax.errors.JaxRuntimeError: the compiler reports an error.
    """
    mesh = mesh_lib.make_mesh(experiment.parallelism, devices)
    require_runnable(experiment, mesh)
    objective = objective_lib.make_objective(experiment, number)
    state = step.abstract_state(objective, experiment.optimizer, experiment.parallelism, mesh)
    compiled = lower_step(experiment, number, mesh, state).compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and memory is not None  # a TPU's compiler returns both
    module = hlo.parse(text)
    program = schedule.read_program(module, bundles.make_cycle_lookup(dump))
    peak, code_bytes = memory.peak_memory_in_bytes, memory.generated_code_size_in_bytes
    # The code of all programs is loaded; one of the programs runs at a time.
    for other, held_bytes in _other_programs(experiment, number, mesh, state):
        analysis = other.compile().memory_analysis()
        assert analysis is not None
        peak = max(peak, analysis.peak_memory_in_bytes + held_bytes)
        code_bytes += analysis.generated_code_size_in_bytes
    whole_batch = hlo.whole_batch_arrays(module, experiment, number, mesh_lib.batch_shards(mesh))
    return Outcome(
        kind="compiled",
        memory={
            "peak": peak,
            "arguments": memory.argument_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": code_bytes,
            "donated": memory.alias_size_in_bytes,
        },
        program=program,
        places=tuple((*device.coords, device.core_on_chip) for device in mesh.devices.flat),
        parameters=tuple(parameter_table(state["params"])),
        whole_batch=None if whole_batch is None else tuple(whole_batch),
    )


def lower_step(
    experiment: Experiment,
    number: int,
    mesh: jax.sharding.Mesh,
    state: step.State,
    compiler_options: CompilerOptions = (),
) -> jax.stages.Lowered:
    """Traces the training step of phase `number` for a mesh and an abstract state."""
    spec = _make_step_spec(experiment, number, mesh)
    train_step = step.make_train_step(spec, experiment.total_steps, compiler_options)
    sums = jax.eval_shape(lambda: step.empty_window(objective_lib.metric_names(experiment)))
    sums = _with_sharding(sums, mesh_lib.replicated(mesh))
    # Functions compiled by jax have `lower`, which the type of `train_step` does not declare.
    lowerable = cast(jax.stages.Wrapped, train_step)
    return lowerable.lower(state, sums, *_batch_and_key(experiment, number, mesh))


def _make_step_spec(experiment: Experiment, number: int, mesh: jax.sharding.Mesh) -> step.StepSpec:
    parallelism = experiment.parallelism
    objective = objective_lib.make_objective(experiment, number)
    micro_batches = parallelism.accumulation_of(number)
    return step.StepSpec(objective, experiment.optimizer, parallelism, micro_batches, mesh)


def _other_programs(
    experiment: Experiment, number: int, mesh: jax.sharding.Mesh, state: step.State
) -> Iterator[tuple[jax.stages.Lowered, int]]:
    """Yields the step that checks its own arithmetic, and the recompute check, if they are enabled.

    With each come the bytes of the state on a device that are not arguments of the program.
    """
    run = experiment.run
    if run.check_every:
        options = step.self_check_options(mesh_lib.device_kind(mesh))
        yield lower_step(experiment, number, mesh, state, options), 0
    if run.replay_every:  # the recompute check compares fingerprints of gradients
        program = step.make_fingerprints(_make_step_spec(experiment, number, mesh))
        batch, key = _batch_and_key(experiment, number, mesh)
        # No parameters are frozen. Rows are rotated to other devices, which keeps shapes.
        frozen, rotated_batch = None, batch
        arguments = state["params"], frozen, state["step"], batch, key, rotated_batch
        held = jax.tree.leaves({name: state[name] for name in state if name != "params"})
        yield (
            cast(jax.stages.Wrapped, program).lower(*arguments),
            sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in held),
        )


def _batch_and_key(experiment: Experiment, number: int, mesh: jax.sharding.Mesh) -> tuple[Any, Any]:
    batch = objective_lib.abstract_batch(experiment.phases[number], experiment.data_of(number))
    key = jax.eval_shape(lambda: step.phase_key(experiment.model, experiment.seed, number))
    return (
        _with_sharding(batch, mesh_lib.batch_sharding(mesh)),
        _with_sharding(key, mesh_lib.replicated(mesh)),
    )


def parameter_table(params: Any) -> list[str]:
    """Returns a line for each parameter: path, shape, dtype, shape of one device's shard."""
    return [
        f"{path_of(path)} {list(leaf.shape)} {leaf.dtype}, on a device "
        f"{list(leaf.sharding.shard_shape(leaf.shape))}"
        for path, leaf in jax.tree.leaves_with_path(params)
    ]


def _with_sharding(tree: Any, sharding: jax.sharding.Sharding) -> Any:
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree
    )


def parse_failure(message: str) -> Outcome:
    """Returns the outcome for an error message of the compiler."""
    line = message.strip().split("\n")[0]
    if not line.startswith("RESOURCE_EXHAUSTED"):
        return Outcome(kind="failed", message=line)
    for pattern in _TOO_LARGE:
        match = pattern.search(message)
        if match:
            wanted, available = (float(match[i]) * _UNITS[match[i + 1]] for i in (1, 3))
            return Outcome(kind="too large", message=line, wanted=wanted, available=available)
    return Outcome(kind="too large", message=line)
