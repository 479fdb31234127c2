"""`prepare`: documents to a TFDS dataset of ids, made once and recognised afterwards.

    corpus/manifest.json    what went in (sources with hashes), what came out (counts), versions
    corpus/tokenizer/       the tokenizer, trained here or copied
    corpus/dataset/         the TFDS dataset: one example a document, in ArrayRecord files
    corpus/stream/          its splits as flat memory-mapped ids (see data.stream)
    corpus/plans.json       how many rows each plan has (see data.batches)
    corpus/COMPLETE         written last

A document goes to validation if the hash of its text is among the smallest
`Corpus.validation_share`; so equal texts share a split, and a split does not depend on order.
"""

import array
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import io
import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import tensorflow_datasets as tfds
from etils import epath

from bert_jax.config import Corpus, InputError
from bert_jax.data import stream
from bert_jax.text import documents, sentences, tokenizer, vocabulary
from bert_jax.workdir import (
    COMPLETE,
    is_complete,
    lock,
    mark_complete,
    named_errors,
    read_json,
    write_atomic,
)

FORMAT_VERSION = 1

# Fewer held-out documents say little: their pairs share one topic and one writer.
LEAST_VALIDATION_DOCUMENTS = 8

SPLITS = ("train", "validation")

Say = Callable[[str], None]


@dataclasses.dataclass
class SplitCounts:
    """What a split holds, gathered while it is written."""

    documents: int = 0
    sentences: int = 0
    tokens: int = 0
    unknown_tokens: int = 0


def prepare(corpus: Corpus, vocab_size: int, folder: epath.Path, say: Say) -> dict[str, Any]:
    """Makes the corpus folder, or finds that it is there; returns its manifest.

    Args:
      corpus: what to read and how.
      vocab_size: ids the model has rows for; the tokenizer must have exactly as many.
      folder: the corpus folder.
      say: is given a line now and then.

    Raises:
      InputError: bad sources, or a folder made from other text or settings.
    """
    with named_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        _require_ours(folder)
        with lock(folder):
            if is_complete(folder):
                manifest = open_manifest(folder)
                _require_same(manifest, corpus, vocab_size, folder, say)
                return manifest
            _remove_leftovers(folder)
            return _build(corpus, vocab_size, folder, say)


def open_manifest(folder: epath.Path) -> dict[str, Any]:
    """The manifest of a complete corpus.

    Raises:
      InputError: nothing complete here.
    """
    if not is_complete(folder):
        raise InputError(f"{folder}: no prepared corpus here; run `bert-jax prepare` first")
    return read_json(folder / "manifest.json", FORMAT_VERSION)


def open_tokenizer(folder: epath.Path, manifest: dict[str, Any]) -> tokenizer.Tokenizer:
    """The tokenizer the corpus was made with.

    Raises:
      InputError: it was changed since.
    """
    loaded = tokenizer.load(folder / "tokenizer")
    if loaded.sha256 != manifest["tokenizer"]["sha256"]:
        raise InputError(f"{folder / 'tokenizer'}: not the tokenizer this corpus was made with")
    return loaded


def open_stream(folder: epath.Path, split: str) -> stream.Stream:
    """A split as flat ids, made from the dataset if this host has not done so yet."""
    target = folder / "stream" / split
    if not is_complete(target):
        with named_errors(target):
            stream.write(_dataset_folder(folder), split, target)
    return stream.Stream.open(target)


def _require_same(
    manifest: dict[str, Any], corpus: Corpus, vocab_size: int, folder: epath.Path, say: Say
) -> None:
    """Raises InputError if the folder was made from other text, settings or another tokenizer."""
    mend = f"choose another --workdir, or remove {folder} to prepare it anew"
    settings = json.loads(json.dumps(dataclasses.asdict(corpus)))
    for name, value in {**settings, "vocab_size": vocab_size}.items():
        old = manifest["settings"].get(name)
        if old != value:
            raise InputError(f"{folder}: prepared with {name}={old!r}, now {value!r}; {mend}")
    if corpus.tokenizer != "train" and not epath.Path(corpus.tokenizer).exists():
        # A corpus may be carried to a machine that has neither its text nor its vocabulary file.
        say(f"corpus: used as prepared; there is no {corpus.tokenizer} to compare with")
    elif corpus.tokenizer != "train":
        now = tokenizer.load(corpus.tokenizer, corpus.case).sha256
        if now != manifest["tokenizer"]["sha256"]:
            raise InputError(f"{folder}: {corpus.tokenizer} has changed since; {mend}")
    try:
        sources = documents.fingerprint(corpus)
    except InputError as error:
        # A corpus may be carried to a machine that has no text.
        say(f"corpus: used as prepared; its text cannot be compared ({error})")
        return
    old_files = {row["file"]: row["sha256"] for row in manifest["sources"]}
    new_files = {row["file"]: row["sha256"] for row in sources}
    for file in sorted(old_files.keys() | new_files.keys()):
        if old_files.get(file) != new_files.get(file):
            change = "has changed"
            if file not in old_files:
                change = "is new"
            elif file not in new_files:
                change = "is gone"
            raise InputError(f"{folder}: {file} {change} since this corpus was prepared; {mend}")


# What `prepare` writes; `write_atomic` adds files beside.
_OURS = {"manifest.json", "tokenizer", "dataset", "stream", "plans.json", "lock"}
_BESIDE = re.compile(r"\.(manifest\.json|plans\.json|COMPLETE)\.\d+\.tmp")


def _require_ours(folder: epath.Path) -> None:
    """Raises InputError if `prepare` never was here and something else lies here.

    Every `prepare` leaves its lock, so without one even a `dataset` is somebody else's.
    """
    names = {path.name for path in folder.iterdir()}
    if names and not names & {"lock", COMPLETE}:
        _refuse_strange(folder, min(names))


def _remove_leftovers(folder: epath.Path) -> None:
    """Clears what a killed `prepare` left; anything else is not ours to remove."""
    names = {path.name for path in folder.iterdir()}
    for name in sorted(names - _OURS):
        if not _BESIDE.fullmatch(name):
            _refuse_strange(folder, name)
    for name in names - {"lock"}:
        path = folder / name
        path.rmtree() if path.is_dir() else path.unlink()


def _refuse_strange(folder: epath.Path, name: str) -> None:
    raise InputError(f"{folder}: holds {name}, which `prepare` did not make; move it away")


def _build(corpus: Corpus, vocab_size: int, folder: epath.Path, say: Say) -> dict[str, Any]:
    sources = documents.fingerprint(corpus)
    say(f"prepare: reading {len(sources)} files")
    survey = _Survey.take(corpus)
    say(f"prepare: {survey.count} documents, {survey.repeated} repeated; " + survey.layout_line())
    chosen = _choose_tokenizer(corpus, vocab_size, say)
    chosen.save(folder / "tokenizer")

    counts = {split: SplitCounts() for split in SPLITS}
    _write_dataset(corpus, chosen, survey, folder, counts)
    for split in SPLITS:
        open_stream(folder, split)
    manifest = {
        "format_version": FORMAT_VERSION,
        "settings": {**dataclasses.asdict(corpus), "vocab_size": vocab_size},
        "sources": sources,
        "tokenizer": {"kind": chosen.kind, "case": chosen.case, "sha256": chosen.sha256},
        "documents_repeated": survey.repeated,
        "layouts": survey.layouts,
        "splits": {split: dataclasses.asdict(counts[split]) for split in SPLITS},
        "versions": {
            name: importlib.metadata.version(name)
            for name in ("bert-jax", "sentencex", "sentencepiece", "tokenizers", "numpy")
        },
    }
    write_atomic(folder / "manifest.json", json.dumps(manifest, indent=2) + "\n")
    mark_complete(folder)
    for split in SPLITS:
        c = counts[split]
        say(
            f"prepare: {split}: {c.documents} documents, {c.sentences} sentences, {c.tokens} tokens"
        )
    return manifest


@dataclasses.dataclass
class _Survey:
    """A first reading: which documents repeat, which are held out."""

    hashes: np.ndarray  # uint64 [documents], the first bytes of each text's SHA-256
    first: np.ndarray  # bool [documents], no earlier document has the same text
    held_out: np.ndarray  # bool [documents]
    layouts: dict[str, int]

    @property
    def count(self) -> int:
        return len(self.hashes)

    @property
    def repeated(self) -> int:
        return int(self.count - self.first.sum())

    @classmethod
    def take(cls, corpus: Corpus) -> "_Survey":
        values = array.array("Q")
        layouts: dict[str, int] = {}
        for document in documents.read(corpus):
            digest = hashlib.sha256(document.text.encode("utf-8", "surrogatepass")).digest()
            values.append(int.from_bytes(digest[:8], "big"))
            layouts[document.layout] = layouts.get(document.layout, 0) + 1
        if not values:
            raise InputError("corpus.sources: no text in any document")
        hashes = np.array(values, np.uint64)
        unique, first_index = np.unique(hashes, return_index=True)
        first = np.zeros(len(hashes), bool)
        first[first_index] = True
        wanted = max(LEAST_VALIDATION_DOCUMENTS, round(corpus.validation_share * len(unique)))
        if len(unique) < 2 * LEAST_VALIDATION_DOCUMENTS:
            raise InputError(
                f"corpus.sources: {len(unique)} different documents, but "
                f"{2 * LEAST_VALIDATION_DOCUMENTS} are needed, to hold out "
                f"{LEAST_VALIDATION_DOCUMENTS}. Is one file one document here? (corpus.layout)"
            )
        if wanted > len(unique) // 2:
            raise InputError(
                f"corpus.validation_share={corpus.validation_share}: would hold out {wanted} of "
                f"{len(unique)} documents"
            )
        return cls(hashes, first, hashes <= unique[wanted - 1], layouts)

    def layout_line(self) -> str:
        return "read as " + ", ".join(f"{name} ({n})" for name, n in self.layouts.items())


def _choose_tokenizer(corpus: Corpus, vocab_size: int, say: Say) -> tokenizer.Tokenizer:
    if corpus.tokenizer != "train":
        chosen = tokenizer.load(corpus.tokenizer, corpus.case)
        if chosen.size != vocab_size:
            raise InputError(
                f"corpus.tokenizer={corpus.tokenizer}: has {chosen.size} ids and "
                f"model.vocab_size={vocab_size}; set model.vocab_size={chosen.size}"
            )
        if chosen.case != corpus.case:
            raise InputError(
                f"corpus.tokenizer={corpus.tokenizer}: is {chosen.case}; set corpus.case="
                f"{chosen.case}"
            )
        return chosen
    say(f"prepare: training a {corpus.tokenizer_kind} vocabulary of {vocab_size} pieces")
    if corpus.tokenizer_kind == "wordpiece":

        def words() -> Iterator[str]:
            for document in documents.read(corpus):
                for paragraph in document.paragraphs():
                    yield " ".join(tokenizer.basic_tokens(paragraph, corpus.case))

        trained: tokenizer.Tokenizer = tokenizer.WordPiece(
            vocabulary.train_wordpiece(words, vocab_size), corpus.case
        )
    else:
        lines = (
            sentence.lower() if corpus.case == "uncased" else sentence
            for document in documents.read(corpus)
            for sentence in sentences.split(document, corpus.language)
        )
        trained = tokenizer.SentencePiece(
            vocabulary.train_sentencepiece(lines, vocab_size, corpus.tokenizer_kind), corpus.case
        )
    return trained


def _dataset_folder(folder: epath.Path) -> epath.Path:
    return folder / "dataset" / BertCorpus.name / str(BertCorpus.VERSION)


class BertCorpus(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Tokenized documents: `ids` and `sentence_lengths`, whose sum is the number of ids."""

    name = "bert_corpus"
    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, id_dtype: Any, generate: Callable[[str], Iterator[Any]], **kwargs: Any):
        self._id_dtype = id_dtype
        self._generate = generate
        super().__init__(**kwargs)

    def _info(self) -> tfds.core.DatasetInfo:
        features = tfds.features.FeaturesDict(
            {
                "ids": tfds.features.Tensor(shape=(None,), dtype=self._id_dtype),
                # 32 bits: a text without line ends may be one sentence of over 65,535 pieces.
                "sentence_lengths": tfds.features.Tensor(shape=(None,), dtype=np.uint32),
            }
        )
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager: Any) -> dict[str, Iterator[Any]]:
        del dl_manager
        return {split: self._generate_examples(split) for split in SPLITS}

    def _generate_examples(self, split: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        yield from self._generate(split)


def _write_dataset(
    corpus: Corpus,
    chosen: tokenizer.Tokenizer,
    survey: _Survey,
    folder: epath.Path,
    counts: dict[str, SplitCounts],
) -> None:
    dtype = np.uint16 if chosen.size <= 2**16 else np.uint32

    def generate(split: str) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        keep = survey.held_out == (split == "validation")
        if corpus.repeated_documents == "drop":
            keep &= survey.first
        total = counts[split]
        for index, document in enumerate(documents.read(corpus)):
            if not keep[index]:
                continue
            encoded = map(chosen.encode, sentences.split(document, corpus.language))
            ids = [sentence for sentence in encoded if sentence]
            if not ids:
                continue
            flat = np.array([i for sentence in ids for i in sentence], dtype)
            total.documents += 1
            total.sentences += len(ids)
            total.tokens += len(flat)
            total.unknown_tokens += int((flat == chosen.unk_id).sum())
            lengths = np.array([len(sentence) for sentence in ids], np.uint32)
            yield index, {"ids": flat, "sentence_lengths": lengths}
        if not total.tokens:  # here, since TFDS fails on an empty split
            raise InputError(f"corpus.sources: no text is left for the {split} split")

    tfds.disable_progress_bar()
    builder = BertCorpus(
        id_dtype=dtype,
        generate=generate,
        data_dir=folder / "dataset",
        file_format=tfds.core.FileFormat.ARRAY_RECORD,
    )
    # TFDS prints of downloads, and there are none.
    with contextlib.redirect_stdout(io.StringIO()):
        builder.download_and_prepare()
