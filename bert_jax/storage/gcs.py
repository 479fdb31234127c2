"""gcsfs, whose answers are checked; and as Orbax and jax reach buckets through epath.

Imported on the first use of a bucket; by fsspec, for paths gs:// (see `buckets`).
"""

import asyncio
import base64
import json
import re
from typing import Any

import google_crc32c
from fsspec import asyn
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError
from multidict import CIMultiDictProxy

from bert_jax.errors import InputError
from bert_jax.storage import retry

# Of the headers Content-Range and x-goog-hash.
_RANGE, _CRC32C = re.compile(r"bytes (\d+)-(\d+)/(\d+)"), re.compile(r"crc32c=([^, ]+)")


class CheckedFileSystem(GCSFileSystem):
    """Names faults that gcsfs does not: damaged answers, and a server that is no real one."""

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            answer = await super()._call(method, path, *args, **kwargs)
            if kwargs.get("alt") == "media" or "alt=media" in path:
                _require_as_stated(*answer)
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
    (`mirror.opened`), so that refused ones are a token that has expired.
    """

    # One attempt: gcsfs itself tries six times, half a minute in all.
    _request = GCSFileSystem._request.__wrapped__

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        patience = retry.Patience(_place(path, args))
        while True:
            try:
                return await super()._call(method, path, *args, **kwargs)
            except Exception as error:
                if not retry.passes(error):
                    raise
                pause = patience.after(error)
            await asyncio.sleep(pause)

    call = asyn.sync_wrapper(_call)  # by which opened files are written: that above is not patient


def _require_as_stated(headers: CIMultiDictProxy[str], content: bytes) -> None:
    """Raises ConnectionError for content that is not what the headers of its answer state.

    The checksum is that of the whole object, and is not compared with a range of it.
    """
    if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
        return  # the client has unpacked it
    whole = headers.get("x-goog-stored-content-length")
    size = int(whole) if whole else len(content)
    if span := _RANGE.fullmatch(headers.get("Content-Range", "")):
        first, last, total = map(int, span.groups())
        size, whole = last + 1 - first, str(total)
    if len(content) != size:
        raise ConnectionError(f"{len(content)} bytes came of {size}")
    crc = _CRC32C.search(",".join(headers.getall("x-goog-hash", [])))
    checksum = google_crc32c.Checksum(content).digest()
    if crc and whole == str(size) and base64.b64decode(crc[1]) != checksum:
        raise ConnectionError("other content than the bucket's checksum says")


def _place(path: str, args: tuple[Any, ...]) -> str:
    """Returns the bucket or the object of a request, for people."""
    return "gs://" + "/".join(args[:2]) if args else path
