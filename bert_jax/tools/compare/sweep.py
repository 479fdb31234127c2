"""Fine-tunings that differ in some fields, one after the other, and their scores.

Small sets give scores that depend on the seed (Devlin et al. 2018, appendix A.3, try a few settings
on the validation examples; Dodge et al. 2020 count what seeds make): hence means over seeds.
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
from bert_jax.tasks import job
from bert_jax.tools.report.render import PageTable

FORMAT_VERSION = 1
# Characters of a value that a folder's name may not hold everywhere.
_ODD = re.compile(r"[^A-Za-z0-9.+-]")


class SweepRun(NamedTuple):
    """One of the runs."""

    folder: str  # its name
    settings: dict[str, str]  # {field: value}, as they were written
    experiment: Finetuning  # with them
    origin: dict[str, Any]  # see session.run


def members(file: str, settings: Sequence[str], axes: Sequence[str]) -> list[SweepRun]:
    """Returns the runs of a sweep: all products of the values.

    `axes` are FIELD=V1,V2 each; `settings` hold for all.
    """
    values: dict[str, list[str]] = {}
    for axis in axes:
        field, _, text = axis.partition("=")
        field, of_field = field.strip(), [value.strip() for value in text.split(",")]
        if not field or "" in of_field or len(set(of_field)) < len(of_field):
            raise InputError(
                f"--sweep {axis}: write it as FIELD=V1,V2, each value once, e.g. seed=1,2,3"
            )
        if field in values:
            raise InputError(f"--sweep {axis}: {field} is swept already; give all values at once")
        values[field] = of_field
    ends = [field.rpartition(".")[2] for field in values]
    names = ends if len(set(ends)) == len(ends) else list(values)
    runs: dict[str, SweepRun] = {}
    for chosen in itertools.product(*values.values()):
        folder = "_".join(f"{n}-{_ODD.sub('_', v)}" for n, v in zip(names, chosen, strict=True))
        if folder in runs:
            raise InputError(f"--sweep: two runs would both lie in {folder}; sweep other values")
        pairs = dict(zip(values, chosen, strict=True))
        more = [f"{field}={value}" for field, value in pairs.items()]
        with prefix_errors("--sweep"):
            experiment, origin = config.load_with_origin(file, [*settings, *more], Finetuning)
        runs[folder] = SweepRun(folder, pairs, experiment, origin)
    return list(runs.values())


def run(
    sweep: list[SweepRun], base: str | None, root: str | None, progress: Progress
) -> session.Outcome:
    """Runs what is left of a sweep, and shows the scores.

    A run that fails, since its parameters ran away, for example, does not keep the others from
    going on.

    `base` is a base or a run, None the one that the experiment names; `root` the folder of the
    runs, None runs/NAME-sweep.
    """
    folder = epath.Path(root or f"runs/{sweep[0].experiment.name}-sweep")
    there = storage_of(folder).names(folder)
    if there and not there & {"sweep.json", *(member.folder for member in sweep)}:
        raise InputError(
            f"{folder}: holds a run or other files and no sweep; choose another folder with "
            "--workdir"
        )
    # Each run's outcome ("" until it ends), and its lines of metrics.jsonl for the last evaluation
    # and for the one with the highest score (None before there is one).
    ends: dict[str, Any] = {"outcome": "", "last": None, "best": None}
    runs = [{"folder": one.folder, "settings": one.settings, **ends} for one in sweep]
    score = ", ".join(sorted({member.experiment.task.main_score for member in sweep}))
    record = {"format_version": FORMAT_VERSION, "name": sweep[0].experiment.name, "score": score}
    for number, (member, one) in enumerate(zip(sweep, runs, strict=True), 1):
        place = folder / member.folder
        progress.report(f"sweep {number} of {len(sweep)}: {member.folder}")
        # A finished run ends at once, unless its base or its examples are others now.
        outcome = job.finetune(member.experiment, base, os.fspath(place), progress, member.origin)
        lines = JsonLines(mirror.open_workdir(place).metrics).read()
        scored = [line for line in lines if line["kind"] == "scores"]
        best = max(scored, key=lambda line: line["score"], default=None)
        one |= {"outcome": outcome, "last": scored[-1] if scored else None, "best": best}
        record |= {"runs": runs, "groups": _groups(runs)}
        storage_of(folder).write(folder / "sweep.json", json.dumps(record, indent=2) + "\n")
        if outcome == "stopped":
            return "stopped"
    for line in table(record):
        progress.report(line)
    return "failed" if any(one["outcome"] == "failed" for one in runs) else "finished"


def _groups(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns means over the finished runs that differ by the seed alone."""
    by_group: dict[tuple, list[float]] = {}
    for one in runs:
        settings = tuple((f, value) for f, value in one["settings"].items() if f != "seed")
        scores = by_group.setdefault(settings, [])
        if one["last"] and one["outcome"] == "finished":
            scores.append(one["last"]["score"])
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
    """Yields lines with every run's scores, and their means over the seeds."""
    runs, groups = record["runs"], record["groups"]
    rows = []
    for one in runs:
        cells = [one["outcome"], "-", "-", "-"]
        if one["outcome"] == "finished" and one["last"]:
            last, best = one["last"], one["best"]
            cells = [last["step"], _four(last["score"]), _four(best["score"]), best["step"]]
        rows.append([*one["settings"].values(), *map(str, cells)])
    yield f"{record['score']} on the validation examples, of the last evaluation and of the best:"
    yield from PageTable([*runs[0]["settings"], "step", "last", "best", "of step"], rows, 0).lines()
    rows = [
        [*one["settings"].values(), str(one["runs"]), _four(one["mean"]), _four(one["deviation"])]
        for one in groups
    ]
    yield "of the last evaluations, over seeds, the mean and the standard deviation (n - 1):"
    yield from PageTable([*groups[0]["settings"], "runs", "mean", "deviation"], rows, 0).lines()


def _four(number: float | None) -> str:
    return "-" if number is None else f"{number:.4f}"
