"""Requests to stop: SIGTERM and Ctrl-C end the run at the next step, with the state saved."""

import os
import signal
from types import FrameType

# A second Ctrl-C does not wait.
IMPATIENT = 130
_SHOW_CURSOR = b"\x1b[?25h"


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
        if number == signal.SIGINT:
            self._interrupts += 1
            if self._interrupts > 1:
                if os.isatty(1):
                    os.write(1, _SHOW_CURSOR)  # the progress bar hides it
                os._exit(IMPATIENT)
        if not self.requested:
            os.write(2, b"stopping after this step; Ctrl-C again leaves at once, unsaved\n")
        self.requested = True
