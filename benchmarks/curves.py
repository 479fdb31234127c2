"""Loss against CPU time: our recipe, the paper's, and the paper's by transformers' Trainer.

For each size three runs of equal CPU time learn the same text with the same vocabulary, in rows of
64 tokens, and are scored on the same masked tokens of held-out rows. None learns sentence pairs,
since Trainer's collator makes none. The paper's recipe has BERT's encoder with dropout, AdamW and
15 % of the tokens masked. Each run has a process on one core, and its steps are timed first, so
that the learning rate falls to its end within the budget. Seconds are those of training steps.
"""

import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from etils import epath

import bert_jax
from benchmarks import measure
from bert_jax import config
from bert_jax.config import Experiment
from bert_jax.data import corpus as corpus_lib
from bert_jax.pretraining.evaluators import HeldOutRows
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.running.progress import LoggedProgress
from bert_jax.tools.compare import budget
from bert_jax.tools.report import times
from bert_jax.tools.report.run_record import Record
from bert_jax.training import mesh as mesh_lib

ROW = 64  # tokens
# [CPU seconds, nats per masked token below the unigram baseline] of each evaluation.
Curve = list[list[float]]

# Experiments with our recipe and the paper's, and settings of the latter.
SIZES = {
    "tiny": ("tiny", "tiny_paper", ()),
    "mini": ("mini", "mini_paper", ()),
    "17m": ("modern_17m", "mini_paper", ("model.num_hidden_layers=7",)),
}
_EVALUATIONS, _TIMED_STEPS = 10, 5


def main() -> None:
    """Measures, size after size, and draws the curves."""
    flags = measure.parser(
        __doc__,
        sizes=",".join(SIZES),
        cpu_seconds=(300.0, "of the training steps of each run"),
        text=("text:novels", "source of the text; tiny learns the sample text"),
        dtype=("float32", "or bfloat16, of our runs with our recipe"),
        folder=("build/curves", "of the runs"),
        picture="docs/curves.png",
        python=measure.TORCH,
    ).parse_args()
    measure.restart_with(threads=1)
    figures, details = {}, {}
    for size in flags.sizes.split(","):
        folder = pathlib.Path(flags.folder, size).absolute()
        ours, paper = recipes(size, flags.text, flags.dtype)
        curves = {
            "bert_jax, our recipe": learn(ours, folder / "ours", flags.cpu_seconds),
            "bert_jax, the paper's": learn(paper, folder / "paper", flags.cpu_seconds),
        }
        with measure.peer(flags.python, "curve", threads=1) as peer:
            curves["transformers' Trainer, the paper's"], versions = learn_elsewhere(
                paper, folder, peer, flags.cpu_seconds
            )
        details[size] = {"versions": versions, "curves": curves}
        figures |= {f"{size}_{name}": curve[-1][1] for name, curve in curves.items()}
        measure.report("curves", figures, details, flags.out)  # larger sizes take long
    draw({size: found["curves"] for size, found in details.items()}, flags.picture)


def recipes(size: str, text: str, dtype: str) -> tuple[Experiment, Experiment]:
    """Returns the two experiments of a size, with equal text and held-out rows of ROW tokens."""
    ours, paper, settings = SIZES[size]
    common = [
        *("data.objective=mlm", f"data.eval_sequence_length={ROW}", "data.eval_rows=2000"),
        *("data.eval_max_predictions_per_seq=10", "run.watch=", "run.log_every=10"),
    ]
    if size != "tiny":
        common.append(f"corpus.sources={text}")
    found = []
    for name, more in ((ours, [f"model.compute_dtype={dtype}"]), (paper, settings)):
        experiment = config.override(config.load(name), [*common, *more])
        phase = experiment.phases[0]
        rows = phase.batch_size * phase.sequence_length // ROW
        predictions = round(phase.max_predictions_per_seq * ROW / phase.sequence_length)
        phase = dataclasses.replace(
            phase, sequence_length=ROW, batch_size=rows, max_predictions_per_seq=predictions
        )
        found.append(dataclasses.replace(experiment, phases=(phase,)))
    return found[0], found[1]


def learn(experiment: Experiment, folder: pathlib.Path, cpu_seconds: float) -> Curve:
    """Trains with as many steps as fit into `cpu_seconds`, and returns the held-out losses."""
    corpus = str(folder.parent / "corpus")
    experiment = config.override(experiment, [f"run.corpus_dir={corpus}"])
    timing = epath.Path(folder.parent / "timing")
    lines = budget.time_phases(experiment, timing, LoggedProgress(), _TIMED_STEPS)
    costs = [line["cpu_seconds"] / line["steps"] for line in lines]
    steps = budget.steps_within(experiment, cpu_seconds, costs)
    experiment = budget.with_steps(experiment, steps)
    often = max(steps // _EVALUATIONS, 1)
    bert_jax.pretrain(experiment, folder, [f"run.eval_every={often}"])
    record = Record.read(os.fspath(folder))
    known, spent = times.cumulate(record.windows, lambda w: w["cpu_seconds"] / w["steps"])
    return [
        [float(np.interp(x["step"], known, spent)), x["unigram_loss"] - x["masked_lm_loss"]]
        for x in record.evaluation
    ]


def learn_elsewhere(
    paper: Experiment, folder: pathlib.Path, peer: measure.Ask, cpu_seconds: float
) -> tuple[Curve, dict[str, str]]:
    """Trains the paper's encoder with transformers; returns the curve, and versions."""
    corpus = PreparedCorpus.open(epath.Path(folder / "corpus"))
    mesh = mesh_lib.make_mesh(paper.parallelism)
    held_out = HeldOutRows.of(corpus, paper, mesh)
    for number, batch in enumerate(held_out.batches):
        np.savez(folder / f"held_out_{number}.npz", **batch)
    ids = corpus_lib.open_stream(corpus.folder, "train").ids
    rows = len(ids) // (ROW - 2)  # [CLS] and [SEP] at the ends
    special = corpus.special_ids
    packed = np.empty((rows, ROW), np.int32)
    packed[:, 0], packed[:, -1] = special.cls, special.sep
    packed[:, 1:-1] = ids[: rows * (ROW - 2)].reshape(rows, -1)
    np.save(folder / "rows.npy", packed)
    model, optimizer, (phase,) = paper.model, paper.optimizer, paper.phases
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    names += ("intermediate_size", "max_position_embeddings")
    found: list[list[float]]
    found, versions = peer(
        "learn",
        folder=str(folder),
        vocabulary=str(corpus.folder / "tokenizer" / "vocab.txt"),
        fields={name: getattr(model, name) for name in names},
        settings={
            "per_device_train_batch_size": phase.batch_size,
            "learning_rate": optimizer.peak_learning_rate,
            "weight_decay": optimizer.weight_decay,
        },
        warmup=optimizer.warmup_steps / phase.steps,
        cpu_seconds=cpu_seconds,
        evaluations=_EVALUATIONS,
    )
    return [[spent, held_out.unigram_loss - loss] for spent, loss in found], versions


def draw(curves: dict[str, dict[str, Curve]], picture: str) -> None:
    """Draws a panel for each size: CPU seconds, and nats below the unigram baseline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3.4), layout="constrained")
    panels: Sequence[Any] = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, (size, found) in zip(panels, curves.items(), strict=True):
        for name, curve in found.items():
            panel.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=name)
        panel.set_title(size)
        panel.set_xlabel("CPU seconds of training steps")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("nats per masked token below the unigram baseline")
    panels[0].legend(fontsize=8)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
