"""Dry runs: the reviewed ones, and one that is run."""

import json
import os
import re
import subprocess

import golden_launch as golden
import pytest


@pytest.mark.parametrize("case", golden.CASES)
def test_a_dry_run_is_the_reviewed_one(case):
    reviewed = (golden.FOLDER / f"{case}.sh").read_text()
    assert golden.dry_run(case) == reviewed, "if meant: see golden_launch.py"


@pytest.mark.parametrize("case", ["quotes", "gke_bert_large_pod_v5e_8x8"])
def test_a_dry_run_starts_nothing_and_writes_nothing(monkeypatch, tmp_path, case):
    cache, programs = tmp_path / "cache", tmp_path / "bin"
    programs.mkdir()
    for name in ("gcloud", "kubectl", "git", "python"):
        (programs / name).write_text(f"#!/bin/sh\n: > {tmp_path}/started\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    script = golden.dry_run(case, str(cache))
    assert f"mkdir -p {cache}/launch/" in script, "what it would write"
    assert list(tmp_path.iterdir()) == [programs]


@pytest.mark.parametrize("case", golden.CASES)
def test_a_run_fails_without_its_tpus(case):
    """jax goes on with the processor unless it is told that it must not."""
    assert re.search(r"JAX_PLATFORMS(=|\n +value: )tpu,cpu\b", golden.dry_run(case))


def test_a_dry_run_is_a_script_that_does_what_the_launch_does(gcloud, tmp_path, monkeypatch):
    """The same calls as of a launch that goes well, and the same files."""
    script = golden.dry_run("quotes").replace("/cache", str(tmp_path))
    folder = tmp_path / "launch" / "quotes"
    for name in ("git", "tar", "python", "cp", "rm", "mkdir"):
        program = tmp_path / "bin" / name
        program.write_text('#!/bin/sh\n[ "$1" = -p ] && /bin/mkdir -p "$2"; exit 0\n')
        program.chmod(0o755)
    gcloud.play(hosts=1)
    subprocess.run(["bash", "-c", script], check=True, env=os.environ, cwd=tmp_path)
    assert gcloud.kinds == [
        *("create", "describe", "mkdir", "scp", "install.sh", "start.sh"),
        *("follow.sh", "state.sh", "describe", "delete"),
    ]
    assert gcloud.rented == {}
    config = json.loads((folder / "experiment.json").read_text())
    assert config["run"]["corpus_dir"] == """gs://BUCKET/a b's "$(rm -r /)" `id` \\ $HOME"""
