"""Functions of the operating system; without effect on systems that lack them."""

import contextlib
import ctypes
import glob
import os
import re
import signal
import sys

_PR_SET_PDEATHSIG = 1
# Opened at import, since a child process must not open libraries between fork and exec.
_LIBC = ctypes.CDLL(None)


def cores() -> int:
    """Returns the number of cores that this process may use; except on Linux, of the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def accelerator_count() -> int:
    """Returns how many accelerators JAX may use on this machine, without initializing them."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        return 0
    patterns = "/dev/accel[0-9]*", "/dev/vfio/[0-9]*", "/dev/nvidia[0-9]*"
    return max(len(glob.glob(pattern)) for pattern in patterns)


def local_device_count() -> int:
    """Returns how many devices JAX will have on this machine, without initializing them."""
    if os.environ.get("JAX_PLATFORMS") == "cpu":
        flag = re.search(r"force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
        return int(flag[1]) if flag else 1
    return max(1, accelerator_count())


def free_memory() -> int:
    """Returns the bytes of memory that processes may still take; where unknown, all memory."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            return 1024 * int(next(line for line in file if "MemAvailable" in line).split()[1])
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


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
    """Makes the kernel kill this process when its parent dies for any reason; only on Linux."""
    with contextlib.suppress(AttributeError):
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# mallopt(3): M_ARENA_MAX=1; M_MMAP_MAX=0 (no separate mappings), M_TRIM_THRESHOLD=2 GiB.
_ONE_POOL, _KEEP = ((-8, 1),), ((-4, 0), (-1, 2**31 - 1))


def use_one_memory_pool() -> None:
    """Makes the C library use one memory pool for all threads, which `keep_freed_memory` needs.

    Must be called before threads start: each would get a pool of 64 MB. The larger buffers of a
    training step do not fit into such a pool, and would be mapped and unmapped at each step.
    """
    _mallopt(_ONE_POOL)


def keep_freed_memory() -> None:
    """Makes the C library keep freed memory instead of returning it to the system.

    XLA on a CPU allocates every buffer of a step again. Page faults on returned memory would take
    up to two fifths of the time of a small model's step.
    """
    _mallopt((*_ONE_POOL, *_KEEP))


def _mallopt(options: tuple[tuple[int, int], ...]) -> None:
    with contextlib.suppress(AttributeError):  # not the GNU C library
        for option, value in options:
            _LIBC.mallopt(option, value)
