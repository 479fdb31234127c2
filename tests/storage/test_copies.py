"""Copies between this machine and buckets: whole, checked, continued."""

import os
import pathlib
import types

import pytest
from etils import epath
from fake_gcs import Fault

from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import buckets, copies, mirror, retry
from bert_jax.storage.storage import storage_of

THERE = epath.Path("gs://bucket/corpus")
LARGE = bytes(range(256)) * 40  # 10,240 bytes
FILES = {"first": LARGE, "a/large": LARGE, "small": b"small", "a/empty": b""}


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    monkeypatch.setattr(copies, "PIECE", 1000)
    monkeypatch.setattr(copies, "_REPORT_EVERY", 0.0)


def filled(folder):
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return epath.Path(folder)


def fetch(target, say=None):
    """What is not there, as a corpus is fetched."""
    wanted = [name for name in FILES if not (target / name).exists()]

    def damage(name, file):
        return "" if file.read_bytes() == FILES[name] else "other bytes"

    copies.download_all(THERE, epath.Path(target), wanted, damage, "put it back", say)


def files(folder):
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in pathlib.Path(folder).rglob("*")
        if path.is_file()
    }


@pytest.fixture
def sent(objects):
    for name, data in FILES.items():
        objects.put(f"corpus/{name}", data, {})
    objects.writes.clear()
    return objects


def test_files_are_copied_both_ways_and_fetched_in_pieces(objects, tmp_path):
    copies.upload_all(filled(tmp_path / "from"), THERE, FILES)
    assert objects.files() == {f"corpus/{name}": data for name, data in FILES.items()}
    told = []
    fetch(tmp_path / "to", told.append)
    assert files(tmp_path / "to") == FILES
    reads = [name for name, kind in objects.requests if (name, kind) == ("corpus/a/large", "read")]
    assert len(reads) > len(LARGE) // 1000
    assert len(told) > 5 and "gs://bucket/corpus: 0 of 0 MB, " in told[0]


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_copy_goes_on_after_a_break_with_the_files_that_are_not_there(
    kind, objects, tmp_path, monkeypatch
):
    def copy():
        if kind == "read":
            fetch(tmp_path / "to")
            return files(tmp_path / "to")
        copies.upload_all(here, THERE, FILES)
        return {n.removeprefix("corpus/"): data for n, data in objects.files().items()}

    here = filled(tmp_path / "from")
    if kind == "read":
        copies.upload_all(here, THERE, FILES)
    monkeypatch.setattr(retry, "GIVE_UP", 0.1)
    objects.reset_faults()
    objects.fault = lambda method, name, what: (
        Fault(503) if what == kind and name == "corpus/a/large" else None
    )
    with pytest.raises(Unavailable):
        copy()
    there = files(tmp_path / "to") if kind == "read" else objects.files()
    assert "a/large" not in there and "corpus/a/large" not in there and there  # nothing half
    objects.reset_faults()
    assert copy() == FILES
    asked = {name.removeprefix("corpus/") for name, what in objects.requests if what == kind}
    assert "a/large" in asked and "first" not in asked
    objects.reset_faults()
    assert copy() == FILES
    assert kind not in {what for _, what in objects.requests}


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone"])
def test_a_damaged_object_is_named_and_not_kept(damage, sent, tmp_path):
    if damage == "gone":
        sent.delete("corpus/a/large", {})
    else:
        other = LARGE[:-1] + (b"" if damage == "shorter" else b"x")
        sent.put("corpus/a/large", other, {})
    word = "is missing" if damage == "gone" else "damaged"
    with pytest.raises(InputError, match=rf"gs://bucket/corpus/a/large: {word}.*; put it back"):
        fetch(tmp_path)
    assert not (tmp_path / "a" / "large").exists()


def test_one_object_is_fetched_and_checked(sent, tmp_path):
    copies.download(THERE / "a/large", epath.Path(tmp_path))
    assert files(tmp_path) == {"large": LARGE}
    with pytest.raises(InputError, match="gs://bucket/corpus/none: is missing"):
        copies.download(THERE / "none", epath.Path(tmp_path))


@pytest.mark.parametrize("how", ["download", "open"])
def test_an_outage_in_the_middle_of_an_object_is_waited_for_once(how, sent, tmp_path, monkeypatch):
    """The whole object was waited for again once one of its parts had been given up."""
    waited = []
    clock = types.SimpleNamespace(monotonic=lambda: sum(waited), sleep=waited.append)
    monkeypatch.setattr(retry, "time", clock), monkeypatch.setattr(copies, "time", clock)
    monkeypatch.setattr(copies, "PIECE", len(LARGE))

    def fail(*args):
        raise ConnectionError("gone")

    monkeypatch.setattr(buckets, "_request_content", fail)
    with pytest.raises(Unavailable, match="gs://bucket/corpus/a/large"):
        if how == "download":
            copies.download(THERE / "a/large", epath.Path(tmp_path))
        else:
            file = storage_of(THERE).open(THERE / "a/large")
            file.read()
    assert retry.GIVE_UP - retry.LONGEST_WAIT <= sum(waited) <= retry.GIVE_UP


def test_processes_of_a_host_make_one_copy(objects):
    with copies.lock_corpus_copy(THERE) as copy, open(f"{copy}.lock", "ab") as other:
        import fcntl

        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = os.fspath(mirror.cache_folder_of("corpora", THERE))
    assert copies.is_copy(copy) and os.fspath(copy) in folder


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_part_that_another_worker_made_is_taken(when, tmp_path):
    target = epath.Path(tmp_path / "part")

    def other():
        target.mkdir()
        (target / "record.json").write_text("theirs")

    if when == "before":
        other()
    with copies.new_item_folder(target, "record.json") as folder:
        (folder / "record.json").write_text("ours")
        if when == "meanwhile":
            other()
    assert files(tmp_path) == {"part/record.json": b"theirs"}


def test_a_part_whose_place_is_taken_by_something_else_is_an_error(tmp_path):
    target = epath.Path(tmp_path / "part")
    target.mkdir()
    (target / "other").write_text("not a part")
    with pytest.raises(InputError), copies.new_item_folder(target, "record.json") as folder:
        (folder / "record.json").write_text("ours")
    assert files(tmp_path) == {"part/other": b"not a part"}


def test_a_new_folder_takes_the_place_of_an_empty_one_alone(tmp_path):
    (tmp_path / "new").mkdir()
    with copies.new_folder(epath.Path(tmp_path / "new")) as folder:
        (folder / "file").write_text("x")
    assert files(tmp_path) == {"new/file": b"x"}
    with pytest.raises(InputError, match="is there already"):
        copies.new_folder(epath.Path(tmp_path / "new")).__enter__()
