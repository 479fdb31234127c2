"""Reads journals of child processes; compares states, JSON Lines files, batches and corpora."""

import dataclasses
import filecmp
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Experiment, Parallelism
from bert_jax.errors import printable
from bert_jax.storage.workdir import Workdir
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective, step
from bert_jax.training.checksums import path_of


@dataclasses.dataclass
class Execution:
    """One execution of a step."""

    start: int  # which start of the command executed the step, see `Plan.start_number`
    step: int  # number of the step, from 0
    rows: np.ndarray  # uint64 [B], numbers of its rows, ascending
    hashes: np.ndarray  # uint64 [B], hashes of the rows' contents


@dataclasses.dataclass
class Journal:
    """The journal of the children of one workdir (see `tools.verify.child`)."""

    executions: list[Execution]  # in order
    killed: dict[int, int]  # {start: steps done when it was killed}
    # {start: (steps done before the roll-back, steps done at the checkpoint it returned to)}.
    rolled_back: dict[int, tuple[int, int]]

    @classmethod
    def read(cls, path: Path) -> "Journal":
        """Reads a journal; returns an empty one if the file is missing."""
        journal = cls([], {}, {})
        for line in path.read_text().splitlines() if path.exists() else ():
            entry = json.loads(line)
            if entry["kind"] == "killed":
                journal.killed[entry["start"]] = entry["done"]
            elif entry["kind"] == "rolled_back":
                journal.rolled_back[entry["start"]] = (entry["done"], entry["to"])
            else:
                # Rows that several devices share are listed once for each device.
                pairs = sorted(dict(zip(entry["rows"], entry["hashes"], strict=True)).items())
                rows, hashes = np.array(pairs, np.uint64).T
                journal.executions.append(Execution(entry["start"], entry["step"], rows, hashes))
        return journal

    def executions_of(self, start: int) -> list[Execution]:
        """Returns the executions of one start, in order."""
        return [e for e in self.executions if e.start == start]

    def survivors(self) -> dict[int, Execution]:
        """Returns {step: its last execution}; no kill or roll-back has undone these executions."""
        return {e.step: e for e in self.executions}


@dataclasses.dataclass(frozen=True)
class RunCheck:
    """The result of one check of a run; most checks compare it with the undisturbed run."""

    run_name: str  # the compared run
    description: str  # what is compared, and how much of it there is
    differences: list[str]  # one line for each; empty if there are none


def batches(executions: Sequence[Execution], expected: dict[int, Execution]) -> list[str]:
    """Describes in one line how many batches differ, and the first of these; [] if none does."""
    empty = np.zeros(0, np.uint64)
    differing = []
    for e in executions:
        other = expected.get(e.step, Execution(0, e.step, empty, empty))
        if not (np.array_equal(e.rows, other.rows) and np.array_equal(e.hashes, other.hashes)):
            differing.append((e, other))
    if not differing:
        return []
    first_step = differing[0][0].step
    a, b = (f"{e.rows[0]} to {e.rows[-1]}" if len(e.rows) else "none" for e in differing[0])
    rows = f"rows {a}, expected {b}" if a != b else f"rows {a}, with other contents"
    return [f"{len(differing)} steps had another batch, the first is step {first_step}: {rows}"]


def rows(run_name: str, experiment: Experiment, survivors: dict[int, Execution]) -> RunCheck:
    """Checks that each row of each phase was trained on exactly once."""
    differences, count, first = [], 0, 0
    for number, phase in enumerate(experiment.phases):
        expected = phase.steps * phase.batch_size
        seen = [survivors[s].rows for s in range(first, first + phase.steps) if s in survivors]
        seen, times = np.unique(np.concatenate([*seen, np.zeros(0, np.uint64)]), return_counts=True)
        missing = expected - int((seen < expected).sum())
        repeated, unplanned = int((times > 1).sum()), int((seen >= expected).sum())
        if missing or repeated or unplanned:
            differences.append(
                f"phase {number}: of {expected:,} rows {missing:,} were not seen and {repeated:,} "
                f"more than once; {unplanned:,} were not planned"
            )
        count, first = count + expected, first + phase.steps
    return RunCheck(run_name, f"each of {count:,} rows trained on once", differences)


def states(experiment: Experiment, killed: Path, undisturbed: Path) -> RunCheck:
    """Compares the last checkpoints of two workdirs, bit for bit."""
    workdirs = killed, undisturbed
    (a, a_metadata), (b, b_metadata) = (last_state(experiment, workdir) for workdir in workdirs)
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
    # Without the checksums, since the arrays themselves are compared above.
    differences += [
        f"the checkpoint's {name} differs"
        for name in sorted((a_metadata.keys() | b_metadata.keys()) - {"checksums"})
        if a_metadata.get(name) != b_metadata.get(name)
    ]
    total = sum(value.size for value in a.values())
    description = f"parameters, optimizer and counters: {len(a)} arrays, {total:,} numbers"
    return RunCheck(killed.name, f"{description}, bit for bit", differences)


def last_state(experiment: Experiment, root: Path) -> tuple[Any, dict[str, Any]]:
    """Returns the last state of a workdir, on the host, and the checkpoint's metadata."""
    mesh = mesh_lib.make_mesh(Parallelism(), jax.local_devices(backend="cpu")[:1])
    pretraining = objective.pretraining_objective(experiment.model, experiment.data)
    abstract = step.abstract_state(pretraining, experiment.optimizer, Parallelism(), mesh)
    checkpoints = Checkpoints(Workdir(root).checkpoints)
    restored = checkpoints.restore(experiment.total_steps, abstract)
    return jax.device_get(restored.state), restored.metadata


def json_lines(name: str, killed: Path, undisturbed: Path) -> RunCheck:
    """Compares a JSON Lines file of two workdirs, byte for byte; reports the first difference.

    A missing file counts as empty: a run without sample predictions writes no predictions.jsonl.
    """
    files = [workdir / name for workdir in (killed, undisturbed)]
    a, b = (file.read_bytes().splitlines() if file.exists() else [] for file in files)
    pairs = enumerate(itertools.zip_longest(a, b, fillvalue=b"no line"), 1)
    differences = [
        f"{name}:{number} differs: {printable(x[:120].decode(errors='replace'))}, undisturbed: "
        + printable(y[:120].decode(errors="replace"))
        for number, (x, y) in pairs
        if x != y
    ][:1]
    return RunCheck(killed.name, f"{name}: {len(b)} lines, byte for byte", differences)


def corpora(prepared: Path, undisturbed: Path) -> list[str]:
    """Lists the files that differ between two corpora, except plans.json, which runs extend."""
    a, b = (
        {
            path.relative_to(folder).as_posix()
            for path in folder.rglob("*")
            if path.is_file() and path.name not in ("lock", "plans.json")
        }
        for folder in (prepared, undisturbed)
    )
    _, differing, unread = filecmp.cmpfiles(prepared, undisturbed, a & b, shallow=False)
    lines = [f"{name} differs" for name in (*differing, *unread)]
    return sorted([*lines, *(f"{name} is not in both" for name in a ^ b)])
