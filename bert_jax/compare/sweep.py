"""Fine-tunings that differ in some fields, one after the other, and their scores.

Small sets give scores that depend on the seed (Devlin et al. 2018, appendix A.3, try a few settings
on the validation examples; Dodge et al. 2020 count what seeds make): hence means over seeds.
"""

import dataclasses
import itertools
import json
import os
import re
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

from etils import epath

from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.errors import InputError
from bert_jax.report.render import Table
from bert_jax.running import lines as lines_lib
from bert_jax.running import session
from bert_jax.running.progress import Progress
from bert_jax.storage import buckets, mirror
from bert_jax.tasks import job

FORMAT_VERSION = 1
# Characters of a value that a folder's name may not hold everywhere.
_ODD = re.compile(r"[^A-Za-z0-9.+-]")


@dataclasses.dataclass
class Member:
    """One of the runs."""

    folder: str  # its name
    settings: dict[str, str]  # {field: value}, as they were written
    experiment: Finetuning  # with them
    origin: dict[str, Any]  # see session.run
    outcome: str = ""  # how it ended; "" if it did not yet
    # Lines of metrics.jsonl: of the last evaluation, and of that with the highest score; None
    # before there is one.
    last: dict[str, Any] | None = None
    best: dict[str, Any] | None = None


def members(file: str, settings: Sequence[str], axes: Sequence[str]) -> list[Member]:
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
    made: dict[str, Member] = {}
    for chosen in itertools.product(*values.values()):
        folder = "_".join(f"{n}-{_ODD.sub('_', v)}" for n, v in zip(names, chosen, strict=True))
        if folder in made:
            raise InputError(f"--sweep: two runs would both lie in {folder}; sweep other values")
        pairs = dict(zip(values, chosen, strict=True))
        more = [f"{field}={value}" for field, value in pairs.items()]
        try:
            experiment, origin = config.load_with_origin(file, [*settings, *more], Finetuning)
        except InputError as error:
            raise InputError(f"--sweep: {error}") from error
        made[folder] = Member(folder, pairs, experiment, origin)
    return list(made.values())


def run(
    of: list[Member], base: str | None, root: str | None, progress: Progress
) -> session.Outcome:
    """Runs what is left of a sweep, and shows the scores.

    A run that fails, since its parameters ran away, for example, does not keep the others from
    going on.

    `base` is a base or a run, None the one that the experiment names; `root` the folder of the
    runs, None runs/NAME-sweep.
    """
    folder = epath.Path(root or f"runs/{of[0].experiment.name}-sweep")
    there = buckets.names(folder)
    if there and not there & {"sweep.json", *(member.folder for member in of)}:
        raise InputError(
            f"{folder}: holds a run or other files and no sweep; choose another folder with "
            "--workdir"
        )
    for number, member in enumerate(of, 1):
        place = folder / member.folder
        progress.say(f"sweep {number} of {len(of)}: {member.folder}")
        # A finished run ends at once, unless its base or its examples are others now.
        member.outcome = job.finetune(
            member.experiment, base, os.fspath(place), progress, member.origin
        )
        lines = lines_lib.Lines(mirror.opened(place).metrics).read()
        scored = [line for line in lines if line["kind"] == "scores"]
        member.last = scored[-1] if scored else None
        member.best = max(scored, key=lambda line: line["score"], default=None)
        buckets.write(folder / "sweep.json", json.dumps(_record(of), indent=2) + "\n")
        if member.outcome == "stopped":
            return "stopped"
    for line in table(of):
        progress.say(line)
    return "failed" if any(member.outcome == "failed" for member in of) else "finished"


def _record(of: list[Member]) -> dict[str, Any]:
    names = ("folder", "settings", "outcome", "last", "best")
    return {
        "format_version": FORMAT_VERSION,
        "name": of[0].experiment.name,
        "score": _score(of),
        "runs": [{name: getattr(member, name) for name in names} for member in of],
        "groups": _groups(of),
    }


def _score(of: list[Member]) -> str:
    return ", ".join(sorted({member.experiment.task.main_score for member in of}))


def _groups(of: list[Member]) -> list[dict[str, Any]]:
    """Returns means over the finished runs that differ by the seed alone."""
    by_group: dict[tuple, list[float]] = {}
    for member in of:
        settings = tuple((f, value) for f, value in member.settings.items() if f != "seed")
        scores = by_group.setdefault(settings, [])
        if member.last and member.outcome == "finished":
            scores.append(member.last["score"])
    return [
        {
            "settings": dict(settings),
            "runs": len(scores),
            "mean": statistics.fmean(scores) if scores else None,
            "deviation": statistics.stdev(scores) if len(scores) > 1 else None,
        }
        for settings, scores in by_group.items()
    ]


def table(of: list[Member]) -> Iterator[str]:
    """Yields lines with every run's scores, and their means over the seeds."""
    rows = []
    for member in of:
        cells = [member.outcome, "-", "-", "-"]
        if member.outcome == "finished" and member.last and member.best:
            last, best = member.last, member.best
            cells = [last["step"], _four(last["score"]), _four(best["score"]), best["step"]]
        rows.append([*member.settings.values(), *map(str, cells)])
    yield f"{_score(of)} on the validation examples, of the last evaluation and of the best:"
    yield from Table([*of[0].settings, "step", "last", "best", "of step"], rows, 0).lines()
    groups = _groups(of)
    rows = [
        [*one["settings"].values(), str(one["runs"]), _four(one["mean"]), _four(one["deviation"])]
        for one in groups
    ]
    yield "of the last evaluations, over seeds, the mean and the standard deviation (n - 1):"
    yield from Table([*groups[0]["settings"], "runs", "mean", "deviation"], rows, 0).lines()


def _four(number: float | None) -> str:
    return "-" if number is None else f"{number:.4f}"
