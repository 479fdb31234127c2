"""Text files, JSON lines, columns of tables and TFDS datasets to documents.

Encodings: bytes are decoded strictly with `Corpus.encoding`; the first bad byte is an error that
names the file and its offset, unless `encoding_errors=replace`. A byte-order mark is dropped.
Nothing is guessed: a folder of mixed encodings is converted first.

Repeats: documents are compared by their text, not by their names. `repeated_documents=drop` leaves
out every document whose whole text stood before; `keep` keeps them and counts them in the manifest.
Either way equal texts fall into the same split.
"""

import codecs
import dataclasses
import functools
import io
import itertools
import json
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Literal

import pyarrow

from bert_jax.config import Corpus
from bert_jax.errors import InputError, prefix_errors
from bert_jax.storage import buckets, copies
from bert_jax.text import lines as text_lines
from bert_jax.text import records, sources, tfds_files

# Longest line of a text that somebody wrapped by hand or by program.
_WRAPPED_LINE = 200
# A layout word is held against files of more lines than this.
_LINES_TO_JUDGE = 100
# Characters that a piece of a text has at most, and a paragraph, where it can be cut: the time in
# which sentences are found grows with its square. Without any blank it may have more.
_PIECE, _WORD = 1 << 17, 1 << 21
# Pieces of a file that are held; of a larger one each is read again.
_HELD = 32
_SENTENCE_ENDS = ".!?:;)]}*\"'\u2019\u201d\u2026"

# In these a byte 0x0A is a line's end and nothing else.
_LINE_ENCODINGS = re.compile(r"utf-8|ascii|iso8859-\d+|cp125\d")

Layout = Literal["sentences_by_line", "wrapped", "paragraphs_by_line"]

# Takes the position in a compressed file after each read.
OnRead = Callable[[int], None]
# Yields decoded lines of an extent, or pieces of its text.
_ReadLines = Callable[[Literal["by line", "in pieces"]], Iterator[str]]

# Yields a text in any pieces, from its beginning each time it is called.
_Text = Callable[[], Iterable[str]]

# Where a piece may end: at the last end of a paragraph, of a line, of a word; the next of a word.
_PARAGRAPH, _LINE = re.compile(r"(?s:.*)\n[^\S\n]*\n"), re.compile(r"(?s:.*)\n")
_LAST_WORD = re.compile(r"(?s:.*)[\s。！？]")
_NEXT_WORD, _NEXT_LINE = re.compile(r"[\s。！？]"), re.compile(r"\n")


@dataclass(frozen=True)
class Document:
    """One document."""

    name: str  # the file; with a number behind it, the first line of a block or a record's number
    # Its text without blank lines around it, in pieces of whole paragraphs; `read_extent` gives
    # them once, before the next document.
    pieces: Iterable[str]
    layout: Layout  # how its lines are to be read
    # Of the file, where the text begins; 0 in a record, whose text has no lines of a file.
    line: int

    @functools.cached_property
    def text(self) -> str:
        """Returns the whole text."""
        return "".join(self.pieces)

    def place(self, number: int) -> str:
        """Returns FILE:LINE of a line of the text, counted from 0; for a record its name."""
        if not self.line:
            return self.name
        file = self.name
        if self.layout == "sentences_by_line":
            file = file.rpartition(":")[0]
        return f"{file}:{self.line + number}"

    def paragraphs(self) -> list[str]:
        """Returns the text as paragraphs, or as sentences if the layout gives one a line."""
        lines: list[str] = []
        for piece in self.pieces:
            if self.layout == "wrapped":
                blocks = re.split(r"\n[^\S\n]*\n", piece)
                lines += [" ".join(block.split("\n")) for block in blocks]
            else:
                lines += piece.split("\n")
        return [line for line in map(str.strip, lines) if line]


@dataclass(frozen=True)
class ByteRange:
    """A stretch that is read by itself: a file, some of its bytes, or records of a TFDS shard."""

    kind: str  # the word of a source
    path: str  # the file
    field: str  # that holds the text of its records
    folder: str = ""  # of a TFDS dataset, where its metadata lies
    start: int = 0  # of its bytes, records or, of a Parquet file, row groups
    stop: int = -1  # of the same; -1: all that follow
    count: int = 0  # records of this shard
    before: int = 0  # records of the dataset before it
    bytes: int = 0  # how much there is to read, roughly
    listed: buckets.Listed | None = None  # what the bucket's list says of an object


def read(corpus: Corpus) -> Iterator[Document]:
    """Yields the documents of all sources in order; those without any text are passed over."""
    for one in corpus.alone():
        for extent in extents(one):
            for document in read_extent(extent, one):
                if pieces := tuple(document.pieces):
                    yield dataclasses.replace(document, pieces=pieces)


def extents(corpus: Corpus, most: int = 0) -> Iterator[ByteRange]:
    """Yields what is read of the one source of a corpus, in order.

    Files are cut from `most` bytes on, where they can be: between lines of JSON, at blank lines of
    sentences_by_line, between records of an ArrayRecord file and row groups of a Parquet file. A
    compressed file, a TFRecord file, a CSV file, one at an address, and a text in any other layout
    stay whole; 0: all do.
    """
    (source,), field = corpus.sources, corpus.text_field
    word, _, place = source.partition(":")
    if word in ("tfds", "tfds_dir"):
        folder = tfds_files.find(place) if word == "tfds" else place
        before = 0
        for path, count, size, can_be_cut in tfds_files.shards(folder):
            parts = max(1, min(count, round(size / most))) if most and can_be_cut else 1
            bounds = [0, *(count * part // parts for part in range(1, parts)), -1]
            of = "tfds", str(path), field, str(folder)
            for start, stop in itertools.pairwise(bounds):
                yield ByteRange(*of, start, stop, count, before, size // parts)
            before += count
        return
    files = sources.files(source)
    if word == "parquet" and most:
        # In parallel, since a file in a bucket answers slowly.
        with ThreadPoolExecutor(copies.REQUESTS) as pool:
            all_cuts = pool.map(functools.partial(records.parts, column=field, most=most), files)
            for (path, listed), cuts in zip(files.items(), all_cuts, strict=True):
                for start, stop, text in cuts:
                    yield ByteRange(
                        word, path, field, start=start, stop=stop, bytes=text, listed=listed
                    )
        return
    for path, listed in files.items():
        size = sources.state(path, listed=listed)["bytes"]
        cuts = _cuts(path, word, corpus, most) if size > most > 0 else []
        for start, stop in itertools.pairwise([0, *cuts, size if cuts else -1]):
            length = (size if stop < 0 else stop) - start
            yield ByteRange(word, path, field, start=start, stop=stop, bytes=length, listed=listed)


def _cuts(path: str, word: str, corpus: Corpus, most: int) -> list[int]:
    """Returns bytes of a large file where a part of it may begin, about `most` apart."""
    by_blank_line = word == "text"
    if (
        text_lines.compression(path)
        or word not in ("text", "jsonl")
        or "://" in path
        or (by_blank_line and corpus.layout != "sentences_by_line")
        or not _LINE_ENCODINGS.fullmatch(codecs.lookup(corpus.encoding).name)
    ):
        return []
    cuts: list[int] = []
    with text_lines.answering(path), open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        while (begin := (cuts[-1] if cuts else 0) + most) < size:
            file.seek(begin)
            file.readline()  # the rest of one
            while by_blank_line and (line := file.readline()):
                if not line.decode(corpus.encoding, "replace").strip():
                    break
            if file.tell() >= size:
                break
            cuts.append(file.tell())
    return cuts


def read_extent(
    extent: ByteRange, corpus: Corpus, on_read: OnRead | None = None
) -> Iterator[Document]:
    """Yields the documents of an extent in order; those without any text have no pieces."""
    lines = functools.partial(_lines, extent, corpus, on_read)
    texts_of: Iterable[tuple[str, int, _Text]] = (
        _file_texts(extent, corpus, lines)
        if extent.kind == "text"
        else (
            (name, 0, functools.partial(iter, [_with_plain_ends(text)]))
            for name, text in _record_texts(extent, lines)
        )
    )
    for name, line, text in texts_of:
        layout = corpus.layout
        if layout == "per_file":
            is_long = any(len(line) > _WRAPPED_LINE for line in _lines_of(text()))
            layout = "paragraphs_by_line" if is_long else "wrapped"
        texts: Iterable[tuple[int, Iterable[str]]] = [(0, text())]
        if corpus.document_starts:
            texts = _cut(_lines_of(text()), corpus.document_starts)
        is_empty = True
        for before, own in texts:
            pieces = _pieces(own, layout)
            if first := next(pieces, ""):
                is_empty = False
                whole = itertools.chain([first], pieces)
                yield Document(name, whole, layout, line and line + before)
        if is_empty:
            yield Document(name, (), layout, line)


def _pieces(text: Iterable[str], layout: Layout) -> Iterator[str]:
    """Yields a text without blanks around it in pieces that end with a paragraph, none empty.

    A paragraph of over `_PIECE` characters is cut at a line's end or else a word's; a sentence of
    `sentences_by_line` is not, whatever its length.
    """
    places = [_PARAGRAPH, _LINE, _LAST_WORD] if layout == "wrapped" else [_LINE, _LAST_WORD]
    next_place, longest = _NEXT_WORD, _WORD
    if layout == "sentences_by_line":
        places, next_place, longest = [_LINE], _NEXT_LINE, sys.maxsize
    rest, blanks = "", ""
    for chunk in text:
        # Blanks are of the text once more of it follows.
        chunk = blanks + chunk if rest else chunk.lstrip()
        body = chunk.rstrip()
        blanks = chunk[len(body) :]
        rest, start = rest + body, 0
        while len(rest) - start > _PIECE:
            ends = (place.match(rest, start, start + _PIECE) for place in places)
            end = next(filter(None, ends), None) or next_place.search(
                rest, start, min(start + longest, len(rest))
            )
            if not end and len(rest) - start <= longest:
                break
            stop = end.end() if end else start + longest
            piece, start = rest[start:stop], stop
            yield piece if piece.endswith("\n") else piece + "\n"
        rest = rest[start:]
    if rest:
        yield rest


def _lines_of(text: Iterable[str]) -> Iterator[str]:
    """Yields the lines of a text without blanks around it; long ones are cut as pieces are."""
    for piece in _pieces(text, "paragraphs_by_line"):
        yield from piece.removesuffix("\n").split("\n")


# Titles as wikis and Markdown write them, and numbered parts of books.
_HEADING = re.compile(
    r"\s*= (?!= )\S.*(?<! =) =\s*$|\s*=(?!=)[^=]+=\s*$|# +\S"
    r"|\s*(?:CHAPTER|Chapter|BOOK|PART|VOLUME|LETTER|STAVE|ACT) +(?:[0-9]+|[IVXLCDM]+|(?i:(?:the )?"
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|first|second|third|fourth|"
    r"fifth|sixth|seventh|eighth|ninth|tenth|last)))\b.{0,80}$"
)


def _cut(lines: Iterable[str], pattern: str) -> Iterator[tuple[int, Iterator[str]]]:
    """Yields the number of the first line, and the lines, of each document that lines begin.

    Such lines that follow each other begin one document, as those of a table of contents.
    """
    begins = _HEADING if pattern == "headings" else re.compile(pattern)

    def numbered() -> Iterator[tuple[int, str]]:
        first, is_empty, is_blank = 0, True, True
        for number, line in enumerate(lines):
            if (is_blank or begins is not _HEADING) and begins.match(line):
                if not is_empty:
                    first, is_empty = number, True
            elif line.strip():
                is_empty = False
            is_blank = not line.strip()
            yield first, f"{line}\n"

    for first, own in itertools.groupby(numbered(), operator.itemgetter(0)):
        yield first, (line for _, line in own)


def contradiction(lines: Iterable[str], layout: Layout) -> str | None:
    """Returns why a file of over 100 lines cannot be in this layout, or None."""
    count = long = longest = broken = 0
    before = "."
    for line in filter(None, map(str.strip, lines)):
        count += 1
        long += len(line) > _WRAPPED_LINE
        longest = max(longest, len(line))
        # A sentence broken off at a line's end goes on in lower case; whole ones end in a mark.
        broken += line[0].islower() and before[-1] not in _SENTENCE_ENDS
        before = line
    if count <= _LINES_TO_JUDGE:
        return None
    continued = broken / count
    if layout == "wrapped" and long > 0.5 * count:
        share = long / count
        return f"{share:.0%} of its lines are over {_WRAPPED_LINE} characters: paragraphs_by_line?"
    by_line = layout == "sentences_by_line" or (layout == "paragraphs_by_line" and longest <= 100)
    if by_line and continued > 0.3:
        return f"{continued:.0%} of its lines go on in the next: wrapped?"
    return None


def _file_texts(
    extent: ByteRange, corpus: Corpus, read_lines: _ReadLines
) -> Iterator[tuple[str, int, _Text]]:
    """Yields one document a file, or in sentences_by_line one a block of lines."""
    path = extent.path
    if corpus.layout == "sentences_by_line":
        lines = read_lines("by line")
        head = [] if extent.start else list(itertools.islice(lines, 10 * _LINES_TO_JUDGE))
        _refuse_contradiction(path, head, corpus.layout)
        numbered = enumerate(itertools.chain(head, lines), 1)
        for is_text, block in itertools.groupby(numbered, lambda line: bool(line[1].strip())):
            if is_text:
                start, first = next(block)
                own = itertools.chain([first], (line for _, line in block))
                text = (line.replace("\r\n", "\n") for line in own)
                yield f"{path}:{start}", start, functools.partial(iter, text)
        return
    head = list(itertools.islice(read_lines("in pieces"), _HELD))

    def text() -> Iterable[str]:
        return head if len(head) < _HELD else read_lines("in pieces")

    if corpus.layout != "per_file":
        _refuse_contradiction(path, _lines_of(text()), corpus.layout)
    begin = "".join(head[:1])
    yield path, 1 + begin.count("\n", 0, len(begin) - len(begin.lstrip())), text


def _refuse_contradiction(path: str, lines: Iterable[str], layout: Layout) -> None:
    why = contradiction(lines, layout)
    if why:
        raise InputError(f"{path}: does not look like corpus.layout={layout}: {why}")


def _record_texts(extent: ByteRange, read_lines: _ReadLines) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each record."""
    path, field = extent.path, extent.field
    if extent.kind == "tfds":
        return _dataset_texts(extent)
    if extent.kind == "jsonl":
        return _json_texts(extent, read_lines("by line"))
    if extent.kind == "parquet":
        return records.parquet(path, field, extent.start, extent.stop)
    kind = "csv" if extent.kind == "csv" else "tsv"
    rows = records.table(kind, read_lines("by line"), path)
    return records.column_of(rows, field, path)


def _json_texts(extent: ByteRange, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    path = extent.path
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            text = records.text_field(json.loads(line), extent.field)
        except (InputError, ValueError, RecursionError) as error:
            wrong = error if isinstance(error, InputError) else f"not JSON ({error})"
            raise InputError(f"{path}:{number + _lines_before(extent)}: {wrong}") from error
        yield f"{path}:{number}", records.encodable(text)


def _lines_before(extent: ByteRange) -> int:
    """Counts the lines of the file before the extent."""
    if not extent.start:  # of files that may be cut nowhere, such as those at an address
        return 0
    with _extent_bytes(dataclasses.replace(extent, start=0, stop=extent.start)) as file:
        return sum(1 for _ in file)


def _dataset_texts(extent: ByteRange) -> Iterator[tuple[str, str]]:
    folder, field = extent.folder, extent.field
    shard = tfds_files.shard_records(folder, extent.path, extent.count, extent.start, extent.stop)
    for number, record in enumerate(shard, extent.before + extent.start):
        with prefix_errors(f"{folder}: record {number}"):
            text = records.text_field(record, field)
        yield f"{folder}:{number}", text


def _lines(
    extent: ByteRange, corpus: Corpus, on_read: OnRead | None, how: Literal["by line", "in pieces"]
) -> Iterator[str]:
    """Yields decoded lines, split on \\n alone, or pieces of text, whose newlines are all \\n.

    A byte-order mark is left out.
    """
    path, encoding = extent.path, corpus.encoding
    errors = {"stop": "strict", "replace": "replace"}[corpus.encoding_errors]
    try:
        with (
            text_lines.answering(path),
            _extent_bytes(extent, on_read) as raw,
            io.TextIOWrapper(raw, encoding, errors, "\n" if how == "by line" else None) as file,
        ):
            pieces = iter(functools.partial(file.read, _PIECE), "")
            for number, line in enumerate(file if how == "by line" else pieces):
                yield line.lstrip("\ufeff") if number == extent.start == 0 else line
    except UnicodeError as error:
        raise InputError(
            f"{path}: byte {_first_bad_byte(path, encoding)} is not {encoding}; `bert-jax doctor` "
            "says which files are not. Convert them, name the encoding of all with "
            "--set corpus.encoding=..., or --set corpus.encoding_errors=replace"
        ) from error


def _extent_bytes(extent: ByteRange, on_read: OnRead | None = None) -> IO[bytes]:
    if extent.stop < 0:
        return text_lines.open_bytes(extent.path, on_read)
    size = extent.stop - extent.start
    return io.BufferedReader(pyarrow.OSFile(extent.path).get_stream(extent.start, size), 1 << 17)


def _first_bad_byte(path: str, encoding: str) -> int:
    """Returns the offset in the uncompressed file: decoding reports it relative to a buffer."""
    with text_lines.answering(path), text_lines.open_bytes(path) as file:
        data = file.read()
    try:
        data.decode(encoding)
    except UnicodeError as error:
        return getattr(error, "start", 0)
    return 0  # a mark is missing: read as a stream UTF-16 must begin with one


def _with_plain_ends(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
