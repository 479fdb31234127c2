"""Calls that fail, and a work item of `prepare` that does; workers import them by their names."""

import dataclasses
import os
import signal
import sys
import time

from bert_jax.errors import InputError


def kill_worker(*arguments):
    """Ends the process as the kernel does where memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)


def sleep(*arguments):
    """Works for a long time."""
    time.sleep(100)


def print_line():
    print("a line of a library", flush=True)
    print("an error of a library", file=sys.stderr, flush=True)


class Panic(BaseException):
    """As pyo3 raises it."""


class Unpicklable(Exception):
    """Cannot be sent."""

    def __reduce__(self):
        raise TypeError("cannot be pickled")


class Unreadable(Exception):
    """Can be sent, and cannot be made again, since its arguments are others."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


ERRORS = {"panic": Panic("m"), "unpicklable": Unpicklable("m"), "unreadable": Unreadable("m", 1)}


def fail(name):
    raise ERRORS[name]


def refuse(message):
    raise InputError(message)


@dataclasses.dataclass(frozen=True)
class Item:
    """See `bert_jax.data.work_items.WorkItem`."""

    location: str
    name: str
    bytes: int = 1

    def make(self, folder, tick):
        kill_worker()
