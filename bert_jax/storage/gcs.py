"""gcsfs as Orbax and jax reach buckets through epath: it outlasts a network that fails.

Imported by fsspec, on the first use of a path gs:// (see `mirror`).
"""

import asyncio
import random
import time
from typing import Any

from gcsfs.core import GCSFileSystem

from bert_jax.storage import retry

# One attempt: gcsfs itself tries six times, half a minute in all.
_request_once = GCSFileSystem._request.__wrapped__


class PatientFileSystem(GCSFileSystem):
    """Tries a request as long as `retry.again` does its work.

    Orbax and jax ask in the middle of work that cannot be begun again from outside: in several
    processes the others wait for the one whose request failed. Rights have been proven by then
    (`mirror.opened`), so that refused ones are a token that has expired.
    """

    async def _request(self, *args: Any, **kwargs: Any) -> Any:
        deadline = time.monotonic() + retry.GIVE_UP
        wait = retry.FIRST_WAIT
        while True:
            try:
                return await _request_once(self, *args, **kwargs)
            except Exception as error:
                passes = retry.is_transient(error) or retry.is_denied(error)
                if not passes or time.monotonic() + wait > deadline:
                    raise
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, retry.LONGEST_WAIT)
