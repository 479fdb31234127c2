"""Where a run keeps its files, and the few rules by which files are written, on this machine.

A file is written next to its place and renamed, so that a reader sees the old text or the new. A
folder counts only once it holds COMPLETE, which is written last; one without is rebuilt. A run in a
bucket is written here, too: `mirror` sends it there.

    W/experiment.json       the resolved experiment
    W/experiment_code.py    the file of its objective or encoder, if it has one of its own
    W/corpus/               the prepared corpus (see data.corpus)
    W/checkpoints/          one folder a step (see checkpoints.checkpoint)
    W/metrics.jsonl         what was computed: a function of experiment, corpus and step alone
    W/predictions.jsonl     what the model predicted in a few fixed texts, as exact as the metrics
    W/timings.jsonl         how long it took
    W/saved.json            the step of the newest checkpoint that was seen whole
    W/origin.json           which experiment file and --set strings the last start was given, and
                            which checkpoint a fork began with
    W/profile/              traces of some steps (see running.progress)
    W/plan.json             what it would take on TPUs (see tools.plan.report)
    W/layers.json           what each layer knows (see tasks.layer_scores), and a page of it
    W/launch.json           what was rented for the run, by a version before this
"""

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import re
import shlex
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import IO, Any, Literal, TypeVar

from etils import epath

from bert_jax.config import Experiment, Finetuning, Section, code, files
from bert_jax.errors import DiskFull, InputError, Unavailable, json_object, reading
from bert_jax.storage import retry

T = TypeVar("T", bound=Section)

COMPLETE = "COMPLETE"

# What a run writes into its folder, except its corpus, its checkpoints and its traces.
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
_OURS = {*RUN_FILES, "corpus", "checkpoints", "profile", "lock"}
_OURS |= {"plan.json", "layers.json", "layers.html", "launch.json"}
# What a process leaves of them that is killed while it writes.
_UNFINISHED = re.compile(rf"\.({'|'.join(map(re.escape, RUN_FILES))})\.\w+\.tmp")

# Of a record, its checksum.
_CHECKSUM = "checksum"

_LOCK_TRIES = 4
_HOLDER_VERSION = 1

_FULL = "{}: the disk is full; free some space and run again"


class Workdir:
    """Names of the files of one run; for a run in a bucket `mirror.open_workdir` gives them."""

    def __init__(
        self, root: str | epath.PathLike, corpus_dir: str = "", remote: epath.Path | None = None
    ):
        require_local(root)
        # On this machine; and the place in a bucket that it is written for, or was fetched from.
        self.root, self.remote = epath.Path(root), remote
        # Where users say that the run lies: in its bucket, or `root`.
        self.named = self.root if remote is None else remote
        # Below `named`: corpora are copied, and Orbax writes to buckets itself. Or elsewhere.
        self.corpus = epath.Path(corpus_dir) if corpus_dir else self.named / "corpus"
        self.checkpoints = self.named / "checkpoints"
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

    def require_ours(self) -> None:
        """Raises InputError if the folder is there, and holds other things and no run."""
        with translate_os_errors(self.root):
            names = {path.name for path in self.root.iterdir()} if self.root.exists() else set()
        require_run(self.root, names)

    def remove_unfinished(self) -> None:
        """Removes what a killed process left half written; by the one that holds the folder."""
        with translate_os_errors(self.root):
            for path in self.root.iterdir():
                if _UNFINISHED.fullmatch(path.name):
                    path.unlink(missing_ok=True)


def holds_finetuning(workdir: Workdir) -> bool:
    """Tells whether a fine-tuned run lies here, not a pre-training, a base or nothing."""
    if not workdir.experiment.exists():
        return False
    text, where = _experiment_text(workdir)
    return files.kind_of(json_object(text, where)) is Finetuning


def load_experiment(workdir: Workdir, kind: type[T] = Experiment) -> T:
    """Reads the experiment that a run was started with."""
    if (workdir.root / "base.json").exists():
        raise InputError(
            f"{workdir.named}: is a base, weights without a run; `evaluate`, `show` and `plan` ask "
            "for an EXPERIMENT, too, and for its prepared corpus by --set run.corpus_dir=FOLDER"
        )
    if not workdir.experiment.exists():
        hint = ""
        if (workdir.root / "config.json").exists():
            place = shlex.quote(os.fspath(workdir.named))
            hint = "; for a folder that transformers wrote, first `bert-jax import "
            hint += f"{place} --workdir B`, and name B"
        raise InputError(f"{workdir.named}: no run here (no experiment.json){hint}")
    return files.from_json(*_experiment_text(workdir), kind)


def _experiment_text(workdir: Workdir) -> tuple[bytes, str]:
    """Returns the saved experiment as its file has it, and where it lies."""
    return workdir.experiment.read_bytes(), str(workdir.named / workdir.experiment.name)


def fork_of(workdir: Workdir) -> dict[str, Any]:
    """Returns the `checkpoint` that a fork began with, its `sha256` and `experiment`; {}: none."""
    there = workdir.origin.exists()
    return read_json(workdir.origin, files.FORMAT_VERSION).get("fork", {}) if there else {}


def require_run(place: epath.PathLike, names: Iterable[str]) -> None:
    """Raises InputError if a folder that holds these names holds other things and no run."""
    names = set(names)
    if names and not names & _OURS:
        raise InputError(
            f"{place}: holds other files and no run; choose another folder with --workdir"
        )


def require_local(path: epath.PathLike) -> None:
    """Raises InputError if the path lies on no disk of this machine."""
    if "://" in os.fspath(path):
        raise InputError(f"{path}: must be on a disk of this machine; name a local folder or file")


@dataclasses.dataclass(frozen=True)
class Holder:
    """The process that holds a folder."""

    token: str  # differs for each time that one is taken
    host: str  # the machine's name
    process: int  # its id there
    since: float  # when it was taken, in seconds since 1970

    @classmethod
    def me(cls) -> "Holder":
        """Returns a holder for this process, now."""
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid(), time.time())

    @classmethod
    def parse(cls, data: bytes) -> "Holder | None":
        """Returns what `text` wrote; None for something else, of another version, say."""
        with contextlib.suppress(InputError, OSError), reading("a holder"):
            record = json.loads(data)
            if record.pop("format_version") == _HOLDER_VERSION:
                holder = cls(**record)
                str(holder)
                return holder
        return None

    def text(self) -> str:
        """Returns the holder as a line of JSON, which `parse` reads."""
        return json.dumps({"format_version": _HOLDER_VERSION, **dataclasses.asdict(self)}) + "\n"

    def __str__(self) -> str:
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(self.since))
        return f"process {self.process} of {self.host} since {since}"


def cache_folder() -> epath.Path:
    """Returns where this machine keeps what it can make or copy again; see `--cache-dir`."""
    user = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return epath.Path(os.environ.get("BERT_JAX_CACHE_DIR") or os.path.join(user, "bert_jax"))


def absolute(path: epath.Path) -> epath.Path:
    """Returns the path from the root on, whatever the current folder becomes."""
    return path if "://" in os.fspath(path) else path.absolute()  # epath takes gs: for a folder


def write_atomic(path: epath.Path, text: str | Iterable[str]) -> None:
    """Replaces the file's text, given whole or in parts, in one step, flushed to disk."""
    with new_file(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines((text,) if isinstance(text, str) else text)


@contextlib.contextmanager
def new_file(path: epath.Path) -> Iterator[epath.Path]:
    """Gives a temporary file to write, which takes the file's place, flushed to disk, at the end.

    A failure leaves what was there before.
    """
    require_local(path)
    require_plain(path)
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


def no_link(path: str, flags: int) -> int:
    """Opens a file for `open`, but no link, which could lead out of a folder of others."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def require_plain(path: epath.PathLike) -> None:
    """Raises InputError if something other than a file or a folder stands there."""
    name = os.fspath(path)  # epath takes a device for a file
    if os.path.exists(name) and not (os.path.isfile(name) or os.path.isdir(name)):
        raise InputError(f"{path}: is a device or a pipe; name a file")


def with_checksum(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the record with a checksum of all of it, which `read_json` compares."""
    return {**record, _CHECKSUM: _checksum(record)}


def write_json(path: epath.Path, record: dict[str, Any]) -> None:
    """Replaces the file with a record and its checksum, as `read_json` reads them."""
    write_atomic(path, json.dumps(with_checksum(record), indent=2) + "\n")


def _checksum(record: dict[str, Any]) -> str:
    held = {name: value for name, value in record.items() if name != _CHECKSUM}
    return hashlib.sha256(json.dumps(held, sort_keys=True).encode()).hexdigest()


def read_json(
    path: epath.Path,
    format_version: int,
    mend: str = "use the bert-jax that wrote it",
    restore: str = "put the whole file back",
) -> dict[str, Any]:
    """Reads a JSON object with a `format_version` and, if it was written with one, a checksum.

    `mend` says what to do about another version, `restore` about a damaged file.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file") from error
    except OSError as error:
        if retry.is_transient(error):
            raise Unavailable(f"{path}: {error.strerror}; run again to go on") from error
        raise InputError(f"{path}: damaged, cannot be read ({error}); {restore}") from error
    return parse_json(content, path, format_version, mend, restore)


def parse_json(
    content: bytes,
    path: epath.PathLike,
    format_version: int,
    mend: str,
    restore: str,
    seal: Literal["required", "optional"] = "optional",
) -> dict[str, Any]:
    """Returns what `read_json` does, of a file whose content was read."""
    value = json_object(content, f"{path}: damaged", f"; {restore}")
    if value.get("format_version") != format_version:
        raise InputError(
            f"{path}: format_version {value.get('format_version')!r}, "
            f"this version reads {format_version}; {mend}"
        )
    if (seal == "required" or _CHECKSUM in value) and value.get(_CHECKSUM) != _checksum(value):
        raise InputError(f"{path}: damaged, was changed since it was written; {restore}")
    return value


def mark_complete(folder: epath.Path) -> None:
    """Marks a folder as holding all it should."""
    write_atomic(folder / COMPLETE, "")


def is_complete(folder: epath.Path) -> bool:
    """Returns whether `mark_complete` was reached."""
    return (folder / COMPLETE).exists()


# What an error of the file system says, where it does not pass.
_WORDS = {
    errno.EROFS: "cannot be written ({})",
    errno.EACCES: "may not be used ({})",
    errno.EPERM: "may not be used ({})",
    errno.ELOOP: "is a link; remove it",
    errno.ENOTDIR: "is a file where a folder is needed",
    errno.EEXIST: "is a file where a folder is needed",
}


@contextlib.contextmanager
def translate_os_errors(path: epath.PathLike) -> Iterator[None]:
    """Turns errors of the file system into one line that names the path.

    Raises:
      Unavailable: it fails for now; DiskFull of a full disk.
    """
    try:
        yield
    except (InputError, Unavailable):
        raise
    except BrokenPipeError:  # the reader of our output has left, and no file is at fault
        raise
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(_FULL.format(path)) from error
        if error.errno in _WORDS:
            raise InputError(f"{path}: {_WORDS[error.errno].format(error.strerror)}") from error
        reason = f"{error.filename or path}: {error.strerror or error}"
        if retry.passes(error):
            raise Unavailable(f"{reason}; run again to go on") from error
        raise InputError(reason) from error
    except Exception as error:
        # As libraries in C++ pass it on.
        if isinstance(error, RuntimeError | ValueError) and os.strerror(errno.ENOSPC) in str(error):
            raise DiskFull(_FULL.format(path)) from error
        if retry.passes(error):
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
            raise Unavailable(f"{path}: {reason}; run again to go on") from error
        raise


@contextlib.contextmanager
def lock(
    folder: epath.Path, named: epath.PathLike | None = None, setting: str = "--workdir"
) -> Iterator[Holder]:
    """Holds the folder, made if need be, for this process; the system frees it when it dies.

    Gives what `FOLDER/lock` says of this process meanwhile.

    If what is done meanwhile fails and leaves nothing, the lock and the folder go too, where they
    were not there before. `named` is what users call the folder; None: the same. `setting` is the
    flag or field that chooses the folder.
    """
    require_local(folder)
    path = folder / "lock"
    with create_folder(folder):
        with translate_os_errors(path):
            before = {other.name for other in folder.iterdir()}
            file = _held(path, named or folder, setting)
        with file:
            try:
                me = Holder.me()
                with translate_os_errors(path):
                    file.truncate(0)
                    file.write(me.text().encode())
                    os.fsync(file)  # where a disk is shared, others see it from here on
                yield me
                file.truncate(0)
            except BaseException:
                with contextlib.suppress(OSError):
                    file.truncate(0)
                    if {other.name for other in folder.iterdir()} - before == {"lock"}:
                        path.unlink()  # while it is held: later it may be another's
                raise


@contextlib.contextmanager
def create_folder(folder: epath.Path) -> Iterator[None]:
    """Makes the folder and those above; on failure removes those of them that are empty."""
    missing: list[epath.Path] = []
    try:
        with translate_os_errors(folder):
            missing = [path for path in (folder, *folder.parents) if not path.exists()]
            folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException:
        for path in missing:
            with contextlib.suppress(OSError, ValueError):  # epath's word for one not empty
                path.rmdir()
        raise


def _held(path: epath.Path, named: epath.PathLike, setting: str) -> IO[bytes]:
    """Returns the lock file, opened and locked."""
    tries = 0
    while True:
        with contextlib.ExitStack() as stack:
            file = open(os.fspath(path), "a+b", buffering=0, opener=no_link)  # noqa: SIM115
            stack.callback(file.close)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                # A holder that fails removes its lock: ours may be no longer the one there.
                if path.exists() and os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                    stack.pop_all()
                    return file
            except BlockingIOError as error:
                tries += 1
                if tries == _LOCK_TRIES:  # `is_locked` holds it for a moment
                    file.seek(0)
                    holder = Holder.parse(file.read()) or "another process"
                    raise InputError(
                        f"{named}: in use by {holder}; wait for it, or choose another folder with "
                        f"{setting}"
                    ) from error
                time.sleep(0.05)


def is_locked(folder: epath.Path) -> bool:
    """Returns whether a process of this machine holds the folder's lock."""
    try:
        with open(os.fspath(folder / "lock"), "rb") as file:
            # Shared, so that two who ask do not see each other.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except OSError as error:
        return isinstance(error, BlockingIOError)
