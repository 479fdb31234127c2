"""The files of a run, and the rules for writing files on this machine.

A file is written under a temporary name and renamed, so that a reader sees the old text or the new
one. A corpus or another result of several files is complete once its folder holds COMPLETE, which
is written last; an incomplete folder is made again. The small files of a run are always written on
this machine; if the run is in a bucket, `mirror` uploads them.

    W/experiment.json       the resolved experiment
    W/experiment_code.py    the experiment's custom code, if it has any
    W/corpus/               the prepared corpus (see data.corpus)
    W/checkpoints/          one folder for each saved step (see checkpoints.layout)
    W/metrics.jsonl         metrics: a function of experiment, corpus and step alone
    W/predictions.jsonl     sample predictions, as reproducible as the metrics
    W/timings.jsonl         events with their times: starts, ends, roll-backs, seconds per step
    W/saved.json            the step of the newest checkpoint that was complete
    W/origin.json           the experiment file and --set strings of the last start, and the
                            checkpoint that a fork starts from
    W/trackers.json         how many lines each tracker, such as W&B, has received
    W/profile/              traces of some steps (see running.progress)
    W/plan.json             predicted memory and time per step on TPUs (see tools.plan.report)
    W/layers.json           scores of linear probes on each layer (see tools.layer_scores);
                            layers.html shows them
    W/report.html           the page of `bert-jax report`
    W/launch.json           rented machines, written by older versions
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator
from typing import Any, Literal, TypeVar

from etils import epath

from bert_jax.config import Experiment, Finetuning, Section, code, files
from bert_jax.errors import DiskFull, InputError, Unavailable, json_object, translate_parser_errors
from bert_jax.storage import retry

T = TypeVar("T", bound=Section)

COMPLETE, SWEEP = "COMPLETE", "sweep.json"
HEAD = "head.safetensors"  # in a base: the head of a task

# The files of a run that training writes, and that are copied to its bucket.
RUN_FILES = (
    "experiment.json",
    code.COPY,
    "origin.json",
    "trackers.json",
    "saved.json",
    "metrics.jsonl",
    "predictions.jsonl",
    "timings.jsonl",
)
# Names of which one shows that a folder is a run.
_RUN_NAMES = {*RUN_FILES, "corpus", "checkpoints", "profile", "lock"}
_RUN_NAMES |= {"plan.json", "layers.json", "layers.html", "launch.json"}
# Temporary files that a killed process has left.
_UNFINISHED = re.compile(rf"\.({'|'.join(map(re.escape, RUN_FILES))})\.\w+\.tmp")

# The key of the checksum in a record.
_CHECKSUM = "checksum"
_DISK_FULL = "{}: the disk is full; free some space and run again"


class Workdir:
    """The paths of the files of one run; see `mirror.open_workdir`."""

    def __init__(
        self, root: str | epath.PathLike, corpus_dir: str = "", remote: epath.Path | None = None
    ):
        require_local(root)
        # The folder on this machine, and the folder in a bucket whose files it has.
        self.root, self.remote = epath.Path(root), remote
        # Where the run is: in the bucket if it has one, else on this machine.
        self.address = self.root if remote is None else remote
        # These are not below `root`: `copies` keeps local copies of corpora elsewhere, and Orbax
        # writes checkpoints to the bucket itself.
        self.corpus = epath.Path(corpus_dir) if corpus_dir else self.address / "corpus"
        self.checkpoints = self.address / "checkpoints"
        self.experiment = self.root / "experiment.json"
        self.metrics = self.root / "metrics.jsonl"
        self.predictions = self.root / "predictions.jsonl"
        self.timings = self.root / "timings.jsonl"
        self.origin = self.root / "origin.json"
        self.saved = self.root / "saved.json"
        self.profile = self.root / "profile"
        self.plan = self.root / "plan.json"
        self.layers = self.root / "layers.json"
        self.report = self.root / "report.html"

    def with_corpus(self, corpus_dir: str) -> "Workdir":
        """Returns the workdir with its corpus in another folder; "": in the workdir."""
        return Workdir(self.root, corpus_dir, self.remote)

    def require_run_or_empty(self) -> None:
        """Raises InputError if the folder holds other files and no run."""
        with translate_os_errors(self.root):
            names = {path.name for path in self.root.iterdir()} if self.root.exists() else set()
        require_run_among(self.root, names)

    def remove_unfinished(self) -> None:
        """Removes temporary files of killed processes; the caller must hold the folder's lock."""
        with translate_os_errors(self.root):
            for path in self.root.iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    path.unlink(missing_ok=True)


def holds_finetuning(workdir: Workdir) -> bool:
    """Returns whether the workdir holds a fine-tuned run."""
    if not workdir.experiment.exists():
        return False
    text, where = _experiment_text(workdir)
    return files.kind_of(json_object(text, where)) is Finetuning


def holds_task(workdir: Workdir) -> bool:
    """Returns whether the workdir holds a fine-tuned run, or a base with the head of a task."""
    return (workdir.root / HEAD).exists() or holds_finetuning(workdir)


def load_experiment(workdir: Workdir, kind: type[T] = Experiment) -> T:
    """Reads the experiment that a run was started with."""
    if (workdir.root / "base.json").exists():
        raise InputError(
            f"{workdir.address}: is a base, not a run; name an EXPERIMENT too, and its prepared "
            "corpus with --set run.corpus_dir=FOLDER"
        )
    if not workdir.experiment.exists():
        raise InputError(f"{workdir.address}: no run here (no experiment.json){_hint(workdir)}")
    return files.from_json(*_experiment_text(workdir), kind)


def _hint(workdir: Workdir) -> str:
    """Returns what to use instead of a folder without a run; "" if unknown."""
    if (workdir.root / "config.json").exists():
        path = shlex.quote(os.fspath(workdir.address))
        return f"; import a folder of transformers first: `bert-jax import {path} --workdir B`"
    if not (workdir.root / SWEEP).exists():
        return ""
    with translate_parser_errors(workdir.address / SWEEP):
        runs = json.loads((workdir.root / SWEEP).read_bytes())["runs"]
        best = max(runs, key=lambda run: run["last"]["score"] if run["last"] else -float("inf"))
    path = workdir.address / best["folder"]
    return f"; this is the folder of a sweep: name one of its runs; the best so far is {path}"


def _experiment_text(workdir: Workdir) -> tuple[bytes, str]:
    """Returns the content of experiment.json, and its address for messages."""
    return workdir.experiment.read_bytes(), str(workdir.address / workdir.experiment.name)


def fork_record(workdir: Workdir) -> dict[str, Any]:
    """Returns the record of a fork's parent; {} if the run is not a fork.

    It has `checkpoint`, the path; `sha256`, of the checkpoint's metadata; and `experiment`.
    """
    if not workdir.origin.exists():
        return {}
    return read_json(workdir.origin, files.FORMAT_VERSION).get("fork", {})


def require_run_among(folder: epath.PathLike, names: Iterable[str]) -> None:
    """Raises InputError if the folder, which holds these names, has other files and no run."""
    names = set(names)
    if names and not names & _RUN_NAMES:
        raise InputError(
            f"{folder}: holds other files and no run; choose another folder with --workdir"
        )


def require_local(path: epath.PathLike) -> None:
    """Raises InputError if the path is not on a disk of this machine."""
    if "://" in os.fspath(path):
        raise InputError(f"{path}: must be on a disk of this machine; name a local folder or file")


def cache_folder() -> epath.Path:
    """Returns the folder for files that can be made or copied again (`--cache-dir`)."""
    user_cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    default = os.path.join(user_cache, "bert_jax")
    return epath.Path(os.environ.get("BERT_JAX_CACHE_DIR") or default)


def absolute(path: epath.Path) -> epath.Path:
    """Returns the absolute path; a path in a bucket stays as it is."""
    return path if "://" in os.fspath(path) else path.absolute()


def write_atomic(path: epath.Path, text: str | Iterable[str]) -> None:
    """Replaces a file atomically with the text, which may be given in parts; flushes it to disk."""
    with replace_atomically(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines((text,) if isinstance(text, str) else text)


@contextlib.contextmanager
def replace_atomically(path: epath.Path) -> Iterator[epath.Path]:
    """Yields a temporary path; at the end flushes this file to disk and renames it to `path`.

    An error leaves the old file.
    """
    require_local(path)
    require_no_special_file(path)
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    with translate_os_errors(path):
        try:
            yield temporary
            with contextlib.suppress(OSError), open(os.fspath(temporary), "rb") as file:
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise


def open_without_links(path: str, flags: int) -> int:
    """Opens a file for `open(opener=)`; refuses a symlink, which another user may have placed."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def require_no_special_file(path: epath.PathLike) -> None:
    """Raises InputError for a device, a pipe or a socket."""
    name = os.fspath(path)  # epath regards a device as a file
    if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
        raise InputError(f"{path}: is a device or a pipe; name a file")


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with its checksum, which `read_json` verifies."""
    return {**record, _CHECKSUM: _checksum(record)}


def write_json(path: epath.Path, record: dict[str, Any]) -> None:
    """Replaces the file with a record and its checksum; `read_json` reads them."""
    write_atomic(path, json.dumps(with_checksum(record), indent=2) + "\n")


def _checksum(record: dict[str, Any]) -> str:
    content = {name: value for name, value in record.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_json(
    path: epath.Path,
    format_version: int,
    version_remedy: str = "use the bert-jax that wrote it",
    damage_remedy: str = "restore the original file",
) -> dict[str, Any]:
    """Reads a JSON object with a `format_version`, and verifies its checksum if it has one.

    The remedies are the last parts of the messages about another version and a damaged file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        if retry.is_transient(error):
            raise Unavailable(f"{path}: {error.strerror}; run again to resume") from error
        raise InputError(f"{path}: damaged, cannot be read ({error}); {damage_remedy}") from error
    return parse_json(content, path, format_version, version_remedy, damage_remedy)


def parse_json(
    content: bytes,
    path: epath.PathLike,
    format_version: int,
    version_remedy: str,
    damage_remedy: str,
    checksum: Literal["required", "optional"] = "optional",
) -> dict[str, Any]:
    """Parses the content of a file as `read_json` does."""
    value = json_object(content, f"{path}: damaged", damage_remedy)
    if value.get("format_version") != format_version:
        raise InputError(
            f"{path}: format_version {value.get('format_version')!r}, "
            f"this version reads {format_version}; {version_remedy}"
        )
    if (checksum == "required" or _CHECKSUM in value) and value.get(_CHECKSUM) != _checksum(value):
        raise InputError(f"{path}: damaged, was changed since it was written; {damage_remedy}")
    return value


def mark_complete(folder: epath.Path) -> None:
    """Marks a folder as complete."""
    write_atomic(folder / COMPLETE, "")


def is_complete(folder: epath.Path) -> bool:
    """Returns whether the folder was marked as complete."""
    return (folder / COMPLETE).exists()


# Messages for permanent errors of the file system.
_MESSAGES = {
    errno.EROFS: "cannot be written ({})",
    errno.EACCES: "may not be used ({})",
    errno.EPERM: "may not be used ({})",
    errno.ELOOP: "is a link; remove it",
    errno.ENOTDIR: "is a file where a folder is needed",
    errno.EEXIST: "is a file where a folder is needed",
}


@contextlib.contextmanager
def translate_os_errors(path: epath.PathLike) -> Iterator[None]:
    """Turns errors of the file system into InputError, Unavailable or DiskFull with the path."""
    try:
        yield
    # A broken pipe is not an error of a file: the reader of our output has ended.
    except (InputError, Unavailable, BrokenPipeError):
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(_DISK_FULL.format(path)) from error
        if error.errno in _MESSAGES:
            raise InputError(f"{path}: {_MESSAGES[error.errno].format(error.strerror)}") from error
        reason = f"{error.filename or path}: {error.strerror or error}"
        if retry.is_retryable(error):
            raise Unavailable(f"{reason}; run again to resume") from error
        raise InputError(reason) from error
    except Exception as error:
        # How libraries in C++ report a full disk.
        if isinstance(error, RuntimeError | ValueError) and os.strerror(errno.ENOSPC) in str(error):
            raise DiskFull(_DISK_FULL.format(path)) from error
        if retry.is_retryable(error):
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            raise Unavailable(f"{path}: {reason}; run again to resume") from error
        raise


@contextlib.contextmanager
def create_folder(folder: epath.Path) -> Iterator[None]:
    """Creates the folder and its parents; if the body raises, removes the new ones if empty."""
    missing: list[epath.Path] = []
    try:
        with translate_os_errors(folder):
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError, ValueError):  # epath: ValueError if not empty
                path.rmdir()
        raise
