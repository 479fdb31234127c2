"""Steps without a finite loss or gradient, and losses that jump."""

import contextlib
import gc
import os
import signal
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from broken import said
from compare import assert_identical
from small_run import (
    assert_same_run,
    final_state,
    hooked,
    pretrain,
    signal_before,
    write_text,
)

from bert_jax.data import batches
from bert_jax.pretraining.evaluators import HeldOutRows
from bert_jax.running import lines as lines_lib
from bert_jax.running import session, start
from bert_jax.running.context import Result
from bert_jax.running.job import Evaluator
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir
from bert_jax.training import step


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    file = write_text(tmp_path_factory.mktemp("diverging"))
    source = file.read_text().replace('name="adamw"', 'name="adamw", bad_steps_in_a_row=3')
    file.write_text(source)
    said(f"prepare {file}")  # here, so that no run of these tests does it
    return file


def poison(monkeypatch, poisoned: set[int], name="masked_lm_weights", value=np.nan, width=16):
    """Fills a part of the batches of these steps of the first phase; with NaN: no finite loss.

    `width` 24: of the second phase.
    """
    good = batches.TrainBatches.batch

    def batch(self, number, rows):
        found = good(self, number, rows)
        if number in poisoned and found["input_ids"].shape[1] == width:
            found[name][:] = value
        return found

    monkeypatch.setattr(batches.TrainBatches, "batch", batch)


def lines_of(workdir, name="metrics") -> list[dict]:
    return JsonLines(getattr(Workdir(workdir), name)).read()


def words() -> int:
    """Parameters and moments on the devices: three of a state."""
    return sum(array.shape == (1024, 16) for array in jax.live_arrays())


@pytest.fixture(scope="module")
def gone_back(file):
    """A run that went back over the steps 5 to 7: its workdir, and what it showed."""
    held = []

    def counting(find):
        def found(*args):
            held.append(words())
            result = find(*args)
            held.append(words())
            return result

        return found

    with pytest.MonkeyPatch.context() as patch:
        poison(patch, {5, 6, 7})
        patch.setattr(start, "_restore_or_initialize", counting(start._restore_or_initialize))
        gc.collect()
        outcome, shown = pretrain(file, file.with_name("back"))
    assert outcome == "finished", shown
    return file.with_name("back"), shown, held


@pytest.mark.long
def test_a_run_goes_back_over_bad_steps_and_leaves_them_out(file, gone_back, tmp_path, monkeypatch):
    """What it comes to is the run of a step that leaves these out from the start."""
    workdir, shown, held = gone_back
    assert "steps 5 to 7 have no finite loss or gradient; rolling back" in shown
    assert "--step 4` shows its text" in shown
    assert held[0] < held[1] and held[2:] == held[:2], (
        "two states may be more than there is room for"
    )
    _, state = final_state(workdir)
    assert state["skipped_steps"][:5].tolist() == [4, 5, 6, 7, -1]
    assert state["bad_in_a_row"] == 0 and state["step"] == 22
    roll_back = [line for line in lines_of(workdir, "timings") if line["kind"] == "roll_back"]
    assert [line["bad"] for line in roll_back] == [[5, 7]]
    make = step.make_init

    def without(*args):
        def begin(seed):
            state = make(*args)(seed)
            state["skipped_steps"] = state["skipped_steps"].at[:4].set(np.arange(4, 8))
            return state

        return begin

    poison(monkeypatch, {5, 6, 7})
    monkeypatch.setattr(step, "make_init", without)
    pretrain(file, tmp_path / "reference")
    assert_same_run(workdir, tmp_path / "reference")


@pytest.mark.nightly
@pytest.mark.parametrize("settings", ["run.checkpoint_every=1", "run.log_every=1"])
def test_it_is_the_same_run_whenever_it_logs_and_saves(
    file, gone_back, tmp_path, monkeypatch, settings
):
    poison(monkeypatch, {5, 6, 7})
    assert pretrain(file, tmp_path / "w", settings)[0] == "finished"
    assert_identical(final_state(tmp_path / "w")[1], final_state(gone_back[0])[1])


@pytest.mark.nightly
def test_bad_steps_that_come_back_are_left_out_with_earlier_ones(file, tmp_path, monkeypatch):
    """Those that it was at step 0 for are not forgotten when it goes back once more."""
    poison(monkeypatch, {5, 6, 7, 8, 9, 10, 14, 15, 16})
    outcome, shown = pretrain(file, tmp_path / "w", "phases.0.steps=18")
    assert outcome == "finished" and shown.count("rolling back") == 3
    assert shown.count("rolling back to step 0, since there is no earlier checkpoint") == 1
    skipped = final_state(tmp_path / "w")[1]["skipped_steps"]
    assert skipped[:13].tolist() == [3, 4, 5, 6, 7, 8, 9, 10, 13, 14, 15, 16, -1]
    assert "12 steps skipped (3 to 10, 13 to 16)" in shown


@pytest.mark.long
def test_fewer_bad_steps_are_passed_over(file, tmp_path, monkeypatch):
    """Their lines say so, and have no loss; no state is saved while its newest steps are bad."""
    poison(monkeypatch, {5, 6, 8})
    outcome, shown = pretrain(file, tmp_path / "w", "run.checkpoint_every=1", "run.log_every=1")
    assert outcome == "finished" and "rolling back" not in shown
    bad = [line for line in lines_of(tmp_path / "w") if line.get("bad_steps")]
    assert [line["step"] for line in bad] == [6, 7, 9] and "loss" not in bad[0]
    assert "step 6: not saved: no finite loss or gradient in the last 1 step" in shown
    assert final_state(tmp_path / "w")[1]["skipped_steps"].tolist() == [-1] * 64


@contextlib.contextmanager
def leaving_no_state():
    """What is done inside holds no state when it has ended, not even until garbage is collected."""
    gc.collect()
    gc.disable()
    before = words()  # of other files, whose programs may hold some
    try:
        yield
        assert words() <= before
    finally:
        gc.enable()


@pytest.mark.long
@pytest.mark.parametrize(
    ("at", "every", "why"),
    [
        (8, 5, ": the run must roll back over the steps 5 to 7"),
        (6, 4, ": no finite loss or gradient in the last 2 steps"),
    ],
)
def test_a_stop_between_bad_steps_keeps_the_checkpoint_before_them(
    at, every, why, file, gone_back, tmp_path, monkeypatch
):
    """And the run that goes on is the one that was not stopped."""
    poison(monkeypatch, {5, 6, 7})
    settings = f"run.checkpoint_every={every}"
    with signal_before(at), leaving_no_state():
        outcome, shown = pretrain(file, tmp_path / "w", settings)
    assert outcome == "stopped"
    assert f"stopped at step {at + 1}, not saved{why}" in shown
    assert f"the newest checkpoint is of step {every}" in shown
    assert pretrain(file, tmp_path / "w", settings)[0] == "finished"
    assert_same_run(tmp_path / "w", gone_back[0])


@pytest.mark.long
def test_a_stop_in_a_roll_back_finds_all_saved(file, tmp_path, monkeypatch):
    """Where it goes back to is a checkpoint, and what was not saved is to be done again."""
    poison(monkeypatch, {5, 6, 7})

    def stop(step, done):
        if done is not None:
            os.kill(os.getpid(), signal.SIGTERM)

    with hooked(on_restore=stop):
        outcome, shown = pretrain(file, tmp_path / "w")
    assert (
        outcome == "stopped"
        and "step 8: not saved: no finite loss or gradient in the last 3 steps" in shown
    )
    assert "stopped at step 4, saved; run the same command again" in shown


@pytest.mark.long
def test_a_checkpoint_found_damaged_in_a_roll_back_is_saved_again(
    file, gone_back, tmp_path, monkeypatch
):
    poison(monkeypatch, {5, 6, 7})
    folder, left = tmp_path / "w" / "checkpoints" / "4", [9]  # the step before the roll-back

    def damage(done, batch):
        if done in left:
            left.clear()
            while not folder.exists():  # it is saved next to the steps
                time.sleep(0.05)
            files = (path for path in folder.rglob("*") if path.is_file())
            max(files, key=lambda path: path.stat().st_size).write_bytes(b"")
        return batch

    with hooked(change_batch=damage):
        outcome, shown = pretrain(file, tmp_path / "w", "run.checkpoint_every=2")
    assert outcome == "finished" and "now damaged-4, resuming from step 2" in shown
    assert_identical(final_state(tmp_path / "w")[1], final_state(gone_back[0])[1])


@pytest.mark.long
def test_few_steps_wait_for_the_devices(file, tmp_path, monkeypatch):
    """A request to stop waits for them, and so does the watchdog."""
    make, waiting, most = step.make_train_step, [], [0]

    def slow(*args):
        train_step = make(*args)

        def one(state, window, batch, key, fixed):
            state, window = train_step(state, window, batch, key, fixed)
            number, done = hold(state["step"])
            state = state | {"step": number}
            waiting.append(done)
            most[0] = max(most[0], sum(not array.is_ready() for array in waiting))
            return state, window

        return one

    @jax.jit
    def hold(number):
        some = jnp.full((100, 100), number, jnp.float32)
        busy = jax.lax.fori_loop(0, 300, lambda _, x: jnp.tanh(x @ x), some)
        # Two of one program: the second is there when the loop can know that the first is.
        return number + (busy[0, 0] > 2).astype(jnp.int32), busy[0, 0]

    monkeypatch.setattr(step, "make_train_step", slow)
    seldom = [f"run.{name}_every=99" for name in ("log", "eval", "checkpoint")]
    assert pretrain(file, tmp_path / "w", *seldom)[0] == "finished"
    assert 1 <= most[0] <= 5  # the one at work, too


@pytest.mark.parametrize(("bad", "every", "step"), [((), 6, 6), ((7,), 99, 22)])
def test_held_out_losses_that_are_not_finite_fail_by_name(
    bad, every, step, file, tmp_path, monkeypatch
):
    """Though the steps are finite, or if too few steps are left for a roll-back."""
    evaluate, nan = HeldOutRows.evaluate, {"loss": float("nan")}
    monkeypatch.setattr(HeldOutRows, "evaluate", lambda *args: evaluate(*args) | nan)
    poison(monkeypatch, {*bad}, width=24)
    with leaving_no_state():
        outcome, shown = pretrain(file, tmp_path / "w", f"run.eval_every={every}")
    assert outcome == "failed" and f"the held-out loss of step {step} is not finite" in shown


# --- the decisions ------------------------------------------------------------------------------


def test_which_steps_are_left_out():
    assert start.exclude_steps((), range(5, 8)) == ((4, 5, 6, 7), 4)
    assert start.exclude_steps((), range(0, 3)) == ((0, 1, 2), 0)
    assert start.exclude_steps((2, 3, 4), range(5, 7)) == ((1, 2, 3, 4, 5, 6), 1)
    assert start.exclude_steps((0,), range(1, 3)) == ((0, 1, 2), 1)


def test_how_far_a_roll_back_goes():
    assert start.can_roll_back([], 7, 5)  # nothing was saved yet
    assert start.can_roll_back([25, 30], 29, 5)
    assert start.can_roll_back([29, 35], 29, 5)  # a checkpoint just before the bad steps
    assert start.can_roll_back([20, 30], 29, 5)  # at 25 the state was bad, and was not saved
    assert start.can_roll_back([25, 20], 90, 5)  # a full disk: the newest, however old
    assert start.can_roll_back([5, 10], 4, 5)  # to step 0
    assert not start.can_roll_back([35, 40], 28, 5)
    assert not start.can_roll_back([5, 35, 40], 28, 5)  # the best so far
    assert not start.can_roll_back([8], 7, 5, start_step=8)  # a fork has no step 0
    assert start.can_roll_back([8], 8, 5, start_step=8)
    assert start.can_roll_back([], 7, 5, start_step=8)


def trained(*lines):
    """Training lines of (steps done, share of bad steps)."""
    return [{"kind": "train", "step": step, "bad_steps": bad} for step, bad in lines]


def test_which_steps_changed_nothing():
    healthy = trained((10, 0.0), (20, 0.0))
    assert lines_lib.skipped_steps(healthy, ()) == (0, "")
    some = trained((10, 0.2), (14, 0.25), (15, 1.0))
    assert lines_lib.skipped_steps(some, ()) == (4, "14, 2 of 0 to 9, 1 of 10 to 13")
    # Those that were left out are counted in a line as well.
    assert lines_lib.skipped_steps(some, (3, 4)) == (4, "3 to 4, 14, 1 of 10 to 13")
    assert lines_lib.skipped_steps(some, (4,)) == (4, "4, 14, 1 of 0 to 9, 1 of 10 to 13")
    assert lines_lib.skipped_steps([], (7, 8, 11)) == (3, "7 to 8, 11")  # lines that were removed
    between = [healthy[0], {"kind": "evaluation", "step": 12}, *trained((20, 0.3))]
    assert lines_lib.skipped_steps(between, ()) == (3, "3 of 10 to 19")


@pytest.mark.parametrize(
    ("evaluated", "bad", "left_out", "step", "words"),
    [
        (20, 0.0, (), 20, ["finished: step 20; loss at 20"]),
        (10, 0.0, (), 20, ["finished: step 20", "10: loss at 10", "(step 20)"]),
        (None, 0.0, (), 20, ["finished: step 20", "(step 20)"]),
        (20, 0.3, (), 20, ["finished: step 20; loss at 20", "3 steps", "3 of 10 to 19"]),
        (20, 0.2, (18, 19), 20, ["finished: step 20; loss at 20", "2 steps", "18 to 19"]),
    ],
)
def test_the_last_line_tells_what_was_skipped_and_not_evaluated(
    evaluated, bad, left_out, step, words
):
    lines, shown = trained((10, 0.0), (step, bad)), []
    if evaluated:
        lines.append({"kind": "scores", "step": evaluated})
    scores = Evaluator("scores", bool, dict, lambda line: f"loss at {line['step']}")
    job = types.SimpleNamespace(
        training=types.SimpleNamespace(evaluators=[scores]),
        report=shown.append,
        workdir=Workdir("w"),
        finished_hint="w",
    )
    session._show(Result("finished", step), job, lines, left_out)
    parts = shown[0].split("; ")
    assert shown[0].startswith(words[0]) and all(word in shown[0] for word in words)
    assert len(parts) == 1 + bool(evaluated) + (evaluated != step) + bool(bad)


def lines(losses):
    return [
        {"kind": "train", "step": 10 * i + 10, "worst_step": 10 * i + 3, "worst_step_loss": loss}
        for i, loss in enumerate(losses)
    ]


@pytest.mark.long
def test_the_step_of_a_jump_is_named_while_the_run_goes_on(file, tmp_path, monkeypatch):
    poison(monkeypatch, {11}, "masked_lm_ids", 0)  # which never is an answer
    monkeypatch.setattr(lines_lib, "_SHARE", 0.0)
    monkeypatch.setattr(lines_lib, "_DEVIATIONS", 2.0)
    _, shown = pretrain(file, tmp_path / "w", "run.log_every=1")
    lines = [line for line in lines_of(tmp_path / "w") if line["kind"] == "train"]
    worst = {line["step"]: line["worst_step"] for line in lines}
    assert worst[12] == 11
    assert "step 11: its loss jumps to" in shown and "--step 11" in shown
