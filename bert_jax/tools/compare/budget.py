"""The number of steps of a table's runs: the given number, or as many as CPU seconds allow."""

import dataclasses
import shutil

from etils import epath

from bert_jax.config import Experiment
from bert_jax.errors import InputError
from bert_jax.pretraining.pretraining_job import PretrainingJob
from bert_jax.running import session
from bert_jax.running.progress import Progress
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir


def with_steps(experiment: Experiment, steps: int) -> Experiment:
    """Returns the experiment with `steps` steps; phases, warm-up and decay keep their shares."""
    total, phases = experiment.total_steps, experiment.phases
    if steps < len(phases):
        raise InputError(f"{steps} steps are too few for its {len(phases)} phases")
    scaled, done = [], 0
    for number, (phase, end) in enumerate(zip(phases, experiment.ends, strict=True), 1):
        phases_left = len(phases) - number  # each of them needs at least one step
        last = min(max(round(steps * end / total), done + 1), steps - phases_left)
        scaled.append(dataclasses.replace(phase, steps=last - done))
        done = last
    optimizer = dataclasses.replace(
        experiment.optimizer,
        warmup_steps=min(round(experiment.optimizer.warmup_steps * steps / total), steps - 1),
        decay_steps=experiment.optimizer.decay_steps * steps // total,
    )
    return dataclasses.replace(experiment, phases=tuple(scaled), optimizer=optimizer)


def steps_within(experiment: Experiment, cpu_seconds: float, costs: list[float]) -> int:
    """Returns the number of steps that fit into `cpu_seconds`.

    Phases keep their shares of the steps; `costs` are CPU seconds of a step of each phase.
    """
    shares = [phase.steps / experiment.total_steps for phase in experiment.phases]
    mean = sum(share * cost for share, cost in zip(shares, costs, strict=True))
    steps = int(cpu_seconds / mean + 1e-6)  # rounding may give just less than a whole number
    if steps < len(experiment.phases):
        raise InputError(
            f"a step takes {mean:.3g} seconds of CPU, so only {steps} fit; raise table.cpu_seconds"
        )
    return steps


def time_phases(
    experiment: Experiment, folder: epath.Path, progress: Progress, timed_steps: int
) -> list[dict[str, float]]:
    """Trains for a few steps of each phase; returns the lines of timings.jsonl of the timed ones.

    Each phase takes as many untimed steps first, which warm caches. Evaluations, saves and
    compiling are not counted, since experiments may differ in how often they evaluate and save.

    Raises:
      MeasurementInterrupted: the run was asked to stop.
    """
    phases = tuple(dataclasses.replace(p, steps=2 * timed_steps) for p in experiment.phases)
    total = 2 * timed_steps * len(phases)
    never = total + 1
    short = dataclasses.replace(
        with_steps(experiment, total),
        phases=phases,
        data=dataclasses.replace(experiment.data, eval_rows=8),
        run=dataclasses.replace(
            experiment.run,
            **{"log_every": timed_steps, "eval_every": never, "checkpoint_every": never},
            **{"eval_batch_size": 8, "profile_steps": (), "probes": ()},
            **{"check_every": 0, "replay_every": 0, "trackers": ()},
        ),
    )
    workdir = Workdir(folder, short.run.corpus_dir)
    shutil.rmtree(folder, ignore_errors=True)
    try:
        job = PretrainingJob(short, workdir, progress.report)
        if (outcome := session.run(job, progress)) != "finished":
            raise MeasurementInterrupted(outcome)
        trained = {x["step"]: x for x in JsonLines(workdir.timings).read() if x["kind"] == "train"}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return [trained[2 * timed_steps * number] for number in range(1, len(phases) + 1)]


class MeasurementInterrupted(Exception):
    """A short run ended early; the exception's only argument is the outcome."""
