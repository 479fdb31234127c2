"""Subclasses of gcsfs's client: one checks responses, one also retries requests of Orbax and JAX.

This module is imported on the first use of a bucket. In commands and their workers, epath,
Orbax and JAX use `RetryingFileSystem` for gs:// paths (see `process`).
"""

import asyncio
import base64
import contextlib
import json
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import google_crc32c
from fsspec import asyn
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError
from multidict import CIMultiDictProxy

from bert_jax import private_apis
from bert_jax.errors import InputError
from bert_jax.storage import retry

# Seconds for which a listing is valid; the size in bytes below which contents are cached.
_VALID_SECONDS, _SMALL = 30.0, 2**20
# Values of the headers Content-Range and x-goog-hash.
_RANGE, _CRC32C = re.compile(r"bytes (\d+)-(\d+)/(\d+)"), re.compile(r"crc32c=([^, ]+)")


class CheckedFileSystem(GCSFileSystem):
    """Detects what gcsfs does not: damaged responses, and servers that lack an operation (501)."""

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            response = await super()._call(method, path, *args, **kwargs)
            if kwargs.get("alt") == "media" or "alt=media" in path:
                _compare_with_headers(*response)
            return response
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConnectionError("a response was cut short, or damaged") from error
        except HttpError as error:
            if int(error.code or 0) != 501:  # not implemented
                raise
            raise InputError(
                f"{_address(path, args)}: this bucket's server does not support {method} {path} "
                "(501); use a server that does, such as Google Cloud Storage"
            ) from error

    call = asyn.sync_wrapper(_call)


class RetryingFileSystem(CheckedFileSystem):
    """Retries each request for as many seconds as `retry.call_with_retries`.

    Orbax and jax send requests in the middle of work that cannot be repeated as a whole, since
    other processes wait for this one. The permissions were tested before, so a denied one means
    that a token has expired, and is retried too.
    """

    # Without the retries of gcsfs: six, in half a minute.
    _request = private_apis.request_method_without_retries()

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        cache = _cache
        response = cache.find(method, path, args, kwargs) if cache else None
        if response is not None:
            return response
        backoff = retry.Backoff(_address(path, args))
        while True:
            try:
                response = await super()._call(method, path, *args, **kwargs)
                if cache:
                    cache.record(method, path, kwargs, response)
                return response
            except Exception as error:
                if not retry.is_retryable(error):
                    raise
                pause = backoff.next_wait(error)
            await asyncio.sleep(pause)

    call = asyn.sync_wrapper(_call)  # overrides the inherited one, which would not retry


class _Responses:
    """Responses to requests about a folder of a bucket, from a listing and earlier responses.

    Assumes that no object has the name of the folder; `find` reports one as missing.
    """

    def __init__(
        self, bucket: str, prefix: str, objects: Mapping[str, Any], previous: "_Responses | None"
    ):
        self._bucket, self._prefix = bucket, prefix
        self._items = {
            prefix + name: {
                "name": prefix + name,
                "bucket": bucket,
                "size": str(entry.size),
                "updated": entry.updated,
                "timeCreated": entry.updated,
                "generation": entry.generation,
            }
            for name, entry in objects.items()
        }
        # Contents by address and range; those of `previous` if the objects are unchanged.
        self._contents: dict[tuple[str, str], Any] = {}
        if previous is not None and (previous._bucket, previous._items) == (bucket, self._items):
            self._contents = previous._contents
        self._end = time.monotonic() + _VALID_SECONDS

    def find(
        self, method: str, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any | None:
        """Returns the response to a request, or None if it is not known.

        Raises:
          FileNotFoundError: the object is missing.
        """
        if method != "GET" or time.monotonic() > self._end:
            return None
        if "alt=media" in path:
            return self._contents.get((path, str(kwargs.get("headers"))))
        if args[:1] != (self._bucket,):
            return None
        if path == "b/{}/o" and (kwargs.get("prefix") or "").startswith(self._prefix):
            return self._list_page(kwargs["prefix"], kwargs.get("delimiter"))
        if path == "b/{}/o/{}" and f"{args[1]}/".startswith(self._prefix):
            if args[1] not in self._items:
                raise FileNotFoundError(_address(path, args))
            return self._items[args[1]]
        return None

    def _list_page(self, prefix: str, delimiter: str | None) -> dict[str, Any]:
        """Returns the listing of the objects and folders whose names begin with a prefix."""
        items, folders = [], dict[str, None]()
        for name, item in sorted(self._items.items()):
            rest = name[len(prefix) :]
            if name.startswith(prefix) and delimiter and delimiter in rest:
                folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
            elif name.startswith(prefix):
                items.append(item)
        return {"kind": "storage#objects", "items": items, "prefixes": list(folders)}

    def record(self, method: str, path: str, kwargs: Mapping[str, Any], response: Any) -> None:
        """Caches the content of a small object; any request that is not a GET ends the cache."""
        if method != "GET":
            self._end = 0.0
        elif "alt=media" in path and len(response[1]) < _SMALL:
            self._contents[path, str(kwargs.get("headers"))] = response


# The cache in use, if any; the latest one, whose contents the next one may reuse.
_cache: _Responses | None = None
_latest: _Responses | None = None


@contextlib.contextmanager
def cache_responses(bucket: str, prefix: str, objects: Mapping[str, Any]) -> Iterator[None]:
    """Answers requests about a folder from a listing of it; see `BucketStorage.cache_reads`."""
    global _cache, _latest
    _latest = _cache = _Responses(bucket, prefix, objects, _latest)
    try:
        yield
    finally:
        _cache = None


def _compare_with_headers(headers: CIMultiDictProxy[str], content: bytes) -> None:
    """Raises ConnectionError if content differs from the size or checksum in its headers.

    The checksum is for the whole object. If the content is a range, only its size is compared.
    """
    if is_decompressed(headers):
        return
    stored_size = headers.get("x-goog-stored-content-length")
    size = int(stored_size) if stored_size else len(content)
    if span := _RANGE.fullmatch(headers.get("Content-Range", "")):
        first, last, total = map(int, span.groups())
        size, stored_size = last + 1 - first, str(total)
    if len(content) != size:
        raise ConnectionError(f"received {len(content)} of {size} bytes")
    crc = _CRC32C.search(",".join(headers.getall("x-goog-hash", [])))
    checksum = google_crc32c.Checksum(content).digest()
    if crc and stored_size == str(size) and base64.b64decode(crc[1]) != checksum:
        raise ConnectionError("the content does not match the bucket's checksum")


def is_decompressed(headers: Mapping[str, str]) -> bool:
    """Returns whether the client decompressed the content; see `ObjectEntry.encoding`."""
    return headers.get("x-goog-stored-content-encoding", "identity") != "identity"


def _address(path: str, args: tuple[Any, ...]) -> str:
    """Returns the address of the bucket or object of a request, for messages."""
    return "gs://" + "/".join(args[:2]) if args else path
