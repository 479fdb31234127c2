"""Where a run keeps its files, and the few rules by which files are written.

A file is written beside its place and renamed, so that a reader sees the old text or the new; an
object of a bucket is replaced in one step. A folder counts only once it holds COMPLETE, which is
written last; one without is rebuilt.

    W/experiment.json       the resolved experiment
    W/corpus/               the prepared corpus (see data.corpus)
    W/checkpoints/          one folder a step (see training.checkpoint)
    W/metrics.jsonl         what was computed: a function of experiment, corpus and step alone
    W/predictions.jsonl     what the model said of a few fixed sentences, as exact as the metrics
    W/timings.jsonl         how long it took
    W/origin.json           which experiment file and --set strings the last start was given
    W/compiled/             of a run in a bucket: compiled programs (see training.compiled)
    W/profile/              traces of some steps (see training.profile)
    W/plan.json             what it would take on TPUs (see plan.document)
    W/launch.json           which machines it was launched on (see launch.target)
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from typing import IO, Any

from etils import epath

from bert_jax import lease
from bert_jax.bucket import is_bucket
from bert_jax.config import InputError

COMPLETE = "COMPLETE"

# Of a record, its checksum.
_CHECKSUM = "checksum"

_LOCK_TRIES = 4

# What speaks to buckets; each has errors of its own.
_CLIENTS = ("gcsfs", "google", "aiohttp")

_FULL = "{}: the disk is full; free some space and run again"


class DiskFull(InputError):
    """There is no space left where something is to be written."""


class Workdir:
    """Names of the files of one run."""

    def __init__(self, root: str | epath.PathLike, corpus_dir: str = ""):
        for place in (root, corpus_dir):
            if is_bucket(place):  # which refuses other kinds of places
                with named_errors(place):  # is there a bucket, and may we look into it?
                    epath.Path(place).exists()
        self.root = epath.Path(root)
        self.experiment = self.root / "experiment.json"
        self.corpus = epath.Path(corpus_dir) if corpus_dir else self.root / "corpus"
        self.checkpoints = self.root / "checkpoints"
        self.metrics = self.root / "metrics.jsonl"
        self.predictions = self.root / "predictions.jsonl"
        self.timings = self.root / "timings.jsonl"
        self.origin = self.root / "origin.json"
        self.profile = self.root / "profile"
        self.plan = self.root / "plan.json"
        self.report = self.root / "report.html"

    def require_ours(self) -> None:
        """Raises InputError if the folder is there, and holds other things and no run."""
        with named_errors(self.root):
            names = {path.name for path in self.root.iterdir()} if self.root.exists() else set()
        ours = {
            "experiment.json",
            "corpus",
            "checkpoints",
            "compiled",
            "metrics.jsonl",
            "timings.jsonl",
            "profile",
            "plan.json",
            "launch.json",
            "lock",
        }
        if names and not names & ours:
            raise InputError(
                f"{self.root}: holds other files and no run; choose another folder with --workdir"
            )


def cache_folder() -> epath.Path:
    """Where this machine keeps what it can make or copy again.

    BERT_JAX_CACHE_DIR, which `--cache-dir` sets; else `bert_jax` in the user's cache folder.
    """
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return epath.Path(os.environ.get("BERT_JAX_CACHE_DIR") or os.path.join(user, "bert_jax"))


def absolute(path: epath.Path) -> epath.Path:
    """The path from the root on, whatever the current folder becomes."""
    return path if is_bucket(path) else path.absolute()  # epath takes gs: for a folder here


def write_atomic(path: epath.Path, text: str | Iterable[str]) -> None:
    """Replaces the file's text, given whole or in parts, in one step, flushed to disk.

    Raises:
      InputError: it cannot be written, or is a device or a pipe, which would be replaced by a file.
    """
    if is_bucket(path):
        with named_errors(path):
            # As bytes: a text would be written in the encoding of this machine's language.
            path.write_bytes((text if isinstance(text, str) else "".join(text)).encode())
        return
    with new_file(path) as beside, beside.open("w", encoding="utf-8") as file:
        file.writelines((text,) if isinstance(text, str) else text)


@contextlib.contextmanager
def new_file(path: epath.Path) -> Iterator[epath.Path]:
    """Gives a place beside the file's to write to, which takes it, flushed to disk, at the end.

    A failure leaves what was there before.

    Raises:
      InputError: it cannot be written, or is a device or a pipe, which would be replaced by a file.
    """
    if is_bucket(path):
        raise InputError(f"{path}: is made whole on this machine alone; name a file here")
    require_plain(path)
    beside = path.parent / f".{path.name}.{os.getpid()}.tmp"
    with named_errors(path):
        try:
            yield beside
            with contextlib.suppress(OSError), open(os.fspath(beside), "rb") as file:
                os.fsync(file.fileno())
            beside.replace(path)
        except BaseException:
            with contextlib.suppress(OSError):
                beside.unlink()
            raise


def no_link(path: str, flags: int) -> int:
    """For `open`: no file elsewhere is written where a folder of others holds a link to it."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def require_plain(path: epath.PathLike) -> None:
    """Raises InputError if something other than a file or a folder stands there."""
    name = os.fspath(path)  # epath takes a device for a file
    if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
        raise InputError(f"{path}: is a device or a pipe; name a file")


def sealed(record: dict[str, Any]) -> dict[str, Any]:
    """The record with a checksum of all of it, which `read_json` compares."""
    return {**record, _CHECKSUM: _checksum(record)}


def is_sealed(record: dict[str, Any]) -> bool:
    """Whether a record that was read carries a checksum; those of older versions do not."""
    return _CHECKSUM in record


def _checksum(record: dict[str, Any]) -> str:
    held = {name: value for name, value in record.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def read_json(
    path: epath.Path,
    format_version: int,
    mend: str = "use the bert-jax that wrote it",
    restore: str = "put the whole file back",
) -> dict[str, Any]:
    """Reads a JSON object that carries `format_version`, and a checksum if it was `sealed`.

    Args:
      path: of the file.
      format_version: which is read.
      mend: what to do about another one, in words.
      restore: what to do about a damaged file.

    Raises:
      InputError: unreadable, not a JSON object, of another format version, or changed since it was
        sealed.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except (ValueError, RecursionError, OSError) as error:
        raise InputError(f"{path}: damaged, not readable as JSON ({error}); {restore}") from error
    if not isinstance(value, dict):
        raise InputError(f"{path}: damaged, not a JSON object; {restore}")
    if value.get("format_version") != format_version:
        raise InputError(
            f"{path}: format_version {value.get('format_version')!r}, "
            f"this version reads {format_version}; {mend}"
        )
    if is_sealed(value) and value[_CHECKSUM] != _checksum(value):
        raise InputError(f"{path}: damaged, was changed since it was written; {restore}")
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
    except BrokenPipeError:  # the reader of our output has left, and no file is at fault
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(_FULL.format(path)) from error
        if error.errno == errno.EROFS:
            raise InputError(f"{path}: cannot be written ({error.strerror})") from error
        if error.errno in (errno.EACCES, errno.EPERM):
            raise InputError(f"{path}: may not be used ({error.strerror})") from error
        if error.errno == errno.ELOOP:
            raise InputError(f"{path}: is a link; remove it") from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST):
            raise InputError(f"{path}: is a file where a folder is needed") from error
        raise InputError(f"{error.filename or path}: {error.strerror or error}") from error
    except (RuntimeError, ValueError) as error:  # as libraries in C++ pass it on
        if os.strerror(errno.ENOSPC) not in str(error):
            raise
        raise DiskFull(_FULL.format(path)) from error
    except ImportError as error:
        raise InputError(f"{path}: reading it needs the [gcs] extra ({error})") from error
    except Exception as error:
        if type(error).__module__.partition(".")[0] not in _CLIENTS:
            raise
        raise InputError(f"{path}: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def lock(folder: epath.Path) -> Iterator[None]:
    """Holds the folder, made if need be, for this process; the system frees it when it dies.

    In a bucket, where no system does, see `lease`.

    If what is done meanwhile fails and leaves nothing, the lock and the folder go too, where they
    were not there before.

    Raises:
      InputError: another process holds it, or it cannot be written.
    """
    if is_bucket(folder):
        with contextlib.ExitStack() as stack:
            with named_errors(folder):
                stack.enter_context(lease.held(folder))
            yield
        return
    path = folder / "lock"
    with made(folder):
        with named_errors(path):
            before = {other.name for other in folder.iterdir()}
            file = _held(path)
        with file:
            try:
                with named_errors(path):
                    file.truncate(0)
                    file.write(lease.Holder.me().text().encode())
                yield
                file.truncate(0)
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(0)
                    if {other.name for other in folder.iterdir()} - before == {"lock"}:
                        path.unlink()  # while it is held: later it may be another's
                raise


@contextlib.contextmanager
def made(folder: epath.Path) -> Iterator[None]:
    """Makes the folder and those above; on failure removes those of them that are empty."""
    if is_bucket(folder):  # where an object makes its folders, and takes them along
        yield
        return
    missing: list[epath.Path] = []
    try:
        with named_errors(folder):
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError, ValueError):  # epath's word for one not empty
                path.rmdir()
        raise


@contextlib.contextmanager
def new_folder(folder: epath.Path) -> Iterator[epath.Path]:
    """Gives a folder to fill that takes its place, whole, at the end; a failure leaves nothing.

    Raises:
      InputError: something lies there already, or it cannot be written.
    """
    if is_bucket(folder):
        raise InputError(f"{folder}: folders are made whole on this machine alone; name one here")
    folder = folder.absolute()  # else "." would have no place beside it
    with named_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder}: is there already; choose another folder")
    beside = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    with made(folder.parent), named_errors(folder):
        try:
            beside.mkdir()
            yield beside
            beside.replace(folder)  # also over an empty one
        except BaseException:
            with contextlib.suppress(OSError):
                beside.rmtree(missing_ok=True)
            raise


def _held(path: epath.Path) -> IO[bytes]:
    """The lock file, opened and locked."""
    tries = 0
    while True:
        file = open(os.fspath(path), "a+b", buffering=0, opener=no_link)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder that fails removes its lock: what we opened may be no longer the one there.
            if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        except BlockingIOError as error:
            file.seek(0)
            holder = lease.Holder.parse(file.read())
            file.close()
            tries += 1
            if tries < _LOCK_TRIES:  # `in_use` holds it for a moment
                time.sleep(0.05)
                continue
            raise lease.in_use(path.parent, holder) from error
        except BaseException:
            file.close()
            raise
        file.close()


def in_use(folder: epath.Path) -> bool:
    """Whether a process holds the folder's lock; of a local folder, one of this machine."""
    if is_bucket(folder):
        with named_errors(folder):
            return lease.is_held(folder)
    try:
        with open(os.fspath(folder / "lock"), "rb") as file:
            # Shared, so that two who ask do not see each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
