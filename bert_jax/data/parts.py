"""The parts of a corpus, each a range of documents, and the work items of `prepare` on them.

Each item writes a folder (see data.work_items), which is named by a hash of its files (path, size,
date, range), the settings and the tokenizer. PARTS is CORPUS/parts or, with Beam, a shared folder.

    PARTS/read-HASH/      documents of a part, as indices of words (see text.words) or as ids
    PARTS/counts-HASH/    word counts of a part, for SentencePiece
    PARTS/shards-HASH/    train, validation: ArrayRecord files of a part
"""

import collections
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
from bert_jax.data.work_items import Tick, WorkItem, local_file
from bert_jax.errors import InputError, prefix_errors
from bert_jax.storage import buckets, copies
from bert_jax.storage.storage import storage_of
from bert_jax.text import documents, line_reader, sentence_splitter, tokenizer, words
from bert_jax.text import sources as text_sources
from bert_jax.text.documents import Document, Extent

# Bytes of text in a part, approximately: seconds of work, and a shard of at most about 30 MB.
PART_BYTES = 1 << 25
# Estimated bytes of text in a byte of a compressed file or a TFDS dataset.
_COMPRESSION = 3

# Kinds of files to which `Corpus.encoding` applies.
_ENCODED = ("text", "jsonl", "csv", "tsv")

# Batch sizes: characters per call of the tokenizer, sentences per write of the documents' table,
# tokens per write of a shard.
_CHARACTERS, _SENTENCES, _TOKENS = 1 << 18, 1 << 12, 1 << 18

# Increases with every change of the content of the folders.
_VERSION = 3

# A document: the hash of its text, and its number of sentences.
DOCUMENT = np.dtype([("hash", "<u8"), ("sentences", "<u4")])


@dataclasses.dataclass(frozen=True)
class Part:
    """A contiguous range of the corpus's documents."""

    extents: tuple[Extent, ...]  # in the order of the text
    # Path, bytes and date of modification of the files that hold the extents; for a TFDS dataset
    # of its metadata file.
    files: tuple[tuple[str, int, int], ...]
    bytes: int  # of text, approximately

    def local_objects(self) -> contextlib.AbstractContextManager[None]:
        """Makes this thread read the objects of this part from local copies inside the context."""
        objects = {e.path: e.entry for e in self.extents if e.entry}
        # Several parts read ranges of a large Parquet file, so none copies it whole.
        if any(e.kind == "parquet" for e in self.extents):
            objects = {p: entry for p, entry in objects.items() if entry.size <= PART_BYTES}
        return copies.use_local_copies(objects)

    def documents(self, corpus: Corpus, tick: Tick = lambda characters: None) -> Iterator[Document]:
        """Yields the documents of this part; calls `tick` for each chunk of text that is read."""
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
            if path in buckets.local_copies.get():  # the copy was verified
                continue
            with contextlib.suppress(InputError):
                if text_sources.stat(path) == {"bytes": size, "mtime_ns": date}:
                    continue
            raise InputError(
                f"corpus.sources: {path}: changed while it was read; stop whatever writes it and "
                "run again"
            )


def plan(corpus: Corpus) -> list[Part]:
    """Returns the parts of a corpus, in order."""
    parts: list[list[Extent]] = []
    sizes: list[int] = []
    for source in corpus.split_by_source():
        for extent in documents.extents(source, PART_BYTES):
            is_compressed = (
                extent.kind == "tfds" or line_reader.compression_ending(extent.path) != ""
            )
            size = extent.bytes * (_COMPRESSION if is_compressed else 1)
            if not parts or sizes[-1] + size > PART_BYTES:
                parts.append([])
                sizes.append(0)
            parts[-1].append(extent)
            sizes[-1] += size

    @functools.cache
    def read_state(path: str, entry: buckets.ObjectEntry | None) -> tuple[str, int, int]:
        state = text_sources.stat(path, entry=entry)
        return path, state["bytes"], state["mtime_ns"]

    def find_files(part: list[Extent]) -> tuple[tuple[str, int, int], ...]:
        # The metadata identifies a TFDS dataset.
        paths = {f"{e.folder}/dataset_info.json" if e.folder else e.path: e.entry for e in part}
        return tuple(itertools.starmap(read_state, paths.items()))

    return [Part(tuple(p), find_files(p), size) for p, size in zip(parts, sizes, strict=True)]


@dataclasses.dataclass(frozen=True)
class SharedTokenizer:
    """A saved tokenizer that all workers can load."""

    folder: str
    sha256: str


@functools.lru_cache(maxsize=1)
def load_tokenizer(shared: SharedTokenizer) -> tokenizer.Tokenizer:
    """Loads a tokenizer, once in a process."""
    names = sorted(storage_of(shared.folder).names(shared.folder))
    with copies.local_copy(*(epath.Path(shared.folder) / name for name in names)) as paths:
        return tokenizer.load(paths[0].parent)


@dataclasses.dataclass(frozen=True)
class _PartItem(WorkItem):
    corpus: Corpus
    part: Part

    @property
    def bytes(self) -> int:
        return self.part.bytes


class CountWords(_PartItem):
    """Counts the whitespace-separated words of a part, to train SentencePiece."""

    @property
    def name(self) -> str:
        return "counts-" + hash_inputs(_read_settings(self.corpus), self.corpus.case, self.part)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        count, unknown = 0, self.corpus.unknown_word

        def read_pieces() -> Iterator[str]:
            nonlocal count
            for document in self.part.documents(self.corpus, tick):
                count += bool(document.chunks)
                for chunk in document.chunks:
                    yield chunk.replace(unknown, " ") if unknown else chunk

        with self.part.local_objects():
            offsets = words.write_counts(read_pieces(), self.corpus.case, folder / "counts.json")
        return {"offsets": offsets, "documents": count}


@dataclasses.dataclass(frozen=True)
class Read(_PartItem):
    """Splits the documents of a part into words or, with a SentencePiece tokenizer, into ids."""

    tokenizer: SharedTokenizer | None = None

    @property
    def name(self) -> str:
        splitter_version = importlib.metadata.version("sentencex")
        settings = [_read_settings(self.corpus), self.corpus.language, splitter_version]
        encoding = self.tokenizer.sha256 if self.tokenizer else self.corpus.case
        return "read-" + hash_inputs(settings, encoding, self.part)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        with self.part.local_objects():
            return self._make(folder, tick)

    def _make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        corpus, file_starts = self.corpus, [e for e in self.part.extents if e.start == 0]
        line_reader.require_not_utf8(
            (e.path for e in file_starts if e.kind in _ENCODED), corpus.encoding
        )
        # The part that holds a file's first byte hashes the file.
        hashes = {e.path: text_sources.sha256(e.path) for e in file_starts if e.kind != "tfds"}
        if self.tokenizer:
            writer = _IdWriter(folder, self, load_tokenizer(self.tokenizer))
        else:
            writer = words.NumberWriter(folder, corpus.case, corpus.unknown_word)
        output, layouts = _DocumentWriter(folder, writer, corpus), collections.Counter[str]()
        replaced = empty = excluded = 0
        for document in self.part.documents(corpus, tick):
            if not document.chunks:
                excluded += document.is_excluded
                empty += not document.is_excluded
                continue
            layouts[document.layout] += 1
            for chunk in document.chunks:
                if corpus.encoding_errors == "replace":
                    replaced += chunk.count("\ufffd")
                single = dataclasses.replace(document, chunks=(chunk,))
                output.add(chunk, sentence_splitter.split(single, corpus.language))
            output.end()
        output.close()
        return {
            "layouts": layouts,
            "replaced": replaced,
            "empty": empty,
            "excluded": excluded,
            "sources": hashes,
            "offsets": writer.offsets,
            "long_words": writer.long_words,
        }


class _DocumentWriter:
    """Writes FOLDER/documents.bin and the sentences' lengths, FOLDER/sentences.bin."""

    def __init__(
        self, folder: pathlib.Path, writer: "words.NumberWriter | _IdWriter", corpus: Corpus
    ):
        self._writer, self._corpus = writer, corpus
        names = ("sentences.bin", "documents.bin")
        self._files = [open(folder / name, "wb") for name in names]  # noqa: SIM115
        self._digest = hashlib.sha256()  # of the text of the current document
        # If documents may be cut: the sentences of the current document, a line for each, and the
        # offsets at which the lines begin, with the end of the last one.
        self._bounds = [0]
        self._text = tempfile.TemporaryFile()  # noqa: SIM115
        # Sentences for the next call of the writer, and the number of characters of their text.
        self._waiting, self._size = list[str](), 0
        # Since the table was last written: masks of sentences with tokens, the number of
        # sentences, where documents end, their hashes.
        self._nonempty: list[np.ndarray] = []
        self._count, self._ends, self._hashes = 0, [0], list[int]()

    def add(self, chunk: str, chunk_sentences: list[str]) -> None:
        """Adds a chunk of a document, and its sentences."""
        self._digest.update(chunk.encode("utf-8", "surrogatepass"))
        if self._corpus.cut_documents:
            lines = [f"{s}\n".encode("utf-8", "surrogatepass") for s in chunk_sentences]
            self._text.write(b"".join(lines))
            self._bounds += (self._bounds[-1] + np.cumsum([*map(len, lines)])).tolist()
        self._waiting += chunk_sentences
        self._count += len(chunk_sentences)
        self._size += len(chunk)
        if self._size > _CHARACTERS:
            self._write_sentences()

    def end(self) -> None:
        """Ends a document, or several if the document is cut."""
        first = self._ends[-1]
        ends = sentence_splitter.ends_of(self._count - first, self._corpus)
        if len(ends) < 2:
            self._hashes.append(_truncate_digest(self._digest))
        else:
            for start, end in itertools.pairwise([0, *ends]):
                self._text.seek(self._bounds[start])
                text = self._text.read(self._bounds[end] - self._bounds[start] - 1)
                self._hashes.append(_truncate_digest(hashlib.sha256(text)))
        self._ends += [first + end for end in ends]
        self._digest, self._bounds = hashlib.sha256(), [0]
        self._text.seek(0)
        if self._count > _SENTENCES:
            self._write_documents()

    def _write_sentences(self) -> None:
        lengths = self._writer.add(self._waiting)
        self._nonempty.append(lengths > 0)
        self._files[0].write(lengths[lengths > 0].astype(np.uint32).tobytes())
        self._waiting, self._size = [], 0

    def _write_documents(self) -> None:
        self._write_sentences()
        before = np.concatenate([[0], np.cumsum(np.concatenate(self._nonempty))])
        table = np.empty(len(self._hashes), DOCUMENT)
        table["hash"] = self._hashes
        table["sentences"] = np.diff(before[self._ends])
        self._files[1].write(table.tobytes())
        self._nonempty, self._count, self._ends, self._hashes = [], 0, [0], []

    def close(self) -> None:
        self._write_documents()
        for file in (*self._files, self._text, self._writer):
            file.close()


class _IdWriter:
    """Writes sentences as ids: uint32 in FOLDER/tokens.bin."""

    def __init__(self, folder: pathlib.Path, item: "Read", tokenizer: tokenizer.Tokenizer):
        self._tokenizer, self._unknown_word = tokenizer, item.corpus.unknown_word
        # Sentences of several documents are tokenized together: errors name first and last file.
        files = dict.fromkeys(extent.path for extent in item.part.extents)
        self._files = " to ".join([*files][:: max(len(files) - 1, 1)])
        self._file = open(folder / "tokens.bin", "wb")  # noqa: SIM115
        self.offsets: list[list[int]] = []  # there are no word counts
        self.long_words = 0  # SentencePiece has tokens for words of any length

    def add(self, sentences: Iterable[str]) -> np.ndarray:
        """Writes sentences; returns the number of ids of each, int64."""
        with prefix_errors(self._files):
            ids = [self._encode(sentence) for sentence in sentences]
        self._file.write(np.fromiter(itertools.chain.from_iterable(ids), np.uint32).tobytes())
        return np.fromiter(map(len, ids), np.int64, len(ids))

    def _encode(self, sentence: str) -> list[int]:
        parts = [sentence]
        if self._unknown_word:  # in some vocabularies the blank before it would be a token
            parts = [part.rstrip() for part in sentence.split(self._unknown_word)]
        # Encoded as after another sentence, since a row may place it anywhere.
        ids = self._tokenizer.encode_after_space(parts[0]) if parts[0] else []
        for part in parts[1:]:
            ids += [self._tokenizer.unk_id, *self._tokenizer.encode(part)]
        return ids

    def close(self) -> None:
        self._file.close()


@dataclasses.dataclass(frozen=True)
class WriteShards(WorkItem):
    """Writes the documents of a part as ids into the files of their splits."""

    read: WorkItem  # the item that read the part
    tokenizer: SharedTokenizer
    splits: np.ndarray  # uint8 [documents]: 0 train, 1 validation, 2 dropped

    @property
    def bytes(self) -> int:
        return self.read.bytes

    @property
    def name(self) -> str:
        splits = hashlib.sha256(self.splits.tobytes()).hexdigest()
        return "shards-" + hash_inputs(self.read.name, self.tokenizer.sha256, splits)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        tok = load_tokenizer(self.tokenizer)
        writers: dict[int, dataset.ShardWriter] = {}
        with tempfile.TemporaryDirectory() as scratch:
            encoded = self._read_documents(tok, pathlib.Path(scratch))
            for split, (ids, lengths) in zip(self.splits.tolist(), encoded, strict=True):
                if split < len(dataset.SPLITS) and len(ids):
                    if split not in writers:
                        path = folder / dataset.SPLITS[split]
                        writers[split] = dataset.ShardWriter(path, tok.unk_id)
                    writers[split].add(ids, lengths)
                tick(self.bytes / len(self.splits))
        for writer in writers.values():
            writer.close()
        return {dataset.SPLITS[split]: writer.counts for split, writer in sorted(writers.items())}

    def _read_documents(
        self, tok: tokenizer.Tokenizer, scratch: pathlib.Path
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yields the ids and the sentence lengths of each document."""
        dtypes = {"tokens.bin": np.uint32, "sentences.bin": np.uint32, "documents.bin": DOCUMENT}
        files = (local_file(self.read, name, scratch) for name in dtypes)
        tokens, lengths, documents_ = map(map_file, files, dtypes.values())
        table = None
        if isinstance(tok, tokenizer.WordPiece):
            path = local_file(self.read, "words.txt", scratch)
            table = words.WordTable(words.read_words(path), tok)
        counts = documents_["sentences"].astype(np.int64)
        sentence = token = first = 0
        while first < len(counts):
            # Documents up to `last` have about _TOKENS tokens.
            next_lengths = np.asarray(lengths[sentence : sentence + _TOKENS])
            fit = int(np.searchsorted(np.cumsum(next_lengths, dtype=np.int64), _TOKENS))
            last = first + int(np.searchsorted(np.cumsum(counts[first:]), fit, "right"))
            last = max(last, first + 1)
            sizes = np.asarray(lengths[sentence : sentence + int(counts[first:last].sum())])
            total = int(sizes.sum(dtype=np.int64))
            ids = np.asarray(tokens[token : token + total])
            sentence, token = sentence + len(sizes), token + total
            if table is not None and len(sizes):
                ends = np.cumsum(sizes, dtype=np.int64)
                # A long document is converted in several chunks.
                cuts = np.unique(np.searchsorted(ends, np.arange(_TOKENS, total, _TOKENS))) + 1
                chunks = zip(np.split(ids, ends[cuts - 1]), np.split(sizes, cuts), strict=True)
                converted = [table.ids(*chunk) for chunk in chunks if len(chunk[1])]
                ids, sizes = map(np.concatenate, zip(*converted, strict=True))
            ends = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
            bounds = np.cumsum([0, *counts[first:last].tolist()])
            for begin, end in itertools.pairwise(bounds.tolist()):
                yield ids[ends[begin] : ends[end]], sizes[begin:end]
            first = last


def map_file(path: pathlib.Path, dtype: Any) -> np.ndarray:
    """Maps a file as an array without reading it; an empty file cannot be mapped."""
    return np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)


def _read_with_ticks(extent: Extent, corpus: Corpus, tick: Tick) -> Iterator[Document]:
    """Yields the documents of an extent; calls `tick` for each chunk of text that is read.

    The text of a compressed file has an unknown length, so `tick` receives bytes of the file,
    counted as `plan` counts them.
    """
    is_compressed = line_reader.compression_ending(extent.path) != ""
    position = reported = 0

    def on_read(new_position: int) -> None:
        nonlocal position
        position = new_position
        tick(0)  # shows life while the layout of a large file is judged, before its first chunk

    def report_chunks(chunks: Iterable[str]) -> Iterator[str]:
        nonlocal reported
        for chunk in chunks:
            yield chunk
            size = max(_COMPRESSION * position - reported, 0) if is_compressed else len(chunk)
            reported += size
            tick(size)

    for document in documents.read_extent(extent, corpus, on_read):
        chunks = report_chunks(document.chunks) if document.chunks else ()
        yield dataclasses.replace(document, chunks=chunks)


def _read_settings(corpus: Corpus) -> list[Any]:
    """Returns the settings that decide where documents begin and which words they have."""
    names = ("layout", "text_field", "encoding", "document_starts", "cut_documents")
    return [getattr(corpus, name) for name in (*names, "encoding_errors", "unknown_word")]


def _truncate_digest(digest: Any) -> int:
    """Returns the first 64 bits of a SHA-256."""
    return int.from_bytes(digest.digest()[:8], "big")


def hash_inputs(*inputs: Any) -> str:
    """Returns a hash of everything that determines the folder of a work item."""
    values = [_VERSION, *(dataclasses.asdict(i) if isinstance(i, Part) else i for i in inputs)]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]
