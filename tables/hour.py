"""An hour of two cores on a book shelf of text: the paper's recipe, and a better one for its size.

    bert-jax compare tables/hour.py

Source: experiments/mini_paper.py and experiments/mini.py, on novels; the tasks' files are wanted.
Hardware: two CPU cores, two hours and a half, of which 7,200 seconds of CPU are each run's steps.
Expected: not run in full yet.
"""

from bert_jax import config
from bert_jax.config import Row, Table

_TASKS = "experiments/tasks"


def table() -> Table:
    """What is learned, read off the encoder, and learned from it."""
    often = ["run.eval_every=200"]
    better = config.override(config.load("experiments/mini.py"), often)
    scored = ("eval_rows", "eval_sequence_length", "eval_max_predictions_per_seq")
    paper = config.override(
        config.load("experiments/mini_paper.py"),
        [*often, *(f"data.{name}={getattr(better.data, name)}" for name in scored)],
    )
    learn = "batch_size=16 epochs=1 optimizer.peak_learning_rate=3e-4"
    return Table(
        name="hour",
        rows=(Row(name="paper", experiment=paper), Row(name="better", experiment=better)),
        columns=(
            *("loss", "below_unigrams", "accuracy", "next_sentence"),
            *(f"probe:{_TASKS}/{task}.py" for task in ("blimp", "conll2000", "sst2")),
            f"finetune:{_TASKS}/conll2000.py adapt.how=full {learn}",
            f"finetune:{_TASKS}/sst2.py {learn}",
            f"finetune:{_TASKS}/stsb.py {learn}",
            *("steps", "cpu_seconds", "real_tokens"),
        ),
        cpu_seconds=7_200.0,
    )
