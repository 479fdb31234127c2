"""The runs of a table, one after the other, and what is measured of them.

W/table.json      what was measured, and the costs that set the numbers of steps
W/table.txt       means and standard errors; table.csv the same, table.html with plots
W/runs/           a workdir for each row and seed
W/tasks/          a workdir for each of their fine-tunings
W/corpora/        one for all rows whose corpora are equal

Their names end in hashes: where settings, text or examples change, there are others.
"""

import dataclasses
import os

import jax
import numpy as np
from etils import epath

from bert_jax.checkpoints.base import begins_with
from bert_jax.config import Experiment, Finetuning, Row
from bert_jax.config.comparison import REACH
from bert_jax.data import corpus
from bert_jax.errors import InputError, prefix_errors
from bert_jax.model import losses
from bert_jax.pretraining import pretraining
from bert_jax.pretraining.loaded import Loaded
from bert_jax.running import session
from bert_jax.running.progress import Progress
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks import job
from bert_jax.tasks.probes import Probes, of_trained
from bert_jax.tools.compare import budget, table_files
from bert_jax.tools.compare.results import PAIRS, Column, Results, TableRun, sha256
from bert_jax.tools.report import times
from bert_jax.tools.report.run_record import Record

# Rounds in which rows take turns in having their steps timed; the fastest counts.
_ROUNDS = 2
# Steps of each phase that are timed then, after as many that warm caches.
_TIMED = 25


class Comparison:
    """The runs of a table."""

    def __init__(self, results: Results, progress: Progress):
        self._results, self._table, self._root = results, results.table, results.root
        self._progress = progress
        # By row: the folder of its corpus, and a hash of what is read there.
        self._read: dict[str, tuple[str, str]] = {}
        if not self._table.cpu_seconds:
            self._set_members()

    def run(self) -> session.Outcome:
        """Does what is missing, and writes the table after each run.

        A run that fails does not keep the others from going on.
        """
        self._results.write()  # by which the folder is known for a table's
        self._prepare()
        if self._table.cpu_seconds:
            try:
                self._time()
            except budget.Stopped as stopped:
                return stopped.args[0]
        self._set_members()
        self._write()
        ends, members = [], self._results.members
        for number, member in enumerate(members, 1):
            if self._missing(member):
                which = f"{number} of {len(members)}: {member.row}, seed {member.seed}"
                self._progress.report(f"compare {which}")
                ends.append(self._member(member))
                table_files.write(self._results)
                # Programs of rows that are done would be looked through for garbage for ever.
                jax.clear_caches()
                if ends[-1] == "stopped":
                    return "stopped"
        return "failed" if "failed" in ends else "finished"

    # --- what is run ------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """Makes the corpora, or finds them; where text has changed since, there is another one."""
        for row in self._table.rows:
            of, number, made = self._experiment(row), 1, None
            folder = of.run.corpus_dir
            while made is None:
                place, size = Workdir(self._root, folder).corpus, of.model.vocab_size
                try:
                    made = corpus.prepare(of.corpus, size, place, self._progress.report)
                except corpus.Changed as error:
                    if row.experiment.run.corpus_dir:
                        raise
                    self._progress.report(f"compare: {str(error).partition(';')[0]}; runs restart")
                    number += 1
                    folder = f"{of.run.corpus_dir}-{number}"
            files = [one for one in made["files"].items() if not one[0].startswith("dataset/")]
            base = begins_with(epath.Path(of.init_from)) if of.init_from else ""
            read = sha256([files, made.get("documents_of_sources"), base])
            self._read[row.name] = folder, read

    def _set_members(self) -> None:
        self._results.members = []
        for seed in self._table.seeds:
            for row in self._table.rows:
                with prefix_errors(f"row {row.name}"):
                    experiment = dataclasses.replace(self._with_steps(row), seed=seed)
                _, read = self._read.get(row.name, ("", ""))
                name = f"{row.name}-{seed}-{sha256([sha256(experiment), read])[:8]}"
                folder = self._root / "runs" / name
                self._results.members.append(TableRun(row.name, seed, experiment, read, folder))

    def _experiment(self, row: Row) -> Experiment:
        """Returns what a row runs, with a corpus folder that equal corpora share."""
        of = row.experiment
        known = sha256([sha256(of.corpus), of.model.vocab_size])
        shared, _ = self._read.get(row.name, (os.fspath(self._root / "corpora" / known), ""))
        run = dataclasses.replace(
            of.run,
            corpus_dir=of.run.corpus_dir or shared,
            # The last one is asked; the one before is needed where it cannot be used.
            **{"keep_checkpoints": 2, "keep_best": 0, "keep_every": 0},
        )
        return dataclasses.replace(of, name=row.name, run=run)

    def _with_steps(self, row: Row) -> Experiment:
        """Returns what a row runs, with the steps that the table's budget gives it."""
        experiment, steps = self._experiment(row), self._table.steps
        if self._table.cpu_seconds:
            costs = self._results.costs[sha256(experiment)]
            steps = budget.steps_within(experiment, self._table.cpu_seconds, costs)
        return budget.with_steps(experiment, steps) if steps else experiment

    def _time(self) -> None:
        """Takes the time of a step of each row of which it is not known."""
        rows = {sha256(self._experiment(row)): row for row in self._table.rows}
        missing = {key: row for key, row in rows.items() if key not in self._results.costs}
        costs: dict[str, list[float]] = {}
        for number in range(_ROUNDS if missing else 0):
            for key, row in missing.items():
                self._progress.report(f"compare: timing {row.name}, {number + 1} of {_ROUNDS}")
                folder = self._root / "timing"
                laps = budget.laps(self._experiment(row), folder, self._progress, _TIMED)
                one = [max(lap["cpu_seconds"], 1e-9) / lap["steps"] for lap in laps]
                costs[key] = [min(pair) for pair in zip(costs.get(key, one), one, strict=True)]
                jax.clear_caches()
        self._results.costs |= costs
        self._write()

    def _member(self, member: TableRun) -> session.Outcome:
        """Does a run, and measures it."""
        experiment = member.experiment
        workdir = Workdir(member.folder, experiment.run.corpus_dir)
        probes = Probes(experiment.run.probes) if experiment.run.probes else None
        outcome = pretraining.pretrain(experiment, workdir, "keep", self._progress, probes=probes)
        if outcome != "finished":
            return outcome
        record = Record.read(os.fspath(member.folder))
        for column in self._missing(member):
            if column.task is None:
                value = _measured(column.name, record)
            elif column.name.startswith("probe:"):
                value = _probed(column, workdir)
            else:
                outcome, value = self._finetuned(column, column.task, member)
                if outcome != "finished":
                    return outcome
            if column.task and Column.of(column.name).examples != column.examples:
                raise InputError(
                    f"table.columns: {column.name}: its examples changed while they were asked; "
                    "run again"
                )
            self._results.keep(member, column, value)
        return "finished"

    def _finetuned(
        self, column: Column, task: Finetuning, member: TableRun
    ) -> tuple[session.Outcome, float | None]:
        task = dataclasses.replace(task, seed=member.seed)
        name = f"{task.name}-{sha256([sha256(task), column.examples])[:8]}"
        folder = self._root / "tasks" / member.folder.name / name
        base = os.fspath(member.folder)
        outcome = job.finetune(task, base, os.fspath(folder), self._progress)
        if outcome != "finished":
            return outcome, None
        return outcome, Record.read(os.fspath(folder)).evaluation[-1]["score"]

    def _missing(self, member: TableRun) -> list[Column]:
        columns = self._results.columns
        return [column for column in columns if not self._results.find(member, column)]

    def _write(self) -> None:
        self._results.write()
        table_files.write(self._results)


def _measured(name: str, record: Record) -> float | None:
    """Returns a value from the records of a finished run; None if the run does not know it."""
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
        return None  # of an objective without pieces
    if reach:
        return _reached(float(reach[1]), record)
    if name == "below_unigrams":
        return last["unigram_loss"] - losses.token_metrics(last)[0]
    tasks, what = _METRICS[name]
    return last.get(f"{losses.find_task(last, tasks)}_{what}")


# {column: (names of the objectives, the metric)}, to find the column in a line of metrics.jsonl.
_METRICS = {
    "loss": (losses.TOKENS, "loss"),
    "accuracy": (losses.TOKENS, "accuracy"),
    "next_sentence": ({"next_sentence": ""}, "accuracy"),
}


def _reached(nat: float, record: Record) -> float | None:
    """Returns seconds of CPU until a run was so far below the unigram line; None: it never was.

    Between evaluations it falls in a straight line.
    """
    spent = times.totals(record.laps, lambda lap: lap["cpu_seconds"] / max(lap["steps"], 1))
    before = (0, 0.0)
    for line in record.evaluation:
        below = line["unigram_loss"] - losses.token_metrics(line)[0]
        if line["step"] and below >= nat:
            steps = np.interp(nat, (before[1], below), (before[0], line["step"]))
            return float(np.interp(steps, *spent))
        before = (line["step"], below) if line["step"] else before
    return None


def _real_tokens(record: Record) -> float:
    """Returns how many positions of all steps held no padding."""
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


def _probed(column: Column, workdir: Workdir) -> float:
    probes = Probes([column.name.partition(":")[2]], PAIRS, column.name)
    (score,) = of_trained(probes, Loaded.of(workdir.root))["scores"].values()
    return score
