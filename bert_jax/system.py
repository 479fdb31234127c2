"""What is asked of the operating system, where it can be asked."""

import contextlib
import ctypes
import glob
import os
import re
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Opened here, since a child between fork and exec must not open libraries.
_LIBC = ctypes.CDLL(None)


def cores() -> int:
    """Returns how many cores this process may use; all of the machine where Linux is not."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def local_device_count() -> int:
    """Returns how many devices jax will have on this machine, without starting them."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        flag = re.search(r"force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        return int(flag[1]) if flag else 1
    kinds = "/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*"
    return max(1, *(len(glob.glob(kind)) for kind in kinds))


def restart_in_utf8_mode() -> None:
    """Restarts this process in Python's UTF-8 mode if the locale knows only ASCII.

    With such a locale Python decodes other characters of the command line as lone surrogates, which
    tokenizers do not know, and cannot print these characters. To decode the arguments again is not
    enough: Python would still encode file names as ASCII.
    """
    # Processes that this one starts inherit the variable. It also prevents a second restart if
    # Python ignores it.
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def die_with_parent() -> None:
    """Has the kernel kill this process when its parent dies, however it dies; Linux alone can."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# Of mallopt(3): M_ARENA_MAX, one pool; M_MMAP_MAX, no mappings of their own; M_TRIM_THRESHOLD, two
# GiB are kept.
_ONE_POOL, _KEEP = ((-8, 1),), ((-4, 0), (-1, 2**31 - 1))


def use_one_memory_pool() -> None:
    """Tells the C library to serve all threads from one pool, as `keep_freed_memory` needs it.

    To be called before there are threads, who otherwise get pools of 64 MB each: a step's larger
    buffers do not fit there, and are mapped and given back at each step.
    """
    _mallopt(_ONE_POOL)


def keep_freed_memory() -> None:
    """Tells the C library to keep what is freed instead of giving it back to the system.

    XLA on a CPU asks for every buffer of a step again; returned pages are faulted in again at each,
    up to two fifths of the time of a small model's step.
    """
    _mallopt((*_ONE_POOL, *_KEEP))


def _mallopt(options: tuple[tuple[int, int], ...]) -> None:
    with contextlib.suppress(AttributeError):  # not the GNU C library
        for option, value in options:
            _LIBC.mallopt(option, value)
