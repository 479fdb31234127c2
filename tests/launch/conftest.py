"""A bucket, a checkout, and what stands for kubectl: launches reach no cloud."""

import importlib.util
import os
import subprocess
from collections.abc import Callable

import fake_gcs
import fsspec
import pytest

from launch import __main__, checks, gke
from launch.commands import Done


@pytest.fixture(scope="module")
def bucket():
    """Objects of a server in memory, by name."""
    if importlib.util.find_spec("gcsfs") is None:  # its import reads the environment
        pytest.skip("needs the [gcs] extra")
    with fake_gcs.serve() as (objects, environment), pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        patch.setitem(fsspec.config.conf["gs"], "token", "anon")
        yield objects


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout of one commit, with constraints."""
    monkeypatch.setattr(checks, "ROOT", tmp_path / "checkout")
    checks.ROOT.mkdir()
    (checks.ROOT / "constraints.txt").write_text("committed\n")
    author = ("-c", "user.name=n", "-c", "user.email=e")
    for words in (["init", "-q"], ["add", "."], [*author, "commit", "-q", "-m", "one"]):
        git = ["git", "-C", os.fspath(checks.ROOT), *words]
        subprocess.run(git, check=True)
    return checks.ROOT


@pytest.fixture
def workdir(request):
    """Of a test's own, in the bucket."""
    return f"gs://b/{request.node.name.partition('[')[0]}"


class Answers:
    """What stands for `commands.run`.

    Attributes:
      calls: the commands, in order.
      answer: gives each its `Done`.
    """

    def __init__(self):
        self.calls: list[list[str]] = []
        self.answer: Callable[[list[str]], Done] = lambda argv: Done(0, "", "")

    def run(self, argv: list[str], seconds: float) -> Done:
        self.calls.append(list(argv))
        return self.answer(argv)


@pytest.fixture
def answers(tmp_path, monkeypatch):
    """Has commands of others answered."""
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    fake = Answers()
    monkeypatch.setattr(gke, "run", fake.run)
    return fake


@pytest.fixture
def launch(bucket, workdir, capfd):
    """Launches an experiment; returns the exit code and what was printed."""

    def run(launcher: str, *flags: str) -> tuple[int, str]:
        argv = [launcher, "experiments/mini.py", "--workdir", workdir, "--name", "mini"]
        code = __main__.main([*argv, "--force", ",".join(checks.NAMES), *flags])
        shown = capfd.readouterr()
        return code, shown.out + shown.err

    return run
