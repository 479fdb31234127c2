"""gcsfs as Orbax and jax reach buckets through epath: it outlasts a network that fails.

Imported by fsspec, on the first use of a path gs:// (see `mirror`).
"""

from gcsfs.core import GCSFileSystem
from gcsfs.retry import retry_request

from bert_jax.storage import retry

# gcsfs gives up after half a minute: six tries, whose waits double up to 32 seconds.
_TRIES = 6 + round(retry.GIVE_UP / 32)


class PatientFileSystem(GCSFileSystem):
    """Tries a request as long as `retry.again` does its work.

    Orbax and jax ask in the middle of work that cannot be begun anew from outside: in several
    processes the others wait for the one whose request failed.
    """

    _request = retry_request(retries=_TRIES)(GCSFileSystem._request.__wrapped__)
