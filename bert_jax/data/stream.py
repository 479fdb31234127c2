"""A split of the corpus as flat arrays on disk, mapped into memory.

Reading one row straight from ArrayRecord costs ten times what a memory map does, and a row needs
two places; so each host unrolls the dataset once. 2 bytes a token (4 from 65,537 ids on), 8 bytes
a sentence and a document.
"""

import dataclasses
import json
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config import InputError
from bert_jax.text import tfds_files
from bert_jax.workdir import made, mark_complete, named_errors, read_json, write_atomic

FORMAT_VERSION = 1

_DTYPES = {
    "ids": ("uint16", "uint32"),
    "sentence_offsets": ("uint64",),
    "document_offsets": ("uint64",),
}
# Entries looked at in one go.
_CHUNK = 1 << 24


@dataclasses.dataclass
class Stream:
    """One split.

    Attributes:
      ids: uint16 or uint32 [tokens], all documents after one another.
      sentence_offsets: uint64 [sentences + 1], where each sentence starts in `ids`.
      document_offsets: uint64 [documents + 1], where each document starts in `sentence_offsets`.
    """

    ids: np.ndarray
    sentence_offsets: np.ndarray
    document_offsets: np.ndarray
    folder: str = ""

    @classmethod
    def open(cls, folder: epath.PathLike) -> "Stream":
        """Maps what `write` wrote. Nothing is read yet.

        Raises:
          InputError: a file is missing, or another than was written.
        """
        folder = epath.Path(folder)
        path = folder / "stream.json"
        arrays = read_json(path, FORMAT_VERSION).get("arrays")
        if not _are_described(arrays):
            raise InputError(f"{path}: damaged; {_anew(folder)}")
        maps = {}
        for name, (dtype, count) in arrays.items():
            path = folder / f"{name}.bin"
            expected = np.dtype(dtype).itemsize * count
            if not path.exists() or path.stat().length != expected:
                raise InputError(
                    f"{path}: missing or damaged ({expected} bytes expected); {_anew(folder)}"
                )
            maps[name] = np.memmap(path, np.dtype(dtype), "r", shape=(count,))
        return cls(**maps, folder=str(folder))

    def require_rising(self) -> None:
        """Reads all offsets.

        Raises:
          InputError: they do not cut the ids into sentences and documents, none of them empty.
        """
        ends = {"sentence_offsets": self.ids, "document_offsets": self.sentence_offsets[1:]}
        for name, cut in ends.items():
            offsets = getattr(self, name)
            sound = offsets[0] == 0 and offsets[-1] == len(cut)
            for start in range(0, len(offsets), _CHUNK):
                part = offsets[start : start + _CHUNK + 1]
                sound = sound and bool((part[1:] > part[:-1]).all())
            if not sound:
                raise self.damaged(name)

    def damaged(self, name: str) -> InputError:
        """What to raise when an array holds what `write` cannot have written."""
        return InputError(f"{self.folder}/{name}.bin: damaged; {_anew(self.folder)}")

    def __reduce__(self) -> Any:
        """Workers map the files themselves; a mapping would be pickled as its content."""
        if not self.folder:
            return super().__reduce__()
        return (Stream.open, (self.folder,))

    def unigrams(self, vocab_size: int) -> np.ndarray:
        """Counts of every id, int64 [vocab_size].

        Raises:
          InputError: there is an id that no tokenizer of this size has.
        """
        counts = np.zeros(vocab_size, np.int64)
        for start in range(0, len(self.ids), _CHUNK):
            found = np.bincount(self.ids[start : start + _CHUNK], minlength=vocab_size)
            if len(found) > vocab_size:
                raise self.damaged("ids")
            counts += found
        return counts


def _are_described(arrays: Any) -> bool:
    """Whether stream.json says of each array what dtype and how many entries it has."""
    return (
        isinstance(arrays, dict)
        and arrays.keys() == _DTYPES.keys()
        and all(
            isinstance(entry, list)
            and len(entry) == 2
            and entry[0] in _DTYPES[name]
            and type(entry[1]) is int
            and entry[1] > 0
            for name, entry in arrays.items()
        )
    )


def _anew(folder: epath.PathLike) -> str:
    return f"remove {folder} and run again, it is made anew from the dataset"


def write(dataset: epath.PathLike, split: str, folder: epath.Path) -> None:
    """Unrolls a split of the dataset into `folder`; COMPLETE is written last.

    Raises:
      InputError: the dataset is damaged, or the folder cannot be written; it is gone then.
    """
    with named_errors(folder):
        if folder.exists():
            folder.rmtree()
        with made(folder):
            try:
                _unroll(dataset, split, folder)
            except BaseException:
                folder.rmtree()
                raise


def _unroll(dataset: epath.PathLike, split: str, folder: epath.Path) -> None:
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
    arrays = {name: [dtypes[name], counts[name]] for name in counts}
    meta = {"format_version": FORMAT_VERSION, "arrays": arrays}
    write_atomic(folder / "stream.json", json.dumps(meta) + "\n")
    mark_complete(folder)


def from_documents(documents: list[list[list[int]]], dtype: Any = np.uint16) -> Stream:
    """A stream in memory, from documents of sentences of ids; none may be empty."""
    sentences = [sentence for document in documents for sentence in document]
    lengths = [len(sentence) for sentence in sentences]
    return Stream(
        ids=np.array([i for sentence in sentences for i in sentence], dtype),
        sentence_offsets=np.cumsum([0, *lengths], dtype=np.uint64),
        document_offsets=np.cumsum([0, *map(len, documents)], dtype=np.uint64),
    )
