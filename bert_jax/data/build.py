"""The stages of `prepare`: the text is read, a vocabulary trained, ids put into shards.

Each stage is a list of tasks (see data.parts) that are done here, in several processes or by Beam,
and whose results are put together in the order of the text: so the same bytes come out however
they were done. The text is read once; a second time where SentencePiece is trained. Memory is
constant in the corpus, except 12 bytes a document.
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
from bert_jax.data import beam, dataset, parts, stream, workers
from bert_jax.data.dataset import SPLITS
from bert_jax.data.workers import Progress, Task
from bert_jax.errors import InputError, pluralize, printable
from bert_jax.storage.storage import LocalStorage
from bert_jax.text import documents, tokenizer, trained, vocabulary, words
from bert_jax.text import sources as text_sources

Say = Callable[[str], None]

# Fewer held-out documents say little: their pairs share one topic and one writer.
LEAST_VALIDATION_DOCUMENTS = 8
# Of a source of a mixture, to train on: what is drawn at random comes from another document.
_LEAST_MIXED = 2

# What to do about text that is one document, or a few.
ONE_FILE = (
    "A file is one document unless a blank line ends one (corpus.layout=sentences_by_line), lines "
    "begin one (corpus.document_starts=headings, or a regular expression), or long texts are cut "
    "(corpus.cut_documents=100 sentences)"
)

# Languages whose sentence ends sentencex does not find: Thai, Lao, Khmer, Tibetan, Dzongkha.
_NO_ENDS = ("th", "lo", "km", "bo", "dz")

# Of a corpus folder, where what parts are made into lies until all is whole.
PARTS = "parts"


def assign_splits(hashes: np.ndarray, corpus: Corpus) -> tuple[int, np.ndarray]:
    """Decides by the hashes of all texts, uint64 [documents], where each goes.

    A document goes to validation if the hash of its text is among the smallest
    `Corpus.validation_share`; so equal texts share a split, and a split does not depend on order.

    Returns:
      How many documents have a text that stood before, and uint8 [documents]: 0 train, 1
      validation, 2 nowhere.
    """
    if not len(hashes):
        raise InputError(f"corpus.sources: no text in any document of {', '.join(corpus.sources)}")
    unique, first = np.unique(hashes, return_index=True)
    wanted = max(LEAST_VALIDATION_DOCUMENTS, round(corpus.validation_share * len(unique)))
    if len(unique) < 2 * LEAST_VALIDATION_DOCUMENTS:
        raise InputError(
            f"corpus.sources: {pluralize(len(unique), 'different document')}, but "
            f"{2 * LEAST_VALIDATION_DOCUMENTS} are needed, to hold out "
            f"{LEAST_VALIDATION_DOCUMENTS}. {ONE_FILE}"
        )
    if wanted > len(unique) // 2:
        raise InputError(
            f"corpus.validation_share={corpus.validation_share}: would hold out {wanted} of "
            f"{len(unique)} documents"
        )
    splits = (hashes <= unique[wanted - 1]).astype(np.uint8)
    if corpus.repeated_documents == "drop":
        splits[np.delete(np.arange(len(hashes)), first)] = 2
    return len(hashes) - len(unique), splits


def build(
    corpus: Corpus,
    vocab_size: int,
    folder: epath.Path,
    given: tokenizer.Tokenizer | None,
    run: "PartRunner",
    say: Say,
) -> dict[str, Any]:
    """Makes tokenizer, dataset and streams in a corpus folder; PARTS stays next to them.

    The folder is a local one; `given` is the tokenizer, unless one is to be trained.

    Returns:
      What the manifest says: settings, sources, counts, versions, and the hash of every file.

    Raises:
      Unavailable: a bucket or a worker failed.
    """
    scratch = pathlib.Path(folder) / PARTS
    place = run.place(scratch)
    sources = text_sources.fingerprint(corpus)
    if corpus.language.partition("-")[0] in _NO_ENDS:
        say(
            f"prepare: no sentence ends are known of corpus.language={corpus.language}: there a "
            "paragraph is one sentence, unless corpus.layout=sentences_by_line"
        )
    # A field that is not there is refused before anything is read of another source.
    for one in corpus.alone():
        extents = () if one.sources[0].startswith("text:") else documents.extents(one)
        for extent in itertools.islice(extents, 1):
            next(documents.read_extent(extent, one), None)
    # Of a corpus that is mixed, the parts of each source by itself.
    by_source = [parts.plan(one) for one in (corpus.alone() if corpus.mixture else (corpus,))]
    planned = [part for own in by_source for part in own]
    for line in text_sources.left_out(corpus):
        say(f"prepare: {printable(line)}")
    say(f"prepare: reading {pluralize(len(sources), 'file')}, in {pluralize(len(planned), 'part')}")
    counting: list[parts.CountStretches] = []
    if corpus.tokenizer_kind == "wordpiece" if given is None else given.kind == "wordpiece":
        # Words do not depend on the vocabulary, so the text is read once.
        what = "reading"
        tasks = [parts.Read(place, corpus, part) for part in planned]
        chosen = shared = None  # they follow once the words are known
    else:
        what, chosen = "tokenizing", given
        counting = [parts.CountStretches(place, corpus, part) for part in planned]
        if chosen is None:
            counts_ = run("counting words", counting, say)
            if not corpus.cut_documents:  # before training: there are no more than these
                assign_splits(np.arange(sum(counted["documents"] for counted in counts_)), corpus)
            chosen = _train(corpus, vocab_size, counting, counts_, scratch, say)
        shared = _share(chosen, folder, place)
        tasks = [parts.Read(place, corpus, part, shared, chosen.sha256) for part in planned]
    wanted = {task.name for task in [*counting, *tasks]}
    for path in scratch.iterdir():
        # What an earlier `prepare` made of other text or settings.
        if path.name not in wanted and not path.name.startswith("shards-"):
            if path.is_dir():
                shutil.rmtree(path)
            else:  # of Beam, why one was not made
                path.unlink()
    records = run(what, tasks, say)
    tables = [
        np.fromfile(parts.local_part(place, task.name, "documents.bin", scratch), parts.DOCUMENT)
        for task in tasks
    ]
    repeated, splits = assign_splits(np.concatenate([table["hash"] for table in tables]), corpus)
    if chosen is None or shared is None:
        if long_words := sum(record["long_words"] for record in records):
            untrained = "" if given else " and train no vocabulary"
            # Base64, DNA, scripts without blanks.
            say(
                f"prepare: {pluralize(long_words, 'word')} of over {tokenizer.MAX_WORD} "
                f"characters: [UNK]{untrained}; `bert-jax doctor EXPERIMENT` looks at the text"
            )
        chosen = given or _train(corpus, vocab_size, tasks, records, scratch, say)
        shared = _share(chosen, folder, place)
    layouts = collections.Counter[str]()
    for record in records:
        layouts.update(record["layouts"])
    read_as = ", ".join(f"{name} ({count})" for name, count in layouts.items())
    say(f"prepare: {pluralize(len(splits), 'document')}, {repeated:,} repeated; read as {read_as}")
    if replaced := sum(record["replaced"] for record in records):
        say(
            f"prepare: {pluralize(replaced, 'replacement character')} where bytes are not "
            f"{corpus.encoding} (corpus.encoding_errors=replace)"
        )
    if empty := sum(record["empty"] for record in records):
        say(f"prepare: {pluralize(empty, 'document')} without any text left out")
    of_parts = np.split(splits, np.cumsum([len(table) for table in tables])[:-1])
    writing = [
        parts.WriteShards(place, task.name, shared, chosen.sha256, split.tobytes(), task.bytes)
        for task, split in zip(tasks, of_parts, strict=True)
    ]
    counts, written = _write_dataset(writing, scratch, folder, chosen.size, run, say)
    mixed = _mixed(corpus, written, [len(own) for own in by_source])
    for split in SPLITS:
        if not counts[split]["tokens"]:
            raise InputError(
                f"corpus.sources: no text is left for the {split} split: no document there of "
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
        **mixed,
        "files": listed(folder),
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("bert-jax", "sentencex", "sentencepiece", "numpy")
        },
    }


def _mixed(corpus: Corpus, written: list[int], parts_of_sources: list[int]) -> dict[str, Any]:
    """Returns how many documents of the training split, of `written` in each part, each source of
    a mixture has, which is of so many parts.
    """
    if not corpus.mixture:
        return {}
    ends = np.cumsum([0, *written])[np.cumsum([0, *parts_of_sources])]
    documents_of = np.diff(ends).tolist()
    for source, count in zip(corpus.sources, documents_of, strict=True):
        if count < _LEAST_MIXED:
            raise InputError(
                f"corpus.mixture: {source} has {pluralize(count, 'document')} to train on, and "
                f"{_LEAST_MIXED} are needed; give it more text, or remove it"
            )
    return {"documents_of_sources": documents_of}


def settings_of(corpus: Corpus) -> dict[str, Any]:
    """Returns the settings of a corpus as JSON holds them, sources as any machine calls them."""
    settings = dataclasses.asdict(corpus) | {"sources": [*map(source_name, corpus.sources)]}
    return json.loads(json.dumps(settings))


def listed(folder: epath.Path) -> dict[str, list[Any]]:
    """Returns {path in the corpus folder: [bytes, SHA-256]} of all files, in order of names."""
    root = pathlib.Path(folder)
    below = ("tokenizer", "dataset", "stream")
    paths = sorted(p for name in below for p in (root / name).rglob("*") if p.is_file())
    sha256 = LocalStorage().sha256
    return {p.relative_to(root).as_posix(): [p.stat().st_size, sha256(p)] for p in paths}


def _share(chosen: tokenizer.Tokenizer, folder: epath.Path, place: str) -> str:
    """Saves the tokenizer; returns a folder of it that all who work see."""
    chosen.save(folder / "tokenizer")
    if "://" not in place:
        return os.path.abspath(folder / "tokenizer")
    shared = epath.Path(place) / f"tokenizer-{chosen.sha256[:20]}"
    for path in (folder / "tokenizer").iterdir():
        (shared / path.name).write_bytes(path.read_bytes())
    return str(shared)


def _write_dataset(
    tasks: Sequence[parts.WriteShards],
    scratch: pathlib.Path,
    folder: epath.Path,
    vocab_size: int,
    run: "PartRunner",
    say: Say,
) -> tuple[dict[str, dict[str, int]], list[int]]:
    """Writes the dataset; returns its counts, and each part's documents in the training split."""
    written = []
    counts = {split: dict.fromkeys(dataset.COUNTED, 0) for split in SPLITS}
    shards: dict[str, list[tuple[pathlib.Path, dict[str, int]]]] = {split: [] for split in SPLITS}
    for task, record in zip(tasks, run("writing the dataset", tasks, say), strict=True):
        written.append(record.get("train", {"documents": 0})["documents"])
        for split, counted in record.items():
            for name in dataset.COUNTED:
                counts[split][name] += counted[name]
            shards[split].append((parts.local_part(task.place, task.name, split, scratch), counted))
    if all(shards.values()):
        id_dtype = "uint16" if vocab_size <= 2**16 else "uint32"
        dataset.assemble(dataset.folder_of(folder), shards, id_dtype)
    return counts, written


def _train(
    corpus: Corpus,
    vocab_size: int,
    tasks: Sequence[Task],
    records: Sequence[dict[str, Any]],
    scratch: pathlib.Path,
    say: Say,
) -> tokenizer.Tokenizer:
    """Trains a tokenizer on the words that tasks have counted."""
    counts = [
        (parts.local_part(task.place, task.name, "counts.json", scratch), record["offsets"])
        for task, record in zip(tasks, records, strict=True)
    ]
    counted = words.count(counts)
    used = "all of them"
    if len(counted.words) < counted.different:
        used = f"the {len(counted.words):,} commonest"
    say(
        f"prepare: {counted.different:,} different words; training a {corpus.tokenizer_kind} "
        f"vocabulary of {vocab_size} pieces on {used}"
    )
    made = trained.train(counted, vocab_size, corpus)
    names = {made.piece(number) for number in range(made.size)}
    unused = len(names.intersection(vocabulary.unused(vocab_size)))
    lacking = unused - corpus.unused_pieces
    if lacking:
        say(
            f"prepare: the text gives {vocab_size - lacking:,} pieces, so {lacking:,} of the "
            f"vocabulary are [unused]; model.vocab_size={vocab_size - lacking} has none of them"
        )
    return made


@dataclasses.dataclass(frozen=True)
class PartRunner:
    """Does the tasks of a stage."""

    workers: int = 1  # processes of this machine
    beam: str | None = None  # a runner and its options, in place of them; None: no Beam

    def __call__(self, what: str, tasks: Sequence[Task], say: Say) -> list[dict[str, Any]]:
        """Returns the records that they left, in their order."""
        if self.beam is not None:
            say(f"prepare: {what} with Beam")
            return beam.run(tasks, self.beam)
        return workers.run(tasks, self.workers, Progress(f"prepare: {what}", say))

    def place(self, scratch: pathlib.Path) -> str:
        """Returns where the tasks' folders lie: seen by all who work."""
        scratch.mkdir(parents=True, exist_ok=True)
        shared = "" if self.beam is None else beam.shared_place(self.beam)
        return shared or str(scratch.absolute())
