"""The stages of `prepare`: read the text, train a vocabulary, write ids into shards.

Each stage is a list of work items (see data.parts) that run here, in several processes or in Beam.
Their results are merged in the order of the text, so the output has the same bytes wherever they
ran. The text is read once, or twice if SentencePiece is trained. Memory does not depend on the size
of the corpus, except for 12 bytes a document.
"""

import collections
import dataclasses
import importlib.metadata
import itertools
import json
import os
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from etils import epath

from bert_jax.config import Corpus, source_name
from bert_jax.data import beam, dataset, parts, stream, work_items
from bert_jax.data.dataset import SPLITS
from bert_jax.data.work_items import StageProgress, WorkItem
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.storage.storage import LocalStorage
from bert_jax.text import documents, tokenizer, trained, vocabulary, words
from bert_jax.text import sources as text_sources

Record = dict[str, Any]
Report = Callable[[str], None]

# Fewer held-out documents tell little: their pairs share one topic and one writer.
LEAST_VALIDATION_DOCUMENTS = 8
# Training documents that each source of a mixture needs: random text is of another document.
_LEAST_MIXED = 2

# Advice for text that is one document, or a few.
ONE_FILE = (
    "A file is one document unless a blank line ends one (corpus.layout=sentences_by_line), lines "
    "begin one (corpus.document_starts=headings, or a regular expression), or long texts are cut "
    "(corpus.cut_documents=100 sentences)"
)

# Languages in which sentencex finds no sentence ends: Thai, Lao, Khmer, Tibetan, Dzongkha.
_NO_SENTENCE_ENDS = ("th", "lo", "km", "bo", "dz")

# The folder in a corpus folder that holds the results of parts until the corpus is complete.
PARTS = "parts"


def assign_splits(hashes: np.ndarray, corpus: Corpus) -> tuple[int, np.ndarray]:
    """Assigns each document to a split by the hash of its text, uint64 [documents].

    A document goes to validation if the hash of its text is among the smallest
    `Corpus.validation_share`; so equal texts share a split, and a split does not depend on order.

    Returns:
      The number of documents whose text occurred before, and uint8 [documents]: 0 train, 1
      validation, 2 dropped.
    """
    if not len(hashes):
        raise InputError(f"corpus.sources: no text in any document of {', '.join(corpus.sources)}")
    unique, first = np.unique(hashes, return_index=True)
    held_out = max(LEAST_VALIDATION_DOCUMENTS, round(corpus.validation_share * len(unique)))
    if len(unique) < 2 * LEAST_VALIDATION_DOCUMENTS:
        raise InputError(
            f"corpus.sources: {pluralize(len(unique), 'different document')}, but "
            f"{2 * LEAST_VALIDATION_DOCUMENTS} are needed, to hold out "
            f"{LEAST_VALIDATION_DOCUMENTS}. {ONE_FILE}"
        )
    if held_out > len(unique) // 2:
        raise InputError(
            f"corpus.validation_share={corpus.validation_share}: would hold out {held_out} of "
            f"{len(unique)} documents"
        )
    splits = (hashes <= unique[held_out - 1]).astype(np.uint8)
    if corpus.repeated_documents == "drop":
        splits[np.delete(np.arange(len(hashes)), first)] = 2
    return len(hashes) - len(unique), splits


def build(
    corpus: Corpus,
    vocab_size: int,
    folder: epath.Path,
    given: tokenizer.Tokenizer | None,
    run: "PartRunner",
    report: Report,
) -> dict[str, Any]:
    """Makes tokenizer, dataset and streams in a local corpus folder; its PARTS stay.

    `given` is the tokenizer; None trains one.

    Returns:
      The content of the manifest: settings, sources, counts, versions, and the hash of every file.

    Raises:
      Unavailable: a bucket or a worker failed.
    """
    scratch = pathlib.Path(folder) / PARTS
    location = run.locate(scratch)
    sources = text_sources.fingerprint(corpus)
    if corpus.language.partition("-")[0] in _NO_SENTENCE_ENDS:
        report(
            f"prepare: no sentence ends are known for corpus.language={corpus.language}: each "
            "paragraph is one sentence, unless corpus.layout=sentences_by_line"
        )
    # Reads one document of every source, to reject a missing field before hours of reading.
    for source in corpus.alone():
        extents = () if source.sources[0].startswith("text:") else documents.extents(source)
        for extent in itertools.islice(extents, 1):
            next(documents.read_extent(extent, source), None)
    # In a mixture no part holds text of two sources.
    parts_by_source = [parts.plan(c) for c in (corpus.alone() if corpus.mixture else (corpus,))]
    planned = [part for source_parts in parts_by_source for part in source_parts]
    for line in text_sources.describe_unread(corpus):
        report(f"prepare: {printable(line)}")
    files, count = pluralize(len(sources), "file"), pluralize(len(planned), "part")
    report(f"prepare: reading {files}, in {count}")
    counting: list[parts.CountStretches] = []
    if corpus.tokenizer_kind == "wordpiece" if given is None else given.kind == "wordpiece":
        # Words do not depend on the vocabulary, so the text is read once.
        stage = "reading"
        reading = [parts.Read(location, corpus, part) for part in planned]
        chosen = shared = None  # set below, when the words are known
    else:
        stage, chosen = "tokenizing", given
        counting = [parts.CountStretches(location, corpus, part) for part in planned]
        if chosen is None:
            word_counts = run("counting words", counting, report)
            if not corpus.cut_documents:  # fails before training if the documents are too few
                assign_splits(np.arange(sum(record["documents"] for record in word_counts)), corpus)
            chosen = _train(corpus, vocab_size, counting, word_counts, scratch, report)
        shared = _share(chosen, folder, location)
        reading = [parts.Read(location, corpus, part, shared, chosen.sha256) for part in planned]
    names = {item.name for item in [*counting, *reading]}
    for path in scratch.iterdir():
        # Left by an earlier `prepare` with other text or settings.
        if path.name not in names and not path.name.startswith("shards-"):
            if path.is_dir():
                shutil.rmtree(path)
            else:  # Beam's record of an error
                path.unlink()
    records = run(stage, reading, report)
    tables = [
        np.fromfile(parts.local_part(location, item.name, "documents.bin", scratch), parts.DOCUMENT)
        for item in reading
    ]
    repeated, splits = assign_splits(np.concatenate([table["hash"] for table in tables]), corpus)
    if chosen is None or shared is None:
        if long_words := sum(record["long_words"] for record in records):
            untrained = "" if given else " and train no vocabulary"
            # For example Base64, DNA, scripts without blanks.
            report(
                f"prepare: {pluralize(long_words, 'word')} of over {tokenizer.MAX_WORD} "
                f"characters: [UNK]{untrained}; `bert-jax doctor EXPERIMENT` examines the text"
            )
        chosen = given or _train(corpus, vocab_size, reading, records, scratch, report)
        shared = _share(chosen, folder, location)
    layouts = collections.Counter[str]()
    for record in records:
        layouts.update(record["layouts"])
    read_as = ", ".join(f"{name} ({count})" for name, count in layouts.items())
    count = pluralize(len(splits), "document")
    report(f"prepare: {count}, {repeated:,} repeated; read as {read_as}")
    if replaced := sum(record["replaced"] for record in records):
        report(
            f"prepare: {pluralize(replaced, 'replacement character')} where bytes are not "
            f"{corpus.encoding} (corpus.encoding_errors=replace)"
        )
    if empty := sum(record["empty"] for record in records):
        report(f"prepare: {pluralize(empty, 'document')} without any text skipped")
    splits_by_part = np.split(splits, np.cumsum([len(table) for table in tables])[:-1])
    writing = [
        parts.WriteShards(location, item.name, shared, chosen.sha256, split.tobytes(), item.bytes)
        for item, split in zip(reading, splits_by_part, strict=True)
    ]
    counts, written = _write_dataset(writing, scratch, folder, chosen.size, run, report)
    mixture = _count_documents(corpus, written, [len(p) for p in parts_by_source])
    for split in SPLITS:
        if not counts[split]["tokens"]:
            raise InputError(
                f"corpus.sources: no text is left for the {split} split: none of its documents in "
                f"{', '.join(corpus.sources)} holds a character that the tokenizer keeps"
            )
    for split in SPLITS:
        stream.write(dataset.folder_of(folder), split, folder / "stream" / split, chosen.size)
    hashes = {path: sha for record in records for path, sha in record["sources"].items()}
    for row in sources:
        row["sha256"] = hashes.get(row["file"]) or text_sources.sha256(row["file"])
        row["file"] = source_name(row["file"])
    return {
        "settings": {**settings_of(corpus), "vocab_size": vocab_size},
        "sources": sources,
        "tokenizer": {"kind": chosen.kind, "case": chosen.case, "sha256": chosen.sha256},
        "documents_repeated": repeated,
        "documents_empty": empty,
        "layouts": dict(layouts),
        "splits": counts,
        **mixture,
        "files": hash_files(folder),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("bert-jax", "sentencex", "sentencepiece", "numpy")
        },
    }


def _count_documents(corpus: Corpus, written: list[int], part_counts: list[int]) -> dict[str, Any]:
    """Returns the training documents of each source of a mixture, for the manifest.

    `written` counts the training documents of each part, `part_counts` the parts of each source.
    """
    if not corpus.mixture:
        return {}
    ends = np.cumsum([0, *written])[np.cumsum([0, *part_counts])]
    document_counts = np.diff(ends).tolist()
    for source, count in zip(corpus.sources, document_counts, strict=True):
        if count < _LEAST_MIXED:
            raise InputError(
                f"corpus.mixture: {source} has {pluralize(count, 'document')} to train on, and "
                f"{_LEAST_MIXED} are needed; give it more text, or remove it"
            )
    return {"documents_of_sources": document_counts}


def settings_of(corpus: Corpus) -> dict[str, Any]:
    """Returns the settings of a corpus as JSON values, with sources named alike on all machines."""
    settings = dataclasses.asdict(corpus) | {"sources": [*map(source_name, corpus.sources)]}
    return json.loads(json.dumps(settings))


def hash_files(folder: epath.Path) -> dict[str, list[Any]]:
    """Returns {path in the corpus folder: [bytes, SHA-256]} of all files, in order of names."""
    root = pathlib.Path(folder)
    folders = ("tokenizer", "dataset", "stream")
    paths = sorted(p for name in folders for p in (root / name).rglob("*") if p.is_file())
    sha256 = LocalStorage().sha256
    return {p.relative_to(root).as_posix(): [p.stat().st_size, sha256(p)] for p in paths}


def _share(chosen: tokenizer.Tokenizer, folder: epath.Path, location: str) -> str:
    """Saves the tokenizer; returns a folder with a copy that all workers see."""
    chosen.save(folder / "tokenizer")
    if "://" not in location:
        return os.path.abspath(folder / "tokenizer")
    shared = epath.Path(location) / f"tokenizer-{chosen.sha256[:20]}"
    for path in (folder / "tokenizer").iterdir():
        (shared / path.name).write_bytes(path.read_bytes())
    return str(shared)


def _write_dataset(
    items: Sequence[parts.WriteShards],
    scratch: pathlib.Path,
    folder: epath.Path,
    vocab_size: int,
    run: "PartRunner",
    report: Report,
) -> tuple[dict[str, dict[str, int]], list[int]]:
    """Writes the dataset; returns its counts, and each part's documents in the training split."""
    written = []
    counts = {split: dict.fromkeys(dataset.COUNTED, 0) for split in SPLITS}
    shards: dict[str, list[tuple[pathlib.Path, dict[str, int]]]] = {split: [] for split in SPLITS}
    for item, record in zip(items, run("writing the dataset", items, report), strict=True):
        written.append(record.get("train", {"documents": 0})["documents"])
        for split, counted in record.items():
            for name in dataset.COUNTED:
                counts[split][name] += counted[name]
            file = parts.local_part(item.location, item.name, split, scratch)
            shards[split].append((file, counted))
    if all(shards.values()):
        id_dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        dataset.assemble(dataset.folder_of(folder), shards, id_dtype)
    return counts, written


def _train(
    corpus: Corpus,
    vocab_size: int,
    items: Sequence[WorkItem],
    records: Sequence[Record],
    scratch: pathlib.Path,
    report: Report,
) -> tokenizer.Tokenizer:
    """Trains a tokenizer on the words that the items have counted."""
    counts = [
        (parts.local_part(item.location, item.name, "counts.json", scratch), record["offsets"])
        for item, record in zip(items, records, strict=True)
    ]
    counted = words.count(counts)
    subset = "all of them"
    if len(counted.words) < counted.different:
        subset = f"the {len(counted.words):,} commonest"
    report(
        f"prepare: {counted.different:,} different words; training a {corpus.tokenizer_kind} "
        f"vocabulary of {vocab_size} tokens on {subset}"
    )
    new = trained.train(counted, vocab_size, corpus)
    names = {new.piece(number) for number in range(new.size)}
    unused = len(names.intersection(vocabulary.unused(vocab_size)))
    lacking = unused - corpus.unused_pieces
    if lacking:
        report(
            f"prepare: the text gives {vocab_size - lacking:,} tokens, so {lacking:,} of the "
            f"vocabulary are [unused]; model.vocab_size={vocab_size - lacking} avoids them"
        )
    return new


@dataclasses.dataclass(frozen=True)
class PartRunner:
    """Runs the work items of a stage."""

    workers: int = 1  # processes of this machine
    beam: str | None = None  # a Beam runner and its options, used instead; None: no Beam

    def __call__(self, stage: str, items: Sequence[WorkItem], report: Report) -> list[Record]:
        """Returns the records of the items, in their order."""
        if self.beam is not None:
            report(f"prepare: {stage} with Beam")
            return beam.run(items, self.beam)
        return work_items.run(items, self.workers, StageProgress(f"prepare: {stage}", report))

    def locate(self, scratch: pathlib.Path) -> str:
        """Returns the folder of the items' folders, which all workers see."""
        scratch.mkdir(parents=True, exist_ok=True)
        shared = "" if self.beam is None else beam.shared_folder(self.beam)
        return shared or str(scratch.absolute())
