"""How far `prepare` is: a bar on a terminal, elsewhere a line every 30 seconds."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

from rich import progress as rich_progress

# Seconds between two lines.
_EVERY = 30.0


class Progress:
    """Tells how much text is done, how fast, and how long the rest will take.

    Args:
      what: is being done.
      say: is given lines where standard output is no terminal.
    """

    def __init__(self, what: str, say: Callable[[str], None]):
        self._what, self._say = what, say
        self._bar: rich_progress.Progress | None = None
        self._total = self._left = self._done = self._part = 0
        self._start = self._next = 0.0

    @contextlib.contextmanager
    def of(self, total: int, left: int) -> Iterator[None]:
        """Tells of some bytes while entered.

        Args:
          total: bytes in all.
          left: of them, those that were not done before.
        """
        self._total, self._left, self._done, self._part = total, left, 0, 0
        self._start = time.monotonic()
        self._next = self._start + _EVERY
        if left < total:
            self._say(f"{self._what}: {_mb(total - left)} of {_mb(total)} were done before")
        if not left or not sys.stdout.isatty():
            yield
            return
        columns = (
            rich_progress.TextColumn("{task.description}", markup=False),
            rich_progress.BarColumn(),
            rich_progress.DownloadColumn(),
            rich_progress.TransferSpeedColumn(),
            rich_progress.TimeRemainingColumn(),
        )
        with rich_progress.Progress(*columns, transient=True) as self._bar:
            self._bar.add_task(self._what, total=left)
            self._next = self._start
            yield
        self._bar = None

    def tick(self, characters: int) -> None:
        """Is told how much more of the present task has been read."""
        self._part += characters
        self._show()

    def end(self, size: int) -> None:
        """Is told that a task of so many bytes is done."""
        self._done += size
        self._part = 0
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        done = min(self._done + self._part, self._left)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
            self._next = now + 0.2
            return
        self._next = now + _EVERY
        rate = done / (now - self._start)
        rest = _time((self._left - done) / rate) if done else "unknown time"
        before = self._total - self._left
        self._say(
            f"{self._what}: {_mb(before + done)} of {_mb(self._total)}, {rate / 1e6:.1f} MB/s, "
            f"{rest} left"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def _time(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
