"""This host's copies of corpora that lie in buckets.

A stream is mapped into memory, so it must lie on a local disk. A copy is made once, file by file,
each checked against the manifest's hash before it takes its place; at every opening files that are
missing or damaged are copied anew.

    CACHE/corpora/NAME/          a copy: as the corpus, without its dataset
    CACHE/corpora/NAME.lock      held while it is made; other processes of this host wait
"""

import contextlib
import fcntl
import hashlib
import json
import os
from collections.abc import Iterator
from typing import Any

from etils import epath

from bert_jax import bucket
from bert_jax.config import InputError
from bert_jax.data.files import Files, damage
from bert_jax.storage.workdir import cache_folder, mark_complete, named_errors, write_atomic

_ANEW = "put the whole object back, or remove the corpus to prepare it anew"


@contextlib.contextmanager
def alone(folder: epath.Path) -> Iterator[epath.Path]:
    """The place of this host's copy of a bucket's folder, for this process alone."""
    name = hashlib.sha256(os.fspath(folder).encode()).hexdigest()[:16]
    copy = _corpora() / name
    with named_errors(copy):
        copy.parent.mkdir(parents=True, exist_ok=True)
        with open(copy.parent / f"{name}.lock", "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield copy


def is_copy(folder: epath.Path) -> bool:
    """Whether the folder is a copy."""
    return folder.parent == _corpora()


def update(folder: epath.Path, manifest: dict[str, Any]) -> epath.Path:
    """Makes this host's copy of a bucket's corpus, or what is missing or damaged of it.

    Args:
      folder: the corpus in its bucket.
      manifest: its manifest; a copy of another corpus that lay there goes.

    Returns:
      The copy.

    Raises:
      InputError: a file in the bucket is missing or damaged, or the copy cannot be written.
    """
    text = json.dumps(manifest, indent=2) + "\n"
    with alone(folder) as copy:
        path = copy / "manifest.json"
        if not path.exists() or path.read_bytes() != text.encode():
            copy.rmtree(missing_ok=True)
            copy.mkdir(parents=True)
            write_atomic(path, text)
        for name, entry in manifest["files"].items():
            if not name.startswith("dataset/") and damage(copy / name, entry, "cheap"):
                _fetch(folder / name, copy / name, entry)
        mark_complete(copy)
        return copy


def send(copy: epath.Path, folder: epath.Path, files: Files) -> None:
    """Copies the files of a corpus to a bucket; its dataset is removed here."""
    for name in files:
        bucket.send(copy / name, folder / name)
    (copy / "dataset").rmtree(missing_ok=True)


def _fetch(source: epath.Path, target: epath.Path, entry: list[Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    beside = target.parent / f".{target.name}.tmp"
    try:
        try:
            bucket.fetch(source, beside)
        except FileNotFoundError as error:
            raise InputError(f"{source}: is missing; {_ANEW}") from error
        wrong = damage(beside, entry, "full")
        if wrong:
            raise InputError(f"{source}: damaged ({wrong}); {_ANEW}")
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)


def _corpora() -> epath.Path:
    return cache_folder() / "corpora"
