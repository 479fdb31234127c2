"""Work items of `prepare`, run in this process or in several with the same results; progress.

Each item writes a folder at a location that all workers see. The folder appears when it is
complete, so a `prepare` that was killed resumes with the folders that exist.

    LOCATION/NAME/record.json    counts of the folder's content, written last
"""

import abc
import contextlib
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from etils import epath
from rich import progress as rich_progress

from bert_jax import process as process_lib
from bert_jax.data.workers import Worker, WorkerDied, wait
from bert_jax.errors import Unavailable, duration
from bert_jax.storage import copies
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import translate_os_errors

# Seconds between two progress lines.
_LINE_SECONDS = 30.0
# Seconds after which the remaining time is computed again, even if no item ends.
_TICK_SECONDS = 1.0

_RECORD = "record.json"

# Takes how many of the item's `bytes` were processed since the last call.
Tick = Callable[[float], None]


@dataclasses.dataclass(frozen=True)
class WorkItem(abc.ABC):
    """The work on one part of the text."""

    location: str  # the folder that holds the folders of all items

    @property
    @abc.abstractmethod
    def bytes(self) -> int:
        """The approximate size of the part's text, for the progress."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The name of the item's folder."""

    @abc.abstractmethod
    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """Fills the folder; returns its record, a dict that JSON can represent."""


def run_item(item: WorkItem, tick: Tick = lambda size: None) -> dict[str, Any]:
    """Runs an item unless it is done; returns the record of its folder."""
    if (record := read_record(item)) is not None:
        return record
    target = epath.Path(item.location) / item.name
    with translate_os_errors(target.parent), copies.new_item_folder(target, _RECORD) as folder:
        record = item.make(folder, tick)
        (folder / _RECORD).write_text(json.dumps(record))
    return record


def read_record(item: WorkItem) -> dict[str, Any] | None:
    """Returns the record of an item's folder; None if the item is not done."""
    path = epath.Path(item.location) / item.name / _RECORD
    with contextlib.suppress(FileNotFoundError):
        return json.loads(storage_of(path).read(path))
    return None


def local_file(item: WorkItem, file: str, scratch: pathlib.Path) -> pathlib.Path:
    """Returns the local path of a file of an item; downloads it to `scratch` from a bucket."""
    path = epath.Path(item.location) / item.name / file
    with copies.local_copy(path, folder=scratch / item.name) as (local_path,):
        return pathlib.Path(local_path)


class StageProgress:
    """Shows how much text is processed, how fast, and the remaining time.

    Draws a bar on a terminal; elsewhere passes a line to `report` every 30 seconds.
    """

    def __init__(self, stage: str, report: Callable[[str], None]):
        self._stage, self._report = stage, report
        self._bar: rich_progress.Progress | None = None
        # Bytes of all items and of those that are left at the start; since then the bytes of items
        # that are done, and of the current item.
        self._total = self._left = self._done = 0
        self._current = self._start = self._next = 0.0

    @contextlib.contextmanager
    def track(self, total: int, left: int) -> Iterator[None]:
        """Shows the progress inside the context; `left` of `total` bytes are not done yet."""
        self._total, self._left, self._done, self._current = total, left, 0, 0
        self._start = time.monotonic()
        self._next = self._start + _LINE_SECONDS
        if left < total:
            self._report(f"{self._stage}: {_mb(total - left)} of {_mb(total)} were done before")
        if not (left and process_lib.is_own_process and sys.stdout.isatty()):
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
            self._bar.add_task(self._stage, total=left)
            self._next = self._start
            yield
        self._bar = None

    def tick(self, size: float) -> None:
        """Adds an approximate number of bytes to the progress of the current item."""
        self._current += size
        self._show()

    def end(self, size: int) -> None:
        """Counts an item of `size` bytes as done."""
        self._done += size
        self._current = 0
        self._show()

    def _show(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        done = min(self._done + self._current, self._left)
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=done)
            self._next = now + 0.2
            return
        self._next = now + _LINE_SECONDS
        rate = done / (now - self._start)
        rest = duration((self._left - done) / rate) if done else "unknown time"
        total_done = self._total - self._left + done
        self._report(
            f"{self._stage}: {_mb(total_done)} of {_mb(self._total)}, {rate / 1e6:.1f} MB/s, "
            f"{rest} left"
        )


def _mb(size: float) -> str:
    return f"{size / 1e6:,.0f} MB"


def run(items: Sequence[WorkItem], workers: int, progress: StageProgress) -> list[dict[str, Any]]:
    """Runs the items that are not done yet, here or in processes; returns the records of all."""
    left = [item for item in items if read_record(item) is None]
    with progress.track(sum(item.bytes for item in items), sum(item.bytes for item in left)):
        if min(workers, len(left)) > 1:
            _run_in_workers(left, min(workers, len(left)), progress)
        else:
            for item in left:
                run_item(item, progress.tick)
                progress.end(item.bytes)
    return [record for item in items if (record := read_record(item)) is not None]


def _run_in_workers(items: Sequence[WorkItem], count: int, progress: StageProgress) -> None:
    waiting, busy = list(reversed(items)), dict[Worker, WorkItem]()
    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(contextlib.closing(Worker())) for _ in range(count)]
        while waiting or busy:
            while waiting and idle:
                worker = idle.pop()
                busy[worker] = waiting.pop()
                worker.start(run_item, busy[worker])
            for worker in wait(busy, _TICK_SECONDS):
                try:
                    worker.result()
                except WorkerDied as error:
                    raise Unavailable(
                        f"prepare: {error} (out of memory?); run again to resume, with fewer "
                        "--workers if it is"
                    ) from None
                progress.end(busy.pop(worker).bytes)
                idle.append(worker)
            progress.tick(0)
