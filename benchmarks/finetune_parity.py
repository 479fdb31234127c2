"""Our fine-tuning against PyTorch's: the same weights, order and schedule.

    python -m benchmarks.finetune_parity TASKFILE --from BASE [--set FIELD=VALUE] [--seeds 3]

Fine-tunes here and in the environment of PyTorch, where `finetune_peer` trains what transformers
loads from the exported base on the batches of ours. Without dropout the losses of the first 100
steps and the final score must agree; with it, in the mean over the seeds.
"""

import argparse
import json
import math
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax import base as base_lib
from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.interop import huggingface
from bert_jax.loaded import Loaded
from bert_jax.running import lines as lines_lib
from bert_jax.running import peers as peers_lib
from bert_jax.running.job import Job
from bert_jax.running.progress import LineConsole, Progress
from bert_jax.storage.workdir import Workdir
from bert_jax.tasks.job import FinetuningSetup, finetune
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import optimizer, step

# Of losses, and of final scores without dropout.
FIRST, LOSSES, SCORES = 100, 1e-3, 5e-3


def main() -> int:
    """Trains on both sides, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("task", metavar="TASKFILE")
    parser.add_argument("--from", dest="base", required=True)
    parser.add_argument("--set", action="append", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--python", default=".venv-torch/bin/python", help="with torch")
    flags = parser.parse_args()
    experiment = config.override(
        config.load(flags.task, Finetuning), [*flags.set, f"init_from={flags.base}"]
    )
    pairs = []
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        base = Loaded.of(epath.Path(flags.base))
        huggingface.export_weights(base, "encoder", "float32", epath.Path(folder / "base"))
        for seed in range(flags.seeds):
            pairs.append(one(config.override(experiment, [f"seed={seed}"]), folder, flags.python))
    return compare(experiment, pairs)


def one(experiment: Finetuning, folder: pathlib.Path, python: str) -> dict[str, Any]:
    """Losses and scores of both sides with one seed."""
    place = folder / f"seed-{experiment.seed}"
    experiment = config.override(experiment, ["run.log_every=1", f"run.eval_every={2**31}"])
    progress = Progress(LineConsole(quiet=True))
    finetune(experiment, None, str(place / "run"), progress)
    lines = lines_lib.Lines(Workdir(place / "run").metrics).read()
    job = FinetuningSetup(experiment, Workdir(place / "run"), lambda line: None)
    job.read()
    with peers_lib.connected() as peers:
        opened = job.open(mesh_lib.one_device(), peers)
    np.savez(place / "training.npz", **of_training(opened))
    for number, (_, batch) in enumerate(job.eval_batches):
        np.savez(place / f"held_out_{number}.npz", **batch)
    settings = {
        "kind": experiment.task.kind,
        "reads": job.objective.reads,
        "dropout": [
            experiment.adapt.hidden_dropout_prob,
            experiment.adapt.attention_probs_dropout_prob,
            experiment.adapt.head_dropout_prob,
        ],
        "rows_per_example": job.objective.rows_per_example,
        "clip": experiment.optimizer.clip_norm,
        "betas": [experiment.optimizer.b1, experiment.optimizer.b2],
        "eps": experiment.optimizer.eps,
        "weight_decay": experiment.optimizer.weight_decay,
        "seed": experiment.seed,
    }
    (place / "settings.json").write_text(json.dumps(settings))
    arguments = [python, "-m", "benchmarks.finetune_peer", str(folder / "base"), str(place)]
    subprocess.run(arguments, check=True)
    theirs = dict(np.load(place / "peer.npz"))
    outputs: list[Any] = [None] * sum(len(which) for which, _ in job.eval_batches)
    for number, (which, batch) in enumerate(job.eval_batches):
        lengths = batch["input_mask"].sum(axis=1)
        for row, length, scores in zip(which, lengths, theirs[f"logits_{number}"], strict=False):
            outputs[row] = scores if scores.ndim == 1 else scores[:length]
    score = experiment.task.main_score
    return {
        "ours": [line["loss"] for line in lines if line["kind"] == "train"],
        "theirs": theirs["losses"].tolist(),
        "our_score": next(line[score] for line in lines if line["kind"] == "scores"),
        "their_score": job.scores(outputs)[score],
    }


def of_training(job: Job) -> dict[str, Any]:
    """Every batch, padded to one length, the learning rates, and the head before the first step."""
    phase = job.batches(0)
    rows = np.arange(phase.batch_size)
    batches = [phase.batch(number, rows) for number in range(job.total_steps)]
    longest = max(batch["input_ids"].shape[1] for batch in batches)

    def padded(values: np.ndarray, width: int) -> np.ndarray:
        more = longest - width if values.ndim == 2 else 0
        return np.pad(values, ((0, 0), (0, more))) if more else values

    stacked = {
        name: np.stack([padded(b[name], b["input_ids"].shape[1]) for b in batches])
        for name in batches[0]
    }
    rate = jax.jit(lambda number: optimizer.schedule(job.optimizer, job.total_steps, number))
    state = step.init_state(job.objective, job.optimizer, job.experiment.seed)
    head = {f"head/{k}": np.asarray(v) for k, v in state["params"]["head"].items()}
    widths = np.array([b["input_ids"].shape[1] for b in batches])
    rates = np.array([float(rate(np.int32(i))) for i in range(job.total_steps)])
    return stacked | base_lib.flat(head) | {"learning_rates": rates, "widths": widths}


def compare(experiment: Finetuning, pairs: list[dict[str, Any]]) -> int:
    """Says how far they are apart; 1 if that is too far."""
    drops = max(experiment.adapt.hidden_dropout_prob, experiment.adapt.head_dropout_prob) > 0
    ours, theirs = ([pair[side] for pair in pairs] for side in ("our_score", "their_score"))
    print(f"{experiment.task.main_score}: ours {ours}, PyTorch's {theirs}")
    if drops:
        spread = math.sqrt(
            sum(statistics.variance(side) / len(side) for side in (ours, theirs)) or 1e-12
        )
        apart = abs(statistics.mean(ours) - statistics.mean(theirs)) / spread
        print(f"finetune parity, dropout: means {apart:.2f} standard errors apart (at most 2)")
        return int(apart > 2)
    losses = max(
        abs(a - b)
        for pair in pairs
        for a, b in list(zip(pair["ours"], pair["theirs"], strict=True))[:FIRST]
    )
    apart = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    print(
        f"finetune parity: losses of the first {FIRST} steps {losses:.1e} apart (at most "
        f"{LOSSES:g}), final scores {apart:.4f} (at most {SCORES:g})"
    )
    return int(not (losses <= LOSSES and apart <= SCORES))


if __name__ == "__main__":
    sys.exit(main())
