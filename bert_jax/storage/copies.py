"""Copies between this machine and buckets: several streams, each file checked, continued.

A corpus is mapped into memory, so it must lie on a local disk. Files that were copied before a
break, or before a disk was full, are not copied again; there is no limit of time while bytes
arrive.

    CACHE/corpora/NAME/          a copy of a corpus in a bucket: as the corpus, without its dataset
    CACHE/corpora/NAME.lock      held while it is made; other processes of this host wait
    .FILE.part                   a file that is being copied
    gs://.../.parts/FILE/N       pieces of one that is being sent, before they are made one object
"""

import contextlib
import fcntl
import functools
import os
import pathlib
import shutil
import tempfile
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
    there = [epath.Path(path) for path in paths]
    if not any(map(mirror.is_bucket, there)):
        yield there
        return
    with contextlib.ExitStack() as stack:
        if not folder:
            sources = cache_folder() / "sources"
            sources.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=sources))
        targets = [epath.Path(folder) / path.name for path in there]
        for path, target in zip(there, targets, strict=True):
            if not target.exists():
                fetch(path, target.parent)
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


def fetch(path: epath.Path, folder: epath.Path) -> None:
    """Copies one object into a local folder; see `fetch_all`."""
    listed = mirror.about(path)
    if listed is None:
        raise InputError(f"{path}: is missing")

    def damage(name: str, file: epath.Path) -> str:
        del name
        return "" if mirror.is_same(file, listed) else "was changed on its way"

    fetch_all(path.parent, folder, {path.name: listed.size}, damage, "copy it again")


def fetch_all(
    source: epath.Path,
    target: epath.Path,
    sizes: Mapping[str, int],
    damage: Callable[[str, epath.Path], str],
    mend: str,
    say: Say | None = None,
) -> None:
    """Copies objects to local files, in several streams, each whole and checked or not at all.

    Args:
      source: a folder of a bucket.
      target: a local one.
      sizes: bytes of each file, by its path in both folders.
      damage: (path in the folders, local file) to what is wrong with the content; "": nothing.
      mend: what to do about a damaged object, in words.
      say: is given a line now and then.

    Raises:
      Unavailable: no answer for ten minutes, or a full disk; the files that are whole stay.
    """
    parts = {name: (target / name).parent / f".{(target / name).name}.part" for name in sizes}

    def fetch_piece(name: str, first: int) -> None:
        length = min(PIECE, sizes[name] - first)
        try:
            data = mirror.read(source / name, first, first + length)
        except FileNotFoundError as error:
            raise InputError(f"{source / name}: is missing; {mend}") from error
        if len(data) != length:
            wrong = f"is shorter than {sizes[name]} bytes"
            raise InputError(f"{source / name}: damaged ({wrong}); {mend}")
        with named_errors(target / name), open(parts[name], "r+b") as file:
            file.seek(first)
            file.write(data)

    def finish(name: str) -> None:
        with named_errors(target / name):
            if wrong := damage(name, parts[name]):
                raise InputError(f"{source / name}: damaged ({wrong}); {mend}")
            parts[name].replace(target / name)

    tasks: dict[str, list[Task]] = {}
    try:
        with named_errors(target):
            for name, size in sizes.items():
                parts[name].parent.mkdir(parents=True, exist_ok=True)
                parts[name].write_bytes(b"")
                firsts = range(0, max(size, 1), PIECE)
                tasks[name] = [
                    (min(PIECE, size - first), functools.partial(fetch_piece, name, first))
                    for first in firsts
                ]
        _in_streams(tasks, finish, f"copy of {source}", say)
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink()


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
    tasks: dict[str, list[Task]] = {}
    parts: dict[str, list[str]] = {}  # of each file, the objects that it is sent as

    def send_piece(name: str, part: str, first: int) -> None:
        with named_errors(source / name), open(source / name, "rb") as file:
            file.seek(first)
            data = file.read(PIECE)
        mirror.put(target / part, data)

    def finish(name: str) -> None:
        if parts[name] != [name]:
            mirror.compose([target / part for part in parts[name]], target / name)
            sent = mirror.about(target / name)
            if sent is None or not mirror.is_same(source / name, sent):
                raise InputError(f"{target / name}: is not as it was sent; run again")

    for name in files:
        if name in there and mirror.is_same(source / name, there[name]):
            continue
        size = os.stat(source / name).st_size
        firsts = range(0, max(size, 1), PIECE)
        large = len(firsts) > 1
        parts[name] = [f"{_PARTS}/{name}/{i:015}" if large else name for i in firsts]
        tasks[name] = [
            (end - first, functools.partial(send_piece, name, part, first))
            for part, first in zip(parts[name], firsts, strict=True)
            for end in [min(first + PIECE, size)]
            if part not in there or not mirror.is_same(source / name, there[part], first, end)
        ]
    _in_streams(tasks, finish, f"sending to {target}", say)
    mirror.remove(target / part for part in mirror.listing(target) if part.startswith(_PARTS))


def _in_streams(
    tasks: Mapping[str, list[Task]], finish: Callable[[str], None], what: str, say: Say | None
) -> None:
    """Does the tasks of each file in several threads, then finishes it; a failure ends all."""
    total, done = sum(size for of_file in tasks.values() for size, _ in of_file), 0
    left = {name: len(of_file) for name, of_file in tasks.items()}
    for name in [name for name, count in left.items() if not count]:
        finish(name)
    began = shown = time.monotonic()
    with ThreadPoolExecutor(STREAMS) as pool:
        under_way = {
            pool.submit(work): (name, size)
            for name, of_file in tasks.items()
            for size, work in of_file
        }
        try:
            while under_way:
                for future in wait(under_way, _TELL, FIRST_COMPLETED).done:
                    future.result()
                    name, size = under_way.pop(future)
                    done += size
                    left[name] -= 1
                    if not left[name]:
                        finish(name)
                now = time.monotonic()
                if say is not None and under_way and now - shown >= _TELL:
                    shown, rate = now, done / (now - began)
                    seconds = f", {(total - done) / rate:,.0f} s left" if done else ""
                    say(
                        f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, "
                        f"{rate / 1e6:,.0f} MB/s{seconds}"
                    )
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
