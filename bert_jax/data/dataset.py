"""The tokenized documents as a TFDS dataset in ArrayRecord files, one record per document.

TFDS's own writer is not used: it shuffles, and holds a split in memory. TFDS reads the dataset as
any other: `tfds.builder_from_directory(FOLDER).as_data_source("train")`.
"""

import os
import pathlib
import shutil
from collections.abc import Mapping, Sequence

import numpy as np
from array_record.python import array_record_module
from etils import epath

SPLITS = ("train", "validation")

_NAME, _VERSION = "bert_corpus", "1.0.0"
# Numbers that `_varints` encodes at once.
_VARINT_BLOCK = 1 << 18

# Names of the counts that a manifest has for each split.
COUNT_NAMES = ("documents", "sentences", "tokens", "unknown_tokens")


def folder_of(corpus: epath.Path) -> epath.Path:
    """Returns the folder of the dataset in a corpus folder."""
    return corpus / "dataset" / _NAME / _VERSION


class ShardWriter:
    """Writes documents to an ArrayRecord file, and counts them."""

    def __init__(self, path: pathlib.Path, unk_id: int):
        # Counts of the documents so far; `num_bytes` is the size of their records.
        self.counts = dict.fromkeys((*COUNT_NAMES, "num_bytes"), 0)
        self._unk_id = unk_id
        # Groups of 1 give random access to each document, as in TFDS.
        self._writer = array_record_module.ArrayRecordWriter(str(path), "group_size:1")

    def add(self, ids: np.ndarray, sentence_lengths: np.ndarray) -> None:
        """Writes a document: its ids, and the number of ids in each sentence, at least 1."""
        record = serialize_document(ids, sentence_lengths)
        self._writer.write(record)
        unknown = int(np.count_nonzero(ids == self._unk_id))
        counts = 1, len(sentence_lengths), len(ids), unknown, len(record)
        for name, count in zip(self.counts, counts, strict=True):
            self.counts[name] += count

    def close(self) -> None:
        """Completes and closes the file."""
        self._writer.close()


def serialize_document(ids: np.ndarray, sentence_lengths: np.ndarray) -> bytes:
    """Returns a document as a serialized tf.train.Example; equal documents give equal bytes."""
    # Encoded here, since protobuf's library needs 20 bytes of memory for a number.
    entries = b""
    for name, values in ((b"ids", ids), (b"sentence_lengths", sentence_lengths)):
        feature = _field(3, _field(1, _varints(values)))  # with an Int64List
        entries += _field(1, _field(1, name) + _field(2, feature))  # of a map: key and value
    return _field(1, entries)


def _field(number: int, value: bytes) -> bytes:
    """Returns a field of bytes of a message, as protobuf encodes it; its number is below 16."""
    encoded, length = bytearray(), len(value)
    while length > 127:  # as in `_varints`, which would be slow for a single length
        encoded.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *encoded, length]) + value


def _varints(values: np.ndarray) -> bytes:
    """Returns numbers below 2^32 as protobuf encodes them: 7 bits a byte, lowest bits first."""
    chunks = []
    for start in range(0, len(values), _VARINT_BLOCK):
        block = values[start : start + _VARINT_BLOCK].astype(np.uint32)
        # Column k is the block, shifted right by 7 k bits.
        columns: list[np.ndarray] = [block]
        while columns[-1].max() > 127:
            columns.append(columns[-1] >> 7)
        shifted = np.stack(columns, axis=1)
        encoded = (shifted & 127 | (shifted > 127) << 7).astype(np.uint8)  # 128: more follows
        is_used = shifted > 0
        is_used[:, 0] = True  # 0 takes one byte
        chunks.append(encoded[is_used].tobytes())
    return b"".join(chunks)


def assemble(
    folder: epath.Path,
    shards: Mapping[str, Sequence[tuple[pathlib.Path, dict[str, int]]]],
    id_dtype: str,
) -> None:
    """Makes a dataset folder: links finished files into it, and writes TFDS's metadata.

    `shards` lists the files of each split, in order, with the counts of `ShardWriter`; `id_dtype`
    is uint16 or uint32.
    """
    import tensorflow_datasets as tfds  # not above: it takes a third of a second

    folder.mkdir(parents=True, exist_ok=True)
    identity = tfds.core.dataset_info.DatasetIdentity(
        name=_NAME,
        version=tfds.core.Version(_VERSION),
        data_dir=str(folder),
        module_name="bert_jax.data.dataset",
    )
    features = tfds.features.FeaturesDict(
        {
            "ids": tfds.features.Tensor(shape=(None,), dtype=np.dtype(id_dtype)),
            # 32 bits: a text without line ends may be one sentence of over 65,535 tokens.
            "sentence_lengths": tfds.features.Tensor(shape=(None,), dtype=np.uint32),
        }
    )
    info = tfds.core.DatasetInfo(builder=identity, features=features, disable_shuffling=True)
    info.set_file_format(tfds.core.FileFormat.ARRAY_RECORD)
    splits = []
    for split, files in shards.items():
        template = tfds.core.ShardedFileTemplate(
            data_dir=folder,
            dataset_name=_NAME,
            split=split,
            filetype_suffix=tfds.core.FileFormat.ARRAY_RECORD.file_suffix,
        )
        for number, (path, _) in enumerate(files):
            name = template.sharded_filepath(shard_index=number, num_shards=len(files))
            _link(path, pathlib.Path(name))
        splits.append(
            tfds.core.SplitInfo(
                name=split,
                shard_lengths=[counts["documents"] for _, counts in files],
                num_bytes=sum(counts["num_bytes"] for _, counts in files),
                filename_template=template,
            )
        )
    info.set_splits(tfds.core.splits.SplitDict(splits))
    info.write_to_directory(folder)


def _link(source: pathlib.Path, target: pathlib.Path) -> None:
    """Gives a file a second name, or copies it if the file system has no hard links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
