"""Requests to stop, which end the run after a step, with the state saved; and hangs."""

import contextlib
import faulthandler
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from jax.experimental import multihost_utils

from bert_jax.distributed import peers as peers_lib
from bert_jax.distributed.peers import Peers
from bert_jax.errors import INTERRUPTED, UNAVAILABLE
from bert_jax.storage import retry

_STDERR = 2
# Seconds in which faulthandler shows the stacks; until a process whose interpreter's lock is held
# is killed; and between two looks at the clock.
_SHOW, _STUCK, _LOOK = 1.0, 30.0, 0.5
_SHOW_CURSOR = b"\x1b[?25h"
_STOPPING = b"stopping after a step or a few; Ctrl-C again leaves at once, unsaved\n"


class StopRequest:
    """A request to stop, set by SIGTERM and SIGINT while entered; a second SIGINT is the end.

    Of several processes a signal to one stops all after the same step: jax hears SIGTERM and finds
    one that none has done yet; SIGINT is turned into it.
    """

    def __init__(self, peers: Peers):
        self.requested = False
        self._is_shared = peers.count > 1
        self._interrupts = self._reached = 0
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> "StopRequest":
        if self._is_shared:
            peers_lib.notice_sigterm()
        else:
            retry.latest = float("inf")
            self._before[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)
        self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        return self

    def after_step(self, done: int) -> None:
        """Takes note of a step that is done; called after each, on all processes alike."""
        if self._is_shared:
            # jax stops at one more than the most that a process gave. A roll-back sets `done` back:
            # that step could be far off then, or the run over before.
            self._reached = max(self._reached + 1, done)
            self.requested |= multihost_utils.reached_preemption_sync_point(self._reached)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
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
            self.requested = not self._is_shared
            with contextlib.suppress(OSError):  # of a terminal, or a reader, that is gone
                os.write(_STDERR, _STOPPING)
        if self._is_shared:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            retry.hurry()


class Watchdog:
    """Ends the process with the stacks of its threads when it was not reset for too long.

    Three, each for what the one before cannot do. faulthandler's thread, which needs no
    interpreter's lock, shows the stacks, but could end with exit code 1 only. A thread of ours ends
    with 74, so that the run is started again. SIGALRM kills the process (142 in a shell) where the
    interpreter's lock is never given back and no thread of ours can run.

    Args:
      seconds: that may pass between two resets; 0: any number. BERT_JAX_HANG_AFTER, if it is set,
        says otherwise.
      coordinates: whether jax ends other processes as soon as this one has ended, who are to show
        their stacks, too.
    """

    def __init__(self, seconds: float, coordinates: bool = False):
        self._seconds = peers_lib.seconds("BERT_JAX_HANG_AFTER") or seconds
        self._show = 5 * _SHOW if coordinates else _SHOW
        self._deadline = float("inf")
        # Of the two that are not ours: for a step that takes less than a millisecond it is too long
        # to set them after each. They may come so much later, and are set when they would not.
        self._set_for, self._late = float("-inf"), min(_LOOK, self._seconds / 10)
        self._watch: threading.Thread | None = None

    def reset(self, times: int = 1) -> None:
        """Starts the time again, `times` as long: something was done."""
        if not self._seconds:
            return
        seconds = times * self._seconds + self._late
        now = time.monotonic()
        self._deadline = now + seconds + self._show
        if not 0 <= now + seconds - self._set_for <= self._late:
            self._set_for = now + seconds
            faulthandler.dump_traceback_later(seconds, file=_STDERR)
            with contextlib.suppress(ValueError):  # longer than a timer can be
                signal.setitimer(signal.ITIMER_REAL, seconds + self._show + _STUCK)
        if self._watch is None:
            self._watch = threading.Thread(target=self._end_when_late, name="watchdog", daemon=True)
            self._watch.start()

    def pause(self) -> None:
        """Stops the time until the next reset: what comes now may take any."""
        if self._seconds:
            self._deadline, self._set_for = float("inf"), float("-inf")
            signal.setitimer(signal.ITIMER_REAL, 0.0)
            faulthandler.cancel_dump_traceback_later()

    def _end_when_late(self) -> None:
        while time.monotonic() < self._deadline:
            time.sleep(_LOOK)
        os._exit(UNAVAILABLE)
