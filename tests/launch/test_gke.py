"""Launches on GKE: the whole script, run by bash, with a cluster that is a folder."""

import io
import json
import os
import sys

import cluster
import pytest

from bert_jax import hardware
from launch import __main__, checks

FLAGS = ("--topology", "v5e:4x4", "--image", "registry.example/bert/bert-jax:1")

# `there` is the JobSet, `ended` what became of it, `refuse` the verb that fails.
KUBECTL = """\
#!/bin/bash
cd "$FAKE_CLOUD"
for word in "$@"; do
  case $word in
    get | apply | delete) verb=$word ;;
    --filename=*) file=${word#*=} ;;
    --output=*) output=${word#*=} ;;
  esac
done
echo "$verb $*" >> calls
if [ "$verb" = "$(cat refuse 2> /dev/null)" ]; then
  echo "error: no matches for kind" >&2; exit 1
fi
case $verb in
  apply) cp "$file" there ;;
  delete) rm -f there ended ;;
  get) if [ -f there ]; then
      if [ "$output" = name ]; then echo jobset/mini; else cat ended 2> /dev/null || true; fi
    fi ;;
esac
"""


@pytest.fixture
def cloud(programs):
    return programs("kubectl", KUBECTL)


def verbs(cloud) -> list[str]:
    done = [line.split()[0] for line in (cloud / "calls").read_text().splitlines()]
    return [verb for verb in done if verb != "get"]


def test_a_launch_applies_a_valid_manifest(cloud, launch):
    place = ("--cluster", "c", "--zone", "z", "--project", "p", "--namespace", "n")
    more = ("--reservation", "ours", "--service-account", "me", "--grace", "60")
    odd = ("--set", "corpus.sources=text:$(touch x) 'a' \"b\"")
    code, shown = launch("gke", *FLAGS, *place, *more, *odd)
    assert code == 0 and "mini is launched" in shown and verbs(cloud) == ["apply"]
    calls = (cloud / "calls").read_text().splitlines()
    assert all("--context=gke_p_z_c --namespace=n" in line for line in calls)
    config, jobset = cluster.read((cloud / "there").read_text())
    cluster.validate(config), cluster.validate(jobset)
    pod = cluster.pod(jobset)
    assert pod["serviceAccountName"] == "me" and pod["terminationGracePeriodSeconds"] == 60
    assert pod["nodeSelector"]["cloud.google.com/reservation-name"] == "ours"
    assert cluster.environment(jobset, 0)["JAX_PLATFORMS"] == "tpu,cpu"
    shipped = json.loads(config["data"]["experiment.json"])
    assert shipped["corpus"]["sources"] == ["text:$(touch x) 'a' \"b\""]
    assert not (cloud / "x").exists()


def test_what_doctor_says_is_written_before_a_script_takes_our_place(programs, monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw))
    monkeypatch.setattr(checks, "run_checks", lambda *given: print("a finding"))
    monkeypatch.setattr(os, "execvp", lambda *argv: raw.getvalue())
    given = ["gke", "experiments/mini.py", "--workdir", "gs://b/x", *FLAGS]
    assert __main__.main(given) == b"a finding\n"


def test_the_same_again_goes_on_and_one_that_has_ended_makes_room(cloud, launch):
    assert launch("gke", *FLAGS)[0] == launch("gke", *FLAGS)[0] == 0
    assert verbs(cloud) == ["apply", "apply"], "which changes nothing"
    (cloud / "ended").write_text("Failed")
    code, shown = launch("gke", *FLAGS)
    assert code == 0 and "mini has ended before (JobSet Failed)" in shown
    assert verbs(cloud)[2:] == ["delete", "apply"]
    (cloud / "ended").write_text("Completed")
    (cloud / "refuse").write_text("apply")
    assert launch("gke", *FLAGS)[0] == 2 and verbs(cloud)[4:] == ["delete", "apply", "delete"]


def test_what_a_cluster_refuses_is_taken_back_and_what_goes_on_is_not(cloud, launch):
    (cloud / "refuse").write_text("apply")
    code, shown = launch("gke", *FLAGS)
    assert code == 2 and "no matches for kind" in shown and verbs(cloud) == ["apply", "delete"]
    (cloud / "there").write_text("another experiment of this name")
    assert launch("gke", *FLAGS)[0] == 2 and (cloud / "there").exists()


@pytest.mark.parametrize(
    "flags",
    [
        ("--grace", "0"),
        ("--image", "x:latest"),
        ("--cluster", "c"),
        ("--workdir", "runs/x"),
        ("--topology", "v2:4x4"),
        ("--force", "luck"),
        ("--name", "Mini"),
        ("--set", "run.nothing=1"),
    ],
)
def test_a_flag_that_cannot_be_used_is_named(flags, cloud, launch):
    code, shown = launch("gke", *FLAGS, *flags)
    assert code == 2 and flags[0] in shown and not (cloud / "calls").exists()


def test_a_slice_that_does_not_exist_is_refused_with_those_that_do(cloud, launch):
    code, shown = launch("gke", *FLAGS, "--topology", "tpu7x:3x3x3")
    assert code == 2 and "--topology tpu7x:3x3x3" in shown and not (cloud / "calls").exists()
    for shape in hardware.TPUS["tpu7x"].slices:
        assert f"tpu7x:{shape}" in shown
