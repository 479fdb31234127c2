"""`prepare`: documents to a TFDS dataset of ids, made once and recognised afterwards.

    corpus/manifest.json    what went in (sources with hashes), what came out (counts), versions
    corpus/tokenizer/       the tokenizer, trained here or copied
    corpus/dataset/         the TFDS dataset: one example a document, in ArrayRecord files
    corpus/stream/          its splits as flat memory-mapped ids (see data.stream)
    corpus/plans.json       how many rows each plan has (see data.batches)
    corpus/COMPLETE         written last

Which documents are held out is decided in data.survey.
"""

import contextlib
import dataclasses
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
from bert_jax.data.survey import Survey
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

SPLITS = ("train", "validation")

_PARTS = {"settings": dict, "sources": list, "tokenizer": dict, "splits": dict}

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
        _require_ours(folder)
        if is_complete(folder):  # without its lock: runs may share a folder they cannot write
            return _found(corpus, vocab_size, folder, say)
        with lock(folder):
            if is_complete(folder):  # by now
                return _found(corpus, vocab_size, folder, say)
            _refuse_strangers(folder)
            _remove_leftovers(folder)
            try:
                return _build(corpus, vocab_size, folder, say)
            except BaseException:
                if not is_complete(folder):
                    _remove_leftovers(folder)
                raise


def _found(corpus: Corpus, vocab_size: int, folder: epath.Path, say: Say) -> dict[str, Any]:
    manifest = open_manifest(folder)
    _require_same(manifest, corpus, vocab_size, folder, say)
    return manifest


def open_manifest(folder: epath.Path) -> dict[str, Any]:
    """The manifest of a complete corpus.

    Raises:
      InputError: nothing complete here.
    """
    if not is_complete(folder):
        raise InputError(f"{folder}: no prepared corpus here; run `bert-jax prepare` first")
    path = folder / "manifest.json"
    manifest = read_json(path, FORMAT_VERSION)
    wrong = _wrong_part(manifest)
    if wrong:
        raise InputError(
            f"{path}: damaged, {wrong} is not as `prepare` wrote it; put the whole file back, or "
            f"remove {folder} to prepare it anew"
        )
    return manifest


def _wrong_part(manifest: dict[str, Any]) -> str | None:
    """The part of a manifest without which the corpus cannot be used, if one is not there."""
    for name, kind in _PARTS.items():
        if not isinstance(manifest.get(name), kind):
            return name
    for source in manifest["sources"]:
        if not isinstance(source, dict) or not isinstance(source.get("file"), str):
            return "sources"
    for split in SPLITS:
        counts = manifest["splits"].get(split)
        if not isinstance(counts, dict) or not isinstance(counts.get("tokens"), int):
            return f"splits.{split}"
    return None


def open_tokenizer(folder: epath.Path, manifest: dict[str, Any]) -> tokenizer.Tokenizer:
    """The tokenizer the corpus was made with.

    Raises:
      InputError: it was changed since.
    """
    loaded = tokenizer.load(folder / "tokenizer")
    if loaded.sha256 != manifest["tokenizer"].get("sha256"):
        raise InputError(
            f"{folder / 'tokenizer'}: not the tokenizer this corpus was made with; put that one "
            f"back, or remove {folder} to prepare it anew"
        )
    return loaded


def open_stream(folder: epath.Path, split: str) -> stream.Stream:
    """A split as flat ids, made from the dataset if this host has not done so yet."""
    target = folder / "stream" / split
    if not is_complete(target):
        stream.write(_dataset_folder(folder), split, target)
    opened = stream.Stream.open(target)
    opened.require_rising()
    return opened


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
        if now != manifest["tokenizer"].get("sha256"):
            raise InputError(f"{folder}: {corpus.tokenizer} has changed since; {mend}")
    try:
        sources = documents.fingerprint(corpus)
    except InputError as error:
        # A corpus may be carried to a machine that has no text.
        say(f"corpus: used as prepared; its text cannot be compared ({error})")
        return
    old_files = {row["file"]: row.get("sha256") for row in manifest["sources"]}
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
    names = {path.name for path in folder.iterdir()} if folder.exists() else set()
    if names and not names & {"lock", COMPLETE}:
        _refuse_strange(folder, min(names))


def _refuse_strangers(folder: epath.Path) -> None:
    """Raises InputError for what lies here and is not ours to remove."""
    for name in sorted(path.name for path in folder.iterdir()):
        if name not in _OURS and not _BESIDE.fullmatch(name):
            _refuse_strange(folder, name)


def _remove_leftovers(folder: epath.Path) -> None:
    """Clears what a `prepare` left that was killed or failed."""
    for path in folder.iterdir():
        if path.name != "lock" and (path.name in _OURS or _BESIDE.fullmatch(path.name)):
            path.rmtree() if path.is_dir() else path.unlink()


def _refuse_strange(folder: epath.Path, name: str) -> None:
    raise InputError(f"{folder}: holds {name}, which `prepare` did not make; move it away")


def _build(corpus: Corpus, vocab_size: int, folder: epath.Path, say: Say) -> dict[str, Any]:
    # Before the text is read, which may take hours.
    given = None if corpus.tokenizer == "train" else _given_tokenizer(corpus, vocab_size)
    sources = documents.fingerprint(corpus)
    say(f"prepare: reading {len(sources)} files")
    survey = Survey.take(corpus)
    say(f"prepare: {survey.count} documents, {survey.repeated} repeated; " + survey.layout_line())
    chosen = given or _train_tokenizer(corpus, vocab_size, say)
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


def _given_tokenizer(corpus: Corpus, vocab_size: int) -> tokenizer.Tokenizer:
    chosen = tokenizer.load(corpus.tokenizer, corpus.case)
    if chosen.size != vocab_size:
        raise InputError(
            f"corpus.tokenizer={corpus.tokenizer}: has {chosen.size} ids and "
            f"model.vocab_size={vocab_size}; set model.vocab_size={chosen.size}"
        )
    if chosen.case != corpus.case:
        raise InputError(
            f"corpus.tokenizer={corpus.tokenizer}: is {chosen.case}; set corpus.case={chosen.case}"
        )
    return chosen


def _train_tokenizer(corpus: Corpus, vocab_size: int, say: Say) -> tokenizer.Tokenizer:
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
    survey: Survey,
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
            raise InputError(
                f"corpus.sources: no text is left for the {split} split: no document there of "
                f"{', '.join(corpus.sources)} holds a character that the tokenizer keeps"
            )

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
