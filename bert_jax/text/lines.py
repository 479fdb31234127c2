"""Bytes of files, compressed or not, and lines of text from files or other sources of bytes.

Files may lie at an address with `://`, which fsspec opens. Compressed ones are read here: its
reader of .zst takes a file cut short for a whole one, and ends after the first of several frames.
"""

import contextlib
import gzip
import io
import itertools
import os
import typing
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import IO, Any

import fsspec
import zstandard

from bert_jax.errors import InputError

# Raised by reading a compressed file that is damaged.
DAMAGED = (gzip.BadGzipFile, zlib.error, EOFError, zstandard.ZstdError)

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read(paths: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Reads files as `decoded` does; one whose name ends in .gz or .zst is uncompressed."""
    for path in paths:
        if not os.path.exists(path):
            raise InputError(f"{path}: no such file")
    return itertools.chain.from_iterable(map(of_file, paths))


def decoded(raw: Iterable[bytes], name: str) -> Iterator[tuple[str, str]]:
    """Yields (NAME:NUMBER, line) of lines of UTF-8, split at \\n alone."""
    for number, line in enumerate(raw, 1):
        if number == 1:
            line = line.removeprefix(_BYTE_ORDER_MARK)
        where = f"{name}:{number}"
        try:
            yield where, line.removesuffix(b"\n").decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(
                f"{where}: byte {error.start} of the line is not UTF-8; convert the text"
            ) from error


def of_file(path: str) -> Iterator[tuple[str, str]]:
    """Reads one file as `read` does, but sees that it is missing only when a line is asked for."""
    with named_damage(path), open_bytes(path) as file:
        yield from decoded(file, path)


@contextlib.contextmanager
def named_damage(path: str) -> Iterator[None]:
    """Raises InputError, which names the file, where it is damaged or cannot be read."""
    try:
        yield
    except DAMAGED as error:
        raise InputError(
            f"{path}: damaged compressed file ({error}); put the whole file back"
        ) from error
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error})") from error


def open_bytes(path: str) -> IO[bytes]:
    """Returns the bytes of a file, uncompressed if its name ends in .gz or .zst.

    Raises:
      OSError: it cannot be read.
    """
    if path.endswith(".gz"):
        return typing.cast(IO[bytes], _Gzip(packed(path)))
    if path.endswith(".zst"):
        return io.BufferedReader(_Zstd(path), 1 << 17)
    return packed(path)


def packed(path: str) -> IO[bytes]:
    """Returns the bytes of a file as they are; raises as `open_bytes`."""
    if "://" not in path:
        return open(path, "rb")
    system, name = system_of(path)
    return system.open(name, "rb")


def system_of(path: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """Returns what fsspec opens an address with, and the name there."""
    try:
        return fsspec.core.url_to_fs(path)
    except (ImportError, ValueError) as error:
        raise InputError(f"{path}: {error}") from error


class _Gzip(gzip.GzipFile):
    """Bytes of a gz file, which is closed with it."""

    def __init__(self, file: IO[bytes]):
        super().__init__(fileobj=file, mode="rb")
        self._packed = file

    def close(self) -> None:
        super().close()
        self._packed.close()


class _Zstd(io.RawIOBase):
    """Bytes of a zst file. The library's own reader takes a file cut short for a whole one."""

    def __init__(self, path: str):
        self._chunks = _zstd_chunks(path)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._rest:
            chunk = next(self._chunks, None)
            if chunk is None:
                return 0
            self._rest = memoryview(chunk)
        count = min(len(buffer), len(self._rest))
        buffer[:count], self._rest = self._rest[:count], self._rest[count:]
        return count

    def close(self) -> None:
        self._chunks.close()
        super().close()


def _zstd_chunks(path: str) -> Iterator[bytes]:
    frame = None
    with packed(path) as file:
        # Small reads: a few bytes may unpack to much.
        while data := file.read(1 << 13):
            while data:
                frame = frame or zstandard.ZstdDecompressor().decompressobj()
                yield frame.decompress(data)
                data = frame.unused_data
                if frame.eof:
                    frame = None
    if frame:
        raise zstandard.ZstdError("it ends in the middle")
