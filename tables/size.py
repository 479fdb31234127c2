"""What layers, width and heads bring (Devlin et al. 2018, Table 6).

    bert-jax compare tables/size.py

Source: the paper's section 5.2 made small, by experiments/tiny.py; as there all rows do the same
steps, and larger ones take longer. Chunks are those of experiments/tasks/conll2000.py, whose files
are wanted.
Hardware: any CPU.
Expected: not run in full yet; in the paper larger is better, throughout.
"""

from bert_jax import config
from bert_jax.config import Row, Table

# Layers, width, heads, and the width of the gated feed-forward part.
_SIZES = ((1, 128, 2, 344), (2, 64, 1, 172), (2, 128, 2, 344), (2, 128, 4, 344), (4, 128, 2, 344))
_SIZES += ((4, 256, 4, 688),)


def table() -> Table:
    """Held-out scores and chunks at equal steps."""
    experiment = config.override(config.load("experiments/tiny.py"), ["optimizer.name=adamw"])
    names = "num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size"
    rows = []
    for sizes in _SIZES:
        settings = [f"model.{name}={size}" for name, size in zip(names, sizes, strict=True)]
        name = "l{}-h{}-a{}".format(*sizes[:3])
        rows.append(Row(name=name, experiment=config.override(experiment, settings)))
    learn = "epochs=1 adapt.how=full optimizer.peak_learning_rate=5e-4"
    return Table(
        name="size",
        rows=tuple(rows),
        columns=(
            *("loss", "below_unigrams", "accuracy", "next_sentence"),
            f"finetune:experiments/tasks/conll2000.py name=fine-tuned {learn}",
            *("steps", "cpu_seconds"),
        ),
        seeds=(0, 1),
        steps=800,
    )
