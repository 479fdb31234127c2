"""Files as bytes: what does not decode, and what is no text at all."""

import codecs
import dataclasses
import os
import re
from typing import IO

from bert_jax.config import Corpus
from bert_jax.doctor.finding import Finding, example, share
from bert_jax.errors import printable
from bert_jax.text import documents

_BLOCK = 1 << 20
# Files named beside the example.
_NAMED = 8
# Text holds no NUL at all; UTF-16 is half of them. A stray one is left to the control characters.
_BINARY_NULS = 0.001
# Bytes above 127 that all make UTF-8 characters do so by chance once in thousands, if this many.
_SURELY_UTF8 = 6
# Bytes above 127 in a European language are a few in a hundred; in other scripts, most.
_ANOTHER_SCRIPT = 0.3
_BAD = re.compile("[\udc80-\udcff]")
_UTF16_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


@dataclasses.dataclass
class Bytes:
    """One file.

    Attributes:
      path: its name.
      size: bytes, uncompressed.
      high: bytes above 127.
      nuls: NUL characters.
      bad: bytes that do not decode.
      where: offset and line of the first of them, and how Windows-1252 reads what is around.
      utf16: it begins with the mark of UTF-16.
      utf8: it is UTF-8, and was to be read as something else.
      damage: why it cannot be read, or empty.
    """

    path: str
    size: int = 0
    high: int = 0
    nuls: int = 0
    bad: int = 0
    where: tuple[int, int, str] = (0, 0, "")
    utf16: bool = False
    utf8: bool = False
    damage: str = ""

    @property
    def readable(self) -> bool:
        """Whether there is text to look at."""
        return not (self.damage or self.bad or self.utf8 or self.binary)

    @property
    def binary(self) -> bool:
        """So many NULs that this is UTF-16, or no text."""
        return self.nuls > _BINARY_NULS * self.size


def look(path: str, encoding: str) -> Bytes:
    """Reads a file in blocks; any size, any content."""
    found = Bytes(path)
    try:
        with documents.open_bytes(path) as file:
            _scan(file, encoding, found)
    except documents.DAMAGED as error:
        found.damage = f"damaged compressed file ({error})"
    except OSError as error:
        found.damage = f"cannot be read ({error.strerror or error})"
    return found


def _scan(file: IO[bytes], encoding: str, found: Bytes) -> None:
    # Bytes that do not decode come out as lone surrogates, which no text holds.
    decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
    utf8 = None if codecs.lookup(encoding).name in ("utf-8", "utf-8-sig") else _Utf8()
    lines = 1
    held = 0  # bytes of a character cut in two by the end of the block before
    at_end = False
    while not at_end:
        block = file.read(_BLOCK)
        at_end = not block
        if not found.size:
            found.utf16 = block.startswith(_UTF16_MARKS)
        start = found.size - held
        found.size += len(block)
        if utf8:
            utf8.add(block)
        if not block.isascii():
            found.high += len(block) - len(block.translate(None, _HIGH))
        try:
            text = decoder.decode(block, at_end)
        except UnicodeError as error:  # of encodings in which bytes are no characters
            found.bad += 1
            found.where = (start + getattr(error, "start", 0), lines, str(error))
            return
        found.nuls += text.count("\0")
        held = len(decoder.getstate()[0])
        bad = _BAD.findall(text) if not text.isascii() else ()
        if bad and not found.bad:
            at = _BAD.search(text).start()
            offset = len(text[:at].encode(encoding, "surrogateescape"))
            around = text[max(at - 30, 0) : at + 30].encode(encoding, "surrogateescape")
            line = lines + text.count("\n", 0, at)
            found.where = (start + offset, line, around.decode("windows-1252", "backslashreplace"))
        found.bad += len(bad)
        lines += text.count("\n")
    found.utf8 = utf8 is not None and utf8.holds and found.high >= _SURELY_UTF8


class _Utf8:
    """Whether bytes are UTF-8, block by block."""

    def __init__(self) -> None:
        self.holds = True
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def add(self, block: bytes) -> None:
        try:
            self._decoder.decode(block, not block)
        except UnicodeDecodeError:
            self.holds = False


_HIGH = bytes(range(128, 256))


def findings(corpus: Corpus, files: list[Bytes]) -> list[Finding]:
    """What is wrong with the files of a corpus, as `look` saw them."""
    found = [_damaged(files), _undecodable(corpus, files), _is_utf8(corpus, files), _binary(files)]
    return [finding for finding in found if finding]


def _also(files: list[Bytes]) -> str:
    """The names of some more files than the first, since all of them want mending."""
    names = [printable(os.path.basename(file.path)) for file in files[1 : 1 + _NAMED]]
    more = len(files) - 1 - len(names)
    if not names:
        return ""
    return f"; also {', '.join(names)}" + (f" and {more:,} more" if more else "")


def _damaged(files: list[Bytes]) -> Finding | None:
    damaged = [file for file in files if file.damage]
    if not damaged:
        return None
    return Finding(
        "problem",
        f"{len(damaged)} of {len(files)} files cannot be read",
        example(damaged[0].path, damaged[0].damage) + _also(damaged),
        "`prepare` stops at the first of them",
        "fetch or compress them anew",
    )


def _undecodable(corpus: Corpus, files: list[Bytes]) -> Finding | None:
    bad = [file for file in files if file.bad and not file.damage]
    if not bad:
        return None
    encoding, first = corpus.encoding, bad[0]
    good = [file for file in files if file.high and not file.bad and not file.damage]
    offset, line, around = first.where
    look = "they were looked at no further"
    if_well = "if the example, shown as WINDOWS-1252, reads well"
    if all(file.utf8 for file in bad):
        guess, remedy = "they are UTF-8", "leave corpus.encoding at utf-8"
    elif any(file.utf16 for file in bad):
        guess = "some begin as UTF-16 does"
        remedy = f"convert them: `iconv -f UTF-16 -t UTF-8`; {look}"
    elif any(file.bad > _ANOTHER_SCRIPT * file.size for file in bad):
        guess = "most of their bytes, so that it is another script"
        remedy = f"find out which encoding it is, and name it with corpus.encoding; {look}"
    elif good:
        guess = f"the other {len(good)} files with characters beyond ASCII are"
        remedy = f"convert them: `iconv -f WINDOWS-1252 -t UTF-8` {if_well}; {look}"
    else:
        guess = "no file with characters beyond ASCII is"
        remedy = f"--set corpus.encoding=windows-1252 {if_well}; {look}"
    return Finding(
        "problem",
        f"{len(bad)} of {len(files)} files are not {encoding} "
        f"({sum(file.bad for file in bad):,} bytes; {guess})",
        example(f"{first.path}:{line}, byte {offset}", around) + _also(bad),
        "`prepare` stops at the first of them",
        remedy,
    )


def _is_utf8(corpus: Corpus, files: list[Bytes]) -> Finding | None:
    utf8 = [file for file in files if file.utf8 and not file.bad]
    if not utf8:
        return None
    high = sum(file.high > 0 for file in files)
    return Finding(
        "problem",
        f"{len(utf8)} of {high} files with characters beyond ASCII are UTF-8, and are read as "
        f"{corpus.encoding}",
        example(utf8[0].path, f"{utf8[0].high:,} bytes beyond ASCII") + _also(utf8),
        "each such character becomes two or three strange ones",
        "leave corpus.encoding at utf-8"
        if len(utf8) == high
        else "convert the others to UTF-8 with iconv, and leave corpus.encoding at utf-8",
    )


def _binary(files: list[Bytes]) -> Finding | None:
    binary = [file for file in files if file.binary and not file.bad and not file.damage]
    if not binary:
        return None
    first = binary[0]
    return Finding(
        "problem",
        f"{len(binary)} of {len(files)} files hold NUL bytes and are no text ({first.nuls:,} in "
        f"the first, {share(first.nuls / first.size)} of it)",
        example(first.path, f"{first.size:,} bytes") + _also(binary),
        "their characters come out as single letters or as nothing",
        "convert them if they are UTF-16 (`iconv -f UTF-16LE -t UTF-8`), else take them out",
    )
