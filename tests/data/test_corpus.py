"""Preparing a corpus: splits, recognition, refusals, and what fails in the middle."""

import dataclasses
import itertools
import json
import os
import pathlib
import re
import shutil

import numpy as np
import pytest
from etils import epath
from tensorflow_datasets.proto import tf_example_pb2

from bert_jax import config
from bert_jax.config import Corpus
from bert_jax.data import build, corpus, dataset, stream
from bert_jax.errors import InputError
from bert_jax.storage.workdir import with_checksum
from bert_jax.text import documents, sentence_splitter, tokenizer, vocabulary

VOCAB = [*vocabulary.SPECIALS, *"abcdefghij.", *(f"##{c}" for c in "abcdefghij")]
SIZE = len(VOCAB)


def quiet(line):
    del line


def document(number, sentence_count=4):
    rng = np.random.default_rng(number)
    words = ["".join(rng.choice(list("abcdefghij"), 3)) for _ in range(5 * sentence_count)]
    return "".join(" ".join(words[i::sentence_count]) + ".\n" for i in range(sentence_count))


def write_texts(folder, count=24):
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        (folder / f"{number:03}.txt").write_text(document(number))
    return folder


def write_vocab(path, vocab=VOCAB):
    path.write_text("\n".join(vocab) + "\n")
    return path


@dataclasses.dataclass
class Place:
    """Text, a vocabulary, and where the corpus goes; all its own."""

    root: pathlib.Path

    def __post_init__(self):
        self.text = write_texts(self.root / "text")
        self.vocab = write_vocab(self.root / "vocab.txt")
        self.folder = epath.Path(self.root / "corpus")
        self.settings = Corpus(
            sources=(f"text:{self.text}",),
            layout="sentences_by_line",
            tokenizer=str(self.vocab),
            validation_share=0.1,
        )

    def prepare(self, vocab_size=SIZE, say=quiet, **changes):
        settings = dataclasses.replace(self.settings, **changes)
        return corpus.prepare(settings, vocab_size, self.folder, say)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


@pytest.fixture(scope="module")
def prepared_once(tmp_path_factory):
    made = Place(tmp_path_factory.mktemp("prepared"))
    made.prepare()
    return made


@pytest.fixture
def prepared(prepared_once, place):
    """A prepared corpus to change, with its text: a copy, since preparing takes longer."""
    shutil.copytree(prepared_once.folder, place.folder)
    manifest = (place.folder / "manifest.json").read_text()
    here = json.loads(manifest.replace(str(prepared_once.root), str(place.root)))
    (place.folder / "manifest.json").write_text(json.dumps(with_checksum(here), indent=2) + "\n")
    return place


def texts(folder, split):
    """Each document of a split, as text again."""
    opened = corpus.open_stream(folder, split)
    loaded = corpus.open_tokenizer(folder, corpus.open_manifest(folder))
    bounds = opened.sentence_offsets[opened.document_offsets.astype(np.int64)].tolist()
    return [
        loaded.decode(opened.ids[start:end].tolist()) for start, end in itertools.pairwise(bounds)
    ]


def state(folder):
    """Every file with its content and time, but the lock, which each `prepare` takes."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in pathlib.Path(folder).rglob("*")
        if path.is_file() and path.name != "lock"
    }


def content(folder):
    """What decides batches: ids, tokenizer, counts."""
    folder = pathlib.Path(folder)
    names = ["manifest.json", *(f"tokenizer/{p.name}" for p in (folder / "tokenizer").iterdir())]
    names += [str(p.relative_to(folder)) for p in sorted((folder / "stream").rglob("*.bin"))]
    assert len([name for name in names if name.endswith(".bin")]) == 8
    found = {name: (folder / name).read_bytes() for name in names}
    # Of all the rest, with the paths in it; and the text's dates.
    manifest = found["manifest.json"].rpartition(b'"checksum"')[0]
    found["manifest.json"] = re.sub(rb'"mtime_ns": \d+', b"", manifest)
    return found


# --- What is made ---


def test_prepare_makes_both_splits_of_all_documents_in_order(prepared_once):
    train = texts(prepared_once.folder, "train")
    validation = texts(prepared_once.folder, "validation")
    assert len(validation) == build.LEAST_VALIDATION_DOCUMENTS
    expected = [document(n).replace("\n", " ").replace(".", " .").split() for n in range(24)]
    numbers = [[expected.index(t.split()) for t in split] for split in (train, validation)]
    assert sorted([*numbers[0], *numbers[1]]) == list(range(24))
    assert numbers == [sorted(split) for split in numbers]
    manifest = corpus.open_manifest(prepared_once.folder)
    assert manifest["splits"]["train"] == {
        "documents": 16,
        "sentences": 64,
        "tokens": 16 * 4 * (5 * 3 + 1),
        "unknown_tokens": 0,
    }
    assert manifest["layouts"] == {"sentences_by_line": 24}
    assert len(manifest["sources"]) == 24
    opened = corpus.open_stream(prepared_once.folder, "train")
    assert opened.ids.dtype == np.uint16
    assert set(np.diff(opened.sentence_offsets.astype(np.int64)).tolist()) == {16}
    assert (opened.ids[opened.sentence_offsets[1:].astype(np.int64) - 1] == VOCAB.index(".")).all()
    assert (len(opened.unigrams), opened.unigrams.sum()) == (SIZE, len(opened.ids))
    assert opened.unigrams[VOCAB.index(".")] == 64


@pytest.fixture(scope="module")
def repeats(tmp_path_factory):
    """Every text three times: under other names, at other places, with and without a line end."""
    made = Place(tmp_path_factory.mktemp("repeats"))
    for number in range(24):
        (made.text / f"x{number}.txt").write_text("\n" + document(number).rstrip("\n"))
        (made.text / f"y{number}.txt").write_bytes(document(number).replace("\n", "\r\n").encode())
    return made


@pytest.mark.parametrize(("repeated", "share"), [("keep", 0.1), ("drop", 0.5)])
def test_equal_texts_share_a_split_and_nothing_is_in_both(repeats, prepared_once, repeated, share):
    repeats.folder = epath.Path(repeats.root / repeated)
    manifest = repeats.prepare(repeated_documents=repeated, validation_share=share)
    assert manifest["documents_repeated"] == 48
    train, validation = (texts(repeats.folder, split) for split in dataset.SPLITS)
    assert not set(train) & set(validation)
    assert len(set(train)) + len(set(validation)) == 24
    times = 3 if repeated == "keep" else 1
    assert len(train) + len(validation) == 24 * times
    assert all(train.count(text) == times for text in train)
    assert len(set(validation)) == max(build.LEAST_VALIDATION_DOCUMENTS, share * 24)
    if repeated == "keep":  # nor do their names and order decide who is held out
        assert set(validation) == set(texts(prepared_once.folder, "validation"))


def test_over_65536_ids_take_32_bits(place):
    vocab = [*VOCAB, *(f"piece{i}" for i in range(2**16 + 1 - SIZE - 1)), "zzz"]
    assert len(vocab) == 2**16 + 1
    write_vocab(place.vocab, vocab)
    for number in range(24):
        (place.text / f"{number:03}.txt").write_text(f"zzz {document(number)}")
    place.prepare(len(vocab))
    opened = corpus.open_stream(place.folder, "train")
    assert opened.ids.dtype == np.uint32
    assert opened.ids[0] == 2**16
    write_vocab(place.vocab, [*vocab[1:-1], "[PAD]"])
    place.folder.rmtree()
    place.prepare(2**16)
    assert corpus.open_stream(place.folder, "train").ids.dtype == np.uint16


def test_a_sentence_of_70000_tokens_survives(place):
    (place.text / "000.txt").write_text(f"{document(0)}{'a ' * 70_000}\n")
    counts = place.prepare(repeated_documents="drop")["splits"]
    assert sum(split["tokens"] for split in counts.values()) == 24 * 4 * 16 + 70_000
    lengths = [np.diff(corpus.open_stream(place.folder, s).sentence_offsets) for s in counts]
    assert max(length.max() for length in lengths) == 70_000


# --- Coming back ---


def test_running_it_twice_changes_no_file(prepared):
    before = state(prepared.folder)
    lines = []
    assert prepared.prepare(say=lines.append) == corpus.open_manifest(prepared.folder)
    assert state(prepared.folder) == before
    assert lines == []


def test_other_text_or_settings_are_refused_and_nothing_is_touched(prepared):
    def refused(named, **settings):
        before = state(prepared.folder)
        with pytest.raises(InputError, match=f"{named}.*remove {prepared.folder}"):
            prepared.prepare(**settings)
        assert state(prepared.folder) == before

    other = write_vocab(prepared.root / "other.txt")
    settings = {"case": "cased", "layout": "wrapped", "validation_share": 0.2, "vocab_size": 30}
    settings |= {"repeated_documents": "drop", "sources": ("text:other",), "tokenizer": str(other)}
    for name, value in settings.items():
        refused(f"{name}=", **{name: value})
    first, new = prepared.text / "003.txt", prepared.text / "0030.txt"
    text = first.read_text()
    for change, named in (
        (lambda: first.write_text("other text.\n"), "003.txt has changed"),
        (first.unlink, "003.txt is gone"),
        (lambda: first.write_text(text), ""),
        (lambda: new.write_text("other text.\n"), "0030.txt is new"),
        (new.unlink, ""),
        (lambda: write_vocab(prepared.vocab, [*VOCAB[:-1], "##z"]), "vocab.txt has changed"),
    ):
        change()
        if named:
            refused(named)
        else:
            prepared.prepare()


def test_a_corpus_whose_text_is_gone_is_used_as_prepared(prepared):
    before = state(prepared.folder)
    shutil.rmtree(prepared.text)
    prepared.vocab.unlink()
    lines = []
    prepared.prepare(say=lines.append)
    assert state(prepared.folder) == before
    assert len(lines) == 2
    assert all("used as prepared" in line for line in lines)


def test_text_that_was_moved_is_the_same_and_other_text_is_not(prepared):
    """A corpus is made of what its sources hold."""
    before = state(prepared.folder)
    moved = prepared.root / "moved"
    shutil.copytree(prepared.text, moved)
    lines = []
    prepared.prepare(say=lines.append, sources=(f"text:{moved}",))
    assert state(prepared.folder) == before and lines == []
    here = f"text:{prepared.root}/./moved"
    manifest = prepared.prepare(sources=(here,))
    assert corpus.is_made_of(prepared.folder, Corpus(sources=(here,)))
    assert manifest["settings"]["sources"] == [f"text:{prepared.text}"]
    (moved / "003.txt").write_text("other text.\n")
    for source in (here, f"jsonl:{prepared.text}", f"text:{prepared.root}/nowhere"):
        with pytest.raises(InputError, match="prepared with sources="):
            prepared.prepare(sources=(source,))


def test_files_are_called_as_they_would_be_on_any_machine(place):
    manifest = place.prepare(sources=(f"text:{place.root}/./text",))
    assert manifest["settings"]["sources"] == ["text:./text"]
    assert manifest["sources"][0]["file"] == "./text/000.txt"
    (place.root / "b").mkdir()
    shutil.move(place.root / "text", place.root / "b")
    assert place.prepare(sources=(f"text:{place.root}/b/./text",)) == manifest


# --- Failing in the middle ---


def assert_finishes(place, undisturbed):
    place.prepare()
    here, there = str(place.root).encode(), str(undisturbed.root).encode()
    ours = {name: text.replace(here, there) for name, text in content(place.folder).items()}
    assert ours == content(undisturbed.folder)
    left = {path.name for path in place.folder.iterdir()}
    folders = {"tokenizer", "dataset", "stream"}
    assert left == {*folders, "manifest.json", "lock", "COMPLETE"}
    assert not list(pathlib.Path(place.folder).rglob("*incomplete*"))


STATIONS = {
    "reading": (sentence_splitter, "split"),
    "surveying": (build, "assign_splits"),
    "writing": (dataset.ShardWriter, "add"),
    "unrolling": (stream, "write"),
    "finishing": (corpus, "mark_complete"),
}


@pytest.mark.parametrize("station", list(STATIONS))
def test_a_prepare_that_fails_leaves_what_is_whole(prepared_once, place, monkeypatch, station):
    def fail(*arguments, **more):
        raise RuntimeError("disturbed")

    monkeypatch.setattr(*STATIONS[station], fail)
    with pytest.raises(RuntimeError, match="disturbed"):
        place.prepare()
    monkeypatch.undo()
    if station == "reading":
        assert not place.folder.exists()
    else:
        assert {path.name for path in place.folder.iterdir()} == {"lock", "parts"}
        assert not any(path.name.startswith(".") for path in (place.folder / "parts").iterdir())
    assert_finishes(place, prepared_once)


def test_a_reader_that_leaves_does_not_undo_a_corpus(place):
    """The last lines are said when all is there."""

    def say(line):
        if "train:" in line:
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        place.prepare(say=say)
    assert corpus.open_manifest(place.folder)["splits"]["train"]["tokens"] > 0


# --- What is not ours ---


def test_a_foreign_file_is_never_deleted(place):
    def refused(name):
        before = state(place.folder)
        for _ in range(2):  # nor at the second attempt, when something of ours might lie there too
            with pytest.raises(InputError, match=f"holds {name}"):
                place.prepare()
        assert state(place.folder) == before

    place.folder.mkdir()
    for name in ("notes.txt", "dataset"):
        path = pathlib.Path(place.folder / name)
        path.mkdir()
        (path / "mine").write_text("mine")
        refused(name)
        shutil.rmtree(path)
    # Among what a `prepare` left, or an earlier version; and in a complete corpus it stays.
    (place.folder / "lock").touch()
    (place.folder / "tokenizer").mkdir()
    (place.folder / ".manifest.json.123.tmp").touch()
    (place.folder / "croissant.json").touch()
    (place.folder / "notes.tmp").write_text("mine")
    refused("notes.tmp")
    (place.folder / "notes.tmp").unlink()
    place.prepare()
    assert not {".manifest.json.123.tmp", "croissant.json"} & {*os.listdir(place.folder)}
    (place.folder / "notes.txt").write_text("mine")
    place.prepare()
    assert (place.folder / "notes.txt").read_text() == "mine"


def test_a_file_where_the_folder_should_be_is_named(place):
    place.folder.write_text("mine")
    with pytest.raises(InputError, match="is a file where a folder is needed"):
        place.prepare()
    assert place.folder.read_text() == "mine"


# --- Bad input ---


def test_an_example_is_what_protobuf_writes(monkeypatch):
    ids = np.array([0, 1, 127, 128, 16_383, 16_384, 65_535, 2**21, 2**32 - 1], np.uint32)
    expected = tf_example_pb2.Example()
    for name, values in (("ids", ids), ("sentence_lengths", np.array([4, 5]))):
        expected.features.feature[name].int64_list.value.extend(values.tolist())
    for many in (1 << 18, 4):
        monkeypatch.setattr(dataset, "_VARINT_BLOCK", many)
        made = dataset.serialize_document(ids, np.array([4, 5], np.int64))
        assert made == expected.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("length", "changes"),
    [
        ("600", ["data.eval_sequence_length=600"]),
        ("1100", ["phases.0.sequence_length=1100", "phases.0.max_predictions_per_seq=330"]),
    ],
)
def test_splits_that_fill_no_row_are_refused_as_a_run_would(prepared_once, length, changes):
    long = ["data.objective=mlm", "model.max_position_embeddings=2000"]
    corpus.require_enough_text(prepared_once.folder, config.override(config.load("tiny"), long))
    with pytest.raises(InputError, match=f"do not fill a row of {length}"):
        given = config.override(config.load("tiny"), [*long, *changes])
        corpus.require_enough_text(prepared_once.folder, given)


def test_too_few_documents_are_refused_by_name(place):
    for number in range(15, 24):
        (place.text / f"{number:03}.txt").unlink()
    said = []
    for changes in ({}, {"tokenizer": "train"}, {"tokenizer": "train", "tokenizer_kind": "bpe"}):
        with pytest.raises(InputError, match=r"15 different documents, but 16 are needed"):
            place.prepare(say=said.append, **changes)
    assert not [line for line in said if "training" in line]  # of a vocabulary, for nothing
    # Repeats do not count.
    (place.text / "repeat.txt").write_text(document(0))
    with pytest.raises(InputError, match="15 different documents"):
        place.prepare()
    (place.text / "another.txt").write_text(document(99))
    place.prepare()


def test_bad_settings_are_refused_by_name_and_can_be_mended(place):
    cased = str(place.root / "folder")
    tokenizer.load(place.vocab, "cased").save(epath.Path(cased))
    for changes, named in (
        ({"validation_share": 0.9}, r"corpus\.validation_share=0\.9"),
        ({"vocab_size": 77}, rf"model\.vocab_size=77; set .*={SIZE}"),
        ({"tokenizer": "none/vocab.txt"}, "none/vocab.txt"),
        ({"tokenizer": "train", "vocab_size": 9}, r"model\.vocab_size=9"),
        ({"sources": ("text:none",)}, "text:none"),
        ({"tokenizer": cased}, r"corpus\.case=cased"),
    ):
        with pytest.raises(InputError, match=named):
            place.prepare(**changes)
    for number in range(24):
        # Zero-width spaces: text, but nothing that becomes a token.
        (place.text / f"{number:03}.txt").write_text("\u200b" * (number + 1))
    with pytest.raises(InputError, match="train split"):
        place.prepare()
    write_texts(place.text)
    place.prepare(tokenizer=cased, case="cased")


# --- The stream ---


def test_a_stream_that_is_missing_or_was_being_made_is_made_again(prepared):
    before = content(prepared.folder)
    shutil.rmtree(prepared.folder / "stream" / "validation")
    (prepared.folder / "stream" / "train" / "COMPLETE").unlink()
    (prepared.folder / "stream" / "train" / "ids.bin").write_bytes(b"")
    for split in dataset.SPLITS:
        corpus.open_stream(prepared.folder, split)
    assert content(prepared.folder) == before


def test_a_manifest_of_another_format_is_refused(prepared):
    manifest = corpus.open_manifest(prepared.folder)
    (prepared.folder / "manifest.json").write_text(json.dumps({**manifest, "format_version": 0}))
    with pytest.raises(
        InputError, match=f"format_version 0, this version reads 3; .*remove {prepared.folder} to"
    ):
        prepared.prepare()


@pytest.mark.parametrize("change", ["more", "fewer"])
def test_text_that_changes_while_it_is_read_is_refused(change, place, monkeypatch):
    path, read = place.text / "011.txt", documents.read_extent

    def changing(*arguments):
        if change == "more":
            path.write_text(document(11) + "\nOne more .\n")
        else:
            path.unlink(missing_ok=True)
        return read(*arguments)

    monkeypatch.setattr(documents, "read_extent", changing)
    with pytest.raises(InputError, match=r"corpus\.sources: .*011\.txt: changed while it was read"):
        place.prepare()
    assert not place.folder.exists()
