"""What runs and corpora ask of the disk of this machine and of buckets, by one interface."""

import contextlib
import hashlib
import io
import os
import typing
from collections.abc import Iterable

from etils import epath

from bert_jax.storage import buckets
from bert_jax.storage.buckets import Listed
from bert_jax.storage.workdir import create_folder, translate_os_errors, write_atomic


class Storage(typing.Protocol):
    """Whole files, by their paths.

    `seconds` limits how long a request to a bucket is retried; None: ten minutes. A missing file is
    a FileNotFoundError.
    """

    is_bucket: bool

    def read(
        self, path: epath.PathLike, seconds: float | None = None, listed: Listed | None = None
    ) -> bytes:
        """Returns the content of a small file, as it is now; `listed` is its entry in a list."""
        ...

    def open(self, path: epath.PathLike) -> io.BufferedReader:
        """Returns a file of any size, opened for reading."""
        ...

    def sha256(self, path: epath.PathLike) -> str:
        """Returns the SHA-256 of a file."""
        ...

    def state(
        self, path: epath.PathLike, seconds: float | None = None, listed: Listed | None = None
    ) -> tuple[int, int]:
        """Returns the size of a file in bytes, and its date in nanoseconds."""
        ...

    def write(
        self, path: epath.Path, text: str | Iterable[str], seconds: float | None = None
    ) -> None:
        """Replaces the text of a file in one step."""
        ...

    def exists(self, path: epath.Path) -> bool:
        """Returns whether there is a file."""
        ...

    def names(self, folder: epath.PathLike) -> set[str]:
        """Returns the names in a folder; none if it is missing."""
        ...

    def unchanging(self, folder: epath.PathLike) -> contextlib.AbstractContextManager[None]:
        """Allows lists of a folder to be remembered inside the context."""
        ...


class LocalStorage:
    """`Storage` on the disks of this machine."""

    is_bucket = False

    def read(
        self, path: epath.PathLike, seconds: float | None = None, listed: Listed | None = None
    ) -> bytes:
        """Returns the content of a file."""
        return epath.Path(path).read_bytes()

    def open(self, path: epath.PathLike) -> io.BufferedReader:
        """Returns a file, opened for reading."""
        return open(path, "rb")

    def sha256(self, path: epath.PathLike) -> str:
        """Returns the SHA-256 of a file."""
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def state(
        self, path: epath.PathLike, seconds: float | None = None, listed: Listed | None = None
    ) -> tuple[int, int]:
        """Returns size and date of a file."""
        stat = os.stat(path)
        return stat.st_size, stat.st_mtime_ns

    def write(
        self, path: epath.Path, text: str | Iterable[str], seconds: float | None = None
    ) -> None:
        """Replaces the text of a file in one step; makes its folder."""
        with create_folder(path.parent):
            write_atomic(path, text)

    def exists(self, path: epath.Path) -> bool:
        """Returns whether there is a file."""
        with translate_os_errors(path):
            return path.exists()

    def names(self, folder: epath.PathLike) -> set[str]:
        """Returns the names in a folder; none if it is missing."""
        with translate_os_errors(folder):
            path = epath.Path(folder)
            return {child.name for child in path.iterdir()} if path.exists() else set()

    def unchanging(self, folder: epath.PathLike) -> contextlib.AbstractContextManager[None]:
        """Does nothing: a disk answers at once."""
        return contextlib.nullcontext()


_LOCAL, _BUCKETS = LocalStorage(), buckets.BucketStorage()


def storage_of(path: epath.PathLike) -> Storage:
    """Returns the storage that a path lies in; raises InputError for other addresses."""
    return _BUCKETS if buckets.is_bucket(path) else _LOCAL
