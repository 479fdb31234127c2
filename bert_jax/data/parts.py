"""The units of work of `prepare`: ranges of documents, each worked on by itself, anywhere.

A part becomes a folder (see data.workers), named by a hash of its text, settings and tokenizer.

    PLACE/read-HASH/      documents of a part, as numbers of words (see text.words) or as ids
    PLACE/counts-HASH/    counted words of a part, for SentencePiece
    PLACE/shards-HASH/    train, validation: ArrayRecord files of a part
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import itertools
import json
import pathlib
import tempfile
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config import Corpus
from bert_jax.data import dataset
from bert_jax.data.workers import Tick
from bert_jax.errors import InputError, prefix_errors
from bert_jax.storage import buckets, copies
from bert_jax.storage.storage import storage_of
from bert_jax.text import documents, sentences, tokenizer, words
from bert_jax.text import lines as text_lines
from bert_jax.text import sources as text_sources
from bert_jax.text.documents import ByteRange, Document

# Bytes of text in a part, roughly: seconds of work, and a shard of some 30 MB at most.
PART_BYTES = 1 << 25
# Of compressed files and of TFDS's, bytes of text in a byte.
_PACKED = 3

# Kinds of files that are of `Corpus.encoding`.
_ENCODED = ("text", "jsonl", "csv", "tsv")

# Characters whose sentences are made into words together, sentences whose documents are written
# together, and tokens that are written together.
_BATCH, _SENTENCES, _TOKENS = 1 << 18, 1 << 12, 1 << 18

# Rises with every change of what parts are made into.
_VERSION = 3

# A document: the hash of its text, and how many sentences it has.
DOCUMENT = np.dtype([("hash", "<u8"), ("sentences", "<u4")])


@dataclasses.dataclass(frozen=True)
class Part:
    """A stretch of text, in order."""

    extents: tuple[ByteRange, ...]  # what is read
    # Path, bytes and date of the files it comes from; of a TFDS dataset its metadata.
    files: tuple[tuple[str, int, int], ...]
    bytes: int  # of text, roughly

    def held(self) -> contextlib.AbstractContextManager[None]:
        """Makes this thread read the objects of this part from local copies inside the context."""
        objects = {e.path: e.listed for e in self.extents if e.listed}
        if any(e.kind == "parquet" for e in self.extents):  # several parts read ranges of one file
            objects = {p: listed for p, listed in objects.items() if listed.size <= PART_BYTES}
        return copies.held(objects)

    def documents(self, corpus: Corpus, tick: Tick = lambda characters: None) -> Iterator[Document]:
        """Yields the documents of this part; each piece of text that is taken calls `tick`."""
        self._require_unchanged()
        try:
            for extent in self.extents:
                yield from _read_with_ticks(extent, corpus, tick)
        except InputError:
            self._require_unchanged()
            raise
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        for path, size, date in self.files:
            if path in buckets.held_copies.get():  # copied as it was listed
                continue
            with contextlib.suppress(InputError):
                if text_sources.state(path) == {"bytes": size, "mtime_ns": date}:
                    continue
            raise InputError(
                f"corpus.sources: {path}: changed while it was read; run again once nothing "
                "writes there"
            )


def plan(corpus: Corpus) -> list[Part]:
    """Returns the parts of a corpus, in order."""
    parts: list[list[ByteRange]] = []
    sizes: list[int] = []
    for one in corpus.alone():
        for extent in documents.extents(one, PART_BYTES):
            is_packed = extent.kind == "tfds" or text_lines.compression(extent.path) != ""
            more = extent.bytes * (_PACKED if is_packed else 1)
            if not parts or sizes[-1] + more > PART_BYTES:
                parts.append([])
                sizes.append(0)
            parts[-1].append(extent)
            sizes[-1] += more

    @functools.cache
    def state(path: str, listed: buckets.Listed | None) -> tuple[str, int, int]:
        saved = text_sources.state(path, listed=listed)
        return path, saved["bytes"], saved["mtime_ns"]

    def files(part: list[ByteRange]) -> tuple[tuple[str, int, int], ...]:
        # A TFDS dataset is recognised by its metadata.
        paths = {f"{e.folder}/dataset_info.json" if e.folder else e.path: e.listed for e in part}
        return tuple(itertools.starmap(state, paths.items()))

    return [Part(tuple(p), files(p), size) for p, size in zip(parts, sizes, strict=True)]


@dataclasses.dataclass(frozen=True)
class _OfPart:
    place: str
    corpus: Corpus
    part: Part

    @property
    def bytes(self) -> int:
        """The bytes of its text, roughly."""
        return self.part.bytes


class CountStretches(_OfPart):
    """Counts what stands between blanks in a part, to train SentencePiece."""

    @property
    def name(self) -> str:
        """The name of the folder that it is made into."""
        return "counts-" + _hash(_reading(self.corpus), self.corpus.case, self.part)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """Writes the counts of stretches between blanks; returns its record."""
        record = {"documents": 0}

        def pieces() -> Iterator[str]:
            for document in self.part.documents(self.corpus, tick):
                record["documents"] += bool(document.pieces)
                yield from document.pieces

        texts = pieces()
        if unknown := self.corpus.unknown_word:
            texts = (text.replace(unknown, " ") for text in texts)
        with self.part.held():
            offsets = words.write_stretches(texts, self.corpus.case, folder / "counts.json")
        return {"offsets": offsets, **record}


@dataclasses.dataclass(frozen=True)
class Read(_OfPart):
    """Makes the documents of a part into words or, by SentencePiece, into ids."""

    tokenizer: str = ""  # a folder; empty: words
    sha256: str = ""  # of the tokenizer

    @property
    def name(self) -> str:
        """The name of the folder that it is made into."""
        splitter = importlib.metadata.version("sentencex")
        how = [_reading(self.corpus), self.corpus.language, splitter]
        return "read-" + _hash(how, self.sha256 or self.corpus.case, self.part)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """Writes the documents of the part as words or ids; returns its record."""
        with self.part.held():
            return self._make(folder, tick)

    def _make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        text_lines.require_not_utf8(
            (e.path for e in self.part.extents if e.kind in _ENCODED and e.start == 0),
            self.corpus.encoding,
        )
        record: dict[str, Any] = {"layouts": {}, "replaced": 0, "empty": 0}
        # Of files that are shared by several parts the first one's.
        record["sources"] = {
            extent.path: text_sources.sha256(extent.path)
            for extent in self.part.extents
            if extent.kind != "tfds" and extent.start == 0
        }
        writer: words.NumberWriter | _IdWriter = (
            _IdWriter(folder, self, _tokenizer(self.tokenizer, self.sha256))
            if self.tokenizer
            else words.NumberWriter(folder, self.corpus.case, self.corpus.unknown_word)
        )
        made, layouts = _DocumentWriter(folder, writer, self.corpus), record["layouts"]
        for document in self.part.documents(self.corpus, tick):
            if not document.pieces:
                record["empty"] += 1
                continue
            layouts[document.layout] = layouts.get(document.layout, 0) + 1
            for piece in document.pieces:
                if self.corpus.encoding_errors == "replace":
                    record["replaced"] += piece.count("\ufffd")
                one = dataclasses.replace(document, pieces=(piece,))
                made.add(piece, sentences.split(one, self.corpus.language))
            made.end()
        made.close()
        writer.close()
        return {**record, "offsets": writer.offsets, "long_words": writer.long_words}


class _DocumentWriter:
    """Writes FOLDER/documents.bin and, of lengths of sentences, FOLDER/sentences.bin."""

    def __init__(
        self, folder: pathlib.Path, writer: "words.NumberWriter | _IdWriter", corpus: Corpus
    ):
        self._writer, self._corpus = writer, corpus
        names = ("sentences.bin", "documents.bin")
        self._sentences, self._documents = (open(folder / name, "wb") for name in names)  # noqa: SIM115
        # Of the present document: its hash, and if it may be cut its sentences and their places.
        self._digest, self._bounds = hashlib.sha256(), [0]
        self._text = tempfile.TemporaryFile()  # noqa: SIM115
        self._waiting: list[str] = []  # sentences, of so many characters of text
        self._size = 0
        # Since documents were last written: which sentences are kept, where documents end, hashes.
        self._kept: list[np.ndarray] = []
        self._met, self._ends, self._hashes = 0, [0], list[int]()

    def add(self, piece: str, split: list[str]) -> None:
        """Adds a piece of a document, and its sentences."""
        self._digest.update(_bytes(piece))
        for sentence in split if self._corpus.cut_documents else ():
            self._bounds.append(self._bounds[-1] + self._text.write(_bytes(f"{sentence}\n")))
        self._waiting += split
        self._met += len(split)
        self._size += len(piece)
        if self._size > _BATCH:
            self._write_sentences()

    def end(self) -> None:
        """Ends a document, or several where it is to be cut."""
        first = self._ends[-1]
        ends = sentences.ends_of(self._met - first, self._corpus)
        if len(ends) < 2:
            self._hashes.append(_number(self._digest))
        else:
            for a, b in itertools.pairwise([0, *ends]):
                self._text.seek(self._bounds[a])
                text = self._text.read(self._bounds[b] - self._bounds[a] - 1)
                self._hashes.append(_number(hashlib.sha256(text)))
        self._ends += [first + end for end in ends]
        self._digest, self._bounds = hashlib.sha256(), [0]
        self._text.seek(0)
        if self._met > _SENTENCES:
            self._write_documents()

    def _write_sentences(self) -> None:
        lengths = self._writer.add(self._waiting)
        self._kept.append(lengths > 0)
        self._sentences.write(lengths[lengths > 0].astype(np.uint32).tobytes())
        self._waiting, self._size = [], 0

    def _write_documents(self) -> None:
        self._write_sentences()
        before = np.concatenate([[0], np.cumsum(np.concatenate(self._kept))])
        table = np.empty(len(self._hashes), DOCUMENT)
        table["hash"] = self._hashes
        table["sentences"] = np.diff(before[self._ends])
        self._documents.write(table.tobytes())
        self._kept, self._met, self._ends, self._hashes = [], 0, [0], []

    def close(self) -> None:
        """Ends the files."""
        self._write_documents()
        for file in (self._sentences, self._documents, self._text):
            file.close()


class _IdWriter:
    """Writes sentences as ids: uint32 in FOLDER/tokens.bin."""

    def __init__(self, folder: pathlib.Path, task: "Read", tokenizer: tokenizer.Tokenizer):
        self._tokenizer, self._unknown_word = tokenizer, task.corpus.unknown_word
        # Sentences of several documents are tokenized together: errors name first and last file.
        files = dict.fromkeys(extent.path for extent in task.part.extents)
        self._where = " to ".join([*files][:: max(len(files) - 1, 1)])
        self._file = open(folder / "tokens.bin", "wb")  # noqa: SIM115
        self.offsets: list[list[int]] = []  # of no counts
        self.long_words = 0  # SentencePiece has pieces for any

    def add(self, pieces: Iterable[str]) -> np.ndarray:
        """Writes sentences; returns how many ids each has, int64."""
        with prefix_errors(self._where):
            ids = [self._encode(sentence) for sentence in pieces]
        self._file.write(np.fromiter(itertools.chain.from_iterable(ids), np.uint32).tobytes())
        return np.fromiter(map(len, ids), np.int64, len(ids))

    def _encode(self, sentence: str) -> list[int]:
        parts = [sentence]
        if self._unknown_word:  # the blank before it would be a piece of some vocabularies
            parts = [part.rstrip() for part in sentence.split(self._unknown_word)]
        # As it is cut behind other sentences, wherever a row puts it.
        ids = self._tokenizer.encode_within(parts[0]) if parts[0] else []
        for part in parts[1:]:
            ids += [self._tokenizer.unk_id, *self._tokenizer.encode(part)]
        return ids

    def close(self) -> None:
        """Ends the file."""
        self._file.close()


@dataclasses.dataclass(frozen=True)
class WriteShards:
    """Puts the documents of a part as ids into the files of their splits."""

    place: str
    read: str  # the name of the folder that `Read` made
    tokenizer: str  # a folder
    sha256: str  # of the tokenizer
    splits: bytes  # uint8 a document: 0 train, 1 validation, 2 nowhere
    bytes: int

    @property
    def name(self) -> str:
        """The name of the folder that it is made into."""
        return "shards-" + _hash(self.read, self.sha256, hashlib.sha256(self.splits).hexdigest())

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """Writes the files of each split; returns its record."""
        tok = _tokenizer(self.tokenizer, self.sha256)
        writers: dict[int, dataset.ShardWriter] = {}
        with tempfile.TemporaryDirectory() as scratch:
            encoded = self._documents(tok, pathlib.Path(scratch))
            for split, (ids, lengths) in zip(self.splits, encoded, strict=True):
                if split < len(dataset.SPLITS) and len(ids):
                    if split not in writers:
                        path = folder / dataset.SPLITS[split]
                        writers[split] = dataset.ShardWriter(path, tok.unk_id)
                    writers[split].add(ids, lengths)
                tick(self.bytes / len(self.splits))
        record = {}
        for split, writer in sorted(writers.items()):
            writer.close()
            record[dataset.SPLITS[split]] = writer.counts
        return record

    def _documents(
        self, tok: tokenizer.Tokenizer, scratch: pathlib.Path
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields ids and lengths of sentences of each document."""
        kinds = {"tokens.bin": np.uint32, "sentences.bin": np.uint32, "documents.bin": DOCUMENT}
        files = (local_part(self.place, self.read, name, scratch) for name in kinds)
        tokens, lengths, documents_ = map(_mapped, files, kinds.values())
        table = None
        if isinstance(tok, tokenizer.WordPiece):
            words_of_part = words.read_words(
                local_part(self.place, self.read, "words.txt", scratch)
            )
            table = words.WordTable(words_of_part, tok)
        counts = documents_["sentences"].astype(np.int64)
        sentence = token = first = 0
        while first < len(counts):
            # As many documents as make some hundred thousand tokens.
            some = np.asarray(lengths[sentence : sentence + _TOKENS])
            fit = int(np.searchsorted(np.cumsum(some, dtype=np.int64), _TOKENS))
            last = first + int(np.searchsorted(np.cumsum(counts[first:]), fit, "right"))
            last = max(last, first + 1)
            own = np.asarray(lengths[sentence : sentence + int(counts[first:last].sum())])
            size = int(own.sum(dtype=np.int64))
            ids = np.asarray(tokens[token : token + size])
            sentence, token = sentence + len(own), token + size
            if table is not None and len(own):
                ends = np.cumsum(own, dtype=np.int64)
                # A long document is made in several goes.
                cuts = np.unique(np.searchsorted(ends, np.arange(_TOKENS, size, _TOKENS))) + 1
                goes = zip(np.split(ids, ends[cuts - 1]), np.split(own, cuts), strict=True)
                made = [table.ids(*go) for go in goes if len(go[1])]
                ids, own = map(np.concatenate, zip(*made, strict=True))
            ends = np.concatenate([[0], np.cumsum(own, dtype=np.int64)])
            bounds = np.cumsum([0, *counts[first:last].tolist()])
            for begin, end in itertools.pairwise(bounds.tolist()):
                yield ids[ends[begin] : ends[end]], own[begin:end]
            first = last


def _mapped(path: pathlib.Path, dtype: Any) -> np.ndarray:
    """Returns a file as an array, which is not read into memory; an empty one cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def local_part(place: str, name: str, file: str, scratch: pathlib.Path) -> pathlib.Path:
    """Returns a file of a finished folder, on this machine; a copy of an object is in `scratch`."""
    with copies.local_copy(epath.Path(place) / name / file, folder=scratch / name) as (path,):
        return pathlib.Path(path)


def _read_with_ticks(extent: ByteRange, corpus: Corpus, tick: Tick) -> Iterator[Document]:
    """Yields the documents of an extent; each piece of text that is taken calls `tick`.

    The text of a compressed file has an unknown length, so `tick` is given bytes of the file,
    counted as `plan` counts them.
    """
    is_packed = text_lines.compression(extent.path) != ""
    position = reported = 0

    def on_read(new_position: int) -> None:
        nonlocal position
        position = new_position
        tick(0)  # the layout of a large file is judged before its first piece

    def report_pieces(pieces: Iterable[str]) -> Iterator[str]:
        nonlocal reported
        for piece in pieces:
            yield piece
            size = max(_PACKED * position - reported, 0) if is_packed else len(piece)
            reported += size
            tick(size)

    for document in documents.read_extent(extent, corpus, on_read):
        pieces = report_pieces(document.pieces) if document.pieces else ()
        yield dataclasses.replace(document, pieces=pieces)


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: str, sha256: str) -> tokenizer.Tokenizer:
    """Loads the tokenizer in a folder, once in a process."""
    names = storage_of(folder).names(folder)
    files = [epath.Path(folder) / name for name in sorted(names)]
    with copies.local_copy(*files) as here:
        return tokenizer.load(here[0].parent)


def _reading(corpus: Corpus) -> list[Any]:
    """Returns the settings that decide which documents there are, and of what words."""
    names = ("layout", "text_field", "encoding", "document_starts", "cut_documents")
    return [getattr(corpus, name) for name in (*names, "encoding_errors", "unknown_word")]


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _number(digest: Any) -> int:
    """Returns the first 64 bits of a SHA-256."""
    return int.from_bytes(digest.digest()[:8], "big")


def _hash(*what: Any) -> str:
    values = [_VERSION, *(dataclasses.asdict(w) if isinstance(w, Part) else w for w in what)]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]
