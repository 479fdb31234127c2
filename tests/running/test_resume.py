"""A run that is killed and started again gives exactly the results of an uninterrupted run."""

import contextlib
import json
import os
import pathlib
import shutil
import signal

import numpy as np
import pytest
from broken import said
from small_run import assert_same_run, command, final_state, hooked, killed, pretrain, run_bert_jax

from bert_jax.errors import InputError
from bert_jax.tools.verify.faults import Fault, Plan


def test_an_interrupted_run_resumes_bit_exactly(finished_run, copy_of_run):
    """A crash between two saves in each phase, as if killed; then SIGTERM, upon which it saves."""
    file, workdir = pathlib.Path("small.py"), copy_of_run / "broken"
    crash_steps = {10, 17}

    def crash(done, batch):
        if done in crash_steps:
            crash_steps.remove(done)
            raise RuntimeError("crash")
        if done == 19:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    with hooked(change_batch=crash):
        for _ in range(2):
            with pytest.raises(RuntimeError, match="crash"):
                pretrain(file, workdir)
        outcome, shown = pretrain(file, workdir)
        assert outcome == "stopped" and "resume: from step" in shown
        assert "stopped at step 20, saved; run the same command again" in shown
    assert pretrain(file, workdir)[0] == "finished"
    assert_same_run(workdir, finished_run / "run")


@pytest.mark.long
def test_resume_is_bit_exact(copy_of_run):
    """Killed and stopped after an epoch's end and around the phase switch, with dropout on."""
    rows = list(json.loads(pathlib.Path("corpus/plans.json").read_text())["rows"].values())
    epoch_end, phase_switch = rows[0] // 8, 14  # as steps
    assert 2 < epoch_end < 12, "the first phase must cross an epoch's end"
    run = ("pretrain", "small.py", "--workdir", "killed")
    for step, by, code in (
        (epoch_end + 1, signal.SIGKILL, -signal.SIGKILL),
        (phase_switch - 1, signal.SIGTERM, 75),
        (phase_switch, signal.SIGKILL, -signal.SIGKILL),
        (phase_switch + 2, signal.SIGINT, 75),
    ):
        result = killed(step, by, *run, devices=4)
        assert result.returncode == code, result.stderr.decode()
        saved = pathlib.Path("killed", "checkpoints", str(step + 1)).exists()
        assert saved == (code == 75)
    result = run_bert_jax(*run, devices=4)
    assert result.returncode == 0, result.stderr.decode()
    assert "resume: from step" in result.stdout.decode()
    assert_same_run(copy_of_run / "killed", copy_of_run / "run")


@pytest.mark.long
def test_a_finished_run_says_so_and_can_be_extended(copy_of_run):
    """Extending announces the changed schedule, and keeps the metrics that were written."""
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
def test_a_second_interrupt_ends_the_run_immediately(copy_of_run, tmp_path):
    driver = tmp_path / "twice.py"
    driver.write_text(
        "import os, sys; from bert_jax.tools.verify import child; kill = os.kill\n"
        "os.kill = lambda *args: (kill(*args), kill(*args))  # each signal twice\n"
        "sys.exit(child.main(sys.argv[1:]))\n"
    )
    plan = Plan(Fault("step", signal.SIGINT, 5)).to_json()
    result = command(driver, plan, "pretrain", "small.py", "--workdir", tmp_path / "new")
    assert result.returncode == 130


@pytest.fixture(scope="module")
def resharded(finished_run, tmp_path_factory):
    """A run of the same experiment: state replicated, then ZeRO-1 on 2 devices, ZeRO-3 on 2 x 2."""
    workdir = tmp_path_factory.mktemp("resharded") / "resharded"
    with contextlib.chdir(finished_run):
        train_resharded(workdir)
    return workdir


def train_resharded(workdir):
    run = ("pretrain", "small.py", "--workdir", workdir)
    result = killed(4, signal.SIGTERM, *run, devices=2)
    assert result.returncode == 75, result.stderr.decode()
    sharding = ("--set", "parallelism.state=zero1", "--set", "parallelism.accumulation=1,2")
    result = killed(10, signal.SIGTERM, *run, *sharding, devices=2)
    assert result.returncode == 75, result.stderr.decode()
    sharding = ("--set", "parallelism.state=zero3", "--set", "parallelism.tensor=2")
    result = run_bert_jax(*run, *sharding, devices=4)
    assert result.returncode == 0, result.stderr.decode()
    assert "resume: parallelism.state: 'zero1' -> 'zero3'" in result.stdout.decode()


@pytest.mark.nightly
def test_a_run_goes_on_under_other_shardings(finished_run, resharded):
    """Batches and dropout are the same, so the metrics agree up to rounding."""
    a, b = (
        [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
        for workdir in (resharded, finished_run / "run")
    )
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert x.keys() == y.keys() and x.pop("kind") == y.pop("kind")
        np.testing.assert_allclose(list(x.values()), [y[name] for name in x], 1e-4, 1e-4)


@pytest.mark.nightly
def test_one_device_reads_a_checkpoint_of_many_devices(resharded, copy_of_run):
    """Although the saved experiment asks for a mesh of four devices."""
    scored = run_bert_jax("evaluate", "--workdir", resharded)
    assert scored.returncode == 0, scored.stderr.decode()
    line = [json.loads(line) for line in (resharded / "metrics.jsonl").read_text().splitlines()][-1]
    assert line.pop("kind") == "evaluation"
    assert json.loads(scored.stdout.decode().splitlines()[-1]) == pytest.approx(line, rel=1e-4)
    for args in (
        ("predict", "--workdir", resharded, "wa [MASK] wb ."),
        ("import", resharded, "--workdir", "base"),
    ):
        result = run_bert_jax(*args)
        assert result.returncode == 0, result.stderr.decode()


def test_a_corpus_made_again_from_the_same_text_is_accepted(copy_of_run):
    """Although its manifest records another modification time of the text."""
    manifest = json.loads(pathlib.Path("corpus/manifest.json").read_text())
    shutil.rmtree("corpus")
    os.utime("text/all.txt", ns=(0, 0))
    said("prepare small.py")
    said("evaluate --workdir run")
    made_again = json.loads(pathlib.Path("corpus/manifest.json").read_text())
    assert made_again["checksum"] != manifest["checksum"]
