"""Fine-tunings that differ in some fields, one after the other, and their scores.

On small sets scores depend on the seed, hence means over seeds. (Devlin et al. 2018, appendix A.3,
try a few settings on the validation examples; Dodge et al. 2020 measure the effect of seeds.)
"""

import itertools
import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from etils import epath

from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.errors import InputError, prefix_errors
from bert_jax.running import session
from bert_jax.running.progress import Progress
from bert_jax.storage import mirror
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import SWEEP
from bert_jax.tasks.finetuning_job import finetune
from bert_jax.tools.report.render import PageTable

FORMAT_VERSION = 1
# Characters of a value that some file systems do not allow in a folder's name.
_NOT_PORTABLE = re.compile(r"[^A-Za-z0-9.+-]")


class SweepRun(NamedTuple):
    """One run of a sweep."""

    folder: str  # name of its folder
    settings: dict[str, str]  # {field: value}, as written in --sweep
    experiment: Finetuning  # the experiment with these settings
    origin: dict[str, Any]  # see session.run


def combine_values(axes: Sequence[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yields each combination of the values of `axes`, each FIELD=V1,V2.

    Yields:
      (the name of its folder, {field: value}).
    """
    values: dict[str, list[str]] = {}
    for axis in axes:
        field, _, text = axis.partition("=")
        field, field_values = field.strip(), [value.strip() for value in text.split(",")]
        if not field or "" in field_values or len(set(field_values)) < len(field_values):
            raise InputError(
                f"--sweep {axis}: write it as FIELD=V1,V2, each value once, e.g. seed=1,2,3"
            )
        if field in values:
            raise InputError(f"--sweep {axis}: {field} is swept already; give all values at once")
        values[field] = field_values
    short_names = [field.rpartition(".")[2] for field in values]
    names = short_names if len(set(short_names)) == len(short_names) else list(values)
    for product in itertools.product(*values.values()):
        named = zip(names, product, strict=True)
        folder = "_".join(f"{name}-{_NOT_PORTABLE.sub('_', value)}" for name, value in named)
        yield folder, dict(zip(values, product, strict=True))


def members(file: str, settings: Sequence[str], axes: Sequence[str]) -> list[SweepRun]:
    """Returns the runs of a sweep: all combinations of the values.

    Each of `axes` is FIELD=V1,V2; `settings` apply to all runs.
    """
    runs: dict[str, SweepRun] = {}
    for folder, swept in combine_values(axes):
        if folder in runs:
            raise InputError(f"--sweep: two runs would both lie in {folder}; sweep other values")
        overrides = [*settings, *(f"{field}={value}" for field, value in swept.items())]
        with prefix_errors("--sweep"):
            experiment, origin = config.load_with_origin(file, overrides, Finetuning)
        runs[folder] = SweepRun(folder, swept, experiment, origin)
    return list(runs.values())


def run_member(
    member: SweepRun, base: str | None, workdir: epath.Path, progress: Progress
) -> tuple[session.Outcome, list[dict[str, Any]]]:
    """Trains a run of a sweep unless it is finished.

    Returns:
      How it ended, and its lines of metrics.jsonl with scores.
    """
    # A finished run ends at once, unless its base or its examples have changed.
    outcome = finetune(member.experiment, base, os.fspath(workdir), progress, member.origin)
    lines = JsonLines(mirror.open_workdir(workdir).metrics).read()
    return outcome, [line for line in lines if line["kind"] == "scores"]


def run(
    sweep: list[SweepRun], base: str | None, root: str | None, progress: Progress
) -> session.Outcome:
    """Trains the missing runs of a sweep, and prints the scores.

    If a run fails, for example because it diverges, the remaining ones are trained nevertheless.
    `base` is a base or a run to fine-tune; None: the experiment's base. `root` is the folder of
    the runs; None: runs/NAME-sweep.
    """
    folder = epath.Path(root or f"runs/{sweep[0].experiment.name}-sweep")
    names = storage_of(folder).names(folder)
    if names and not names & {SWEEP, *(member.folder for member in sweep)}:
        raise InputError(
            f"{folder}: holds a run or other files and no sweep; choose another folder with "
            "--workdir"
        )
    # Each run's outcome ("" until it ends), and its lines of metrics.jsonl for the last evaluation
    # and for the one with the highest score (None before there is one).
    initial: dict[str, Any] = {"outcome": "", "last": None, "best": None}
    runs = [{"folder": member.folder, "settings": member.settings, **initial} for member in sweep]
    score = ", ".join(sorted({member.experiment.task.main_score for member in sweep}))
    record = {"format_version": FORMAT_VERSION, "name": sweep[0].experiment.name, "score": score}
    for number, (member, entry) in enumerate(zip(sweep, runs, strict=True), 1):
        workdir = folder / member.folder
        progress.report(f"sweep {number} of {len(sweep)}: {member.folder}")
        outcome, scored = run_member(member, base, workdir, progress)
        best = max(scored, key=lambda line: line["score"], default=None)
        entry |= {"outcome": outcome, "last": scored[-1] if scored else None, "best": best}
        record |= {"runs": runs, "groups": _groups(runs)}
        storage_of(folder).write(folder / SWEEP, json.dumps(record, indent=2) + "\n")
        if outcome == "stopped":
            return "stopped"
    for line in table(record):
        progress.report(line)
    return "failed" if any(run["outcome"] == "failed" for run in runs) else "finished"


def _groups(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns mean scores of the finished runs that differ only in the seed."""
    by_group: dict[tuple, list[float]] = {}
    for run in runs:
        settings = tuple((f, value) for f, value in run["settings"].items() if f != "seed")
        scores = by_group.setdefault(settings, [])
        if run["last"] and run["outcome"] == "finished":
            scores.append(run["last"]["score"])
    return [
        {
            "settings": dict(settings),
            "runs": len(scores),
            "mean": statistics.fmean(scores) if scores else None,
            "deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        }
        for settings, scores in by_group.items()
    ]


def table(record: dict[str, Any]) -> Iterator[str]:
    """Yields lines with the scores of each run, and their means over the seeds."""
    runs, groups = record["runs"], record["groups"]
    rows = []
    for run in runs:
        cells = [run["outcome"], "-", "-", "-"]
        if run["outcome"] == "finished" and run["last"]:
            last, best = run["last"], run["best"]
            cells = [last["step"], _format(last["score"]), _format(best["score"]), best["step"]]
        rows.append([*run["settings"].values(), *map(str, cells)])
    yield f"{record['score']} on the validation examples, of the last evaluation and of the best:"
    yield from PageTable([*runs[0]["settings"], "step", "last", "best", "at step"], rows, 0).lines()
    rows = [
        [*group["settings"].values(), str(group["runs"])]
        + [_format(group[name]) for name in ("mean", "deviation")]
        for group in groups
    ]
    yield "mean and standard deviation (n - 1) over seeds, of the last evaluations:"
    yield from PageTable([*groups[0]["settings"], "runs", "mean", "deviation"], rows, 0).lines()


def _format(number: float | None) -> str:
    return "-" if number is None else f"{number:.4f}"
