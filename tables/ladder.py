"""From the paper's recipe to a better one for a small encoder, a change a row.

    bert-jax compare tables/ladder.py

Source: Devlin et al. 2018 made small (experiments/tiny_paper.py), on the speeches in sample_text/;
each row keeps what the rows before it changed. The encoder is ModernBERT's (Warner et al. 2024),
two thirds as wide inside, since it is gated, with both layers global.
Hardware: any CPU; an hour and a half on two cores; 300 seconds of CPU are each run's steps.
Expected: no dropout and the encoder bring most, more masks the rest (docs/results/learning.md).
"""

import dataclasses

from bert_jax import config
from bert_jax.config import Row, Table

# Of the first phase, of the rows that are scored, and from the second row on of all steps.
_LENGTH = 64
_CHANGES = {
    "no-dropout": ("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0"),
    "modern": ("model.kind=modern", "model.global_every=1", "model.intermediate_size=344"),
    "rotary-base": ("model.global_rotary_base=1000",),
    "scaled": ("model.initialization=scaled",),
    "higher-rate": ("optimizer.peak_learning_rate=4e-3",),
    "more-masks": ("data.masked_lm_prob=0.3", "phases.0.max_predictions_per_seq=20"),
    "stable-adamw": ("optimizer.name=stable_adamw",),
    "wsd": ("optimizer.schedule=wsd", "optimizer.decay_steps=420"),
}


def table() -> Table:
    """Held-out scores at the length of most steps, over two seeds."""
    scored = (f"data.eval_sequence_length={_LENGTH}", "data.eval_max_predictions_per_seq=10")
    experiment = config.override(config.load("experiments/tiny_paper.py"), scored)
    rows = [Row(name="paper", experiment=experiment)]
    short = tuple(phase for phase in experiment.phases if phase.sequence_length == _LENGTH)
    experiment = dataclasses.replace(experiment, phases=short)
    rows.append(Row(name="one-length", experiment=experiment))
    for name, settings in _CHANGES.items():
        experiment = config.override(experiment, settings)
        rows.append(Row(name=name, experiment=experiment))
    return Table(
        name="ladder",
        rows=tuple(rows),
        columns=(
            *("loss", "below_unigrams", "accuracy", "next_sentence"),
            *("steps", "cpu_seconds", "real_tokens"),
        ),
        seeds=(0, 1),
        cpu_seconds=300.0,
    )
