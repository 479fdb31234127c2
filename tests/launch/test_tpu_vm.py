"""Launches on TPU VMs, against a gcloud that plays what can go wrong."""

import os
import signal

import pytest
from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage.workdir import cache_folder
from launch import asked, checks, target, tpu_slice, tpu_vm
from launch.verdict import verdict

pytestmark = pytest.mark.usefixtures("bucket")

# What a launch does before anything can be watched, once nothing of its name is there.
BEGIN = ["create", "describe", "mkdir", "scp", "install.sh", "start.sh"]
LOOK = ["follow.sh", "state.sh"]
# The last: what was said while the connection was lost.
WATCH = [*LOOK, "follow.sh"]
END = ["describe", "delete", "describe"]


def test_a_run_that_goes_well(gcloud, launch, workdir):
    gcloud.play(follow_sh=[{"out": "step 10\n"}])
    code, said = launch("--spot", "--delete-when-done", "--project", "p", "--valid-until", "90m")
    assert code == 0
    assert gcloud.kinds == ["describe", *BEGIN, *WATCH, *END]
    assert gcloud.rented == {}
    (create,) = [call for call in gcloud.calls if call[3] == "create"]
    assert create[4:] == [
        *("mini", "--node-id=mini", "--accelerator-type=v3-32"),
        *("--runtime-version=tpu-ubuntu2204-base", "--valid-until-duration=90m", "--spot"),
        *("--zone=z-a", "--project=p", "--quiet"),
    ]
    (copy,) = [call for call in gcloud.calls if call[3] == "scp"]
    assert copy[4:] == [
        *("/staging/a.whl", "/staging/run.sh", "mini:bert-jax/mini/", "--worker=all"),
        *("--zone=z-a", "--project=p", "--quiet"),
    ]
    assert "step 10" in said and "the run finished" in said
    record = target.read(workdir)
    assert (record.name, record.hosts, record.place) == ("mini", 4, {"zone": "z-a", "project": "p"})


def test_no_quota(gcloud, launch):
    gcloud.play(create=[{"code": 1, "err": "ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit\n"}])
    code, said = launch()
    assert code == 2
    assert gcloud.kinds == ["describe", "create", "describe"]
    assert "mini: not created: ERROR: (gcloud) RESOURCE_EXHAUSTED: Quota limit; ask" in said


def test_a_request_that_fails_for_a_moment_is_made_again(gcloud, launch):
    moment = {"code": 1, "err": "ERROR: connection reset\n"}
    gcloud.play(create=[moment])
    assert launch()[0] == 0 and gcloud.rented == {}
    assert [call[3] for call in gcloud.calls].count("create") == 2

    taken = {"code": 124, "err": "", "state": "ACTIVE", "hosts": ["absent"] * 4}
    gcloud.play(create=[taken])
    code, said = launch()
    assert code == 0 and gcloud.rented == {} and "the run finished" in said


def test_a_request_that_is_taken_after_all_is_given_back(gcloud, launch):
    """It was not known to be: the service had not answered."""
    late = {"code": 0, "out": "ACTIVE\n", "state": "ACTIVE"}
    gcloud.play(create=[{"code": 124}] * 5, describe=[{}, {}, {}, late])
    code, said = launch()
    assert code == 2 and "mini: not created: exit code 124" in said
    assert gcloud.rented == {} and "delete" in gcloud.kinds


def test_a_request_that_is_refused_is_not_made_again(gcloud, launch):
    gcloud.play(create=[{"code": 1, "err": "ERROR: (gcloud) PERMISSION_DENIED: tpu.nodes\n"}])
    code, said = launch()
    assert code == 2 and "PERMISSION_DENIED" in said
    assert [call[3] for call in gcloud.calls].count("create") == 1


def test_a_request_that_fails_while_it_is_waited_for(gcloud, launch):
    waiting = {"state": "WAITING_FOR_RESOURCES", "code": 0, "out": "WAITING_FOR_RESOURCES\n"}
    failed = {"state": "FAILED", "code": 0, "out": "FAILED\n"}
    gone = {"code": 1, "err": "NOT_FOUND"}
    gcloud.play(describe=[gone, gone, waiting, waiting, failed])
    code, said = launch()
    assert code == 2 and gcloud.rented == {}
    assert gcloud.kinds == ["describe", "create", *END]
    assert "the request failed: no machines in time" in said


def test_no_machines_in_time(gcloud, launch, monkeypatch):
    monkeypatch.setattr(tpu_vm, "_MAKING_SECONDS", 60.0)
    gone = {"code": 1, "err": "NOT_FOUND"}
    gcloud.play(
        create=[{"state": "WAITING_FOR_RESOURCES"}],
        describe=[gone, gone, *([{"code": 0, "out": "PROVISIONING"}] * 5)],
    )
    code, said = launch("--delete-when-done", "--valid-until", "1m")
    assert code == 2 and gcloud.rented == {}
    assert "no machines within" in said


def test_preempted_while_waiting(gcloud, launch):
    gone = {"code": 1, "err": "NOT_FOUND"}
    gcloud.play(describe=[gone, gone, {"state": "SUSPENDED", "code": 0, "out": "SUSPENDED\n"}])
    code, _ = launch()
    assert code == 0 and gcloud.rented == {}
    again = ["describe", "create", "describe", "delete", "describe", *BEGIN]
    assert gcloud.kinds == [*again, *WATCH, *END]


def test_preempted_while_running(gcloud, launch):
    lost = {"code": 255, "state": "SUSPENDING"}
    gcloud.play(start_sh=[{"hosts": ["running"] * 4}], follow_sh=[{}, lost])
    code, said = launch()
    assert code == 0 and gcloud.rented == {}
    first = ["describe", *BEGIN, *LOOK, "describe", *LOOK]
    assert gcloud.kinds == [*first, *END, *BEGIN, *WATCH, *END]
    assert "mini is SUSPENDING; going on from the newest checkpoint, 9 retries left" in said


def test_a_run_that_was_stopped_goes_on_where_it_was(gcloud, launch):
    gcloud.play(start_sh=[{"hosts": ["ended 75"] * 4}])
    code, said = launch()
    assert code == 0 and gcloud.rented == {}
    again = ["describe", "state.sh", "mkdir", "scp", "install.sh", "start.sh"]
    assert gcloud.kinds == ["describe", *BEGIN, *WATCH, *again, *WATCH, *END]
    assert "stopped, with its state saved; going on" in said


def test_a_dropped_connection_ends_nothing(gcloud, launch):
    gcloud.play(
        start_sh=[{"hosts": ["running"] * 4}],
        follow_sh=[
            {"out": "step 10\n", "code": 255},
            {"out": "step 20\n", "hosts": ["ended 0"] * 4},
        ],
    )
    code, said = launch()
    assert code == 0
    assert gcloud.kinds == ["describe", *BEGIN, *LOOK, "describe", *WATCH, *END]
    follows = [call[6] for call in gcloud.calls if any("follow.sh" in word for word in call)]
    assert [words.split()[2] for words in follows] == ["1", "9", "17"], "from where it was shown"
    assert "the run goes on" in said and "step 10\nstep 20\n" in said


def test_hosts_that_run_while_one_has_failed_are_ended(gcloud, launch):
    gcloud.play(start_sh=[{"hosts": ["running", "ended 1", "running", "running"]}])
    code, said = launch()
    assert code == 1 and gcloud.rented == {}
    assert [word for call in gcloud.calls for word in call if "stop.sh" in word] == [
        "--command=bash bert-jax/mini/stop.sh TERM"
    ]
    assert "the run failed with exit code 1" in said and "retries left" not in said


def test_hosts_that_do_not_end_are_killed_and_machines_changed(gcloud, launch, monkeypatch):
    """One was lost without a word, and the others hang."""
    monkeypatch.setattr(tpu_slice, "_GRACE", 1)
    monkeypatch.setattr(tpu_slice, "_KILL", 2)
    hanging = {"hosts": ["running", "running", "lost", None]}
    gcloud.play(
        start_sh=[hanging],
        stop_sh=[{"code": 0}, {"code": 0}],
    )
    code, said = launch()
    assert code == 0 and gcloud.rented == {}
    stops = [word for call in gcloud.calls for word in call if "stop.sh" in word]
    assert [word.split()[-1] for word in stops] == ["TERM", "KILL"]
    assert (
        "1 of 4 hosts have ended, 1 do not answer" in said
        and "lost a host (exit codes none); going" in said
    )
    assert gcloud.kinds.count("create") == 2


def test_a_run_is_not_ended_for_a_host_that_does_not_answer(gcloud, launch, monkeypatch):
    monkeypatch.setattr(tpu_slice, "_GRACE", 1)
    monkeypatch.setattr(tpu_slice, "_KILL", 2)
    silent = ["running", "running", "running", None]
    gcloud.play(
        start_sh=[{"hosts": silent}], follow_sh=[{}, {}, {}, {}, {"hosts": ["ended 0"] * 4}]
    )
    code, _ = launch()
    assert code == 0 and "stop.sh" not in gcloud.kinds and gcloud.kinds.count("create") == 1


def test_a_host_that_never_answers_again_has_the_others_save(gcloud, launch, monkeypatch):
    monkeypatch.setattr(tpu_slice, "_UNHEARD", 1)
    monkeypatch.setattr(tpu_slice, "_GRACE", 1)
    monkeypatch.setattr(tpu_slice, "_KILL", 2)
    gcloud.play(start_sh=[{"hosts": ["running", "running", "running", None]}])
    code, said = launch()
    assert code == 0 and gcloud.kinds.count("create") == 2 and gcloud.rented == {}
    stops = [word.split()[-1] for call in gcloud.calls for word in call if "stop.sh" in word]
    assert stops[0] == "TERM" and "lost a host (exit codes 75, none)" in said


def test_what_was_said_while_the_connection_was_lost_is_shown(gcloud, launch):
    gcloud.play(follow_sh=[{"code": 255}, {"out": "the last words\n"}])
    code, said = launch()
    assert code == 0 and "the last words\n" in said


def test_no_host_answers(gcloud, launch, monkeypatch):
    monkeypatch.setattr(tpu_slice, "_SILENT", 2)
    gcloud.play(start_sh=[{"hosts": [None] * 4}])
    code, said = launch()
    assert code == 0 and gcloud.kinds.count("create") == 2 and gcloud.rented == {}
    assert "no host answers" in said


def test_a_host_that_cannot_install(gcloud, launch):
    gcloud.play(install_sh=[{"code": 1, "err": "ERROR: no space\n"}] * 5)
    code, said = launch()
    assert code == 2 and gcloud.rented == {}
    assert "its hosts cannot be filled: install.sh fails (ERROR: no space)" in said


def test_the_budget_of_retries_is_kept(gcloud, launch):
    gcloud.play(start_sh=[{"hosts": ["ended 134"] * 4}] * 3)
    code, said = launch("--retries", "2", "--delete-when-done")
    assert code == 1 and gcloud.rented == {}
    assert gcloud.kinds.count("create") == 3
    assert "lost a host (exit codes 134), and no retries are left; launch again to go on" in said


def test_what_was_not_launched_for_this_run_is_left_alone(gcloud, launch):
    gcloud.rent("mini", "ACTIVE", ["running"] * 4)
    code, said = launch()
    assert code == 2 and list(gcloud.rented) == ["mini"]
    assert "mini: is there already in z-a, and was not launched for" in said


def test_machines_of_another_name_are_not_forgotten(gcloud, launch, workdir):
    assert launch("--keep")[0] == 0
    code, said = launch("--keep", "--name", "other")
    assert code == 2 and list(gcloud.rented) == ["mini"]
    assert "mini: is still there for this workdir" in said
    assert f"`python -m launch stop {workdir}` first" in said
    assert target.read(workdir).name == "mini"
    assert asked.stop([workdir]) == 0 and gcloud.rented == {}
    assert launch("--delete-when-done", "--name", "other")[0] == 0
    assert target.read(workdir).name == "other"


def test_machines_that_cannot_be_asked_for_are_not_forgotten(gcloud, launch, workdir, monkeypatch):
    assert launch("--keep")[0] == 0
    monkeypatch.setattr(tpu_slice, "_POLL", 0.01)
    gcloud.play(describe=[{"code": 1, "err": "ERROR: no route\n"}] * 5)
    code, said = launch("--keep", "--zone", "z-b")
    assert code == 2 and gcloud.kinds.count("create") == 1
    assert (
        "mini: was launched for this workdir, and may still be there: mini: gcloud cannot" in said
    )
    assert target.read(workdir).place["zone"] == "z-a"


def test_the_commit_that_is_told_is_the_one_on_the_hosts(gcloud, launch, workdir, monkeypatch):
    monkeypatch.setattr(checks, "head", lambda: "a" * 40)
    gcloud.play(start_sh=[{"hosts": ["running"] * 4}], follow_sh=[{"signal": signal.SIGINT}])
    assert launch("--keep")[0] == 130
    monkeypatch.setattr(checks, "head", lambda: "b" * 40)
    gcloud.play(follow_sh=[{"signal": signal.SIGINT}])
    assert launch("--keep")[0] == 130
    assert target.read(workdir).commit == "a" * 40, "they run what they were given"
    gcloud.play(follow_sh=[{"hosts": ["ended 134"] * 4}])
    assert launch("--keep")[0] == 0
    assert target.read(workdir).commit == "b" * 40, "they were given it anew"


def test_gcloud_that_fails_for_a_moment_is_asked_again(gcloud, launch):
    moment = {"code": 1, "err": "ERROR: connection reset\n"}
    gcloud.play(describe=[moment, moment], mkdir=[moment, moment], start_sh=[moment])
    code, _ = launch()
    assert code == 0 and gcloud.rented == {}
    gcloud.play(describe=[moment] * 5)
    code, said = launch()
    assert code == 2 and "mini: gcloud cannot tell its state (ERROR: connection reset)" in said


def test_a_run_goes_on_while_this_machine_has_no_network(gcloud, launch):
    """Its machines are neither deleted nor asked for again."""
    out = {"code": 1, "err": "ERROR: no route\n"}
    gcloud.play(
        start_sh=[{"hosts": ["running"] * 4}],
        follow_sh=[{"out": "step 10\n", "code": 255}, {"hosts": ["ended 0"] * 4}],
        state_sh=[out],
        describe=[*([{"code": 1, "err": "NOT_FOUND"}] * 2), {}, *([out] * 9)],
    )
    code, said = launch()
    assert code == 0 and gcloud.kinds.count("create") == 1 and gcloud.kinds.count("delete") == 1
    assert "gcloud cannot be asked (ERROR: no route); asking on" in said


def test_no_gcloud(launch, monkeypatch, tmp_path):
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path))
    git = os.popen("command -v git").read().strip()
    (tmp_path / "git").symlink_to(git)
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = launch()
    assert code == 2 and "gcloud: cannot be run" in said and "install the Google Cloud CLI" in said


@pytest.mark.parametrize(
    "flags, complaint",
    [
        (["--retries", "-1"], "--retries -1: must be at least 0"),
        (["--valid-until", "soon"], "--valid-until soon: write a whole number and one of s, m"),
        (["--force", "plan,luck"], "--force luck: no such check; the checks are commit, workdir"),
        (["--workdir", "runs/x"], "--workdir runs/x: rented machines share no disk"),
        (["--topology", "v9:1x1"], "--topology v9:1x1: unknown"),
        (["--name", "Mini"], "--name Mini: use at most 40 of lower case letters"),
        (["--set", "run.nothing=1"], "--set run.nothing=1"),
    ],
)
def test_a_flag_at_fault_is_named(gcloud, launch, flags, complaint):
    code, said = launch("--delete-when-done", *flags)
    assert code == 2 and complaint in said and gcloud.calls == []


@pytest.mark.parametrize(
    "codes, one",
    [
        ([0, 0], 0),
        ([75, 75], 75),
        ([0, 75], 75),
        ([134, 1, 134], 1),
        ([2, 75], 2),
        ([134, 134], 134),
        ([137, 75], 134),
        ([0, None], 134),
        ([130, 134], 130),
        ([134, 74, 134], 74),
        ([74, 75, 0], 74),
        ([74, 2], 2),
    ],
)
def test_one_exit_code_of_many(codes, one):
    assert verdict(codes) == one


def test_the_record_is_kept_here_by_name(gcloud, launch):
    launch()
    assert target.read(str(cache_folder() / "launch" / "mini")).name == "mini"


def test_a_damaged_record_is_refused(bucket, workdir):
    with pytest.raises(InputError, match="nothing was launched here"):
        target.read(workdir)
    epath.Path(workdir, "launch.json").write_text('{"format_version": 1, "target": "tpu_vm"}')
    with pytest.raises(InputError, match=r"launch\.json: damaged; remove it, and launch"):
        target.read(workdir)


@pytest.mark.parametrize(
    ("kind", "place"),
    [
        ("tpu_vm", []),
        ("tpu_vm", {"project": ""}),
        ("tpu_vm", {"zone": "z-a", "project": None}),
        ("tpu_vm", {"context": "c", "namespace": "n"}),
        ("gke", {"context": "c"}),
        ("gke", "default"),
    ],
)
def test_a_place_that_cannot_be_one_is_damage(bucket, workdir, kind, place):
    record = target.Record(
        target=kind,
        name="mini",
        place=place,
        workdir=workdir,
        topology="v3:4x4",
        hosts=2,
        config_sha256="0" * 64,
        commit="",
        time=1.0,
        price_per_chip_hour=None,
    )
    record.write()
    with pytest.raises(InputError, match=r"launch\.json: damaged; remove it, and launch"):
        target.read(workdir)
