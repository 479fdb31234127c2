"""A corpus made part by part: in processes, by Beam, after a kill, from a bucket."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import dying
import forms
import numpy as np
import pytest
import samples
import tensorflow_datasets as tfds
from etils import epath

from bert_jax.config import Corpus
from bert_jax.data import build, corpus, dataset, parts, work_items
from bert_jax.errors import InputError, Unavailable
from bert_jax.text import documents, sentence_splitter, tokenizer
from bert_jax.text import sources as text_sources

SIZE = 90


def text_of(number, lines=6):
    rng = np.random.default_rng(number)
    words = ["".join(rng.choice(list("abcdefghijé"), rng.integers(1, 6))) for _ in range(40)]
    return "\n".join(" ".join(rng.choice(words, 8)).capitalize() + "." for _ in range(lines))


def write_json(path, count=64):
    lines = [json.dumps({"text": text_of(number)}) for number in range(count)]
    path.write_text("\n".join(lines) + "\n")
    return path


def settings(path, **changes):
    return Corpus(sources=(f"jsonl:{path}",), validation_share=0.2, **changes)


def prepare(claim, folder, size=SIZE, say=lambda line: None, **how):
    corpus.prepare(claim, size, epath.Path(folder), say, **how)
    return made(folder)


def made(folder):
    """All files of a corpus, but for the lock, which holds nothing."""
    folder = pathlib.Path(folder)
    assert not (folder / "parts").exists()
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(parts, "PART_BYTES", 2_000)


@pytest.fixture
def text(tmp_path):
    return write_json(tmp_path / "text.jsonl")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A corpus in several parts: what it is of, its folder, its files."""
    root = tmp_path_factory.mktemp("whole")
    claim = settings(write_json(root / "text.jsonl"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "PART_BYTES", 2_000)
        files = prepare(claim, root / "made")
    return claim, epath.Path(root / "made"), files


# --- Parts ---


def test_a_part_ends_between_lines_and_all_of_them_are_the_text(text):
    claim = settings(text)
    planned = parts.plan(claim)
    assert len(planned) > 5
    found = [document for part in planned for document in part.documents(claim)]
    assert [document.text for document in found] == [text_of(number) for number in range(64)]
    # Nothing to be cut: compressed, or lines that are not bytes.
    assert len(parts.plan(settings(text, encoding="utf-16"))) == 1


def test_blocks_of_sentences_are_cut_at_blank_lines(tmp_path):
    path = tmp_path / "all.txt"
    blank = ["", "", " ", "\t"]
    path.write_text("".join(f"{text_of(n)}\n{blank[n % 4]}\n" for n in range(64)))
    claim = Corpus(sources=(f"text:{path}",), layout="sentences_by_line")
    planned = parts.plan(claim)
    assert len(planned) > 5
    found = [document.text for part in planned for document in part.documents(claim)]
    assert found == [document.text for document in documents.read(claim)]
    assert found == [text_of(number) for number in range(64)]


def test_a_wrong_line_is_named_by_its_number_in_the_file(text):
    lines = text.read_text().split("\n")
    lines[50] = "{"
    text.write_text("\n".join(lines))
    claim = settings(text)
    with pytest.raises(InputError, match=r"text\.jsonl:51: not JSON"):
        for part in parts.plan(claim):
            list(part.documents(claim))


def test_array_record_files_are_cut_between_records(tmp_path):
    folder = samples.text_dataset(tmp_path, [text_of(number) for number in range(64)])
    claim = Corpus(sources=(f"tfds_dir:{folder}",))
    planned = parts.plan(claim)
    assert len(planned) > 5
    found = [document for part in planned for document in part.documents(claim)]
    assert [document.text for document in found] == [text_of(number) for number in range(64)]
    assert [document.name for document in found] == [f"{folder}:{n}" for n in range(64)]


# --- The same bytes ---


@pytest.mark.long
def test_two_processes_make_the_bytes_of_one_with_shards_in_order(whole, tmp_path):
    claim, _, files = whole
    assert prepare(claim, tmp_path / "two", workers=2) == files
    assert len([name for name in files if "train.array_record" in name]) > 5


@pytest.mark.parametrize(("kind", "size"), [("wordpiece", SIZE), ("byte_bpe", 300)])
def test_parts_of_another_size_make_the_same_ids(kind, size, text, tmp_path, monkeypatch):
    claim = settings(text, tokenizer_kind=kind)
    cut = prepare(claim, tmp_path / "cut", size)
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 20)
    monkeypatch.setattr(parts, "_CHARACTERS", 1)
    monkeypatch.setattr(parts, "_TOKENS", 1)
    monkeypatch.setattr("bert_jax.text.words._HELD", 50)
    uncut = prepare(claim, tmp_path / "uncut", size)
    names = [n for n in uncut if n.startswith(("stream/", "tokenizer/"))]
    assert len(names) > 10
    for name in names:
        assert uncut[name] == cut[name], name
    assert json.loads(cut["manifest.json"])["splits"]["train"]["unknown_tokens"] == 0
    assert tokenizer.load(tmp_path / "cut" / "tokenizer").size == size


def test_the_ids_are_those_of_the_tokenizer_and_tfds_opens_the_dataset(whole):
    claim, folder, _ = whole
    tok = tokenizer.load(folder / "tokenizer")
    expected = [
        [tok.encode(line) for line in sentence_splitter.split(document, "en")]
        for document in documents.read(claim)
    ]
    found = []
    builder = tfds.builder_from_directory(dataset.folder_of(folder))
    for split in dataset.SPLITS:
        opened = corpus.open_stream(folder, split)
        bounds = opened.sentence_offsets.astype(int)
        pieces = [opened.ids[a:b].tolist() for a, b in itertools.pairwise(bounds)]
        ends = opened.document_offsets.astype(int)
        found += [pieces[a:b] for a, b in itertools.pairwise(ends)]
        source = list(builder.as_data_source(split))
        assert len(source) == len(ends) - 1
        ids = np.concatenate([example["ids"] for example in source])
        assert ids.dtype == np.uint16
        np.testing.assert_array_equal(ids, opened.ids)
        lengths = np.concatenate([example["sentence_lengths"] for example in source])
        np.testing.assert_array_equal(lengths, np.diff(bounds))
    assert sorted(found) == sorted(expected)


def test_beam_makes_the_same_bytes(text, tmp_path):
    pytest.importorskip("apache_beam")
    claim = settings(text)
    one = prepare(claim, tmp_path / "one")
    runner = "DirectRunner --direct_num_workers=2 --direct_running_mode=multi_processing"
    assert prepare(claim, tmp_path / "beam", beam=runner) == one
    text.write_text(text.read_text() + "{\n")
    for options, named in (
        (runner, r"text\.jsonl:65: "),
        ("", "--beam"),
        ("DirectRunner --name='x", "--beam"),
        ("NoSuchRunner", "--beam"),
    ):
        with pytest.raises(InputError, match=named):
            prepare(claim, tmp_path / "wrong", beam=options)


def test_beam_that_is_not_installed_is_named(text, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "apache_beam", None)
    with pytest.raises(InputError, match=r"--beam: .*\[beam\]"):
        prepare(settings(text), tmp_path / "made", beam="DirectRunner")


# --- Going on ---


@pytest.fixture
def done(monkeypatch):
    """Names of tasks that were done, in order."""
    names = []
    do = work_items.run_item

    def noting(task, *tick):
        record = do(task, *tick)
        names.append(task.name)
        return record

    monkeypatch.setattr(work_items, "run_item", noting)
    return names


def test_what_is_whole_is_not_made_again(whole, tmp_path, done, monkeypatch):
    claim, _, files = whole
    planned = parts.plan(claim)
    noting = work_items.run_item

    def failing(*task):
        if len(done) == 7:
            raise KeyboardInterrupt
        return noting(*task)

    with monkeypatch.context() as context:
        context.setattr(work_items, "run_item", failing)
        with pytest.raises(KeyboardInterrupt):
            prepare(claim, tmp_path / "made")
    lines = []
    assert prepare(claim, tmp_path / "made", say=lines.append) == files
    assert len(done) == len(set(done)) == 2 * len(planned)
    assert any("were done before" in line for line in lines)


def test_another_vocabulary_does_not_read_the_text_again(whole, tmp_path, done):
    claim, _, _ = whole
    with pytest.raises(InputError, match="vocab_size=9"):
        prepare(claim, tmp_path / "made", 9)
    before = len(done)
    prepare(claim, tmp_path / "made")
    assert done[:before] and all(name.startswith("shards-") for name in done[before:])


def test_text_that_changed_between_two_starts_is_made_again(text, tmp_path, monkeypatch):
    claim = settings(text)
    with monkeypatch.context() as context:
        context.setattr(dataset, "assemble", None)
        with pytest.raises(TypeError):
            prepare(claim, tmp_path / "made")
    write_json(text, 70)
    changed = prepare(claim, tmp_path / "made")
    assert changed == prepare(claim, tmp_path / "fresh")
    # A start on what is prepared reads no text.
    with monkeypatch.context() as context:
        context.setattr(text_sources, "sha256", None)
        context.setattr(documents, "read_extent", None)
        assert prepare(claim, tmp_path / "made") == changed
    os.utime(text, ns=(0, 0))  # another date, the same text
    assert prepare(claim, tmp_path / "made") == changed


ALONE = """
import sys
from etils import epath
from bert_jax.config import Corpus
from bert_jax.data import corpus, parts
parts.PART_BYTES = 2_000
claim = Corpus(sources=("jsonl:" + sys.argv[1],), validation_share=0.2)
corpus.prepare(claim, int(sys.argv[3]), epath.Path(sys.argv[2]), print, workers=2)
"""


@pytest.mark.long
def test_killed_with_its_processes_and_begun_again_it_is_the_same(text, tmp_path):
    claim = settings(write_json(text, 400))
    whole = prepare(claim, tmp_path / "whole")
    command = [sys.executable, "-c", ALONE, str(text), str(tmp_path / "made"), str(SIZE)]
    for count in (3, 40):
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            while process.poll() is None and len(list(tmp_path.glob("made/parts/*-*"))) < count:
                time.sleep(0.01)
            process.send_signal(signal.SIGKILL)
            assert process.wait() == -signal.SIGKILL
        with pytest.raises(InputError, match="no prepared corpus here"):
            corpus.open_manifest(epath.Path(tmp_path / "made"))
    # By a process with other hashes than this one's, and undisturbed.
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert made(tmp_path / "made") == whole


# --- Processes that fail ---


def test_a_worker_that_is_killed_can_be_tried_again(tmp_path):
    tasks = [dying.Item(str(tmp_path), f"{number}") for number in range(2)]
    with pytest.raises(Unavailable, match=r"a worker process died with code -9"):
        work_items.run(tasks, 2, work_items.StageProgress("prepare", lambda line: None))
    assert not [path for path in tmp_path.iterdir() if not path.name.startswith(".")]


# --- Progress ---


def test_lines_tell_how_far_it_is_and_how_long_it_takes(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(work_items, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    lines = []
    shown = work_items.StageProgress("prepare: reading", lines.append)
    with shown.track(300_000_000, 200_000_000):
        for _ in range(10):
            now[0] += 10
            shown.tick(5_000_000)
        shown.end(50_000_000)
        now[0] += 30
        shown.end(50_000_000)
    assert lines[0].startswith("prepare: reading: 100 MB of 300 MB")
    assert lines[1:] == [
        "prepare: reading: 115 MB of 300 MB, 0.5 MB/s, 6 min left",
        "prepare: reading: 130 MB of 300 MB, 0.5 MB/s, 6 min left",
        "prepare: reading: 145 MB of 300 MB, 0.5 MB/s, 5 min left",
        "prepare: reading: 200 MB of 300 MB, 0.8 MB/s, 2 min left",
    ]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    with shown.track(300, 200):
        shown.tick(50)
        assert shown._bar.tasks[0].completed == 50


# --- Long words ---


@pytest.mark.parametrize("name", ["modernbert", "gemma"])
def test_an_unknown_word_takes_the_blank_before_it(name, tmp_path):
    tok = forms.OURS[name]
    task = types.SimpleNamespace(
        corpus=Corpus(sources=("text:a",), unknown_word="@@"), part=parts.Part((), (), 0)
    )
    writer = parts._IdWriter(tmp_path, task, tok)
    lengths = writer.add(["@@ the people @@ @@ let the.", "the @@", "the people let"])
    writer.close()
    ids = iter(np.fromfile(tmp_path / "tokens.bin", np.uint32).tolist())
    found = [list(itertools.islice(ids, n)) for n in lengths.tolist()]
    unk, let = tok.unk_id, tok.encode_after_space("let the.")
    assert found[0] == [unk, *tok.encode_after_space("the people"), unk, unk, *let]
    assert found[1:] == [
        [*tok.encode_after_space("the"), unk],
        tok.encode_after_space("the people let"),
    ]


# --- Sources in a bucket ---


def test_a_dataset_in_a_bucket_is_fetched_shard_by_shard_and_dropped(
    objects, tmp_path, monkeypatch
):
    folder = samples.text_dataset(tmp_path, [text_of(number) for number in range(64)])
    for path in folder.iterdir():
        objects.put(f"datasets/texts/1.0.0/{path.name}", path.read_bytes(), {})
    monkeypatch.setenv("TFDS_DATA_DIR", "gs://bucket/datasets")
    monkeypatch.setattr(parts, "PART_BYTES", 1 << 20)  # there a file is not cut
    claim = Corpus(sources=("tfds:texts",), validation_share=0.2)
    there = prepare(claim, tmp_path / "there")
    assert not list((tmp_path / "cache").rglob("*.array_record*"))
    assert not list((tmp_path / "cache" / "sources").iterdir())
    here = prepare(Corpus(sources=(f"tfds_dir:{folder}",), validation_share=0.2), tmp_path / "here")
    # The manifest names the source.
    names = here.keys() - {"manifest.json"}
    assert {name: there[name] for name in names} == {name: here[name] for name in names}
    # A start on it asks for the metadata's date alone; one that was changed is refused.
    assert prepare(claim, tmp_path / "there") == there
    name = "datasets/texts/1.0.0/dataset_info.json"
    objects.put(name, objects.files()[name] + b" ", {})
    with pytest.raises(InputError, match=r"dataset_info\.json has changed since"):
        prepare(claim, tmp_path / "there")


def test_a_dataset_that_is_not_in_its_bucket_is_named(objects, tmp_path):
    claim = Corpus(sources=("tfds_dir:gs://bucket/none/1.0.0",))
    with pytest.raises(
        InputError, match=r"gs://bucket/none/1\.0\.0/dataset_info\.json: is missing"
    ):
        prepare(claim, tmp_path / "made")
    folder = samples.text_dataset(tmp_path, [text_of(number) for number in range(64)])
    for path in folder.glob("*.json"):
        objects.put(f"some/1.0.0/{path.name}", path.read_bytes(), {})
    claim = Corpus(sources=("tfds_dir:gs://bucket/some/1.0.0",))
    with pytest.raises(InputError, match=r"gs://bucket/some/1\.0\.0/texts-train.*missing"):
        prepare(claim, tmp_path / "made")


def test_a_part_without_its_record_is_not_taken_for_whole(whole, tmp_path):
    """As a machine that crashed may leave it."""
    claim, _, files = whole
    place = tmp_path / "made" / build.PARTS
    for part in parts.plan(claim)[:2]:
        (place / parts.Read(str(place), claim, part).name).mkdir(parents=True)
    (place / "read-0.error").write_text("left by Beam")
    (tmp_path / "made" / "lock").touch()
    assert prepare(claim, tmp_path / "made") == files
