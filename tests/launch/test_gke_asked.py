"""`launch status`, `logs` and `stop`, of what was launched on GKE."""

import signal

import pytest

from launch import asked, gke_launched, target

pytestmark = pytest.mark.usefixtures("bucket")

FORBIDDEN = 'Error from server (Forbidden): jobsets is forbidden: User "me" cannot create\n'
FAILED = {
    "terminalState": "Failed",
    "restarts": 2,
    "conditions": [
        {
            "type": "Failed",
            "status": "True",
            "reason": "FailedJobs",
            "message": "jobset failed due to PodFailurePolicy",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        }
    ],
}


def record(workdir: str, **more) -> target.Record:
    """Of a launch before."""
    given = {
        "target": "gke",
        "name": "mini",
        "place": {"context": "the-context", "namespace": "default"},
        "workdir": workdir,
        "topology": "v5e:4x4",
        "hosts": 4,
        "config_sha256": "0" * 64,
        "commit": "",
        "time": 1.0,
        "price_per_chip_hour": None,
    }
    return target.Record(**(given | more))


def answered(function, workdir, *flags, capfd):
    code = function([workdir, *flags])
    said = capfd.readouterr()
    return code, said.out, said.err


UNSCHEDULABLE = {
    "status": {
        "phase": "Pending",
        "conditions": [
            {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
        ],
    }
}
NO_IMAGE = {
    "status": {
        "phase": "Pending",
        "containerStatuses": [
            {"state": {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off pulling"}}}
        ],
    }
}
RUNS = {"status": {"phase": "Running"}}


@pytest.mark.parametrize(
    ("status", "pods", "word", "detail"),
    [
        ({}, [RUNS] * 4, "running", "4 of 4 pods run"),
        ({}, [*[RUNS] * 3, {"status": {"phase": "Succeeded"}}], "running", "3 of 4 pods run"),
        ({}, [], "waiting", "0 of 4 pods run"),
        (
            {},
            [RUNS, UNSCHEDULABLE],
            "waiting",
            "1 of 4 pods run; no machines: 0/3 nodes are available",
        ),
        ({"restarts": 1}, [UNSCHEDULABLE], "waiting", "nodes are available; restarted 1"),
        ({}, [NO_IMAGE], "waiting", "0 of 4 pods run; ImagePullBackOff: Back-off pulling"),
        ({"restarts": 3}, [RUNS] * 4, "running", "4 of 4 pods run; restarted 3 of 10 times"),
        (
            FAILED,
            [],
            "ended",
            "JobSet Failed: jobset failed due to PodFailurePolicy; restarted 2 of 10 times",
        ),
        ({"terminalState": "Completed"}, [], "ended", "JobSet Completed"),
    ],
)
def test_how_it_stands(status, pods, word, detail, kube, launch_gke, workdir, capfd):
    assert launch_gke()[0] == 0
    kube.play(get=[{"status": status, "pods": pods}])
    code, out, _ = answered(asked.status, workdir, capfd=capfd)
    assert code == 0
    assert f"machines: {word} (" in out and detail in out
    assert "where: gke, context the-context, namespace default" in out


def test_a_jobset_that_is_gone_is_told(kube, workdir, capfd):
    record(workdir).write()
    code, out, _ = answered(asked.status, workdir, capfd=capfd)
    assert code == 0 and "machines: gone (no such JobSet)" in out


def test_what_a_host_said(kube, launch_gke, workdir, capfd):
    assert launch_gke()[0] == 0
    code, out, _ = answered(asked.logs, workdir, "--host", "3", capfd=capfd)
    assert (code, out) == (0, "said\n")
    assert kube.calls[-1][-4:] == [
        *("logs", "--selector=jobset.sigs.k8s.io/jobset-name=mini,"
          "batch.kubernetes.io/job-completion-index=3"),
        *("--container=run", "--tail=-1"),
    ]  # fmt: skip
    kube.play(logs=[{"code": 0, "out": "step 1\nstep 2\n"}])
    code, out, _ = answered(asked.logs, workdir, "--follow", capfd=capfd)
    assert (code, out) == (0, "step 1\nstep 2\n") and kube.calls[-1][-1] == "--follow"
    kube.play(logs=[{"code": 0}])
    assert "has said nothing, or waits" in answered(asked.logs, workdir, capfd=capfd)[2]


def test_a_host_that_there_is_not_and_logs_that_there_are_not(kube, launch_gke, workdir, capfd):
    assert launch_gke()[0] == 0
    code, _, err = answered(asked.logs, workdir, "--host", "4", capfd=capfd)
    assert code == 2 and "--host 4: mini has 4, from 0" in err
    kube.play(logs=[{"code": 1, "err": FORBIDDEN}])
    code, _, err = answered(asked.logs, workdir, capfd=capfd)
    assert code == 2 and "mini: Error from server (Forbidden)" in err
    kube.play(logs=[{"code": 1}])
    code, _, err = answered(asked.logs, workdir, "--follow", capfd=capfd)
    assert code == 1 and "mini: kubectl has ended with exit code 1; without --follow it" in err


def test_stop_has_the_pods_save_and_leaves_nothing(kube, launch_gke, workdir, capfd):
    assert launch_gke()[0] == 0
    code, _, err = answered(asked.stop, workdir, "--save-within", "90", capfd=capfd)
    assert code == 0 and "mini is deleted" in err and kube.holds == {}
    assert kube.calls[-1][2:] == [
        *("delete", "jobset,configmap", "mini", "--ignore-not-found", "--cascade=foreground"),
        "--timeout=90s",
    ]
    assert target.read(workdir).stopped


def test_ctrl_c_ends_what_is_followed(kube, launch_gke, workdir, capfd):
    assert launch_gke()[0] == 0
    kube.play(logs=[{"signal": signal.SIGINT}])
    code, _, err = answered(asked.logs, workdir, "--follow", capfd=capfd)
    assert code == 130 and err == "launch: interrupted\n"


def test_how_long_pods_may_save_is_told(capsys):
    with pytest.raises(SystemExit):
        asked.stop(["--help"])
    assert "on GKE its launch's --grace at most" in " ".join(capsys.readouterr().out.split())


def test_a_stop_that_does_not_come_to_its_end_says_what_may_be_left(
    kube, launch_gke, workdir, capfd
):
    assert launch_gke()[0] == 0
    kube.play(delete=[{"code": 1, "err": "error: timed out waiting\n"}, {"signal": signal.SIGINT}])
    for complaint in ("kubectl: error: timed out waiting", "interrupted"):
        code, _, err = answered(asked.stop, workdir, capfd=capfd)
        assert code == 2
        assert f"mini: may still be there and cost money ({complaint}); delete it with: " in err


def test_it_is_one_of_the_launchers():
    assert isinstance(target.of(record("gs://b/x")), gke_launched.Launched)
