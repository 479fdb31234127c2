"""What pytest collects."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.long
def test_every_worker_collects_the_same_tests():
    """At another second and with other hashes: pytest-xdist ends a run whose workers differ."""

    def collected(hash_seed: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-n", "0", "--collect-only", "-m", ""],
            cwd=pathlib.Path(__file__).parents[1],
            env=os.environ | {"PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        return [line for line in done.stdout.splitlines() if "::" in line]

    first = collected("1")
    assert len(first) > 1000 and collected("2") == first
