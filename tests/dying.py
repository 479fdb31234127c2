"""Calls that fail, and a work item of `prepare` that does; workers import them by their names."""

import dataclasses
import os
import signal
import time


def kill_worker(*arguments):
    """Ends the process as the kernel does where memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(*arguments):
    time.sleep(100)


class Unreadable(Exception):
    """Can be pickled, and not be made again: its arguments are others."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def fail(kind):
    if kind == "panic":
        raise BaseException("as pyo3 raises it")
    raise ValueError("m", lambda: 0) if kind == "unpicklable" else Unreadable("m", 1)


@dataclasses.dataclass(frozen=True)
class Item:
    """See `bert_jax.data.work_items.WorkItem`."""

    location: str
    name: str
    bytes: int = 1

    def make(self, folder, tick):
        kill_worker()
