"""Copies between this machine and buckets: whole, checked, continued."""

import os
import pathlib

import pytest
from etils import epath
from fake_gcs import Fault

from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import copies, mirror, retry

THERE = epath.Path("gs://bucket/corpus")
LARGE = bytes(range(256)) * 40  # 10,240 bytes
FILES = {"first": LARGE, "a/large": LARGE, "small": b"small", "a/empty": b""}


@pytest.fixture(autouse=True)
def pieces(monkeypatch):
    monkeypatch.setattr(copies, "PIECE", 1000)


def filled(folder):
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return epath.Path(folder)


def fetch(target):
    """What is not there, as a corpus is fetched."""
    wanted = {n: len(data) for n, data in FILES.items() if not (target / n).exists()}

    def damage(name, file):
        return "" if file.read_bytes() == FILES[name] else "other bytes"

    copies.fetch_all(THERE, epath.Path(target), wanted, damage, "put it back")


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


def test_files_are_copied_both_ways_in_pieces(objects, tmp_path):
    copies.send_all(filled(tmp_path / "from"), THERE, FILES)
    assert objects.files() == {f"corpus/{name}": data for name, data in FILES.items()}
    assert max(size for name, size in objects.writes if ".parts/" in name) == 1000
    fetch(tmp_path / "to")
    assert files(tmp_path / "to") == FILES
    reads = [name for name, kind in objects.requests if (name, kind) == ("corpus/a/large", "read")]
    assert len(reads) > len(LARGE) // 1000


def broken_after(objects, kind, count):
    """Requests of a kind for the second large file fail once there were so many of it."""
    left = iter(range(count))
    objects.fault = lambda method, name, what: (
        Fault(503) if what == kind and "a/large" in name and next(left, None) is None else None
    )


def test_a_copy_goes_on_after_a_break_with_the_files_that_are_not_there(
    sent, tmp_path, monkeypatch
):
    monkeypatch.setattr(retry, "GIVE_UP", 0.1)
    broken_after(sent, "read", 5)
    with pytest.raises(Unavailable):
        fetch(tmp_path)
    whole = files(tmp_path)
    assert "a/large" not in whole and whole.items() <= FILES.items()  # nothing half
    sent.reset_faults()
    fetch(tmp_path)
    assert files(tmp_path) == FILES
    read = {name.removeprefix("corpus/") for name, _ in sent.requests}
    assert read == FILES.keys() - whole.keys() - {"a/empty"}


def test_sending_goes_on_after_a_break(objects, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "GIVE_UP", 0.1)
    folder = filled(tmp_path)
    broken_after(objects, "write", 5)
    with pytest.raises(Unavailable):
        copies.send_all(folder, THERE, FILES)
    assert "corpus/a/large" not in objects.files()
    objects.reset_faults()
    copies.send_all(folder, THERE, FILES)
    assert objects.files() == {f"corpus/{name}": data for name, data in FILES.items()}
    assert 0 < len([name for name, kind in objects.requests if kind == "write"]) < 20
    objects.reset_faults()
    copies.send_all(folder, THERE, FILES)
    assert not [name for name, kind in objects.requests if kind == "write"]


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
    copies.fetch(THERE / "a/large", epath.Path(tmp_path))
    assert files(tmp_path) == {"large": LARGE}
    with pytest.raises(InputError, match="gs://bucket/corpus/none: is missing"):
        copies.fetch(THERE / "none", epath.Path(tmp_path))


def test_a_long_copy_tells_how_far_it_is(sent, tmp_path, monkeypatch):
    monkeypatch.setattr(copies, "_TELL", 0.0)
    told = []
    wanted = {"a/large": len(LARGE)}
    copies.fetch_all(THERE, epath.Path(tmp_path), wanted, lambda *_: "", "", told.append)
    assert len(told) > 5 and "copy of gs://bucket/corpus: 0 of 0 MB, " in told[0]


def test_processes_of_a_host_make_one_copy(objects):
    with copies.copy_of(THERE) as copy, open(f"{copy}.lock", "ab") as other:
        import fcntl

        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert copies.is_copy(copy) and os.fspath(copy) in os.fspath(mirror.cached("corpora", THERE))


def test_a_part_that_another_worker_made_meanwhile_is_taken(tmp_path):
    target = epath.Path(tmp_path / "part")
    with copies.new_part(target, "record.json") as folder:
        (folder / "record.json").write_text("ours")
        target.mkdir()
        (target / "record.json").write_text("theirs")
    assert files(tmp_path) == {"part/record.json": b"theirs"}


def test_a_part_whose_place_is_taken_by_something_else_is_an_error(tmp_path):
    target = epath.Path(tmp_path / "part")
    target.mkdir()
    (target / "other").write_text("not a part")
    with pytest.raises(OSError), copies.new_part(target, "record.json") as folder:
        (folder / "record.json").write_text("ours")
    assert files(tmp_path) == {"part/other": b"not a part"}
