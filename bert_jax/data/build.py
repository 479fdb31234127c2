"""The stages of `prepare`: read the text, train a vocabulary, write ids into shards.

Each stage is a list of work items (defined in data.parts), which run in this process, in worker
processes or in Beam. Their results are merged in the order of the text, so the output has the same
bytes wherever they ran. Memory does not depend on the size of the corpus, except for 12 bytes per
document, and 50 more if near duplicates are dropped.

WordPiece splits text into words before it looks at a vocabulary. So the text is read once, as
indices of words, which become token ids when the vocabulary is known. For other tokenizers the text
is read as token ids, and once before that to count words if the tokenizer is trained.
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
from bert_jax.data import beam, dataset, near_duplicates, parts, stream, work_items
from bert_jax.data.dataset import SPLITS
from bert_jax.data.work_items import StageProgress, WorkItem, local_file
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.storage.storage import LocalStorage
from bert_jax.text import documents, tokenizer, tokenizer_training, vocabulary, words
from bert_jax.text import sources as text_sources

Record = dict[str, Any]
Result = tuple[WorkItem, Record]  # an item that was run, with its record
Report = Callable[[str], None]

# With fewer held-out documents, all sentence pairs come from a few topics and authors.
LEAST_VALIDATION_DOCUMENTS = 8
# Minimum number of training documents of each source of a mixture: the random second segment of a
# pair comes from another document.
_LEAST_DOCUMENTS_PER_SOURCE = 2

# Advice for text that is one document, or a few.
DOCUMENT_ADVICE = (
    "A file is one document unless blank lines separate documents "
    "(corpus.layout=sentences_by_line), certain lines begin a document "
    "(corpus.document_starts=headings, or a regular expression), or long texts are cut "
    "(corpus.cut_documents=100, a number of sentences)"
)

# Languages in which sentencex finds no sentence ends: Thai, Lao, Khmer, Tibetan, Dzongkha.
_NO_SENTENCE_ENDS = ("th", "lo", "km", "bo", "dz")

# The number of a document's split that is in none; see `parts.WriteShards`.
DROPPED = len(SPLITS)

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
            f"{LEAST_VALIDATION_DOCUMENTS}. {DOCUMENT_ADVICE}"
        )
    if held_out > len(unique) // 2:
        raise InputError(
            f"corpus.validation_share={corpus.validation_share}: would hold out {held_out} of "
            f"{len(unique)} documents"
        )
    splits = (hashes <= unique[held_out - 1]).astype(np.uint8)
    if corpus.repeated_documents == "drop":
        splits[np.delete(np.arange(len(hashes)), first)] = DROPPED
    return len(hashes) - len(unique), splits


@dataclasses.dataclass(frozen=True)
class StageRunner:
    """Runs the work items of a stage."""

    workers: int = 1  # processes of this machine
    beam: str | None = None  # a Beam runner and its options, used instead; None: no Beam

    def __call__(self, stage: str, items: Sequence[WorkItem], report: Report) -> list[Result]:
        """Returns the items with their records, in their order."""
        if self.beam is None:
            progress = StageProgress(f"prepare: {stage}", report)
            records = work_items.run(items, self.workers, progress)
        else:
            report(f"prepare: {stage} with Beam")
            records = beam.run(items, self.beam)
        return [*zip(items, records, strict=True)]

    def choose_folder(self, scratch: pathlib.Path) -> str:
        """Returns the parent of the items' folders, which all workers see; creates `scratch`."""
        scratch.mkdir(parents=True, exist_ok=True)
        shared = "" if self.beam is None else beam.shared_folder(self.beam)
        return shared or str(scratch.absolute())


class CorpusBuilder:
    """Makes tokenizer, dataset and streams in a local corpus folder; the caller deletes PARTS."""

    def __init__(
        self, corpus: Corpus, vocab_size: int, folder: epath.Path, run: StageRunner, report: Report
    ):
        self._corpus, self._vocab_size, self._folder = corpus, vocab_size, folder
        self._run, self._report = run, report
        self._scratch = pathlib.Path(folder) / PARTS
        self._location = run.choose_folder(self._scratch)

    def build(self) -> dict[str, Any]:
        """Returns the manifest: settings, sources, counts, versions, and the hash of every file."""
        corpus = self._corpus
        tok = None if corpus.tokenizer == "train" else _load_tokenizer(corpus, self._vocab_size)
        sources = text_sources.fingerprint(corpus)
        evaluation = near_duplicates.fingerprint_evaluation(corpus)
        self._check_sources()
        # In a mixture no part holds text of two sources.
        planned = [
            parts.plan(c) for c in (corpus.split_by_source() if corpus.is_mixed else (corpus,))
        ]
        all_parts = [*itertools.chain.from_iterable(planned)]
        files, count = pluralize(len(sources), "file"), pluralize(len(all_parts), "part")
        self._report(f"prepare: reading {files}, in {count}")
        shared = None  # the tokenizer, saved for the workers
        if (tok.kind if tok else corpus.tokenizer_kind) != "wordpiece":
            tok = tok or self._train(self._count_words(all_parts))
            shared = self._share(tok)
        read = self._read_parts(all_parts, shared)
        repeated, all_splits = self._assign_splits(read)
        dropped = self._drop_similar(read, all_splits, shared, evaluation)
        counts = [len(self._open_part(item, "documents.bin", parts.DOCUMENT)) for item, _ in read]
        splits = np.split(all_splits, np.cumsum(counts)[:-1])
        layouts = collections.Counter[str]()
        for _, record in read:
            layouts.update(record["layouts"])
        read_as = ", ".join(f"{name} ({count})" for name, count in layouts.items())
        count = pluralize(sum(map(len, splits)), "document")
        self._report(f"prepare: {count}, {repeated:,} repeated; read as {read_as}")
        if tok is None or shared is None:
            tok = tok or self._train(read)
            shared = self._share(tok)
        writing = [
            parts.WriteShards(self._location, item, shared, document_splits)
            for (item, _), document_splits in zip(read, splits, strict=True)
        ]
        written = self._run("writing the dataset", writing, self._report)
        counts = self._assemble_dataset(written, tok.size)
        mixture = self._count_documents(written, [*map(len, planned)])
        for split in SPLITS:
            path = self._folder / "stream" / split
            stream.write(dataset.folder_of(self._folder), split, path, tok.size)
        records = [record for _, record in read]
        hashes = {path: sha256 for record in records for path, sha256 in record["sources"].items()}
        for row in sources:
            row["sha256"] = hashes.get(row["file"]) or text_sources.sha256(row["file"])
            row["file"] = source_name(row["file"])
        return {
            "settings": {**settings_of(corpus), "vocab_size": self._vocab_size},
            "sources": sources,
            "tokenizer": {"kind": tok.kind, "case": tok.case, "sha256": tok.sha256},
            "documents_repeated": repeated,
            "documents_empty": sum(record["empty"] for record in records),
            "documents_excluded": sum(record["excluded"] for record in records),
            **dropped,
            "layouts": dict(layouts),
            "splits": counts,
            **mixture,
            "files": hash_files(self._folder),
            "versions": {
                name: importlib.metadata.version(name)
                for name in ("bert-jax", "sentencex", "sentencepiece", "numpy")
            },
        }

    def _check_sources(self) -> None:
        """Reads one document of every source, to reject a missing field before hours of reading."""
        corpus = self._corpus
        if corpus.language.partition("-")[0] in _NO_SENTENCE_ENDS:
            self._report(
                f"prepare: no sentence ends are known for corpus.language={corpus.language}: each "
                "paragraph is one sentence, unless corpus.layout=sentences_by_line"
            )
        for source in corpus.split_by_source():
            extents = () if source.sources[0].startswith("text:") else documents.extents(source)
            for extent in itertools.islice(extents, 1):
                next(documents.read_extent(extent, source), None)
        for line in text_sources.describe_unread(corpus):
            self._report(f"prepare: {printable(line)}")

    def _count_words(self, planned: Sequence[parts.Part]) -> list[Result]:
        """Counts words to train a tokenizer that is not WordPiece."""
        items = [parts.CountWords(self._location, self._corpus, part) for part in planned]
        results = self._run("counting words", items, self._report)
        if not self._corpus.cut_documents:  # only for its error, if the documents are too few
            count = sum(record["documents"] for _, record in results)
            assign_splits(np.arange(count), self._corpus)
        return results

    def _train(self, counted: Sequence[Result]) -> tokenizer.Tokenizer:
        """Trains a tokenizer on the words that the items have counted."""
        corpus, size = self._corpus, self._vocab_size
        counts = [
            (local_file(item, "counts.json", self._scratch), record["offsets"])
            for item, record in counted
        ]
        word_counts = words.count(counts)
        subset = "all of them"
        if len(word_counts.words) < word_counts.distinct_words:
            subset = f"the {len(word_counts.words):,} most frequent"
        self._report(
            f"prepare: {word_counts.distinct_words:,} different words; training a "
            f"{corpus.tokenizer_kind} vocabulary of {size} tokens on {subset}"
        )
        trained_tokenizer = tokenizer_training.train(word_counts, size, corpus)
        names = {trained_tokenizer.token(number) for number in range(trained_tokenizer.size)}
        # [unused] tokens in addition to those that corpus.unused_pieces asks for.
        fillers = len(names.intersection(vocabulary.unused(size))) - corpus.unused_pieces
        if fillers:
            self._report(
                f"prepare: the text yields a vocabulary of {size - fillers:,} tokens, and "
                f"{fillers:,} [unused] ones fill it up; model.vocab_size={size - fillers} avoids "
                "them"
            )
        return trained_tokenizer

    def _share(self, tok: tokenizer.Tokenizer) -> parts.SharedTokenizer:
        """Saves the tokenizer, and a copy for workers that do not see the corpus folder."""
        saved = self._folder / "tokenizer"
        tok.save(saved)
        if "://" not in self._location:
            return parts.SharedTokenizer(os.path.abspath(saved), tok.sha256)
        shared = epath.Path(self._location) / f"tokenizer-{tok.sha256[:20]}"
        for path in saved.iterdir():
            (shared / path.name).write_bytes(path.read_bytes())
        return parts.SharedTokenizer(str(shared), tok.sha256)

    def _read_parts(
        self, planned: Sequence[parts.Part], shared: parts.SharedTokenizer | None
    ) -> list[Result]:
        """Reads the text as ids or, without a tokenizer, as indices of words."""
        corpus, location = self._corpus, self._location
        items = [parts.Read(location, corpus, part, shared) for part in planned]
        # Their folders, if there are any, are of this corpus and stay.
        counting = [parts.CountWords(location, corpus, part) for part in planned]
        self._remove_other_parts({item.name for item in (*items, *counting)})
        results = self._run("tokenizing" if shared else "reading", items, self._report)
        long_words, replaced, empty, excluded = (
            sum(record[name] for _, record in results)
            for name in ("long_words", "replaced", "empty", "excluded")
        )
        if long_words:
            untrained = ", and no vocabulary is trained on them"
            untrained = untrained if corpus.tokenizer == "train" else ""
            # For example Base64, DNA, scripts without blanks.
            self._report(
                f"prepare: {pluralize(long_words, 'word')} of over {tokenizer.MAX_WORD} "
                f"characters: become [UNK]{untrained}; `bert-jax doctor EXPERIMENT` examines "
                "the text"
            )
        if replaced:
            self._report(
                f"prepare: {pluralize(replaced, 'replacement character')} where bytes are not "
                f"{corpus.encoding} (corpus.encoding_errors=replace)"
            )
        if empty:
            self._report(f"prepare: skipped {pluralize(empty, 'empty document')}")
        if excluded:
            self._report(f"prepare: excluded {pluralize(excluded, 'document')} by corpus.quality")
        return results

    def _remove_other_parts(self, names: set[str]) -> None:
        """Removes the parts that an earlier `prepare` with other text or settings left."""
        for path in self._scratch.iterdir():
            if path.name in names or path.name.startswith(("shards-", "compared-")):
                continue
            if path.is_dir():
                shutil.rmtree(path)
            else:  # Beam's record of an error
                path.unlink()

    def _assign_splits(self, read: Sequence[Result]) -> tuple[int, np.ndarray]:
        """Returns the number of repeated documents, and the splits of all documents."""
        tables = [self._open_part(item, "documents.bin", parts.DOCUMENT) for item, _ in read]
        return assign_splits(np.concatenate([table["hash"] for table in tables]), self._corpus)

    def _drop_similar(
        self,
        read: Sequence[Result],
        splits: np.ndarray,
        shared: parts.SharedTokenizer | None,
        evaluation: tuple[tuple[str, str], ...],
    ) -> Record:
        """Drops near duplicates and text of evaluation sets; returns counts for the manifest.

        The first of several near duplicates stays, where held-out documents come before others.
        """
        if not near_duplicates.is_used(self._corpus):
            return {}
        settings = self._corpus.case, shared, evaluation
        items = [
            near_duplicates.CompareDocuments(self._location, item, *settings) for item, _ in read
        ]
        compared = self._run("comparing documents", items, self._report)
        counts: Record = {}
        if evaluation:
            flags = [self._open_part(item, "contaminated.bin", np.bool_) for item, _ in compared]
            counts["documents_contaminated"] = _drop(splits, np.concatenate(flags))
            counts["evaluation_files"] = [
                {"file": source_name(path), "sha256": sha256} for path, sha256 in evaluation
            ]
        if self._corpus.near_duplicates == "drop":
            files = [self._open_part(item, "bands.bin", np.uint64) for item, _ in compared]
            bands = [file.reshape(near_duplicates.BANDS, -1) for file in files]
            order = np.argsort(splits != SPLITS.index("validation"), kind="stable")
            is_later = near_duplicates.find_later_duplicates(bands, order)
            counts["documents_near_duplicate"] = _drop(splits, is_later)
        for name, count in counts.items():
            if name.startswith("documents_"):
                kind = name.removeprefix("documents_").replace("_", "-")
                self._report(f"prepare: dropped {pluralize(count, f'{kind} document')}")
        return counts

    def _open_part(self, item: WorkItem, file: str, dtype: Any) -> np.ndarray:
        """Maps a file of a work item's folder."""
        return parts.map_file(local_file(item, file, self._scratch), dtype)

    def _assemble_dataset(
        self, written: Sequence[Result], vocab_size: int
    ) -> dict[str, dict[str, int]]:
        """Assembles the dataset from the written shards; returns the counts of each split."""
        counts = {split: dict.fromkeys(dataset.COUNT_NAMES, 0) for split in SPLITS}
        shards = {split: list[tuple[pathlib.Path, dict[str, int]]]() for split in SPLITS}
        for item, record in written:
            for split, counted in record.items():
                for name in dataset.COUNT_NAMES:
                    counts[split][name] += counted[name]
                shards[split].append((local_file(item, split, self._scratch), counted))
        for split in SPLITS:
            if not counts[split]["tokens"]:
                raise InputError(
                    f"corpus.sources: no text is left for the {split} split: none of its documents "
                    f"in {', '.join(self._corpus.sources)} holds a character that the tokenizer "
                    "keeps"
                )
        id_dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        dataset.assemble(dataset.folder_of(self._folder), shards, id_dtype)
        return counts

    def _count_documents(self, written: Sequence[Result], part_counts: list[int]) -> Record:
        """Returns how many training documents each source of a mixture has, for the manifest."""
        if not self._corpus.is_mixed:
            return {}
        counts = (record.get("train", {"documents": 0})["documents"] for _, record in written)
        # Each sum takes the next parts of the iterator.
        document_counts = [sum(itertools.islice(counts, number)) for number in part_counts]
        for source, count in zip(self._corpus.source_labels, document_counts, strict=True):
            if count < _LEAST_DOCUMENTS_PER_SOURCE:
                raise InputError(
                    f"corpus.mixture: {source} has {pluralize(count, 'document')} to train on, and "
                    f"{_LEAST_DOCUMENTS_PER_SOURCE} are needed; give it more text, or remove it"
                )
        return {"documents_of_sources": document_counts}


def _drop(splits: np.ndarray, are_unwanted: np.ndarray) -> int:
    """Drops documents from their splits; returns how many were not dropped before."""
    count = int((are_unwanted & (splits != DROPPED)).sum())
    splits[are_unwanted] = DROPPED
    return count


def _load_tokenizer(corpus: Corpus, vocab_size: int) -> tokenizer.Tokenizer:
    """Loads the tokenizer that the user gave; raises InputError if it does not fit."""
    loaded = tokenizer.load(corpus.tokenizer, corpus.case)
    if loaded.size != vocab_size:
        raise InputError(
            f"corpus.tokenizer={corpus.tokenizer}: has {loaded.size} ids and "
            f"model.vocab_size={vocab_size}; set model.vocab_size={loaded.size}"
        )
    if loaded.case != corpus.case and loaded.kind != "library":
        raise InputError(
            f"corpus.tokenizer={corpus.tokenizer}: is {loaded.case}; set corpus.case={loaded.case}"
        )
    return loaded


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
