"""Recognizes temporary errors of networks and machines, and retries work that raises them.

Clients of buckets (gcsfs, aiohttp, google-auth), TensorStore (below Orbax) and the operating system
report the same few faults by different exceptions.
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
_STOP_GRACE = 30.0  # how long a fault may last once the process was asked to stop

_TRANSIENT_TYPES = (Unavailable, TimeoutError, ConnectionError, ssl.SSLError)
_TRANSIENT_TYPES += (http.client.HTTPException, socket.gaierror)
_TRANSIENT_NAMES = (
    *("ESTALE", "EIO", "EMFILE", "ENFILE", "EAGAIN", "EINTR", "EBUSY", "ENOBUFS", "ENOLCK"),
    *("ETIMEDOUT", "EPIPE", "ENETDOWN", "ENETUNREACH", "ENETRESET", "ECONNABORTED"),
    *("ECONNREFUSED", "ECONNRESET", "EHOSTDOWN", "EHOSTUNREACH", "EREMOTEIO", "ENOMEM"),
)
_TRANSIENT_ERRNOS = frozenset(getattr(errno, name, -1) for name in _TRANSIENT_NAMES)
# HTTP: timeout, too many requests, and errors of the server except "not implemented".
_TRANSIENT_STATUSES = frozenset({408, 429, *range(500, 600)}) - {501}
# The answer to an account without permission, and to a token that has expired.
_DENIED = frozenset({401, 403})
CLIENTS = ("gcsfs", "aiohttp", "google", "requests", "urllib3", "httpx", "httpcore", "botocore")
CLIENTS += ("httpx2", "httpcore2", "huggingface_hub")
_TRANSIENT_CLASS_NAMES = re.compile(
    r"Connect|Transport|Timeout|Payload|Disconnected|Proxy|Retry|Refresh|OSError|DNS|Checksum"
    r"|Chunked|SSL|Network|Protocol"
)
# Errors that clients raise for an answer that they cannot parse, such as one that is cut short.
_UNREADABLE = (json.JSONDecodeError, UnicodeDecodeError, LookupError, TypeError)
_UNREADABLE += (AttributeError, AssertionError)
# How TensorStore and gRPC name faults in the text of a ValueError or a RuntimeError.
_TRANSIENT_TEXT = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|ABORTED|RESOURCE_EXHAUSTED|INTERNAL: .*HTTP)\b"
    r"|HTTP response code: (408|429|5(?!01)\d\d)"
    r"|CURL error|Cannot connect|[Cc]onnection (reset|refused|aborted|closed)|[Tt]imed out"
    r"|Stale file handle|Input/output error|Too many open files|Temporary failure in name"
)
_DENIED_TEXT = re.compile(
    r"\b(UNAUTHENTICATED|PERMISSION_DENIED)\b|HTTP response code: (401|403)"
    r"|^Forbidden: "  # how gcsfs reports 403, in an OSError without a number
)


def is_transient(error: BaseException) -> bool:
    """Returns whether an error or a cause, even of an InputError, is temporary; a denial is not."""
    return any(map(_is_transient, _chain(error)))


def is_denied(error: BaseException) -> bool:
    """Returns whether a bucket denied a permission: it was never given, or a token has expired.

    Before the first success it is the user's error; afterwards it is temporary.
    """
    return any(_status(e) in _DENIED or _says(e, _DENIED_TEXT) for e in _chain(error))


def is_retryable(error: BaseException) -> bool:
    """Returns whether an error may go away: a temporary fault or a denied permission."""
    return is_transient(error) or is_denied(error)


class RetryControl:
    """The deadline and reporter of all retries. Libraries' threads inherit no context variable."""

    def __init__(self) -> None:
        self.reset()

    def reset(self, report: Callable[[str], object] = lambda line: None) -> None:
        """Clears the deadline; sets `report`, which shows a line about work that keeps failing."""
        self.deadline = math.inf  # the time, by time.monotonic(), after which nothing is retried
        self.report = report

    def shorten(self) -> None:
        """Ends all retries within half a minute, since the process is to stop."""
        self.deadline = min(self.deadline, time.monotonic() + _STOP_GRACE)


control = RetryControl()


class Backoff:
    """The growing waits between the attempts at one piece of work.

    `where` names the work in messages. `seconds` is how long faults may last; None: ten minutes.
    """

    def __init__(self, where: str, seconds: float | None = None):
        self._where, self._seconds = where, GIVE_UP if seconds is None else seconds
        self._wait, self._end = FIRST_WAIT, 0.0

    def next_wait(self, error: BaseException) -> float:
        """Returns the seconds to wait after a fault; raises Unavailable after too long."""
        now, reason = time.monotonic(), _reason(error)
        self._end = self._end or now + self._seconds
        if now + self._wait > min(self._end, control.deadline):
            timed_out = self._end <= control.deadline
            since = f"for {self._seconds:.0f} seconds" if timed_out else "when asked to stop"
            raise Unavailable(
                f"{self._where}: out of reach {since} ({reason}); run again to resume"
            ) from error
        if self._wait == 8 * FIRST_WAIT:  # at the fourth fault, so once
            control.report(f"{self._where}: out of reach ({reason}); trying again")
        # Random, so that the hosts of a pod do not all retry at the same moment.
        wait, self._wait = self._wait, min(2 * self._wait, LONGEST_WAIT)
        return wait * random.uniform(0.5, 1.0)


def call_with_retries(
    work: Callable[[], T], where: str, *, denied: str = "wait", seconds: float | None = None
) -> T:
    """Calls `work` until it succeeds, with growing waits after each temporary fault.

    Args:
      work: must be safe to call repeatedly.
      where: names the work in messages.
      denied: "wait" retries a denied permission, as after a token has expired; "refuse" raises
        InputError.
      seconds: how long faults may last; None: ten minutes.

    Raises:
      Unavailable: faults lasted too long. All other errors of `work` are raised at once.
    """
    backoff = Backoff(where, seconds)
    while True:
        try:
            return work()
        except (InputError, DiskFull):
            raise
        except Exception as error:
            if denied == "refuse" and is_denied(error):
                raise InputError(f"{where}: may not be used ({_reason(error)})") from error
            if not is_retryable(error):
                raise
            pause = backoff.next_wait(error)
        time.sleep(pause)


def _chain(error: BaseException | None) -> list[BaseException]:
    """Returns the error and its causes, the outermost first."""
    chain: list[BaseException] = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__
    return chain


def _is_transient(error: BaseException) -> bool:
    if isinstance(error, InputError | DiskFull):
        return False
    if status := _status(error):
        return status in _TRANSIENT_STATUSES
    return (
        isinstance(error, _TRANSIENT_TYPES)
        or (isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS)
        or (_module(error) in CLIENTS and bool(_TRANSIENT_CLASS_NAMES.search(type(error).__name__)))
        or (isinstance(error, _UNREADABLE) and _is_raised_in_client(error))
        or _says(error, _TRANSIENT_TEXT)
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
    owners = error, getattr(error, "response", None)
    values = [str(getattr(owner, name, "")) for owner in owners for name in names]
    return next((int(value) for value in values if value.isdecimal()), 0)


def _says(error: BaseException, pattern: re.Pattern[str]) -> bool:
    """Returns whether an error of a built-in type has a message that matches."""
    if type(error).__name__ == "JaxRuntimeError":
        return False  # devices use the same words for other faults
    plain = isinstance(error, OSError | ValueError | RuntimeError) or type(error) is Exception
    return plain and bool(pattern.search(str(error)))


def _reason(error: BaseException) -> str:
    while isinstance(error, Unavailable) and error.__cause__ is not None:
        error = error.__cause__  # retries inside of retries: one reason is enough
    text = str(error).strip().split("\n")[0][:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
