"""What the loop costs next to the step, and how long it stands still for a checkpoint.

`python -m benchmarks.loop`. Overhead: seconds a step of a real run (`pretrain`) of a very
small model, less those of the bare compiled step on one batch, in the same process, in turns. Wall
time is what the loop adds for real, CPU time counts what its data thread does next to it. Saving:
the time `Saver.save` keeps the loop, as a share of the time until the files are whole.
"""

import dataclasses
import os
import pathlib
import statistics
import tempfile
import time

import jax
import numpy as np

from benchmarks import measure, ours
from bert_jax.checkpoints.save import Saver
from bert_jax.config import Corpus, Data, Experiment, Parallelism, Phase, Run
from bert_jax.distributed.peers import Peers
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.pretraining.pretraining_job import PretrainingJob
from bert_jax.running import session
from bert_jax.running.progress import LoggedProgress
from bert_jax.storage.workdir import Workdir
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

LAP = 50


def main() -> None:
    """Measures both."""
    laps, state = (6, f"of {LAP} steps a round"), ("mini", "a shape whose state is saved")
    flags = measure.parser(__doc__, rounds=5, laps=laps, state=state).parse_args()
    measure.restart_with(threads=len(os.sched_getaffinity(0)))
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        seconds = overhead(folder, flags.rounds, flags.laps)
        shares = saving(folder, ours.SHAPES[flags.state], flags.rounds)
    loop, bare = (1e6 * np.array(seconds[who]) for who in ("loop", "bare"))
    least, median = (of(loop, axis=0) - of(bare, axis=0) for of in (np.min, np.median))
    figures = {
        "overhead_wall_us": least[1],
        "overhead_wall_us_median": median[1],
        "overhead_cpu_us": least[0],
        "bare_step_wall_us": bare[:, 1].min(),
        "save_blocking_share": min(shares),
        "save_blocking_share_median": statistics.median(shares),
    }
    details = {"cpu_and_wall_seconds_a_step": seconds, "save_blocking_shares": shares}
    measure.report("loop", figures, details, flags.out)


def experiment(folder: pathlib.Path, laps: int) -> Experiment:
    """A run of a very small model on the sample text."""
    model = ours.model_of(ours.SHAPES["micro"], "float32")
    short = {"sequence_length": 32, "max_predictions_per_seq": 5}
    return Experiment(
        name="loop",
        model=dataclasses.replace(model, vocab_size=1_000, max_position_embeddings=32),
        corpus=Corpus(sources=(measure.SAMPLE,), validation_share=0.1),
        data=Data(eval_rows=8, **{f"eval_{name}": value for name, value in short.items()}),
        phases=(Phase(steps=(laps + 1) * LAP, batch_size=8, **short),),
        optimizer=ours.OPTIMIZER,
        run=Run(log_every=LAP, eval_batch_size=8, corpus_dir=str(folder / "corpus")),
    )


def overhead(folder: pathlib.Path, rounds: int, laps: int) -> dict[str, list]:
    """CPU and wall seconds a step of each lap: of the loop, and of the bare step."""
    settings, bare, found = experiment(folder, laps), None, {"loop": [], "bare": []}
    for number in range(rounds):
        ends, progress = [], LoggedProgress()
        progress.show_training_line = lambda *_, at=ends: at.append(
            (time.process_time(), time.perf_counter())
        )
        workdir = Workdir(folder / f"run{number}", settings.run.corpus_dir)
        session.run(PretrainingJob(settings, workdir, progress.report), progress)
        # Without the first lap, which compiles.
        found["loop"] += (np.diff(ends, axis=0) / LAP).tolist()
        if bare is None:
            batches = PreparedCorpus.open(workdir.corpus).train_batches(settings, 0)
            made = batches.batch(0, np.arange(8))
            bare = ours.Bare(settings.model, made, settings.parallelism)
        found["bare"] += [bare.take(LAP) for _ in range(laps)]
    return found


def saving(folder: pathlib.Path, shape: ours.Shape, rounds: int) -> list[float]:
    """The shares of some saves for which their caller is kept."""
    mesh = mesh_lib.make_mesh(Parallelism())
    learned = Pretraining(ours.model_of(shape, "float32"))
    state, _ = jax.block_until_ready(ours.first_state(learned, mesh))
    shares = []
    for number in range(rounds):
        with Saver(Workdir(folder / f"{number}"), Run(), Peers(0, 1, None, 0.0), print) as saved:
            start = time.perf_counter()
            saved.save(1, state, {})
            blocking = time.perf_counter() - start
        shares.append(blocking / (time.perf_counter() - start))  # until the files are whole
    return shares


if __name__ == "__main__":
    main()
