"""Reads prepared TFDS datasets from their folders without TensorFlow.

TFDS imports any module that a dataset's features.json names. So the names are checked against a
list before TFDS opens the folder: data must not run code.
"""

import contextlib
import json
import os
import re
import tempfile
from collections.abc import Iterator
from typing import Any

from array_record.python.array_record_data_source import ArrayRecordDataSource
from etils import epath, epy

from bert_jax.errors import InputError
from bert_jax.storage import copies
from bert_jax.storage.storage import storage_of

with epy.lazy_imports():  # the import takes a third of a second, and most sources are files
    import tensorflow_datasets as tfds

_KNOWN_FEATURES = frozenset(
    f"tensorflow_datasets.core.features.{name}"
    for name in (
        "features_dict.FeaturesDict",
        "text_feature.Text",
        "tensor_feature.Tensor",
        "scalar.Scalar",
        "sequence_feature.Sequence",
        "class_label_feature.ClassLabel",
        "optional_feature.Optional",
    )
)
# Keys of a features.json whose values TFDS imports, at any depth.
_CODE_KEYS = ("pythonClassName", "python_class_name", "type", "proto_cls")
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def find(name: str) -> epath.Path:
    """Returns the folder of a dataset `NAME[/CONFIG][:VERSION]`, its latest version by default.

    Looks in $TFDS_DATA_DIR or ~/tensorflow_datasets, and generates nothing.
    """
    root = epath.Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
    name, _, version = name.partition(":")
    folder = root / name
    storage = storage_of(folder)
    versions = filter(_VERSION.fullmatch, {version} if version else storage.names(folder))
    latest = max(versions, key=lambda v: [*map(int, v.split("."))], default="")
    if not latest or not storage.exists(folder / latest / "dataset_info.json"):
        raise InputError(
            f"tfds:{name}: no prepared dataset in {folder}; set TFDS_DATA_DIR to the folder that "
            "holds it (the public bucket needs the [gcs] extra), or prepare it with TFDS"
        )
    return folder / latest


def open_folder(folder: epath.PathLike) -> "tfds.core.DatasetBuilder":
    """Returns a builder for the dataset in `folder`, if it names only known features."""
    folder, names = epath.Path(folder), []

    def collect(fields: list[tuple[str, Any]]) -> None:
        names.extend(value for key, value in fields if key in _CODE_KEYS and isinstance(value, str))

    storage = storage_of(folder)
    try:
        texts = {
            name: storage.read(folder / name).decode()
            for name in ("features.json", "dataset_info.json")
        }
        json.loads(texts["features.json"], object_pairs_hook=collect)
        json.loads(texts["dataset_info.json"])
    except FileNotFoundError as error:
        missing = error.filename or folder / "features.json"
        raise InputError(f"{folder}: no TFDS dataset here (no {missing})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder}: damaged TFDS metadata ({error})") from error
    for name in names:
        if name not in _KNOWN_FEATURES:
            raise InputError(
                f"{folder / 'features.json'}: feature class {name!r} is not one of TFDS's plain "
                "features; refused, since reading it would run that code"
            )
    try:
        with contextlib.ExitStack() as stack:
            local = folder
            if storage.is_bucket:  # TFDS would send a request for every file
                local = epath.Path(stack.enter_context(tempfile.TemporaryDirectory()))
                for name, text in texts.items():
                    (local / name).write_text(text)
            builder = tfds.builder_from_directory(local)
            features = builder.info.features
    except Exception as error:  # TFDS raises many kinds of exceptions for unreadable folders
        raise _unreadable(folder, error) from error
    if not isinstance(features, tfds.features.FeaturesDict):
        raise InputError(f"{folder / 'features.json'}: its examples have no named fields")
    return builder


def _unreadable(folder: epath.PathLike, error: Exception) -> InputError:
    reason = str(error).split("\n")[0]
    return InputError(f"{folder}: TFDS cannot read it: {reason}")


def unread_splits(folder: epath.PathLike) -> list[str]:
    """Returns the splits that a source of text does not read: all but `train`, sorted."""
    return sorted(name for name in open_folder(folder).info.splits if name != "train")


def records(folder: epath.PathLike, split: str = "train") -> Iterator[dict[str, Any]]:
    """Yields the records of a split, in order, from array_record or tfrecord files."""
    for path, count, _, _ in shards(folder, split):
        yield from shard_records(folder, path, count)


def shards(folder: epath.PathLike, split: str = "train") -> list[tuple[epath.Path, int, int, bool]]:
    """Returns for each file: path, records, bytes (roughly), whether ranges can be read."""
    folder = epath.Path(folder)
    info = open_folder(folder).info
    if split not in info.splits:
        raise InputError(f"{folder}: no split {split!r}; it has {', '.join(info.splits)}")
    kind = getattr(info.file_format, "value", None)
    if kind not in ("array_record", "tfrecord"):
        raise InputError(f"{folder}: stored as {kind}; only array_record and tfrecord can be read")
    try:
        lengths = info.splits[split].shard_lengths
        files = list(zip(info.splits[split].filepaths, lengths, strict=True))
    except Exception as error:  # as in open_folder
        raise _unreadable(folder, error) from error
    if not files:  # TFDS treats a split without shardLengths as empty
        raise InputError(
            f"{folder / 'dataset_info.json'}: lists no file of split {split!r}; put the whole "
            "file back"
        )
    in_bucket = storage_of(folder).is_bucket
    files = [(folder / path.name if in_bucket else path, count) for path, count in files]
    total = max(sum(count for _, count in files), 1)
    can_read_ranges = info.file_format == tfds.core.FileFormat.ARRAY_RECORD and not in_bucket
    size = info.splits[split].num_bytes
    return [(path, count, size * count // total, can_read_ranges) for path, count in files]


def shard_records(
    folder: epath.PathLike, path: epath.PathLike, count: int, start: int = 0, stop: int = -1
) -> Iterator[dict[str, Any]]:
    """Yields the records of a file with `count` records, or only those from `start` to `stop`.

    A file in a bucket is copied to this machine, and deleted after reading. `folder` has the
    metadata of the dataset; `stop` is one past the last record, -1: all.

    Raises:
      Unavailable: the bucket was out of reach for minutes.
    """
    path, info = epath.Path(path), open_folder(folder).info
    position = start
    with copies.local_copy(path) as (local,):
        raw = _read_raw(info.file_format.value, str(local), start, stop)
        for record in _decode(path, raw, info.features):
            position += 1
            yield record
    expected = count if stop < 0 else stop
    if position != expected:
        raise _damaged(path, f"{position} records, not {expected}")


def class_labels(folder: epath.PathLike) -> "dict[str, tfds.features.ClassLabel]":
    """Returns the class-label features, also those within sequences, by their keys."""
    labels = {}
    for key, feature in open_folder(folder).info.features.items():
        if isinstance(feature, tfds.features.Sequence):
            feature = feature.feature
        if isinstance(feature, tfds.features.ClassLabel) and feature.num_classes is not None:
            labels[key] = feature
    return labels


def _decode(path: epath.Path, raw: Iterator[bytes], features: Any) -> Iterator[dict[str, Any]]:
    """Yields the decoded records of a file; turns the libraries' many errors into InputError."""
    try:
        for data in raw:
            yield features.deserialize_example_np(data)
    except Exception as error:
        reason = str(error).split("\n")[0][:200] or type(error).__name__
        raise _damaged(path, reason) from error


def _damaged(path: epath.Path, reason: str) -> InputError:
    return InputError(f"{path}: missing or damaged ({reason}); restore the original file")


def _read_raw(kind: str, path: str, start: int, stop: int) -> Iterator[bytes]:
    if kind == "tfrecord":  # always read whole
        import grain

        yield from grain.experimental.TFRecordIterDataset(path)
        return
    source = ArrayRecordDataSource(path)
    stop = len(source) if stop < 0 else min(stop, len(source))
    for first in range(start, stop, 256):
        yield from source.__getitems__(range(first, min(first + 256, stop)))
