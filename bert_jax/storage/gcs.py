"""Subclasses of gcsfs's client: one checks responses, one also retries requests of Orbax and JAX.

This module is imported on the first use of a bucket. In our own processes, fsspec gives epath,
Orbax and jax the class `PatientFileSystem` (see `process`).
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

from bert_jax import foreign
from bert_jax.errors import InputError
from bert_jax.storage import retry

# Seconds for which a list is valid; the size in bytes below which contents are kept.
_VALID_SECONDS, _SMALL = 30.0, 2**20
# Values of the headers Content-Range and x-goog-hash.
_RANGE, _CRC32C = re.compile(r"bytes (\d+)-(\d+)/(\d+)"), re.compile(r"crc32c=([^, ]+)")


class CheckedFileSystem(GCSFileSystem):
    """Raises errors for faults that gcsfs does not check: damaged responses, unknown requests."""

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = await super()._call(method, path, *args, **kwargs)
            if kwargs.get("alt") == "media" or "alt=media" in path:
                _compare_with_headers(*answer)
            return answer
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConnectionError("a response was cut short, or damaged") from error
        except HttpError as error:
            if int(error.code or 0) != 501:  # not implemented
                raise
            raise InputError(
                f"{_address(path, args)}: this bucket's server does not support {method} {path} "
                "(501); use another server"
            ) from error

    call = asyn.sync_wrapper(_call)


class PatientFileSystem(CheckedFileSystem):
    """Retries a request as long as `retry.call_with_retries` does.

    Orbax and jax send requests in the middle of work that cannot be repeated as a whole, since
    other processes wait for this one. The permissions were tested before, so a denied one means
    that a token has expired, and is retried too.
    """

    # Without the retries of gcsfs: six, in half a minute.
    _request = foreign.request_without_retries()

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        cache = _cache
        answer = cache.find(method, path, args, kwargs) if cache else None
        if answer is not None:
            return answer
        backoff = retry.Backoff(_address(path, args))
        while True:
            try:
                answer = await super()._call(method, path, *args, **kwargs)
                if cache:
                    cache.add(method, path, kwargs, answer)
                return answer
            except Exception as error:
                if not retry.is_retryable(error):
                    raise
                pause = backoff.next_wait(error)
            await asyncio.sleep(pause)

    call = asyn.sync_wrapper(_call)  # overrides the inherited one, which would not retry


class _AnswerCache:
    """Responses to requests about a folder of a bucket, from a list and from earlier responses.

    Assumes that no object has the name of the folder.
    """

    def __init__(
        self, bucket: str, prefix: str, objects: Mapping[str, Any], previous: "_AnswerCache | None"
    ):
        self._bucket, self._prefix = bucket, prefix
        self._items = {
            prefix + name: {
                "name": prefix + name,
                "bucket": bucket,
                "size": str(listed.size),
                "updated": listed.updated,
                "timeCreated": listed.updated,
                "generation": listed.generation,
            }
            for name, listed in objects.items()
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
        """Returns a list of the objects and folders whose names begin with a prefix."""
        items, folders = [], dict[str, None]()
        for name, item in sorted(self._items.items()):
            rest = name[len(prefix) :]
            if name.startswith(prefix) and delimiter and delimiter in rest:
                folders[prefix + rest.partition(delimiter)[0] + delimiter] = None
            elif name.startswith(prefix):
                items.append(item)
        return {"kind": "storage#objects", "items": items, "prefixes": list(folders)}

    def add(self, method: str, path: str, kwargs: Mapping[str, Any], answer: Any) -> None:
        """Keeps the content of a small object; a request that changes objects clears the cache."""
        if method != "GET":
            self._end = 0.0
        elif "alt=media" in path and len(answer[1]) < _SMALL:
            self._contents[path, str(kwargs.get("headers"))] = answer


# The cache in use, if any, and the last one.
_cache: _AnswerCache | None = None
_previous: _AnswerCache | None = None


@contextlib.contextmanager
def answered_from(bucket: str, prefix: str, objects: Mapping[str, Any]) -> Iterator[None]:
    """Answers requests about a folder from a list of the folder; see `cached_lists`."""
    global _cache, _previous
    _previous = _cache = _AnswerCache(bucket, prefix, objects, _previous)
    try:
        yield
    finally:
        _cache = None


def _compare_with_headers(headers: CIMultiDictProxy[str], content: bytes) -> None:
    """Raises ConnectionError if content differs from the size or checksum in its headers.

    The checksum is of the whole object, so that only the size of a range is compared.
    """
    if is_unpacked(headers):
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


def is_unpacked(headers: Mapping[str, str]) -> bool:
    """Returns whether the client decompressed content, see `Listed.encoding`."""
    return headers.get("x-goog-stored-content-encoding", "identity") != "identity"


def _address(path: str, args: tuple[Any, ...]) -> str:
    """Returns the address of the bucket or object of a request, for messages."""
    return "gs://" + "/".join(args[:2]) if args else path
