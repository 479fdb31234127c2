"""What pytest collects."""

import os
import pathlib
import subprocess
import sys

import pytest


@pytest.mark.nightly
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


@pytest.mark.long
def test_a_worker_that_dies_ends_the_run_with_its_reason(tmp_path):
    """Four files, so that pytest-xdist would have work for a worker in its place."""
    root = pathlib.Path(__file__).parents[1]
    (tmp_path / "conftest.py").symlink_to(root / "tests" / "conftest.py")
    for name in "abcd":
        (tmp_path / f"test_{name}.py").write_text("def test_passes():\n    pass\n")
    dying = "import os\n\n\ndef test_dies():\n    os.kill(os.getpid(), 9)\n"
    (tmp_path / "test_b.py").write_text(dying)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-c", root / "pyproject.toml", "--rootdir", tmp_path, "."],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(root / "tests")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "test_b.py::test_dies" in done.stdout
    assert "ended with -9" in done.stderr
