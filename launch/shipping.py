"""What hosts are given: the wheel of a commit, its constraints, and the scripts."""

import os
import pathlib
import shutil
import sys
import tarfile
from collections.abc import Callable

from etils import epath

import bert_jax
from bert_jax.errors import InputError
from bert_jax.storage.workdir import cache_folder, named_errors, write_atomic
from launch import checks, hosts, tools
from launch.spec import Spec

# In the staging folder, while the wheel is built.
ARCHIVE, SOURCE = "commit.tar", "source"

_GIT_SECONDS, _BUILD_SECONDS = 120.0, 900.0


def wheel_name() -> str:
    """Of the wheel of the checkout that this is."""
    return f"bert_jax-{bert_jax.__version__}-py3-none-any.whl"


def staging(name: str) -> pathlib.Path:
    """The folder here where the files of a launch are put together, in this machine's cache."""
    return pathlib.Path(os.fspath(cache_folder())) / "launch" / name


def archive_command(commit: str, archive: pathlib.Path) -> list[str]:
    """Packs the files of a commit: what is shipped is the commit, whatever else lies here."""
    return [
        *("git", "-C", os.fspath(checks.ROOT), "archive", "--format=tar"),
        f"--output={archive}",
        commit,
    ]


def wheel_command(source: pathlib.Path, target: pathlib.Path) -> list[str]:
    """Builds the wheel of a folder."""
    return [
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check"),
        *("--no-deps", "--wheel-dir", os.fspath(target), os.fspath(source)),
    ]


def put_together(spec: Spec, commit: str, say: Callable[[str], None]) -> list[str]:
    """Fills the staging folder.

    Args:
      spec: what is launched.
      commit: in hexadecimal.
      say: is told what is done.

    Returns:
      Paths of the files to copy to each host.

    Raises:
      InputError: the wheel cannot be built.
    """
    folder = staging(spec.name)
    archive, source = folder / ARCHIVE, folder / SOURCE
    with named_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    say(f"building the wheel of commit {commit[:12]}")
    _require(tools.run(archive_command(commit, archive), _GIT_SECONDS), f"commit {commit}")
    with tarfile.open(archive) as tar:
        tar.extractall(source, filter="data")
    _require(tools.run(wheel_command(source, folder), _BUILD_SECONDS), "the wheel")
    shutil.copy(source / hosts.CONSTRAINTS, folder)
    shutil.rmtree(source)
    archive.unlink()
    wheels = sorted(path.name for path in folder.glob("*.whl"))
    if len(wheels) != 1:
        raise InputError(f"{folder}: pip built {len(wheels)} wheels, not one")
    for name, text in hosts.files(spec, wheels[0]).items():
        write_atomic(epath.Path(folder / name), text)
    return [os.fspath(path) for path in sorted(folder.iterdir())]


def _require(done: tools.Done, what: str) -> None:
    if done.code:
        raise InputError(f"{what}: cannot be built ({done.complaint})")
