"""The units of work of `prepare`: ranges of documents, each worked on by itself, anywhere.

What a part is made into is a folder of a place that all workers see, named by a hash of all that it
is made of: text, settings, tokenizer. It appears as a whole, so a `prepare` that was killed goes on
from those that are there, and what was made of other text is never taken for ours.

    PLACE/words-HASH/     words.json: the counted words of a part (see text.words)
    PLACE/ids-HASH/       ids.bin, sentences.bin, documents.bin: its documents as ids
    PLACE/shards-HASH/    train, validation: ArrayRecord files of them
    .../record.json       what is said of it, written last
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from etils import epath

from bert_jax.config import Corpus, InputError
from bert_jax.data import dataset
from bert_jax.data.survey import text_hash
from bert_jax.storage import copies, mirror
from bert_jax.storage.workdir import named_errors
from bert_jax.text import documents, sentences, tokenizer, words
from bert_jax.text.documents import Document, Extent

# Bytes of text in a part, roughly: seconds of work, and a shard of some 30 MB at most.
PART_BYTES = 1 << 25
# Of compressed files and of TFDS's, bytes of text in a byte.
_PACKED = 3

_BATCH = 1 << 18

# Rises with every change of what parts are made into.
_VERSION = 1

# A document: the hash of its text, and how many sentences it has.
DOCUMENT = np.dtype([("hash", "<u8"), ("sentences", "<u4")])

# Told how many characters have been read since it was last told.
Tick = Callable[[int], None]


@dataclasses.dataclass(frozen=True)
class Part:
    """Some text, in order.

    Attributes:
      extents: what is read.
      files: path, bytes and date of the files it comes from, but for those of TFDS datasets.
      bytes: of text, roughly.
    """

    extents: tuple[Extent, ...]
    files: tuple[tuple[str, int, int], ...]
    bytes: int

    def documents(self, corpus: Corpus) -> Iterator[Document]:
        """Yields its documents.

        Raises:
          InputError: as `documents.read`; or a file has changed since the parts were planned.
        """
        self._require_unchanged()
        try:
            for extent in self.extents:
                yield from documents.read_extent(extent, corpus)
        except InputError:
            self._require_unchanged()
            raise
        self._require_unchanged()

    def _require_unchanged(self) -> None:
        for path, size, date in self.files:
            with contextlib.suppress(InputError):
                if documents.state(path) == {"bytes": size, "mtime_ns": date}:
                    continue
            raise InputError(
                f"corpus.sources: {path}: changed while it was read; run again once nothing "
                "writes there"
            )


def plan(corpus: Corpus) -> list[Part]:
    """Returns the parts of a corpus, in order.

    Raises:
      InputError: a source is missing.
    """
    parts: list[Part] = []
    extents: list[Extent] = []
    size = 0

    def end() -> None:
        nonlocal size
        paths = dict.fromkeys(extent.path for extent in extents if extent.kind != "tfds")
        states = ((path, *documents.state(path).values()) for path in paths)
        parts.append(Part(tuple(extents), tuple(states), size))
        extents.clear()
        size = 0

    for source in corpus.sources:
        for extent in documents.extents(source, corpus, PART_BYTES):
            is_packed = extent.kind == "tfds" or extent.path.endswith((".gz", ".zst"))
            more = extent.bytes * (_PACKED if is_packed else 1)
            if extents and size + more > PART_BYTES:
                end()
            extents.append(extent)
            size += more
    if extents:
        end()
    return parts


class Task(Protocol):
    """What is to be made of a part."""

    place: str
    bytes: int

    @property
    def name(self) -> str:
        """Of the folder that it is made into."""

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """Fills the folder; returns what is to be said of it, as JSON can hold it."""


@dataclasses.dataclass(frozen=True)
class CountWords:
    """Counts the words of a part."""

    place: str
    corpus: Corpus
    part: Part

    @property
    def bytes(self) -> int:
        """See `Task`."""
        return self.part.bytes

    @property
    def name(self) -> str:
        """See `Task`."""
        corpus = self.corpus
        kind = "wordpiece" if corpus.tokenizer_kind == "wordpiece" else "sentencepiece"
        return "words-" + _hash(_reading(corpus), kind, corpus.case, self.part)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """See `Task`."""
        corpus = self.corpus
        texts = (document.text for document in _ticking(self.part.documents(corpus), tick))
        path = folder / "words.json"
        return {"offsets": words.write(texts, corpus.tokenizer_kind, corpus.case, path)}


@dataclasses.dataclass(frozen=True)
class Tokenize:
    """Makes the documents of a part into ids."""

    place: str
    corpus: Corpus
    part: Part
    tokenizer: str  # a folder
    sha256: str  # of the tokenizer

    @property
    def bytes(self) -> int:
        """See `Task`."""
        return self.part.bytes

    @property
    def name(self) -> str:
        """See `Task`."""
        how = [_reading(self.corpus), self.corpus.language, importlib.metadata.version("sentencex")]
        return "ids-" + _hash(how, self.sha256, self.part)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """See `Task`."""
        tok = _tokenizer(self.tokenizer, self.sha256)
        dtype = np.uint16 if tok.size <= 2**16 else np.uint32
        layouts: dict[str, int] = {}
        # Of files that are shared by several parts the first one's, which is at work soonest.
        sources = {
            extent.path: documents.sha256(extent.path)
            for extent in self.part.extents
            if extent.kind != "tfds" and extent.start == 0
        }
        with (
            open(folder / "ids.bin", "wb") as ids_file,
            open(folder / "sentences.bin", "wb") as sentences_file,
            open(folder / "documents.bin", "wb") as documents_file,
        ):
            for batch in _batches(_ticking(self.part.documents(self.corpus), tick)):
                for document in batch:
                    layouts[document.layout] = layouts.get(document.layout, 0) + 1
                split = [sentences.split(document, self.corpus.language) for document in batch]
                ids, lengths = tok.encode_sentences([s for pieces in split for s in pieces])
                ids_file.write(ids.astype(dtype).tobytes())
                sentences_file.write(lengths[lengths > 0].astype(np.uint32).tobytes())
                table = np.empty(len(batch), DOCUMENT)
                table["hash"] = [text_hash(document.text) for document in batch]
                before = np.concatenate([[0], np.cumsum(lengths > 0)])
                table["sentences"] = np.diff(before[np.cumsum([0, *map(len, split)])])
                documents_file.write(table.tobytes())
        return {"dtype": np.dtype(dtype).name, "layouts": layouts, "sources": sources}


@dataclasses.dataclass(frozen=True)
class WriteShards:
    """Puts the documents of a part into the files of their splits."""

    place: str
    ids: str  # the name of the folder that `Tokenize` made
    dtype: str
    splits: bytes  # uint8 a document: 0 train, 1 validation, 2 nowhere
    unk_id: int
    bytes: int

    @property
    def name(self) -> str:
        """See `Task`."""
        digest = hashlib.sha256(self.splits).hexdigest()
        return "shards-" + _hash(self.ids, digest, self.unk_id)

    def make(self, folder: pathlib.Path, tick: Tick) -> dict[str, Any]:
        """See `Task`."""
        with contextlib.ExitStack() as stack:
            scratch = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
            ids, lengths, table = (
                np.memmap(path, dtype, "r") if path.stat().st_size else np.empty(0, dtype)
                for name, dtype in (
                    ("ids.bin", np.dtype(self.dtype)),
                    ("sentences.bin", np.dtype(np.uint32)),
                    ("documents.bin", DOCUMENT),
                )
                for path in [here(self.place, self.ids, name, scratch)]
            )
            writers: dict[int, dataset.ShardWriter] = {}
            sentence = token = 0
            counts = table["sentences"].tolist()
            for number, split in enumerate(self.splits):
                own = np.asarray(lengths[sentence : sentence + counts[number]])
                sentence += counts[number]
                size = int(own.sum())
                if split < len(dataset.SPLITS) and size:
                    if split not in writers:
                        path = folder / dataset.SPLITS[split]
                        writers[split] = dataset.ShardWriter(path, self.unk_id)
                    writers[split].add(np.asarray(ids[token : token + size]), own)
                token += size
                tick(0)
            record = {}
            for split, writer in writers.items():
                writer.close()
                counted = dataclasses.asdict(writer.counts)
                record[dataset.SPLITS[split]] = {**counted, "num_bytes": writer.num_bytes}
        return record


def do(task: Task, tick: Tick = lambda characters: None) -> dict[str, Any]:
    """Does a task unless it is done; returns what is said of its folder.

    Raises:
      InputError: bad text, or the place cannot be written.
    """
    record = record_of(task)
    if record is not None:
        return record
    place = epath.Path(task.place)
    with contextlib.ExitStack() as stack:
        stack.enter_context(named_errors(place))
        if mirror.is_bucket(place):
            folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        else:
            folder = pathlib.Path(place) / f".{task.name}.{os.getpid()}.tmp"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
        record = task.make(folder, tick)
        (folder / "record.json").write_text(json.dumps(record))
        _finish(folder, place / task.name)
    return record


def _finish(folder: pathlib.Path, target: epath.Path) -> None:
    names = sorted(path.name for path in folder.iterdir() if path.name != "record.json")
    if mirror.is_bucket(target):
        copies.send_all(epath.Path(folder), target, names)
        mirror.write(target / "record.json", (folder / "record.json").read_text())
        return
    for name in [*names, "record.json"]:
        with open(folder / name, "rb") as file:
            os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):  # another worker of Beam was given the same task
        folder.rename(target)


def record_of(task: Task) -> dict[str, Any] | None:
    """What is said of a task's folder, if it is done."""
    path = epath.Path(task.place) / task.name / "record.json"
    with contextlib.suppress(FileNotFoundError):
        return json.loads(mirror.read(path))
    return None


def here(place: str, name: str, file: str, scratch: pathlib.Path) -> pathlib.Path:
    """A file of a finished folder on this machine; one in a bucket is fetched to `scratch`."""
    path = epath.Path(place) / name / file
    if not mirror.is_bucket(path):
        return pathlib.Path(path)
    local = scratch / name / file
    if not local.exists():
        copies.fetch(path, epath.Path(local))
    return local


def _ticking(found: Iterator[Document], tick: Tick) -> Iterator[Document]:
    for document in found:
        yield document
        tick(len(document.text))


def _batches(found: Iterator[Document]) -> Iterator[list[Document]]:
    """Documents that are worked on together, some `_BATCH` characters."""
    batch: list[Document] = []
    size = 0
    for document in found:
        batch.append(document)
        size += len(document.text)
        if size > _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


@functools.lru_cache(maxsize=1)
def _tokenizer(folder: str, sha256: str) -> tokenizer.Tokenizer:
    """The tokenizer in a folder, loaded once in a process."""
    if not mirror.is_bucket(folder):
        return tokenizer.load(folder)
    with tempfile.TemporaryDirectory() as scratch:
        for name in mirror.names(epath.Path(folder)):
            copies.fetch(epath.Path(folder) / name, epath.Path(scratch) / name)
        return tokenizer.load(scratch)


def _reading(corpus: Corpus) -> Sequence[str]:
    """Settings that decide which documents there are."""
    return [corpus.layout, corpus.text_field, corpus.encoding]


def _hash(*what: Any) -> str:
    values = [_VERSION, *(dataclasses.asdict(w) if isinstance(w, Part) else w for w in what)]
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:20]
