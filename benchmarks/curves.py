"""Nats below the unigram baseline against CPU time, of three ways to train.

For each size, three runs of equal CPU time train on the same text: our recipe, the recipe of Devlin
et al. 2018, and the latter with the Trainer of transformers. They have the same vocabulary and rows
of 64 tokens, and are scored on the same masked tokens of held-out rows. They train on masked tokens
alone, since Trainer's collator makes no sentence pairs. The paper's recipe has BERT's encoder with
dropout, AdamW and 15 % of the tokens masked. All runs use one thread. The time of a step is
measured first, so that the learning rate falls to its end within the budget. Only the CPU time of
training steps counts.
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

ROW_TOKENS = 64
# [CPU seconds, nats per masked token below the unigram baseline] of each evaluation.
Curve = list[list[float]]

# Of each size: our experiment and a setting of it, then those of the paper.
SIZES = {
    "tiny": ("tiny", "", "tiny_paper", ""),
    "mini": ("mini", "", "mini_paper", ""),
    "17m": ("modern_17m", "model.local_window=64", "mini_paper", "model.num_hidden_layers=7"),
}
# Who trains, with which recipe.
LABELS = {
    "ours": "bert_jax, our recipe",
    "paper": "bert_jax, recipe of Devlin et al.",
    "trainer": "transformers' Trainer, recipe of Devlin et al.",
}
_EVALUATIONS, _TIMED_STEPS = 10, 5


def main() -> None:
    """Measures, size after size, and draws the curves."""
    flags = measure.parser(
        __doc__,
        sizes=",".join(SIZES),
        cpu_seconds=(300.0, "CPU seconds that the training steps of each run take"),
        text=("text:novels", "source of the text; the size tiny has the sample text"),
        dtype=("float32", "or bfloat16: compute type of the runs with our recipe"),
        folder=("build/curves", "of the runs"),
        picture="docs/curves.png",
        python=measure.TORCH,
    ).parse_args()
    measure.restart_with(threads=1)
    figures, details = {}, {}
    for size in flags.sizes.split(","):
        folder = pathlib.Path(flags.folder, size).absolute()
        ours, paper = make_experiments(size, flags.text, flags.dtype)
        curves = {
            "ours": train(ours, folder / "ours", flags.cpu_seconds),
            "paper": train(paper, folder / "paper", flags.cpu_seconds),
        }
        with measure.peer(flags.python, "curve", threads=1) as peer:
            curves["trainer"], versions = train_with_transformers(
                paper, folder, peer, flags.cpu_seconds
            )
        details[size] = {"versions": versions, "curves": curves}
        figures |= {f"{size}_{name}": curve[-1][1] for name, curve in curves.items()}
        measure.report(
            "curves", figures, details, flags.out
        )  # after each size: larger ones take long
    draw({size: detail["curves"] for size, detail in details.items()}, flags.picture)


def make_experiments(size: str, text: str, dtype: str) -> tuple[Experiment, Experiment]:
    """Returns the two experiments of a size, with the same text and rows of ROW_TOKENS tokens."""
    ours, our_setting, paper, paper_setting = SIZES[size]
    common = [
        *("data.objective=mlm", f"data.eval_sequence_length={ROW_TOKENS}", "data.eval_rows=2000"),
        *("data.eval_max_predictions_per_seq=10", "run.watch=", "run.log_every=10"),
    ]
    if size != "tiny":
        common.append(f"corpus.sources={text}")
    recipes = []
    our_settings = [f"model.compute_dtype={dtype}", our_setting]
    for name, more in ((ours, our_settings), (paper, [paper_setting])):
        experiment = config.override(config.load(name), [*common, *filter(None, more)])
        phase = experiment.phases[0]
        rows = phase.batch_size * phase.sequence_length // ROW_TOKENS
        predictions = round(phase.max_predictions_per_seq * ROW_TOKENS / phase.sequence_length)
        phase = dataclasses.replace(
            phase, sequence_length=ROW_TOKENS, batch_size=rows, max_predictions_per_seq=predictions
        )
        recipes.append(dataclasses.replace(experiment, phases=(phase,)))
    return recipes[0], recipes[1]


def train(experiment: Experiment, folder: pathlib.Path, cpu_seconds: float) -> Curve:
    """Trains with as many steps as fit into `cpu_seconds`, and returns the curve."""
    corpus = str(folder.parent / "corpus")
    experiment = config.override(experiment, [f"run.corpus_dir={corpus}"])
    timing = epath.Path(folder.parent / "timing")
    lines = budget.time_phases(experiment, timing, LoggedProgress(), _TIMED_STEPS)
    costs = [line["cpu_seconds"] / line["steps"] for line in lines]
    steps = budget.steps_within(experiment, cpu_seconds, costs)
    experiment = budget.with_steps(experiment, steps)
    interval = max(steps // _EVALUATIONS, 1)
    bert_jax.pretrain(experiment, folder, [f"run.eval_every={interval}"])
    record = Record.read(os.fspath(folder))
    steps_so_far, seconds = times.cumulate(record.windows, lambda w: w["cpu_seconds"] / w["steps"])
    return [
        [
            float(np.interp(line["step"], steps_so_far, seconds)),
            line["unigram_loss"] - line["masked_lm_loss"],
        ]
        for line in record.evaluation
    ]


def train_with_transformers(
    paper: Experiment, folder: pathlib.Path, peer: measure.Ask, cpu_seconds: float
) -> tuple[Curve, dict[str, str]]:
    """Trains the paper's encoder with transformers; returns the curve, and versions."""
    corpus = PreparedCorpus.open(epath.Path(folder / "corpus"))
    mesh = mesh_lib.make_mesh(paper.parallelism)
    held_out = HeldOutRows.of(corpus, paper, mesh)
    for number, batch in enumerate(held_out.batches):
        np.savez(folder / f"held_out_{number}.npz", **batch)
    ids = corpus_lib.open_stream(corpus.folder, "train").ids
    rows = len(ids) // (ROW_TOKENS - 2)  # [CLS] and [SEP] at the ends
    special = corpus.special_ids
    packed = np.empty((rows, ROW_TOKENS), np.int32)
    packed[:, 0], packed[:, -1] = special.cls, special.sep
    packed[:, 1:-1] = ids[: rows * (ROW_TOKENS - 2)].reshape(rows, -1)
    np.save(folder / "rows.npy", packed)
    model, optimizer, (phase,) = paper.model, paper.optimizer, paper.phases
    names = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")
    names += ("intermediate_size", "max_position_embeddings")
    losses: list[list[float]]
    losses, versions = peer(
        "train",
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
    return [[seconds, held_out.unigram_loss - loss] for seconds, loss in losses], versions


def draw(curves: dict[str, dict[str, Curve]], picture: str) -> None:
    """Draws a panel for each size: CPU seconds, and nats below the unigram baseline."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4 * len(curves), 3.4), layout="constrained")
    panels: Sequence[Any] = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, (size, of_size) in zip(panels, curves.items(), strict=True):
        for name, curve in of_size.items():
            panel.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=LABELS[name])
        panel.set_title(size)
        panel.set_xlabel("CPU seconds of training steps")
        panel.grid(alpha=0.3)
    panels[0].set_ylabel("nats below the unigram baseline")
    panels[0].legend(fontsize=8)
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    main()
