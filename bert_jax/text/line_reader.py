"""Reads bytes of files, compressed or not, and lines of text from files or other streams.

Except for `read`, a file may be in a bucket, or at another address with `://`, which fsspec opens.
Arrow reads compressed files: fsspec's readers accept a truncated .zst file, and stop after the
first of several frames. Arrow does not read .xz; Python's `lzma` does.
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

# From file endings to compressions, by Arrow's names except xz.
COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
# This many bytes above 127 form valid UTF-8 by chance only once in thousands of texts.
_SURELY_UTF8 = 6
_HIGH = bytes(range(128, 256))


def read(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yields the lines of local files like `decode_lines`; raises at once if a file is missing."""
    for path in paths:
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file")
    return itertools.chain.from_iterable(map(read_file, paths))


def decode_lines(raw: Iterable[bytes], name: str) -> Iterator[tuple[str, str]]:
    """Yields (NAME:NUMBER, line) for lines of UTF-8, which `raw` splits only at \\n."""
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


def read_file(path: str) -> Iterator[tuple[str, str]]:
    """Yields the lines of one file as `read` does; a missing file is an error at the first line."""
    with translate_errors(path), open_bytes(path) as file:
        yield from decode_lines(file, path)


@contextlib.contextmanager
def translate_errors(where: str) -> Iterator[None]:
    """Turns errors of reading into InputError or Unavailable; messages begin with `where`."""
    try:
        yield
    except (InputError, Unavailable, UnicodeError):
        raise
    except Exception as error:  # each client of a remote file system has its own exceptions
        is_remote = "://" in where
        if not (is_remote or isinstance(error, OSError)):
            raise
        if isinstance(error, FileNotFoundError):
            raise InputError(f"{where}: is missing") from error
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        if is_remote and retry.is_transient(error):
            raise Unavailable(f"{where}: out of reach ({reason}); run again to resume") from error
        raise InputError(f"{where}: damaged, or cannot be read ({reason})") from error


def open_bytes(path: str, on_read: Callable[[int], None] | None = None) -> IO[bytes]:
    """Opens the bytes of a file, decompressed if its name ends in .gz, .zst, .bz2 or .xz.

    `on_read` is called with the position in a compressed file after each read.

    Raises:
      OSError: the file cannot be read; during reading: the file is damaged.
    """
    file, codec = open_raw(path), COMPRESSED.get(compression_ending(path))
    if codec is None:
        return file
    if on_read is not None:
        file = io.BufferedReader(_WatchedFile(file, on_read), 1 << 16)
    if codec == "xz":
        return io.BufferedReader(_XzFile(file), 1 << 17)
    stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), codec)
    return io.BufferedReader(stream, 1 << 17)


def compression_ending(path: str) -> str:
    """Returns the ending of a compressed file's name in lower case; "" for other files."""
    ending = os.path.splitext(path)[1].lower()
    return ending if ending in COMPRESSED else ""


class _WatchedFile(io.RawIOBase):
    """The bytes of a file; passes the position to `on_read` after each read."""

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
    """The decompressed bytes of an .xz file; reading a damaged one raises OSError."""

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


def open_raw(path: str) -> io.BufferedReader:
    """Opens the bytes of a file without decompression; raises as `open_bytes`."""
    if "://" not in path or path.startswith("gs://"):
        return storage_of(path).open(path)
    system, name = filesystem_of(path)
    return cast(io.BufferedReader, system.open(name, "rb"))


def filesystem_of(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns the fsspec file system of an address, and the name of the file there."""
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error


def require_not_utf8(paths: Iterable[str], encoding: str) -> None:
    """Raises InputError for UTF-8 files if another encoding is set, which would garble them."""
    if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig"):
        return
    for path in paths:
        count = _count_utf8_bytes(path)
        if count >= _SURELY_UTF8:
            raise InputError(
                f"{path}: is UTF-8 ({count:,} bytes beyond ASCII), and corpus.encoding={encoding} "
                "would turn them into strange characters; `bert-jax doctor` lists all UTF-8 "
                "files: convert the others, and leave corpus.encoding at utf-8"
            )


def _count_utf8_bytes(path: str) -> int:
    """Returns how many bytes of a file are above 127; 0 if it is not UTF-8."""
    decoder, count = codecs.getincrementaldecoder("utf-8")(), 0
    try:
        with open_bytes(path) as file:
            while block := file.read(1 << 20):
                decoder.decode(block)
                count += 0 if block.isascii() else len(block) - len(block.translate(None, _HIGH))
        decoder.decode(b"", final=True)
    except (UnicodeDecodeError, OSError):  # reported when the text is read
        return 0
    return count
