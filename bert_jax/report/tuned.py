"""What the page of a fine-tuning shows of its own: scores, and what the model gets wrong."""

from typing import Any

from bert_jax.config import Finetuning, Task
from bert_jax.report import figures
from bert_jax.report.figures import Curve, Figure, Plot, curve, train_and_held_out
from bert_jax.report.records import Line, Record

# What stands in a line of scores and is none.
_NO_SCORES = ("step", "kind", "loss", "score", "examples", "no_answer_threshold")


def of_run(record: Record) -> list[Figure]:
    """Returns the curves of a fine-tuning."""
    main = _task(record).main_score
    guess = record.written("task").get("guess")
    others = [name for name in score_names(record) if name != main]
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
                train_and_held_out(record, "accuracy") if "accuracy" in [*others, main] else [],
                scale="percent",
            ),
            "",
        ),
        (
            Plot(
                "Other scores",
                [
                    curve(record.evaluation, name, name, i, "points")
                    for i, name in enumerate(others)
                    if name != "accuracy"
                ],
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


# --- what it gets wrong -------------------------------------------------------------------------


def answers(record: Record) -> dict[str, Any] | None:
    """Returns what the page shows of the answers at the run's end; None if it has not come there.

    Returns:
      `line` as tasks.mistakes makes it, and of how many `examples`; `figures` of it; `confusion`
      with shares of each row; `types` with precision, recall and F1.
    """
    line = record.written("mistakes")
    if not line:
        return None
    newest = [x for x in record.evaluation if x["step"] == line["step"]][-1:]
    return {
        "line": line,
        "examples": newest[0]["examples"] if newest else None,
        "figures": figures.drawn(_scatter(line), (), "answers"),
        "confusion": _confusion(line["confusion"]) if "confusion" in line else None,
        "types": [_type(one) for one in line.get("types", ())],
    }


def _scatter(line: Line) -> list[tuple[Plot, str]]:
    points = line.get("points", ())
    truth, values = [x for x, _ in points], [y for _, y in points]
    ends = [min(truth), max(truth)] if points else []
    plot = Plot(
        "Predicted by true value",
        [Curve(truth, values, "", 0, "dots"), Curve(ends, ends, "the truth", 1, "dashes")],
        x_label="true value",
        x_scale="linear",
    )
    return [(plot, f"{len(points):,} of the validation examples.")]


def _confusion(confusion: dict[str, Any]) -> dict[str, Any]:
    rows = [
        {
            "label": label,
            "cells": [(count, count / max(sum(counts), 1)) for count in counts],
            "recall": counts[number] / sum(counts) if sum(counts) else None,
        }
        for number, (label, counts) in enumerate(
            zip(confusion["labels"], confusion["counts"], strict=True)
        )
    ]
    columns = [sum(column) for column in zip(*confusion["counts"], strict=True)]
    precision = [
        confusion["counts"][i][i] / total if total else None for i, total in enumerate(columns)
    ]
    return {"labels": confusion["labels"], "rows": rows, "precision": precision}


def _type(one: dict[str, Any]) -> dict[str, Any]:
    both = one["there"] + one["predicted"]
    return one | {
        "precision": one["hits"] / one["predicted"] if one["predicted"] else None,
        "recall": one["hits"] / one["there"] if one["there"] else None,
        "f1": 2 * one["hits"] / both if both else None,
    }
