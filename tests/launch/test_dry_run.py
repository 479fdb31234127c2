"""Dry runs: the reviewed ones, and that they do nothing."""

import re

import golden_launch as golden
import pytest


@pytest.mark.parametrize("case", golden.CASES)
def test_a_dry_run_is_the_reviewed_one(case):
    wanted = (golden.FOLDER / f"{case}.sh").read_text()
    assert golden.reviewed(case) == wanted, "if meant: see golden_launch.py"


@pytest.mark.parametrize("case", golden.CASES)
def test_a_dry_run_starts_nothing_and_writes_nothing(monkeypatch, tmp_path, case):
    cache, programs = tmp_path / "cache", tmp_path / "bin"
    programs.mkdir()
    for name in ("gcloud", "kubectl", "git", "python"):
        (programs / name).write_text(f"#!/bin/sh\n: > {tmp_path}/started\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(programs))
    script = golden.dry_run(case, str(cache))
    assert f"{cache}/launch/" in script, "what it would write"
    # jax goes on with the processor unless it must not.
    assert re.search(r"JAX_PLATFORMS(=|\n +value: )tpu,cpu\b", script)
    assert list(tmp_path.iterdir()) == [programs]
