"""What becomes of the pieces that are predicted (Devlin et al. 2018, Table 8).

    bert-jax compare tables/masking.py

Source: the paper's appendix C.2, by experiments/tiny.py. Held-out rows are masked alike whatever a
row trains with; chunks are those of experiments/tasks/conll2000.py, whose files are wanted.
Hardware: any CPU.
Expected: not run in full yet; in the paper fine-tuning hardly minds, features do.
"""

from bert_jax import config
from bert_jax.config import Row, Table

# Of predicted pieces, the share that becomes [MASK], and that becomes any piece.
_SHARES = ((0.8, 0.1), (1.0, 0.0), (0.8, 0.0), (0.8, 0.2), (0.0, 0.2), (0.0, 1.0))
_TASK = "finetune:experiments/tasks/conll2000.py epochs=1"


def table() -> Table:
    """Held-out scores, and chunks from all of the encoder and from features, over two seeds."""
    experiment = config.override(config.load("experiments/tiny.py"), ["optimizer.name=adamw"])
    rows = []
    for mask, random in _SHARES:
        settings = [f"data.mask_share={mask}", f"data.random_share={random}"]
        name = f"mask{mask:.0%}-random{random:.0%}".replace("%", "")
        rows.append(Row(name=name, experiment=config.override(experiment, settings)))
    return Table(
        name="masking",
        rows=tuple(rows),
        columns=(
            *("loss", "accuracy"),
            f"{_TASK} name=fine-tuned adapt.how=full optimizer.peak_learning_rate=5e-4",
            f"{_TASK} name=features adapt.how=frozen adapt.features=last",
        ),
        seeds=(0, 1),
        cpu_seconds=150.0,
    )
