"""Our fine-tuning against that of transformers' Trainer: the same weights, order and settings.

    python -m benchmarks.finetune_parity TASKFILE --from BASE [--set FIELD=VALUE] [--seeds 3]

Fine-tunes here, and in the environment of PyTorch, where `peer.Tuned` trains the exported initial
model on the batches of ours. Without dropout the losses of the first 50 steps and the final score
must agree; with it, the scores in the mean over the seeds. The optimizer must be adamw with the
linear schedule, which are the defaults, and all parameters must be trained.
"""

import json
import math
import pathlib
import statistics
import sys
import tempfile
from typing import Any

import jax
import numpy as np
from etils import epath

from benchmarks import measure
from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.distributed import peers as peers_lib
from bert_jax.interop import finetuned, weights
from bert_jax.interop.huggingface import write_tensors
from bert_jax.running.progress import LineConsole, Progress
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks.finetuned_model import FinetunedModel
from bert_jax.tasks.finetuning_job import FinetuningJob, finetune
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step

FIRST = 50  # steps whose losses are compared
# How far apart what is found may be.
BOUNDS = {"losses_apart": 1e-4, "scores_apart": 5e-3, "standard_errors_apart": 2.0}


def main() -> int:
    """Trains on both sides, and compares; 1 if they are too far apart."""
    parser = measure.parser(__doc__, set=[], seeds=1, python=measure.TORCH)
    parser.add_argument("task", metavar="TASKFILE")
    parser.add_argument("--from", dest="base", required=True)
    flags = parser.parse_args()
    settings = [f"init_from={flags.base}", "run.log_every=1", f"run.eval_every={2**31}"]
    experiment = config.override(config.load(flags.task, Finetuning), [*flags.set, *settings])
    pairs = []
    with tempfile.TemporaryDirectory() as name, measure.peer(flags.python, "tuned", 2) as peer:
        for seed in range(flags.seeds):
            folder = pathlib.Path(name) / str(seed)
            pairs.append(one(config.override(experiment, [f"seed={seed}"]), folder, peer))
    found = apart(experiment, pairs)
    measure.report("finetune_parity", found, {"bounds": BOUNDS, "pairs": pairs}, flags.out)
    return int(any(not found[name] <= BOUNDS[name] for name in found.keys() & BOUNDS))


def one(experiment: Finetuning, place: pathlib.Path, peer: measure.Ask) -> dict[str, Any]:
    """Losses and scores of both sides with one seed."""
    finetune(experiment, None, str(place / "run"), Progress(LineConsole(quiet=True)))
    workdir = open_workdir(str(place / "run"))
    lines = JsonLines(workdir.metrics).read()
    job = FinetuningJob(experiment, workdir, lambda line: None)
    job.check_inputs(mesh_lib.one_device())
    with peers_lib.connect_processes() as peers:
        job.open(mesh_lib.one_device(), peers)
        architecture = write(job, place)
    tree = json.loads(config.to_json(experiment))
    tree["optimizer"]["warmup_steps"] = job.optimizer.warmup_steps
    theirs = peer("learn", folder=str(place), architecture=architecture, experiment=tree)
    outputs: list[Any] = [None] * sum(len(which) for which, _ in job.eval_batches)
    for number, (which, batch) in enumerate(job.eval_batches):
        lengths, logits = batch["input_mask"].sum(axis=1), np.load(place / f"logits_{number}.npy")
        for row, length, scores in zip(which, lengths, logits, strict=False):
            outputs[row] = scores if scores.ndim == 1 else scores[:length]
    score, data = experiment.task.main_score, job.data
    return {
        "losses": [line["loss"] for line in lines if line["kind"] == "train"],
        "their_losses": theirs,
        "score": next(line[score] for line in lines if line["kind"] == "scores"),
        "their_score": data.kind.scores(outputs, data.eval_rows, data.validation)[score],
    }


def write(job: FinetuningJob, place: pathlib.Path) -> str:
    """Writes every batch, and the model before the first step; returns its class."""
    tuned = FinetunedModel.load(job.workdir)
    # The weights of this export are replaced below by the initial ones.
    architecture = finetuned.export(tuned, "task", "float32", epath.Path(place / "base"))
    state, _ = job.initial_state(step.init_state(job.objective, job.optimizer, job.experiment.seed))
    first_row, params = tuned.tokenizer.pad_id + 1, jax.device_get(state["params"])
    tensors = weights.export_tensors(params, tuned.model, architecture, first_row)
    write_tensors(epath.Path(place / "base" / "model.safetensors"), tensors, "float32")
    phase = job.training.phase_batches_at(0)
    for number in range(job.total_steps):
        batch = job.data.training.batch(0, number, np.arange(phase.batch_size))  # not packed
        np.savez(place / f"training_{number:05}.npz", **batch)
    for number, (_, batch) in enumerate(job.eval_batches):
        np.savez(place / f"held_out_{number:05}.npz", **batch)
    return architecture


def apart(experiment: Finetuning, pairs: list[dict[str, Any]]) -> dict[str, float]:
    """How far the sides are apart: with dropout in the mean over seeds, else in each."""
    ours, theirs = ([pair[side] for pair in pairs] for side in ("score", "their_score"))
    found = {"score": statistics.mean(ours), "their_score": statistics.mean(theirs)}
    if max(experiment.adapt.hidden_dropout_prob, experiment.adapt.head_dropout_prob) > 0:
        variances = (statistics.variance(side) / len(side) for side in (ours, theirs))
        far = abs(found["score"] - found["their_score"]) / math.sqrt(sum(variances) or 1e-12)
        return found | {"standard_errors_apart": far}
    both = [zip(pair["losses"], pair["their_losses"], strict=True) for pair in pairs]
    losses = max(abs(a - b) for pair in both for a, b in list(pair)[:FIRST])
    scores = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    return found | {"losses_apart": losses, "scores_apart": scores}


if __name__ == "__main__":
    sys.exit(main())
