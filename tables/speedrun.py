"""A speedrun: seconds of CPU until tiny.py's encoder knows so much, a change a row.

    bert-jax compare tables/speedrun.py

Source: Muon (Jordan et al. 2024), a causal beginning (Gisserot-Boukhlef et al. 2025), more masks
(Wettig et al. 2023), each on top of experiments/tiny.py; all rows are scored on the same held-out
rows. A row is ahead where its `reach:` is smaller than that of `tiny`; a record wants three seeds.
Hardware: any CPU; 9 runs of three to eight minutes each.
Expected: Muon is 2.5 nat below the unigram baseline in 0.86 of the time (results/learning.md).
"""

import dataclasses

from bert_jax import config
from bert_jax.config import Experiment, Phase, Row, Table

_MUON = ("optimizer.name=muon",)
_CAUSAL = {"objective": "causal", "max_predictions_per_seq": 63}


def _causal_first(experiment: Experiment, share: float) -> Experiment:
    """Begins with a share of the steps from left to right, all places predicted."""
    (masked,) = experiment.phases
    steps = round(share * masked.steps)
    phases: tuple[Phase, ...] = (
        dataclasses.replace(masked, steps=steps, **_CAUSAL),
        dataclasses.replace(masked, steps=masked.steps - steps),
    )
    return dataclasses.replace(experiment, phases=phases)


def table() -> Table:
    """Rows that are kept and rows that are not, in equal steps."""
    tiny = config.override(
        config.load("experiments/tiny.py"),
        ["optimizer.name=adamw", "phases.0.steps=1750", "run.eval_every=50"],
    )
    muon = config.override(tiny, _MUON)
    rows = {
        "tiny": tiny,
        "causal-quarter": _causal_first(tiny, 0.25),
        "muon": muon,
        "muon-half-rate": config.override(muon, ["optimizer.matrix_learning_rate=0.01"]),
        "muon-causal-tenth": _causal_first(muon, 0.1),
        "muon-causal-quarter": _causal_first(muon, 0.25),
        "muon-more-masks": config.override(
            muon, ["data.masked_lm_prob=0.4", "phases.0.max_predictions_per_seq=26"]
        ),
        "muon-half-rows": config.override(muon, ["phases.0.batch_size=32", "phases.0.steps=3500"]),
        "muon-own-output": config.override(muon, ["model.output_table=own"]),
    }
    return Table(
        name="speedrun",
        rows=tuple(Row(name=name, experiment=experiment) for name, experiment in rows.items()),
        columns=(
            *(f"reach:{nat}" for nat in ("1.5", "2.0", "2.3", "2.5")),
            *("below_unigrams", "accuracy", "next_sentence", "steps", "cpu_seconds"),
        ),
        seeds=(0,),
    )
