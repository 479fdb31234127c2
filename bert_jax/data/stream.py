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
from bert_jax.workdir import mark_complete, read_json, write_atomic

FORMAT_VERSION = 1


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
          InputError: a file is missing or shorter than it was written.
        """
        folder = epath.Path(folder)
        meta = read_json(folder / "stream.json", FORMAT_VERSION)
        arrays = {}
        for name, (dtype, count) in meta["arrays"].items():
            path = folder / f"{name}.bin"
            expected = np.dtype(dtype).itemsize * count
            if not path.exists() or path.stat().length != expected:
                raise InputError(
                    f"{path}: missing or damaged ({expected} bytes expected); remove {folder} and "
                    "run again, it is made anew from the dataset"
                )
            arrays[name] = np.memmap(path, np.dtype(dtype), "r", shape=(count,))
        return cls(**arrays, folder=str(folder))

    def __reduce__(self) -> Any:
        """Workers map the files themselves; a mapping would be pickled as its content."""
        if not self.folder:
            return super().__reduce__()
        return (Stream.open, (self.folder,))

    def unigrams(self, vocab_size: int) -> np.ndarray:
        """Counts of every id, int64 [vocab_size]."""
        counts = np.zeros(vocab_size, np.int64)
        step = 1 << 24
        for start in range(0, len(self.ids), step):
            counts += np.bincount(self.ids[start : start + step], minlength=vocab_size)
        return counts


def write(dataset: epath.PathLike, split: str, folder: epath.Path) -> None:
    """Unrolls a split of the dataset into `folder`; COMPLETE is written last."""
    if folder.exists():
        folder.rmtree()
    folder.mkdir(parents=True)
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
