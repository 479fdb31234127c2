"""Copies between this machine and buckets: several streams, each file checked, continued.

A corpus is mapped into memory, so it must lie on a local disk. What was copied before a break, or
before a disk was full, is not copied again; there is no limit of time while bytes arrive.

    CACHE/corpora/NAME/          a copy of a corpus in a bucket: as the corpus, without its dataset
    CACHE/corpora/NAME.lock      held while it is made; other processes of this host wait
    .FILE.part  .FILE.done       a file that is being copied, and which pieces of it are here
    gs://.../.parts/FILE/N       pieces of one that is being sent, before they are made one object
"""

import contextlib
import fcntl
import functools
import os
import pathlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait

from etils import epath

from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.workdir import cache_folder, named_errors

Say = Callable[[str], None]
Task = tuple[int, Callable[[], None]]  # bytes, and what moves them

# Streams at once, and bytes that each moves at a time.
STREAMS, PIECE = 8, 32 * 2**20
_PARTS = ".parts"
# Seconds between two lines about a copy.
_TELL = 10.0


@contextlib.contextmanager
def copy_of(folder: epath.PathLike) -> Iterator[epath.Path]:
    """Gives the place of this host's copy of a bucket's folder, for this process alone.

    Others of this host wait as long as it is held.
    """
    copy = mirror.cached("corpora", folder)
    with named_errors(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open(copy.parent / f"{copy.name}.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield copy


@contextlib.contextmanager
def here(*paths: epath.PathLike, folder: epath.PathLike = "") -> Iterator[list[epath.Path]]:
    """Gives files on this machine: themselves, or copies of those that lie in a bucket.

    Args:
      paths: of the files, all on this machine or all in a bucket.
      folder: where copies lie, which stay there and are not made twice; "": the cache of this
        machine, and they go at the end.
    """
    if not any(map(mirror.is_bucket, paths)):
        yield [epath.Path(path) for path in paths]
        return
    with contextlib.ExitStack() as stack:
        if not folder:
            sources = cache_folder() / "sources"
            sources.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=sources))
        targets = [epath.Path(folder) / epath.Path(path).name for path in paths]
        for path, target in zip(paths, targets, strict=True):
            if not target.exists():
                fetch(epath.Path(path), target)
        yield targets


@contextlib.contextmanager
def new_part(target: epath.Path, last: str) -> Iterator[pathlib.Path]:
    """Gives a local folder to fill, which lies at `target`, here or in a bucket, at the end.

    There it is whole as soon as it holds the file `last`, or not at all.
    """
    if mirror.is_bucket(target):
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            yield folder
            names = sorted(path.name for path in folder.iterdir() if path.name != last)
            send_all(epath.Path(folder), target, names)
            mirror.write(target / last, (folder / last).read_text())
        return
    folder = pathlib.Path(target).parent / f".{target.name}.{os.getpid()}.tmp"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        yield folder
        for path in folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        try:
            folder.rename(target)
        except OSError:
            if not (target / last).exists():
                raise
            # Another worker of Beam was given the same task.
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def is_copy(folder: epath.Path) -> bool:
    """Returns whether the folder is a copy of one in a bucket."""
    return folder.parent == cache_folder() / "corpora"


def fetch(path: epath.Path, target: epath.Path, say: Say | None = None) -> None:
    """Copies one object to a local file; see `fetch_all`."""
    listed = mirror.about(path)
    if listed is None:
        raise InputError(f"{path}: is missing")

    def complaint(name: str, file: epath.Path) -> str:
        del name
        return "" if mirror.is_same(file, listed) else "was changed on its way"

    wanted = {path.name: _Wanted(path, target, listed.size, listed.crc32c)}
    _fetch_all(wanted, path, complaint, "copy it again", say)


def fetch_all(
    source: epath.Path,
    target: epath.Path,
    files: Mapping[str, tuple[int, str]],
    damage: Callable[[str, epath.Path], str],
    mend: str,
    say: Say | None = None,
) -> None:
    """Copies objects to local files, in several streams, each whole and checked or not at all.

    What was copied before a break, or before a disk was full, is not copied again.

    Args:
      source: a folder of a bucket.
      target: a local one.
      files: {path in both folders: (bytes, a hash by which another version is known)}.
      damage: (path in the folders, local file) to what is wrong with the content; "": nothing.
      mend: what to do about a damaged object, in words.
      say: is given a line now and then.

    Raises:
      Unavailable: no answer for ten minutes, or a full disk.
    """
    wanted = {
        name: _Wanted(source / name, target / name, size, version)
        for name, (size, version) in files.items()
    }
    _fetch_all(wanted, source, damage, mend, say)


class _Wanted:
    """A file that is being copied: `.NAME.part`, and `.NAME.done`: which pieces that holds."""

    def __init__(self, source: epath.Path, target: epath.Path, size: int, version: str):
        self.source, self.target, self.size = source, target, size
        self._version = f"{size} {version}"
        self.part = target.parent / f".{target.name}.part"
        self._done = target.parent / f".{target.name}.done"
        self._writing = threading.Lock()
        self.is_continued = False

    def missing(self) -> list[int]:
        """Makes ready; returns the first bytes of the pieces that are not here."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        lines = self._done.read_text().split("\n")[:-1] if self._done.exists() else []
        if lines[:1] == [self._version] and self.part.exists():
            done = {int(line) for line in lines[1:]}
            self.is_continued = True
        else:
            done = set()
            self.restart()
        return [first for first in range(0, self.size, PIECE) if first not in done]

    def restart(self) -> None:
        """Begins with nothing."""
        self.is_continued = False
        self._done.unlink(missing_ok=True)
        self.part.write_bytes(b"")
        self._done.write_text(f"{self._version}\n")

    def length(self, first: int) -> int:
        """Returns the bytes of a piece."""
        return min(PIECE, self.size - first)

    def store(self, first: int, data: bytes) -> None:
        """Writes a piece, and then that it is there."""
        with named_errors(self.target):
            with open(self.part, "r+b", buffering=0) as file:
                file.seek(first)
                left = memoryview(data)
                while left:
                    left = left[file.write(left) :]
            with self._writing, open(self._done, "ab", buffering=0) as file:
                file.write(f"{first}\n".encode())

    def finish(self) -> None:
        """Takes its place."""
        self.part.replace(self.target)
        self._done.unlink(missing_ok=True)


def _fetch_all(
    wanted: Mapping[str, _Wanted],
    source: epath.Path,
    damage: Callable[[str, epath.Path], str],
    mend: str,
    say: Say | None,
) -> None:
    with named_errors(source):
        left = {name: file.missing() for name, file in wanted.items()}
    while left:
        tasks = [
            (wanted[name].length(first), functools.partial(_fetch_piece, wanted[name], first, mend))
            for name, firsts in left.items()
            for first in firsts
        ]
        _in_streams(tasks, f"copy of {source}", say)
        again = {}
        for name in left:
            file = wanted[name]
            with named_errors(file.target):
                wrong = damage(name, file.part)
                if not wrong:
                    file.finish()
                elif file.is_continued:  # the part may be what a machine's failure has left of it
                    file.restart()
                    again[name] = list(range(0, file.size, PIECE))
                else:
                    for path in (file.part, file._done):
                        path.unlink(missing_ok=True)
                    raise InputError(f"{file.source}: damaged ({wrong}); {mend}")
        left = again


def _fetch_piece(file: _Wanted, first: int, mend: str) -> None:
    length = file.length(first)
    name = os.fspath(file.source)
    try:
        data = mirror.read(name, first, first + length)
    except FileNotFoundError as error:
        raise InputError(f"{name}: is missing; {mend}") from error
    if len(data) != length:
        raise InputError(f"{name}: damaged (is shorter than {file.size} bytes); {mend}")
    file.store(first, data)


def send_all(
    source: epath.Path, target: epath.Path, files: Iterable[str], say: Say | None = None
) -> None:
    """Copies local files to objects, in several streams; what is there already is not sent again.

    Args:
      source: a local folder.
      target: a folder of a bucket.
      files: paths in both.
      say: is given a line now and then.
    """
    there = mirror.listing(target)
    tasks: list[Task] = []
    large: dict[str, list[str]] = {}
    for name in files:
        if name in there and mirror.is_same(source / name, there[name]):
            continue
        size = os.stat(source / name).st_size
        if size <= PIECE:
            tasks.append((size, functools.partial(_send_piece, source / name, 0, target / name)))
            continue
        large[name] = []
        for first in range(0, size, PIECE):
            part, end = f"{_PARTS}/{name}/{first:015}", min(first + PIECE, size)
            large[name].append(part)
            if part not in there or not mirror.is_same(source / name, there[part], first, end):
                send = functools.partial(_send_piece, source / name, first, target / part)
                tasks.append((end - first, send))
    _in_streams(tasks, f"sending to {target}", say)
    for name, parts in large.items():
        mirror.compose([target / part for part in parts], target / name)
        sent = mirror.about(target / name)
        if sent is None or not mirror.is_same(source / name, sent):
            raise InputError(f"{target / name}: is not as it was sent; run again to send it again")
    mirror.remove(target / part for part in mirror.listing(target) if part.startswith(_PARTS))


def _send_piece(file: epath.Path, first: int, path: epath.Path) -> None:
    with named_errors(file), open(file, "rb") as opened_file:
        opened_file.seek(first)
        data = opened_file.read(PIECE)
    mirror.put(path, data)


def _in_streams(tasks: list[Task], what: str, say: Say | None) -> None:
    """Does tasks in several threads; the first failure ends all."""
    total, done = sum(size for size, _ in tasks), 0
    began = shown = time.monotonic()
    with ThreadPoolExecutor(STREAMS) as pool:
        under_way = {pool.submit(work): size for size, work in tasks}
        try:
            while under_way:
                for future in wait(under_way, _TELL, FIRST_COMPLETED).done:
                    future.result()
                    done += under_way.pop(future)
                now = time.monotonic()
                if say is not None and under_way and now - shown >= _TELL:
                    shown, rate = now, done / (now - began)
                    left = f", {(total - done) / rate:,.0f} s left" if done else ""
                    say(
                        f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, "
                        f"{rate / 1e6:,.0f} MB/s{left}"
                    )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
