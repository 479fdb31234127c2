"""The ladder at twice the width and depth, on a book shelf of text (tables/ladder.py).

    bert-jax compare tables/ladder_mini.py

Source: Devlin et al. 2018 made small (experiments/mini_paper.py), on novels; each row keeps what
the rows before it changed, and the last is experiments/mini.py with AdamW.
Hardware: two CPU cores, two hours and a half; 900 seconds of CPU are each run's steps.
Expected: mini.py 1.7 nat ahead, nearly all of it by the encoder; twice the rate is a step back.
"""

import dataclasses

from bert_jax import config
from bert_jax.config import Row, Table

_CHANGES = {
    "no-dropout": ("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0"),
    "modern": (
        *("model.kind=modern", "model.global_every=1", "model.intermediate_size=688"),
        "model.global_rotary_base=1000",
    ),
    "scaled": ("model.initialization=scaled",),
    "higher-rate": ("optimizer.peak_learning_rate=2e-3",),
    "more-masks": ("data.masked_lm_prob=0.3", "phases.0.max_predictions_per_seq=20"),
    "more-rows": ("phases.0.batch_size=96",),
}


def table() -> Table:
    """Held-out scores at the length of most steps, often, of fewer rows."""
    last = config.load("experiments/mini.py").data
    scored = ("eval_sequence_length", "eval_max_predictions_per_seq")
    experiment = config.override(
        config.load("experiments/mini_paper.py"),
        [
            *("run.eval_every=100", "data.eval_rows=2000"),
            *(f"data.{name}={getattr(last, name)}" for name in scored),
        ],
    )
    rows = [Row(name="paper", experiment=experiment)]
    experiment = dataclasses.replace(experiment, phases=experiment.phases[:1])
    for name, settings in _CHANGES.items():
        experiment = config.override(experiment, settings)
        rows.append(Row(name=name, experiment=experiment))
    return Table(
        name="ladder_mini",
        rows=tuple(rows),
        columns=(
            *("loss", "below_unigrams", "accuracy", "next_sentence"),
            *("steps", "cpu_seconds", "real_tokens"),
        ),
        seeds=(0, 1),
        cpu_seconds=900.0,
    )
