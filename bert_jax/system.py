"""What is asked of the operating system, where it can be asked."""

import contextlib
import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1
# Opened here, since a child between fork and exec must not open libraries.
_LIBC = ctypes.CDLL(None)


def cores() -> int:
    """Returns how many cores this process may use; all of the machine where Linux is not."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent dies, however it dies; Linux alone can."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
