"""Bytes of files, compressed or not, and lines of text from files or other sources of bytes.

Files may lie in a bucket, or at another address with `://`, which fsspec opens. Compressed ones are
read by Arrow: the readers of fsspec take a .zst cut short for a whole one, and end after the first
of several frames. Arrow does not read .xz; Python's `lzma` does.
"""

import codecs
import contextlib
import io
import itertools
import lzma
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import IO, cast

import fsspec
import pyarrow

from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import retry
from bert_jax.storage.storage import storage_of

# Arrow's names of compressions, by the endings of the files.
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
# Bytes above 127 that all make UTF-8 characters do so by chance once in thousands, if this many.
_SURELY_UTF8 = 6
_HIGH = bytes(range(128, 256))


def read(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Reads files as `decoded` does; compressed ones as `open_bytes` does."""
    for path in paths:
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file")
    return itertools.chain.from_iterable(map(of_file, paths))


def decoded(raw: Iterable[bytes], name: str) -> Iterator[tuple[str, str]]:
    """Yields (NAME:NUMBER, line) of lines of UTF-8, split at \\n alone."""
    for number, line in enumerate(raw, 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        where = f"{name}:{number}"
        try:
            yield where, line.removesuffix(b"\n").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where}: byte {error.start} of the line is not UTF-8; convert the text"
            ) from error


def of_file(path: str) -> Iterator[tuple[str, str]]:
    """Reads one file as `read` does, but sees that it is missing only when a line is asked for."""
    with answering(path), open_bytes(path) as file:
        yield from decoded(file, path)


@contextlib.contextmanager
def answering(where: str) -> Iterator[None]:
    """Raises InputError or Unavailable, which begin with `where`, for what cannot be read there."""
    try:
        yield
    except (InputError, Unavailable, UnicodeError):
        raise
    except Exception as error:  # every client of an address has its own
        if not ("://" in where or isinstance(error, OSError)):
            raise
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{where}: is missing") from error
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if "://" in where and retry.is_transient(error):
            raise Unavailable(f"{where}: out of reach ({why}); run again to go on") from error
        raise InputError(f"{where}: damaged, or cannot be read ({why})") from error


def open_bytes(path: str, on_read: Callable[[int], None] | None = None) -> IO[bytes]:
    """Returns the bytes of a file, uncompressed if its name ends in .gz, .zst, .bz2 or .xz.

    `on_read` is called with the position in a compressed file whenever some of it is read.

    Raises:
      OSError: it cannot be read; later, it is damaged.
    """
    file, kind = packed(path), COMPRESSED.get(compression(path))
    if kind is None:
        return file
    if on_read is not None:
        file = io.BufferedReader(_WatchedFile(file, on_read), 1 << 16)
    if kind == "xz":
        return io.BufferedReader(_XzFile(file), 1 << 17)
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), kind)
    return io.BufferedReader(stream, 1 << 17)


def compression(path: str) -> str:
    """Returns the ending of a compressed file's name in lower case; "" for other files."""
    ending = os.path.splitext(path)[1].lower()
    return ending if ending in COMPRESSED else ""


class _WatchedFile(io.RawIOBase):
    """The bytes of a file; reports the position in it after each read."""

    def __init__(self, file: IO[bytes], on_read: Callable[[int], None]):
        self._file, self._on_read = file, on_read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyrefly: ignore[bad-override]
        data = self._file.read(len(buffer))
        buffer[: len(data)] = data
        self._on_read(self._file.tell())
        return len(data)

    def close(self) -> None:
        self._file.close()
        super().close()


class _XzFile(io.RawIOBase):
    """The uncompressed bytes of an .xz file; reading a damaged one raises OSError."""

    def __init__(self, file: IO[bytes]):
        self._file, self._stream = file, lzma.LZMAFile(file)  # noqa: SIM115

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # pyrefly: ignore[bad-override]
        try:
            return self._stream.readinto(buffer)
        except (EOFError, lzma.LZMAError) as error:
            raise OSError(str(error)) from error

    def close(self) -> None:
        self._file.close()
        super().close()


def packed(path: str) -> io.BufferedReader:
    """Returns the bytes of a file as they are; raises as `open_bytes`."""
    if "://" not in path or path.startswith("gs://"):
        return storage_of(path).open(path)
    system, name = system_of(path)
    return cast(io.BufferedReader, system.open(name, "rb"))


def system_of(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns what fsspec opens an address with, and the name there."""
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error


def require_not_utf8(paths: Iterable[str], encoding: str) -> None:
    """Refuses files that are UTF-8 where another encoding is named, which garbles them silently."""
    if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig"):
        return
    for path in paths:
        high = _high_of_utf8(path)
        if high >= _SURELY_UTF8:
            raise InputError(
                f"{path}: is UTF-8 ({high:,} bytes beyond ASCII), and corpus.encoding={encoding} "
                "would make strange characters of them; `bert-jax doctor` names all such files: "
                "convert the others to UTF-8, and leave corpus.encoding at utf-8"
            )


def _high_of_utf8(path: str) -> int:
    """Returns how many bytes of a file are above 127; 0 if it is not UTF-8."""
    decoder, high = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open_bytes(path) as file:
            while block := file.read(1 << 20):
                decoder.decode(block)
                high += 0 if block.isascii() else len(block) - len(block.translate(None, _HIGH))
        decoder.decode(b"", final=True)
    except (UnicodeDecodeError, OSError):  # what is damaged, reading refuses
        return 0
    return high
