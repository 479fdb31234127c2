"""Files of sources of text: on this machine, in a bucket, or wherever fsspec reads."""

import collections
import functools
import glob
import hashlib
import os
import re
from typing import Any, NoReturn

from etils import epath
from fsspec.utils import glob_translate

from bert_jax.config import Corpus
from bert_jax.errors import InputError, pluralize
from bert_jax.storage import buckets
from bert_jax.storage.storage import storage_of
from bert_jax.text import line_reader, tfds_files

# Endings of the files that a source reads in a folder, in upper or lower case. All except Parquet
# files may be compressed.
_ENDINGS = {
    "text": (".txt", ".text"),
    "jsonl": (".jsonl",),
    "csv": (".csv",),
    "tsv": (".tsv",),
    "parquet": (".parquet",),
}
_SUFFIXES = {
    kind: (
        *endings,
        *(e + packed for e in endings for packed in line_reader.COMPRESSED if kind != "parquet"),
    )
    for kind, endings in _ENDINGS.items()
}
# Names without text to learn from; Hadoop and Arrow mark hidden files with `_`.
_NO_TEXT = re.compile(r"(?i)[._]|(readme|licen[cs]e)\b")
# The most endings or folders that a line lists.
_NAMED = 5
# What places say of a file that another content changes.
_VERSIONS = ("ETag", "etag", "md5", "blob_id", "LastModified", "last_modified", "mtime", "created")


# Paths of files, each with what its bucket's list says of it; None outside of buckets.
Files = dict[str, buckets.Listed | None]


def kind_of(path: str) -> str:
    """Returns the kind of source that reads files of this name in folders; "" if none does."""
    name = path.lower()
    return next((kind for kind, suffixes in _SUFFIXES.items() if name.endswith(suffixes)), "")


def files(source: str, seconds: float | None = None) -> Files:
    """Returns the files of a source of files, sorted; for `seconds` see `Storage`."""
    word, _, place = source.partition(":")
    paths, others = find(source, seconds)
    if not paths:
        contents = f"; it holds {_summary(others)}{_advice(others, place)}" if others else ""
        missing = "no such files there"
        if os.path.isdir(place):
            missing = f"the folder holds no {' or '.join(_ENDINGS[word])} file"
        raise InputError(f"corpus.sources: {source}: {missing}{contents}")
    for path in paths if word == "text" else ():
        if (other := kind_of(path)) not in ("", "text"):
            raise InputError(
                f"corpus.sources: {source}: {path} is not plain text by its name; write "
                f"{other}:{place}, and in corpus.text_field which field is the text"
            )
    return paths


def find(source: str, seconds: float | None = None) -> tuple[Files, list[str]]:
    """Returns the files that a source reads, and the paths that it leaves out; both sorted.

    A folder leaves out its files with other endings. A pattern leaves out the folders that it
    matches; their paths end in "/".
    """
    word, _, place = source.partition(":")
    if "://" in place:
        with line_reader.translate_errors(f"corpus.sources: {source}"):
            paths, is_folder = _find_remote(place, seconds)
    elif os.path.isdir(place):
        paths, is_folder = dict.fromkeys(files_below(place)), True
    else:
        paths_here, folders = _match_files(source, place)
        return dict.fromkeys(paths_here), folders
    if not is_folder:
        return paths, []
    read = {path: listed for path, listed in paths.items() if kind_of(path) == word}
    return read, [path for path in paths if path not in read]


def files_below(folder: str) -> list[str]:
    """Returns all files below a folder of this machine, sorted by their paths.

    Linked folders are entered once, those nearest to `folder` first, and a file that two links
    lead to is listed once.
    """
    all_paths: list[str] = []
    # Real paths of entered folders and, once a linked folder is met, of known files.
    entered, known = set[str](), set[str]()
    starts, is_linked = [folder], False
    while starts:
        paths, links = list[str](), list[str]()
        for start in sorted(starts):
            for parent, folders, names in os.walk(start, onerror=_refuse):
                if (real := os.path.realpath(parent)) in entered:
                    folders.clear()
                    continue
                entered.add(real)
                folders.sort()
                links += filter(os.path.islink, (os.path.join(parent, name) for name in folders))
                paths += (os.path.join(parent, name) for name in sorted(names))
        if is_linked:
            by_file = {os.path.realpath(path): path for path in reversed(paths)}
            paths = [path for real, path in by_file.items() if real not in known]
        if links:
            known.update(map(os.path.realpath, paths))
        all_paths += paths
        starts, is_linked = links, True
    return sorted(all_paths)


def _refuse(error: OSError) -> NoReturn:
    raise InputError(f"corpus.sources: {error.filename}: cannot be read ({error.strerror})")


def _match_files(source: str, place: str) -> tuple[list[str], list[str]]:
    """Returns the files that a path or a pattern names, and folders whose files it leaves out."""
    there = [place] if os.path.exists(place) else _expand_pattern(place)
    paths = sorted(set(filter(os.path.isfile, there)))
    if not paths:
        what = "the pattern matches no file" if glob.has_magic(place) else "no such file or folder"
        if os.path.exists(place):
            what = "not a regular file, and text is read more than once"
        raise InputError(f"corpus.sources: {source}: {what} (in {os.getcwd()})")
    folders = (f"{path.rstrip('/')}/" for path in set(there).difference(paths))
    unread = [name for name in folders if not any(path.startswith(name) for path in paths)]
    return paths, sorted(filter(os.path.isdir, unread))


def _expand_pattern(pattern: str) -> list[str]:
    """Returns the paths that a pattern matches, as `glob` does, but each file once with **."""
    begin = re.split(r"[*?[]", pattern)[0]
    root = begin[: begin.rfind("/") + 1]
    parts = pattern.removeprefix(root).split("/")
    is_plain = all(part == "**" or ("**" not in part and part[:1] != ".") for part in parts)
    if "**" not in parts or not is_plain or not os.path.isdir(root or "."):
        return glob.glob(pattern, recursive=True)
    # `glob` follows a link to a folder above forty times, and two such links practically for ever.
    fits = re.compile(glob_translate("/".join(parts)))
    names = (path.removeprefix(root or "./") for path in files_below(root or "."))
    return [f"{root}{name}" for name in names if fits.match(name) and "/." not in f"/{name}"]


def _find_remote(place: str, seconds: float | None) -> tuple[Files, bool]:
    """Returns the files at an address, and whether the address is a folder's."""
    if place.startswith("gs://"):
        return _find_in_bucket(place, seconds)
    system, name = line_reader.system_of(place)
    is_folder = system.isdir(name)
    names = system.find(name) if is_folder else [name] * system.exists(name) or system.glob(name)
    return dict.fromkeys(sorted(system.unstrip_protocol(str(path)) for path in names)), is_folder


def _find_in_bucket(place: str, seconds: float | None) -> tuple[Files, bool]:
    """Returns the objects of a name, a folder or a pattern; see `_find_remote`."""
    folder, fits = re.sub(r"(?<=[^:/])/*$", "/", place), ""
    if glob.has_magic(place):
        begin = re.split(r"[*?[]", place)[0]
        folder, fits = begin[: begin.rfind("/") + 1], glob_translate(place)
    is_named = buckets.is_bucket(folder) and buckets.split(place)[1]
    if is_named and (listed := buckets.about(place, seconds)):
        return {place: listed}, False
    there = sorted(buckets.listing(folder, seconds=seconds).items())
    paths = {folder + name: listed for name, listed in there if not name.endswith("/")}
    matches = re.compile(fits or ".*").fullmatch
    return {path: listed for path, listed in paths.items() if matches(path)}, not fits


def describe_unread(corpus: Corpus, seconds: float | None = None) -> list[str]:
    """Returns a line for each source that leaves out something that no other source reads.

    Hidden files and those named README or LICENSE are not counted.
    """
    real_path = functools.cache(os.path.realpath)

    def identity(path: str) -> str:
        folder, name = os.path.split(path)
        return path if "://" in path else f"{real_path(folder)}/{name}"

    others: dict[str, list[str]] = {}
    read: set[str] = set()
    for source in corpus.sources:
        word, _, place = source.partition(":")
        if word in _ENDINGS:
            paths, others[source] = find(source, seconds)
            read.update(map(identity, paths))
        else:
            others[source] = tfds_files.other_splits(_dataset(word, place))
    lines: list[str] = []
    for source, paths in others.items():
        word, _, place = source.partition(":")
        if word not in _ENDINGS:
            what, names = "split", paths
        else:
            names = [p for p in paths if identity(p) not in read and not _is_ignored(p, place)]
            read.update(map(identity, names))
            what = "folder" if names and names[0].endswith("/") else "file"
        if names:
            summary = _summary(names) if what == "file" else ", ".join(names[:_NAMED])
            advice = _advice(names, place) if what == "file" else ""
            lines.append(f"{source} leaves out {pluralize(len(names), what)} ({summary}){advice}")
    return lines


def _is_ignored(path: str, place: str) -> bool:
    if path.startswith(place):
        names = path.removeprefix(place).split("/")
    else:  # a path of a pattern, or as an fsspec client spells it
        names = path.split("/")[3 if "://" in path else -1 :]
    return any(map(_NO_TEXT.match, names))


def _summary(paths: list[str]) -> str:
    """Returns how many files there are of each ending: 2 .jsonl, 1 .md."""
    counts = collections.Counter(map(_ending, paths))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    shown = [f"{count:,} {ending}" for ending, count in ordered[:_NAMED]]
    if rest := sum(count for _, count in ordered[_NAMED:]):
        shown.append(f"{rest:,} others")
    return ", ".join(shown)


def _ending(path: str) -> str:
    packed = line_reader.compression(path)
    name = os.path.basename(path).lower().removesuffix(packed)
    return os.path.splitext(name)[1] + packed or "without an ending"


def _advice(paths: list[str], place: str) -> str:
    """Returns which sources would read these files, as text to follow a `_summary`."""
    kinds = sorted({kind_of(path) for path in paths} - {""})
    words = [f"{kind}:{place} reads {' and '.join(_ENDINGS[kind])}" for kind in kinds]
    return "".join(f"; {word}" for word in words)


def _dataset(word: str, place: str) -> epath.PathLike:
    """Returns the folder of a TFDS dataset."""
    return tfds_files.find(place) if word == "tfds" else place


def fingerprint(corpus: Corpus, seconds: float | None = None) -> list[dict[str, Any]]:
    """Returns `file`, `bytes` and `mtime_ns` of each file of the sources, of which nothing is read.

    A TFDS dataset is recognised by its dataset_info.json, which carries the sizes of its shards.
    A bucket may be out of reach for so many seconds, None: ten minutes.
    """
    rows = []
    for source in corpus.sources:
        word, _, place = source.partition(":")
        if word in _ENDINGS:
            paths = files(source, seconds)
        else:
            paths = {f"{_dataset(word, place)}/dataset_info.json": None}
        rows += [{"file": path, **state(path, seconds, listed)} for path, listed in paths.items()]
    return rows


def state(
    path: str, seconds: float | None = None, listed: buckets.Listed | None = None
) -> dict[str, int]:
    """Returns `bytes` and `mtime_ns` of a file or an object; `listed` saves a request."""
    with line_reader.translate_errors(f"corpus.sources: {path}"):
        if "://" in path and not path.startswith("gs://"):
            system, name = line_reader.system_of(path)
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
            size, date = storage_of(path).stat(path, seconds, listed)
    return {"bytes": int(size), "mtime_ns": int(date)}


def sha256(path: str) -> str:
    """Returns the SHA-256 of a file, wherever it lies."""
    with line_reader.translate_errors(f"corpus.sources: {path}"):
        if "://" in path and not path.startswith("gs://"):
            with line_reader.open_raw(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        return storage_of(path).sha256(path)
