"""Fine-tunings that differ in some fields, one after the other, and what their scores say.

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
from bert_jax.storage import mirror
from bert_jax.tasks import job
from bert_jax.training import lines as lines_lib
from bert_jax.training import session
from bert_jax.training.progress import Progress

FORMAT_VERSION = 1
_SEED = "seed"
# Of a value, what a folder's name may not hold everywhere.
_ODD = re.compile(r"[^A-Za-z0-9.+-]")


@dataclasses.dataclass
class Member:
    """One of the runs.

    Attributes:
      name: of its folder.
      settings: {field: value}, as they were written.
      claim: with them.
      origin: see session.run.
      outcome: how it ended; "" if it did not yet.
      last, best: lines of metrics.jsonl: of the last evaluation, and of that with the highest
        score; None before there is one.
    """

    name: str
    settings: dict[str, str]
    claim: Finetuning
    origin: dict[str, Any]
    outcome: str = ""
    last: dict[str, Any] | None = None
    best: dict[str, Any] | None = None

    @property
    def group(self) -> dict[str, str]:
        """What it shares with those that differ by the seed alone."""
        return {field: value for field, value in self.settings.items() if field != _SEED}


def members(file: str, settings: Sequence[str], axes: Sequence[str]) -> list[Member]:
    """The runs of a sweep: all products of the values.

    Args:
      file: of the task.
      settings: `--set` strings of all of them.
      axes: FIELD=V1,V2 each.

    Raises:
      InputError: an axis that is not so written or is there twice, or a claim that is refused.
    """
    values: dict[str, list[str]] = {}
    for axis in axes:
        field, _, text = axis.partition("=")
        field, found = field.strip(), [value.strip() for value in text.split(",")]
        if not field or "" in found or len(set(found)) < len(found):
            raise InputError(
                f"--sweep {axis}: write it as FIELD=V1,V2, each value once, e.g. seed=1,2,3"
            )
        if field in values:
            raise InputError(f"--sweep {axis}: {field} is swept already; give all values at once")
        values[field] = found
    ends = [field.rpartition(".")[2] for field in values]
    names = ends if len(set(ends)) == len(ends) else list(values)
    made: dict[str, Member] = {}
    for chosen in itertools.product(*values.values()):
        pairs = dict(zip(values, chosen, strict=True))
        words = (f"{n}-{_ODD.sub('_', v)}" for n, v in zip(names, chosen, strict=True))
        name = "_".join(words)
        if name in made:
            raise InputError(f"--sweep: two runs would both lie in {name}; sweep other values")
        more = [f"{field}={value}" for field, value in pairs.items()]
        try:
            claim, origin = config.load_with_origin(file, [*settings, *more], Finetuning)
        except InputError as error:
            raise InputError(f"--sweep: {error}") from error
        made[name] = Member(name, pairs, claim, origin)
    return list(made.values())


def run(
    of: list[Member], base: str | None, root: str | None, progress: Progress
) -> session.Outcome:
    """Does what is left of a sweep, and tells what came of it.

    A run that fails, its parameters having run away, say, keeps none of the others from going on.

    Args:
      of: as `members` gives them.
      base: a base or a run; None: the one that the claim names.
      root: the folder of the runs; None: runs/NAME-sweep.
      progress: shows what happens.

    Raises:
      InputError: a folder with other things, or what a fine-tuning of them raises.
    """
    folder = epath.Path(root or f"runs/{of[0].claim.name}-sweep")
    _require_ours(folder, of)
    for number, member in enumerate(of, 1):
        place = folder / member.name
        progress.say(f"sweep {number} of {len(of)}: {member.name}")
        # One that is finished says so, unless its base or its examples are others now.
        member.outcome = job.finetune(member.claim, base, os.fspath(place), progress, member.origin)
        lines = lines_lib.Lines(mirror.opened(place).metrics).read()
        scored = [line for line in lines if line["kind"] == "scores"]
        member.last = scored[-1] if scored else None
        member.best = max(scored, key=lambda line: line["score"], default=None)
        mirror.write(folder / "sweep.json", json.dumps(_record(of), indent=2) + "\n")
        if member.outcome == "stopped":
            return "stopped"
    for line in table(of):
        progress.say(line)
    return "failed" if any(member.outcome == "failed" for member in of) else "finished"


def table(of: list[Member]) -> Iterator[str]:
    """Every run's scores, and their means over the seeds."""
    fields = list(of[0].settings)
    rows = [[*fields, "step", "last", "best", "of step"]]
    for member in of:
        values = list(member.settings.values())
        if member.outcome != "finished" or member.last is None or member.best is None:
            rows.append([*values, member.outcome, "-", "-", "-"])
            continue
        scores = [f"{line['score']:.4f}" for line in (member.last, member.best)]
        rows.append([*values, str(member.last["step"]), *scores, str(member.best["step"])])
    yield f"{_score(of)} on the validation examples, of the last evaluation and of the best:"
    yield from _aligned(rows)
    rows = [[*(field for field in fields if field != _SEED), "runs", "mean", "deviation"]]
    for group in _groups(of):
        deviation = "-" if group["deviation"] is None else f"{group['deviation']:.4f}"
        mean = "-" if group["mean"] is None else f"{group['mean']:.4f}"
        rows.append([*group["settings"].values(), str(group["runs"]), mean, deviation])
    yield "of the last evaluations, over seeds, the mean and the standard deviation (n - 1):"
    yield from _aligned(rows)


def _aligned(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def _groups(of: list[Member]) -> list[dict[str, Any]]:
    """For each choice of values but the seed, of those that are finished."""
    found: dict[str, list[Member]] = {}
    for member in of:
        found.setdefault(json.dumps(member.group), []).append(member)
    groups = []
    for alike in found.values():
        scores = [m.last["score"] for m in alike if m.last and m.outcome == "finished"]
        groups.append(
            {
                "settings": alike[0].group,
                "runs": len(scores),
                "mean": statistics.fmean(scores) if scores else None,
                "deviation": statistics.stdev(scores) if len(scores) > 1 else None,
            }
        )
    return groups


def _record(of: list[Member]) -> dict[str, Any]:
    return {
        "format_version": FORMAT_VERSION,
        "name": of[0].claim.name,
        "score": _score(of),
        "runs": [
            {
                "folder": member.name,
                "settings": member.settings,
                "outcome": member.outcome,
                "last": member.last,
                "best": member.best,
            }
            for member in of
        ],
        "groups": _groups(of),
    }


def _score(of: list[Member]) -> str:
    return ", ".join(sorted({member.claim.task.main_score for member in of}))


def _require_ours(folder: epath.Path, of: list[Member]) -> None:
    there = mirror.names(folder)
    if there and not there & {"sweep.json", *(member.name for member in of)}:
        raise InputError(
            f"{folder}: holds a run or other files and no sweep; choose another folder with "
            "--workdir"
        )
