"""What the loop costs next to the step, and how long it stands still for a checkpoint.

`python -m benchmarks.loop`. Overhead: seconds a step of a real run (`pretrain`) of a very
small model, less those of the bare compiled step on one batch, in the same process, in turns. Wall
time is what the loop adds for real, CPU time counts what its data thread does next to it. Saving:
the time `Checkpoints.save` keeps the loop, as a share of the time until the files are whole.
"""

import argparse
import contextlib
import io
import os
import pathlib
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath
from rich.console import Console

from benchmarks import measure, ours, shapes
from bert_jax.config import Corpus, Data, Experiment, Model, Phase, Run
from bert_jax.running import pretraining
from bert_jax.running.checkpoint import Checkpoints
from bert_jax.running.pretraining import Prepared
from bert_jax.running.progress import Progress
from bert_jax.storage.workdir import Workdir
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

SAMPLE = measure.ROOT / "experiments" / "sample_text" / "speeches.jsonl.gz"
LAP = 50


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--laps", type=int, default=6, help=f"of {LAP} steps a round")
    parser.add_argument("--state", default="mini", help="whose state is saved: a shape")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    measure.restart_with(threads=len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as folder:
        laps = overhead(pathlib.Path(folder), flags.rounds, flags.laps)
        saves = saving(pathlib.Path(folder), flags.state, flags.rounds)
    found = {name: measure.spread(values) for name, values in laps.items()}
    share = measure.spread([save["blocking"] / save["total"] for save in saves])
    figures = {
        "overhead_wall_us": 1e6 * (found["loop_wall"]["min"] - found["bare_wall"]["min"]),
        "overhead_wall_us_median": 1e6
        * (found["loop_wall"]["median"] - found["bare_wall"]["median"]),
        "overhead_cpu_us": 1e6 * (found["loop_cpu"]["min"] - found["bare_cpu"]["min"]),
        "bare_step_wall_us": 1e6 * found["bare_wall"]["min"],
        "save_blocking_share": share["min"],
        "save_blocking_share_median": share["median"],
        "save_over_raw_write": min(s["total"] for s in saves) / min(s["raw"] for s in saves),
    }
    measure.report("loop", figures, {"seconds_a_step": laps, "saves": saves}, flags.out)


class Laps(Progress):
    """Notes the wall and CPU seconds a step of each lap but the first, which compiles."""

    def __init__(self):
        super().__init__(Console(file=io.StringIO()))
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self._last: tuple[float, float] | None = None

    def train(self, line: dict[str, float], seconds: dict[str, float]) -> None:
        """See `Progress`."""
        now = time.perf_counter(), time.process_time()
        if self._last is not None:
            self.wall.append((now[0] - self._last[0]) / LAP)
            self.cpu.append((now[1] - self._last[1]) / LAP)
        self._last = now


def experiment(folder: pathlib.Path, laps: int) -> Experiment:
    """A run of a very small model on the sample text."""
    return Experiment(
        name="loop",
        model=Model(
            vocab_size=1_000,
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
        ),
        corpus=Corpus(sources=(f"jsonl:{SAMPLE}",), validation_share=0.1),
        data=Data(eval_sequence_length=32, eval_max_predictions_per_seq=5, eval_rows=8),
        phases=(
            Phase(
                steps=(laps + 1) * LAP, sequence_length=32, max_predictions_per_seq=5, batch_size=8
            ),
        ),
        optimizer=ours.OPTIMIZER,
        run=Run(
            log_every=LAP,
            eval_batch_size=8,
            corpus_dir=str(folder / "corpus"),
        ),
    )


def overhead(folder: pathlib.Path, rounds: int, laps: int) -> dict[str, list[float]]:
    """Seconds a step of each lap: of the loop, and of the bare step."""
    found: dict[str, list[float]] = {
        name: [] for name in ("loop_wall", "loop_cpu", "bare_wall", "bare_cpu")
    }
    settings = experiment(folder, laps)
    bare = None
    for number in range(rounds):
        progress = Laps()
        pretraining.pretrain(
            settings, Workdir(folder / f"run{number}", str(folder / "corpus")), "keep", progress
        )
        found["loop_wall"] += progress.wall
        found["loop_cpu"] += progress.cpu
        bare = bare or bare_laps(settings, Workdir(folder / "run0", str(folder / "corpus")))
        for _ in range(laps):
            wall, cpu = next(bare)
            found["bare_wall"].append(wall)
            found["bare_cpu"].append(cpu)
    return found


def bare_laps(settings: Experiment, workdir: Workdir) -> Iterator[tuple[float, float]]:
    """Wall and CPU seconds a step of laps of the compiled step alone, on one batch."""
    mesh = mesh_lib.make_mesh(settings.parallelism)
    spec = settings.phases[0]
    rows = np.arange(spec.batch_size)
    host = Prepared.open(workdir.corpus).train_batches(settings, 0).batch(0, rows)
    batch = feed.place(host, rows, spec.batch_size, mesh_lib.batch_sharding(mesh))
    run = step.make_train_step(
        Pretraining(settings.model),
        settings.optimizer,
        settings.parallelism,
        1,
        settings.total_steps,
        mesh,
    )
    key = step.phase_key(settings.model, settings.seed, 0)
    state, window = ours.first_state(settings.model, mesh)
    state, window = run(state, window, batch, key)
    while True:
        jax.block_until_ready((state, window))
        wall, cpu = time.perf_counter(), time.process_time()
        for _ in range(LAP):
            state, window = run(state, window, batch, key)
        jax.block_until_ready((state, window))
        yield (time.perf_counter() - wall) / LAP, (time.process_time() - cpu) / LAP


def saving(folder: pathlib.Path, shape: str, rounds: int) -> list[dict[str, float]]:
    """Seconds that a save keeps its caller, that it takes in all, and that its bytes take raw."""
    mesh = mesh_lib.make_mesh(experiment(folder, 1).parallelism)
    model = ours.model_of(shapes.SHAPES[shape], "float32")
    state, _ = ours.first_state(model, mesh)
    jax.block_until_ready(state)
    content = os.urandom(sum(leaf.nbytes for leaf in jax.tree.leaves(state)))
    found = []
    for number in range(rounds):
        with contextlib.ExitStack() as stack:
            saved = stack.enter_context(
                Checkpoints(epath.Path(folder / f"saves{number}"), Run(), "write")
            )
            start = time.perf_counter()
            saved.save(1, state, {})
            blocking = time.perf_counter() - start
            stack.close()  # waits until the files are whole
            total = time.perf_counter() - start
        raw = raw_write(folder / "raw", content)
        found.append({"blocking": blocking, "total": total, "raw": raw, "bytes": len(content)})
    return found


def raw_write(path: pathlib.Path, content: bytes) -> float:
    """Seconds to write and flush a file of these bytes."""
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
