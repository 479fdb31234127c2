"""Reads documents from text files, JSON lines, columns of tables and TFDS datasets.

Encodings: bytes are decoded strictly with `Corpus.encoding`; the first invalid byte is an error
that names the file and the offset, unless `encoding_errors=replace`. A byte-order mark is dropped.
Encodings are never guessed: a folder of mixed encodings must be converted first.

`data.parts` finds repeated documents by their text, not by their names.
"""

import codecs
import dataclasses
import functools
import io
import itertools
import operator
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import IO, Literal, NoReturn

import pyarrow

from bert_jax.config import Corpus
from bert_jax.config.text_corpus import parse_quality
from bert_jax.errors import InputError
from bert_jax.storage import buckets, copies
from bert_jax.text import line_reader, records, sources, tfds_files
from bert_jax.text.records import SourceRecord

# Maximum length of a line in a wrapped text.
_WRAPPED_LINE = 200
# Files with more lines than this are checked against `corpus.layout`.
_LINES_TO_JUDGE = 100
# Maximum number of characters of a chunk of text, and so of a paragraph, since the time to split a
# paragraph into sentences is quadratic.
_LONGEST_CHUNK = 1 << 17
# The same for a chunk that has no whitespace at which it could be cut.
_LONGEST_WORD = 1 << 21
# Files of fewer chunks are held in memory; larger ones are read several times.
_HELD_CHUNKS = 32
_SENTENCE_ENDS = ".!?:;)]}*\"'\u2019\u201d\u2026"

# Encodings in which the byte 0x0A is always a line feed.
_LINE_ENCODINGS = re.compile(r"utf-8|ascii|iso8859-\d+|cp125\d")

Layout = Literal["sentences_by_line", "wrapped", "paragraphs_by_line"]

# Takes the position in a compressed file after each read.
OnRead = Callable[[int], None]
# Yields decoded lines of an extent, or chunks of its text.
_ReadLines = Callable[[Literal["by line", "in chunks"]], Iterator[str]]

# Each call yields the text from its beginning, in chunks of any size.
_OpenText = Callable[[], Iterable[str]]

# Where a chunk may be cut. A match ends at the last end of a paragraph, line or word before a
# limit:
_TO_LAST_PARAGRAPH_END = re.compile(r"(?s:.*)\n[^\S\n]*\n")
_TO_LAST_LINE_END = re.compile(r"(?s:.*)\n")
_TO_LAST_WORD_END = re.compile(r"(?s:.*)[\s。！？]")
# or at the next one after it.
_NEXT_WORD_END, _NEXT_LINE_END = re.compile(r"[\s。！？]"), re.compile(r"\n")


@dataclass(frozen=True)
class Document:
    """One document."""

    name: str  # the file, or FILE:NUMBER with the first line of a block or the number of a record
    # The text without blank lines around it, in chunks of whole paragraphs. From `read_extent` this
    # is an iterator, to be consumed before the next document is asked for.
    chunks: Iterable[str]
    layout: Layout  # the meaning of its lines
    line: int  # the first line in the file; 0 for a record
    is_excluded: bool = False  # whether `Corpus.quality` excludes it; then `chunks` is empty

    @functools.cached_property
    def text(self) -> str:
        """Returns the whole text."""
        return "".join(self.chunks)

    def location(self, number: int) -> str:
        """Returns FILE:LINE of line `number` of the text, counted from 0; for a record its name."""
        if not self.line:
            return self.name
        file = self.name
        if self.layout == "sentences_by_line":
            file = file.rpartition(":")[0]
        return f"{file}:{self.line + number}"

    def paragraphs(self) -> list[str]:
        """Returns the text as paragraphs, or as sentences if the layout gives one a line."""
        lines: list[str] = []
        for chunk in self.chunks:
            if self.layout == "wrapped":
                paragraphs = re.split(r"\n[^\S\n]*\n", chunk)
                lines += [" ".join(paragraph.split("\n")) for paragraph in paragraphs]
            else:
                lines += chunk.split("\n")
        return [line for line in map(str.strip, lines) if line]


@dataclass(frozen=True)
class Extent:
    """A part of the input that is read alone: a file, a range of it, or records of a shard."""

    kind: str  # the kind of source, such as text
    path: str  # the file
    field: str  # the field or column of records that holds the text
    folder: str = ""  # the folder of a TFDS dataset with its metadata
    start: int = 0  # first byte, record, or row group of a Parquet file
    stop: int = -1  # one past the last; -1: to the end
    count: int = 0  # records in this shard
    before: int = 0  # records of the dataset before this shard
    bytes: int = 0  # bytes to read, roughly
    entry: buckets.ObjectEntry | None = None  # the object's metadata, if the file is in a bucket
    quality: str = ""  # `Corpus.quality` of the source, as FIELD:MIN:BELOW


def read(corpus: Corpus) -> Iterator[Document]:
    """Yields the documents of all sources in order, except empty and excluded ones."""
    for source in corpus.split_by_source():
        for extent in extents(source):
            for document in read_extent(extent, source):
                if chunks := tuple(document.chunks):
                    yield dataclasses.replace(document, chunks=chunks)


def extents(corpus: Corpus, most: int = 0) -> Iterator[Extent]:
    """Yields the extents of a corpus with one source, in order.

    Files above `most` bytes are cut if possible: between lines of JSON, at blank lines in
    sentences_by_line, between records of an ArrayRecord file and row groups of a Parquet file.
    Compressed, TFRecord and CSV files, remote files other than Parquet, and texts in other layouts
    are never cut. With `most=0` no file is cut.
    """
    (source,), field, quality = corpus.sources, corpus.text_field, corpus.quality
    kind, _, path = source.partition(":")
    if kind in ("tfds", "tfds_dir"):
        folder = tfds_files.find(path) if kind == "tfds" else path
        before = 0
        for path, count, size, can_read_ranges in tfds_files.shards(folder):
            parts = max(1, min(count, round(size / most))) if most and can_read_ranges else 1
            bounds = [0, *(count * part // parts for part in range(1, parts)), -1]
            for start, stop in itertools.pairwise(bounds):
                part = start, stop, count, before, size // parts
                yield Extent("tfds", str(path), field, str(folder), *part, quality=quality)
            before += count
        return
    files = sources.require_files(source)
    if kind == "parquet" and most:
        # In parallel, since reading from a bucket has a high latency.
        with ThreadPoolExecutor(copies.SMALL_STREAMS) as pool:
            divide = functools.partial(records.divide_parquet, column=field, most=most)
            for (path, entry), parts in zip(files.items(), pool.map(divide, files), strict=True):
                for start, stop, size in parts:
                    where = kind, path, field, "", start, stop
                    yield Extent(*where, bytes=size, entry=entry, quality=quality)
        return
    for path, entry in files.items():
        size = sources.stat(path, entry=entry)["bytes"]
        cuts = _find_cuts(path, kind, corpus, most) if size > most > 0 else []
        for start, stop in itertools.pairwise([0, *cuts, size if cuts else -1]):
            length = (size if stop < 0 else stop) - start
            where = kind, path, field, "", start, stop
            yield Extent(*where, bytes=length, entry=entry, quality=quality)


def _find_cuts(path: str, kind: str, corpus: Corpus, most: int) -> list[int]:
    """Returns positions in a large file where it may be cut, about `most` bytes apart."""
    is_text = kind == "text"
    has_cuts = kind == "jsonl" or (is_text and corpus.layout == "sentences_by_line")
    has_line_ends = _LINE_ENCODINGS.fullmatch(codecs.lookup(corpus.encoding).name)
    if not (has_cuts and has_line_ends) or "://" in path or line_reader.compression_ending(path):
        return []
    cuts: list[int] = []
    with line_reader.translate_errors(path), open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        while (begin := (cuts[-1] if cuts else 0) + most) < size:
            file.seek(begin)
            file.readline()  # the rest of a line
            while is_text and (line := file.readline()):
                if not line.decode(corpus.encoding, "replace").strip():
                    break
            if file.tell() >= size:
                break
            cuts.append(file.tell())
    return cuts


def read_extent(
    extent: Extent, corpus: Corpus, on_read: OnRead | None = None
) -> Iterator[Document]:
    """Yields the documents of an extent in order; excluded and empty ones have no chunks."""
    read_lines = functools.partial(_read_lines, extent, corpus, on_read)
    if extent.kind == "text":
        texts = _file_texts(extent, corpus, read_lines)
    else:
        texts = _record_texts(extent, read_lines)
    for name, line, open_text in texts:
        if open_text is None:
            # The layout has no meaning without chunks.
            yield Document(name, (), "wrapped", line, is_excluded=True)
            continue
        layout = corpus.layout
        if layout == "per_file":
            is_long = any(len(line) > _WRAPPED_LINE for line in _split_lines(open_text()))
            layout = "paragraphs_by_line" if is_long else "wrapped"
        parts: Iterable[tuple[int, Iterable[str]]] = [(0, open_text())]
        if corpus.document_starts:
            parts = _split_documents(_split_lines(open_text()), corpus.document_starts)
        is_empty = True
        for first_line, part in parts:
            chunks = _split_chunks(part, layout)
            if first := next(chunks, ""):
                is_empty = False
                chunks = itertools.chain([first], chunks)
                yield Document(name, chunks, layout, line and line + first_line)
        if is_empty:
            yield Document(name, (), layout, line)


def _split_chunks(text: Iterable[str], layout: Layout) -> Iterator[str]:
    """Yields the stripped text in non-empty chunks that end at the end of a paragraph.

    A paragraph of over `_LONGEST_CHUNK` characters is cut at the end of a line, or else of a word.
    In `sentences_by_line` a sentence is never cut.
    """
    last_ends = [_TO_LAST_LINE_END, _TO_LAST_WORD_END]
    next_end, longest = _NEXT_WORD_END, _LONGEST_WORD
    if layout == "wrapped":
        last_ends = [_TO_LAST_PARAGRAPH_END, *last_ends]
    if layout == "sentences_by_line":
        last_ends, next_end, longest = [_TO_LAST_LINE_END], _NEXT_LINE_END, sys.maxsize
    rest, blanks = "", ""
    for block in text:
        # Blanks belong to the text if more text follows.
        block = blanks + block if rest else block.lstrip()
        body = block.rstrip()
        blanks = block[len(body) :]
        rest, start = rest + body, 0
        while len(rest) - start > _LONGEST_CHUNK:
            ends = (pattern.match(rest, start, start + _LONGEST_CHUNK) for pattern in last_ends)
            end = next(filter(None, ends), None) or next_end.search(
                rest, start, min(start + longest, len(rest))
            )
            if not end and len(rest) - start <= longest:
                break
            stop = end.end() if end else start + longest
            chunk, start = rest[start:stop], stop
            yield chunk if chunk.endswith("\n") else chunk + "\n"
        rest = rest[start:]
    if rest:
        yield rest


def _split_lines(text: Iterable[str]) -> Iterator[str]:
    """Yields the lines of the stripped text; long ones are cut as in `_split_chunks`."""
    for chunk in _split_chunks(text, "paragraphs_by_line"):
        yield from chunk.removesuffix("\n").split("\n")


# Headings of wikis and Markdown, and of numbered parts of books.
_HEADING = re.compile(
    r"\s*= (?!= )\S.*(?<! =) =\s*$|\s*=(?!=)[^=]+=\s*$|# +\S"
    r"|\s*(?:CHAPTER|Chapter|BOOK|PART|VOLUME|LETTER|STAVE|ACT) +(?:[0-9]+|[IVXLCDM]+|(?i:(?:the )?"
    r"(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|first|second|third|fourth|"
    r"fifth|sixth|seventh|eighth|ninth|tenth|last)))\b.{0,80}$"
)


def _split_documents(lines: Iterable[str], pattern: str) -> Iterator[tuple[int, Iterator[str]]]:
    """Yields the number of the first line, and the lines, of each document of a text.

    A document begins at a line that matches. Consecutive matches, as in a table of contents, begin
    one document.
    """
    start = _HEADING if pattern == "headings" else re.compile(pattern)

    def add_first_lines() -> Iterator[tuple[int, str]]:
        first, is_empty, is_blank = 0, True, True
        for number, line in enumerate(lines):
            if (is_blank or start is not _HEADING) and start.match(line):
                if not is_empty:
                    first, is_empty = number, True
            elif line.strip():
                is_empty = False
            is_blank = not line.strip()
            yield first, f"{line}\n"

    for first, document in itertools.groupby(add_first_lines(), operator.itemgetter(0)):
        yield first, (line for _, line in document)


def contradiction(lines: Iterable[str], layout: Layout) -> str | None:
    """Returns why a file of over 100 lines cannot have this layout, or None."""
    count = long_lines = longest = broken_lines = 0
    previous = "."
    for line in filter(None, map(str.strip, lines)):
        count += 1
        long_lines += len(line) > _WRAPPED_LINE
        longest = max(longest, len(line))
        # A wrapped sentence continues in lower case; a whole one ends in a punctuation mark.
        broken_lines += line[0].islower() and previous[-1] not in _SENTENCE_ENDS
        previous = line
    if count <= _LINES_TO_JUDGE:
        return None
    long_share, broken_share = long_lines / count, broken_lines / count
    if layout == "wrapped" and long_share > 0.5:
        lines_over = f"{long_share:.0%} of its lines are over {_WRAPPED_LINE} characters"
        return f"{lines_over}: paragraphs_by_line?"
    by_line = layout == "sentences_by_line" or (layout == "paragraphs_by_line" and longest <= 100)
    if by_line and broken_share > 0.3:
        return f"{broken_share:.0%} of its lines continue in the next line: wrapped?"
    return None


def _file_texts(
    extent: Extent, corpus: Corpus, read_lines: _ReadLines
) -> Iterator[tuple[str, int, _OpenText]]:
    """Yields the name, first line and text of a file, or of each block in sentences_by_line."""
    path = extent.path
    if corpus.layout == "sentences_by_line":
        lines = read_lines("by line")
        head = [] if extent.start else list(itertools.islice(lines, 10 * _LINES_TO_JUDGE))
        _refuse_contradiction(path, head, corpus.layout)
        numbered = enumerate(itertools.chain(head, lines), 1)
        for is_text, block in itertools.groupby(numbered, lambda line: bool(line[1].strip())):
            if is_text:
                start, first = next(block)
                block_lines = itertools.chain([first], (line for _, line in block))
                text = (line.replace("\r\n", "\n") for line in block_lines)
                yield f"{path}:{start}", start, functools.partial(iter, text)
        return
    head = list(itertools.islice(read_lines("in chunks"), _HELD_CHUNKS))

    def text() -> Iterable[str]:
        return head if len(head) < _HELD_CHUNKS else read_lines("in chunks")

    if corpus.layout != "per_file":
        _refuse_contradiction(path, _split_lines(text()), corpus.layout)
    beginning = "".join(head[:1])
    blanks = len(beginning) - len(beginning.lstrip())
    yield path, 1 + beginning.count("\n", 0, blanks), text


def _refuse_contradiction(path: str, lines: Iterable[str], layout: Layout) -> None:
    reason = contradiction(lines, layout)
    if reason:
        raise InputError(f"{path}: does not look like corpus.layout={layout}: {reason}")


def _read_records(extent: Extent, read_lines: _ReadLines) -> Iterator[SourceRecord]:
    path, start, stop = extent.path, extent.start, extent.stop
    if extent.kind == "parquet":
        quality_field = extent.quality and parse_quality(extent.quality)[0]
        return records.read_parquet(path, extent.field, start, stop, quality_field)
    if extent.kind == "tfds":
        examples = tfds_files.shard_records(extent.folder, path, extent.count, start, stop)
        numbered = enumerate(examples, extent.before + start)
        return (SourceRecord.from_dict(f"{extent.folder}:{i}", fields) for i, fields in numbered)
    refuse = functools.partial(_refuse_record, extent)
    return records.parse(extent.kind, read_lines("by line"), path, on_broken=refuse)


def _record_texts(
    extent: Extent, read_lines: _ReadLines
) -> Iterator[tuple[str, int, _OpenText | None]]:
    """Yields the location, 0 and the text of each record; None for the text if it is excluded."""
    no_field = "", 0.0, 0.0
    field, minimum, below = parse_quality(extent.quality) if extent.quality else no_field
    for record in _read_records(extent, read_lines):
        try:
            if field and not minimum <= record.number(field) < below:
                yield record.location, 0, None
                continue
            text = record.text(extent.field)
        except InputError as error:
            _refuse_record(extent, record.location, error)
        text = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
        yield record.location, 0, functools.partial(iter, [text])


def _refuse_record(extent: Extent, location: str, error: InputError) -> NoReturn:
    """Raises the error, with the line of the file instead of the line of the extent."""
    if extent.kind == "jsonl" and extent.start:
        path, _, number = location.rpartition(":")
        with _open_extent(dataclasses.replace(extent, start=0, stop=extent.start)) as file:
            line = int(number) + sum(1 for _ in file)
        raise InputError(f"{path}:{line}{str(error).removeprefix(location)}") from error
    raise error


def _read_lines(
    extent: Extent, corpus: Corpus, on_read: OnRead | None, how: Literal["by line", "in chunks"]
) -> Iterator[str]:
    """Yields decoded lines, split only on \\n, or chunks of text, whose newlines are all \\n.

    A byte-order mark is dropped.
    """
    path, encoding = extent.path, corpus.encoding
    errors = {"stop": "strict", "replace": "replace"}[corpus.encoding_errors]
    try:
        with (
            line_reader.translate_errors(path),
            _open_extent(extent, on_read) as raw,
            io.TextIOWrapper(raw, encoding, errors, "\n" if how == "by line" else None) as file,
        ):
            chunks = iter(functools.partial(file.read, _LONGEST_CHUNK), "")
            for number, line in enumerate(file if how == "by line" else chunks):
                yield line.lstrip("\ufeff") if number == extent.start == 0 else line
    except UnicodeError as error:
        raise InputError(
            f"{path}: byte {_first_invalid_byte(path, encoding)} is not {encoding}; `bert-jax "
            "doctor` lists such files. Convert them, name the encoding of all with "
            "--set corpus.encoding=..., or --set corpus.encoding_errors=replace"
        ) from error


def _open_extent(extent: Extent, on_read: OnRead | None = None) -> IO[bytes]:
    if extent.stop < 0:
        return line_reader.open_bytes(extent.path, on_read)
    size = extent.stop - extent.start
    return io.BufferedReader(pyarrow.OSFile(extent.path).get_stream(extent.start, size), 1 << 17)


def _first_invalid_byte(path: str, encoding: str) -> int:
    """Returns the offset in the decompressed file: decoding reports it relative to a buffer."""
    with line_reader.translate_errors(path), line_reader.open_bytes(path) as file:
        data = file.read()
    try:
        data.decode(encoding)
    except UnicodeError as error:
        return getattr(error, "start", 0)
    return 0  # the byte-order mark is missing: a UTF-16 stream must begin with one
