"""The draw of kills, what is read from journals, and what is refused; no run is started."""

import collections
import dataclasses
import json
import signal

import numpy as np
import pytest
from broken import fails
from small_run import write_text

from bert_jax import config
from bert_jax.tools.verify import compare, kills
from bert_jax.tools.verify.compare import Execution, Journal
from bert_jax.tools.verify.faults import Fault, Plan
from bert_jax.tools.verify.kills import ChildResult, ResumedRun, Round, Undisturbed

KINDS = tuple(kills.KINDS)


def planned(steps=20, size=2):
    return {s: Execution(0, s, *[np.arange(s * size, (s + 1) * size, dtype=np.uint64)] * 2)
            for s in range(steps)}  # fmt: skip


UNDISTURBED = Undisturbed(
    saves=(30, 60, 90, 100),
    evaluations=(50, 100),
    saved_files=9,
    nonfinite_steps=range(42, 45),
    rolled_back=(45, 30),
    step_seconds=0.1,
    evaluation_seconds=0.4,
    prepare_seconds=2.0,
    executions={},
)
# Twenty steps of two rows, saved at every fourth.
SHORT = dataclasses.replace(
    UNDISTURBED,
    saves=(4, 8, 12, 16, 20),
    nonfinite_steps=range(0),
    rolled_back=None,
    executions=planned(),
)


@pytest.fixture
def experiment(tmp_path):
    return config.load(str(write_text(tmp_path)))


# --- the draw -----------------------------------------------------------------------------------


def test_each_kind_comes_as_often_as_any_other():
    for count in (1, 6, 100, 103):
        times = collections.Counter(one.kind for one in kills.draw(UNDISTURBED, count, seed=3))
        assert sum(times.values()) == count and len(times) == min(count, len(KINDS))
        assert max(times.values()) - min(times.values()) <= 1
    whole = dataclasses.replace(UNDISTURBED, rolled_back=None)
    times = collections.Counter(one.kind for one in kills.draw(whole, 60, seed=0))
    assert set(times.values()) == {12} and "at a roll-back" not in times


def test_a_draw_is_a_function_of_its_seed():
    drawn = kills.draw(UNDISTURBED, 40, seed=3)
    assert drawn == kills.draw(UNDISTURBED, 40, seed=3) != kills.draw(UNDISTURBED, 40, seed=4)


def test_kills_come_where_their_kind_has_a_place():
    places, parts = collections.defaultdict(set), collections.defaultdict(set)
    drawn = kills.draw(UNDISTURBED, 2000, seed=0)
    for one in drawn:
        places[one.kind].add(one.fault.step)
        parts[one.fault.at].add(one.fault.progress)
        if one.fault.signal == signal.SIGTERM:  # it would find the last step done
            assert one.fault.step <= 98
        if one.fault.at == "save" and one.fault.step == 100:
            assert one.fault.progress == 0
    assert places["in a save"] == {30, 60, 90, 100}
    assert len(places["in a step"]) > 80 and len(places["SIGTERM"]) > 80
    assert parts["startup"] == {0, 1, 2, 3}
    assert parts["save"] == set(range(11))
    assert parts["roll_back"] == set(range(30)), "up to the save of step 60"
    steps = [one.fault.step for one in drawn if one.kind != "in prepare"]
    assert steps == sorted(steps)
    assert max(one.fault.after for one in drawn if one.kind == "in prepare") < 2.0


def test_steps_without_a_loss_lie_after_the_first_save(experiment):
    three = config.override(experiment, ["optimizer.bad_steps_in_a_row=3"])
    found = {kills.draw_nonfinite_steps(three, seed) for seed in range(100)}
    assert {len(steps) for steps in found} == {3}
    assert {steps.start for steps in found} == set(range(5, 18))
    for setting in ("optimizer.after_bad_steps=stop", "optimizer.bad_steps_in_a_row=16"):
        assert not kills.draw_nonfinite_steps(config.override(experiment, [setting]), 0)


# --- journals -----------------------------------------------------------------------------------


def note(step, rows, start=1, add=0):
    hashes = [row + add for row in rows]
    return {"kind": "step", "start": start, "step": step, "rows": rows, "hashes": hashes}


def test_rows_that_devices_share_count_once_and_a_step_done_again_is_another(tmp_path):
    notes = note(0, [2, 3, 0, 1, 0, 1]), note(1, [4, 5]), note(0, [0], start=2, add=1)
    (tmp_path / "journal").write_text("".join(json.dumps(one) + "\n" for one in notes))
    journal = Journal.read(tmp_path / "journal")
    first, second, again = journal.executions
    assert first.rows.tolist() == first.hashes.tolist() == [0, 1, 2, 3]
    assert journal.executions_of(2) == [again] and again.hashes.tolist() == [1]
    assert journal.survivors() == {0: again, 1: second}


# --- a run that is killed -----------------------------------------------------------------------


class Script:
    """Stands for the processes: each start does what it is given."""

    def __init__(self, *starts, went_back=None):
        self.starts, self.went_back = iter(starts), went_back

    def run(self, command, workdir, plan, **_):
        first, last, saved, code, add = next(self.starts)
        with open(plan.journal, "a") as file:
            for step in range(first, last):
                one = note(step, [2 * step, 2 * step + 1], plan.start_number, add=add)
                file.write(json.dumps(one) + "\n")
            if plan.fault:
                if self.went_back:
                    back = {"kind": "rolled_back", "start": plan.start_number}
                    file.write(
                        json.dumps(back | dict(zip(("done", "to"), self.went_back, strict=True)))
                        + "\n"
                    )
                killed = {"kind": "killed", "start": plan.start_number}
                killed["done"] = last - (plan.fault.signal == signal.SIGTERM)
                file.write(json.dumps(killed) + "\n")
        for step in saved:
            (workdir / "checkpoints" / str(step)).mkdir(parents=True)
        return ChildResult(code, 1.0, ("the last line",))


KILL = Round("in a step", Fault("step", signal.SIGKILL, 9))
STOP = Round("SIGTERM", Fault("step", signal.SIGTERM, 9))


def killed_run(tmp_path, *starts):
    return ResumedRun(Script(*starts), tmp_path / "killed", SHORT)


def test_a_run_that_goes_on_as_it_should_shows_nothing(tmp_path):
    run = killed_run(
        tmp_path, (0, 9, [4, 8], -9, 0), (8, 11, [11], 75, 0), (11, 20, [16, 20], 0, 0)
    )  # fmt: skip
    assert run.kill(KILL).differences == []
    assert run.kill(STOP).differences == []
    assert run.finish() == []
    assert kills.newest_checkpoint(tmp_path / "killed") == 20


@pytest.mark.parametrize(
    ("starts", "words"),
    [
        ([(0, 9, [4], 1, 0)], "was to end with exit code -9, but ended with exit code 1: the last"),
        ([(0, 13, [4], -9, 0), (4, 20, [], 0, 0)], "the newest checkpoint is of step 4, not of 8"),
        ([(0, 9, [8], -9, 0), (9, 20, [], 0, 0)], "resumed from step 9, but the newest checkpoint"),
        ([(0, 9, [4], -9, 0), (4, 20, [], 0, 1)], "16 steps had another batch, the first is step"),
        ([(0, 9, [4], -9, 0), (4, 20, [], 1, 0)], "was to finish, but ended with exit code 1"),
    ],
)  # fmt: skip
def test_what_a_kill_may_not_do_is_said(starts, words, tmp_path):
    run = killed_run(tmp_path, *starts)
    found = run.kill(KILL).differences
    if len(starts) > 1:
        assert found == []
        found = run.finish()
    assert len(found) == 1 and words in found[0]


def test_a_stop_that_saves_nothing_is_said(tmp_path):
    run = killed_run(tmp_path, (0, 10, [8], 75, 0), (8, 20, [], 0, 0))
    assert run.kill(STOP).differences == []
    assert run.finish() == ["the newest checkpoint is of step 8, not of 10"]
    assert killed_run(tmp_path, (0, 10, [], -15, 0)).kill(STOP).differences[-1].startswith(
        "was to end with exit code 75, but ended with exit code -15"
    )  # fmt: skip


def test_what_must_be_saved_around_steps_without_a_loss(tmp_path):
    """Steps 9 to 11 have none, and the undisturbed run went back over them at 13."""

    def least(fault, done, went_back=None):
        undisturbed = dataclasses.replace(SHORT, nonfinite_steps=range(9, 12), rolled_back=(13, 8))
        run = ResumedRun(Script(), tmp_path / "killed", undisturbed)
        return run._min_checkpoint(fault, done, went_back)

    kill, stop = KILL.fault, STOP.fault
    assert least(kill, 9) == 4 and least(stop, 8) == 9
    assert least(stop, 9) == 4, "step 9 is not finite, so nothing is saved after it"
    assert least(kill, 13) == 4, "12 could not be saved"
    assert least(kill, 17) == 12, "it had gone back before"
    assert least(kill, 16) == 8, "the save of 16 may not have waited for that of 12 yet"
    assert least(kill, 9, (13, 8)) == 8 and least(stop, 9, (13, 8)) == 10


def test_a_run_that_ends_before_its_death_is_no_kill(tmp_path):
    run = killed_run(tmp_path, (0, 20, [20], 0, 0))
    late = Round("in a save", Fault("save", step=20))
    run._launcher.run = lambda command, workdir, plan, **_: Script((0, 20, [20], 0, 0)).run(
        command, workdir, Plan(None, plan.journal, plan.start_number)
    )
    killed = run.kill(late)
    assert killed.done is None and killed.differences == []


# --- rows ----------------------------------------------------------------


def test_rows_that_were_missed_or_seen_twice_are_counted(experiment):
    phases = tuple(dataclasses.replace(p, steps=10, batch_size=2) for p in experiment.phases)
    experiment = dataclasses.replace(experiment, phases=phases)
    whole = planned(10) | {s + 10: e for s, e in planned(10).items()}
    assert compare.rows("x", experiment, whole).differences == []
    (found,) = compare.rows("x", experiment, whole | {3: whole[4]}).differences
    assert found.startswith("phase 0: of 20 rows 2 were not seen and 2 more than once; 0 were not")
    found = compare.rows("x", experiment, {s: e for s, e in whole.items() if s != 19}).differences
    assert found == ["phase 1: of 20 rows 2 were not seen and 0 more than once; 0 were not planned"]


# --- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--rounds", "0"], "--rounds 0: must be at least 1"),
        (["--set", "corpus.sources=text:/nowhere"], "text:/nowhere"),
        (["--set", "run.checkpoint_every=22"], "run.checkpoint_every=22: must be below the 22"),
        (["--set", "run.eval_every=100"], "run.eval_every=100: must be below the 22 steps"),
        (["--workdir", "gs://bucket/v"], "gs://bucket/v: must be on a disk of this machine"),
        (["--workdir", "{}/text"], "text: holds all.txt, which `verify-resume` did not make"),
        (["--workdir", "{}/vocab.txt"], "vocab.txt: is a file where a folder is needed"),
    ],
)
def test_what_cannot_be_verified_is_refused_in_one_line(args, words, tmp_path):
    file = write_text(tmp_path)
    args = [arg.format(tmp_path) for arg in args]
    before = sorted(tmp_path.rglob("*"))
    place = ["--workdir", str(tmp_path / "v")] if "--workdir" not in args else []
    fails(["verify-resume", str(file), *place, *args], words)
    assert sorted(tmp_path.rglob("*")) == before


def test_one_of_several_processes_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    command = f"verify-resume {write_text(tmp_path)} --workdir {tmp_path}/v"
    fails(command, "JAX_NUM_PROCESSES: this command starts processes of its own")
