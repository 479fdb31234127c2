"""Buckets: the one file that reads and writes places named gs://, and files here in the same way.

An object is whole or not there; nothing is renamed or appended. (Orbax writes to its own gs://
paths.) Every call tries again while the network fails, for ten minutes, and then raises
`Unavailable`. A bucket that is not there, and rights that are refused at the first use, are bad
input; from then on a refusal is taken for a token that has expired, and waited for.
"""

import base64
import contextlib
import datetime
import errno
import functools
import hashlib
import io
import logging
import os
from collections.abc import Callable, Iterable
from typing import IO, Any, Literal, NamedTuple, TypeVar

import fsspec
from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage import retry
from bert_jax.storage.workdir import made, named_errors, write_atomic

T = TypeVar("T")
Right = Literal["list", "read", "write", "replace"]
# Their names in roles: storage.objects.list and so on.
_PERMISSIONS = {"list": "list", "read": "get", "write": "create", "replace": "delete"}

_PROBE = ".bert_jax.tmp"  # written and removed to see whether objects may be
# Bytes read from a disk at a time, and of an opened object.
_BLOCK, _RANGE = 2**20, 2**22
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
    encoding: str = ""  # Content-Encoding: gzip, which clients unpack unasked


def is_bucket(place: epath.PathLike) -> bool:
    """Returns whether the place lies in a bucket."""
    name = os.fspath(place)
    if "://" not in name:
        return False
    if not name.startswith("gs://"):
        raise InputError(f"{name}: of places with ://, only buckets (gs://) can be used")
    if not split(place)[0]:
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


def opened(path: epath.PathLike) -> IO[bytes]:
    """Returns the bytes of an object of any size, a range of which is read at a time.

    Raises:
      FileNotFoundError: nothing is there.
    """
    listed = _there(path)
    if listed.encoding:
        raise InputError(
            f"{path}: is stored with Content-Encoding: {listed.encoding}, and its length is not "
            "that of its text; upload it without (gcloud storage cp), or as a .gz file"
        )
    # A file of fsspec, but by our own client: it outlasts a bucket that fails, and names rights.
    return io.BufferedReader(_Ranges(None, path, block_size=_RANGE, size=listed.size))


class _Ranges(fsspec.spec.AbstractBufferedFile):
    """The bytes of an object as of a file, which holds a range of them."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        return read(self.path, start, end)


def sha256(path: epath.PathLike) -> str:
    """Returns the SHA-256 of a file of this machine, or of a small object."""
    if is_bucket(path):
        return hashlib.sha256(read(path)).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def state(path: epath.PathLike, seconds: float | None = None) -> tuple[int, int]:
    """Returns the bytes of a file of this machine or an object, and its date in nanoseconds."""
    if not is_bucket(path):
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns
    listed = _there(path, seconds)
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


def about(path: epath.PathLike, seconds: float | None = None) -> Listed | None:
    """Returns what is known of an object; None if nothing is there."""
    ask = functools.partial(_files().call, "GET", "b/{}/o/{}", *split(path), json_out=True)
    try:
        return _of_item(_tried("read", path, ask, seconds))
    except FileNotFoundError:
        return None


def _there(path: epath.PathLike, seconds: float | None = None) -> Listed:
    if (listed := about(path, seconds)) is None:
        raise FileNotFoundError(errno.ENOENT, "is missing", os.fspath(path))
    return listed


def names(folder: epath.Path) -> set[str]:
    """Returns the names in a folder of this machine or a bucket; none if it is not there."""
    if not is_bucket(folder):
        with named_errors(folder):
            return {path.name for path in folder.iterdir()} if folder.exists() else set()
    objects, folders = _listed(folder, "/")
    return (objects.keys() | folders) - {_PROBE}


def listing(
    folder: epath.PathLike, delimiter: Literal["", "/"] = "", seconds: float | None = None
) -> dict[str, Listed]:
    """Returns all objects below a folder of a bucket, by their paths in it; `/`: those in it."""
    return _listed(folder, delimiter, seconds)[0]


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


def _listed(
    folder: epath.PathLike, delimiter: str, seconds: float | None = None
) -> tuple[dict[str, Listed], set[str]]:
    """Returns objects and folders below a folder, by their paths in it."""
    bucket, key = split(folder)
    ask = functools.partial(_files().list_objects, os.fspath(folder), delimiter=delimiter)
    try:
        items, folders = _tried("list", folder, ask, seconds)
    except FileNotFoundError as error:
        raise InputError(f"{folder}: there is no bucket {bucket}") from error
    prefix = f"{key}/" if key else ""
    objects = {item["name"].removeprefix(f"{bucket}/{prefix}"): _of_item(item) for item in items}
    objects.pop("", None)  # what the console makes for an empty folder
    return objects, {name.removeprefix(prefix).rstrip("/") for name in folders}


def _of_item(item: dict[str, Any]) -> Listed:
    encoding = item.get("contentEncoding", "")
    return Listed(int(item["size"]), item.get("crc32c", ""), item["updated"], encoding)


def split(place: epath.PathLike) -> tuple[str, str]:
    """Returns the bucket and the name in it."""
    bucket, _, key = os.fspath(place).removeprefix("gs://").partition("/")
    return bucket, key.strip("/")


def _tried(
    right: Right, path: epath.PathLike, work: Callable[[], T], seconds: float | None = None
) -> T:
    """Does the work; again while the network fails, at most for so long (then Unavailable)."""
    bucket = split(path)[0]

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
