"""A split of the corpus as flat arrays on disk, mapped into memory.

Reading a row from ArrayRecord takes ten times as long as from a memory map, and a row needs two
reads; so the dataset is flattened once. A token takes 2 bytes, or 4 if the vocabulary has more than
65,536 ids; a sentence, a document and an entry of the vocabulary take 8 bytes each.
"""

import dataclasses
import json
from typing import Any

import numpy as np
from etils import epath

from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.storage.workdir import (
    create_folder,
    mark_complete,
    read_json,
    translate_os_errors,
    write_atomic,
)
from bert_jax.text import tfds_files

FORMAT_VERSION = 2

# Ids counted at once.
_CHUNK = 1 << 20


@dataclasses.dataclass
class Stream:
    """The tokens of one split, as arrays with random access."""

    ids: np.ndarray  # uint16 or uint32 [tokens], the documents one after another
    sentence_offsets: np.ndarray  # uint64 [sentences + 1], the start of each sentence in `ids`
    # uint64 [documents + 1], the start of each document in `sentence_offsets`.
    document_offsets: np.ndarray
    unigrams: np.ndarray  # int64 [vocabulary], the number of occurrences of each id in `ids`
    folder: str = ""  # the folder that `write` wrote; "" in memory
    # The range of the folder's documents here: the first, one past the last. None: all.
    documents: tuple[int, int] | None = None

    @classmethod
    def open(cls, folder: epath.PathLike, documents: tuple[int, int] | None = None) -> "Stream":
        """Maps the files that `write` wrote, without reading them; `documents` selects a `part`."""
        folder = epath.Path(folder)
        path, maps = folder / "stream.json", {}
        remedy = _remedy(folder)  # of an older version as of damage
        arrays = read_json(path, FORMAT_VERSION, version_remedy=remedy, damage_remedy=remedy)
        with translate_parser_errors(path, remedy):
            for name, (dtype, count) in arrays["arrays"].items():
                path, expected = folder / f"{name}.bin", np.dtype(dtype).itemsize * count
                if not path.exists() or path.stat().length != expected:
                    raise InputError(
                        f"{path}: missing or damaged ({expected} bytes expected); {remedy}"
                    )
                maps[name] = np.memmap(path, np.dtype(dtype), "r", shape=(count,))
            stream = cls(**maps, folder=str(folder))
            return stream if documents is None else stream.part(*documents)

    def part(self, first: int, stop: int) -> "Stream":
        """Returns documents `first` to `stop - 1`; their sentences stay offsets in all `ids`."""
        bounds = self.document_offsets[first : stop + 1]
        sentences = self.sentence_offsets[int(bounds[0]) : int(bounds[-1]) + 1]
        return dataclasses.replace(
            self,
            sentence_offsets=sentences,
            document_offsets=np.asarray(bounds - bounds[0]),
            documents=(first, stop),
        )

    @property
    def tokens(self) -> int:
        """Returns the number of ids in the stream's documents."""
        return int(self.sentence_offsets[-1]) - int(self.sentence_offsets[0])

    def documents_of(self, sentence: np.ndarray) -> np.ndarray:
        """Returns the index of each sentence's document, int64."""
        bounds = np.asarray(self.document_offsets)
        return np.searchsorted(bounds, sentence.astype(bounds.dtype), "right") - 1

    def damage_error(self, name: str) -> InputError:
        """Returns the error to raise if an array holds values that `write` cannot have written."""
        return InputError(f"{self.folder}/{name}.bin: damaged; {_remedy(self.folder)}")

    def __reduce__(self) -> Any:
        """Pickles the folder alone, since a memory map would be pickled as its content."""
        if not self.folder:
            return super().__reduce__()
        return (Stream.open, (self.folder, self.documents))


def _remedy(folder: epath.PathLike) -> str:
    return f"remove {folder} and run again to make it again from the dataset"


def write(dataset: epath.PathLike, split: str, folder: epath.Path, vocab_size: int) -> None:
    """Writes a split of the dataset as a stream into `folder`, which it replaces.

    Records have `ids`, below `vocab_size`, and `sentence_lengths`, all above 0.
    """
    with translate_os_errors(folder):
        if folder.exists():
            folder.rmtree()
        with create_folder(folder):
            try:
                _flatten(dataset, split, folder, vocab_size)
            except BaseException:
                folder.rmtree()
                raise


def _flatten(dataset: epath.PathLike, split: str, folder: epath.Path, vocab_size: int) -> None:
    counts = {"ids": 0, "sentence_offsets": 1, "document_offsets": 1}
    dtypes = {"sentence_offsets": "uint64", "document_offsets": "uint64"}
    with (
        (folder / "ids.bin").open("wb") as ids_file,
        (folder / "sentence_offsets.bin").open("wb") as sentences_file,
        (folder / "document_offsets.bin").open("wb") as documents_file,
    ):
        sentences_file.write(np.uint64(0).tobytes())
        documents_file.write(np.uint64(0).tobytes())
        for record in tfds_files.records(dataset, split):
            ids, lengths = record["ids"], record["sentence_lengths"].astype(np.uint64)
            dtypes["ids"] = ids.dtype.name
            ids_file.write(ids.tobytes())
            sentences_file.write((np.cumsum(lengths) + np.uint64(counts["ids"])).tobytes())
            counts["ids"] += len(ids)
            counts["sentence_offsets"] += len(lengths)
            documents_file.write(np.uint64(counts["sentence_offsets"] - 1).tobytes())
            counts["document_offsets"] += 1
    # Counted last: a count for each document would add an array as long as the vocabulary.
    ids = np.memmap(folder / "ids.bin", dtypes["ids"], "r")
    (folder / "unigrams.bin").write_bytes(count(ids, vocab_size).tobytes())
    arrays = {name: [dtypes[name], counts[name]] for name in counts}
    arrays["unigrams"] = ["int64", vocab_size]
    meta = {"format_version": FORMAT_VERSION, "arrays": arrays}
    write_atomic(folder / "stream.json", json.dumps(meta) + "\n")
    mark_complete(folder)


def count(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """Counts the occurrences of each id, int64 [vocab_size]; all must be below `vocab_size`."""
    counts = np.zeros(vocab_size, np.int64)
    for start in range(0, len(ids), _CHUNK):
        counts += np.bincount(ids[start : start + _CHUNK], minlength=vocab_size)
    return counts


def make_stream(documents: list[list[list[int]]], dtype: Any = np.uint16) -> Stream:
    """Makes a stream in memory of documents of sentences, none empty; vocab_size = max id + 1."""
    sentences = [sentence for document in documents for sentence in document]
    lengths = [len(sentence) for sentence in sentences]
    ids = np.array([i for sentence in sentences for i in sentence], dtype)
    return Stream(
        ids=ids,
        sentence_offsets=np.cumsum([0, *lengths], dtype=np.uint64),
        document_offsets=np.cumsum([0, *map(len, documents)], dtype=np.uint64),
        unigrams=count(ids, int(ids.max()) + 1 if len(ids) else 0),
    )
