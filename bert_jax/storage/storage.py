"""One interface for files on disks of this machine and for objects in buckets."""

import contextlib
import hashlib
import io
import os
import typing
from collections.abc import Iterable

from etils import epath

from bert_jax.storage import buckets
from bert_jax.storage.buckets import ObjectEntry
from bert_jax.storage.workdir import create_folder, translate_os_errors, write_atomic


class Storage(typing.Protocol):
    """Operations on files, given by their paths.

    `seconds` limits how long a request to a bucket is retried; None: ten minutes. `entry`, the
    object's entry in an earlier listing of its folder, saves a request. A missing file raises
    FileNotFoundError.
    """

    is_bucket: bool

    def read(
        self, path: epath.PathLike, seconds: float | None = None, entry: ObjectEntry | None = None
    ) -> bytes:
        """Returns the content of a small file."""
        ...

    def open(self, path: epath.PathLike) -> io.BufferedReader:
        """Returns a file of any size, opened for reading."""
        ...

    def sha256(self, path: epath.PathLike) -> str:
        """Returns the SHA-256 of a file."""
        ...

    def stat(
        self, path: epath.PathLike, seconds: float | None = None, entry: ObjectEntry | None = None
    ) -> tuple[int, int]:
        """Returns the size of a file in bytes, and the time of its last change in nanoseconds."""
        ...

    def write(
        self, path: epath.Path, text: str | Iterable[str], seconds: float | None = None
    ) -> None:
        """Replaces the text of a file atomically; creates its folder."""
        ...

    def exists(self, path: epath.Path) -> bool:
        """Returns whether the file exists."""
        ...

    def names(self, folder: epath.PathLike) -> set[str]:
        """Returns the names of files and folders in a folder; set() if the folder is missing."""
        ...

    def cache_reads(self, folder: epath.PathLike) -> contextlib.AbstractContextManager[None]:
        """Caches what epath and Orbax read in a folder of a bucket; nothing may change it."""
        ...


class LocalStorage(Storage):
    """Files on the disks of this machine, by the interface `Storage`."""

    is_bucket = False

    def read(
        self, path: epath.PathLike, seconds: float | None = None, entry: ObjectEntry | None = None
    ) -> bytes:
        return epath.Path(path).read_bytes()

    def open(self, path: epath.PathLike) -> io.BufferedReader:
        return open(path, "rb")

    def sha256(self, path: epath.PathLike) -> str:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def stat(
        self, path: epath.PathLike, seconds: float | None = None, entry: ObjectEntry | None = None
    ) -> tuple[int, int]:
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns

    def write(
        self, path: epath.Path, text: str | Iterable[str], seconds: float | None = None
    ) -> None:
        with create_folder(path.parent):  # if the write fails, a folder made here is removed
            write_atomic(path, text)

    def exists(self, path: epath.Path) -> bool:
        with translate_os_errors(path):
            return path.exists()

    def names(self, folder: epath.PathLike) -> set[str]:
        with translate_os_errors(folder):
            path = epath.Path(folder)
            return {child.name for child in path.iterdir()} if path.exists() else set()

    def cache_reads(self, folder: epath.PathLike) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()  # a disk is quick enough


_LOCAL, _BUCKETS = LocalStorage(), buckets.BucketStorage()


def storage_of(path: epath.PathLike) -> Storage:
    """Returns the storage of a path; raises InputError for a URL that is not gs://."""
    return _BUCKETS if buckets.is_in_bucket(path) else _LOCAL
