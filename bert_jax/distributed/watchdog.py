"""Requests to stop, after which a run saves its state and ends; a watchdog for runs that hang."""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import jax
from jax.experimental import multihost_utils

from bert_jax import private_apis
from bert_jax.distributed import peers as peers_lib
from bert_jax.distributed.peers import Peers
from bert_jax.errors import INTERRUPTED, UNAVAILABLE
from bert_jax.storage import retry

_STDERR = 2
_PRINT = 1.0  # seconds for faulthandler to print the stacks
_KILL = 30.0  # seconds from then until SIGALRM kills a process whose interpreter lock is held
_POLL = 0.5  # seconds between two checks of the deadline
_SHOW_CURSOR = b"\x1b[?25h"
_STOPPING = b"stopping within a few steps; Ctrl-C again exits at once without saving\n"


class StopRequest:
    """A request to stop, set by SIGTERM and SIGINT while entered; a second SIGINT exits at once.

    A signal to one of several processes stops all of them after the same step: JAX handles SIGTERM
    and finds a step that no process has done yet. The handler of SIGINT sends SIGTERM.
    """

    def __init__(self, peers: Peers):
        self.requested = False
        self._is_shared = peers.count > 1
        self._interrupts = self._reached = 0
        self._old_handlers: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "StopRequest":
        if self._is_shared:  # JAX handles SIGTERM
            jax.config.update("jax_enable_preemption_service", True)
            private_apis.distributed_state().initialize_preemption_sync_manager()
        else:
            self._old_handlers[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)
        self._old_handlers[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        return self

    def on_step(self, done: int) -> None:
        """Updates the request; called after each step, on all processes."""
        if self._is_shared:
            # JAX stops one step after the highest number that a process gave. After a roll-back
            # `done` might never reach that step, so this gives a number that only rises.
            self._reached = max(self._reached + 1, done)
            self.requested |= multihost_utils.reached_preemption_sync_point(self._reached)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                with contextlib.suppress(OSError):
                    if os.isatty(1):
                        os.write(1, _SHOW_CURSOR)  # the progress bar hides it
                os._exit(INTERRUPTED)
        if not self.requested:
            self.requested = not self._is_shared  # if shared, `on_step` sets it
            with contextlib.suppress(OSError):  # the terminal or the reader may be gone
                os.write(_STDERR, _STOPPING)
        if self._is_shared:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            retry.control.shorten()


class Watchdog:
    """Prints all stacks and ends the process if it is not reset in time.

    It has three parts, each for a case that the previous part cannot handle. The thread of
    faulthandler needs no interpreter lock and prints the stacks, but could exit with code 1 only.
    A Python thread exits with code 74, after which the run is started again. SIGALRM kills the
    process (142 in a shell) if the interpreter lock is never released, so that no thread can run.

    Args:
      seconds: between two resets at most; 0 disables it. BERT_JAX_HANG_AFTER overrides it.
      is_coordinator: whether JAX ends the other processes when this one exits. If so, this process
        exits later, so that they can print their stacks.
    """

    def __init__(self, seconds: float, is_coordinator: bool = False):
        self._seconds = peers_lib.read_seconds("BERT_JAX_HANG_AFTER") or seconds
        self._print_seconds = 5 * _PRINT if is_coordinator else _PRINT
        self._deadline = float("inf")
        # Setting faulthandler and SIGALRM after each step would slow down fast steps. Both are set
        # to fire `_slack` seconds late, and set again only if they would fire at another time.
        self._fires_at, self._slack = float("-inf"), min(_POLL, self._seconds / 10)
        self._watch: threading.Thread | None = None

    def reset(self, times: int = 1) -> None:
        """Restarts the timer, with `times` the usual number of seconds."""
        if not self._seconds:
            return
        seconds = times * self._seconds + self._slack
        latest = time.monotonic() + seconds
        self._deadline = latest + self._print_seconds
        if not latest - self._slack <= self._fires_at <= latest:
            self._fires_at = latest
            faulthandler.dump_traceback_later(seconds, file=_STDERR)
            with contextlib.suppress(ValueError):  # too long for a timer
                signal.setitimer(signal.ITIMER_REAL, seconds + self._print_seconds + _KILL)
        if self._watch is None:
            self._watch = threading.Thread(target=self._end_when_late, name="watchdog", daemon=True)
            self._watch.start()

    def pause(self) -> None:
        """Stops the timer until the next reset."""
        if self._seconds:
            self._deadline, self._fires_at = float("inf"), float("-inf")
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.cancel_dump_traceback_later()

    def _end_when_late(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(_POLL)
        os._exit(UNAVAILABLE)
