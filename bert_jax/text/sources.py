"""Finds the files of text sources: on this machine, in a bucket, or at an address of fsspec."""

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
from bert_jax.config.text_corpus import FILE_ENDINGS, kind_of_file
from bert_jax.errors import InputError, pluralize
from bert_jax.storage import buckets
from bert_jax.storage.storage import storage_of
from bert_jax.text import line_reader, tfds_files

# Names without text to learn from; Hadoop and Arrow mark hidden files with `_`.
_NO_TEXT = re.compile(r"(?i)[._]|(readme|licen[cs]e)\b")
# Maximum number of endings or folders that a message lists.
_MAX_LISTED = 5
# Attributes of files in fsspec that change with the content.
_VERSION_KEYS = (
    "ETag",
    "etag",
    "md5",
    "blob_id",
    "LastModified",
    "last_modified",
    "mtime",
    "created",
)

# Paths of files with their entries in the listing of a bucket; None outside of buckets.
Files = dict[str, buckets.ObjectEntry | None]


def source_from_path(path: str) -> str:
    """Returns a path as a source KIND:PATH; returns a source as it is.

    KIND follows from the path's ending. For a local folder without one, it follows from the
    readable files in it, if these are all of one kind. Otherwise it is `text`.
    """
    if re.match(r"\w+:(?!//)", path):
        return path
    kind = kind_of_file(path)
    if not kind and os.path.isdir(path) and len(kinds := kinds_in(path)) == 1:
        (kind,) = kinds
    return f"{kind or 'text'}:{re.sub(r'(?<=[^:/])/+$', '', path)}"


def kinds_in(path: str) -> list[str]:
    """Returns the kinds of sources that can read a file, or files of a folder."""
    paths, unread = find_files(f"text:{path}")  # together all files there
    kinds = {kind_of_file(path) for path in (*paths, *unread)}
    return [kind for kind in FILE_ENDINGS if kind in kinds]


def require_files(source: str, seconds: float | None = None) -> Files:
    """Returns the files of a source other than TFDS, sorted; for `seconds` see `Storage`."""
    kind, _, location = source.partition(":")
    paths, unread = find_files(source, seconds)
    if not paths:
        contents = f"; it holds {_summary(unread)}{_advice(unread, location)}" if unread else ""
        missing = "no such files there"
        if os.path.isdir(location):
            missing = f"the folder holds no {' or '.join(FILE_ENDINGS[kind])} file"
        raise InputError(f"corpus.sources: {source}: {missing}{contents}")
    for path in paths:
        if kind == "text" and (path_kind := kind_of_file(path)) not in ("", "text"):
            raise InputError(
                f"corpus.sources: {source}: {path} is not plain text by its name; write "
                f"{path_kind}:{location}, and name the field of the text in corpus.text_field"
            )
    return paths


def find_files(source: str, seconds: float | None = None) -> tuple[Files, list[str]]:
    """Returns the files that a source reads, and the paths that it does not read; both sorted.

    In a folder, files with other endings are not read. If a pattern matches folders, these are not
    read; their paths end in "/".
    """
    kind, _, location = source.partition(":")
    if "://" in location:
        with line_reader.translate_errors(f"corpus.sources: {source}"):
            paths, is_folder = _find_remote(location, seconds)
    elif os.path.isdir(location):
        paths, is_folder = dict.fromkeys(files_below(location)), True
    else:
        matches, folders = _match_files(source, location)
        return dict.fromkeys(matches), folders
    if not is_folder:
        return paths, []
    read = {path: entry for path, entry in paths.items() if kind_of_file(path) == kind}
    return read, [path for path in paths if path not in read]


def files_below(folder: str) -> list[str]:
    """Returns all files below a folder of this machine, sorted by their paths.

    Linked folders are entered once, those nearest to `folder` first; what is listed already is not
    listed again below them. Without linked folders a link to a file is listed like a file, as in
    corpora that earlier versions prepared.
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


def _match_files(source: str, pattern: str) -> tuple[list[str], list[str]]:
    """Returns the files that a path or a pattern names, and folders whose files are not read."""
    matches = [pattern] if os.path.exists(pattern) else _expand_pattern(pattern)
    paths = sorted(set(filter(os.path.isfile, matches)))
    if not paths:
        reason = "no such file or folder"
        if os.path.exists(pattern):
            reason = "not a regular file, and text is read more than once: save it to a file"
        elif glob.has_magic(pattern):
            reason = "the pattern matches no file"
        raise InputError(f"corpus.sources: {source}: {reason} (in {os.getcwd()})")
    folders = {f"{path.rstrip('/')}/" for path in matches if os.path.isdir(path)}
    unread = [name for name in folders if not any(path.startswith(name) for path in paths)]
    return paths, sorted(unread)


def _expand_pattern(pattern: str) -> list[str]:
    """Returns the paths that a pattern matches, as `glob` does, but each file once with **."""
    # `glob` follows a link to a parent folder forty times, and two such links almost forever.
    literal = re.split(r"[*?[]", pattern)[0]
    root = literal[: literal.rfind("/") + 1]
    parts = pattern.removeprefix(root).split("/")
    # Below ** is a whole part, and no part begins with a dot; `glob` expands other patterns.
    is_plain = all(part == "**" or ("**" not in part and part[:1] != ".") for part in parts)
    if "**" not in parts or not is_plain or not os.path.isdir(root or "."):
        return glob.glob(pattern, recursive=True)
    fits = re.compile(glob_translate("/".join(parts)))
    names = (path.removeprefix(root or "./") for path in files_below(root or "."))
    return [f"{root}{name}" for name in names if fits.match(name) and "/." not in f"/{name}"]


def _find_remote(address: str, seconds: float | None) -> tuple[Files, bool]:
    """Returns the files at an address, and whether it is a folder."""
    if address.startswith("gs://"):
        return _find_in_bucket(address, seconds)
    system, name = line_reader.filesystem_of(address)
    is_folder = system.isdir(name)
    names = system.find(name) if is_folder else [name] if system.exists(name) else system.glob(name)
    return dict.fromkeys(sorted(system.unstrip_protocol(str(path)) for path in names)), is_folder


def _find_in_bucket(address: str, seconds: float | None) -> tuple[Files, bool]:
    """Returns the object of this name, or those in the folder or that match the pattern."""
    folder, pattern = re.sub(r"(?<=[^:/])/*$", "/", address), ""
    if glob.has_magic(address):
        literal = re.split(r"[*?[]", address)[0]
        folder, pattern = literal[: literal.rfind("/") + 1], glob_translate(address)
    buckets.is_in_bucket(folder)  # called since it refuses a pattern as the bucket's name
    has_name = buckets.split(address)[1] != ""
    if has_name and (entry := buckets.describe(address, seconds)):
        return {address: entry}, False
    objects = sorted(buckets.list_objects(folder, seconds=seconds).items())
    paths = {folder + name: entry for name, entry in objects if not name.endswith("/")}
    matches = re.compile(pattern or ".*").fullmatch
    return {path: entry for path, entry in paths.items() if matches(path)}, not pattern


def describe_unread(corpus: Corpus, seconds: float | None = None) -> list[str]:
    """Returns a line for each source with files that neither it nor another source reads.

    Hidden files and those named README or LICENSE are not counted.
    """
    real_path = functools.cache(os.path.realpath)

    def identity(path: str) -> str:
        folder, name = os.path.split(path)
        return path if "://" in path else f"{real_path(folder)}/{name}"

    unread: dict[str, list[str]] = {}
    known: set[str] = set()  # files that a source reads, or that an earlier line counts
    for source in corpus.sources:
        kind, _, location = source.partition(":")
        if kind in FILE_ENDINGS:
            paths, unread[source] = find_files(source, seconds)
            known.update(map(identity, paths))
        else:
            unread[source] = tfds_files.unread_splits(_dataset_folder(kind, location))
    lines: list[str] = []
    for source, paths in unread.items():
        kind, _, location = source.partition(":")
        if kind not in FILE_ENDINGS:
            noun, names = "split", paths
        else:
            names = [p for p in paths if identity(p) not in known and not _is_ignored(p, location)]
            known.update(map(identity, names))
            noun = "folder" if names and names[0].endswith("/") else "file"
        if names:
            summary = _summary(names) if noun == "file" else ", ".join(names[:_MAX_LISTED])
            advice = _advice(names, location) if noun == "file" else ""
            lines.append(f"{source} leaves out {pluralize(len(names), noun)} ({summary}){advice}")
    return lines


def _is_ignored(path: str, location: str) -> bool:
    if path.startswith(location):
        names = path.removeprefix(location).split("/")
    else:  # from a pattern, or written otherwise by fsspec: the names after the host, or the last
        names = path.split("/")[3 if "://" in path else -1 :]
    return any(map(_NO_TEXT.match, names))


def _summary(paths: list[str]) -> str:
    """Formats the number of files with each ending: 2 .jsonl, 1 .md."""
    counts = collections.Counter(map(_ending, paths))
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    parts = [f"{count:,} {ending}" for ending, count in ordered[:_MAX_LISTED]]
    if rest := sum(count for _, count in ordered[_MAX_LISTED:]):
        parts.append(f"{rest:,} others")
    return ", ".join(parts)


def _ending(path: str) -> str:
    compression = line_reader.compression_ending(path)
    name = os.path.basename(path).lower().removesuffix(compression)
    return os.path.splitext(name)[1] + compression or "without an ending"


def _advice(paths: list[str], location: str) -> str:
    """Returns which sources would read these files, as text to follow a `_summary`."""
    kinds = sorted({kind_of_file(path) for path in paths} - {""})
    advice = [f"{kind}:{location} reads {' and '.join(FILE_ENDINGS[kind])}" for kind in kinds]
    return "".join(f"; {text}" for text in advice)


def _dataset_folder(kind: str, location: str) -> epath.PathLike:
    return tfds_files.find(location) if kind == "tfds" else location


def fingerprint(corpus: Corpus, seconds: float | None = None) -> list[dict[str, Any]]:
    """Returns `file`, `bytes` and `mtime_ns` of each file of the sources, without reading them.

    For a TFDS dataset this is its dataset_info.json, which has the sizes of its shards. For
    `seconds` see `Storage`, for `mtime_ns` see `stat`.
    """
    rows = []
    for source in corpus.sources:
        kind, _, location = source.partition(":")
        if kind in FILE_ENDINGS:
            paths = require_files(source, seconds)
        else:
            paths = {f"{_dataset_folder(kind, location)}/dataset_info.json": None}
        rows += [{"file": path, **stat(path, seconds, entry)} for path, entry in paths.items()]
    return rows


def stat(
    path: str, seconds: float | None = None, entry: buckets.ObjectEntry | None = None
) -> dict[str, int]:
    """Returns `bytes` and `mtime_ns` of a file or an object; `entry` saves a request.

    For a file of fsspec, `mtime_ns` is a hash of an attribute that changes with the content.
    """
    with line_reader.translate_errors(f"corpus.sources: {path}"):
        if "://" in path and not path.startswith("gs://"):
            system, name = line_reader.filesystem_of(path)
            info = system.info(name)
            if (size := info["size"]) is None:
                raise InputError(
                    f"corpus.sources: {path}: its server does not report its size; download it and "
                    "give the local file"
                )
            # Not every file system has dates, and listings have other attributes than single files.
            version = str(next(filter(None, map(info.get, _VERSION_KEYS)), "")).strip('"')
            mtime_ns = int(hashlib.sha256(version.encode()).hexdigest()[:15], 16)
        else:
            size, mtime_ns = storage_of(path).stat(path, seconds, entry)
    return {"bytes": int(size), "mtime_ns": int(mtime_ns)}


def sha256(path: str) -> str:
    """Returns the SHA-256 of a local or remote file."""
    with line_reader.translate_errors(f"corpus.sources: {path}"):
        if "://" in path and not path.startswith("gs://"):
            with line_reader.open_raw(path) as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        return storage_of(path).sha256(path)
