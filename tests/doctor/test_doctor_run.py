"""Runs whose lines hold one planted fault each; the doctor finds it and no other problem."""

import dataclasses
import fcntl
import json
import math

import numpy as np
import pytest
from etils import epath

from bert_jax import config, doctor
from bert_jax.config import Corpus, Data, Experiment, Model, Optimizer, Phase
from bert_jax.errors import InputError
from bert_jax.storage.workdir import Workdir

MODEL = Model(vocab_size=100, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
STEPS, EVERY, UNIGRAM = 10_000, 100, 6.5


def experiment(steps=STEPS, warmup=500, eval_length=128, lengths=(128,)):
    return Experiment(
        name="planted",
        model=MODEL,
        corpus=Corpus(sources=("text:nowhere",)),
        data=Data(eval_sequence_length=eval_length),
        phases=tuple(
            Phase(steps=steps // len(lengths), sequence_length=n, max_predictions_per_seq=8)
            for n in lengths
        ),
        optimizer=Optimizer(name="adamw", warmup_steps=warmup, schedule="linear"),
    )


@dataclasses.dataclass
class Run:
    """A healthy run, to be spoiled: its experiment and the lines it has written."""

    experiment: Experiment
    train: list[dict]
    evaluations: list[dict]
    timings: list[dict]

    def cut(self, step):
        """Stops the run."""
        for name in ("train", "evaluations", "timings"):
            setattr(self, name, [line for line in getattr(self, name) if line["step"] <= step])

    def examine(self, folder):
        workdir = Workdir(folder / "run")
        workdir.root.mkdir(exist_ok=True)
        workdir.experiment.write_text(config.to_json(self.experiment))
        lines = sorted(self.train + self.evaluations, key=lambda line: line["step"])
        for path, rows in ((workdir.metrics, lines), (workdir.timings, self.timings)):
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return doctor.examine(str(workdir.root))


def end(step, outcome):
    line = {"step": step, "kind": "end", "time": 1.9e9, "seconds": 1.0, "steps": 0}
    return line | {"outcome": outcome}


def healthy(steps=STEPS, every=EVERY, **fields):
    """Masked LM falls from 9 to about 4; next sentence is learned from the middle on."""
    rng = np.random.default_rng(0)
    train, evaluations = [], []
    timings = [{"step": 0, "kind": "start", "time": 1.8e9, "seconds": 30.0, "steps": 0}]
    for step in range(every, steps + 1, every):
        loss = 4 + 5 * math.exp(-step / 2_500)
        guess = 1 / (1 + math.exp((step - 4_000) / 800))
        line = {
            "masked_lm_loss": loss + rng.normal(0, 0.02),
            "next_sentence_loss": 0.45 + 0.243 * guess,
            "next_sentence_accuracy": 0.8 - 0.3 * guess,
            "masked_lm_accuracy": 0.3,
        }
        extra = {"bad_steps": 0.0, "filled": 0.95, "gradient_norm": 0.9 + rng.normal(0, 0.2)}
        # The highest of a hundred noisy losses.
        highest = loss + 0.45 + 0.243 * guess + 0.3 + abs(rng.normal(0, 0.06))
        extra |= {"worst_step": step - 7, "worst_step_loss": highest}
        train.append({"step": step, "kind": "train", **line, **extra})
        timings.append({"step": step, "kind": "train", "steps": every, "seconds": 50.0})
        timings[-1]["time"] = 1.8e9 + step
        timings[-1] |= {"data_seconds": 0.5, "checkpoint_seconds": 0.5, "evaluation_seconds": 0.5}
        if step % (10 * every) == 0:
            line = dict(line, masked_lm_loss=loss + 0.1)
            lines = {"unigram_loss": UNIGRAM, "next_sentence_majority": 0.51, "rows": 5_000}
            evaluations.append({"step": step, "kind": "evaluation", **line, **lines})
            evaluations[-1]["next_sentence_error"] = 0.007
    timings.append(end(steps, "finished"))
    return Run(experiment(steps, **fields), train, evaluations, timings)


# --- faults ----------------------------------------------------------------------------------


def never_takes_off():
    run = healthy()
    for line in run.train + run.evaluations:
        line["masked_lm_loss"] = 6.48 + 0.01 * math.sin(line["step"])
    return run


def runs_away():
    run = healthy()
    for line in run.train:
        if line["step"] > 6_000:
            line["masked_lm_loss"] = 6.2
    for line in run.evaluations:
        if line["step"] > 6_000:
            line["masked_lm_loss"] = 6.2
    return run


def learns_by_heart():
    run = healthy()
    for line in run.train:
        line["masked_lm_loss"] -= line["step"] / 5_000
    for line in run.evaluations:
        line["masked_lm_loss"] += max(line["step"] - 5_000, 0) / 5_000
    return run


def next_sentence_never_learned():
    run = healthy()
    for line in run.train + run.evaluations:
        line |= {"next_sentence_loss": 0.693, "next_sentence_accuracy": 0.512}
    return run


def gradients_explode():
    run = healthy()
    for line in run.train:
        line["gradient_norm"] = 80.0
    return run


def steps_not_finite():
    run = healthy()
    for line in run.train[30:40]:
        line["bad_steps"] = 0.4
    return run


def nothing_finite_at_the_end():
    """Lines without any finite step have no losses."""
    run = healthy()
    run.cut(9_000)
    run.train[-1] = {"step": 9_000, "kind": "train", "bad_steps": 1.0}
    run.evaluations.pop()
    return run


def warm_up_all_along():
    return healthy(warmup=9_000)


def waits_for_data():
    run = healthy()
    for line in run.timings:
        line["data_seconds"] = 20.0 if line["kind"] == "train" else 0.0
    return run


def killed_again_and_again():
    """Three kills around step 4,000, each back to the checkpoint of step 3,000."""
    run = healthy()
    start = {"step": 3_000, "kind": "start", "time": 1.8e9, "seconds": 30.0, "steps": 0}
    run.timings[41:41] = [start, *run.timings[31:41]] * 3
    return run


def padded():
    run = healthy()
    for line in run.train:
        line["filled"] = 0.4
    return run


FAULTS = [
    (never_takes_off, "held-out masked LM is no better than counting words", "step 10000: 6.4"),
    (runs_away, "the training loss has risen by 1.", "6.200 at step 10000"),
    (learns_by_heart, "nat harder than training text, ", "step 10000: held-out"),
    (next_sentence_never_learned, "next sentence is within chance of the majority", "0.693"),
    (gradients_explode, "above optimizer.clip_norm=1 in 100% of lines", "80.00"),
    (steps_not_finite, "400 of 10,000 steps were skipped", "40 of the 100 steps up to 3100"),
    (nothing_finite_at_the_end, "100 of 9,000 steps were skipped", "100 of the 100 steps up to"),
    (warm_up_all_along, "the learning rate warms up for 9,000 of 10,000 steps", ""),
    (waits_for_data, "40% of the time went into waiting for data", "2,000 of 5,001 seconds"),
    (killed_again_and_again, "3,000 steps were done twice", "from step 4000 back to 3000"),
    (padded, "60% of examples is padding", ""),
]


def problems(found):
    return [finding for finding in found if finding.severity == "problem"]


@pytest.mark.parametrize(("plant", "what", "where"), FAULTS, ids=[f.__name__ for f, _, _ in FAULTS])
def test_a_planted_fault_is_the_one_problem_found(plant, what, where, tmp_path):
    found = problems(plant().examine(tmp_path))
    assert [what in finding.what for finding in found] == [True], found
    assert where in found[0].example
    assert found[0].effect and found[0].remedy


def test_a_healthy_run_has_no_finding(tmp_path):
    for run in (healthy(), clipped(2.5)):  # as of small batches all along
        assert run.examine(tmp_path) == []


@pytest.mark.parametrize("step", [0, 40, 100, 300, 600, 1_000])
def test_a_healthy_run_that_began_has_no_problem(step, tmp_path):
    """Whatever is not learned yet, and however short the run is meant to be."""
    run = healthy()
    run.cut(step)
    assert problems(run.examine(tmp_path)) == []


def test_a_short_run_that_learned_little_has_no_problem(tmp_path):
    run = healthy(steps=200, every=10, warmup=20)
    assert problems(run.examine(tmp_path)) == []


def stands_still():
    run = healthy()
    for line in run.train:
        line["masked_lm_loss"] = max(line["masked_lm_loss"], 5.0 + 0.01 * math.sin(line["step"]))
    run.cut(8_000)
    return run


def clipped(norm=12.0):
    run = healthy()
    for line in run.train:
        line["gradient_norm"] = norm
    return run


def chance():
    run = healthy()
    run.evaluations[-1]["next_sentence_accuracy"] = 0.52
    return run


def longer_than_trained():
    return healthy(eval_length=512)


def evaluates_often():
    run = healthy()
    for line in run.timings:
        line["evaluation_seconds"] = 20.0
    return run


def saves_often():
    run = healthy()
    for line in run.timings:
        line["checkpoint_seconds"] = 20.0
    return run


def stopped_while_warming_up():
    run = healthy()
    run.cut(400)
    return run


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (
            stands_still,
            ["was killed at step 8,000 of 10,000", "has not fallen over the last 37 lines"],
        ),
        (clipped, ["above optimizer.clip_norm=1 in 100% of lines after warm-up"]),
        (chance, ["next sentence is within chance of the majority (0.520 +- 0.007"]),
        (longer_than_trained, ["held-out examples are 512 long, and the run has seen none over"]),
        (evaluates_often, ["of the time went into evaluating"]),
        (saves_often, ["of the time went into saving"]),
        (
            stopped_while_warming_up,
            ["was killed at step 400 of 10,000", "warming up: step 400 of 500"],
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_may_be_meant_that_way_is_a_note(plant, words, tmp_path):
    found = plant().examine(tmp_path)
    assert [f.severity for f in found] == ["note"] * len(words), found
    for finding, word in zip(found, words, strict=True):
        assert word in finding.what


def test_a_run_under_way_is_not_called_stopped(tmp_path):
    run = healthy()
    run.cut(3_000)
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run.examine(tmp_path) == []
    (found,) = run.examine(tmp_path)
    assert found.what == "the run was killed at step 3,000 of 10,000"
    run.timings.append(end(3_000, "stopped"))
    (found,) = run.examine(tmp_path)
    assert found.what == "the run has stopped at step 3,000 of 10,000"


def test_a_stop_on_request_repeats_no_step(tmp_path):
    run = healthy()
    at = end(4_000, "stopped")
    run.timings[41:41] = [at, dict(at, kind="start")]
    assert run.examine(tmp_path) == []


def test_a_loss_that_jumps_is_a_note_with_its_step(tmp_path):
    run = healthy()
    run.train[60]["worst_step_loss"] += 2.0
    (found,) = run.examine(tmp_path)
    assert found.what == "jumps in the loss of single steps: 1" and found.severity == "note"
    assert "at step 6093" in found.example and "--step 6093" in found.remedy


@pytest.mark.parametrize("times", [1, 2], ids=["once", "again, since a kill undid it"])
def test_a_roll_back_is_a_note_with_its_steps(times, tmp_path):
    run = healthy()
    back = {"step": 4_000, "kind": "roll_back", "time": 0.0, "seconds": 9.0, "steps": 0}
    back |= {"bad": [4_450, 4_459], "skipped": list(range(4_449, 4_460))}
    run.timings[46:46] = [back] * times
    (found,) = run.examine(tmp_path)
    assert found.severity == "note" and "gradient: 1;" in found.what
    assert "steps left out: 11" in found.what and "steps 4450 to 4459" in found.example
    assert "--step 4449" in found.remedy


def test_a_phase_of_longer_examples_is_not_taken_for_a_rise(tmp_path):
    run = healthy(lengths=(64, 128))
    for line in run.train:
        line["masked_lm_loss"] += line["step"] > STEPS / 2
    for line in run.evaluations:
        line["masked_lm_loss"] += 0.5
    assert problems(run.examine(tmp_path)) == []


def test_the_corpus_of_a_run_is_examined_at_the_lengths_of_its_phases(tmp_path, monkeypatch):
    from bert_jax.doctor import corpus, run

    seen = []
    monkeypatch.setattr(run.mirror, "exists", lambda path: True)
    monkeypatch.setattr(corpus, "examine", lambda folder, lengths: seen.append(lengths) or [])
    healthy(lengths=(128, 64)).examine(tmp_path)
    assert seen == [(64, 128)]


def test_a_damaged_line_is_named(tmp_path):
    run = healthy()
    run.examine(tmp_path)
    path = epath.Path(tmp_path / "run" / "metrics.jsonl")
    path.write_text("{\n" + path.read_text())
    with pytest.raises(InputError, match=r"metrics\.jsonl:1: "):
        doctor.examine(str(tmp_path / "run"))
