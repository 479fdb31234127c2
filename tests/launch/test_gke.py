"""Launches on GKE, against a kubectl that plays what can go wrong."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import cluster
import pytest

from bert_jax.config import InputError
from bert_jax.plan import topology
from launch import __main__, asked, checks, gke, gke_launched, jobset, kubectl, spec, target

pytestmark = pytest.mark.usefixtures("bucket")

FAKE = pathlib.Path(__file__).with_name("fake_kubectl.py")
NAME, IMAGE = "mini", "r/bert-jax:1"
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


class Kubectl:
    """What tests see of the fake."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder

    def play(self, **answers: list[dict]) -> None:
        """Answers to come, by verb."""
        (self.folder / "play.json").write_text(json.dumps(answers))

    @property
    def calls(self) -> list[list[str]]:
        path = self.folder / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def verbs(self) -> list[str]:
        """Of the calls, in order."""
        words = [[word for word in call if not word.startswith("-")] for call in self.calls]
        return ["pods" if word[:2] == ["get", "pods"] else word[0] for word in words]

    @property
    def holds(self) -> dict:
        """What the cluster holds, by kind."""
        return json.loads((self.folder / "cluster.json").read_text())


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """A kubectl on the path, of a cluster that holds nothing, where all goes well."""
    folder, programs = tmp_path / "kubectl", tmp_path / "bin"
    folder.mkdir()
    programs.mkdir()
    program = programs / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    program.chmod(0o755)
    (folder / "cluster.json").write_text("{}")
    (folder / "play.json").write_text("{}")
    monkeypatch.setenv("FAKE_KUBECTL", str(folder))
    monkeypatch.setenv("PATH", str(programs), prepend=":")
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    # A worker of pytest's may leave Ctrl-C to its parent.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield Kubectl(folder)
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def workdir(request):
    return f"gs://b/{request.node.name.partition('[')[0]}"


@pytest.fixture
def launch(workdir, capfd):
    """Launches; returns the exit code and what was said."""

    def run(*flags: str) -> tuple[int, str]:
        argv = ["experiments/mini.py", "--workdir", workdir, "--topology", "v5e:4x4"]
        argv += ["--image", IMAGE, "--name", NAME, "--force", ",".join(checks.NAMES)]
        code = gke.main([*argv, *flags])
        said = capfd.readouterr()
        return code, said.out + said.err

    return run


def record(workdir: str, **more) -> target.Record:
    """Of a launch before."""
    given = {
        "target": "gke",
        "name": NAME,
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


def test_a_launch_that_goes_well(fake, launch, workdir):
    code, said = launch()
    assert code == 0 and "mini is launched: 4 pods on v5e:4x4" in said
    assert fake.verbs == ["config", "get", "apply"]
    assert set(fake.holds) == {"ConfigMap", "JobSet"}
    wanted = spec.specify(
        "experiments/mini.py",
        (),
        workdir=workdir,
        topology=topology.parse("v5e:4x4"),
        name=NAME,
        retries=10,
    )
    pods = jobset.Pods(
        image=IMAGE,
        namespace="default",
        service_account="",
        capacity={},
        grace=300,
        privileged=False,
    )
    assert fake.holds["ConfigMap"] == jobset.objects(wanted, pods)[0]
    found = target.read(workdir)
    assert (found.target, found.name, found.hosts) == ("gke", NAME, 4)
    assert found.place == {"context": "the-context", "namespace": "default"}
    assert target.read(str(pathlib.Path(os.environ["BERT_JAX_CACHE_DIR"], "launch", NAME))) == found


def test_flags_reach_the_cluster(fake, launch):
    place = ("--cluster", "c", "--zone", "z", "--project", "p", "--namespace", "n")
    code, _ = launch(*place, "--reservation", "ours", "--service-account", "me", "--grace", "60")
    assert code == 0 and fake.verbs == ["get", "apply"]
    for call in fake.calls:
        assert call[:2] == ["--context=gke_p_z_c", "--namespace=n"]
    pod = cluster.pod(fake.holds["JobSet"])
    assert pod["serviceAccountName"] == "me" and pod["terminationGracePeriodSeconds"] == 60
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "ours"


def test_the_checks_come_first(fake, launch, monkeypatch):
    def check(*args):
        assert fake.verbs == ["config"]
        raise InputError("the corpus is empty; --force doctor launches all the same")

    monkeypatch.setattr(checks, "check", check)
    code, said = launch()
    assert code == 2 and "launch: the corpus is empty" in said
    assert fake.verbs == ["config"] and fake.holds == {}


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        (
            {"config": [{"code": 1, "err": "error: current-context is not set\n"}]},
            "kubectl: error: current-context is not set; name the --cluster, its --zone",
        ),
        (
            {"get": [{"code": 1, "err": "Unable to connect to the server: dial tcp: i/o timeout"}]},
            "mini: Unable to connect to the server: dial tcp: i/o timeout; is the cluster running",
        ),
        (
            {"get": [{"code": 1, "err": 'error: context "the-context" does not exist\n'}]},
            "does not exist; `gcloud container clusters get-credentials` the cluster",
        ),
        (
            {"get": [{"code": 1, "err": "error: the server doesn't have a resource type x\n"}]},
            "the cluster has no JobSet; install it",
        ),
        ({"get": [{"code": 0, "out": "Hello!"}]}, "mini: kubectl does not answer with JSON"),
    ],
)
def test_no_cluster(answers, said, fake, launch):
    fake.play(**answers)
    code, shown = launch()
    assert code == 2 and said in shown
    assert "apply" not in fake.verbs and fake.holds == {}


def test_no_kubectl(fake, launch, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    code, said = launch()
    assert code == 2 and "kubectl: cannot be run (No such file or directory); install it" in said


@pytest.mark.parametrize(
    ("made", "error", "said"),
    [
        ([], FORBIDDEN, "; you may not do this; ask for the role Kubernetes Engine Developer"),
        (
            ["ConfigMap"],
            'Error from server (Forbidden): jobsets "mini" is forbidden: exceeded quota: x\n',
            "; the namespace's quota is used up; raise it, or name another --namespace",
        ),
        (
            ["ConfigMap"],
            'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"\n',
            "; the cluster has no JobSet; install it, see docs/running_on_tpu.md",
        ),
        (["ConfigMap", "JobSet"], "", "mini: not launched: exit code 1"),
    ],
)
def test_a_manifest_that_is_refused_leaves_nothing(made, error, said, fake, launch):
    fake.play(apply=[{"code": 1, "err": error, "made": made}])
    code, shown = launch()
    assert code == 2 and f"mini: not launched: {error.strip()}" in shown and said in shown
    assert fake.verbs == ["config", "get", "apply", "delete"] and fake.holds == {}


def test_what_cannot_be_taken_back_is_named(fake, launch):
    fake.play(
        apply=[{"code": 1, "err": FORBIDDEN, "made": ["ConfigMap"]}],
        delete=[{"code": 1, "err": "Unable to connect to the server: EOF\n"}],
    )
    code, said = launch()
    assert code == 2 and "forbidden" in said
    assert "mini: may still be there and cost money (kubectl: Unable to connect" in said
    assert "delete it with: kubectl --context=the-context --namespace=default delete" in said


def test_ctrl_c_while_it_is_applied_leaves_nothing(fake, launch):
    fake.play(apply=[{"signal": signal.SIGINT}])
    code, said = launch()
    assert code == 130 and "launch: interrupted" in said
    assert fake.verbs[-1] == "delete" and fake.holds == {}


def test_one_that_runs_is_left_alone(fake, launch, workdir):
    assert launch()[0] == 0
    code, said = launch()
    assert code == 2
    assert f"mini: is there already (4 of 4 pods run); `python -m launch stop {workdir}`" in said
    assert fake.verbs.count("apply") == 1 and "delete" not in fake.verbs
    assert set(fake.holds) == {"ConfigMap", "JobSet"}


def test_one_of_somebody_else_is_left_alone(fake, launch, workdir):
    assert launch("--workdir", f"{workdir}/other")[0] == 0
    code, said = launch()
    assert code == 2 and "was not launched for" in said and "name another with --name" in said
    assert fake.verbs.count("apply") == 1 and "delete" not in fake.verbs


def test_one_that_has_ended_makes_room(fake, launch):
    assert launch()[0] == 0
    fake.play(get=[{"status": FAILED}])
    code, said = launch("--set", "run.log_every=7")
    assert code == 0 and "mini has ended before (JobSet Failed: jobset failed" in said
    assert fake.verbs == ["config", "get", "apply", "config", "get", "delete", "apply"]
    assert '"log_every": 7' in fake.holds["ConfigMap"]["data"]["experiment.json"]


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--grace", "0"), "--grace 0: must be at least 1"),
        (("--image", "x:latest"), "--image x:latest: name one version of it"),
        (("--cluster", "c"), "name --cluster, --zone and --project together, or none of them"),
        (("--workdir", "runs/x"), "--workdir runs/x: rented machines share no disk"),
        (("--topology", "v2:4x4"), "--topology v2:4x4: GKE has no v2"),
        (("--force", "luck"), "--force luck: no such check"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags, said, fake, launch):
    code, shown = launch(*flags)
    assert code == 2 and f"launch: {said}" in shown
    assert "apply" not in fake.verbs


def test_a_dry_run_asks_nobody_and_is_a_script_that_launches_the_same(fake, launch, tmp_path):
    odd = ("--set", "corpus.sources=text:$(touch x) 'a' \"b\"", "--spot")
    code, script = launch(*odd, "--dry-run")
    assert code == 0 and fake.calls == [] and fake.holds == {}
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "x").exists()
    by_script = fake.holds
    (fake.folder / "cluster.json").write_text("{}")
    assert launch(*odd)[0] == 0
    assert fake.holds == by_script
    assert fake.verbs == ["get", "apply", "config", "get", "apply"]


# --- Asked later ---


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
def test_how_it_stands(status, pods, word, detail, fake, launch, workdir, capfd):
    assert launch()[0] == 0
    fake.play(get=[{"status": status, "pods": pods}])
    code, out, _ = answered(asked.status, workdir, capfd=capfd)
    assert code == 0
    assert f"machines: {word} (" in out and detail in out
    assert "where: gke, context the-context, namespace default" in out


def test_a_jobset_that_is_gone_is_told(fake, workdir, capfd):
    record(workdir).write()
    code, out, _ = answered(asked.status, workdir, capfd=capfd)
    assert code == 0 and "machines: gone (no such JobSet)" in out


def test_what_a_host_said(fake, launch, workdir, capfd):
    assert launch()[0] == 0
    code, out, _ = answered(asked.logs, workdir, "--host", "3", capfd=capfd)
    assert (code, out) == (0, "said\n")
    assert fake.calls[-1][-4:] == [
        *("logs", "--selector=jobset.sigs.k8s.io/jobset-name=mini,"
          "batch.kubernetes.io/job-completion-index=3"),
        *("--container=run", "--tail=-1"),
    ]  # fmt: skip
    fake.play(logs=[{"code": 0, "out": "step 1\nstep 2\n"}])
    code, out, _ = answered(asked.logs, workdir, "--follow", capfd=capfd)
    assert (code, out) == (0, "step 1\nstep 2\n") and fake.calls[-1][-1] == "--follow"
    fake.play(logs=[{"code": 0}])
    assert "has said nothing, or waits" in answered(asked.logs, workdir, capfd=capfd)[2]


def test_a_host_that_there_is_not_and_logs_that_there_are_not(fake, launch, workdir, capfd):
    assert launch()[0] == 0
    code, _, err = answered(asked.logs, workdir, "--host", "4", capfd=capfd)
    assert code == 2 and "--host 4: mini has 4, from 0" in err
    fake.play(logs=[{"code": 1, "err": FORBIDDEN}])
    code, _, err = answered(asked.logs, workdir, capfd=capfd)
    assert code == 2 and "mini: Error from server (Forbidden)" in err
    fake.play(logs=[{"code": 1}])
    assert answered(asked.logs, workdir, "--follow", capfd=capfd)[0] == 1


def test_stop_has_the_pods_save_and_leaves_nothing(fake, launch, workdir, capfd):
    assert launch()[0] == 0
    code, _, err = answered(asked.stop, workdir, "--save-within", "90", capfd=capfd)
    assert code == 0 and "mini is deleted" in err and fake.holds == {}
    assert fake.calls[-1][2:] == [
        *("delete", "jobset,configmap", "mini", "--ignore-not-found", "--cascade=foreground"),
        "--timeout=90s",
    ]
    assert target.read(workdir).stopped


def test_a_stop_that_does_not_come_to_its_end_says_what_may_be_left(fake, launch, workdir, capfd):
    assert launch()[0] == 0
    fake.play(delete=[{"code": 1, "err": "error: timed out waiting\n"}, {"signal": signal.SIGINT}])
    for complaint in ("kubectl: error: timed out waiting", "interrupted"):
        code, _, err = answered(asked.stop, workdir, capfd=capfd)
        assert code == 2
        assert f"mini: may still be there and cost money ({complaint}); delete it with: " in err


def test_kubectl_hangs(fake, monkeypatch):
    monkeypatch.setattr(kubectl, "QUICK", 0.3)
    program = fake.folder.parent / "bin" / "kubectl"
    program.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(InputError, match="kubectl: exit code 124"):
        kubectl.context("", "", "")


def test_it_is_one_of_the_launchers():
    assert __main__.COMMANDS["gke"] == ("launch.gke", "main")
    assert isinstance(gke.target(record("gs://b/x")), gke_launched.Launched)
