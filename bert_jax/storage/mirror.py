"""Buckets: the one file that reads and writes places named gs://.

A run writes to a folder of this machine alone; a thread sends its small files to the bucket when
they are due, and what a failing network keeps back goes with the next chance. (Orbax writes to its
own gs:// paths; for corpora see `copies`.) An object is whole or not there; nothing is renamed or
appended.

    gs://B/W/OWNER       the start that the run belongs to
    CACHE/runs/NAME/     where a run in a bucket is written, with .owner.json: its last starts
    CACHE/views/NAME/    the small files of a run in a bucket, fetched to be read

Every call tries again while the network fails, for ten minutes, and then raises `Unavailable`. A
bucket that is not there, and rights that are refused at the first use, are bad input; from then on
a refusal is taken for a token that has expired, and waited for.

Who owns a run: each start writes a token into OWNER, over that of the start before, and reads it
again before each push and each checkpoint. A start that finds another's ends, so that of two the
later wins, and a start waits for nobody. Where the local folder and the bucket differ, the last
owner decides: if it wrote into this local folder, the local files hold lines that may not have been
sent, and win; else another machine went on with the run, and the bucket's files win.
"""

import base64
import contextlib
import datetime
import errno
import functools
import hashlib
import json
import logging
import os
import pathlib
import re
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple, TypeVar

import fsspec
from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage import retry
from bert_jax.storage.workdir import (
    RUN_FILES,
    Holder,
    Workdir,
    cache_folder,
    in_use,
    made,
    named_errors,
    new_file,
    require_run,
    write_atomic,
)

T = TypeVar("T")
Right = Literal["list", "read", "write", "replace"]
# Their names in roles: storage.objects.list and so on.
_PERMISSIONS = {"list": "list", "read": "get", "write": "create", "replace": "delete"}

OWNER = "OWNER"
_PROBE = ".bert_jax.tmp"  # written and removed to see whether objects may be
_OWNED = ".owner.json"  # in the local folder of a run: tokens of starts that wrote there
_VIEW_FILES = (*RUN_FILES, "plan.json", "launch.json", OWNER)

# Seconds between two pushes of what a run has written, and which share of the time they may take.
_SECONDS, _SHARE = 30.0, 0.05
# Bytes read from a disk at a time.
_BLOCK = 2**20
# Seconds without a line after which a run in a bucket counts as killed.
_LATELY = 900.0
# Seconds for an answer to a request, for a connection, and between two of its bytes.
_REQUEST, _CONNECT, _BYTE = 600.0, 30.0, 120.0

# epath's and Orbax's connections, too, must see what other processes have written since.
fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
# And be patient; by its name, since gcsfs need not be installed.
fsspec.register_implementation("gcs", "bert_jax.storage.gcs.PatientFileSystem", clobber=True)
# It raises its errors, too, and ours is one line.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)

# (bucket, right) that were used with success.
_granted: set[tuple[str, Right]] = set()


class Listed(NamedTuple):
    """An object, as a list describes it."""

    size: int  # in bytes
    crc32c: str  # of its content, base64 as the bucket says it
    updated: str  # when it was written, RFC 3339


def is_bucket(place: epath.PathLike) -> bool:
    """Returns whether the place lies in a bucket."""
    name = os.fspath(place)
    if "://" not in name:
        return False
    if not name.startswith("gs://"):
        raise InputError(f"{name}: of places with ://, only buckets (gs://) can be used")
    if not _split(place)[0]:
        raise InputError(f"{name}: names no bucket; write gs://BUCKET/FOLDER")
    try:
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{name}: buckets need the [gcs] extra: pip install 'bert-jax[gcs]'"
        ) from error
    return True


# --- single objects -----------------------------------------------------------------------------


def read(
    path: epath.PathLike,
    first: int | None = None,
    end: int | None = None,
    seconds: float | None = None,
) -> bytes:
    """Returns the content of a file of this machine, or of an object the bytes from `first` to
    `end`; the network may fail for so many seconds, None: ten minutes.

    Raises:
      FileNotFoundError: nothing is there.
    """
    if not is_bucket(path):
        return epath.Path(path).read_bytes()
    name = os.fspath(path)
    return _tried("read", path, lambda: _files().cat_file(name, start=first, end=end), seconds)


def sha256(path: epath.PathLike) -> str:
    """Returns the SHA-256 of a file of this machine, or of a small object."""
    if is_bucket(path):
        return hashlib.sha256(read(path)).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state(path: epath.PathLike) -> tuple[int, int]:
    """Returns the bytes of a file of this machine or an object, and its date in nanoseconds."""
    if not is_bucket(path):
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    listed = about(path)
    if listed is None:
        raise FileNotFoundError(errno.ENOENT, "is missing", os.fspath(path))
    date = datetime.datetime.fromisoformat(listed.updated)
    return listed.size, round(date.timestamp() * 1e9)


def write(path: epath.Path, text: str | Iterable[str], seconds: float | None = None) -> None:
    """Replaces a text in one step: of a file of this machine, or an object; see `put`."""
    if is_bucket(path):
        put(path, (text if isinstance(text, str) else "".join(text)).encode(), seconds)
        return
    with made(path.parent):
        write_atomic(path, text)


def exists(path: epath.Path) -> bool:
    """Returns whether a file or an object is there."""
    if not is_bucket(path):
        with named_errors(path):
            return path.exists()
    return about(path) is not None


def about(path: epath.PathLike) -> Listed | None:
    """Returns what is known of an object; None if nothing is there."""
    ask = functools.partial(_files().call, "GET", "b/{}/o/{}", *_split(path), json_out=True)
    try:
        return _of_item(_tried("read", path, ask))
    except FileNotFoundError:
        return None


def names(folder: epath.Path) -> set[str]:
    """Returns the names in a folder of this machine or a bucket; none if it is not there."""
    if not is_bucket(folder):
        with named_errors(folder):
            return {path.name for path in folder.iterdir()} if folder.exists() else set()
    objects, folders = _listed(folder, "/")
    return (objects.keys() | folders) - {_PROBE}


def listing(folder: epath.PathLike) -> dict[str, Listed]:
    """Returns all objects below a folder of a bucket, at any depth, by their paths in it."""
    return _listed(folder, "")[0]


def remove(paths: Iterable[epath.PathLike]) -> None:
    """Removes objects; some may not be there."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            _tried("write", path, functools.partial(_files().rm_file, os.fspath(path)))


def require_writable(folder: epath.Path) -> None:
    """Raises InputError if objects of a bucket's folder may not be listed, read or written."""
    probe = folder / _PROBE  # always this one: what a kill leaves goes the next time
    _listed(folder, "/")
    put(probe, b"")
    put(probe, b"", right="replace")
    with contextlib.suppress(FileNotFoundError):  # another has asked at the same moment
        read(probe)
    remove([probe])


def put(
    path: epath.PathLike, data: bytes, seconds: float | None = None, right: Right = "write"
) -> None:
    """Writes an object, or replaces it; where one is known to be there, that is the `right`."""
    _tried(right, path, lambda: _files().pipe_file(os.fspath(path), data), seconds)


def send(file: epath.PathLike, path: epath.PathLike) -> None:
    """Writes an object, or replaces it, with the content of a local file of any size."""
    _tried("write", path, lambda: _files().put_file(os.fspath(file), os.fspath(path)))


def is_same(file: epath.PathLike, listed: Listed) -> bool:
    """Returns whether a local file is an object's content."""
    import google_crc32c

    try:
        if os.stat(file).st_size != listed.size:
            return False
        with open(file, "rb") as opened_file:
            checksum = google_crc32c.Checksum()
            for _ in checksum.consume(opened_file, _BLOCK):
                pass
    except FileNotFoundError:
        return False
    return base64.b64encode(checksum.digest()).decode() == listed.crc32c


def _listed(folder: epath.PathLike, delimiter: str) -> tuple[dict[str, Listed], set[str]]:
    """Returns objects and folders below a folder, by their paths in it."""
    bucket, key = _split(folder)
    ask = functools.partial(_files().list_objects, os.fspath(folder), delimiter=delimiter)
    try:
        items, folders = _tried("list", folder, ask)
    except FileNotFoundError as error:
        raise InputError(f"{folder}: there is no bucket {bucket}") from error
    prefix = f"{key}/" if key else ""
    objects = {item["name"].removeprefix(f"{bucket}/{prefix}"): _of_item(item) for item in items}
    objects.pop("", None)  # what the console makes for an empty folder
    return objects, {name.removeprefix(prefix).rstrip("/") for name in folders}


def _of_item(item: dict[str, Any]) -> Listed:
    return Listed(int(item["size"]), item.get("crc32c", ""), item["updated"])


def _split(place: epath.PathLike) -> tuple[str, str]:
    """Returns the bucket and the name in it."""
    bucket, _, key = os.fspath(place).removeprefix("gs://").partition("/")
    return bucket, key.strip("/")


def _tried(
    right: Right, path: epath.PathLike, work: Callable[[], T], seconds: float | None = None
) -> T:
    """Does the work; again while the network fails, at most for so long (then Unavailable)."""
    bucket = _split(path)[0]

    def attempt() -> T:
        try:
            done = work()
        except FileNotFoundError:
            _granted.add((bucket, right))
            raise
        except Exception as error:
            if (bucket, right) in _granted or not retry.is_denied(error):
                raise
            reason = str(error).strip().replace("\n", " ")[:200]
            raise InputError(
                f"{path}: this account may not {right} objects of the bucket {bucket} ({reason}); "
                f"give it storage.objects.{_PERMISSIONS[right]}; roles/storage.objectUser holds "
                "all that are needed"
            ) from error
        _granted.add((bucket, right))
        return done

    return retry.again(attempt, os.fspath(path), seconds=seconds)


@functools.cache
def _files() -> Any:
    """Returns the client. It is one for all threads: each request runs on a loop of fsspec's."""
    import aiohttp

    from bert_jax.storage.gcs import CheckedFileSystem

    limits = aiohttp.ClientTimeout(total=_REQUEST, sock_connect=_CONNECT, sock_read=_BYTE)
    return CheckedFileSystem(requests_timeout=limits, use_listings_cache=False)


# --- runs ---------------------------------------------------------------------------------------


def opened(
    root: str | epath.PathLike, corpus_dir: str = "", access: Literal["read", "write"] = "read"
) -> Workdir:
    """Returns the names of a run's files, on this machine or in a bucket; see `Workdir`.

    To `read` fetches the small files of a run in a bucket, as they are now; to `write` names the
    local folder of the run itself, which `Mirror` fills and sends.
    """
    if corpus_dir and is_bucket(corpus_dir):
        _listed(corpus_dir, "/")
    if not is_bucket(root):
        return Workdir(root, corpus_dir)
    remote = epath.Path(os.fspath(root).rstrip("/"))
    if access == "read":
        local = cached("views", remote)
        _refresh(remote, local, _VIEW_FILES)
    else:
        local = cached("runs", remote)
        require_run(remote, names(remote) - {OWNER})
    return Workdir(local, corpus_dir, remote)


def is_going_on(workdir: Workdir) -> bool:
    """Returns whether a run is at work, as far as is known.

    Of one in a bucket, opened to `read`: whether its last line is recent.
    """
    if workdir.remote is None:
        return in_use(workdir.root)
    started, last, kind = 0.0, 0.0, ""
    with contextlib.suppress(FileNotFoundError):
        if owner := Holder.parse((workdir.root / OWNER).read_bytes()):
            started = owner.since
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError, IndexError):
        line = json.loads(workdir.timings.read_bytes().split(b"\n")[-2])
        last, kind = line["time"], line["kind"]
    has_ended = kind == "end" and last >= started
    return not has_ended and time.time() - max(started, last) < _LATELY


def holder(workdir: Workdir, seconds: float | None = None) -> Holder | None:
    """Returns who holds a run, or has started one in a bucket last; None: nobody that is known."""
    place = workdir.root / "lock" if workdir.remote is None else workdir.remote / OWNER
    try:
        return Holder.parse(read(place, seconds=seconds))
    except FileNotFoundError:
        return None


def _refresh(remote: epath.Path, local: epath.Path, files: Iterable[str]) -> None:
    """Makes files of a local folder those of the bucket."""
    there = _listed(remote, "/")[0]
    with named_errors(local):
        local.mkdir(parents=True, exist_ok=True)
        for name in files:
            here = local / name
            if name not in there:
                here.unlink(missing_ok=True)
            elif not is_same(here, there[name]):
                data = read(remote / name)
                with new_file(here) as temporary:
                    temporary.write_bytes(data)


def cached(kind: str, remote: epath.PathLike) -> epath.Path:
    """Returns the local folder for a place in a bucket: its name for people, and a hash of it."""
    name = "/".join(_split(remote))
    short = re.sub(r"[^A-Za-z0-9.-]+", "_", name)[-40:]
    return cache_folder() / kind / f"{short}-{hashlib.sha256(name.encode()).hexdigest()[:12]}"


class Mirror:
    """Sends what process `number` writes of a run to the run's bucket; of a local run nothing.

    Process 0, which holds the lock of the local folder, writes the run's small files, and all of
    them their traces. While entered, a thread sends what has changed every half a minute, taking a
    twentieth of the time at most.
    """

    def __init__(self, workdir: Workdir, number: int = 0):
        self._workdir, self._number = workdir, number
        self._local, self._remote = workdir.root, workdir.remote
        self.token = ""  # of the start that the run belongs to
        self._is_first = False  # nobody had started the run before
        self._sent: dict[str, tuple[int, int]] = {}  # (bytes, time) of files that were sent
        self._pushing = threading.Lock()
        self._taken: InputError | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._push_again, name="mirror", daemon=True)

    def take(self, me: Holder) -> None:
        """Makes this start the run's owner, and the local files those to go on with."""
        self.token = me.token
        if self._remote is None:
            return
        before, ours = holder(self._workdir), self._owned()
        self._is_first = before is None
        if before is None or before.token not in ours:
            _refresh(self._remote, self._local, RUN_FILES)
        kept = [before.token] if before is not None and before.token in ours else []
        # Before the bucket's: a kill between the two leaves the local files the owner's still.
        tokens = json.dumps({"format_version": 1, "tokens": [*kept, me.token]})
        write_atomic(self._local / _OWNED, tokens)
        if self._is_first:
            put(self._remote / OWNER, b"")
        put(self._remote / OWNER, me.text().encode(), right="replace")

    def check(self) -> None:
        """Raises InputError if a push has seen that the run belongs to another start."""
        if self._taken is not None:
            raise self._taken

    def flush(self) -> None:
        """Sends all that has changed, however long it takes while the network is there."""
        if self._remote is not None:
            self._push(retry.GIVE_UP)

    def forget(self, files: Iterable[str]) -> None:
        """Removes what a start has sent that is to leave nothing; as far as that can be done."""
        if self._remote is None:
            return
        self._stop.set()
        with contextlib.suppress(Exception), self._pushing:
            self._require_own(0)
            remove(self._remote / name for name in files)
            if self._is_first:
                remove([self._remote / OWNER])
                (self._local / _OWNED).unlink(missing_ok=True)

    def __enter__(self) -> "Mirror":
        if self._remote is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._remote is not None and not self._stop.is_set():
            self._stop.set()
            with contextlib.suppress(Exception):  # a failure is shown, and may be the network
                self._push(0)

    def _owned(self) -> list[str]:
        """Reads the tokens of the starts that wrote into the local folder."""
        try:
            return json.loads((self._local / _OWNED).read_text())["tokens"]
        except (FileNotFoundError, ValueError, TypeError, KeyError):
            return []

    def _require_own(self, seconds: float) -> None:
        """Raises InputError if OWNER is another's; one that cannot be read is not."""
        now = holder(self._workdir, seconds)
        if now is not None and now.token != self.token:
            self._taken = InputError(
                f"{self._remote}: now belongs to {now}, which has started the run after this "
                "one; this one ends here"
            )
            raise self._taken

    def _push_again(self) -> None:
        pause = _SECONDS
        while not self._stop.wait(pause):
            began = time.monotonic()
            try:
                self._push(0)
            except Exception:  # the next one may arrive; a flush waits, and raises
                if self._taken is not None:
                    return
            pause = max(_SECONDS, (time.monotonic() - began) / _SHARE)

    def _push(self, seconds: float) -> None:
        assert self._remote is not None
        with self._pushing:
            changed = self._changed()
            if changed or seconds:
                self._require_own(seconds)
            for name, stamp in changed.items():
                with named_errors(self._local / name):
                    data = (self._local / name).read_bytes()
                put(self._remote / name, data, seconds)
                self._sent[name] = stamp

    def _changed(self) -> dict[str, tuple[int, int]]:
        """Returns the files that are not sent as they are now."""
        local = pathlib.Path(self._local)
        mine = [local / name for name in RUN_FILES] if self._number == 0 else []
        mine += (local / "profile").rglob(f"process_{self._number}.*")
        changed = {}
        for path in mine:
            with contextlib.suppress(FileNotFoundError):
                stat = os.stat(path)
                stamp = stat.st_size, stat.st_mtime_ns
                name = path.relative_to(local).as_posix()
                if self._sent.get(name) != stamp:
                    changed[name] = stamp
        return changed
