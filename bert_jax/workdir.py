"""Where a run keeps its files, and the few rules by which files are written.

A file is written beside its place and renamed, so that a reader sees the old text or the new. A
folder counts only once it holds COMPLETE, which is written last; one without is rebuilt.

    W/experiment.json       the resolved experiment
    W/corpus/               the prepared corpus (see data.corpus)
    W/checkpoints/          one folder a step (see training.checkpoint)
    W/metrics.jsonl         what was computed: a function of experiment, corpus and step alone
    W/predictions.jsonl     what the model said of a few fixed sentences, as exact as the metrics
    W/timings.jsonl         how long it took
    W/origin.json           which experiment file and --set strings the last start was given
"""

import contextlib
import errno
import fcntl
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from bert_jax.config import InputError

COMPLETE = "COMPLETE"


class Workdir:
    """Names of the files of one run."""

    def __init__(self, root: str | epath.PathLike, corpus_dir: str = ""):
        self.root = epath.Path(root)
        self.experiment = self.root / "experiment.json"
        self.corpus = epath.Path(corpus_dir) if corpus_dir else self.root / "corpus"
        self.checkpoints = self.root / "checkpoints"
        self.metrics = self.root / "metrics.jsonl"
        self.predictions = self.root / "predictions.jsonl"
        self.timings = self.root / "timings.jsonl"
        self.origin = self.root / "origin.json"
        self.report = self.root / "report.html"

    def create(self) -> None:
        """Makes the folder.

        Raises:
          InputError: it cannot be written, or holds other things and no run.
        """
        with named_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in self.root.iterdir()}
        ours = {
            "experiment.json",
            "corpus",
            "checkpoints",
            "metrics.jsonl",
            "timings.jsonl",
            "lock",
        }
        if names and not names & ours:
            raise InputError(
                f"{self.root}: holds other files and no run; choose another folder with --workdir"
            )


def write_atomic(path: epath.Path, text: str) -> None:
    """Replaces the file's text in one step, flushed to disk."""
    with named_errors(path):
        beside = path.parent / f".{path.name}.{os.getpid()}.tmp"
        with beside.open("w") as file:
            file.write(text)
            file.flush()
            with contextlib.suppress(AttributeError, OSError):
                os.fsync(file.fileno())
        beside.replace(path)


def read_json(path: epath.Path, format_version: int) -> dict[str, Any]:
    """Reads a JSON object that carries `format_version`.

    Raises:
      InputError: unreadable, not a JSON object, or of another format version.
    """
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path}: not readable as JSON ({error}); is it damaged?") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: expected a JSON object")
    if value.get("format_version") != format_version:
        raise InputError(
            f"{path}: format_version {value.get('format_version')!r}, "
            f"this version reads {format_version}"
        )
    return value


def mark_complete(folder: epath.Path) -> None:
    """Says that the folder holds all it should."""
    write_atomic(folder / COMPLETE, "")


def is_complete(folder: epath.Path) -> bool:
    """Whether `mark_complete` was reached."""
    return (folder / COMPLETE).exists()


@contextlib.contextmanager
def named_errors(path: epath.PathLike) -> Iterator[None]:
    """Turns the file system's refusals into one line that names the path."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise InputError(f"{path}: the disk is full; free some space and run again") from error
        if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            raise InputError(f"{path}: cannot be written ({error.strerror})") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise InputError(f"{path}: is a file where a folder is needed") from error
        raise
    except ImportError as error:
        raise InputError(f"{path}: reading it needs the [gcs] extra ({error})") from error


@contextlib.contextmanager
def lock(folder: epath.Path) -> Iterator[None]:
    """Holds the folder for this process; the system frees it when the process dies.

    Raises:
      InputError: another process holds it.
    """
    path = folder / "lock"
    with named_errors(path):
        file = open(os.fspath(path), "a+")  # noqa: SIM115
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise InputError(
                f"{folder}: in use by process {file.read().strip() or '?'}; "
                "wait for it, or choose another folder with --workdir"
            ) from error
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def in_use(folder: epath.Path) -> bool:
    """Whether a process of this machine holds the folder's lock."""
    try:
        with open(os.fspath(folder / "lock"), "rb") as file:
            # Shared, so that two who ask do not see each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
