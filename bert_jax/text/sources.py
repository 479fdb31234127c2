"""Files of sources of text: on this machine, in a bucket, or wherever fsspec reads."""

import glob
import hashlib
import os
import re
from typing import Any

from fsspec.utils import glob_translate

from bert_jax.config import Corpus
from bert_jax.errors import InputError
from bert_jax.storage import buckets
from bert_jax.text import lines as text_lines
from bert_jax.text import tfds_files

# What files of a source are called.
SUFFIXES = {
    "text": (".txt", ".txt.gz", ".txt.zst"),
    **{word: (f".{word}", f".{word}.gz", f".{word}.zst") for word in ("jsonl", "csv", "tsv")},
    "parquet": (".parquet",),
}
# What places say of a file that another content changes.
_VERSIONS = ("ETag", "etag", "md5", "blob_id", "LastModified", "last_modified", "mtime", "created")


def files(source: str, seconds: float | None = None) -> list[str]:
    """Returns the files of a source of files, sorted; for `seconds` see `buckets.read`."""
    word, _, place = source.partition(":")
    if "://" in place:
        with text_lines.answering(f"corpus.sources: {source}"):
            paths = _files_there(word, place, seconds)
        if not paths:
            raise InputError(f"corpus.sources: {source}: no such files there")
    else:
        paths = _files_here(source, word, place)
    for path in paths if word == "text" else ():
        for other, suffixes in SUFFIXES.items():
            if other != "text" and path.endswith(suffixes):
                raise InputError(
                    f"corpus.sources: {source}: {path} is not plain text by its name; write "
                    f"{other}:{place}, and in corpus.text_field which field is the text"
                )
    return paths


def _files_here(source: str, word: str, place: str) -> list[str]:
    if os.path.isdir(place):
        paths = [
            os.path.join(folder, name)
            for folder, _, names in os.walk(place)
            for name in names
            if name.endswith(SUFFIXES[word])
        ]
        if not paths:
            raise InputError(
                f"corpus.sources: {source}: the folder holds no {', '.join(SUFFIXES[word])} file"
            )
        return sorted(paths)
    there = [place] if os.path.exists(place) else glob.glob(place, recursive=True)
    paths = sorted(filter(os.path.isfile, there))
    if not paths:
        what = "the pattern matches no file" if glob.has_magic(place) else "no such file or folder"
        if os.path.exists(place):
            what = "not a regular file, and text is read more than once"
        raise InputError(f"corpus.sources: {source}: {what} (in {os.getcwd()})")
    return paths


def _files_there(word: str, place: str, seconds: float | None) -> list[str]:
    """Returns the files at an address, which may be one's, a folder's or a pattern."""
    if place.startswith("gs://"):
        return _files_in_bucket(word, place, seconds)
    system, name = text_lines.system_of(place)
    if system.isdir(name):
        names = [path for path in system.find(name) if path.endswith(SUFFIXES[word])]
    else:
        names = [name] * system.exists(name) or system.glob(name)
    return sorted(system.unstrip_protocol(path) for path in names)


def _files_in_bucket(word: str, place: str, seconds: float | None) -> list[str]:
    """Returns the objects of a name, below a folder, or that fit a pattern."""
    folder = re.sub(r"(?<=[^:/])/*$", "/", place)
    fits = f".*({'|'.join(map(re.escape, SUFFIXES[word]))})"
    if glob.has_magic(place):
        begin = re.split(r"[*?[]", place)[0]
        folder, fits = begin[: begin.rfind("/") + 1], glob_translate(place)
    if buckets.is_bucket(folder) and buckets.split(place)[1] and buckets.about(place, seconds):
        return [place]
    names = buckets.listing(folder, seconds=seconds)
    paths = (folder + name for name in names if not name.endswith("/"))
    return sorted(filter(re.compile(fits).fullmatch, paths))


def fingerprint(corpus: Corpus, seconds: float | None = None) -> list[dict[str, Any]]:
    """Returns `file`, `bytes` and `mtime_ns` of each file of the sources, of which nothing is read.

    A TFDS dataset is recognised by its dataset_info.json, which carries the sizes of its shards.
    A bucket may be out of reach for so many seconds, None: ten minutes.
    """
    rows = []
    for source in corpus.sources:
        word, _, place = source.partition(":")
        if word in SUFFIXES:
            paths = files(source, seconds)
        else:
            folder = tfds_files.find(place) if word == "tfds" else place
            paths = [f"{folder}/dataset_info.json"]
        rows += [{"file": path, **state(path, seconds)} for path in paths]
    return rows


def state(path: str, seconds: float | None = None) -> dict[str, int]:
    """Returns `bytes` and `mtime_ns` of a file, or of an object in a bucket."""
    with text_lines.answering(f"corpus.sources: {path}"):
        if "://" in path and not path.startswith("gs://"):
            system, name = text_lines.system_of(path)
            about = system.info(name)
            if (size := about["size"]) is None:
                raise InputError(
                    f"corpus.sources: {path}: its server does not say how long it is; fetch it, "
                    "and name the file here"
                )
            # Not every place keeps dates, and a list says other things of a file than an answer
            # about it alone.
            version = str(next(filter(None, map(about.get, _VERSIONS)), "")).strip('"')
            date = int(hashlib.sha256(version.encode()).hexdigest()[:15], 16)
        else:
            size, date = buckets.state(path, seconds)
    return {"bytes": size, "mtime_ns": date}


def sha256(path: str) -> str:
    """Returns the SHA-256 of a file, wherever it lies."""
    with text_lines.answering(f"corpus.sources: {path}"):
        # What describes a TFDS dataset is small, and lies here or in a bucket.
        if "://" in path and not path.endswith("/dataset_info.json"):
            with text_lines.packed(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        return buckets.sha256(path)
