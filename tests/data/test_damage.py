"""A corpus whose files are not as `prepare` made them."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from broken import call
from etils import epath

from bert_jax.data import corpus, stream
from bert_jax.errors import InputError
from bert_jax.storage.workdir import lock, sealed

FOLDER = epath.Path("corpus")


def flip(name):
    """The lowest bit of a file's last byte."""
    path = pathlib.Path(name)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


NAMES = ("ids.bin", "sentence_offsets.bin", "document_offsets.bin", "unigrams.bin", "stream.json")


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_is_named_at_the_next_opening(name, copy_of_run):
    flip(f"corpus/stream/train/{name}")
    for words in ("show --workdir run", "pretrain small.py --workdir run", "doctor run"):
        code, err = call(words)
        assert (code, err.count("\n")) == (2, 1)
        assert f"corpus/stream/train/{name}: missing or damaged (was changed" in err
        assert "remove corpus/stream and run again" in err
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
        code, err = call(words)
        assert (code, err.count("\n")) == (2, 1)
        assert "corpus/stream/train/ids.bin: missing or damaged" in err


def test_the_dataset_is_read_by_verify_too(copy_of_run):
    shard = next(pathlib.Path("corpus/dataset").rglob("*train*array_record*"))
    flip(shard)
    assert call("prepare small.py --workdir run") == (0, "")
    code, err = call("prepare small.py --workdir run --verify")
    assert code == 2 and f"{shard}: missing or damaged" in err


def test_a_stream_is_made_of_a_sound_dataset_alone(copy_of_run):
    """Also where the bit is one that reading it does not miss."""
    shard = next(pathlib.Path("corpus/dataset").rglob("*train*array_record*"))
    shutil.rmtree("corpus/stream")
    flip(shard)
    code, err = call("show --workdir run")
    assert (code, err.count("\n")) == (2, 1)
    assert f"{shard}: missing or damaged" in err and "to prepare it anew" in err
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


def test_an_edited_tokenizer_is_refused_whichever_of_its_files_it_is(copy_of_run):
    for path in [p for p in pathlib.Path("corpus/tokenizer").iterdir() if p.is_file()]:
        whole = path.read_bytes()
        path.write_bytes(whole + b"\n")
        code, err = call("show --workdir run")
        assert (code, err.count("\n")) == (2, 1), path
        assert "corpus/tokenizer" in err
        path.write_bytes(whole)
    assert call("show --workdir run") == (0, "")


@pytest.mark.parametrize("name", ["../outside", "/outside", "stream/../../outside"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name, copy_of_run):
    path = pathlib.Path("corpus/manifest.json")
    manifest = json.loads(path.read_text())
    manifest["files"][name] = [0, ""]
    path.write_text(json.dumps(sealed(manifest)))
    with pytest.raises(InputError, match=f"manifest.json: names {name}, which lies elsewhere"):
        corpus.open_manifest(FOLDER)
