"""gcsfs, whose answers are checked; and as Orbax and jax reach buckets through epath.

Imported on the first use of a bucket; by fsspec, for paths gs:// (see `buckets`).
"""

import asyncio
import json
from typing import Any

from fsspec import asyn
from gcsfs.core import GCSFileSystem
from gcsfs.retry import HttpError

from bert_jax.errors import InputError
from bert_jax.storage import retry


class CheckedFileSystem(GCSFileSystem):
    """Names two faults that gcsfs does not: half an answer, and a server that is no real one."""

    async def _call(self, method: str, path: str, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super()._call(method, path, *args, **kwargs)
        except json.JSONDecodeError as error:
            raise ConnectionError("an answer was cut short") from error
        except HttpError as error:
            if int(error.code or 0) != 501:  # not implemented
                raise
            raise InputError(
                f"{_place(path, args)}: the server of this bucket does not know {method} {path} "
                "(501); use one that does"
            ) from error

    call = asyn.sync_wrapper(_call)
    # Objects and prefixes below a place. The public calls take a bucket that is not there for an
    # empty folder (`ls`), or list all that lies below (`find`).
    list_objects = asyn.sync_wrapper(GCSFileSystem._do_list_objects)


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


def _place(path: str, args: tuple[Any, ...]) -> str:
    """Returns the bucket or the object of a request, for people."""
    return "gs://" + "/".join(args[:2]) if args else path
