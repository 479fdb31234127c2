"""Traces of some steps: what they hold, and that they cost the run nothing."""

import gzip
import json
import pathlib

import jax
import jax.numpy as jnp
import pytest
from broken import tree
from compare import assert_identical
from small_run import final_state, pretrain, signal_before

from bert_jax.running.progress import Clock, Profile
from bert_jax.storage.workdir import Workdir


def traced(profile: pathlib.Path) -> dict[str, list[int]]:
    """Of each trace that XProf lists here, the numbers of its steps."""
    found = {}
    for run in sorted((profile / "plugins" / "profile").iterdir()):
        (file,) = run.glob("*.trace.json.gz")
        events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        steps = [int(e["args"]["step_num"]) for e in events if e.get("name") == "train"]
        found[run.name] = sorted(steps)
        (planes,) = run.glob("*.xplane.pb")
        assert b"step_num" in planes.read_bytes()
    return found


@pytest.mark.long
def test_a_profiled_run_that_stops_in_the_window_is_the_run_without_bit_for_bit(
    finished_run, copy_of_run
):
    """The stop ends the trace, and a resume begins one; the window goes over the end of a phase."""
    file, workdir, window = pathlib.Path("small.py"), copy_of_run / "w", "run.profile_steps=11,16"
    with signal_before(12):
        assert pretrain(file, workdir, window)[0] == "stopped"
    assert traced(workdir / "profile") == {"steps_12_to_13": [12, 13]}
    outcome, said = pretrain(file, workdir, window)
    assert outcome == "finished" and "profile of steps 14 to 16: " in said
    assert traced(workdir / "profile")["steps_14_to_16"] == [14, 15, 16]
    for name in ("metrics.jsonl", "predictions.jsonl"):
        assert (workdir / name).read_bytes() == (finished_run / "run" / name).read_bytes()
    assert_identical(final_state(workdir)[1], final_state(finished_run / "run")[1])
    lines = (workdir / "timings.jsonl").read_text().splitlines()
    assert sum(json.loads(line).get("profile_seconds", 0.0) for line in lines) > 0


# --- the window alone ---


def profile(folder, window=(2, 5), process=0):
    told = []
    return Profile(window, Workdir(folder.parent), process, told.append, Clock()), told


def take(profile, steps) -> None:
    """Does steps, named by how many are done before."""
    state = jnp.zeros(4)
    for done in steps:
        with profile.step(done, state):
            state = state + 1
    profile.end(state)


@pytest.mark.parametrize("back", [[1, 2], [2]], ids=["before the window", "within it"])
def test_a_roll_back_in_the_window_begins_another_trace(back, tmp_path):
    one, _ = profile(tmp_path / "profile")
    take(one, [0, 1, 2, 3, *back, 3, 4, 5, 6])
    assert traced(tmp_path / "profile") == {"steps_3_to_4": [3, 4], "steps_3_to_5": [3, 4, 5]}


def test_a_step_that_fails_is_in_the_trace(tmp_path):
    one, _ = profile(tmp_path / "profile")
    with pytest.raises(ZeroDivisionError), one.step(2, jnp.zeros(4)):
        raise ZeroDivisionError
    one.end()
    assert traced(tmp_path / "profile") == {"steps_3_to_3": [3]}


def test_a_trace_holds_the_steps_that_were_under_way_at_its_edges(tmp_path, monkeypatch):
    waited = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    one, _ = profile(tmp_path / "profile")
    for done in range(8):
        with one.step(done, f"state {done}"):
            pass
    assert waited == ["state 2", "state 5"]


def test_processes_write_side_by_side(tmp_path):
    """As on hosts of one name; XProf shows what lies in one folder as one run."""
    for number in range(2):
        take(profile(tmp_path / "profile", process=number)[0], range(6))
    (run,) = (tmp_path / "profile" / "plugins" / "profile").iterdir()
    assert {path.name.split(".")[0] for path in run.iterdir()} == {"process_0", "process_1"}
    assert len(list(run.glob("*.xplane.pb"))) == 2


def test_a_window_that_a_resume_has_passed_is_no_trace(tmp_path):
    one, told = profile(tmp_path / "profile")
    take(one, range(5, 9))
    assert not told and not tree(tmp_path)


def test_a_profile_is_not_written_through_a_link(tmp_path):
    (tmp_path / "w").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "w" / "profile").symlink_to(tmp_path / "elsewhere")
    one, told = profile(tmp_path / "w" / "profile")
    take(one, range(6))
    assert "is a link, or holds one; remove it" in told[0]
    assert not tree(tmp_path / "elsewhere")


def test_a_place_that_jax_cannot_write_to_is_said_and_traced_no_more(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    one, told = profile(tmp_path / "profile")
    take(one, range(6))
    assert len(told) == 1 and told[0].startswith("no profile: ")
    assert not tree(tmp_path)
