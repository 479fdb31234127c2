"""`prepare`: documents to a TFDS dataset of ids, made once and recognised afterwards.

    corpus/manifest.json    what went in (sources with hashes), what came out (counts, files with
                            hashes), versions
    corpus/tokenizer/       the tokenizer, trained here or copied
    corpus/dataset/         the TFDS dataset (see data.dataset)
    corpus/stream/          its splits as flat memory-mapped ids (see data.stream)
    corpus/plans.json       how many rows first plans have (see data.plans)
    corpus/parts/           while it is made: what is whole of it (see data.parts)
    corpus/COMPLETE         written last

How it is made: see data.build. A corpus in a bucket is made on this machine and sent there;
each host that reads it keeps a copy (see storage.copies).
"""

import contextlib
import dataclasses
import json
import os
import shutil
from collections.abc import Callable
from typing import Any, Literal

from etils import epath

from bert_jax.config import Corpus, Experiment, source_name
from bert_jax.data import build, dataset, mixture, pairs, plans, sentences, stream
from bert_jax.errors import InputError, Unavailable, printable
from bert_jax.storage import buckets, copies, mirror
from bert_jax.storage.storage import storage_of
from bert_jax.storage.workdir import (
    COMPLETE,
    Holder,
    is_complete,
    lock,
    mark_complete,
    parse_json,
    translate_os_errors,
    with_checksum,
    write_atomic,
)
from bert_jax.text import sources as text_sources
from bert_jax.text import tokenizer

FORMAT_VERSION = 3
COUNTS = "plans.json"

# Whole parts from which on bad input was met after long work, which is kept: of a small text
# there is one that was read, and one that was written.
_LONG_WORK = 3

# Up to this many bytes a file is read in full at every opening: a few hundredths of a second.
_SMALL = 1 << 25
# Seconds for which a bucket may be out of reach where its text is compared, and not read.
_SECONDS = 10.0
# The field by which users choose the folder.
_SETTING = "run.corpus_dir"

Say = Callable[[str], None]


class Changed(InputError):
    """A corpus was prepared, of the same settings, from text or a tokenizer that changed since."""


def prepare(
    corpus: Corpus,
    vocab_size: int,
    folder: epath.Path,
    say: Say,
    workers: int = 1,
    beam: str | None = None,
) -> dict[str, Any]:
    """Makes the corpus folder, or finds that it is there; returns its manifest.

    The same bytes are made, no matter which processes do the work. What is whole of an earlier
    `prepare` that was killed or failed is used.

    The tokenizer must have `vocab_size` ids. `beam` is a runner of Apache Beam and its options, in
    place of so many processes, `workers`, of this machine.

    Raises:
      Unavailable: a bucket or a worker failed; run again to go on.
    """
    run = build.PartRunner(workers, beam)
    storage = storage_of(folder)
    if storage.is_bucket:
        return _prepare_there(corpus, vocab_size, folder, run, say)
    with translate_os_errors(folder):
        _require_ours(folder, storage.names(folder))
        if is_complete(folder):  # without its lock: runs may share a folder they cannot write
            return _found(corpus, vocab_size, folder, say)
        with lock(folder, setting=_SETTING):
            if is_complete(folder):  # by now
                return _found(corpus, vocab_size, folder, say)
            _remove_leftovers(folder)
            try:
                return _build(corpus, vocab_size, folder, run, say)
            except BaseException as error:
                if not is_complete(folder):
                    # Of bad input nothing stays, unless it was met after long work.
                    least = _LONG_WORK if isinstance(error, InputError) else 1
                    _remove_leftovers(folder, least)
                raise


def verify(folder: epath.Path) -> None:
    """Reads all files of a corpus; of one in a bucket, those of this host's copy."""
    folder = local_corpus(folder)
    manifest = open_manifest(folder)
    # A copy has no dataset.
    for below in ("tokenizer/", "stream/", *["dataset/"] * (folder / "dataset").exists()):
        _require(folder, manifest["files"], below, "full")


def local_corpus(folder: epath.Path, say: Say | None = None) -> epath.Path:
    """Returns a corpus folder that can be read: itself, or this host's copy of one in a bucket.

    Of a copy, what is missing or damaged is copied again; other processes of this host wait.

    Raises:
      Unavailable: the bucket is out of reach, or the disk full; what was copied stays.
    """
    if not storage_of(folder).is_bucket:
        return folder
    manifest = open_manifest(folder)
    text, listed = json.dumps(manifest, indent=2) + "\n", manifest["files"]
    with copies.copy_of(folder) as copy:
        path = copy / "manifest.json"
        if not path.exists() or path.read_bytes() != text.encode():
            copy.rmtree(missing_ok=True)  # of another corpus
            copy.mkdir(parents=True)
            write_atomic(path, text)
        files = {n: entry for n, entry in listed.items() if not n.startswith("dataset/")}
        wanted = [n for n, entry in files.items() if _damage(copy / n, entry, "cheap")]
        copies.fetch_all(
            folder,
            copy,
            wanted,
            lambda name, file: _damage(file, listed[name], "full"),
            "put the whole object back, or remove the corpus to prepare it again",
            say,
        )
        with contextlib.suppress(Unavailable):  # else they are counted here
            plans.add_counts(copy / COUNTS, plans.read_counts(folder / COUNTS))
        mark_complete(copy)
        return copy


def _found(corpus: Corpus, vocab_size: int, folder: epath.Path, say: Say) -> dict[str, Any]:
    manifest = open_manifest(folder)
    _require_same(manifest, corpus, vocab_size, folder, say)
    if not storage_of(folder).is_bucket:
        shutil.rmtree(folder / build.PARTS, ignore_errors=True)  # of one killed at its very end
    return manifest


def open_manifest(folder: epath.Path) -> dict[str, Any]:
    """Returns the manifest of a complete corpus, here or in a bucket."""
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
        f"go on with the bert-jax that wrote it; for new runs choose another {_SETTING}, or remove "
        f"{folder} to prepare it again",
        "put the whole file back",
        seal="required",
    )
    for name in manifest["files"]:
        if os.path.isabs(name) or ".." in name.split("/"):
            raise InputError(f"{path}: names {name}, which lies elsewhere; put the whole file back")
    return manifest


def open_tokenizer(folder: epath.Path, manifest: dict[str, Any]) -> tokenizer.Tokenizer:
    """Returns the tokenizer the corpus was made with."""
    # First: what is wrong with a damaged vocabulary is no fault of its author.
    _require(folder, manifest["files"], "tokenizer/", "cheap")
    loaded = tokenizer.load(folder / "tokenizer")
    if loaded.sha256 != manifest["tokenizer"].get("sha256"):
        raise InputError(f"{folder / 'tokenizer'}: {_mend(folder, 'tokenizer')}")
    return loaded


def open_stream(folder: epath.Path, split: str) -> stream.Stream:
    """Returns a split as flat ids, made from the dataset if it was removed."""
    manifest, target = open_manifest(folder), folder / "stream" / split
    depth = "cheap"
    if not is_complete(target):
        with lock(folder, setting=_SETTING):
            if not is_complete(target):
                for place in (target.parent, target):
                    if os.path.islink(place):  # what lies where it leads would be removed
                        raise InputError(f"{place}: is a link; remove it, it is made again")
                depth = "full"
                _require(folder, manifest["files"], "dataset/", depth)
                vocab_size = manifest["settings"]["vocab_size"]
                stream.write(dataset.folder_of(folder), split, target, vocab_size)
    _require(folder, manifest["files"], f"stream/{split}/", depth)
    return stream.Stream.open(target)


def require_rows(folder: epath.Path, experiment: Experiment) -> None:
    """Raises InputError if a split of a corpus gives no row, as a run of the experiment would."""
    data, key, folder = experiment.data, (0, 0), local_corpus(folder)
    validation, length = open_stream(folder, "validation"), data.eval_sequence_length
    if data.units != "sentences":
        pairs.sample(validation, length, data.short_seq_prob, key, 1, data.units)
    else:
        sentences.plan(validation, length, key, 1)
    train, manifest = open_stream(folder, "train"), open_manifest(folder)
    parts = mixture.of_sources(manifest, train) if experiment.corpus.mixture else []
    for number, phase in enumerate(experiment.phases):
        units, length = experiment.data_of(number).units, phase.sequence_length
        for name, part in zip(experiment.corpus.sources, parts, strict=False):
            mixture.require_row(name, part, length, units)
        if units == "sentences" and not parts:
            sentences.plan(train, length, key, 1)
        elif not parts:
            mixture.require_row("the text", train, 0, units)


def _require(
    folder: epath.Path, files: dict[str, list[Any]], below: str, depth: Literal["cheap", "full"]
) -> None:
    """Raises InputError for a file of the manifest that is not as it was made.

    Large files are looked at twice: at every opening for their size, and in full once they are
    made, copied, or asked for (`prepare --verify`), at about a gigabyte a second. All that is
    smaller is read in full at every opening. `below` is how the paths that are looked at begin.
    """
    for name, entry in files.items():
        wrong = _damage(folder / name, entry, depth) if name.startswith(below) else ""
        if wrong:
            raise InputError(
                f"{folder / name}: missing or damaged ({wrong}); {_mend(folder, name)}"
            )


def _damage(path: epath.PathLike, entry: list[Any], depth: Literal["cheap", "full"]) -> str:
    """Returns what is wrong with a local file, in words; "" if nothing is. See `_require`."""
    size, sha256 = entry
    if not os.path.isfile(path):
        return "is missing"
    if os.path.getsize(path) != size:
        return f"has {os.path.getsize(path)} bytes, not {size}"
    if (depth == "full" or size <= _SMALL) and storage_of(path).sha256(path) != sha256:
        return "was changed since it was made"
    return ""


def _mend(folder: epath.Path, name: str) -> str:
    """Returns what to do where a file of a corpus is damaged."""
    if copies.is_copy(folder):
        return f"remove {folder} and run again, it is copied again"
    return {
        "tokenizer": "not the tokenizer this corpus was made with; put that one back, or remove "
        f"{folder} to prepare it again",
        "dataset": f"put the whole file back, or remove {folder} to prepare it again",
        "stream": f"remove {folder / 'stream'} and run again, it is made again from the dataset",
    }[name.partition("/")[0]]


def _require_same(
    manifest: dict[str, Any], corpus: Corpus, vocab_size: int, folder: epath.Path, say: Say
) -> None:
    """Raises InputError if the folder was made from other text, settings or another tokenizer."""
    mend = f"choose another {_SETTING}, or remove {folder} to prepare it again"
    settings = build.settings_of(corpus)
    # What a corpus made by an earlier version has no word of was as it is by default.
    earlier = dataclasses.asdict(Corpus(sources=corpus.sources)) | manifest["settings"]
    elsewhere = earlier["sources"] != settings["sources"] and _holds(manifest, corpus)
    for name, value in {**settings, "vocab_size": vocab_size}.items():
        old = earlier.get(name)
        if name == "mixture" and (old or not value):
            continue  # whatever the weights are, the manifest says whose documents are whose
        if old != value and not (name == "sources" and elsewhere):
            raise InputError(f"{folder}: prepared with {name}={old!r}, now {value!r}; {mend}")
    # A corpus may be carried to a machine that has neither its text nor its vocabulary file.
    given = corpus.tokenizer
    if given != "train" and not epath.Path(given).exists():
        say(f"corpus: used as prepared; there is no {given} to compare with")
    elif given != "train" and (
        tokenizer.load(given, corpus.case).sha256 != manifest["tokenizer"].get("sha256")
    ):
        raise Changed(f"{folder}: {given} has changed since; {mend}")
    if elsewhere:
        return
    try:
        sources = text_sources.fingerprint(corpus, _SECONDS)
        unread = text_sources.left_out(corpus, _SECONDS)
    except (InputError, Unavailable) as error:
        say(f"corpus: used as prepared; its text cannot be compared ({error})")
        return
    old_files = {row["file"]: row for row in manifest["sources"]}
    new_files = {source_name(row["file"]): row for row in sources}
    for file in sorted(old_files.keys() | new_files.keys()):
        if not _is_same_file(old_files.get(file), new_files.get(file)):
            change = "is new" if file not in old_files else "is gone"
            change = "has changed" if file in old_files.keys() & new_files.keys() else change
            raise Changed(f"{folder}: {file} {change} since this corpus was prepared; {mend}")
    for line in unread:
        say(f"corpus: {printable(line)}")


def is_made_of(folder: epath.Path, corpus: Corpus) -> bool:
    """Returns whether a corpus was made of what sources hold, file by file, wherever it lay."""
    return storage_of(folder).exists(folder / COMPLETE) and _holds(open_manifest(folder), corpus)


def _holds(manifest: dict[str, Any], corpus: Corpus) -> bool:
    old, words = manifest["sources"], [source.partition(":")[0] for source in corpus.sources]
    if words != [source.partition(":")[0] for source in manifest["settings"]["sources"]]:
        return False
    try:
        new = text_sources.fingerprint(corpus, _SECONDS)
    except (InputError, Unavailable):
        return False
    return len(old) == len(new) and all(map(_is_same_file, old, new))


def _is_same_file(old: dict[str, Any] | None, new: dict[str, Any] | None) -> bool:
    """Returns whether a source is what it was; it is read only where its date is another one."""
    if old is None or new is None or old.get("bytes") != new["bytes"]:
        return False
    return old.get("mtime_ns") == new["mtime_ns"] or old.get("sha256") == text_sources.sha256(
        new["file"]
    )


# What `prepare` writes, or wrote once.
_OURS = {"manifest.json", "tokenizer", "dataset", "stream", COUNTS, build.PARTS, "lock"}
_OURS |= {COMPLETE, "croissant.json"}


def _is_ours(name: str) -> bool:
    """Returns whether `prepare` makes files of this name; a kill leaves `.NAME.PID.tmp`."""
    return name in _OURS or (
        name[0] == "." and name.split(".")[1] in ("manifest", "plans", COMPLETE)
    )


def _require_ours(folder: epath.Path, names: set[str]) -> None:
    """Raises InputError if something lies in a folder that `prepare` did not make.

    Every `prepare` leaves its lock, so without one even a `dataset` is somebody else's.
    """
    began = bool(names & {"lock", COMPLETE})
    strange = {name for name in names if not (began and _is_ours(name))}
    if strange and COMPLETE not in names:
        raise InputError(
            f"{folder}: holds {min(strange)}, which `prepare` did not make; move it away"
        )


def _remove_leftovers(folder: epath.Path, least: int = 1) -> None:
    """Clears what a `prepare` left that was killed or failed; `least` whole parts or more stay."""
    parts, kept = folder / build.PARTS, {"lock"}
    if parts.exists():
        for path in parts.glob(".*"):
            path.rmtree()
        if len(list(parts.iterdir())) >= least:
            kept.add(parts.name)
    for path in folder.iterdir():
        if path.name not in kept and _is_ours(path.name):
            path.rmtree() if path.is_dir() else path.unlink()


def _build(
    corpus: Corpus, vocab_size: int, folder: epath.Path, run: build.PartRunner, say: Say
) -> dict[str, Any]:
    # Before the text is read, which may take hours.
    given = None if corpus.tokenizer == "train" else _given_tokenizer(corpus, vocab_size)
    made = build.build(corpus, vocab_size, folder, given, run, say)
    manifest = with_checksum({"format_version": FORMAT_VERSION, **made})
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    mark_complete(folder)
    (folder / build.PARTS).rmtree()
    for split, counts in manifest["splits"].items():
        share = counts["unknown_tokens"] / counts["tokens"]
        numbers = ", ".join(
            f"{counts[name]} {name}" for name in ("documents", "sentences", "tokens")
        )
        say(f"prepare: {split}: {numbers}, {share:.1%} of them unknown")
        if share > tokenizer.MOST_UNKNOWN and not corpus.unknown_word:
            say(
                f"prepare: warning: {share:.0%} of {split} is [UNK], and is lost: the vocabulary "
                "is of other text or another script, or too small for its letters "
                "(`bert-jax doctor` names some); corpus.tokenizer=train makes one of this text"
            )
    return manifest


def _prepare_there(
    corpus: Corpus, vocab_size: int, folder: epath.Path, run: build.PartRunner, say: Say
) -> dict[str, Any]:
    """Makes the corpus of a bucket on this machine, and sends it; or finds that it is there.

    What was made or sent before a break is neither made nor sent again.
    """
    storage = storage_of(folder)
    names = storage.names(folder)
    if mirror.OWNER not in names:
        _require_ours(folder, names)
    if COMPLETE in names:
        return _found(corpus, vocab_size, folder, say)
    buckets.require_writable(folder)  # before the text is read, which may take hours
    with copies.copy_of(folder) as copy:
        if storage.exists(folder / COMPLETE):  # by now
            return _found(corpus, vocab_size, folder, say)
        made = copy.parent / f"{copy.name}.made"
        if is_complete(made):  # as a `prepare` that ended while sending leaves it
            try:
                manifest = _found(corpus, vocab_size, made, say)
                _require(made, manifest["files"], "", "full")
            except InputError:
                made.rmtree()
        manifest = prepare(corpus, vocab_size, made, say, run.workers, run.beam)
        say(f"prepare: sending the corpus to {folder}")
        storage.write(folder / mirror.OWNER, Holder.me().text())
        copies.send_all(made, folder, manifest["files"], say)
        buckets.remove(
            folder / name  # of another `prepare`, which did not end
            for name in buckets.listing(folder)
            if name.split("/")[0] in ("tokenizer", "dataset", "stream", COUNTS)
            and name not in manifest["files"]
        )
        storage.write(folder / "manifest.json", (made / "manifest.json").read_text())
        storage.write(folder / COMPLETE, "")
        (made / "dataset").rmtree()  # only now that there is another
        copy.rmtree(missing_ok=True)
        made.rename(copy)
        return manifest


def _given_tokenizer(corpus: Corpus, vocab_size: int) -> tokenizer.Tokenizer:
    chosen = tokenizer.load(corpus.tokenizer, corpus.case)
    if chosen.size != vocab_size:
        raise InputError(
            f"corpus.tokenizer={corpus.tokenizer}: has {chosen.size} ids and "
            f"model.vocab_size={vocab_size}; set model.vocab_size={chosen.size}"
        )
    if chosen.case != corpus.case and chosen.kind != "library":
        raise InputError(
            f"corpus.tokenizer={corpus.tokenizer}: is {chosen.case}; set corpus.case={chosen.case}"
        )
    return chosen
