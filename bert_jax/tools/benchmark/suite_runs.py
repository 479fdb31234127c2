"""Trains the runs of a suite, and keeps their scores.

OUT/benchmark.json     scores of finished runs, and the predictions that are written
OUT/table.txt          the table; also as table.csv and table.html
OUT/runs/              a workdir for each run
OUT/bases/             models that other tasks start from, if the rules are `intermediate`
OUT/predictions/       files of predictions of the best runs
OUT/processes/         what the processes print, if runs are trained side by side
OUT/glue.zip           predictions to send to a server, if the suite names such an archive

The scores of a run are stored under a hash of its settings, base and examples, so no run is trained
twice. Names of workdirs end in this hash.
"""

import collections
import contextlib
import math
import os
import statistics
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import jax
from etils import epath

import bert_jax
from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.config import PredictionFile, Rules, Suite, SuiteScore, SuiteTask
from bert_jax.errors import InputError, prefix_errors
from bert_jax.model import heads
from bert_jax.running import session
from bert_jax.running.progress import LineConsole, Progress
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir, create_folder, read_json, write_json
from bert_jax.tasks import adaptation
from bert_jax.tasks.finetuned_model import TaskModel
from bert_jax.tasks.task_objective import merged_params
from bert_jax.tools.benchmark import submission, suite_files
from bert_jax.tools.benchmark.device_workers import DeviceWorkers, bytes_of_run
from bert_jax.tools.benchmark.suite_files import CheckedTask
from bert_jax.tools.compare import sweep
from bert_jax.tools.compare.results import short_hash
from bert_jax.tools.compare.sweep import SweepRun
from bert_jax.tools.report import times

T = TypeVar("T")

FORMAT_VERSION = 1
_REMEDY = "remove it; all tasks are then run again"

Entry = dict[str, Any]  # a finished run, see `Benchmark._keep`


class Start(NamedTuple):
    """The model from which runs start."""

    path: str
    key: str  # hash of a base, or the name of the run that made it


@dataclass
class TaskResult:
    """The finished runs of a task."""

    task: SuiteTask
    settings: Mapping[str, str] = field(default_factory=dict)  # those that were chosen
    seed_runs: Sequence[Entry] = ()  # runs with these settings, one for each seed
    minutes: float = 0.0  # of all runs, also those of the search

    @property
    def best(self) -> Entry | None:
        """Returns the run with the highest main score; None if none is finished."""
        return max(self.seed_runs, key=lambda entry: entry["scores"]["score"], default=None)

    def stats(self, score: SuiteScore) -> tuple[float, float]:
        """Returns mean and standard deviation (n - 1) over seeds; nan if there are too few."""
        values = [entry["scores"][score.name] for entry in self.seed_runs]
        mean = statistics.fmean(values) if values else math.nan
        return mean, statistics.stdev(values) if len(values) > 1 else math.nan


class Benchmark:
    """Trains the runs of a suite that `rules` (paper, one, intermediate; see `SuiteTask`) ask for.

    `tasks` are those of the suite with their files. `root` is the folder of all results, on this
    machine. `seeds` is the number of seeds for all tasks; None: as in the suite. Runs are trained
    side by side by `workers`; None: one after another, in this process.
    """

    def __init__(
        self,
        suite: Suite,
        tasks: Sequence[CheckedTask],
        root: epath.Path,
        rules: Rules,
        seeds: int | None,
        progress: Progress,
        workers: DeviceWorkers | None = None,
    ):
        self.suite, self.rules, self.root = suite, rules, root
        self._tasks, self._seeds, self._progress = tasks, seeds, progress
        self._workers, self._lock, self._is_stopped = workers, threading.Lock(), False
        self.results = [TaskResult(task.task) for task in tasks]
        self._record = self._read()

    def _read(self) -> dict[str, Any]:
        path = self.root / "benchmark.json"
        if path.exists():
            record = read_json(path, FORMAT_VERSION, damage_remedy=_REMEDY)
            if record["name"] == self.suite.name:
                return record
        elif not self.root.exists() or {p.name for p in self.root.iterdir()} <= {"lock"}:
            empty = {"runs": {}, "predictions": {}}
            return {"format_version": FORMAT_VERSION, "name": self.suite.name, **empty}
        raise InputError(f"{self.root}: holds another suite or other files; choose another --out")

    def run(self, base: str, on_result: Callable[[], None] = lambda: None) -> session.Outcome:
        """Trains the missing runs from `base`, a folder or a run, or from another task's best run.

        The other tasks are trained even if a run fails. `on_result` is called after each task.
        """
        start, run_bytes = self._call(_read_base, base, self._tasks)
        # Starts by the task whose best runs they are; that of "" is `base`.
        starts: dict[str, Future[Start | None]] = {"": _call_now(lambda: start)}
        outcomes: dict[str, Future[session.Outcome]] = {}
        self._write()  # marks the folder as a suite's
        with contextlib.ExitStack() as stack:
            submit = _call_now
            if self._workers is not None:
                pool = ThreadPoolExecutor(2 * len(self._tasks))  # for tasks and starts
                submit = stack.enter_context(pool).submit
                stack.callback(self._workers.close)  # on exit, before the pool waits for calls
                count = self._workers.fit_to_memory(run_bytes)
                gigabytes = f"about {run_bytes / 1e9:.1f} GB each"
                self._progress.report(f"benchmark: {count} runs side by side, {gigabytes}")
            for number, task in enumerate(self._tasks):
                wanted = task.task.start if self.rules == "intermediate" else ""
                if wanted not in starts:  # its task precedes this one in the suite
                    starts[wanted] = submit(self._make_start, wanted, outcomes[wanted])
                arguments = number, starts[wanted], on_result
                outcomes[task.task.name] = submit(self._finish_task, *arguments)
            task_outcomes = [future.result() for future in outcomes.values()]
            if "stopped" not in task_outcomes:
                self._archive()
        return _worst(task_outcomes)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a function that uses devices: here, or in a process that has some."""
        if self._workers is None:
            return function(*arguments)
        return self._workers.call(function, *arguments)

    def _finish_task(
        self, number: int, start: "Future[Start | None]", on_result: Callable[[], None]
    ) -> session.Outcome:
        """Trains the missing runs of a task, and writes its predictions."""
        model, task = start.result(), self._tasks[number]
        if model is None:  # all runs of the task that this one starts from have failed
            return "failed"
        self.results[number], outcome = self._run_task(task, model)
        jax.clear_caches()
        if (best := self.results[number].best) and outcome != "stopped":
            self._predict(task, best)
        with self._lock:
            on_result()
        return outcome

    def _run_task(self, task: CheckedTask, start: Start) -> tuple[TaskResult, session.Outcome]:
        """Trains the runs of a task; returns them, and the worst outcome.

        The search has one run for each combination of the sweep's values, with the first seed; by
        the rules `one` it is a single run. The runs with the best settings and all seeds follow.
        """
        axes = [] if self.rules == "one" else task.task.sweep
        with prefix_errors(f"{task.task.name}: sweep"):
            searched, outcome = self._run_members(task, start, [*axes, "seed=1"])
        if outcome == "stopped" or not searched:
            return TaskResult(task.task), outcome
        best = max(searched, key=lambda entry: entry["scores"]["score"])
        chosen = {name: value for name, value in best["settings"].items() if name != "seed"}
        count = self._seeds or task.task.seeds
        seeds = "seed=" + ",".join(str(seed) for seed in range(1, count + 1))
        fixed = [f"{name}={value}" for name, value in chosen.items()]
        runs, seeds_outcome = self._run_members(task, start, [*fixed, seeds])
        unique = {entry["folder"]: entry for entry in (*searched, *runs)}
        minutes = sum(entry["minutes"] for entry in unique.values())
        return TaskResult(task.task, chosen, runs, minutes), _worst([outcome, seeds_outcome])

    def _run_members(
        self, task: CheckedTask, start: Start, axes: Sequence[str]
    ) -> tuple[list[Entry], session.Outcome]:
        """Trains the missing runs of a sweep; returns those that finished, and the worst outcome.

        If one is stopped, those after it are not started.
        """
        members = list(sweep.combine_values(axes))

        def run(number: int) -> tuple[Entry | None, session.Outcome]:
            position = f"{number + 1} of {len(members)}"
            return self._run_member(task, start, position, *members[number])

        with contextlib.ExitStack() as stack:
            run_all = map
            if self._workers is not None:
                run_all = stack.enter_context(ThreadPoolExecutor(self._workers.count)).map
            results = list(run_all(run, range(len(members))))
        return [entry for entry, _ in results if entry], _worst([outcome for _, outcome in results])

    def _run_member(
        self, task: CheckedTask, start: Start, position: str, name: str, settings: dict[str, str]
    ) -> tuple[Entry | None, session.Outcome]:
        """Trains the run `name` unless its scores are stored; returns these, and how it ended."""
        overrides = [f"{path}={value}" for path, value in settings.items()]
        experiment = config.override(task.task.experiment, overrides)
        key = short_hash([short_hash(experiment), start.key, task.examples_hash])
        if key not in self._record["runs"]:
            if self._is_stopped:
                return None, "stopped"
            title = f"{task.task.name}, {position}: {name}"
            self._progress.report(f"benchmark {self.suite.name}: {title}")
            run_name = f"{task.task.name}_{name}-{key[:8]}"
            located = config.locate_files(experiment, task.folder)
            origin = config.origin_of(self.suite.name, overrides, located)  # for origin.json
            member = SweepRun(run_name, settings, located, origin)
            arguments = member, start.path, self.root / "runs" / run_name
            if self._workers is None:
                outcome, evaluations = sweep.run_member(*arguments, self._progress)
            else:
                outcome, evaluations = self._workers.call(_train, *arguments)
            self._is_stopped |= outcome == "stopped"
            if outcome != "finished":
                return None, outcome
            self._keep(key, member, evaluations[-1])
        return self._record["runs"][key], "finished"

    def _keep(self, key: str, member: SweepRun, scores: dict[str, Any]) -> None:
        """Stores a finished run."""
        lines = JsonLines(Workdir(self.root / "runs" / member.folder).timings).read()
        seconds = times.seconds_by_part(lines)  # `away`: while the run was interrupted
        with self._lock:
            self._record["runs"][key] = {
                "folder": member.folder,
                "settings": member.settings,
                "scores": scores,
                "minutes": (sum(seconds.values()) - seconds["away"]) / 60,
                "version": bert_jax.__version__,
            }
            self._write()

    def _write(self) -> None:
        write_json(self.root / "benchmark.json", self._record)

    # --- models and predictions of the best runs --------------------------------------------------

    def _make_start(self, name: str, outcome: "Future[session.Outcome]") -> Start | None:
        """Returns the best model of a task as a base, made if missing; None if no run has finished.

        Waits for the task, whose future is `outcome`.
        """
        outcome.result()
        best = next(result for result in self.results if result.task.name == name).best
        if best is None:
            return None
        folder = self.root / "bases" / best["folder"]
        if not base_lib.is_base(folder):
            source = f"{self.suite.name}: {best['folder']}"
            self._call(_write_base, self.root / "runs" / best["folder"], folder, source)
        return Start(os.fspath(folder), best["folder"])

    def _predict(self, task: CheckedTask, best: Entry) -> None:
        """Writes the missing files of predictions of a task."""
        folder, done = self.root / "predictions", self._record["predictions"]
        hashes = task.input_hashes
        stamps = {name: f"{best['folder']} {hashes[name]}" for name in hashes}
        missing = [
            file
            for file in task.task.predictions
            if done.get(file.output) != stamps[file.output] or not (folder / file.output).exists()
        ]
        if missing:
            sources = ", ".join(file.source for file in missing)
            self._progress.report(f"benchmark: predicting {sources} with {best['folder']}")
            run = self.root / "runs" / best["folder"]
            self._call(_write_predictions, run, task, missing, folder)
        with self._lock:
            done |= {file.output: stamps[file.output] for file in missing}
            self._write()

    def _archive(self) -> None:
        """Writes the zip files whose predictions are all there."""
        archives = collections.defaultdict[str, list[epath.Path]](list)
        for task in self._tasks:
            for file in task.task.predictions:
                archives[file.archive].append(self.root / "predictions" / file.output)
        archives.pop("", None)
        for name, paths in archives.items():
            if all(path.exists() for path in paths):
                submission.write_archive(paths, self.root / name)


# --- functions that use devices -------------------------------------------------------------------


def _read_base(base: str, tasks: Sequence[CheckedTask]) -> tuple[Start, int]:
    """Reads the base; raises InputError if a task cannot start from it.

    All tasks read it as the first one does. Returns the start, and the bytes of memory of the
    largest run.
    """
    read = adaptation.read_base(config.override(tasks[0].task.experiment, [f"init_from={base}"]))
    parameters, run_bytes = sum(leaf.size for leaf in jax.tree.leaves(read.params)), list[int]()
    for task in tasks:
        experiment = task.task.experiment
        with prefix_errors(task.task.name):
            adaptation.require_usable(read.model, experiment, base)
        run_bytes.append(bytes_of_run(read.model, parameters, experiment))
    return Start(base, read.sha256), max(run_bytes)


def _train(
    member: SweepRun, base: str, workdir: epath.Path
) -> tuple[session.Outcome, list[dict[str, Any]]]:
    """Trains a run in a process of its own, see `sweep.run_member`; then clears JAX's caches."""
    result = sweep.run_member(member, base, workdir, Progress(LineConsole()))
    jax.clear_caches()
    return result


def _write_base(run: epath.Path, folder: epath.Path, source: str) -> None:
    """Writes the model of a fine-tuned run as a base."""
    tuned = TaskModel(Workdir(run))
    params = merged_params(tuned.experiment.adapt, tuned.params, tuned.frozen)
    merged = jax.device_get(params)
    trained = {part: merged[part] for part in ("encoder", "pooler") if part in merged}
    params, new_heads = heads.add_missing_heads(tuned.model, trained)
    base_lib.write(base_lib.Base(tuned.model, params, tuned.tokenizer, source, new_heads), folder)


def _write_predictions(
    run: epath.Path, task: CheckedTask, files: Sequence[PredictionFile], folder: epath.Path
) -> None:
    """Writes files of predictions of a run into a folder."""
    model, located = TaskModel(Workdir(run)), config.locate_files(task.task.experiment, task.folder)
    for file in files:
        rows = list(suite_files.read_file(file, located.task, task.folder))
        with create_folder(folder):
            submission.write_predictions(model, file, rows, folder / file.output)


def _call_now(function: Callable[..., T], *arguments: Any) -> "Future[T]":
    """Calls a function; returns its result as a finished future, like `Executor.submit`."""
    future: Future[T] = Future()
    future.set_result(function(*arguments))
    return future


def _worst(outcomes: Sequence[session.Outcome]) -> session.Outcome:
    severity: tuple[session.Outcome, ...] = ("finished", "failed", "stopped")
    return max(outcomes, key=severity.index)
