"""Ready TFDS datasets, read from their folders without TensorFlow.

TFDS imports whatever module a dataset's features.json names, so the names are checked against a
list before TFDS sees the folder: data is never code here.
"""

import json
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow_datasets as tfds
from etils import epath

from bert_jax.config import InputError

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
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def find(name: str) -> epath.Path:
    """The folder of the prepared dataset `NAME[/CONFIG][:VERSION]`, its latest version by default.

    Looks in $TFDS_DATA_DIR or ~/tensorflow_datasets, and generates nothing.

    Raises:
      InputError: no prepared dataset of this name there.
    """
    root = epath.Path(os.environ.get("TFDS_DATA_DIR", "~/tensorflow_datasets")).expanduser()
    name, _, version = name.partition(":")
    folder = root / name
    if version:
        versions = [version]
    else:
        found = [p.name for p in folder.iterdir()] if folder.exists() else []
        versions = sorted(
            filter(_VERSION.fullmatch, found), key=lambda v: [*map(int, v.split("."))]
        )
    if not versions or not (folder / versions[-1] / "dataset_info.json").exists():
        raise InputError(
            f"tfds:{name}: no prepared dataset in {folder}; set TFDS_DATA_DIR to the folder that "
            "holds it (the public bucket needs the [gcs] extra), or prepare it with TFDS"
        )
    return folder / versions[-1]


def open_folder(folder: epath.PathLike) -> tfds.core.DatasetBuilder:
    """A builder for the dataset in `folder`, once its features are seen to be plain data.

    Raises:
      InputError: no dataset there, damaged metadata, or a feature class outside TFDS's own.
    """
    folder = epath.Path(folder)
    try:
        tree = json.loads((folder / "features.json").read_text())
        json.loads((folder / "dataset_info.json").read_text())
    except FileNotFoundError as error:
        raise InputError(f"{folder}: no TFDS dataset here (no {error.filename})") from error
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(f"{folder}: damaged TFDS metadata ({error})") from error
    for name in _class_names(tree):
        if name not in _KNOWN_FEATURES:
            raise InputError(
                f"{folder / 'features.json'}: feature class {name!r} is not one of TFDS's plain "
                "features; refused, since reading it would run that code"
            )
    try:
        return tfds.builder_from_directory(folder)
    except Exception as error:  # TFDS raises many kinds; each means the folder cannot be read
        reason = str(error).split("\n")[0]
        raise InputError(f"{folder}: TFDS cannot read it: {reason}") from error


def records(folder: epath.PathLike, split: str = "train") -> Iterator[dict[str, Any]]:
    """Examples of a split, in order, from array_record or tfrecord files."""
    builder = open_folder(folder)
    if split not in builder.info.splits:
        raise InputError(f"{folder}: no split {split!r}; it has {', '.join(builder.info.splits)}")
    if builder.info.file_format == tfds.core.FileFormat.TFRECORD:
        import grain

        for path in builder.info.splits[split].filepaths:
            for record in grain.experimental.TFRecordIterDataset(str(path)):
                yield builder.info.features.deserialize_example_np(record)
    else:
        source = builder.as_data_source(split=split)
        for start in range(0, len(source), 256):
            yield from source.__getitems__(range(start, min(start + 256, len(source))))


def _class_names(tree: Any) -> Sequence[str]:
    """Every class that TFDS would import for this features.json, wherever it stands."""
    if isinstance(tree, list):
        return [name for item in tree for name in _class_names(item)]
    if not isinstance(tree, dict):
        return []
    own = [
        value
        for key, value in tree.items()
        if key in ("pythonClassName", "python_class_name", "type", "proto_cls")
        and isinstance(value, str)
    ]
    return own + [name for value in tree.values() for name in _class_names(value)]
