"""Tasks of `prepare` in this process or in several, the same folders made; and how far they are.

What a task makes is a folder of a place that all workers see. It appears as a whole, so a `prepare`
that was killed goes on from those that are there.

    PLACE/NAME/record.json    what was counted in it, written last
"""

import contextlib
import json
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, Protocol

from etils import epath
from rich import progress as rich_progress

from bert_jax import process as process_lib
from bert_jax.errors import Unavailable, duration
from bert_jax.storage import copies
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import translate_os_errors
from bert_jax.system import die_with_parent

# Seconds between two lines.
_EVERY = 30.0
# Seconds after which the time left is computed again, also while no task ends.
_TICK = 1.0


_RECORD = "record.json"

# Takes how many of the task's `bytes` were done since the last call.
Tick = Callable[[float], None]


class Task(Protocol):
    """A task: what is to be made of a part."""

    @property
    def place(self) -> str:
        """The folder of the parts."""

    @property
    def bytes(self) -> int:
        """The size of the part's text, for the progress."""

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
    with translate_os_errors(target.parent), copies.new_part(target, _RECORD) as folder:
        record = task.make(folder, tick)
        (folder / _RECORD).write_text(json.dumps(record))
    return record


def record_of(task: Task) -> dict[str, Any] | None:
    """Returns the record of a task's folder; None if it is not done."""
    path = epath.Path(task.place) / task.name / _RECORD
    with contextlib.suppress(FileNotFoundError):
        return json.loads(storage_of(path).read(path))
    return None


class Progress:
    """Shows how much text is done, how fast, and how long the rest will take.

    A bar on a terminal, elsewhere a line every 30 seconds, which `say` is given.
    """

    def __init__(self, what: str, say: Callable[[str], None]):
        self._what, self._say = what, say
        self._bar: rich_progress.Progress | None = None
        self._total = self._left = self._done = 0
        self._part = self._start = self._next = 0.0

    @contextlib.contextmanager
    def of(self, total: int, left: int) -> Iterator[None]:
        """Shows the progress while entered, of `total` bytes of which `left` are not done yet."""
        self._total, self._left, self._done, self._part = total, left, 0, 0
        self._start = time.monotonic()
        self._next = self._start + _EVERY
        if left < total:
            self._say(f"{self._what}: {_mb(total - left)} of {_mb(total)} were done before")
        if not (left and process_lib.is_prepared and sys.stdout.isatty()):
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

    def tick(self, size: float) -> None:
        """Adds a rough number of bytes that are done to the progress of the present task."""
        self._part += size
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
    waiting = list(reversed(left))
    processes: list[subprocess.Popen] = []
    busy: dict[Connection, tuple[subprocess.Popen, int]] = {}

    def give(process: subprocess.Popen, connection: Connection) -> None:
        busy[connection] = process, waiting.pop()
        with contextlib.suppress(BrokenPipeError):  # of a dead one nothing is received, too
            connection.send(tasks[busy[connection][1]])

    try:
        for _ in range(count):
            process, connection = _start()
            processes.append(process)
            give(process, connection)
        while busy:
            for connection in wait(list(busy), _TICK):
                assert isinstance(connection, Connection)
                process, number = busy.pop(connection)
                try:
                    answer = connection.recv()
                except (EOFError, ConnectionResetError):
                    raise Unavailable(
                        f"prepare: a worker process died with code {process.wait()} (out of "
                        "memory?); run again to go on, with fewer --workers if need be"
                    ) from None
                if isinstance(answer, BaseException):
                    raise answer
                records[number] = answer
                progress.end(tasks[number].bytes)
                if waiting:
                    give(process, connection)
            progress.tick(0)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _start() -> tuple[subprocess.Popen, Connection]:
    """Starts a worker; not by multiprocessing, which would import the command and jax with it."""
    ours, theirs = Pipe()
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; from bert_jax.data import workers; "
        f"workers.serve({theirs.fileno()})"
    )
    with theirs:
        # Whatever a library prints goes to standard error.
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=2,
            pass_fds=(theirs.fileno(),),
        )
    return process, ours


def serve(file: int) -> None:
    """Runs tasks that come over a connection, until it ends; the work of a worker."""
    die_with_parent()
    process_lib.prepare_process()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
    connection = Connection(file)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            task = connection.recv()
            try:
                answer: Any = do(task)
            except BaseException as error:  # a Rust panic is no Exception
                answer = error
            try:
                connection.send(answer)
            except Exception:  # an error of a library that cannot be sent
                connection.send(RuntimeError(f"{type(answer).__name__}: {answer}"))
