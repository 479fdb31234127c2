"""A decay that branches off a stable run is the run that would have decayed there anyway."""

import json

import pytest
from broken import call
from compare import assert_identical
from small_run import final_state, pretrain, write_text

# Phases of 14 and 8 steps, a checkpoint every 4, of which all are kept.
STABLE = ("optimizer.schedule=wsd", "run.keep_checkpoints=9", "run.log_every=2")
DECAY = ("optimizer.decay_steps=4", "phases.1.steps=6")  # from step 16 on, to 20


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A stable run, and one that decays from step 16 on."""
    folder = tmp_path_factory.mktemp("branch")
    file = write_text(folder)
    assert pretrain(file, folder / "stable", *STABLE)[0] == "finished"
    assert pretrain(file, folder / "decayed", *STABLE, *DECAY)[0] == "finished"
    return folder


def branch(folder, workdir, *options, step=16):
    run = f"pretrain --workdir {workdir} --decay-from {folder}/stable/checkpoints/{step}"
    return call([*run.split(), "--set", "optimizer.decay_steps=4", *options])


@pytest.mark.long
def test_a_branch_is_the_run_that_decays_there_bit_for_bit(runs, tmp_path):
    assert branch(runs, tmp_path / "w") == (0, "")
    (step, state), (there, expected) = final_state(tmp_path / "w"), final_state(runs / "decayed")
    assert step == there == 20
    assert_identical(state, expected)
    lines = (tmp_path / "w" / "metrics.jsonl").read_bytes()
    assert lines == (runs / "decayed" / "metrics.jsonl").read_bytes()
    rates = [json.loads(line).get("learning_rate") for line in lines.splitlines()]
    assert rates.count(None) < len(rates) and min(filter(None, rates)) < 0.004
    # It is a run like any other: it needs the stable one no more, and says what it came from.
    first = json.loads((tmp_path / "w" / "timings.jsonl").read_text().splitlines()[0])
    assert first["branch"] == f"{runs}/stable/checkpoints/16"
    assert (tmp_path / "w" / "checkpoints" / "16").exists()
    assert call(f"pretrain --workdir {tmp_path}/w") == (0, "")
    assert branch(runs, tmp_path / "w") == (0, "")  # the same command again


@pytest.mark.parametrize(
    ("options", "step", "words"),
    [
        ((), 15, ["checkpoints/15", "no such checkpoint", "22, 20, 16, 12, 8, 4"]),
        ((), 12, ["before the last phase", "step 14"]),
        (("--set", "optimizer.b1=0.8"), 16, ["other settings", "optimizer.b1", "only the decay"]),
        (("--set", "optimizer.decay_steps=0"), 16, ["optimizer.decay_steps=0", "schedule=wsd"]),
        (("--extend",), 16, ["--decay-from", "no --extend"]),
        (("--set", "data.final_masked_lm_prob=0.1"), 16, ["final_masked_lm_prob"]),
    ],
)
def test_what_cannot_branch_off_is_one_line_and_leaves_nothing(
    runs, tmp_path, options, step, words
):
    code, error = branch(runs, tmp_path / "w", *options, step=step)
    assert code == 2 and error.count("\n") == 1
    assert not [word for word in words if word not in error], error
    assert not (tmp_path / "w").exists()


def test_a_run_whose_rate_has_no_stable_part_is_refused_with_its_schedule(tmp_path):
    assert pretrain(write_text(tmp_path), tmp_path / "falls", "phases.0.steps=4")[0] == "finished"
    place = f"{tmp_path}/falls/checkpoints/12 --set optimizer.decay_steps=3"
    code, error = call(f"pretrain --workdir {tmp_path}/w --decay-from {place}")
    assert code == 2 and "optimizer.schedule=paper" in error and error.count("\n") == 1
    assert not (tmp_path / "w").exists()


def test_a_checkpoint_of_the_decay_is_no_stable_one(runs, tmp_path):
    place = f"{runs}/decayed/checkpoints/20 --set optimizer.decay_steps=3"
    code, error = call(f"pretrain --workdir {tmp_path}/w --decay-from {place}")
    assert code == 2 and "at its peak from step 3 to 16" in error
    code, error = call(f"pretrain --workdir {tmp_path}/w --decay-from {runs}/stable")
    assert code == 2 and "RUN/checkpoints/STEP" in error
