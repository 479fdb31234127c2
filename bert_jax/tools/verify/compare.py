"""What children journaled, and two runs that should be one: states, lines, batches and corpora."""

import dataclasses
import filecmp
import itertools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.checkpoints.checkpoint import Checkpoints
from bert_jax.config import Experiment, Parallelism
from bert_jax.errors import printable
from bert_jax.storage.workdir import Workdir
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective, step
from bert_jax.training.checksums import path_of


@dataclasses.dataclass
class Execution:
    """A step that was handed to the devices."""

    start: int  # number of the start that did it
    step: int  # its number, counted from 0
    rows: np.ndarray  # uint64 [B], rising
    hashes: np.ndarray  # uint64 [B], of what they held


@dataclasses.dataclass
class Journal:
    """The record that the children of one workdir journaled (see `tools.verify.child`)."""

    executions: list[Execution]  # in the order in which they were begun
    killed: dict[int, int]  # {start: steps done when it was killed}
    # {start: (steps done, steps done where it went back to)}.
    rolled_back: dict[int, tuple[int, int]]
    prepare_seconds: float = 0.0  # what making the corpus took; 0 if nothing was made

    @classmethod
    def read(cls, path: pathlib.Path) -> "Journal":
        """Reads a journal; an empty one if there is no file."""
        journal = cls([], {}, {})
        for line in path.read_text().splitlines() if path.exists() else ():
            note = json.loads(line)
            if note["kind"] == "killed":
                journal.killed[note["start"]] = note["done"]
            elif note["kind"] == "rolled_back":
                journal.rolled_back[note["start"]] = (note["done"], note["to"])
            elif note["kind"] == "prepared":
                journal.prepare_seconds = note["seconds"]
            else:
                # Devices that share rows name them each.
                held = sorted(dict(zip(note["rows"], note["hashes"], strict=True)).items())
                rows, hashes = np.array(held, np.uint64).T
                journal.executions.append(Execution(note["start"], note["step"], rows, hashes))
        return journal

    def executions_of(self, start: int) -> list[Execution]:
        """Returns what one start did, in order."""
        return [e for e in self.executions if e.start == start]

    def survivors(self) -> dict[int, Execution]:
        """Returns {step: its last execution}: what the newest state is made of."""
        return {e.step: e for e in self.executions}


@dataclasses.dataclass(frozen=True)
class StateComparison:
    """Two things, compared."""

    whose: str  # the run that is compared with the undisturbed one
    what: str  # in words, with how much of it there is
    differences: list[str]  # a line each; none if they are the same


def batches(executions: Sequence[Execution], planned: dict[int, Execution]) -> list[str]:
    """Returns how many steps saw other rows than was planned, or others in them, and the first."""
    none = np.zeros(0, np.uint64)
    other = []
    for e in executions:
        plan = planned.get(e.step, Execution(0, e.step, none, none))
        if not (np.array_equal(e.rows, plan.rows) and np.array_equal(e.hashes, plan.hashes)):
            other.append((e, plan))
    if not other:
        return []
    spans = (f"{e.rows[0]} to {e.rows[-1]}" if len(e.rows) else "none" for e in other[0])
    rows = "rows {}, planned {}".format(*spans)
    return [f"{len(other)} steps saw another batch, the first is step {other[0][0].step}: {rows}"]


def rows(whose: str, experiment: Experiment, survivors: dict[int, Execution]) -> StateComparison:
    """Compares the rows of each phase that were trained on with each of them once."""
    differences, count, first = [], 0, 0
    for number, phase in enumerate(experiment.phases):
        expected = phase.steps * phase.batch_size
        seen = [survivors[s].rows for s in range(first, first + phase.steps) if s in survivors]
        seen, times = np.unique(np.concatenate([*seen, np.zeros(0, np.uint64)]), return_counts=True)
        missing = expected - int((seen < expected).sum())
        again, strange = int((times > 1).sum()), int((seen >= expected).sum())
        if missing or again or strange:
            differences.append(
                f"phase {number}: of {expected:,} rows {missing:,} were not seen and {again:,} "
                f"more than once; {strange:,} are not of the plan"
            )
        count, first = count + expected, first + phase.steps
    return StateComparison(whose, f"each of {count:,} rows trained on once", differences)


def states(experiment: Experiment, ours: pathlib.Path, theirs: pathlib.Path) -> StateComparison:
    """Compares the last checkpoints of two workdirs, bit for bit."""
    (a, a_metadata), (b, b_metadata) = (last_state(experiment, place) for place in (ours, theirs))
    a, b = (
        {path_of(path): np.asarray(value) for path, value in jax.tree.leaves_with_path(state)}
        for state in (a, b)
    )
    differences = []
    if differing := [name for name in a if a[name].tobytes() != b[name].tobytes()]:
        first = differing[0]
        by = np.abs(a[first].astype(np.float64) - b[first].astype(np.float64)).max()
        differences.append(
            f"{len(differing)} of {len(a)} arrays differ, the first is {first}, by {by:.3g} at most"
        )
    differences += [
        f"the checkpoint's {name} differs"
        for name in sorted((a_metadata.keys() | b_metadata.keys()) - {"checksums"})  # of arrays
        if a_metadata.get(name) != b_metadata.get(name)
    ]
    total = sum(value.size for value in a.values())
    what = f"parameters, optimizer and counters: {len(a)} arrays, {total:,} numbers, bit for bit"
    return StateComparison(ours.name, what, differences)


def last_state(experiment: Experiment, root: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """Returns the last state of a workdir, on the host, and the JSON next to it."""
    here = mesh_lib.make_mesh(Parallelism(), jax.local_devices(backend="cpu")[:1])
    abstract = step.abstract_state(
        objective.of(experiment.model, experiment.data), experiment.optimizer, Parallelism(), here
    )
    saved = Checkpoints(Workdir(root).checkpoints)
    restored = saved.restore(experiment.total_steps, abstract)
    return jax.device_get(restored.state), restored.metadata


def texts(name: str, ours: pathlib.Path, theirs: pathlib.Path) -> StateComparison:
    """Compares a file of lines in two workdirs, byte for byte; names the first that differs.

    A file that is not there has no lines: a run with nothing to watch writes no predictions.
    """
    files = [place / name for place in (ours, theirs)]
    a, b = (file.read_bytes().splitlines() if file.exists() else [] for file in files)
    pairs = enumerate(itertools.zip_longest(a, b, fillvalue=b"nothing"), 1)
    differences = [
        f"{name}:{number} differs: {printable(x[:120].decode(errors='replace'))} and undisturbed "
        + printable(y[:120].decode(errors="replace"))
        for number, (x, y) in pairs
        if x != y
    ][:1]
    return StateComparison(ours.name, f"{name}: {len(b)} lines, byte for byte", differences)


def corpora(made: pathlib.Path, undisturbed: pathlib.Path) -> list[str]:
    """Returns files of two corpus folders that differ; counts of rows, which runs add, may."""
    a, b = (
        {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and path.name not in ("lock", "plans.json")
        }
        for folder in (made, undisturbed)
    )
    _, other, unread = filecmp.cmpfiles(made, undisturbed, a & b, shallow=False)
    differ = [f"{name} differs" for name in (*other, *unread)]
    return sorted([*differ, *(f"{name} is not in both" for name in a ^ b)])
