"""Files as bytes: what does not decode, what is UTF-8 although another encoding is named.

`prepare` refuses what would come out as strange characters; the doctor says all of it.
"""

import codecs
import dataclasses
import re
from collections.abc import Iterable
from typing import IO

from bert_jax.errors import InputError
from bert_jax.text import lines as text_lines

_BLOCK = 1 << 20
# Bytes around the first that does not decode, from which the encoding is guessed.
_SAMPLE = 1 << 12
# Text holds no NUL at all; UTF-16 is half of them. A stray one is left to the control characters.
_BINARY_NULS = 0.001
# Bytes above 127 that all make UTF-8 characters do so by chance once in thousands, if this many.
_SURELY_UTF8 = 6
HIGH = bytes(range(128, 256))
_BAD = re.compile("[\udc80-\udcff]")


@dataclasses.dataclass
class File:
    """One file as bytes."""

    path: str  # its name
    size: int = 0  # bytes, uncompressed
    high: int = 0  # bytes above 127
    nuls: int = 0  # NUL characters
    bad: int = 0  # bytes that do not decode
    # Offset and line of the first of them, bytes before it, and bytes from there on.
    where: tuple[int, int, bytes, bytes] = (0, 0, b"", b"")
    utf8: bool = False  # it is UTF-8, and was to be read as something else
    damage: str = ""  # why it cannot be read, or empty

    @property
    def readable(self) -> bool:
        """Returns whether there is text to look at."""
        return not (self.damage or self.bad or self.utf8 or self.binary)

    @property
    def binary(self) -> bool:
        """Returns whether so many NULs show that this is UTF-16, or no text."""
        return self.nuls > _BINARY_NULS * self.size


def scan(path: str, encoding: str) -> File:
    """Reads a file in blocks and counts its bytes; any size, any content."""
    scanned = File(path)
    try:
        with text_lines.open_bytes(path) as file:
            _scan(file, encoding, scanned)
    except text_lines.DAMAGED as error:
        scanned.damage = f"damaged compressed file ({error})"
    except OSError as error:
        scanned.damage = f"cannot be read ({error.strerror or error})"
    return scanned


def _scan(file: IO[bytes], encoding: str, scanned: File) -> None:
    # Bytes that do not decode come out as lone surrogates, which no text holds.
    decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
    named_utf8 = codecs.lookup(encoding).name in ("utf-8", "utf-8-sig")
    utf8 = None if named_utf8 else codecs.getincrementaldecoder("utf-8")()
    lines = 1
    held = b""  # of a character cut in two by the end of the block before
    block = b"\n"
    while block:
        block = file.read(_BLOCK)
        start, data = scanned.size - len(held), held + block
        scanned.size += len(block)
        scanned.high += 0 if block.isascii() else len(block) - len(block.translate(None, HIGH))
        if utf8 is not None:
            try:
                utf8.decode(block, not block)
            except UnicodeDecodeError:
                utf8 = None
        try:
            text = decoder.decode(block, not block)
        except UnicodeError as error:  # of encodings in which bytes are no characters
            at = getattr(error, "start", 0)
            scanned.bad, scanned.where = 1, (start + at, lines, *_around(data, at))
            return
        scanned.nuls += text.count("\0")
        bad = [] if text.isascii() else _BAD.findall(text)
        if bad and not scanned.bad:
            before = text[: _BAD.search(text).start()]
            at = len(before.encode(encoding, "surrogateescape"))
            scanned.where = (start + at, lines + before.count("\n"), *_around(data, at))
        scanned.bad += len(bad)
        held = decoder.getstate()[0]
        lines += text.count("\n")
    scanned.utf8 = utf8 is not None and scanned.high >= _SURELY_UTF8


def _around(data: bytes, at: int) -> tuple[bytes, bytes]:
    return data[max(at - _SAMPLE, 0) : at], data[at : at + _SAMPLE]


def require_not_utf8(paths: Iterable[str], encoding: str) -> None:
    """Refuses files that are UTF-8 where another encoding is named, which garbles them silently."""
    if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig"):
        return
    for path in paths:
        scanned = scan(path, encoding)
        if scanned.utf8 and not scanned.damage:
            raise InputError(
                f"{path}: is UTF-8 ({scanned.high:,} bytes beyond ASCII), and corpus.encoding="
                f"{encoding} would make strange characters of them; `bert-jax doctor` says which "
                "files are what: convert the others to UTF-8, and leave corpus.encoding at utf-8"
            )
