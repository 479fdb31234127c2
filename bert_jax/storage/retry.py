"""Errors of networks and machines that pass, and trying again until they have.

The one place that knows them. Clients of buckets (gcsfs, aiohttp, google-auth), TensorStore below
Orbax and the operating system each have their own words for the same few faults.
"""

import errno
import http.client
import json
import math
import random
import re
import socket
import ssl
import time
import traceback
from collections.abc import Callable
from typing import TypeVar

from bert_jax.errors import DiskFull, InputError, Unavailable

T = TypeVar("T")

# Seconds: the first wait, the longest, and how long a fault may last before a command gives up.
FIRST_WAIT, LONGEST_WAIT, GIVE_UP = 0.5, 30.0, 600.0
_HURRY = 30.0  # before one gives up that is asked to stop

_KINDS = (Unavailable, TimeoutError, ConnectionError, ssl.SSLError)
_KINDS += (http.client.HTTPException, socket.gaierror)
_ERRNO_NAMES = (
    *("ESTALE", "EIO", "EMFILE", "ENFILE", "EAGAIN", "EINTR", "EBUSY", "ENOBUFS", "ENOLCK"),
    *("ETIMEDOUT", "EPIPE", "ENETDOWN", "ENETUNREACH", "ENETRESET", "ECONNABORTED"),
    *("ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO", "ENOMEM"),
)
_ERRNO = frozenset(getattr(errno, name) for name in _ERRNO_NAMES if hasattr(errno, name))
# Of HTTP: too slow, too many requests, the server's own, except what it can never do (501).
_STATUS = frozenset({408, 429, *range(500, 600)}) - {501}
# A token that expired is answered so until it is renewed; so is an account without rights.
_DENIED = frozenset({401, 403})
CLIENTS = ("gcsfs", "aiohttp", "google", "requests", "urllib3", "httpx", "httpcore", "botocore")
_TRANSPORT = re.compile(
    r"Connect|Transport|Timeout|Payload|Disconnected|Proxy|Retry|Refresh|OSError|DNS|Checksum"
    r"|Chunked|SSL"
)
# Errors that clients raise for an answer that they cannot parse, such as one that is cut short.
_UNREADABLE = (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError)
_UNREADABLE += (AttributeError, AssertionError)
# As TensorStore and gRPC write them into the text of a ValueError or a RuntimeError.
_TEXT = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED|INTERNAL: .*HTTP)\b"
    r"|HTTP response code: (408|429|5(?!01)\d\d)"
    r"|CURL error|Cannot connect|[Cc]onnection (reset|refused|aborted|closed)|[Tt]imed out"
    r"|Stale file handle|Input/output error|Too many open files|Temporary failure in name"
)
_TEXT_DENIED = re.compile(
    r"\b(UNAUTHENTICATED|PERMISSION_DENIED)\b|HTTP response code: (401|403)"
    r"|^Forbidden: "  # gcsfs's word for 403, in an OSError without a number
)


def is_transient(error: BaseException) -> bool:
    """Returns whether an error, or one that it came from, is the network's or the machine's.

    Rights that are refused are not among them; see `is_denied`.
    """
    return any(map(_is_transient, _chain(error)))


def is_denied(error: BaseException) -> bool:
    """Returns whether a bucket refused rights: none were given, or a token has expired.

    Until a bucket has been used with success it is bad input; from then on it passes.
    """
    return any(_status(e) in _DENIED or _says(e, _TEXT_DENIED) for e in _chain(error))


def passes(error: BaseException) -> bool:
    """Returns whether it is the network's or the machine's, or a right that was there before."""
    return is_transient(error) or is_denied(error)


# When nothing is waited for any more, by time.monotonic().
latest = math.inf


def say(line: str) -> None:
    """Shows a line, once for each piece of work that waits: a run puts its own function here."""


def hurry() -> None:
    """Lets all wait for faults half a minute longer at most: the process is to stop."""
    global latest
    latest = min(latest, time.monotonic() + _HURRY)


class Patience:
    """The waits between attempts at one piece of work, which grow.

    Faults of what `where` names may follow one another for so many seconds, None: ten minutes.
    """

    def __init__(self, where: str, seconds: float | None = None):
        self._where, self._seconds = where, GIVE_UP if seconds is None else seconds
        self._wait, self._end = FIRST_WAIT, 0.0

    def after(self, error: BaseException) -> float:
        """Returns how many seconds to wait after a fault; raises Unavailable after too many."""
        now, reason = time.monotonic(), _reason(error)
        self._end = self._end or now + self._seconds
        if now + self._wait > min(self._end, latest):
            how = (
                f"for {self._seconds:.0f} seconds" if self._end <= latest else "when asked to stop"
            )
            raise Unavailable(
                f"{self._where}: out of reach {how} ({reason}); run again to go on"
            ) from error
        if self._wait == 8 * FIRST_WAIT:
            say(f"{self._where}: out of reach ({reason}); trying again")
        # Not all hosts of a pod at the same moment.
        wait, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        return wait * random.uniform(0.5, 1.0)


def again(
    work: Callable[[], T], where: str, *, denied: str = "wait", seconds: float | None = None
) -> T:
    """Repeats the work, from its start, after each passing fault, with growing waits.

    Refused rights are taken for a token that will be renewed (`wait`) or for bad input (`refuse`).
    What has become bad input by then is raised at once, whatever it came from, and so is what does
    not pass.

    Raises:
      Unavailable: faults lasted too long, see `Patience`.
    """
    patience = Patience(where, seconds)
    while True:
        try:
            return work()
        except (InputError, DiskFull):
            raise
        except Exception as error:
            if denied == "refuse" and is_denied(error):
                raise InputError(f"{where}: may not be used ({_reason(error)})") from error
            if not passes(error):
                raise
            pause = patience.after(error)
        time.sleep(pause)


def _chain(error: BaseException | None) -> list[BaseException]:
    """Returns the error and those it was raised from, the outermost first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, InputError | DiskFull):
        return False
    if status := _status(error):
        return status in _STATUS
    return (
        isinstance(error, _KINDS)
        or (isinstance(error, OSError) and error.errno in _ERRNO)
        or (_module(error) in CLIENTS and bool(_TRANSPORT.search(type(error).__name__)))
        or (isinstance(error, _UNREADABLE) and _is_raised_in_client(error))
        or _says(error, _TEXT)
    )


def _is_raised_in_client(error: BaseException) -> bool:
    frames = traceback.walk_tb(error.__traceback__)
    modules = (frame.f_globals.get("__name__", "") for frame, _ in frames)
    return any(module.partition(".")[0] in CLIENTS for module in modules)


def _module(error: BaseException) -> str:
    return type(error).__module__.partition(".")[0]


def _status(error: BaseException) -> int:
    """Returns the HTTP status that a client's error carries; 0 for none."""
    names = ("status", "code", "status_code") if _module(error) in CLIENTS else ()
    values = [str(getattr(error, name, "")) for name in names]
    return next((int(value) for value in values if value.isdecimal()), 0)


def _says(error: BaseException, pattern: re.Pattern[str]) -> bool:
    """Returns whether an error that has no kind of its own says so in its text."""
    if type(error).__name__ == "JaxRuntimeError":
        return False  # the devices' own words, for other faults
    plain = isinstance(error, OSError | ValueError | RuntimeError) or type(error) is Exception
    return plain and bool(pattern.search(str(error)))


def _reason(error: BaseException) -> str:
    text = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
