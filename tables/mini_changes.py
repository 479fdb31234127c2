"""What limits an hour of experiments/mini.py: one change in each row, in equal time.

    bert-jax compare tables/mini_changes.py

Source: changes that docs/results/learning.md lacked. The rows are made so that their runs take
about the same time: shorter rows are more, and a deeper or wider encoder has about as many
operations in a step. All
rows have 48 rows a step, since short runs need more steps rather than larger ones. The text is
novels and speeches; by size a thirtieth of it are speeches.
Hardware: two CPU cores; about five minutes for each run where a step in bfloat16 takes a quarter of
a second of CPU time.
Expected: see docs/results/learning.md.
"""

import dataclasses

from bert_jax import config
from bert_jax.config import Experiment, Phase, Row, Table

_SPEECHES_ALONE, _NOVELS_ALONE = (0.0, 1.0), (1.0, 0.0)


def _in_phases(experiment: Experiment, first: dict, second: dict) -> Experiment:
    """Divides the steps into a first and a second half with these fields."""
    (phase,) = experiment.phases
    half = dataclasses.replace(phase, steps=phase.steps // 2)
    phases: tuple[Phase, ...] = (
        dataclasses.replace(half, **first),
        dataclasses.replace(half, **second),
    )
    return dataclasses.replace(experiment, phases=phases)


def table() -> Table:
    """The recipe of mini.py with 48 rows a step, and one change in each further row."""
    mini = config.override(
        config.load("experiments/mini.py"),
        [
            "corpus.sources=text:novels,jsonl:experiments/sample_text/speeches.jsonl.gz",
            *("corpus.temperature=1", "model.compute_dtype=bfloat16"),
            *(
                "phases.0.batch_size=48",
                "phases.0.steps=400",
                "optimizer.warmup_steps=40",
            ),
            *("data.eval_rows=2000", "run.eval_every=50"),
        ],
    )
    short = {"sequence_length": 32, "batch_size": 96, "max_predictions_per_seq": 10}
    rows = {
        "mini": mini,
        "growing-rows": _in_phases(mini, {"batch_size": 24}, {"batch_size": 72}),
        "short-rows-first": _in_phases(mini, short, {}),
        "speeches-fifth": config.override(mini, ["corpus.temperature=0", "corpus.mixture=4,1"]),
        "speeches-first": _in_phases(
            mini, {"mixture": _SPEECHES_ALONE}, {"mixture": _NOVELS_ALONE}
        ),
        "deeper": config.override(
            mini,
            [
                *("model.num_hidden_layers=8", "model.hidden_size=192"),
                *("model.num_attention_heads=3", "model.intermediate_size=516"),
            ],
        ),
        "wider": config.override(
            mini,
            [
                *("model.num_hidden_layers=2", "model.hidden_size=320"),
                *("model.num_attention_heads=5", "model.intermediate_size=860"),
            ],
        ),
    }
    return Table(
        name="mini_changes",
        rows=tuple(Row(name=name, experiment=experiment) for name, experiment in rows.items()),
        columns=("below_unigrams", "accuracy", "next_sentence", "steps", "cpu_seconds"),
    )
