"""gcsfs, whose answers are checked; and as Orbax and jax reach buckets through epath.

Imported on the first use of a bucket; in processes of our own by fsspec, too (see `process`).
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
    """Names faults that gcsfs does not: damaged answers, and a server that is no real one."""

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = await super()._call(method, path, *args, **kwargs)
            if kwargs.get("alt") == "media" or "alt=media" in path:
                _compare_with_headers(*answer)
            return answer
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ConnectionError("an answer was cut short, or damaged") from error
        except HttpError as error:
            if int(error.code or 0) != 501:  # not implemented
                raise
            raise InputError(
                f"{_place(path, args)}: the server of this bucket does not know {method} {path} "
                "(501); use one that does"
            ) from error

    call = asyn.sync_wrapper(_call)


class PatientFileSystem(CheckedFileSystem):
    """Tries a request as long as `retry.again` does its work.

    Orbax and jax ask in the middle of work that cannot be begun again from outside: in several
    processes the others wait for the one whose request failed. Rights have been proven by then
    (`mirror.open_workdir`), so that refused ones are a token that has expired.
    """

    # One attempt: gcsfs itself tries six times, half a minute in all.
    _request = foreign.request_without_retries()

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        answers = _answers
        answer = answers.find(method, path, args, kwargs) if answers else None
        if answer is not None:
            return answer
        patience = retry.Patience(_place(path, args))
        while True:
            try:
                answer = await super()._call(method, path, *args, **kwargs)
                if answers:
                    answers.add(method, path, kwargs, answer)
                return answer
            except Exception as error:
                if not retry.passes(error):
                    raise
                pause = patience.after(error)
            await asyncio.sleep(pause)

    call = asyn.sync_wrapper(_call)  # by which opened files are written: that above is not patient


class _AnswerCache:
    """Answers to requests about a bucket's folder, from a list and from earlier answers.

    Assumes that no object has the folder's own name.
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
        # By address and range; taken from `previous` if the objects are the same.
        self._contents: dict[tuple[str, str], Any] = {}
        if previous is not None and (previous._bucket, previous._items) == (bucket, self._items):
            self._contents = previous._contents
        self._end = time.monotonic() + _VALID_SECONDS

    def find(
        self, method: str, path: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Any | None:
        """Returns the answer to a request; None: the bucket must be asked.

        Raises:
          FileNotFoundError: nothing is there.
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
                raise FileNotFoundError(_place(path, args))
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
        """Keeps the content of a small object; a request that changes anything ends all answers."""
        if method != "GET":
            self._end = 0.0
        elif "alt=media" in path and len(answer[1]) < _SMALL:
            self._contents[path, str(kwargs.get("headers"))] = answer


# The cached answers in use, if any; and those that were used last.
_answers: _AnswerCache | None = None
_previous: _AnswerCache | None = None


@contextlib.contextmanager
def answered_from(bucket: str, prefix: str, objects: Mapping[str, Any]) -> Iterator[None]:
    """Answers requests about a folder from a list of the folder; see `cached_lists`."""
    global _answers, _previous
    _previous = _answers = _AnswerCache(bucket, prefix, objects, _previous)
    try:
        yield
    finally:
        _answers = None


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
    """Returns whether the client unpacked content that the bucket stores compressed (`Listed`)."""
    return headers.get("x-goog-stored-content-encoding", "identity") != "identity"


def _place(path: str, args: tuple[Any, ...]) -> str:
    """Returns the bucket or the object of a request, for people."""
    return "gs://" + "/".join(args[:2]) if args else path
