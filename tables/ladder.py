"""From the paper's recipe to a better one for a small encoder, a change a row.

    bert-jax compare tables/ladder.py

Source: Devlin et al. 2018 made small (experiments/tiny.py), on the speeches in sample_text/; each
row keeps what the rows before it changed.
Hardware: any CPU; two hours on two cores, 300 seconds of CPU a run.
Expected: each row at or below the held-out loss of the one before, at equal CPU time.
"""

from bert_jax import config
from bert_jax.config import Row, Table

# All rows are scored at the length at which most of their steps are done.
_SCORED = ("data.eval_sequence_length=64", "data.eval_max_predictions_per_seq=10")
_CHANGES = {
    "no-dropout": ("model.hidden_dropout_prob=0", "model.attention_probs_dropout_prob=0"),
    "more-masks": (
        "data.masked_lm_prob=0.3",
        "phases.0.max_predictions_per_seq=20",
        "phases.1.max_predictions_per_seq=40",
    ),
    "higher-rate": ("optimizer.peak_learning_rate=3e-3",),
}


def table() -> Table:
    """Held-out loss and what else there is to know of a run, over two seeds."""
    experiment = config.override(config.load("experiments/tiny.py"), _SCORED)
    rows = [Row(name="paper", experiment=experiment)]
    for name, settings in _CHANGES.items():
        experiment = config.override(experiment, settings)
        rows.append(Row(name=name, experiment=experiment))
    return Table(
        name="ladder",
        rows=tuple(rows),
        columns=("loss", "accuracy", "next_sentence", "steps", "cpu_seconds", "real_tokens"),
        seeds=(0, 1),
        cpu_seconds=300.0,
    )
