"""Launches on GKE, against a kubectl that plays what can go wrong."""

import os
import pathlib
import signal
import subprocess

import cluster
import pytest
from conftest import GKE_IMAGE

from bert_jax.errors import InputError
from bert_jax.plan import topology
from launch import __main__, arguments, checks, jobset, kubectl, spec, target

pytestmark = pytest.mark.usefixtures("bucket")

NAME = "mini"
FORBIDDEN = 'Error from server (Forbidden): jobsets is forbidden: User "me" cannot create\n'


def test_a_launch_that_goes_well(kube, launch_gke, workdir):
    code, said = launch_gke()
    assert code == 0 and "mini is launched: 4 pods on v5e:4x4" in said
    assert kube.verbs == ["config", "get", "apply"]
    assert set(kube.holds) == {"ConfigMap", "JobSet"}
    wanted = spec.specify(
        "experiments/mini.py",
        (),
        workdir=workdir,
        topology=topology.parse("v5e:4x4"),
        name=NAME,
        retries=10,
        environment=arguments.ENVIRONMENT,
    )
    pods = jobset.Pods(
        image=GKE_IMAGE,
        namespace="default",
        service_account="",
        capacity={},
        grace=300,
        privileged=False,
    )
    config, made = jobset.objects(wanted, pods)
    assert kube.holds["ConfigMap"] == config and kube.holds["JobSet"]["spec"] == made["spec"]
    found = target.read(workdir)
    assert (found.target, found.name, found.hosts) == ("gke", NAME, 4)
    assert found.place == {"context": "the-context", "namespace": "default"}
    assert target.read(str(pathlib.Path(os.environ["BERT_JAX_CACHE_DIR"], "launch", NAME))) == found


def test_flags_reach_the_cluster(kube, launch_gke):
    place = ("--cluster", "c", "--zone", "z", "--project", "p", "--namespace", "n")
    code, _ = launch_gke(
        *place, "--reservation", "ours", "--service-account", "me", "--grace", "60"
    )
    assert code == 0 and kube.verbs == ["get", "apply"]
    for call in kube.calls:
        assert call[:2] == ["--context=gke_p_z_c", "--namespace=n"]
    pod = cluster.pod(kube.holds["JobSet"])
    assert pod["serviceAccountName"] == "me" and pod["terminationGracePeriodSeconds"] == 60
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "ours"


def test_the_checks_come_first(kube, launch_gke, monkeypatch):
    def check(*args):
        assert kube.verbs == ["config"]
        raise InputError("the corpus is empty; --force doctor launches all the same")

    monkeypatch.setattr(checks, "check", check)
    code, said = launch_gke()
    assert code == 2 and "launch: the corpus is empty" in said
    assert kube.verbs == ["config"] and kube.holds == {}


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
def test_no_cluster(answers, said, kube, launch_gke):
    kube.play(**answers)
    code, shown = launch_gke()
    assert code == 2 and said in shown
    assert "apply" not in kube.verbs and kube.holds == {}


def test_no_kubectl(kube, launch_gke, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    code, said = launch_gke()
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
        (["ConfigMap", "JobSet"], "", "mini: not launched: exit code 1"),
    ],
)
def test_a_manifest_that_is_refused_leaves_nothing(made, error, said, kube, launch_gke):
    kube.play(apply=[{"code": 1, "err": error, "made": made}])
    code, shown = launch_gke()
    assert code == 2 and f"mini: not launched: {error.strip()}" in shown and said in shown
    assert kube.verbs == ["config", "get", "apply", "delete"] and kube.holds == {}


def test_without_the_jobset_kind_the_configmap_is_taken_back(kube, launch_gke):
    """kubectl deletes nothing of what it is told to if it does not know one of the kinds."""
    refused = 'error: no matches for kind "JobSet" in version "jobset.x-k8s.io/v1alpha2"\n'
    unknown = 'error: the server doesn\'t have a resource type "jobset"\n'
    kube.play(
        apply=[{"code": 1, "err": refused, "made": ["ConfigMap"]}],
        delete=[{"code": 1, "err": unknown}],
    )
    code, said = launch_gke()
    assert code == 2 and kube.holds == {}
    assert "mini: not launched: error: no matches for kind" in said
    assert "; the cluster has no JobSet; install it, see docs/running_on_tpu.md" in said
    assert "may still be there" not in said


def test_what_cannot_be_taken_back_is_named(kube, launch_gke):
    kube.play(
        apply=[{"code": 1, "err": FORBIDDEN, "made": ["ConfigMap"]}],
        delete=[{"code": 1, "err": "Unable to connect to the server: EOF\n"}],
    )
    code, said = launch_gke()
    assert code == 2 and "forbidden" in said
    assert "mini: may still be there and cost money (kubectl: Unable to connect" in said
    assert "delete it with: kubectl --context=the-context --namespace=default delete" in said


def test_ctrl_c_while_it_is_applied_leaves_nothing(kube, launch_gke):
    kube.play(apply=[{"signal": signal.SIGINT}])
    code, said = launch_gke()
    assert code == 130 and "launch: interrupted" in said
    assert kube.verbs[-1] == "delete" and kube.holds == {}


def test_one_that_runs_is_left_alone(kube, launch_gke, workdir):
    assert launch_gke()[0] == 0
    code, said = launch_gke()
    assert code == 2
    assert f"mini: is there already (4 of 4 pods run); `python -m launch stop {workdir}`" in said
    assert kube.verbs.count("apply") == 1 and "delete" not in kube.verbs
    assert set(kube.holds) == {"ConfigMap", "JobSet"}


def test_one_of_somebody_else_is_left_alone(kube, launch_gke, workdir):
    assert launch_gke("--workdir", f"{workdir}/other")[0] == 0
    code, said = launch_gke()
    assert code == 2 and "was not launched for" in said and "name another with --name" in said
    assert kube.verbs.count("apply") == 1 and "delete" not in kube.verbs


def test_pods_of_another_name_are_not_forgotten(kube, launch_gke, workdir):
    assert launch_gke()[0] == 0
    code, said = launch_gke("--name", "other")
    assert code == 2 and kube.verbs.count("apply") == 1
    assert "mini: is still there for this workdir (4 of 4 pods run)" in said
    assert f"`python -m launch stop {workdir}` first" in said
    assert target.read(workdir).name == "mini"
    (kube.folder / "cluster.json").write_text("{}")
    assert launch_gke("--name", "other")[0] == 0
    assert target.read(workdir).name == "other"


def test_one_that_has_ended_makes_room(kube, launch_gke):
    assert launch_gke()[0] == 0
    failed = {"type": "Failed", "message": "jobset failed"}
    kube.play(get=[{"status": {"terminalState": "Failed", "conditions": [failed]}}])
    code, said = launch_gke("--set", "run.log_every=7")
    assert code == 0 and "mini has ended before (JobSet Failed: jobset failed" in said
    assert kube.verbs == ["config", "get", "apply", "config", "get", "delete", "apply"]
    assert '"log_every": 7' in kube.holds["ConfigMap"]["data"]["experiment.json"]


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
def test_a_flag_that_cannot_be_used_is_named(flags, said, kube, launch_gke):
    code, shown = launch_gke(*flags)
    assert code == 2 and f"launch: {said}" in shown
    assert "apply" not in kube.verbs


def test_a_dry_run_asks_nobody_and_is_a_script_that_launches_the_same(kube, launch_gke, tmp_path):
    odd = ("--set", "corpus.sources=text:$(touch x) 'a' \"b\"", "--spot")
    code, script = launch_gke(*odd, "--dry-run")
    assert code == 0 and kube.calls == [] and kube.holds == {}
    done = subprocess.run(["bash"], input=script.encode(), capture_output=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "x").exists()
    by_script = kube.holds
    (kube.folder / "cluster.json").write_text("{}")
    assert launch_gke(*odd)[0] == 0
    assert kube.holds == by_script
    assert kube.verbs == ["get", "apply", "config", "get", "apply"]


def test_kubectl_hangs(kube, monkeypatch):
    monkeypatch.setattr(kubectl, "QUICK", 0.3)
    program = kube.folder.parent / "bin" / "kubectl"
    program.write_text("#!/bin/sh\nsleep 60\n")
    with pytest.raises(InputError, match="kubectl: exit code 124"):
        kubectl.context("", "", "")


def test_it_is_one_of_the_launchers():
    assert __main__.COMMANDS["gke"] == ("launch.gke", "main")
