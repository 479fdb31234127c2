"""Objects in buckets: all requests of this package, except those through epath, Orbax and JAX.

An object is whole or missing; nothing is renamed or appended. Every call retries while the network
fails, for ten minutes by default, and then raises `Unavailable`. A missing bucket, and a permission
that is denied at its first use, are bad input. A request that is denied after an earlier success is
retried, since a token has probably expired.

Content is read from one generation of an object and compared with the size and the CRC32C that the
bucket gives. Listings, metadata of objects, and ranges have no checksum: they are requested twice,
and both responses must be equal. Requested once are what `exists` and `names` ask, and parts of a
content that is verified as a whole (`read`, `read_range`). A mismatch is retried like a fault of
the network.
"""

import base64
import contextlib
import contextvars
import datetime
import errno
import functools
import hashlib
import io
import os
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

import fsspec
import google_crc32c
from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage import retry

T = TypeVar("T")
Action = Literal["list", "read", "write", "replace"]
# The permission for each action: storage.objects.list and so on.
_PERMISSIONS = {"list": "list", "read": "get", "write": "create", "replace": "delete"}

_PROBE = ".bert_jax.tmp"  # written and removed to test the permissions
# Bytes that are read at a time from a disk, and from an opened object.
_BLOCK, _RANGE = 2**20, 2**22
# Timeouts in seconds: of a request, of a connection, and between two bytes of a response.
_REQUEST_TIMEOUT, _CONNECT_TIMEOUT, _READ_TIMEOUT = 600.0, 30.0, 120.0

# Each (bucket, action) that has succeeded.
_granted: set[tuple[str, Action]] = set()


class ObjectEntry(NamedTuple):
    """The metadata of an object, as in a listing."""

    size: int  # in bytes
    crc32c: str  # of the content, base64
    updated: str  # the time of the last write, RFC 3339
    generation: str  # changes with every write
    # Content-Encoding. Clients decompress gzip, and then size and checksum do not fit.
    encoding: str


class Replaced(ConnectionError):
    """The object was replaced or removed after its entry was read."""


# {path of an object: local copy}: in this thread, `BucketStorage.open` opens the copy; see
# `copies`.
local_copies: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "local_copies", default=types.MappingProxyType({})
)


def is_in_bucket(path: epath.PathLike) -> bool:
    """Returns whether the path lies in a bucket; raises InputError for another kind of URL."""
    name = os.fspath(path)
    if "://" not in name:
        return False
    if not name.startswith("gs://"):
        raise InputError(f"{name}: not a local path or a bucket (gs://); download it first")
    if not split(path)[0]:
        raise InputError(f"{name}: names no bucket; write gs://BUCKET/FOLDER")
    try:
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{name}: buckets need the [gcs] extra: pip install 'bert-jax[gcs]'"
        ) from error
    return True


class BucketStorage:
    """Objects in buckets, by the interface `Storage`."""

    is_bucket = True

    def read(
        self, path: epath.PathLike, seconds: float | None = None, entry: ObjectEntry | None = None
    ) -> bytes:
        """Returns the content of an object.

        The content is compared with the checksum of `entry`, else with the checksum in the headers
        of the response, else with the checksum of an entry that is requested.
        """
        from bert_jax.storage import gcs

        def read_whole() -> bytes:
            nonlocal entry
            current, entry = entry, None  # `entry` may be out of date: the next attempt ignores it
            if current is None:
                headers, content = _client().call("GET", "b/{}/o/{}", *split(path), alt="media")
                if "x-goog-hash" in headers and not gcs.is_decompressed(headers):
                    return content  # `gcs` has compared size and checksum
                current = _fetch_unverified_entry(path)  # below, this generation is requested
            content = _request_content(path, current, 0, current.size)
            if not _matches_checksum(google_crc32c.Checksum(content), current):
                raise ConnectionError(f"{path}: the content does not match the bucket's checksum")
            return content

        return _retry("read", path, read_whole, seconds)

    def open(self, path: epath.PathLike) -> io.BufferedReader:
        """Returns a file that requests one range of an object at a time."""
        if copy := local_copies.get().get(os.fspath(path)):
            return open(copy, "rb")
        # fsspec buffers; our own client sends the requests, retries them and checks permissions.
        return io.BufferedReader(_ObjectFile(path, _request_entry(path)))

    def sha256(self, path: epath.PathLike) -> str:
        """Returns the SHA-256 of an object."""
        with self.open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def stat(
        self, path: epath.PathLike, seconds: float | None = None, entry: ObjectEntry | None = None
    ) -> tuple[int, int]:
        """Returns size and time of an object; sends no request if `entry` is given."""
        entry = entry or _request_entry(path, seconds)
        date = datetime.datetime.fromisoformat(entry.updated)
        return entry.size, round(date.timestamp() * 1e9)

    def write(
        self, path: epath.Path, text: str | Iterable[str], seconds: float | None = None
    ) -> None:
        """Replaces the text of an object atomically."""
        put(path, (text if isinstance(text, str) else "".join(text)).encode(), seconds)

    def exists(self, path: epath.Path) -> bool:
        """Returns whether the object exists."""
        try:
            _retry("read", path, functools.partial(_fetch_unverified_entry, path))
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: epath.PathLike) -> set[str]:
        """Returns the names in a folder; none if it is missing."""
        objects, folders = _list_folder(folder, "/", verify=False)
        return (objects.keys() | folders) - {_PROBE}

    @contextlib.contextmanager
    def cache_reads(self, folder: epath.PathLike) -> Iterator[None]:
        """Answers requests of epath and Orbax about a folder from one listing of the folder.

        Small contents are cached too. This saves time since Orbax repeats its requests, but it is
        only for a folder that nobody changes. The cache is dropped after half a minute, and when
        epath or Orbax write, but not when `put` does.
        """
        from bert_jax.storage import gcs

        bucket, key = split(folder)
        with gcs.cache_responses(bucket, f"{key}/", list_objects(folder)):
            yield


def read_range(path: epath.PathLike, entry: ObjectEntry, first: int, end: int) -> bytes:
    """Returns bytes [first, end) of an object that has not changed since `entry`.

    Only the number of bytes is checked, as checksums are of whole objects; the caller must verify
    the whole content.
    """
    return _retry("read", path, functools.partial(_request_range, path, entry, first, end))


def _request_range(path: epath.PathLike, entry: ObjectEntry, first: int, end: int) -> bytes:
    """Requests bytes [first, end) once; raises InputError if the object has changed."""
    try:
        return _request_content(path, entry, first, end)
    except Replaced as error:
        if (current := describe(path)) is not None and current.generation == entry.generation:
            raise  # the same object is still there, so the response was a fault: retried
        raise InputError(
            f"{path}: changed while it was read; run again once nothing writes there"
        ) from error


def _request_content(path: epath.PathLike, entry: ObjectEntry, first: int, end: int) -> bytes:
    """Requests bytes [first, end) of an object once; raises Replaced."""
    if entry.encoding:
        raise InputError(
            f"{path}: is stored with Content-Encoding: {entry.encoding}; upload it again "
            "without one (gcloud storage cp), or as a .gz file"
        )
    headers = {} if (first, end) == (0, entry.size) else {"Range": f"bytes={first}-{end - 1}"}
    request = {"alt": "media", "ifGenerationMatch": entry.generation, "headers": headers}
    try:
        _, content = _client().call("GET", "b/{}/o/{}", *split(path), **request)
    except (FileExistsError, FileNotFoundError) as error:  # gcsfs: HTTP 412 and 404
        raise Replaced(f"{path}: was replaced while it was read") from error
    if len(content) != end - first:
        raise ConnectionError(f"{path}: received {len(content)} of {end - first} bytes")
    return content


class _ObjectFile(fsspec.spec.AbstractBufferedFile):
    """An object as a file, which requests one range at a time."""

    def __init__(self, path: epath.PathLike, entry: ObjectEntry):
        super().__init__(None, path, block_size=_RANGE, size=entry.size)
        self._entry = entry

    def _fetch_range(self, start: int, end: int) -> bytes:
        request = functools.partial(_request_range, self.path, self._entry, start, end)
        return _retry("read", self.path, functools.partial(_request_twice, request))


def _request_twice(request: Callable[[], T]) -> T:
    """Sends a request whose response has no checksum twice, and requires equal responses."""
    first, second = request(), request()
    if first != second:
        raise ConnectionError("two responses to the same request differ")
    return first


def describe(path: epath.PathLike, seconds: float | None = None) -> ObjectEntry | None:
    """Returns the entry of an object; None if it is missing."""
    try:
        return _request_entry(path, seconds)
    except FileNotFoundError:
        return None


def _request_entry(path: epath.PathLike, seconds: float | None = None) -> ObjectEntry:
    """Returns the entry of an object; raises FileNotFoundError if it is missing."""
    request = functools.partial(_request_twice, functools.partial(_fetch_unverified_entry, path))
    try:
        return _retry("read", path, request, seconds)
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "is missing", os.fspath(path)) from error


def _fetch_unverified_entry(path: epath.PathLike) -> ObjectEntry:
    """Requests the entry of an object once."""
    item = _client().call("GET", "b/{}/o/{}", *split(path), json_out=True)
    with _translate_malformed_responses():
        return _parse_item(item)


def list_objects(
    folder: epath.PathLike, delimiter: Literal["", "/"] = "", seconds: float | None = None
) -> dict[str, ObjectEntry]:
    """Returns {path relative to the folder: entry}; with "/" only for objects directly in it."""
    return _list_folder(folder, delimiter, seconds)[0]


def remove(paths: Iterable[epath.PathLike]) -> None:
    """Removes objects; missing ones are ignored."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            _retry("replace", path, functools.partial(_client().rm_file, os.fspath(path)))


def require_writable(folder: epath.Path) -> None:
    """Raises InputError unless objects of a folder may be listed, read and written."""
    probe = folder / _PROBE  # always the same name, so that a later call removes it after a kill
    _list_folder(folder, "/")
    put(probe, b"")
    put(probe, b"", action="replace")
    with contextlib.suppress(FileNotFoundError):  # another process tested at the same moment
        BucketStorage().read(probe)
    remove([probe])


def put(
    path: epath.PathLike, data: bytes, seconds: float | None = None, action: Action = "write"
) -> None:
    """Writes or replaces a small object; a denial is reported as that of `action`."""
    try:
        _retry(action, path, lambda: _client().pipe_file(os.fspath(path), data), seconds)
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no bucket {split(path)[0]}") from error


def upload(file: epath.PathLike, path: epath.PathLike) -> None:
    """Writes or replaces an object with the content of a local file of any size."""
    _retry("write", path, lambda: _client().put_file(os.fspath(file), os.fspath(path)))


def has_same_content(file: epath.PathLike, entry: ObjectEntry) -> bool:
    """Returns whether a local file has the content of an object."""
    try:
        if os.stat(file).st_size != entry.size:
            return False
        with open(file, "rb") as opened_file:
            checksum = google_crc32c.Checksum()
            for _ in checksum.consume(opened_file, _BLOCK):
                pass
    except FileNotFoundError:
        return False
    return _matches_checksum(checksum, entry)


def _matches_checksum(checksum: google_crc32c.Checksum, entry: ObjectEntry) -> bool:
    return base64.b64encode(checksum.digest()).decode() == entry.crc32c


def _list_folder(
    folder: epath.PathLike, delimiter: str, seconds: float | None = None, verify: bool = True
) -> tuple[dict[str, ObjectEntry], set[str]]:
    """Returns the objects and folders below a folder, by their paths relative to the folder.

    With `verify`, every page is requested twice, and both responses must be equal.
    """
    bucket, key = split(folder)
    prefix = f"{key}/" if key else ""
    objects: dict[str, ObjectEntry] = {}
    folders: set[str] = set()
    token: str | None = None
    while token != "":
        request = functools.partial(_request_page, bucket, prefix, delimiter, token)
        request = functools.partial(_request_twice, request) if verify else request
        try:
            page_objects, page_folders, token = _retry("list", folder, request, seconds)
        except FileNotFoundError as error:
            raise InputError(f"{folder}: there is no bucket {bucket}") from error
        objects |= page_objects
        folders |= page_folders
    objects.pop("", None)  # an object named like the folder, by which the console shows it
    return objects, folders


def _request_page(
    bucket: str, prefix: str, delimiter: str, token: str | None
) -> tuple[dict[str, ObjectEntry], set[str], str]:
    """Requests a page of a listing once; returns objects, folders and the next token."""
    query = {"prefix": prefix or None, "delimiter": delimiter or None, "pageToken": token}
    page = _client().call("GET", "b/{}/o", bucket, json_out=True, maxResults=1000, **query)
    with _translate_malformed_responses():
        if page["kind"] != "storage#objects":
            raise ValueError(page["kind"])
        objects = {i["name"].removeprefix(prefix): _parse_item(i) for i in page.get("items", [])}
        folders = {n.removeprefix(prefix).rstrip("/") for n in page.get("prefixes", [])}
        return objects, folders, page.get("nextPageToken", "")


@contextlib.contextmanager
def _translate_malformed_responses() -> Iterator[None]:
    """Turns errors about a malformed response into ConnectionError, which is retried."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConnectionError(f"a response is damaged ({error!r})") from error


def _parse_item(item: dict[str, Any]) -> ObjectEntry:
    crc32c, updated, generation = (item[name] for name in ("crc32c", "updated", "generation"))
    encoding = item.get("contentEncoding", "")
    return ObjectEntry(int(item["size"]), crc32c, updated, generation, encoding)


def split(path: epath.PathLike) -> tuple[str, str]:
    """Returns the bucket and the name in it."""
    bucket, _, key = os.fspath(path).removeprefix("gs://").partition("/")
    return bucket, key.strip("/")


def _retry(
    action: Action, path: epath.PathLike, work: Callable[[], T], seconds: float | None = None
) -> T:
    """Calls `work` with retries; raises InputError if an action is denied before it succeeded."""
    bucket = split(path)[0]

    def attempt() -> T:
        try:
            done = work()
        except FileNotFoundError:  # the bucket did not deny the action
            _granted.add((bucket, action))
            raise
        except Exception as error:
            if (bucket, action) in _granted or not retry.is_denied(error):
                raise
            reason = str(error).strip().replace("\n", " ")[:200]
            raise InputError(
                f"{path}: this account may not {action} objects of the bucket {bucket} "
                f"({reason}); give it storage.objects.{_PERMISSIONS[action]}; "
                "roles/storage.objectUser has all that are needed"
            ) from error
        _granted.add((bucket, action))
        return done

    return retry.call_with_retries(attempt, os.fspath(path), seconds=seconds)


@functools.cache
def _client() -> Any:
    """Returns the client. All threads share it, since fsspec sends all requests in one thread."""
    import aiohttp

    from bert_jax.storage.gcs import CheckedFileSystem

    limits = aiohttp.ClientTimeout(
        total=_REQUEST_TIMEOUT, sock_connect=_CONNECT_TIMEOUT, sock_read=_READ_TIMEOUT
    )
    return CheckedFileSystem(requests_timeout=limits, use_listings_cache=False)
