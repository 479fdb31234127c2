"""Buckets, places named gs://: an object is whole or not there, and nothing is renamed or appended.

There are no folders: one is there while an object lies below it. Reading, writing and listing go
through epath; here stands what it does not have.
"""

import os
import time

import fsspec
from etils import epath

from bert_jax.config import InputError

# epath's connection, too, must see what other processes have written since.
fsspec.config.conf.setdefault("gs", {})["use_listings_cache"] = False
# And be patient; by its name, since gcsfs need not be installed.
fsspec.register_implementation("gcs", "bert_jax.storage.gcs.PatientFileSystem", clobber=True)

# Seconds between two writes of an object that grows, and which share of the time they may take.
_SECONDS = 30.0
_SHARE = 0.05


def is_bucket(path: epath.PathLike) -> bool:
    """Whether the path lies in a bucket.

    Raises:
      InputError: it lies at another kind of place that is none of this machine's folders, no bucket
        is named, or the [gcs] extra is not installed.
    """
    name = os.fspath(path)
    if "://" not in name:
        return False
    if not name.startswith("gs://"):
        raise InputError(f"{name}: of places with ://, only buckets (gs://) can be used")
    if name[len("gs://") :].startswith("/") or not name[len("gs://") :]:
        raise InputError(f"{name}: names no bucket; write gs://BUCKET/FOLDER")
    try:
        import gcsfs  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"{name}: buckets need the [gcs] extra: pip install 'bert-jax[gcs]'"
        ) from error
    return True


def create(path: epath.Path, data: bytes) -> bool:
    """Writes the object if nothing is there, as one step; whether it did."""
    try:
        _files().pipe_file(os.fspath(path), data, mode="create")
    except FileExistsError:
        return False
    return True


def read(path: epath.Path) -> bytes:
    """The object, of one time: epath asks for its size first, and it may be replaced meanwhile.

    Raises:
      FileNotFoundError: nothing is there.
    """
    return _files().cat_file(os.fspath(path))


def fetch(path: epath.Path, target: epath.PathLike) -> None:
    """Copies an object to a local file."""
    _files().get_file(os.fspath(path), os.fspath(target))


def send(source: epath.PathLike, path: epath.Path) -> None:
    """Copies a local file to an object."""
    _files().put_file(os.fspath(source), os.fspath(path))


class Growing:
    """A text that grows, line by line.

    It is kept here and written whole, now and then: rarely enough that writing takes a twentieth
    of the time at most, however long it has become.
    """

    def __init__(self, path: epath.Path):
        self._path = path
        self._text: bytearray | None = None
        self._is_written = True
        self._next = 0.0

    def append(self, text: str) -> None:
        """Adds to the text."""
        if self._text is None:
            self._text = bytearray(self._path.read_bytes() if self._path.exists() else b"")
        self._text += text.encode()
        self._is_written = False
        if time.monotonic() >= self._next:
            self.write()

    def write(self) -> None:
        """Writes what was added."""
        if self._is_written or self._text is None:
            return
        began = time.monotonic()
        self._path.write_bytes(bytes(self._text))
        ended = time.monotonic()
        self._is_written = True
        self._next = ended + max(_SECONDS, (ended - began) / _SHARE)


def _files() -> fsspec.AbstractFileSystem:
    return fsspec.filesystem("gs", finalize_on_close=True)
