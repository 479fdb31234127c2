"""The speedrun at twice the width and depth, in equal seconds of CPU on a book shelf of text.

    bert-jax compare tables/speedrun_mini.py

Source: the changes of tables/speedrun.py, each on top of experiments/mini.py, on novels; all rows
are scored on the same held-out rows.
Hardware: two CPU cores, an hour and a half; 900 seconds of CPU are each run's steps.
Expected: Muon 0.11 nat ahead of AdamW, and 0.14 more with half the rows (docs/results/learning.md).
"""

import dataclasses

from bert_jax import config
from bert_jax.config import Experiment, Row, Table

_MUON = ("optimizer.name=muon",)


def _causal_first(experiment: Experiment, share: float) -> Experiment:
    """Begins with a share of the steps from left to right, all places predicted."""
    (masked,) = experiment.phases
    steps = round(share * masked.steps)
    causal = dataclasses.replace(
        masked, steps=steps, objective="causal", max_predictions_per_seq=63
    )
    masked = dataclasses.replace(masked, steps=masked.steps - steps)
    return dataclasses.replace(experiment, phases=(causal, masked))


def table() -> Table:
    """Rows that are kept and rows that are not, in equal time."""
    mini = config.override(
        config.load("experiments/mini.py"),
        ["optimizer.name=adamw", "data.eval_rows=2000", "run.eval_every=100"],
    )
    muon = config.override(mini, _MUON)
    rows = {
        "mini": mini,
        "muon": muon,
        "causal-quarter": _causal_first(mini, 0.25),
        "muon-half-rate": config.override(muon, ["optimizer.matrix_learning_rate=0.01"]),
        "muon-causal-quarter": _causal_first(muon, 0.25),
        "muon-more-masks": config.override(
            muon, ["data.masked_lm_prob=0.4", "phases.0.max_predictions_per_seq=26"]
        ),
        "muon-half-rows": config.override(muon, ["phases.0.batch_size=48", "phases.0.steps=8000"]),
    }
    return Table(
        name="speedrun_mini",
        rows=tuple(Row(name=name, experiment=experiment) for name, experiment in rows.items()),
        columns=(
            *(f"reach:{nat}" for nat in ("1.0", "1.5", "1.8")),
            *("below_unigrams", "accuracy", "next_sentence", "steps", "cpu_seconds"),
        ),
        cpu_seconds=900.0,
    )
