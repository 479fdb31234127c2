"""Trains the runs of a table, one after the other, and measures them.

W/table.json      measured values, and CPU seconds of a step, which set the numbers of steps
W/table.txt       means and standard errors; also as table.csv, and with plots as table.html
W/runs/           a workdir for each row and seed
W/tasks/          a workdir for each fine-tuning of a run
W/corpora/        a corpus for all rows with equal corpus settings

Names of workdirs end in hashes, so other settings, text or examples give other workdirs.
"""

import dataclasses
import os

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints.base import hash_weights
from bert_jax.config import Experiment, Finetuning, Row
from bert_jax.config.comparison import REACH
from bert_jax.data import corpus
from bert_jax.errors import InputError, prefix_errors
from bert_jax.model import losses
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.pretraining.pretraining_job import PretrainingJob
from bert_jax.running import session
from bert_jax.running.progress import Progress
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks.finetuning_job import finetune
from bert_jax.tasks.probes import Probes, score_probes
from bert_jax.tools.compare import budget, table_files
from bert_jax.tools.compare.results import MINIMAL_PAIRS, Column, Results, TableRun, short_hash
from bert_jax.tools.report import times
from bert_jax.tools.report.run_record import Record

# How often the steps of each row are timed, row after row; the fastest time counts.
_ROUNDS = 2
# Steps of each phase that are timed, after as many that warm caches.
_TIMED = 25


class Comparison:
    """Trains the runs of a table."""

    def __init__(self, results: Results, progress: Progress):
        self._results, self._table, self._root = results, results.table, results.root
        self._progress = progress
        # {row: (folder of its corpus, hash of the corpus and of the initial weights)}.
        self._inputs: dict[str, tuple[str, str]] = {}
        if not self._table.cpu_seconds:
            self._set_members()  # finds errors early; `run` repeats it with the inputs

    def run(self) -> session.Outcome:
        """Trains the missing runs, and writes the table after each of them.

        If a run fails, the remaining ones are trained nevertheless.
        """
        self._results.write()  # so that a later start knows the folder as a table's
        self._prepare()
        if self._table.cpu_seconds:
            try:
                self._time()
            except budget.MeasurementInterrupted as stopped:
                return stopped.args[0]
        self._set_members()
        self._write()
        outcomes, members = [], self._results.members
        for number, member in enumerate(members, 1):
            if self._missing_columns(member):
                progress = f"{number} of {len(members)}: {member.row}, seed {member.seed}"
                self._progress.report(f"compare {progress}")
                outcomes.append(self._train_and_measure(member))
                table_files.write(self._results)
                # Frees compiled programs, which would slow down each garbage collection.
                jax.clear_caches()
                if outcomes[-1] == "stopped":
                    return "stopped"
        return "failed" if "failed" in outcomes else "finished"

    # --- runs -------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Finds or makes the corpora; if the text of a corpus has changed, makes another one."""
        for row in self._table.rows:
            experiment, number, manifest = self._experiment(row), 1, None
            folder, size = experiment.run.corpus_dir, experiment.model.vocab_size
            while manifest is None:
                path = mirror.open_workdir(self._root, folder, to_write=True).corpus
                try:
                    manifest = corpus.prepare(experiment.corpus, size, path, self._progress.report)
                except corpus.Changed as error:
                    if row.experiment.run.corpus_dir:
                        raise
                    changed = str(error).partition(";")[0]
                    self._progress.report(f"compare: {changed}; runs start again from step 0")
                    number += 1
                    folder = f"{experiment.run.corpus_dir}-{number}"
            # dataset/ holds the same documents as stream/.
            files = [(k, v) for k, v in manifest["files"].items() if not k.startswith("dataset/")]
            base = hash_weights(epath.Path(experiment.init_from)) if experiment.init_from else ""
            inputs = short_hash([files, manifest.get("documents_of_sources"), base])
            self._inputs[row.name] = folder, inputs

    def _set_members(self) -> None:
        self._results.members = []
        for seed in self._table.seeds:
            for row in self._table.rows:
                with prefix_errors(f"row {row.name}"):
                    experiment = dataclasses.replace(self._with_steps(row), seed=seed)
                _, inputs = self._inputs.get(row.name, ("", ""))
                name = f"{row.name}-{seed}-{short_hash([short_hash(experiment), inputs])[:8]}"
                folder = self._root / "runs" / name
                self._results.members.append(TableRun(row.name, seed, experiment, inputs, folder))

    def _experiment(self, row: Row) -> Experiment:
        """Returns the experiment of a row, with the folder of all rows with an equal corpus."""
        experiment = row.experiment
        name = short_hash([short_hash(experiment.corpus), experiment.model.vocab_size])
        shared, _ = self._inputs.get(row.name, (os.fspath(self._root / "corpora" / name), ""))
        run = dataclasses.replace(
            experiment.run,
            corpus_dir=experiment.run.corpus_dir or shared,
            # The last checkpoint is measured; the one before is a spare if the last is damaged.
            **{"keep_checkpoints": 2, "keep_best": 0, "keep_every": 0, "keep_steps": ()},
        )
        return dataclasses.replace(experiment, name=row.name, run=run)

    def _with_steps(self, row: Row) -> Experiment:
        experiment, steps = self._experiment(row), self._table.steps
        if self._table.cpu_seconds:
            costs = self._results.costs[short_hash(experiment)]
            steps = budget.steps_within(experiment, self._table.cpu_seconds, costs)
        return budget.with_steps(experiment, steps) if steps else experiment

    def _time(self) -> None:
        rows = {short_hash(self._experiment(row)): row for row in self._table.rows}
        missing = {key: row for key, row in rows.items() if key not in self._results.costs}
        costs: dict[str, list[float]] = {}
        for number in range(_ROUNDS if missing else 0):
            for key, row in missing.items():
                self._progress.report(f"compare: timing {row.name}, {number + 1} of {_ROUNDS}")
                folder = self._root / "timing"
                lines = budget.time_phases(self._experiment(row), folder, self._progress, _TIMED)
                cost = [max(line["cpu_seconds"], 1e-9) / line["steps"] for line in lines]
                costs[key] = [min(pair) for pair in zip(costs.get(key, cost), cost, strict=True)]
                jax.clear_caches()
        self._results.costs |= costs
        self._write()

    def _train_and_measure(self, member: TableRun) -> session.Outcome:
        experiment = member.experiment
        workdir = Workdir(member.folder, experiment.run.corpus_dir)
        probes = Probes(experiment.run.probes) if experiment.run.probes else None
        job = PretrainingJob(experiment, workdir, self._progress.report, probes=probes)
        if (outcome := session.run(job, self._progress)) != "finished":
            return outcome
        record = Record.read(os.fspath(member.folder))
        for column in self._missing_columns(member):
            if column.task is None:
                value = _measure(column.name, record)
            elif column.name.startswith("probe:"):
                value = _probe(column, workdir)
            else:
                outcome, value = self._finetune(column, column.task, member)
                if outcome != "finished":
                    return outcome
            if column.task and Column.of(column.name).examples != column.examples:
                raise InputError(
                    f"table.columns: {column.name}: its examples changed during the run; repeat "
                    "the command"
                )
            self._results.keep(member, column, value)
        return "finished"

    def _finetune(
        self, column: Column, task: Finetuning, member: TableRun
    ) -> tuple[session.Outcome, float | None]:
        task = dataclasses.replace(task, seed=member.seed)
        name = f"{task.name}-{short_hash([short_hash(task), column.examples])[:8]}"
        folder = self._root / "tasks" / member.folder.name / name
        outcome = finetune(task, os.fspath(member.folder), os.fspath(folder), self._progress)
        if outcome != "finished":
            return outcome, None
        return outcome, Record.read(os.fspath(folder)).evaluation[-1]["score"]

    def _missing_columns(self, member: TableRun) -> list[Column]:
        return [c for c in self._results.columns if not self._results.find(member, c)]

    def _write(self) -> None:
        self._results.write()
        table_files.write(self._results)


def _measure(name: str, record: Record) -> float | None:
    """Returns a value from the records of a finished run; None if the records lack it."""
    if name == "steps":
        assert record.total_steps is not None  # only a fine-tuning may not know it
        return float(record.total_steps)
    if name == "cpu_seconds":
        return times.cpu_seconds(record.timings)
    if name == "real_tokens":
        return _real_tokens(record)
    reach, last = REACH.fullmatch(name), record.evaluation[-1]
    if not reach and last["step"] != record.total_steps:
        return None  # the last state was not evaluated, since its loss was not finite
    if (reach or name == "below_unigrams") and "unigram_loss" not in last:
        return None  # the objective predicts no tokens
    if reach:
        return _seconds_to_reach(float(reach[1]), record)
    if name == "below_unigrams":
        return last["unigram_loss"] - losses.token_metrics(last)[0]
    objectives, metric = _METRICS[name]
    return last.get(f"{losses.find_task(last, objectives)}_{metric}")


# {column: (pre-training tasks, metric)}: the field {task}_{metric} of the task that a line has.
_METRICS = {
    "loss": (losses.TOKENS, "loss"),
    "accuracy": (losses.TOKENS, "accuracy"),
    "next_sentence": ({"next_sentence": ""}, "accuracy"),
}


def _seconds_to_reach(distance: float, record: Record) -> float | None:
    """Returns CPU seconds until a run was `distance` nats below the unigram baseline, or None.

    Losses are interpolated linearly between evaluations.
    """
    spent = times.cumulate(record.windows, lambda x: x["cpu_seconds"] / max(x["steps"], 1))
    before = (0, 0.0)  # at step 0 the loss is taken as the baseline, even if evaluated
    for line in record.evaluation:
        below = line["unigram_loss"] - losses.token_metrics(line)[0]
        if line["step"] and below >= distance:
            steps = np.interp(distance, (before[1], below), (before[0], line["step"]))
            return float(np.interp(steps, *spent))
        before = (line["step"], below) if line["step"] else before
    return None


def _real_tokens(record: Record) -> float:
    """Returns the number of positions that are not padding, over all steps."""
    total, before, experiment = 0.0, 0, record.experiment
    assert isinstance(experiment, Experiment)  # a table's runs pre-train
    for line in record.train:
        positions = 0
        for phase, end in zip(experiment.phases, experiment.ends, strict=True):
            steps = min(end, line["step"]) - max(end - phase.steps, before)
            positions += max(steps, 0) * phase.batch_size * phase.sequence_length
        total += positions * line.get("filled", 0.0)  # absent if all steps of the line were skipped
        before = line["step"]
    return total


def _probe(column: Column, workdir: Workdir) -> float:
    probes = Probes([column.name.partition(":")[2]], MINIMAL_PAIRS, column.name)
    (score,) = score_probes(probes, LoadedModel.of(workdir))["scores"].values()
    return score
