"""Implements `prepare`: makes a tokenized TFDS dataset once; later calls check and reuse it.

    corpus/manifest.json    inputs (sources with hashes), outputs (counts, files with hashes),
                            versions
    corpus/tokenizer/       the tokenizer, trained here or copied
    corpus/dataset/         the TFDS dataset (see data.dataset)
    corpus/stream/          its splits as flat memory-mapped ids (see data.stream)
    corpus/plans.json       numbers of rows of first epochs, by what they depend on (see data.plans)
    corpus/parts/           results of finished work items, until the corpus is complete (see
                            data.parts)
    corpus/COMPLETE         written last

The stages are in data.build. A corpus in a bucket is made on this machine and sent there; each host
that reads it keeps a copy (see storage.copies).
"""

import contextlib
import hashlib
import json
import os
import shutil
from typing import Any, Literal

from etils import epath

from bert_jax.config import Corpus, Experiment, source_name
from bert_jax.data import build, dataset, mixture, pairs, plans, sentences, stream
from bert_jax.data.build import Report
from bert_jax.errors import InputError, Unavailable, printable
from bert_jax.storage import buckets, copies, mirror
from bert_jax.storage.locks import Holder, lock
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import (
    COMPLETE,
    is_complete,
    mark_complete,
    parse_json,
    translate_os_errors,
    with_checksum,
    write_atomic,
)
from bert_jax.text import sources as text_sources
from bert_jax.text import tokenizer

FORMAT_VERSION = 3
COUNTS_FILE = "plans.json"

# After an InputError, results of work items are kept if there are at least so many. A small text
# has two, one of each stage, and is quickly made again.
_MIN_KEPT_PARTS = 3

# A file of at most this many bytes is read in full at every opening: some hundredths of a second.
_SMALL = 1 << 25
# How long sources in a bucket are retried when they are only compared with a manifest.
_COMPARE_SECONDS = 10.0
# The field by which users choose the folder.
_FOLDER_FIELD = "run.corpus_dir"


class Changed(InputError):
    """The settings are equal, but the text or the tokenizer has changed since the preparation."""


def prepare(
    corpus: Corpus,
    vocab_size: int,
    folder: epath.Path,
    report: Report,
    workers: int = 1,
    beam: str | None = None,
) -> dict[str, Any]:
    """Makes the corpus folder, or checks one that exists; returns its manifest.

    The result has the same bytes whichever processes do the work. Finished parts of an earlier
    `prepare` that was killed or failed are reused.

    The tokenizer must have `vocab_size` ids. `beam` is a runner of Apache Beam with its options; it
    replaces the `workers` processes of this machine.

    Raises:
      Unavailable: a bucket or a worker failed; run again to resume.
    """
    runner = build.StageRunner(workers, beam)
    if (storage := storage_of(folder)).is_bucket:
        return _prepare_in_bucket(corpus, vocab_size, folder, runner, report)
    with translate_os_errors(folder):
        _reject_other_files(folder, storage.names(folder))
        if is_complete(folder):  # without its lock: runs may share a folder they cannot write
            return _reuse(corpus, vocab_size, folder, report)
        with lock(folder, setting=_FOLDER_FIELD):
            if is_complete(folder):  # completed while this process waited for the lock
                return _reuse(corpus, vocab_size, folder, report)
            _remove_leftovers(folder)
            try:
                return _build(corpus, vocab_size, folder, runner, report)
            except BaseException as error:
                if not is_complete(folder):
                    min_parts = _MIN_KEPT_PARTS if isinstance(error, InputError) else 1
                    _remove_leftovers(folder, min_parts)
                raise


def verify(folder: epath.Path) -> None:
    """Reads all files of a corpus; for a corpus in a bucket, the files of this host's copy."""
    folder = ensure_local(folder)
    manifest = open_manifest(folder)
    for prefix in ("tokenizer/", "stream/", "dataset/"):
        if prefix != "dataset/" or (folder / "dataset").exists():  # a bucket's copy has none
            _require_intact(folder, manifest["files"], prefix, "full")


def ensure_local(folder: epath.Path, report: Report | None = None) -> epath.Path:
    """Returns a readable corpus folder: the folder itself, or this host's copy of a bucket's.

    Downloads missing and damaged files of the copy; other processes of this host wait.

    Raises:
      Unavailable: the bucket is out of reach, or the disk full; downloaded files stay.
    """
    if not storage_of(folder).is_bucket:
        return folder
    manifest = open_manifest(folder)
    text, listed = json.dumps(manifest, indent=2) + "\n", manifest["files"]
    with copies.lock_corpus_copy(folder) as copy:
        path = copy / "manifest.json"
        if not path.exists() or path.read_bytes() != text.encode():
            copy.rmtree(missing_ok=True)  # a copy of another corpus
            copy.mkdir(parents=True)
            write_atomic(path, text)
        files = {n: entry for n, entry in listed.items() if not n.startswith("dataset/")}
        to_download = [n for n, entry in files.items() if _damage(copy / n, entry, "cheap")]
        copies.download_all(
            folder,
            copy,
            to_download,
            lambda name, file: _damage(file, listed[name], "full"),
            "put the whole object back, or remove the corpus to prepare it again",
            report,
        )
        with contextlib.suppress(Unavailable):  # without them this host counts rows itself
            plans.add_counts(copy / COUNTS_FILE, plans.read_counts(folder / COUNTS_FILE))
        mark_complete(copy)
        return copy


def _reuse(corpus: Corpus, vocab_size: int, folder: epath.Path, report: Report) -> dict[str, Any]:
    """Returns the manifest of a complete corpus; raises InputError if the corpus does not fit."""
    manifest = open_manifest(folder)
    _require_same(manifest, corpus, vocab_size, folder, report)
    if not storage_of(folder).is_bucket:
        shutil.rmtree(folder / build.PARTS, ignore_errors=True)  # left by a kill after COMPLETE
    return manifest


def open_manifest(folder: epath.Path) -> dict[str, Any]:
    """Returns the manifest of a complete corpus, local or in a bucket."""
    path = folder / "manifest.json"
    content, storage = None, storage_of(folder)
    with contextlib.suppress(FileNotFoundError):
        content = storage.read(path) if storage.exists(folder / COMPLETE) else None
    if content is None:
        raise InputError(f"{folder}: no prepared corpus here; run `bert-jax prepare` first")
    manifest = parse_json(
        content,
        path,
        FORMAT_VERSION,
        f"use the bert-jax that wrote it; for new runs choose another {_FOLDER_FIELD}, or remove "
        f"{folder} to prepare it again",
        "restore the original file",
        checksum="required",
    )
    for name in manifest["files"]:
        if os.path.isabs(name) or ".." in name.split("/"):
            raise InputError(
                f"{path}: names {name}, which lies elsewhere; restore the original file"
            )
    return manifest


def manifest_hashes(manifest: dict[str, Any]) -> tuple[str, str]:
    """Returns two hashes of a manifest: without the dates of the text files, and of all.

    The first identifies the corpus. Checkpoints of earlier versions hold the second.
    """
    sources = [{k: v for k, v in row.items() if k != "mtime_ns"} for row in manifest["sources"]]
    undated = {**manifest, "sources": sources, "checksum": None}
    texts = (json.dumps(content, sort_keys=True) for content in (undated, manifest))
    undated_sha256, sha256 = (hashlib.sha256(text.encode()).hexdigest() for text in texts)
    return undated_sha256, sha256


def open_tokenizer(folder: epath.Path, manifest: dict[str, Any]) -> tokenizer.Tokenizer:
    """Returns the tokenizer that the corpus was made with."""
    # Checked first: for a damaged file, `load` would report a malformed vocabulary.
    _require_intact(folder, manifest["files"], "tokenizer/", "cheap")
    path = folder / "tokenizer"
    loaded = tokenizer.load(path)
    if loaded.sha256 != manifest["tokenizer"].get("sha256"):
        raise InputError(f"{path}: not the corpus's own tokenizer; {_remedy(folder, path.name)}")
    return loaded


def open_stream(folder: epath.Path, split: str) -> stream.Stream:
    """Returns a split as flat ids; writes them again from the dataset if they were removed."""
    manifest, target = open_manifest(folder), folder / "stream" / split
    depth = "cheap"
    if not is_complete(target):
        with lock(folder, setting=_FOLDER_FIELD):
            if not is_complete(target):
                for path in (target.parent, target):
                    if os.path.islink(path):  # `stream.write` would delete the link's target
                        raise InputError(f"{path}: is a link; remove it, and run again")
                depth = "full"
                _require_intact(folder, manifest["files"], "dataset/", depth)
                vocab_size = manifest["settings"]["vocab_size"]
                stream.write(dataset.folder_of(folder), split, target, vocab_size)
    _require_intact(folder, manifest["files"], f"stream/{split}/", depth)
    return stream.Stream.open(target)


def require_enough_text(folder: epath.Path, experiment: Experiment) -> None:
    """Raises InputError if a split of a corpus is too small for one row of a phase."""
    # The rows are not used: planning raises InputError if there is none.
    corpus, data, key, folder = experiment.corpus, experiment.data, (0, 0), ensure_local(folder)
    validation, length = open_stream(folder, "validation"), data.eval_sequence_length
    if data.row_kind != "sentences":
        pairs.sample(validation, length, data.short_seq_prob, key, max_pairs=1, kind=data.row_kind)
    else:
        sentences.plan(validation, length, key, most_rows=1)
    train, manifest = open_stream(folder, "train"), open_manifest(folder)
    sources = mixture.split_sources(manifest, train) if corpus.is_mixed else []
    for number, phase in enumerate(experiment.phases):
        row_kind, length = experiment.data_of(number).row_kind, phase.sequence_length
        weights = mixture.phase_weights(experiment, number, sources) if sources else ()
        for name, part, weight in zip(corpus.source_labels, sources, weights, strict=False):
            if weight:
                mixture.require_row(name, part, length, row_kind)
        if row_kind == "sentences" and not sources:
            sentences.plan(train, length, key, most_rows=1)
        elif not sources:  # 0 tokens at least: a pair need not fill its row
            mixture.require_row("the text", train, 0, row_kind)


def _require_intact(
    folder: epath.Path, files: dict[str, list[Any]], prefix: str, depth: Literal["cheap", "full"]
) -> None:
    """Raises InputError for a missing or damaged file whose path begins with `prefix`.

    `cheap`, at every opening: checks the size of all files, and the content of small ones. `full`,
    after a file was made or copied and by `prepare --verify`: checks the content of all files, at
    about a gigabyte a second.
    """
    for name, entry in files.items():
        if name.startswith(prefix) and (damage := _damage(folder / name, entry, depth)):
            remedy = _remedy(folder, name)
            raise InputError(f"{folder / name}: missing or damaged ({damage}); {remedy}")


def _damage(path: epath.PathLike, entry: list[Any], depth: Literal["cheap", "full"]) -> str:
    """Describes the damage of a local file; "" if there is none. See `_require_intact`."""
    size, sha256 = entry
    if not os.path.isfile(path):
        return "is missing"
    if os.path.getsize(path) != size:
        return f"has {os.path.getsize(path)} bytes, not {size}"
    if (depth == "full" or size <= _SMALL) and storage_of(path).sha256(path) != sha256:
        return "was changed since it was made"
    return ""


def _remedy(folder: epath.Path, name: str) -> str:
    """Tells what to do about a damaged file of a corpus."""
    if copies.is_copy(folder):
        return f"remove {folder} and run again to copy it again"
    return {
        "tokenizer": f"put its own tokenizer back, or remove {folder} to prepare it again",
        "dataset": f"restore the original file, or remove {folder} to prepare it again",
        "stream": f"remove {folder / 'stream'} and run again to make it again from the dataset",
    }[name.partition("/")[0]]


def _require_same(
    manifest: dict[str, Any], corpus: Corpus, vocab_size: int, folder: epath.Path, report: Report
) -> None:
    """Raises InputError if the folder was made from other text, settings or another tokenizer."""
    remedy = f"choose another {_FOLDER_FIELD}, or remove {folder} to prepare it again"
    settings = build.settings_of(corpus)
    # Settings that are missing in the manifest have their default.
    earlier = build.settings_of(Corpus(sources=corpus.sources)) | manifest["settings"]
    is_divided = "documents_of_sources" in manifest
    has_moved_text = earlier["sources"] != settings["sources"] and _has_same_text(manifest, corpus)
    for name, value in {**settings, "vocab_size": vocab_size}.items():
        old = earlier.get(name)
        if name in ("mixture", "temperature") and (is_divided or not value):
            continue  # shares may change: a corpus made with any has documents_of_sources
        if old != value and not (name == "sources" and has_moved_text):
            raise InputError(f"{folder}: prepared with {name}={old!r}, now {value!r}; {remedy}")
    # A corpus may be used on a machine that has neither its text nor its vocabulary file.
    given = corpus.tokenizer
    if given != "train" and not epath.Path(given).exists():
        report(f"corpus: used as prepared; there is no {given} to compare with")
    elif given != "train" and (
        tokenizer.load(given, corpus.case).sha256 != manifest["tokenizer"].get("sha256")
    ):
        raise Changed(f"{folder}: {given} has changed since; {remedy}")
    if has_moved_text:
        return
    try:
        sources = text_sources.fingerprint(corpus, _COMPARE_SECONDS)
        notes_on_unread = text_sources.describe_unread(corpus, _COMPARE_SECONDS)
    except (InputError, Unavailable) as error:
        report(f"corpus: used as prepared; its text cannot be compared ({error})")
        return
    old_files = {row["file"]: row for row in manifest["sources"]}
    new_files = {source_name(row["file"]): row for row in sources}  # named as in a manifest
    for file in sorted(old_files.keys() | new_files.keys()):
        if not _is_same_file(old_files.get(file), new_files.get(file)):
            change = "is new" if file not in old_files else "is gone"
            change = "has changed" if file in old_files.keys() & new_files.keys() else change
            raise Changed(f"{folder}: {file} {change} since this corpus was prepared; {remedy}")
    for line in notes_on_unread:
        report(f"corpus: {printable(line)}")


def is_made_of(folder: epath.Path, corpus: Corpus) -> bool:
    """Returns whether a corpus was made from files like those of the sources, at any path."""
    is_there = storage_of(folder).exists(folder / COMPLETE)
    return is_there and _has_same_text(open_manifest(folder), corpus)


def _has_same_text(manifest: dict[str, Any], corpus: Corpus) -> bool:
    old, kinds = manifest["sources"], [source.partition(":")[0] for source in corpus.sources]
    if kinds != [source.partition(":")[0] for source in manifest["settings"]["sources"]]:
        return False
    try:
        new = text_sources.fingerprint(corpus, _COMPARE_SECONDS)
    except (InputError, Unavailable):
        return False
    return len(old) == len(new) and all(map(_is_same_file, old, new))


def _is_same_file(old: dict[str, Any] | None, new: dict[str, Any] | None) -> bool:
    """Returns whether a file of a source is unchanged; hashes it only if its date differs."""
    if old is None or new is None or old.get("bytes") != new["bytes"]:
        return False
    return old.get("mtime_ns") == new["mtime_ns"] or old.get("sha256") == text_sources.sha256(
        new["file"]
    )


# Names that `prepare` writes, or that earlier versions wrote.
_WRITTEN = {"manifest.json", "tokenizer", "dataset", "stream", COUNTS_FILE, build.PARTS, "lock"}
_WRITTEN |= {COMPLETE, "croissant.json"}


def _is_from_prepare(name: str) -> bool:
    """Returns whether `prepare` writes this name, or its temporary file `.NAME.PID.tmp`."""
    return name in _WRITTEN or (
        name[0] == "." and name.split(".")[1] in ("manifest", "plans", COMPLETE)
    )


def _reject_other_files(folder: epath.Path, names: set[str]) -> None:
    """Raises InputError if a folder without COMPLETE holds something that `prepare` did not make.

    Every `prepare` leaves its lock; without it, even a folder `dataset` is somebody else's.
    """
    if COMPLETE in names:
        return
    if strange := {name for name in names if "lock" not in names or not _is_from_prepare(name)}:
        raise InputError(
            f"{folder}: holds {min(strange)}, which `prepare` did not make; move it away"
        )


def _remove_leftovers(folder: epath.Path, min_parts: int = 1) -> None:
    """Removes what a failed `prepare` left; keeps finished results if there are `min_parts`."""
    parts, kept = folder / build.PARTS, {"lock"}
    if parts.exists():
        for path in parts.glob(".*"):
            path.rmtree()
        if len(list(parts.iterdir())) >= min_parts:
            kept.add(parts.name)
    for path in folder.iterdir():
        if path.name not in kept and _is_from_prepare(path.name):
            path.rmtree() if path.is_dir() else path.unlink()


def _build(
    corpus: Corpus, vocab_size: int, folder: epath.Path, runner: build.StageRunner, report: Report
) -> dict[str, Any]:
    content = build.CorpusBuilder(corpus, vocab_size, folder, runner, report).build()
    manifest = with_checksum({"format_version": FORMAT_VERSION, **content})
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    mark_complete(folder)
    (folder / build.PARTS).rmtree()
    for split, counts in manifest["splits"].items():
        share = counts["unknown_tokens"] / counts["tokens"]
        numbers = ", ".join(f"{counts[n]} {n}" for n in ("documents", "sentences", "tokens"))
        report(f"prepare: {split}: {numbers}, {share:.1%} of them unknown")
        if (
            share > tokenizer.MAX_UNKNOWN_SHARE and not corpus.unknown_word
        ):  # with one, [UNK] is meant
            report(
                f"prepare: warning: {share:.0%} of {split} is [UNK], and is lost: the vocabulary "
                "is made for other text or another script, or too small for its letters (`bert-jax "
                "doctor` names some); without a base, corpus.tokenizer=train trains one on it"
            )
    return manifest


def _prepare_in_bucket(
    corpus: Corpus, vocab_size: int, folder: epath.Path, runner: build.StageRunner, report: Report
) -> dict[str, Any]:
    """Makes a bucket's corpus on this machine and sends it; or checks one that exists.

    After an interruption, finished and sent files are neither made nor sent again.
    """
    storage = storage_of(folder)
    if mirror.OWNER not in (names := storage.names(folder)):  # not sent by an earlier `prepare`
        _reject_other_files(folder, names)
    if COMPLETE in names:
        return _reuse(corpus, vocab_size, folder, report)
    buckets.require_writable(folder)  # checked first: to read the text may take hours
    with copies.lock_corpus_copy(folder) as copy:
        if storage.exists(folder / COMPLETE):  # completed while this process waited for the copy
            return _reuse(corpus, vocab_size, folder, report)
        local = copy.parent / f"{copy.name}.made"
        if is_complete(local):  # left by a `prepare` that ended while sending
            try:
                files = _reuse(corpus, vocab_size, local, report)["files"]
                _require_intact(local, files, "", "full")
            except InputError:
                local.rmtree()
        manifest = prepare(corpus, vocab_size, local, report, runner.workers, runner.beam)
        report(f"prepare: sending the corpus to {folder}")
        storage.write(folder / mirror.OWNER, Holder.this_process().text())
        copies.upload_all(local, folder, manifest["files"], report)
        buckets.remove(
            folder / name  # left by another `prepare` that failed
            for name in buckets.list_objects(folder)
            if name.split("/")[0] in ("tokenizer", "dataset", "stream", COUNTS_FILE)
            and name not in manifest["files"]
        )
        storage.write(folder / "manifest.json", (local / "manifest.json").read_text())
        storage.write(folder / COMPLETE, "")
        (local / "dataset").rmtree()  # the bucket has it now
        copy.rmtree(missing_ok=True)
        local.rename(copy)
        return manifest
