"""Launches on TPU VMs, against a gcloud that plays what can go wrong."""

import os

import pytest

from bert_jax.config import InputError
from bert_jax.workdir import cache_folder
from launch import target, tpu_slice, tpu_vm
from launch.tpu_launched import verdict

pytestmark = pytest.mark.usefixtures("bucket")

# What a launch does before anything can be watched, once nothing of its name is there.
BEGIN = ["create", "describe", "mkdir", "scp", "install.sh", "start.sh"]
WATCH = ["follow.sh", "state.sh"]
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
    first = ["describe", *BEGIN, *WATCH, "describe", *WATCH]
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
    assert gcloud.kinds == ["describe", *BEGIN, *WATCH, "describe", *WATCH, *END]
    follows = [call[6] for call in gcloud.calls if any("follow.sh" in word for word in call)]
    assert [words.split()[2] for words in follows] == ["1", "9"], "from where it was shown"
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
    assert "1 of 4 hosts have ended, 1 do not answer" in said and "lost a host; going on" in said
    assert gcloud.kinds.count("create") == 2


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
    assert "lost a host, and no retries are left; launch again to go on" in said


def test_what_was_not_launched_for_this_run_is_left_alone(gcloud, launch):
    gcloud.rent("mini", "ACTIVE", ["running"] * 4)
    code, said = launch()
    assert code == 2 and list(gcloud.rented) == ["mini"]
    assert "mini: is there already in z-a, and was not launched for" in said


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
    ],
)
def test_one_exit_code_of_many(codes, one):
    assert verdict(codes) == one


def test_the_record_is_kept_here_by_name(gcloud, launch):
    launch()
    assert target.read(str(cache_folder() / "launch" / "mini")).name == "mini"


def test_a_damaged_record_is_refused(bucket, workdir):
    from etils import epath

    with pytest.raises(InputError, match="nothing was launched here"):
        target.read(workdir)
    epath.Path(workdir, "launch.json").write_text('{"format_version": 1, "target": "tpu_vm"}')
    with pytest.raises(InputError, match=r"launch\.json: damaged; remove it, and launch"):
        target.read(workdir)
