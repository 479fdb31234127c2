"""A run that is killed and started again is the run that was never killed."""

import json
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest
from broken import call
from compare import assert_identical
from etils import epath
from small_run import bert_jax, command, final_state, killed, pretrain, write_text

from bert_jax.storage.workdir import lock
from bert_jax.training import step as step_lib
from bert_jax.verify.faults import Fault, Plan


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("resume")
    file = write_text(folder)
    done = bert_jax("pretrain", file, "--workdir", folder / "undisturbed")
    assert done.returncode == 0, done.stderr.decode()
    return folder, file, done.stdout.decode()


def assert_same_run(a: pathlib.Path, b: pathlib.Path) -> None:
    assert (a / "metrics.jsonl").read_bytes() == (b / "metrics.jsonl").read_bytes()
    (a_step, a_state), (b_step, b_state) = final_state(a), final_state(b)
    assert a_step == b_step
    assert_identical(a_state, b_state)


def test_a_run_that_breaks_off_goes_on_bit_exact(tmp_path, monkeypatch):
    """As a kill does, between two saves, in each phase; then a stop, which saves."""
    file = write_text(tmp_path)
    make, breaks = step_lib.make_train_step, {10, 17}

    def breaking(*args):
        train_step = make(*args)

        def one(state, *rest):
            at = int(state["step"])
            if at in breaks:
                breaks.remove(at)
                raise RuntimeError("broken off")
            if at == 19 and not breaks:
                breaks.add(-1)
                os.kill(os.getpid(), signal.SIGTERM)
            return train_step(state, *rest)

        return one

    with monkeypatch.context() as patch:
        patch.setattr(step_lib, "make_train_step", breaking)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken off"):
                pretrain(file, tmp_path / "broken")
        outcome, shown = pretrain(file, tmp_path / "broken")
        assert outcome == "stopped" and "resume: from step" in shown
    assert pretrain(file, tmp_path / "broken")[0] == "finished"
    assert pretrain(file, tmp_path / "whole")[0] == "finished"
    assert_same_run(tmp_path / "broken", tmp_path / "whole")


@pytest.mark.long
def test_resume_is_bit_exact(undisturbed, tmp_path):
    """Killed after an epoch's end, and about the switch of phases, with dropout on."""
    folder, file, _ = undisturbed
    rows = list(json.loads((folder / "corpus" / "plans.json").read_text())["rows"].values())
    epoch, phase = rows[0] // 8, 14
    assert 2 < epoch < 12, "the first phase must cross an epoch's end"
    run = ("pretrain", file, "--workdir", tmp_path / "killed")
    for step in (epoch + 1, phase - 1, phase, phase + 1):
        dead = killed(step, signal.SIGKILL, *run)
        assert dead.returncode == -signal.SIGKILL, dead.stderr.decode()
    done = bert_jax(*run)
    assert done.returncode == 0, done.stderr.decode()
    assert "resume: from step" in done.stdout.decode()
    assert_same_run(tmp_path / "killed", folder / "undisturbed")


@pytest.mark.long
def test_a_run_that_is_stopped_saves_and_goes_on(undisturbed, tmp_path):
    """Stopped at a step that is no multiple of the log or checkpoint interval."""
    folder, file, _ = undisturbed
    run = ("pretrain", file, "--workdir", tmp_path / "stopped")
    for step, by in ((10, signal.SIGTERM), (16, signal.SIGINT)):
        stopped = killed(step, by, *run)
        assert stopped.returncode == 75, stopped.stderr.decode()
        last = stopped.stdout.decode().splitlines()[-1]
        assert last == f"stopped at step {step + 1}, saved; run the same command again"
        assert (tmp_path / "stopped" / "checkpoints" / str(step + 1)).exists()
    done = bert_jax(*run)
    assert done.returncode == 0, done.stderr.decode()
    assert_same_run(tmp_path / "stopped", folder / "undisturbed")


@pytest.mark.long
def test_a_finished_run_says_so(undisturbed):
    folder, file, output = undisturbed
    outcome, again = pretrain(file, folder / "undisturbed")
    assert outcome == "finished"
    for text in (output, again):
        assert "finished: step 22; held-out masked LM" in text
        assert "to start again choose another --workdir" in text


@pytest.mark.long
def test_extend_goes_on_and_says_that_the_schedule_changes(undisturbed, tmp_path):
    folder, file, _ = undisturbed
    shutil.copytree(folder / "undisturbed", tmp_path / "extended")
    more = ["pretrain", str(file), "--workdir", str(tmp_path / "extended")]
    more += ["--set", "phases.1.steps=10"]
    code, err = call(more)
    assert code == 2 and "phases.1.steps: 8 -> 10" in err
    outcome, shown = pretrain(file, tmp_path / "extended", "phases.1.steps=10", length="extend")
    assert outcome == "finished" and "schedule" in shown
    assert final_state(tmp_path / "extended")[0] == 24


@pytest.mark.long
def test_a_second_interrupt_leaves_at_once(undisturbed, tmp_path):
    _, file, _ = undisturbed
    driver = tmp_path / "twice.py"
    driver.write_text(
        "import os, sys; from bert_jax.cli import child; kill = os.kill\n"
        "os.kill = lambda *whom: (kill(*whom), kill(*whom))\n"
        "sys.exit(child.main(sys.argv[1:]))\n"
    )
    plan = Plan(Fault("step", signal.SIGINT, 5)).to_json()
    left = command(driver, plan, "pretrain", file, "--workdir", tmp_path / "run")
    assert left.returncode == 130


@pytest.mark.long
def test_two_runs_in_one_workdir_are_refused(undisturbed):
    folder, file, _ = undisturbed
    workdir = folder / "undisturbed"
    with lock(epath.Path(workdir)):
        code, err = call(["pretrain", str(file), "--workdir", str(workdir)])
    assert code == 2 and "in use by process" in err


@pytest.fixture(scope="module")
def relaid(undisturbed):
    """The same run, its state whole, then cut over a mesh of 2 x 2, then over 2 devices."""
    folder, file, _ = undisturbed
    workdir = folder / "relaid"
    run = ("pretrain", file, "--workdir", workdir)
    done = killed(4, signal.SIGTERM, *run, devices=2)
    assert done.returncode == 75, done.stderr.decode()
    cut = ("--set", "parallelism.state=zero1", "--set", "parallelism.accumulation=1,2")
    done = killed(10, signal.SIGTERM, *run, *cut, devices=2)
    assert done.returncode == 75, done.stderr.decode()
    cut = ("--set", "parallelism.state=zero3", "--set", "parallelism.tensor=2")
    done = bert_jax(*run, *cut, devices=4)
    assert done.returncode == 0, done.stderr.decode()
    assert "resume: parallelism.state: 'zero1' -> 'zero3'" in done.stdout.decode()
    return workdir


@pytest.mark.long
def test_a_run_goes_on_under_other_shardings(undisturbed, relaid):
    """Batches and dropout are the same, so the lines are, to rounding."""
    assert_same_lines(relaid, undisturbed[0] / "undisturbed")


def assert_same_lines(ours: pathlib.Path, theirs: pathlib.Path) -> None:
    a, b = (
        [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        for workdir in (ours, theirs)
    )
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys() and x.pop("kind") == y.pop("kind")
        np.testing.assert_allclose(list(x.values()), [y[name] for name in x], 1e-4, 1e-4)


@pytest.mark.nightly
def test_sixteen_devices_then_eight_see_the_same_batches(undisturbed, tmp_path):
    """The lines say so: they are those of one device, to rounding."""
    _, file, _ = undisturbed
    larger = ("phases.0.batch_size=16", "phases.1.batch_size=16", "phases.1.steps=2")
    assert pretrain(file, tmp_path / "one", *larger)[0] == "finished"
    run = ["pretrain", file, "--workdir", tmp_path / "many"]
    run += [word for setting in larger for word in ("--set", setting)]
    assert killed(6, signal.SIGTERM, *run, devices=16).returncode == 75
    cut = ("--set", "parallelism.state=zero3", "--set", "parallelism.tensor=2")
    assert bert_jax(*run, *cut, devices=8).returncode == 0
    assert_same_lines(tmp_path / "many", tmp_path / "one")


@pytest.mark.nightly
def test_what_many_devices_trained_one_device_reads(relaid, tmp_path):
    """The run's own mesh asks for four."""
    scored = bert_jax("evaluate", "--workdir", relaid)
    assert scored.returncode == 0, scored.stderr.decode()
    line = [json.loads(line) for line in (relaid / "metrics.jsonl").read_text().splitlines()][-1]
    assert line.pop("kind") == "evaluation"
    assert json.loads(scored.stdout.decode().splitlines()[-1]) == pytest.approx(line, rel=1e-4)
    for words in (
        ("predict", "--workdir", relaid, "wa [MASK] wb ."),
        ("import", relaid, "--workdir", tmp_path / "base"),
    ):
        done = bert_jax(*words)
        assert done.returncode == 0, done.stderr.decode()


@pytest.mark.nightly
def test_a_run_of_mixed_sources_resumes_bit_exact(tmp_path):
    file, _ = write_text(tmp_path / "one"), write_text(tmp_path / "other", 12)
    sources = ",".join(f"text:{tmp_path / name / 'text'}" for name in ("one", "other"))
    run = ("pretrain", file, "--set", f"corpus.sources={sources}", "--set", "corpus.mixture=1,3")
    done = bert_jax(*run, "--workdir", tmp_path / "undisturbed")
    assert done.returncode == 0, done.stderr.decode()
    dead = killed(9, signal.SIGKILL, *run, "--workdir", tmp_path / "killed")
    assert dead.returncode == -signal.SIGKILL, dead.stderr.decode()
    done = bert_jax(*run, "--workdir", tmp_path / "killed")
    assert done.returncode == 0, done.stderr.decode()
    assert "resume: from step" in done.stdout.decode()
    assert_same_run(tmp_path / "killed", tmp_path / "undisturbed")
    done = bert_jax("report", tmp_path / "killed")
    assert done.returncode == 0, done.stderr.decode()
    text = (tmp_path / "killed" / "report.html").read_text()
    for part in ("source of the mixture", f"text:{tmp_path / 'other' / 'text'}", "75.0 %"):
        assert part in text, part
