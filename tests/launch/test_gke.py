"""Launches on GKE: what kubectl is asked for, and what its answers mean."""

import json
import os
import pathlib
import subprocess

import cluster
import pytest
import yaml

from bert_jax.errors import InputError
from launch import __main__, checks, gke, spec
from launch.commands import Done

pytestmark = pytest.mark.usefixtures("bucket")

FLAGS = ("--topology", "v5e:4x4", "--image", "registry.example/bert/bert-jax:1")
OK = Done(0, "", "")


def verb(argv: list[str]) -> str:
    return next(word for word in argv[1:] if not word.startswith("-"))


def verbs(answers) -> list[str]:
    return [verb(argv) for argv in answers.calls]


def applied(answers) -> list[dict]:
    """The objects of the newest manifest that was applied."""
    argv = [argv for argv in answers.calls if verb(argv) == "apply"][-1]
    objects = list(yaml.safe_load_all(pathlib.Path(argv[-1].partition("=")[2]).read_text()))
    for one in objects:
        cluster.validate(one)
    return objects


def there(sha256: str, **status) -> Done:
    """kubectl's answer about a JobSet."""
    annotations = {"bert-jax/config-sha256": sha256}
    return Done(0, json.dumps({"metadata": {"annotations": annotations}, "status": status}), "")


def test_a_launch_applies_a_valid_manifest_and_writes_its_record(answers, launch, workdir):
    place = ("--cluster", "c", "--zone", "z", "--project", "p", "--namespace", "n")
    more = ("--reservation", "ours", "--service-account", "me", "--grace", "60")
    code, shown = launch("gke", *FLAGS, *place, *more)
    assert code == 0 and "mini is launched: 4 pods on v5e:4x4" in shown
    assert verbs(answers) == ["get", "apply"]
    assert all(argv[1:3] == ["--context=gke_p_z_c", "--namespace=n"] for argv in answers.calls)
    config, jobset = applied(answers)
    pod = cluster.pod(jobset)
    assert pod["serviceAccountName"] == "me" and pod["terminationGracePeriodSeconds"] == 60
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "ours"
    assert cluster.environment(jobset, 0)["JAX_PLATFORMS"] == "tpu,cpu"
    assert json.loads(config["data"]["experiment.json"])["name"] == "mini"
    record = spec.find_record(workdir)
    assert (record.launcher, record.name, record.hosts) == ("gke", "mini", 4)
    assert record.place == {"context": "gke_p_z_c", "namespace": "n"}


def test_the_checks_come_first(answers, launch, monkeypatch):
    def check(*args):
        assert verbs(answers) == ["config"]
        raise InputError("the corpus is empty; --force doctor launches all the same")

    monkeypatch.setattr(checks, "check", check)
    code, shown = launch("gke", *FLAGS)
    assert code == 2 and "launch: the corpus is empty" in shown and verbs(answers) == ["config"]


def test_the_same_command_again_leaves_the_run_alone(answers, launch, workdir):
    assert launch("gke", *FLAGS)[0] == 0
    sha256 = spec.find_record(workdir).config_sha256
    answers.answer = lambda argv: there(sha256) if verb(argv) == "get" else OK
    code, shown = launch("gke", *FLAGS)
    assert code == 0 and "mini is there already, and goes on" in shown
    code, shown = launch("gke", *FLAGS, "--set", "seed=5")
    assert code == 2 and "mini: is there already, with another experiment" in shown
    assert verbs(answers).count("apply") == 1 and "delete" not in verbs(answers)


def test_the_same_experiment_in_another_workdir_is_not_taken_for_this_one(answers, launch, workdir):
    assert launch("gke", *FLAGS)[0] == 0
    sha256 = spec.find_record(workdir).config_sha256
    answers.answer = lambda argv: there(sha256) if verb(argv) == "get" else OK
    code, shown = launch("gke", *FLAGS, "--workdir", f"{workdir}/other")
    assert code == 2 and f"mini: is there already, and was not launched for {workdir}/o" in shown
    assert verbs(answers).count("apply") == 1 and spec.find_record(f"{workdir}/other") is None


def test_one_that_has_ended_makes_room(answers, launch):
    ended = there("0" * 64, terminalState="Failed")
    answers.answer = lambda argv: ended if verb(argv) == "get" else OK
    code, shown = launch("gke", *FLAGS)
    assert code == 0 and "mini has ended before (JobSet Failed)" in shown
    assert verbs(answers) == ["config", "get", "delete", "apply"]


def test_a_launch_of_another_name_is_not_forgotten(answers, launch, workdir):
    assert launch("gke", *FLAGS)[0] == 0
    code, shown = launch("gke", *FLAGS, "--name", "other")
    assert code == 2 and verbs(answers).count("apply") == 1
    assert f"`python -m launch stop {workdir}` first" in shown
    assert __main__.main(["stop", workdir]) == 0
    assert launch("gke", *FLAGS, "--name", "other")[0] == 0
    assert spec.find_record(workdir).name == "other"


@pytest.mark.parametrize(
    ("complaint", "remedy"),
    [
        ('error: no matches for kind "JobSet" in version', "the cluster has no JobSet; install"),
        ("Error from server (Forbidden): jobsets is forbidden", "ask for the role Kubernetes"),
        ("error: You must be logged in (Unauthorized)", "sign in with `gcloud auth login`"),
        ("The connection to the server 1.2.3.4 was refused", "is the cluster running"),
    ],
)
def test_a_cluster_that_refuses_is_quoted_with_what_to_do(
    complaint, remedy, answers, launch, workdir
):
    refused = Done(1, "", complaint + "\n")
    answers.answer = lambda argv: refused if verb(argv) == "apply" else OK
    code, shown = launch("gke", *FLAGS)
    assert code == 2 and f"launch: mini: not launched: {complaint}; " in shown and remedy in shown
    assert verbs(answers)[-2:] == ["apply", "delete"], "what was made is taken back"
    assert spec.find_record(workdir) is None
    answers.answer = lambda argv: refused if verb(argv) in ("apply", "delete") else OK
    code, shown = launch("gke", *FLAGS)
    assert code == 2 and f"mini: not launched: {complaint}; " in shown
    assert "mini: may still be there and cost money" in shown
    assert spec.find_record(workdir) is not None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--grace", "0"), "--grace 0: must be at least 1"),
        (("--image", "x:latest"), "--image x:latest: name one version of it"),
        (("--cluster", "c"), "name --cluster, --zone and --project together, or none of them"),
        (("--workdir", "runs/x"), "--workdir runs/x: rented machines share no disk"),
        (("--topology", "v2:4x4"), "--topology v2:4x4: GKE has no v2"),
        (("--force", "luck"), "--force luck: no such check"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags, message, answers, launch):
    code, shown = launch("gke", *FLAGS, *flags)
    assert code == 2 and f"launch: {message}" in shown and "apply" not in verbs(answers)


def test_status_logs_and_stop_are_kubectl_s(answers, launch, workdir, monkeypatch, capfd):
    assert launch("gke", *FLAGS)[0] == 0
    shown = []
    monkeypatch.setattr(gke, "show", lambda argv: shown.append(argv) or 0)
    assert __main__.main(["status", workdir]) == 0
    assert "mini: v5e:4x4, 4 hosts; gke" in capfd.readouterr().out
    assert __main__.main(["logs", workdir, "--host", "3", "--follow"]) == 0
    assert __main__.main(["logs", workdir, "--host", "4"]) == 2
    assert "--host 4: mini has hosts 0 to 3" in capfd.readouterr().err
    selector = "--selector=jobset.sigs.k8s.io/jobset-name=mini"
    assert [argv[2:] for argv in shown] == [
        ["get", "jobset", "mini", "--ignore-not-found", "--output=wide"],
        ["get", "pods", selector, "--output=wide"],
        [
            *("logs", f"{selector},batch.kubernetes.io/job-completion-index=3"),
            *("--container=run", "--tail=-1", "--follow"),
        ],
    ]
    answers.answer = lambda argv: Done(1, "", "error: timed out waiting\n")
    assert __main__.main(["stop", workdir]) == 2
    error = capfd.readouterr().err
    assert "mini: may still be there and cost money (kubectl: error: timed out" in error
    assert "delete jobset,configmap mini" in error and spec.find_record(workdir) is not None
    answers.answer = lambda argv: OK
    assert __main__.main(["stop", workdir]) == 0 and spec.find_record(workdir) is None
    assert __main__.main(["stop", workdir]) == 2
    assert "nothing is rented for it" in capfd.readouterr().err


def test_a_dry_run_is_a_script_that_launches_the_same(answers, launch, tmp_path):
    odd = ("--set", "corpus.sources=text:$(touch x) 'a' \"b\"", "--spot")
    code, script = launch("gke", *FLAGS, *odd, "--dry-run")
    assert code == 0 and answers.calls == []
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done >> {tmp_path}/words\n')
    program.chmod(0o755)
    path = f"{program.parent}:{os.environ['PATH']}"
    subprocess.run(["bash"], input=script.encode(), env=os.environ | {"PATH": path}, check=True)
    assert not pathlib.Path("x").exists()
    words = (tmp_path / "words").read_text().splitlines()
    manifest = pathlib.Path(words[-1].removeprefix("--filename="))
    by_script = manifest.read_text()
    manifest.unlink()
    assert launch("gke", *FLAGS, *odd)[0] == 0
    assert manifest.read_text() == by_script
    assert [argv[2:] for argv in answers.calls[1:]] == [words[1:6], words[7:]]
