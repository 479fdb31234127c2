"""What a frozen encoder's layers hold, next to fine-tuning all of it (Devlin et al. 2018, Table 7).

    bert-jax compare tables/features.py

Source: the paper's section 5.3, with chunks of CoNLL-2000 for its entities
(experiments/tasks/conll2000.py, whose files are wanted), and an encoder of four layers, as the last
four are read (experiments/tiny.py). Columns take the place of the paper's rows.
Hardware: any CPU.
Expected: not run in full yet; in the paper the last four layers side by side come closest.
"""

import typing

from bert_jax import config
from bert_jax.config import Features, Row, Table

_TASK = "finetune:experiments/tasks/conll2000.py epochs=1"


def table() -> Table:
    """One encoder, and each way to read it, over two seeds."""
    experiment = config.override(
        config.load("experiments/tiny.py"),
        ["optimizer.name=adamw", "model.num_hidden_layers=4", "phases.0.steps=1000"],
    )
    frozen = "adapt.how=frozen optimizer.peak_learning_rate=1e-3"
    return Table(
        name="features",
        rows=(Row(name="bert", experiment=experiment),),
        columns=(
            f"{_TASK} name=fine-tuned adapt.how=full optimizer.peak_learning_rate=5e-4",
            *(
                f"{_TASK} name={features} adapt.features={features} {frozen}"
                for features in typing.get_args(Features)
                if features
            ),
        ),
        seeds=(0, 1),
    )
