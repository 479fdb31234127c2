"""A corpus whose files are not as `prepare` made them."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from broken import call, fails
from etils import epath

from bert_jax.data import corpus, stream
from bert_jax.errors import InputError
from bert_jax.storage.locks import lock
from bert_jax.storage.workdir import (
    with_checksum,
)

FOLDER = epath.Path("corpus")


def flip(name):
    """The lowest bit of a file's last byte."""
    path = pathlib.Path(name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


ARRAYS = ("ids.bin", "sentence_offsets.bin", "document_offsets.bin", "unigrams.bin")
# Files of a corpus, and what to do about a damaged one.
FILES = {
    "manifest.json": "restore the original file",
    "tokenizer/tokenizer.json": "put its own tokenizer back",
    "tokenizer/vocab.txt": "put its own tokenizer back",
    **dict.fromkeys(
        (f"stream/train/{name}" for name in (*ARRAYS, "stream.json")),
        "remove corpus/stream and run again",
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_cut_short_or_with_a_flipped_bit_is_named_at_the_next_opening(name, copy_of_run):
    path = FOLDER / name
    whole = path.read_bytes()
    flipped = whole[:-1] + bytes([whole[-1] ^ 1])
    for damaged in (whole[:-9], b"", flipped):
        path.write_bytes(damaged)
        fails("show --workdir run", f"{path}: ", FILES[name], "damaged")
    if name.startswith("stream/"):
        shutil.rmtree("corpus/stream")
        assert call("show --workdir run") == (0, "")


def test_of_a_large_file_a_flipped_bit_is_found_when_all_is_read(copy_of_run, monkeypatch):
    monkeypatch.setattr(corpus, "_SMALL", 500)
    assert pathlib.Path("corpus/stream/train/ids.bin").stat().st_size > 500
    prepare = "prepare small.py --workdir run"
    assert call(f"{prepare} --verify") == (0, "")
    flip("corpus/stream/train/ids.bin")
    assert call(prepare) == (0, "")
    for words in (f"{prepare} --verify", "doctor corpus"):
        fails(words, "corpus/stream/train/ids.bin: missing or damaged")


def test_the_dataset_is_read_by_verify_and_before_a_stream_is_made_of_it(copy_of_run):
    shard = next(pathlib.Path("corpus/dataset").rglob("*train*array_record*"))
    flip(shard)
    assert call("prepare small.py --workdir run") == (0, "")
    shutil.rmtree("corpus/stream")
    for command in ("prepare small.py --workdir run --verify", "show --workdir run"):
        fails(command, f"{shard}: missing or damaged", "to prepare it again")
    assert not pathlib.Path("corpus/stream").exists()


def test_a_stream_is_made_anew_by_one_process_alone(copy_of_run):
    shutil.rmtree("corpus/stream")
    with lock(FOLDER), pytest.raises(InputError, match="corpus: in use by process"):
        corpus.open_stream(FOLDER, "train")
    assert not pathlib.Path("corpus/stream").exists()
    corpus.open_stream(FOLDER, "train")


def test_pieces_are_counted_once(copy_of_run, monkeypatch):
    opened = corpus.open_stream(FOLDER, "train")
    assert (opened.unigrams == np.bincount(opened.ids, minlength=45)).all()
    monkeypatch.setattr(stream, "count", None)  # counts no more
    assert call("evaluate --workdir run") == (0, "")


@pytest.mark.parametrize("name", ["../outside", "/outside", "stream/../../outside"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name, copy_of_run):
    path = pathlib.Path("corpus/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["files"][name] = [0, ""]
    path.write_text(json.dumps(with_checksum(manifest)))
    with pytest.raises(InputError, match=f"manifest.json: names {name}, which lies elsewhere"):
        corpus.open_manifest(FOLDER)
