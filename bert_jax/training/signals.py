"""Requests to stop: SIGTERM and Ctrl-C end the run at the next step, with the state saved."""

import os
import signal
from types import FrameType

# A second Ctrl-C does not wait.
IMPATIENT = 130


class StopRequest:
    """While entered, SIGTERM and SIGINT set `requested`; a second SIGINT ends the process."""

    def __init__(self) -> None:
        self.requested = False
        self._interrupts = 0
        self._before: dict[int, object] = {}

    def __enter__(self) -> "StopRequest":
        for number in (signal.SIGTERM, signal.SIGINT):
            self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.requested = True
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                os._exit(IMPATIENT)
