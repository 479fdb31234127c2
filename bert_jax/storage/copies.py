"""Atomic creation of folders, and copies of files between this machine and buckets.

Files are copied in several streams and verified. After an interruption, `upload_all` skips files
that the bucket has, and callers of `download_all` pass only the missing ones. A copy may take any
time; only an outage of ten minutes ends it.

    CACHE/corpora/NAME/          copy of a bucket's corpus, without its dataset/, which is not
                                 mapped into memory
    CACHE/corpora/NAME.lock      locked while the copy is made; other processes of this host wait
    CACHE/sources/               copies of text in a bucket, while the text is read
"""

import contextlib
import fcntl
import functools
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from etils import epath

from bert_jax.errors import InputError, duration
from bert_jax.storage import buckets, mirror, retry
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import (
    cache_folder,
    create_folder,
    replace_atomically,
    require_local,
    translate_os_errors,
)

Report, AddBytes = Callable[[str], None], Callable[[int], None]

# Number of parallel streams, and bytes of a request.
STREAMS, PIECE = 8, 32 * 2**20
# The size up to which an object is small, and the number of parallel streams for small objects,
# which is larger since waiting for a response takes longer than its transfer.
SMALL_BYTES, SMALL_STREAMS = 2**20, 32
_REPORT_EVERY = 10.0  # seconds, about the progress of a copy


@contextlib.contextmanager
def lock_corpus_copy(folder: epath.PathLike) -> Iterator[epath.Path]:
    """Locks this host's copy of a folder in a bucket; yields its path, which may not exist yet.

    Other processes of this host wait for the lock.
    """
    copy = mirror.cache_folder_of("corpora", folder)
    with translate_os_errors(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open(copy.parent / f"{copy.name}.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield copy


@contextlib.contextmanager
def local_copy(*paths: epath.PathLike, folder: epath.PathLike = "") -> Iterator[list[epath.Path]]:
    """Yields local paths of files: the files themselves, or copies if `paths` are in a bucket.
    Copies in `folder` are kept and used again. Without a folder, copies lie in the cache and are
    removed at the end.
    """
    sources = [epath.Path(path) for path in paths]
    if not any(map(buckets.is_in_bucket, sources)):
        yield sources
        return
    with contextlib.nullcontext(folder) if folder else _scratch_folder() as target:
        targets = [epath.Path(target) / path.name for path in sources]
        for path, copy in zip(sources, targets, strict=True):
            if not copy.exists():
                download(path, copy.parent)
        yield targets


@contextlib.contextmanager
def _scratch_folder() -> Iterator[str]:
    """Yields a new folder in the cache, and removes it at the end."""
    sources = cache_folder() / "sources"
    with translate_os_errors(sources):
        sources.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=sources) as folder:
        yield folder


def require_new_folder(folder: epath.Path) -> None:
    """Raises InputError unless a folder is missing or empty."""
    require_local(folder)
    with translate_os_errors(folder):
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder}: is there already; choose another folder")


@contextlib.contextmanager
def new_folder(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields a temporary folder to fill, which is renamed at the end; an error leaves nothing."""
    require_new_folder(folder)
    folder = folder.absolute()  # "." has no parent
    with _temporary(folder) as temporary:
        yield temporary
        os.rename(temporary, folder)  # an empty folder may exist


@contextlib.contextmanager
def _temporary(folder: epath.Path) -> Iterator[epath.Path]:
    """Yields an empty temporary folder next to `folder`, and removes it at the end."""
    temporary = folder.parent / f".{folder.name}.{os.getpid()}.tmp"
    with create_folder(folder.parent), translate_os_errors(folder):
        try:
            temporary.rmtree(missing_ok=True)  # left by a killed process
            temporary.mkdir()
            yield temporary
        finally:
            with contextlib.suppress(OSError):
                temporary.rmtree(missing_ok=True)


@contextlib.contextmanager
def new_item_folder(target: epath.Path, marker: str) -> Iterator[pathlib.Path]:
    """Yields a local folder for a work item; at the end moves it to `target`.

    `target` may be in a bucket.

    The file named `marker` is moved last: `target` is complete once it holds this file.
    """
    if buckets.is_in_bucket(target):
        with tempfile.TemporaryDirectory() as scratch:
            folder = pathlib.Path(scratch)
            yield folder
            names = sorted(path.name for path in folder.iterdir() if path.name != marker)
            upload_all(epath.Path(folder), target, names)
            storage_of(target).write(target / marker, (folder / marker).read_text())
        return
    with _temporary(target) as folder:
        yield pathlib.Path(folder)
        for path in folder.iterdir():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
        try:
            os.rename(folder, target)
        except OSError:
            if not (target / marker).exists():  # else another worker of Beam has done this item
                raise


def is_copy(folder: epath.Path) -> bool:
    """Returns whether the folder is a copy of one in a bucket."""
    return folder.parent == cache_folder() / "corpora"


def download(path: epath.Path, folder: epath.Path) -> None:
    """Copies one object into a local folder; see `download_all`."""
    if (entry := buckets.describe(path)) is None:
        raise InputError(f"{path}: is missing")
    with translate_os_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    with replace_atomically(folder / path.name) as temporary:
        _download_objects({os.fspath(path): (entry, temporary)})


@contextlib.contextmanager
def use_local_copies(objects: Mapping[str, buckets.ObjectEntry]) -> Iterator[None]:
    """Makes `BucketStorage.open` read local copies of objects, in this thread inside the context.

    `objects` is {path: entry}. All objects are downloaded to the cache at the beginning; the copies
    are removed at the end.
    """
    if not objects:
        yield
        return
    with _scratch_folder() as folder:
        files = {path: epath.Path(folder) / str(number) for number, path in enumerate(objects)}
        with translate_os_errors(folder):
            _download_objects({path: (entry, files[path]) for path, entry in objects.items()})
        token = buckets.local_copies.set({path: os.fspath(file) for path, file in files.items()})
        try:
            yield
        finally:
            buckets.local_copies.reset(token)


def download_all(
    source: epath.Path,
    target: epath.Path,
    names: Iterable[str],
    find_damage: Callable[[str, epath.Path], str],
    remedy: str,
    report: Report | None = None,
) -> None:
    """Copies objects of a folder to a local one; a copy is complete and verified, or missing.

    `names` are relative paths, equal in both; `find_damage` takes such a path and a copy, and
    returns what is wrong with the copy ("" for nothing). `remedy` tells the user what to do then.

    Raises:
      Unavailable: the bucket is out of reach, or the disk full (DiskFull); complete copies stay.
    """
    names = list(names)
    objects = buckets.list_objects(source) if names else {}
    for name in names:
        if name not in objects:
            raise InputError(f"{source / name}: is missing; {remedy}")
    progress = _Progress(f"copy of {source}", sum(objects[name].size for name in names), report)
    for name in names:
        with translate_os_errors(target):
            (target / name).parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(target / name) as temporary:
            _download_objects({os.fspath(source / name): (objects[name], temporary)}, progress.add)
            if damage := find_damage(name, temporary):
                raise InputError(f"{source / name}: damaged ({damage}); {remedy}")


def _download_objects(
    files: Mapping[str, tuple[buckets.ObjectEntry, epath.Path]],
    add_bytes: AddBytes = lambda size: None,
) -> None:
    """Copies objects, {path: (entry, local file)}; `add_bytes` takes the size of each piece.

    Small objects are copied in parallel, large ones one after another in parallel pieces.
    """

    def fetch(path: str, map_pieces: Callable[..., Iterable[int]]) -> None:
        # Repeats only for a wrong checksum: `read_range` repeats its requests for ten minutes.
        backoff = retry.Backoff(path)
        while True:
            try:
                return _fetch_object(path, *files[path], map_pieces, add_bytes)
            except ConnectionError as error:
                time.sleep(backoff.next_wait(error))

    large = [path for path, (entry, _) in files.items() if entry.size > SMALL_BYTES]
    if len(large) < len(files):
        with ThreadPoolExecutor(SMALL_STREAMS) as pool:
            for _ in pool.map(functools.partial(fetch, map_pieces=map), files.keys() - large):
                pass
    with ThreadPoolExecutor(STREAMS) as pool:
        for path in large:
            fetch(path, pool.map)


def _fetch_object(
    path: str,
    entry: buckets.ObjectEntry,
    file: epath.Path,
    map_pieces: Callable[..., Iterable[int]],
    add_bytes: AddBytes,
) -> None:
    """Copies an object in pieces, by `map` or a pool's `map`; ConnectionError: wrong checksum."""

    def fetch_piece(first: int) -> int:
        end = min(first + PIECE, entry.size)
        data = buckets.read_range(path, entry, first, end)
        with open(file, "r+b") as opened:
            opened.seek(first)
            opened.write(data)
        return len(data)

    file.write_bytes(b"")
    done = 0
    for size in map_pieces(fetch_piece, range(0, entry.size, PIECE)):
        add_bytes(size)
        done += size
    if not buckets.has_same_content(file, entry):
        add_bytes(-done)  # the next attempt counts these bytes again
        raise ConnectionError("the content does not match the bucket's checksum")


def upload_all(
    source: epath.Path, target: epath.Path, names: Iterable[str], report: Report | None = None
) -> None:
    """Copies files of a local folder to a folder in a bucket, unless it has them already.

    `names` are relative paths, equal in both.
    """

    def find_missing_or_different() -> list[str]:
        objects = buckets.list_objects(target)
        same = buckets.has_same_content
        return [n for n in names if n not in objects or not same(source / n, objects[n])]

    def send(name: str) -> int:
        with translate_os_errors(source / name):
            buckets.upload(source / name, target / name)
            return os.stat(source / name).st_size

    names = list(names)
    missing = find_missing_or_different()
    size = sum(os.stat(source / name).st_size for name in missing)
    progress = _Progress(f"sending to {target}", size, report)
    with ThreadPoolExecutor(STREAMS) as pool:
        for sent in pool.map(send, missing):
            progress.add(sent)
    if missing and (different := find_missing_or_different()):
        raise InputError(f"{target / different[0]}: differs from what was sent; run again")


class _Progress:
    """Reports the progress of a copy of `total` bytes every ten seconds."""

    def __init__(self, name: str, total: int, report: Report | None):
        self._name, self._total, self._report, self._done = name, total, report, 0
        self._start = self._reported = time.monotonic()

    def add(self, size: int) -> None:
        """Counts bytes that were copied."""
        self._done += size
        now = time.monotonic()
        if (
            self._report is not None
            and 0 < self._done < self._total
            and now > self._reported + _REPORT_EVERY
        ):
            self._reported, rate = now, self._done / (now - self._start)
            self._report(
                f"{self._name}: {self._done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB, "
                f"{rate / 1e6:,.0f} MB/s, {duration((self._total - self._done) / rate)} left"
            )
