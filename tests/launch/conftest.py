"""A checkout, programs that stand for a cloud's, and a launch: no cloud is reached."""

import os
import subprocess
import sys

import pytest

from launch import __main__, checks


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
def programs(tmp_path, monkeypatch):
    """Writes programs that come first on the path; `FAKE_CLOUD` is their folder."""
    folder, cloud = tmp_path / "bin", tmp_path / "cloud"
    for path in (folder, cloud):
        path.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    monkeypatch.setenv("FAKE_CLOUD", str(cloud))
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))

    def write(name: str, text: str):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
        return cloud

    return write


@pytest.fixture
def launch(monkeypatch, capfd):
    """Launches an experiment; returns the exit code and what was printed.

    Its `started` holds the processes of its scripts, which take a launch's place.
    """

    def become(program: str, argv: list[str]):
        run.started.append(subprocess.Popen(argv))
        sys.exit(run.started[-1].wait())

    monkeypatch.setattr(os, "execvp", become)

    def run(launcher: str, *flags: str) -> tuple[int, str]:
        argv = [launcher, "experiments/mini.py", "--workdir", "gs://b/x", "--name", "mini"]
        try:
            code = __main__.main([*argv, "--force", ",".join(checks.NAMES), *flags])
        except SystemExit as ended:
            code = ended.code
        shown = capfd.readouterr()
        return code, shown.out + shown.err

    run.started = []
    return run
