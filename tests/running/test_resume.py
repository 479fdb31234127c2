"""A run that is killed and started again is the run that was never killed."""

import contextlib
import json
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest
from broken import said
from small_run import assert_same_run, bert_jax, command, final_state, hooked, killed, pretrain

from bert_jax.errors import InputError
from bert_jax.tools.verify.faults import Fault, Plan


def test_a_run_that_breaks_off_goes_on_bit_exact(finished_run, copy_of_run):
    """As a kill does, between two saves, in each phase; then a stop, which saves."""
    file, workdir = pathlib.Path("small.py"), copy_of_run / "broken"
    breaks = {10, 17}

    def break_off(done, batch):
        if done in breaks:
            breaks.remove(done)
            raise RuntimeError("broken off")
        if done == 19:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with hooked(change_batch=break_off):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="broken off"):
                pretrain(file, workdir)
        outcome, shown = pretrain(file, workdir)
        assert outcome == "stopped" and "resume: from step" in shown
        assert "stopped at step 20, saved; run the same command again" in shown
    assert pretrain(file, workdir)[0] == "finished"
    assert_same_run(workdir, finished_run / "run")


@pytest.mark.long
def test_resume_is_bit_exact(copy_of_run):
    """Killed and stopped after an epoch's end, and about the switch of phases, with dropout on."""
    rows = list(json.loads(pathlib.Path("corpus/plans.json").read_text())["rows"].values())
    epoch, phase = rows[0] // 8, 14
    assert 2 < epoch < 12, "the first phase must cross an epoch's end"
    run = ("pretrain", "small.py", "--workdir", "killed")
    for step, by, code in (
        (epoch + 1, signal.SIGKILL, -signal.SIGKILL),
        (phase - 1, signal.SIGTERM, 75),
        (phase, signal.SIGKILL, -signal.SIGKILL),
        (phase + 2, signal.SIGINT, 75),
    ):
        dead = killed(step, by, *run, devices=4)
        assert dead.returncode == code, dead.stderr.decode()
        saved = pathlib.Path("killed", "checkpoints", str(step + 1)).exists()
        assert saved == (code == 75)
    done = bert_jax(*run, devices=4)
    assert done.returncode == 0, done.stderr.decode()
    assert "resume: from step" in done.stdout.decode()
    assert_same_run(copy_of_run / "killed", copy_of_run / "run")


@pytest.mark.long
def test_a_finished_run_says_so_and_extend_goes_on(copy_of_run):
    """And says that the schedule changes; the lines up to there stay."""
    file, workdir = pathlib.Path("small.py"), copy_of_run / "run"
    outcome, again = pretrain(file, workdir)
    assert outcome == "finished" and "finished: step 22; held-out masked LM" in again
    before = (workdir / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"phases\.1\.steps: 8 -> 10.*extend"):
        pretrain(file, workdir, "phases.1.steps=10")
    outcome, shown = pretrain(file, workdir, "phases.1.steps=10", may_extend=True)
    assert outcome == "finished" and "schedule" in shown
    assert final_state(workdir)[0] == 24
    assert (workdir / "metrics.jsonl").read_bytes().startswith(before)


@pytest.mark.long
def test_a_second_interrupt_leaves_at_once(copy_of_run, tmp_path):
    driver = tmp_path / "twice.py"
    driver.write_text(
        "import os, sys; from bert_jax.tools.verify import child; kill = os.kill\n"
        "os.kill = lambda *whom: (kill(*whom), kill(*whom))\n"
        "sys.exit(child.main(sys.argv[1:]))\n"
    )
    plan = Plan(Fault("step", signal.SIGINT, 5)).to_json()
    left = command(driver, plan, "pretrain", "small.py", "--workdir", tmp_path / "new")
    assert left.returncode == 130


@pytest.fixture(scope="module")
def relaid(finished_run, tmp_path_factory):
    """The finished run, its state whole, then cut over 2 devices, then over a mesh of 2 x 2."""
    workdir = tmp_path_factory.mktemp("relaid") / "relaid"
    with contextlib.chdir(finished_run):
        lay_again(workdir)
    return workdir


def lay_again(workdir):
    run = ("pretrain", "small.py", "--workdir", workdir)
    done = killed(4, signal.SIGTERM, *run, devices=2)
    assert done.returncode == 75, done.stderr.decode()
    cut = ("--set", "parallelism.state=zero1", "--set", "parallelism.accumulation=1,2")
    done = killed(10, signal.SIGTERM, *run, *cut, devices=2)
    assert done.returncode == 75, done.stderr.decode()
    cut = ("--set", "parallelism.state=zero3", "--set", "parallelism.tensor=2")
    done = bert_jax(*run, *cut, devices=4)
    assert done.returncode == 0, done.stderr.decode()
    assert "resume: parallelism.state: 'zero1' -> 'zero3'" in done.stdout.decode()


@pytest.mark.long
def test_a_run_goes_on_under_other_shardings(finished_run, relaid):
    """Batches and dropout are the same, so the lines are, to rounding."""
    a, b = (
        [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        for workdir in (relaid, finished_run / "run")
    )
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys() and x.pop("kind") == y.pop("kind")
        np.testing.assert_allclose(list(x.values()), [y[name] for name in x], 1e-4, 1e-4)


@pytest.mark.nightly
def test_what_many_devices_trained_one_device_reads(relaid, copy_of_run):
    """The run's own mesh asks for four."""
    scored = bert_jax("evaluate", "--workdir", relaid)
    assert scored.returncode == 0, scored.stderr.decode()
    line = [json.loads(line) for line in (relaid / "metrics.jsonl").read_text().splitlines()][-1]
    assert line.pop("kind") == "evaluation"
    assert json.loads(scored.stdout.decode().splitlines()[-1]) == pytest.approx(line, rel=1e-4)
    for words in (
        ("predict", "--workdir", relaid, "wa [MASK] wb ."),
        ("import", relaid, "--workdir", "base"),
    ):
        done = bert_jax(*words)
        assert done.returncode == 0, done.stderr.decode()


def test_a_corpus_made_again_of_the_same_text_is_the_same(copy_of_run):
    """Though its manifest has another date of the text."""
    manifest = json.loads(pathlib.Path("corpus/manifest.json").read_text())
    shutil.rmtree("corpus")
    os.utime("text/all.txt", ns=(0, 0))
    said("prepare small.py")
    said("evaluate --workdir run")
    made_again = json.loads(pathlib.Path("corpus/manifest.json").read_text())
    assert made_again["checksum"] != manifest["checksum"]
