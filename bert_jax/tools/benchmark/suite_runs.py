"""Trains the runs of a suite, task after task, and keeps their scores.

OUT/benchmark.json     scores of finished runs, and the predictions that are written
OUT/table.txt          the table; also as table.csv and table.html
OUT/runs/              a workdir for each run
OUT/bases/             models that other tasks start from (rules `intermediate`)
OUT/predictions/       files of predictions of the best runs
OUT/glue.zip           those that name this archive, to send to a server

The scores of a run are stored under a hash of its settings, base and examples, so no run is trained
twice. Names of workdirs end in this hash.
"""

import collections
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from etils import epath

import bert_jax
from bert_jax import config
from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Rules, Suite, SuiteScore, SuiteTask
from bert_jax.errors import InputError, prefix_errors
from bert_jax.model import heads
from bert_jax.running import session
from bert_jax.running.progress import Progress
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir, create_folder, read_json, write_json
from bert_jax.tasks import adaptation
from bert_jax.tasks.finetuned_model import TaskModel
from bert_jax.tasks.task_objective import merged_params
from bert_jax.tools.benchmark import submission, suite_files
from bert_jax.tools.benchmark.suite_files import CheckedTask
from bert_jax.tools.compare import sweep
from bert_jax.tools.compare.results import sha256
from bert_jax.tools.compare.sweep import SweepRun
from bert_jax.tools.report import times

FORMAT_VERSION = 1
_MEND = "remove it; all tasks are then run again"

Entry = dict[str, Any]  # a finished run, see `Benchmark._keep`


class Start(NamedTuple):
    """The model that runs start from."""

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

    def mean(self, score: SuiteScore) -> tuple[float, float]:
        """Returns mean and standard deviation (n - 1) over seeds; nan if there are too few."""
        values = [entry["scores"][score.name] for entry in self.seed_runs]
        mean = statistics.fmean(values) if values else math.nan
        return mean, statistics.stdev(values) if len(values) > 1 else math.nan


class Benchmark:
    """Trains the runs of a suite by `rules`, see `SuiteTask`.

    `tasks` are those of the suite with their files. `root` is the folder of all results, on this
    machine. `seeds` is the number of seeds for all tasks; None: as in the suite.
    """

    def __init__(
        self,
        suite: Suite,
        tasks: Sequence[CheckedTask],
        root: epath.Path,
        rules: Rules,
        seeds: int | None,
        progress: Progress,
    ):
        self.suite, self.rules, self.root = suite, rules, root
        self._tasks, self._seeds, self._progress = tasks, seeds, progress
        self.results = [TaskResult(task.task) for task in tasks]
        self._record = self._read()

    def _read(self) -> dict[str, Any]:
        path = self.root / "benchmark.json"
        if path.exists():
            record = read_json(path, FORMAT_VERSION, damage_remedy=_MEND)
            if record["name"] == self.suite.name:
                return record
        elif not self.root.exists() or {p.name for p in self.root.iterdir()} <= {"lock"}:
            empty = {"runs": {}, "predictions": {}}
            return {"format_version": FORMAT_VERSION, "name": self.suite.name, **empty}
        raise InputError(f"{self.root}: holds another suite or other files; choose another --out")

    def run(self, base: str) -> session.Outcome:
        """Trains the missing runs, from `base` (or a run), or from the best run of another task.

        The other tasks are trained even if a run fails.
        """
        # By the name of the task whose best run is the start; "" is `base`.
        starts: dict[str, Start] = {"": self._read_base(base)}
        outcomes = list[session.Outcome]()
        self._write()  # marks the folder as a suite's
        for number, task in enumerate(self._tasks):
            wanted = task.task.start if self.rules == "intermediate" else ""
            if wanted not in starts and (made := self._make_start(wanted)):
                starts[wanted] = made
            if wanted not in starts:  # all runs of that task have failed
                continue
            self.results[number], outcome = self._run_task(task, starts[wanted])
            jax.clear_caches()
            if outcome == "stopped":
                return outcome
            outcomes.append(outcome)
            if best := self.results[number].best:
                self._predict(task, best)
        self._archive()
        return "failed" if "failed" in outcomes else "finished"

    def _read_base(self, base: str) -> Start:
        """Reads the base, and raises InputError if a task cannot start from it."""
        first = self._tasks[0].task.experiment
        read = adaptation.read_base(config.override(first, [f"init_from={base}"]))
        for task in self._tasks:
            with prefix_errors(task.task.name):
                adaptation.require_usable(read.model, task.task.experiment, base)
        return Start(base, read.sha256)

    def _run_task(self, task: CheckedTask, start: Start) -> tuple[TaskResult, session.Outcome]:
        """Trains the runs of a task; returns them, and the worst outcome.

        The search has one run for each setting of the sweep, with the first seed; by the rules
        `one` it is a single run. The runs with the best settings and all seeds follow.
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
        runs, last = self._run_members(task, start, [*fixed, seeds])
        unique = {entry["folder"]: entry for entry in (*searched, *runs)}
        minutes = sum(entry["minutes"] for entry in unique.values())
        return TaskResult(task.task, chosen, runs, minutes), outcome if last == "finished" else last

    def _run_members(
        self, task: CheckedTask, start: Start, axes: Sequence[str]
    ) -> tuple[list[Entry], session.Outcome]:
        """Trains the missing runs of a sweep; returns those that finished, and the worst outcome.

        If one is stopped, those after it are not started.
        """
        entries, worst = list[Entry](), "finished"
        members = list(sweep.products(axes))
        for number, (name, settings) in enumerate(members, 1):
            overrides = [f"{path}={value}" for path, value in settings.items()]
            experiment = config.override(task.task.experiment, overrides)
            key = sha256([sha256(experiment), start.key, task.examples_hash])
            if key not in self._record["runs"]:
                title = f"{task.task.name}, {number} of {len(members)}: {name}"
                self._progress.report(f"benchmark {self.suite.name}: {title}")
                folder = f"{task.task.name}_{name}-{key[:8]}"
                located = suite_files.locate(experiment, task.folder)
                origin = config.origin_of(self.suite.name, overrides, located)
                member = SweepRun(folder, settings, located, origin)
                workdir = self.root / "runs" / folder
                outcome, evaluations = sweep.run_member(member, start.path, workdir, self._progress)
                if outcome == "stopped":
                    return entries, outcome
                if outcome == "failed":
                    worst = outcome
                    continue
                self._keep(key, member, evaluations[-1])
            entries.append(self._record["runs"][key])
        return entries, worst

    def _keep(self, key: str, member: SweepRun, scores: dict[str, Any]) -> None:
        """Stores a finished run."""
        lines = JsonLines(Workdir(self.root / "runs" / member.folder).timings).read()
        seconds = times.account(lines)  # by what they were spent on; `away` is between two starts
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

    def _load(self, entry: Entry) -> TaskModel:
        return TaskModel(Workdir(self.root / "runs" / entry["folder"]))

    def _make_start(self, name: str) -> Start | None:
        """Returns the best model of a task as a base, made if it is missing; None without a run."""
        best = next(result for result in self.results if result.task.name == name).best
        if best is None:
            return None
        folder = self.root / "bases" / best["folder"]
        if not base_lib.is_base(folder):
            tuned = self._load(best)
            params = merged_params(tuned.experiment.adapt, tuned.params, tuned.fixed)
            merged = jax.device_get(params)
            trained = {part: merged[part] for part in ("encoder", "pooler") if part in merged}
            params, fresh = heads.add_missing_heads(tuned.model, trained)
            source = f"{self.suite.name}: {best['folder']}"
            base = base_lib.Base(tuned.model, params, tuned.tokenizer, source, fresh)
            base_lib.write(base, folder)
        return Start(os.fspath(folder), best["folder"])

    def _predict(self, task: CheckedTask, best: Entry) -> None:
        """Writes the missing files of predictions of a task."""
        model = None
        for file in task.task.predictions:
            path, done = self.root / "predictions" / file.output, self._record["predictions"]
            made_from = f"{best['folder']} {task.prediction_hashes[file.output]}"
            if done.get(file.output) == made_from and path.exists():
                continue
            self._progress.report(f"benchmark: predicting {file.source} with {best['folder']}")
            model = model or self._load(best)
            located = suite_files.locate(task.task.experiment, task.folder)
            rows = list(suite_files.read_file(file, located.task, task.folder))
            with create_folder(path.parent):
                submission.write_predictions(model, file, rows, path)
            done[file.output] = made_from
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
