"""Two runs that should be one: their states, lines, batches and corpora."""

import dataclasses
import hashlib
import json
import pathlib
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax.config import Experiment, Parallelism
from bert_jax.errors import printable
from bert_jax.storage.workdir import Workdir
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.checksums import path_of
from bert_jax.training.lines import Lines
from bert_jax.training.objective import Pretraining
from bert_jax.verify.notes import Execution


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Two things, compared.

    Attributes:
      whose: the run that is compared with the undisturbed one.
      what: in words, with how much of it there is.
      differences: a line each; none if they are the same.
    """

    whose: str
    what: str
    differences: list[str]


def states(experiment: Experiment, ours: pathlib.Path, theirs: pathlib.Path) -> Comparison:
    """The last checkpoints of two workdirs, bit for bit."""
    (a, a_beside), (b, b_beside) = (last_state(experiment, place) for place in (ours, theirs))
    a, b = _named(a), _named(b)
    differing = [name for name in a if a[name].tobytes() != b[name].tobytes()]
    differences = []
    if differing:
        first = differing[0]
        by = np.abs(a[first].astype(np.float64) - b[first].astype(np.float64)).max()
        differences = [
            f"{len(differing)} of {len(a)} arrays differ, the first is {first}, by {by:.3g} at most"
        ]
    for name in sorted((a_beside.keys() | b_beside.keys()) - {"checksums"}):  # of these arrays
        if a_beside.get(name) != b_beside.get(name):
            differences.append(f"the checkpoint's {name} differs")
    total = sum(value.size for value in a.values())
    what = f"parameters, optimizer and counters: {len(a)} arrays, {total:,} numbers, bit for bit"
    return Comparison(ours.name, what, differences)


def last_state(experiment: Experiment, root: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """The last state of a workdir, on the host, and the JSON beside it."""
    here = mesh_lib.make_mesh(Parallelism(), jax.local_devices(backend="cpu")[:1])
    abstract = step.abstract_state(
        Pretraining(experiment.model), experiment.optimizer, Parallelism(), here
    )
    place = Workdir(root).checkpoints
    with Checkpoints(place, experiment.run, "read") as saved:
        restored = saved.restore(experiment.total_steps, abstract)
    return jax.device_get(restored.state), restored.metadata


def _named(state: Any) -> dict[str, np.ndarray]:
    """{path: array} of a tree."""
    leaves = jax.tree.leaves_with_path(state)
    return {path_of(path): np.asarray(value) for path, value in leaves}


def texts(name: str, ours: pathlib.Path, theirs: pathlib.Path) -> Comparison:
    """A file of lines in two workdirs, byte for byte."""
    a, b = ((place / name).read_bytes().splitlines() for place in (ours, theirs))
    what = f"{name}: {len(b)} lines, byte for byte"
    if a == b:
        return Comparison(ours.name, what, [])
    numbered = enumerate(zip(a, b, strict=False), 1)
    first = next((i for i, (x, y) in numbered if x != y), min(len(a), len(b)) + 1)
    ours_there, theirs_there = (
        printable(x[first - 1].decode(errors="replace")[:120]) if first <= len(x) else "nothing"
        for x in (a, b)
    )
    differs = f"{name}:{first} differs: {ours_there} and undisturbed {theirs_there}"
    return Comparison(ours.name, what, [differs])


def rows(whose: str, experiment: Experiment, survivors: dict[int, Execution]) -> Comparison:
    """Whether each row of each phase was trained on once.

    Args:
      whose: the run.
      experiment: the claim.
      survivors: {step: its last execution}.
    """
    differences, count, first = [], 0, 0
    for number, phase in enumerate(experiment.phases):
        expected = phase.steps * phase.batch_size
        steps = range(first, first + phase.steps)
        seen = [survivors[s].rows for s in steps if s in survivors]
        found, times = np.unique(
            np.concatenate([*seen, np.zeros(0, np.uint64)]), return_counts=True
        )
        missing = expected - int((found < expected).sum())
        again, strange = int((times > 1).sum()), int((found >= expected).sum())
        if missing or again or strange:
            differences.append(
                f"phase {number}: of {expected:,} rows {missing:,} were not seen and {again:,} "
                f"more than once; {strange:,} are not of the plan"
            )
        count, first = count + expected, first + phase.steps
    return Comparison(whose, f"each of {count:,} rows trained on once", differences)


def corpora(made: pathlib.Path, undisturbed: pathlib.Path) -> list[str]:
    """Files of two corpus folders that differ; counts of rows, which runs add, are left out."""
    a, b = _hashes(made), _hashes(undisturbed)
    return [
        f"{name} {'differs' if name in a and name in b else 'is not in both'}"
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    ]


def _hashes(folder: pathlib.Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name not in ("lock", "plans.json"):
            with path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            found[path.relative_to(folder).as_posix()] = digest
    return found


def losses(ours: pathlib.Path, theirs: pathlib.Path, last: int) -> tuple[float, str]:
    """The largest relative difference of a loss in the lines of two runs, and where it stands.

    Infinite where lines or losses are missing.

    Args:
      ours: a workdir.
      theirs: another.
      last: the last step whose losses are compared; of later lines only that they are there.
    """
    a, b = (Lines(epath.Path(place / "metrics.jsonl")).read() for place in (ours, theirs))
    worst, where = 0.0, "no line"
    if [_place(line) for line in a] != [_place(line) for line in b]:
        return np.inf, "other lines"
    for x, y in zip(a, b, strict=True):
        names = {name for name in x.keys() | y.keys() if "loss" in name}
        for name in sorted(names) if x["step"] <= last else ():
            if name not in x or name not in y:
                return np.inf, f"{name} of {_place(y)}"
            by = abs(x[name] - y[name]) / max(abs(y[name]), 1e-6)
            if not by <= worst:
                worst, where = by, f"{name} of {_place(y)}"
    return worst, where


def _place(line: dict[str, Any]) -> str:
    return f"{line['kind']}, step {json.dumps(line['step'])}"
