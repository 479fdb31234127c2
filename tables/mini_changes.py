"""One change to experiments/mini.py in each row, for five minutes of one core.

    bert-jax compare tables/mini_changes.py

Source: changes that the other tables of this folder do not have.
Data: novels in the folder `novels`, the speeches of experiments/sample_text, and data/blimp.jsonl
(see experiments/tasks/blimp.py). A thirtieth of the text are speeches.
Hardware: one CPU core with AMX, an hour with evaluations. The steps of a run took 265 to 312 CPU
seconds there; a step of 48 rows in bfloat16 took 0.67.
Expected: see docs/results/learning.md.
"""

import dataclasses

from bert_jax import config
from bert_jax.config import Experiment, Row, Table

_NOVELS_ALONE, _SPEECHES_ALONE = (1.0, 0.0), (0.0, 1.0)


def _in_halves(experiment: Experiment, first: dict, second: dict) -> Experiment:
    """Returns the experiment with two phases, which have these fields."""
    (phase,) = experiment.phases
    phases = tuple(dataclasses.replace(phase, **fields) for fields in (first, second))
    return dataclasses.replace(experiment, phases=phases)


def _with_steps(experiment: Experiment, steps: int) -> Experiment:
    """Divides the steps equally among the phases; a tenth of them warm up."""
    each = steps // len(experiment.phases)
    phases = tuple(dataclasses.replace(phase, steps=each) for phase in experiment.phases)
    optimizer = dataclasses.replace(experiment.optimizer, warmup_steps=steps // 10)
    return dataclasses.replace(experiment, phases=phases, optimizer=optimizer)


def table() -> Table:
    """Returns the recipe of mini.py with 48 rows a step, and seven changes to it."""
    settings = [
        "corpus.sources=text:novels,jsonl:experiments/sample_text/speeches.jsonl.gz",
        *("corpus.temperature=1", "model.compute_dtype=bfloat16", "phases.0.batch_size=48"),
        *("data.eval_rows=2000", "run.eval_every=150"),
    ]
    mini = config.override(config.load("experiments/mini.py"), settings)
    short = {"sequence_length": 32, "batch_size": 96, "max_predictions_per_seq": 10}
    deeper = ["model.num_hidden_layers=8", "model.hidden_size=192", "model.num_attention_heads=3"]
    wider = ["model.num_hidden_layers=2", "model.hidden_size=320", "model.num_attention_heads=5"]
    rows = {
        "mini": (mini, 450),
        "growing-rows": (_in_halves(mini, {"batch_size": 24}, {"batch_size": 72}), 410),
        "short-rows-first": (_in_halves(mini, short, {}), 464),
        # Novels are 96.7 % of the text, speeches 3.3 %. 96.7 : 7.3 x 3.3 is 4 : 1.
        "speeches-fifth": (config.override(mini, ["phases.0.mixture=1,7.3"]), 450),
        "speeches-first": (
            _in_halves(mini, {"mixture": _SPEECHES_ALONE}, {"mixture": _NOVELS_ALONE}),
            450,
        ),
        "half-rows": (config.override(mini, ["phases.0.batch_size=24"]), 750),
        "deeper": (config.override(mini, [*deeper, "model.intermediate_size=516"]), 390),
        "wider": (config.override(mini, [*wider, "model.intermediate_size=860"]), 555),
    }
    return Table(
        name="mini_changes",
        rows=tuple(Row(name=n, experiment=_with_steps(e, steps)) for n, (e, steps) in rows.items()),
        columns=(
            *("below_unigrams", "accuracy", "next_sentence"),
            *("probe:experiments/tasks/blimp.py", "steps", "cpu_seconds"),
        ),
    )
