"""An hour of two cores on a book shelf of text: the paper's recipe, and a better one for its size.

    bert-jax compare tables/hour.py

Source: experiments/mini_paper.py and experiments/mini.py, on novels; the tasks' files are wanted.
Hardware: two CPU cores, two hours and a half; 6,500 seconds of CPU a run are an hour of both, as
far as XLA keeps them busy.
Expected: mini.py 0.36 nat ahead, and in chunks; in sentiment and similarity neither (see
docs/results/learning.md).
"""

from bert_jax import config
from bert_jax.config import Row, Table

_TASKS = "experiments/tasks"


def table() -> Table:
    """What is learned, read off the encoder, and learned from it."""
    # Often enough to see when it passes the paper's last loss.
    often = ["optimizer.name=adamw", "run.eval_every=250"]
    better = config.override(config.load("experiments/mini.py"), often)
    scored = ("eval_rows", "eval_sequence_length", "eval_max_predictions_per_seq")
    paper = config.override(
        config.load("experiments/mini_paper.py"),
        [f"data.{name}={getattr(better.data, name)}" for name in scored],
    )
    learn = "batch_size=16 optimizer.peak_learning_rate=3e-4"
    return Table(
        name="hour",
        rows=(Row(name="paper", experiment=paper), Row(name="better", experiment=better)),
        columns=(
            *("loss", "below_unigrams", "accuracy", "next_sentence"),
            *(f"probe:{_TASKS}/{task}.py" for task in ("blimp", "conll2000", "sst2")),
            f"finetune:{_TASKS}/conll2000.py adapt.how=full {learn} epochs=1",
            f"finetune:{_TASKS}/sst2.py {learn} epochs=0.5",
            f"finetune:{_TASKS}/stsb.py {learn} epochs=1",
            *("steps", "cpu_seconds", "real_tokens"),
        ),
        cpu_seconds=6_500.0,
    )
