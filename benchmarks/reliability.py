"""What it costs that nothing is lost.

`python -m benchmarks.reliability`. Runs of a small model that save every 50 steps and that never
do, in turns: what a step takes longer, and for what share of the time the loop stands still. Then,
for a larger state: checksums as a share of the time that a save keeps the loop, and of the time
until it is on disk; and their comparison as a share of the time of a restore.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import tempfile
import time
from unittest import mock

import jax
from etils import epath

from benchmarks import loop, measure, ours, shapes
from bert_jax.config import Experiment, Parallelism, Run
from bert_jax.storage.workdir import Workdir
from bert_jax.training import checkpoint, pretraining, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.checksums import checksums
from bert_jax.training.objective import Pretraining

EVERY = 50


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--laps", type=int, default=6, help=f"of {loop.LAP} steps a round")
    parser.add_argument("--shape", default="tiny", help="what is trained")
    parser.add_argument("--state", default="mini", help="whose state is saved and restored")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    measure.restart_with(threads=len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        laps, blocking = saving(pathlib.Path(folder), flags.shape, flags.rounds, flags.laps)
        states = [trusted(pathlib.Path(folder), flags.state, n) for n in range(flags.rounds)]
    found = {name: measure.spread(values) for name, values in laps.items()}

    def share(part: str, whole: str) -> float:
        return measure.spread([one[part] / one[whole] for one in states])["median"]

    figures = {
        "step_with_saves_ratio": found["saving"]["median"] / found["never"]["median"],
        "blocking_share": measure.spread(blocking)["median"],
        "state_megabytes": states[0]["bytes"] / 1e6,
        "checksums_ms": 1e3 * measure.spread([one["checksums"] for one in states])["median"],
        "checksums_share_of_blocking": share("checksums", "blocking"),
        "checksums_share_of_save": share("checksums", "save"),
        "verification_share_of_restore": share("verification", "restore"),
    }
    details = {"seconds_a_step": laps, "blocking": blocking, "states": states}
    measure.report("reliability", figures, details, flags.out)


def experiment(folder: pathlib.Path, shape: str, laps: int, every: int) -> Experiment:
    """A run on the sample text that saves every so many steps."""
    small = loop.experiment(folder, laps)
    model = ours.model_of(shapes.SHAPES[shape], "float32")
    (phase,) = small.phases
    phase = dataclasses.replace(phase, batch_size=32)
    run = dataclasses.replace(small.run, checkpoint_every=every)
    model = dataclasses.replace(model, vocab_size=small.model.vocab_size)
    return dataclasses.replace(small, model=model, phases=(phase,), run=run)


def saving(
    folder: pathlib.Path, shape: str, rounds: int, laps: int
) -> tuple[dict[str, list[float]], list[float]]:
    """Wall seconds a step of laps, saving or never; and the shares of time spent in saves."""
    found: dict[str, list[float]] = {"saving": [], "never": []}
    blocking = []
    for number in range(rounds):
        for name, every in (("never", 10**9), ("saving", EVERY)):
            progress = loop.Laps()
            place = Workdir(folder / f"{name}{number}", str(folder / "corpus"))
            pretraining.pretrain(experiment(folder, shape, laps, every), place, "keep", progress)
            found[name] += progress.wall
            if name == "saving":
                lines = map(json.loads, place.timings.read_text().splitlines())
                kept = [line for line in lines if line["kind"] == "train"][1:]
                waited = sum(line.get("checkpoint_seconds", 0.0) for line in kept)
                blocking.append(waited / sum(line["seconds"] for line in kept))
    return found, blocking


def trusted(folder: pathlib.Path, shape: str, number: int) -> dict[str, float]:
    """Seconds of a save and a restore, and of the checksums in them."""
    mesh = mesh_lib.one_device()
    model = ours.model_of(shapes.SHAPES[shape], "float32")
    state, _ = ours.first_state(model, mesh)
    jax.block_until_ready(state)
    checksums(state)  # compiles
    spent = []

    def timed(tree: object) -> dict[str, str]:
        start = time.perf_counter()
        found = checksums(tree)
        spent.append(time.perf_counter() - start)
        return found

    place = epath.Path(folder / f"state{number}")
    with mock.patch.object(checkpoint, "checksums", timed):
        start = time.perf_counter()
        with Checkpoints(place, Run(), "write") as saved:
            saved.save(1, state, {})
            blocking = time.perf_counter() - start
        total = time.perf_counter() - start
        abstract = step.abstract_state(Pretraining(model), ours.OPTIMIZER, Parallelism(), mesh)
        start = time.perf_counter()
        with Checkpoints(place, Run(), "read") as saved:
            saved.restore(1, abstract)
        restore = time.perf_counter() - start
    return {
        "bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "checksums": spent[0],
        "blocking": blocking,
        "save": total,
        "verification": spent[1],
        "restore": restore,
    }


if __name__ == "__main__":
    main()
