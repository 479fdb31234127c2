"""Tasks of `prepare` in this process or in several, the same folders made; and how far they are.

What a task makes is a folder of a place that all workers see. It appears as a whole, so a `prepare`
that was killed goes on from those that are there.

    PLACE/NAME/record.json    what was counted in it, written last
"""

import contextlib
import json
import multiprocessing
import os
import pathlib
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, Protocol

from etils import epath
from rich import progress as rich_progress

from bert_jax.errors import Unavailable, duration
from bert_jax.storage import buckets, copies
from bert_jax.storage.workdir import named_errors
from bert_jax.system import die_with_parent

# Seconds between two lines.
_EVERY = 30.0

_RECORD = "record.json"

# Takes how many characters have been read since its last call.
Tick = Callable[[int], None]


class Task(Protocol):
    """A task: what is to be made of a part."""

    place: str
    bytes: int

    @property
    def name(self) -> str:
        """The name of the folder that it is made into."""

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """Fills the folder; returns its record, as JSON can hold it."""


def do(task: Task, tick: Tick = lambda characters: None) -> dict[str, Any]:
    """Runs a task unless it is done; returns the record of its folder."""
    record = record_of(task)
    if record is not None:
        return record
    target = epath.Path(task.place) / task.name
    with named_errors(target.parent), copies.new_part(target, _RECORD) as folder:
        record = task.make(folder, tick)
        (folder / _RECORD).write_text(json.dumps(record))
    return record


def record_of(task: Task) -> dict[str, Any] | None:
    """Returns the record of a task's folder; None if it is not done."""
    path = epath.Path(task.place) / task.name / _RECORD
    with contextlib.suppress(FileNotFoundError):
        return json.loads(buckets.read(path))
    return None


class Progress:
    """Shows how much text is done, how fast, and how long the rest will take.

    A bar on a terminal, elsewhere a line every 30 seconds, which `say` is given.
    """

    def __init__(self, what: str, say: Callable[[str], None]):
        self._what, self._say = what, say
        self._bar: rich_progress.Progress | None = None
        self._total = self._left = self._done = self._part = 0
        self._start = self._next = 0.0

    @contextlib.contextmanager
    def of(self, total: int, left: int) -> Iterator[None]:
        """Shows the progress while entered, of `total` bytes of which `left` are not done yet."""
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
        """Counts characters that have been read of the present task."""
        self._part += characters
        self._show()

    def end(self, size: int) -> None:
        """Counts a task of so many bytes as done."""
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
        rest = duration((self._left - done) / rate) if done else "unknown time"
        before = self._total - self._left
        self._say(
            f"{self._what}: {_mb(before + done)} of {_mb(self._total)}, {rate / 1e6:.1f} MB/s, "
            f"{rest} left"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def run(tasks: Sequence[Task], workers: int, progress: Progress) -> list[dict[str, Any]]:
    """Runs the tasks that are not done yet, here or in processes; returns what all left on record.

    Raises:
      Unavailable: a process was killed.
    """
    records = {number: record_of(task) for number, task in enumerate(tasks)}
    left = [number for number, record in records.items() if record is None]
    with progress.of(sum(t.bytes for t in tasks), sum(tasks[n].bytes for n in left)):
        if min(workers, len(left)) <= 1:
            for number in left:
                records[number] = do(tasks[number], progress.tick)
                progress.end(tasks[number].bytes)
        else:
            _run_in_processes(tasks, left, min(workers, len(left)), records, progress)
    return [record for record in records.values() if record is not None]


def _run_in_processes(
    tasks: Sequence[Task],
    left: Sequence[int],
    count: int,
    records: dict[int, Any],
    progress: Progress,
) -> None:
    # Not forked: libraries here have threads.
    with ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _begin) as pool:
        numbers = {pool.submit(do, tasks[number]): number for number in left}
        try:
            for future in as_completed(numbers):
                number = numbers[future]
                records[number] = future.result()
                progress.end(tasks[number].bytes)
        except BrokenProcessPool:
            raise Unavailable(
                "prepare: a worker process died (out of memory?); run again to go on, with fewer "
                "--workers if need be"
            ) from None
        except BaseException:  # nobody waits for what is half done
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _begin() -> None:
    """Prepares a process for tasks."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    os.dup2(2, 1)  # whatever a library prints goes to standard error
