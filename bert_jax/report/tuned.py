"""What the page of a fine-tuning shows of its own: the curves of its scores."""

from bert_jax.config import Finetuning, Task
from bert_jax.report import figures
from bert_jax.report.figures import Figure, Plot, curve, train_and_held_out
from bert_jax.report.records import Record

# What stands in a line of scores and is none.
_NO_SCORES = ("step", "kind", "loss", "score", "examples", "no_answer_threshold")


def of_run(record: Record) -> list[Figure]:
    """Returns the curves of a fine-tuning."""
    main = _task(record).main_score
    guess = record.written("task").get("guess")
    others = [name for name in score_names(record) if name != main]
    accuracy = "accuracy" in [*others, main]
    more = [name for name in others if name != "accuracy"]
    plots = [
        (
            Plot(
                f"Validation score: {main}",
                [curve(record.evaluation, "score", "", 1, "points")],
                [(guess[1], "guessing")] if guess else [],
            ),
            "Dashed, the score of the best answer that reads no text." if guess else "",
        ),
        (
            Plot("Loss", train_and_held_out(record, "loss")),
            "A held-out loss that rises while scores do not fall is a model too sure of itself.",
        ),
        (
            Plot(
                "Accuracy",
                train_and_held_out(record, "accuracy") if accuracy else [],
                scale="percent",
            ),
            "",
        ),
        (
            Plot(
                "Other scores",
                [curve(record.evaluation, x, x, i, "points") for i, x in enumerate(more)],
            ),
            "",
        ),
        *figures.of_steps(record),
    ]
    return figures.drawn(plots, ())


def score_names(record: Record) -> list[str]:
    """Returns the names of a task's scores, the main one first."""
    newest = record.evaluation[-1] if record.evaluation else {}
    main = _task(record).main_score
    return sorted((name for name in newest if name not in _NO_SCORES), key=lambda n: n != main)


def _task(record: Record) -> Task:
    assert isinstance(record.experiment, Finetuning)
    return record.experiment.task
