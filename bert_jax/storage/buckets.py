"""Objects in buckets: the one module that sends requests about gs:// paths, except Orbax's own.

An object is whole or missing; nothing is renamed or appended. Every call retries while the network
fails, for ten minutes by default, and then raises `Unavailable`. A missing bucket, and a permission
that is denied at its first use, are bad input. A permission that is denied later means that a token
has expired, and is retried.

Content is read from one generation of an object and compared with the size and the CRC32C that the
bucket gives. Lists, entries of objects, and ranges have no checksum: they are requested twice, and
both responses must be equal. A mismatch is retried like a network fault.
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
Right = Literal["list", "read", "write", "replace"]
# The names of the permissions: storage.objects.list and so on.
_PERMISSIONS = {"list": "list", "read": "get", "write": "create", "replace": "delete"}

_PROBE = ".bert_jax.tmp"  # written and removed to test the permissions
# Bytes that are read at a time from a disk, and from an opened object.
_BLOCK, _RANGE = 2**20, 2**22
# Time limits in seconds: of a request, of a connection, and between two bytes of a response.
_REQUEST, _CONNECT, _BYTE = 600.0, 30.0, 120.0

# (bucket, right) that were used with success.
_granted: set[tuple[str, Right]] = set()


class Listed(NamedTuple):
    """The entry of an object in a list."""

    size: int  # in bytes
    crc32c: str  # of the content, base64
    updated: str  # the time of the last write, RFC 3339
    generation: str  # changes with every write
    encoding: str  # Content-Encoding: clients decompress gzip unasked


class Replaced(ConnectionError):
    """The object was replaced or removed after its entry was read."""


# {path of an object: local copy}: this thread reads the copies (see `copies`).
local_copies: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "local_copies", default=types.MappingProxyType({})
)


def is_bucket(path: epath.PathLike) -> bool:
    """Returns whether the path lies in a bucket."""
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
        self, path: epath.PathLike, seconds: float | None = None, listed: Listed | None = None
    ) -> bytes:
        """Returns the content of an object.

        The content is compared with the checksum of `listed`, else with that of the response, else
        with one that is requested.
        """
        from bert_jax.storage import gcs

        given = [listed] if listed else []

        def read_whole() -> bytes:
            if given:
                listed = given.pop()  # may be out of date: the next attempt requests another
            else:
                headers, content = _files().call("GET", "b/{}/o/{}", *split(path), alt="media")
                if "x-goog-hash" in headers and not gcs.is_unpacked(headers):
                    return content  # `gcs` has compared size and checksum
                listed = _describe_once(path)
            content = _media(path, listed, 0, listed.size)
            if not _has_checksum(google_crc32c.Checksum(content), listed):
                raise ConnectionError(f"{path}: the content does not match the bucket's checksum")
            return content

        return _retry("read", path, read_whole, seconds)

    def open(self, path: epath.PathLike) -> io.BufferedReader:
        """Returns a file that requests one range of an object at a time."""
        if copy := local_copies.get().get(os.fspath(path)):
            return open(copy, "rb")
        # fsspec buffers; our own client sends the requests, retries them and checks permissions.
        return io.BufferedReader(_Ranges(path, _require_object(path)))

    def sha256(self, path: epath.PathLike) -> str:
        """Returns the SHA-256 of an object."""
        with self.open(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def stat(
        self, path: epath.PathLike, seconds: float | None = None, listed: Listed | None = None
    ) -> tuple[int, int]:
        """Returns size and time of an object; sends no request if `listed` is given."""
        listed = listed or _require_object(path, seconds)
        date = datetime.datetime.fromisoformat(listed.updated)
        return listed.size, round(date.timestamp() * 1e9)

    def write(
        self, path: epath.Path, text: str | Iterable[str], seconds: float | None = None
    ) -> None:
        """Replaces the text of an object atomically."""
        put(path, (text if isinstance(text, str) else "".join(text)).encode(), seconds)

    def exists(self, path: epath.Path) -> bool:
        """Returns whether the object exists."""
        try:
            _retry("read", path, functools.partial(_describe_once, path))
        except FileNotFoundError:
            return False
        return True

    def names(self, folder: epath.PathLike) -> set[str]:
        """Returns the names in a folder; none if it is missing."""
        objects, folders = _list_folder(folder, "/", verify=False)
        return (objects.keys() | folders) - {_PROBE}

    @contextlib.contextmanager
    def cached_lists(self, folder: epath.PathLike) -> Iterator[None]:
        """Answers requests of epath and Orbax about a folder from one list of the folder.

        Use it to read a folder that nobody changes, since Orbax repeats its requests many times.
        The list is valid for at most half a minute, and until this process writes there.
        """
        from bert_jax.storage import gcs

        bucket, key = split(folder)
        with gcs.answered_from(bucket, f"{key}/", list_objects(folder)):
            yield


def read_range(path: epath.PathLike, listed: Listed, first: int, end: int) -> bytes:
    """Returns the bytes from `first` to `end` of an object that has not changed since `listed`.

    Only their number is checked, since a bucket has checksums of whole objects only.
    """

    def fetch() -> bytes:
        try:
            return _media(path, listed, first, end)
        except Replaced as error:
            if (now := describe(path)) is not None and now.generation == listed.generation:
                raise
            raise InputError(
                f"{path}: changed while it was read; run again once nothing writes there"
            ) from error

    return _retry("read", path, fetch)


def _media(path: epath.PathLike, listed: Listed, first: int, end: int) -> bytes:
    """Requests the bytes of an object from `first` to `end` once."""
    if listed.encoding:
        raise InputError(
            f"{path}: is stored with Content-Encoding: {listed.encoding}; upload it without "
            "(gcloud storage cp), or as a .gz file"
        )
    headers = {} if (first, end) == (0, listed.size) else {"Range": f"bytes={first}-{end - 1}"}
    request = {"alt": "media", "ifGenerationMatch": listed.generation, "headers": headers}
    try:
        _, content = _files().call("GET", "b/{}/o/{}", *split(path), **request)
    except (FileExistsError, FileNotFoundError) as error:  # gcsfs: HTTP 412 and 404
        raise Replaced(f"{path}: was replaced while it was read") from error
    if len(content) != end - first:
        raise ConnectionError(f"{path}: received {len(content)} of {end - first} bytes")
    return content


class _Ranges(fsspec.spec.AbstractBufferedFile):
    """A file that reads an object, one range at a time."""

    def __init__(self, path: epath.PathLike, listed: Listed):
        super().__init__(None, path, block_size=_RANGE, size=listed.size)
        self._listed = listed

    def _fetch_range(self, start: int, end: int) -> bytes:
        request = functools.partial(read_range, self.path, self._listed, start, end)
        return _retry("read", self.path, functools.partial(_request_twice, request))


def _request_twice(request: Callable[[], T]) -> T:
    """Sends a request whose response has no checksum twice, and requires equal responses."""
    first, second = request(), request()
    if first != second:
        raise ConnectionError("two responses to the same request differ")
    return first


def describe(path: epath.PathLike, seconds: float | None = None) -> Listed | None:
    """Returns the entry of an object; None if it is missing."""
    try:
        return _require_object(path, seconds)
    except FileNotFoundError:
        return None


def _require_object(path: epath.PathLike, seconds: float | None = None) -> Listed:
    """Returns the entry of an object; raises FileNotFoundError if it is missing."""
    request = functools.partial(_request_twice, functools.partial(_describe_once, path))
    try:
        return _retry("read", path, request, seconds)
    except FileNotFoundError as error:
        raise FileNotFoundError(errno.ENOENT, "is missing", os.fspath(path)) from error


def _describe_once(path: epath.PathLike) -> Listed:
    """Requests the entry of an object once."""
    item = _files().call("GET", "b/{}/o/{}", *split(path), json_out=True)
    with _translate_parse_errors():
        return _parse_item(item)


def list_objects(
    folder: epath.PathLike, delimiter: Literal["", "/"] = "", seconds: float | None = None
) -> dict[str, Listed]:
    """Returns the objects below a folder by their paths; with "/" only those directly in it."""
    return _list_folder(folder, delimiter, seconds)[0]


def remove(paths: Iterable[epath.PathLike]) -> None:
    """Removes objects; missing ones are ignored."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            _retry("write", path, functools.partial(_files().rm_file, os.fspath(path)))


def require_writable(folder: epath.Path) -> None:
    """Raises InputError unless objects of a folder may be listed, read and written."""
    probe = folder / _PROBE  # always the same name, so that a later call removes it after a kill
    _list_folder(folder, "/")
    put(probe, b"")
    put(probe, b"", right="replace")
    with contextlib.suppress(FileNotFoundError):  # another process tested at the same moment
        BucketStorage().read(probe)
    remove([probe])


def put(
    path: epath.PathLike, data: bytes, seconds: float | None = None, right: Right = "write"
) -> None:
    """Writes or replaces a small object; `right` names the permission for error messages."""
    try:
        _retry(right, path, lambda: _files().pipe_file(os.fspath(path), data), seconds)
    except FileNotFoundError as error:
        raise InputError(f"{path}: there is no bucket {split(path)[0]}") from error


def upload(file: epath.PathLike, path: epath.PathLike) -> None:
    """Writes or replaces an object with the content of a local file of any size."""
    _retry("write", path, lambda: _files().put_file(os.fspath(file), os.fspath(path)))


def has_same_content(file: epath.PathLike, listed: Listed) -> bool:
    """Returns whether a local file has the content of an object."""
    try:
        if os.stat(file).st_size != listed.size:
            return False
        with open(file, "rb") as opened_file:
            checksum = google_crc32c.Checksum()
            for _ in checksum.consume(opened_file, _BLOCK):
                pass
    except FileNotFoundError:
        return False
    return _has_checksum(checksum, listed)


def _has_checksum(checksum: google_crc32c.Checksum, listed: Listed) -> bool:
    return base64.b64encode(checksum.digest()).decode() == listed.crc32c


def _list_folder(
    folder: epath.PathLike, delimiter: str, seconds: float | None = None, verify: bool = True
) -> tuple[dict[str, Listed], set[str]]:
    """Returns objects and folders below a folder by their paths in it.

    With `verify`, every page is requested twice, and both responses must be equal.
    """
    bucket, key = split(folder)
    prefix = f"{key}/" if key else ""
    objects: dict[str, Listed] = {}
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
    objects.pop("", None)  # the console creates it for an empty folder
    return objects, folders


def _request_page(
    bucket: str, prefix: str, delimiter: str, token: str | None
) -> tuple[dict[str, Listed], set[str], str]:
    """Requests a page of a list once; returns objects, folders and the token of the next page."""
    query = {"prefix": prefix or None, "delimiter": delimiter or None, "pageToken": token}
    page = _files().call("GET", "b/{}/o", bucket, json_out=True, maxResults=1000, **query)
    with _translate_parse_errors():
        if page["kind"] != "storage#objects":
            raise ValueError(page["kind"])
        objects = {i["name"].removeprefix(prefix): _parse_item(i) for i in page.get("items", [])}
        folders = {n.removeprefix(prefix).rstrip("/") for n in page.get("prefixes", [])}
        return objects, folders, page.get("nextPageToken", "")


@contextlib.contextmanager
def _translate_parse_errors() -> Iterator[None]:
    """Turns errors about a malformed response into ConnectionError, which is retried."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConnectionError(f"a response is damaged ({error!r})") from error


def _parse_item(item: dict[str, Any]) -> Listed:
    crc32c, updated, generation = (item[name] for name in ("crc32c", "updated", "generation"))
    return Listed(int(item["size"]), crc32c, updated, generation, item.get("contentEncoding", ""))


def split(path: epath.PathLike) -> tuple[str, str]:
    """Returns the bucket and the name in it."""
    bucket, _, key = os.fspath(path).removeprefix("gs://").partition("/")
    return bucket, key.strip("/")


def _retry(
    right: Right, path: epath.PathLike, work: Callable[[], T], seconds: float | None = None
) -> T:
    """Calls `work` with retries; raises InputError for a permission that was never granted."""
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
                f"give it storage.objects.{_PERMISSIONS[right]}; roles/storage.objectUser has all "
                "that are needed"
            ) from error
        _granted.add((bucket, right))
        return done

    return retry.call_with_retries(attempt, os.fspath(path), seconds=seconds)


@functools.cache
def _files() -> Any:
    """Returns the client, one for all threads: fsspec runs each request on its own event loop."""
    import aiohttp

    from bert_jax.storage.gcs import CheckedFileSystem

    limits = aiohttp.ClientTimeout(total=_REQUEST, sock_connect=_CONNECT, sock_read=_BYTE)
    return CheckedFileSystem(requests_timeout=limits, use_listings_cache=False)
