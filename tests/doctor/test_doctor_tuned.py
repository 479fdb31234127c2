"""Fine-tunings with one planted fault each; the doctor finds it and nothing else."""

import json
import math

import pytest
from tuned_lines import STEPS, Run

from bert_jax import doctor


@pytest.mark.parametrize("kind", ["classify", "regress", "tag", "span", "choice", "pair"])
def test_a_healthy_run_has_no_finding(kind, tmp_path):
    assert doctor.examine(Run(kind).write(tmp_path / "run")) == []


# --- faults ---


def scores_nothing():
    run = Run()
    for line in run.scored:
        line["score"] = 0.41
    return run


def correlates_with_nothing():
    run = Run("regress")
    for line in run.scored:
        line["score"] = 0.05 * math.sin(line["step"])
    return run


def loss_rises_again():
    run = Run()
    for line in run.train[20:]:
        line["loss"] = 0.69
    return run


def cannot_read():
    run = Run()
    run.task["unknown"] = {"train": 0.9, "validation": 0.001}
    return run


def unknown_here_and_there():
    run = Run()
    run.task["unknown"] = {"train": 0.001, "validation": 0.03}
    return run


def cuts_texts():
    run = Run()
    run.task["cut"] = {"train": 0.5, "validation": 0.05}
    return run


def too_sure():
    run = Run()
    run.mistakes["calibration_error"] = 0.2
    return run


def never_says_b():
    run = Run()
    run.mistakes["confusion"] = {
        "labels": ["a", "b", "c"],
        "counts": [[200, 0, 10], [30, 0, 10], [5, 0, 145]],
    }
    return run


def was_better():
    run = Run()
    run.scored[1]["score"] = 0.9
    return run


def jumps():
    run = Run()
    run.train[20]["worst_step_loss"] += 3.0
    return run


def stopped():
    run = Run()
    run.train, run.scored, run.mistakes = run.train[:20], run.scored[:2], None
    run.timings = run.timings[:21]
    return run


@pytest.mark.parametrize(
    ("plant", "severity", "words"),
    [
        (scores_nothing, "problem", "accuracy 0.4100 is no better than guessing (always 'a': 0.4"),
        (correlates_with_nothing, "problem", "is no better than guessing (which scores 0)"),
        (loss_rises_again, "problem", "the training loss has risen from 0.4"),
        (cannot_read, "problem", "90% of the pieces of task.train are [UNK]"),
        (unknown_here_and_there, "note", "3% of the pieces of task.validation are [UNK]"),
        (cuts_texts, "note", "50% of the texts of task.train fill task.max_sequence_length"),
        (too_sure, "note", "off by 20% in the mean"),
        (never_says_b, "note", "never answered: b, which are 10% of the truth"),
        (was_better, "note", "accuracy was 0.9000 at step 200, and is"),
        (jumps, "note", "jumps in the loss of single steps: 1"),
        (stopped, "note", f"the run was killed at step 200 of {STEPS}"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_the_only_finding(plant, severity, words, tmp_path):
    (found,) = doctor.examine(plant().write(tmp_path / "run"))
    assert words in found.what and found.severity == severity


def test_examples_that_stand_in_both_and_labels_that_contradict(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"sentence": f"text {i % 70}", "label": "ab"[i // 70]} for i in range(100)]
    new = [{"sentence": f"new {i}", "label": "a"} for i in range(9)]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "x").write_text(text)
    (tmp_path / "y").write_text("".join(json.dumps(row) + "\n" for row in [rows[3], *new]))
    both, torn = doctor.examine(Run().write(tmp_path / "run"))
    assert both.what.startswith("60 of 100 training examples (60%) have the text of another")
    assert torn.what == "1 of 10 validation examples (10%) stand among the training examples"
    assert both.severity == "problem" and torn.severity == "note" and torn.example == "y:1"
