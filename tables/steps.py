"""How soon both sides of the text, and one side alone, are worth it (Devlin et al. 2018, Figure 5).

    bert-jax compare tables/steps.py

Source: the paper's appendix C.1, by experiments/tiny.py. Each row is a run of its own with a whole
schedule, where the paper takes checkpoints of one; chunks are those of
experiments/tasks/conll2000.py, whose files are wanted.
Hardware: any CPU.
Expected: not run in full yet; in the paper masks are slower at first, and soon ahead.
"""

from bert_jax import config
from bert_jax.config import Row, Table
from bert_jax.tools.compare.budget import with_steps

_STEPS = (200, 400, 800, 1_600)
_LEFT_TO_RIGHT = (
    "data.objective=causal",
    "model.direction=left_to_right",
    "phases.0.max_predictions_per_seq=63",
    "data.eval_max_predictions_per_seq=63",
    "run.watch=",
)
_ROWS = {"mlm": ("data.objective=mlm",), "ltr": _LEFT_TO_RIGHT}


def table() -> Table:
    """Chunks learned from either after so many steps, over two seeds."""
    experiment = config.override(config.load("experiments/tiny.py"), ["optimizer.name=adamw"])
    learn = "epochs=1 adapt.how=full optimizer.peak_learning_rate=5e-4"
    return Table(
        name="steps",
        rows=tuple(
            Row(
                name=f"{name}-{steps}",
                experiment=with_steps(config.override(experiment, settings), steps),
            )
            for name, settings in _ROWS.items()
            for steps in _STEPS
        ),
        columns=(f"finetune:experiments/tasks/conll2000.py name=fine-tuned {learn}", "cpu_seconds"),
        seeds=(0, 1),
    )
