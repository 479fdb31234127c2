"""Plans as files: made once a host, by a process of its own, and made again where they are bad."""

import contextlib
import json
import os
import pathlib
import pickle
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from etils import epath

from bert_jax.data import pairs, plan_files, plans, stream
from bert_jax.errors import InputError, Unavailable

LENGTH, SHORT = 32, 0.1


def write_stream(folder, documents=200):
    """A stream on disk, as `prepare` leaves it."""
    rng = np.random.default_rng(0)
    made = stream.from_documents(
        [
            [rng.integers(5, 100, rng.integers(1, 25)).tolist() for _ in range(rng.integers(2, 12))]
            for _ in range(documents)
        ]
    )
    folder.mkdir()
    arrays = {}
    for name in ("ids", "sentence_offsets", "document_offsets", "unigrams"):
        array = getattr(made, name)
        (folder / f"{name}.bin").write_bytes(array.tobytes())
        arrays[name] = [array.dtype.name, len(array)]
    meta = {"format_version": stream.FORMAT_VERSION, "arrays": arrays}
    (folder / "stream.json").write_text(json.dumps(meta))
    return stream.Stream.open(folder)


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory):
    return write_stream(tmp_path_factory.mktemp("stream") / "train")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder, for a machine to which every stream is large."""
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(plans, "_IN_MEMORY", 0)
    return tmp_path / "cache" / "plans"


def of(split, corpus="a", counts=None, seed=0):
    return plans.Plans(split, (seed, "train", 0), LENGTH, SHORT, corpus, counts)


def in_memory(split, epoch=0, seed=0):
    """The plan of a split that is small."""
    return of(split, seed=seed)._in_memory(epoch).chunks


def files(cache):
    return sorted(path.name for path in cache.iterdir())


def wait_until(holds):
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def hold_up(monkeypatch, seconds=100.0):
    """Makers wait before they work, as if the split were large."""
    script = f"import sys, time; time.sleep({seconds}); from bert_jax.data import plans; "
    monkeypatch.setattr(
        plans.subprocess,
        "Popen",
        lambda command, popen=subprocess.Popen, **named: popen(
            [sys.executable, "-c", script + "sys.exit(plans.main())", *command[3:]], **named
        ),
    )


def test_a_plan_on_disk_is_that_in_memory_and_is_made_once(on_disk, cache, monkeypatch):
    expected = in_memory(on_disk, 3)
    source = of(on_disk)
    try:
        plan = source.wait(3)
        assert plan.dtype.itemsize == 10
        np.testing.assert_array_equal(plan, expected)
    finally:
        source.close()
    (name,) = files(cache)
    assert (cache / name).stat().st_size == plan_files._HEAD.size + 10 * len(plan)
    # Another process, and one that was given the source by pickle, map the same file.
    monkeypatch.setattr(plans.subprocess, "Popen", None)
    np.testing.assert_array_equal(of(on_disk).find(3), expected)
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(source)).find(3), expected)


PACKED = plans.Packed(4, 9, 0.15, 5)


def packed_of(split, counts=None):
    return plans.Plans(split, (0, "train", 0), LENGTH, SHORT, "a", counts, packed=PACKED)


def test_packed_rows_on_disk_are_those_in_memory(on_disk, cache, tmp_path, monkeypatch):
    """Of any epoch, which holds as many examples as the first; the counts are kept."""
    with monkeypatch.context() as small:
        small.setattr(plans, "_IN_MEMORY", 1 << 20)
        here = packed_of(on_disk)
        expected = [here.packs(epoch) for epoch in (0, 2)]
        counted = here.examples_per_epoch(), here.rows_per_epoch()
    counts = epath.Path(tmp_path) / "plans.json"
    source = packed_of(on_disk, counts)
    try:
        for epoch, packs in zip((2, 0), reversed(expected), strict=True):
            found = source.packs(epoch)
            np.testing.assert_array_equal(found.starts, packs.starts)
            np.testing.assert_array_equal(found.slots, packs.slots)
            assert len(found.slots) == counted[0] > len(found)
    finally:
        source.close()
    assert len(files(cache)) == 2
    later = packed_of(on_disk, counts)
    monkeypatch.setattr(later, "_find", None)
    assert (later.examples_per_epoch(), later.rows_per_epoch()) == counted
    # The rows of those that share none are the examples of those that do.
    assert of(on_disk, counts=counts).rows_per_epoch() == counted[0]


def test_what_a_plan_hangs_on_has_a_file_of_its_own(on_disk, cache):
    sources = [
        of(on_disk),
        of(on_disk, corpus="b"),
        of(on_disk, seed=1),
        plans.Plans(on_disk, (0, "train", 0), LENGTH + 1, SHORT, "a"),
        plans.Plans(on_disk, (0, "train", 0), LENGTH, 0.2, "a"),
        packed_of(on_disk),
    ]
    paths = {source._path(epoch) for source in sources for epoch in (0, 1)}
    assert len(paths) == 12


def test_a_damaged_plan_is_made_again(on_disk, cache):
    source = of(on_disk)
    expected = source.wait(0).copy()
    path = pathlib.Path(source._path(0))
    whole = path.read_bytes()
    a_bit, head = bytearray(whole), bytearray(whole)
    a_bit[len(whole) // 2] ^= 4
    head[20] ^= 1
    for content in (whole[:-3], b"", whole + bytes(8), a_bit, head):
        path.write_bytes(content)
        assert plan_files.read(str(path), expected.dtype) is None
        assert not path.exists()
    path.write_bytes(a_bit)
    source = of(on_disk)
    np.testing.assert_array_equal(source.wait(0), expected)
    source.close()


def test_the_plans_used_last_are_kept(on_disk, cache, monkeypatch):
    monkeypatch.setattr(plan_files, "_KEPT", 8)
    source = of(on_disk)
    cache.mkdir(parents=True)
    (cache / "killed.plan.tmp").write_bytes(b"half a plan")
    for number in range(9):
        path = cache / f"{number}.plan"
        path.write_bytes(b"")
        os.utime(path, (number, number))
    source.wait(0)
    wait_until(lambda: source._maker is None or source._maker.poll() is not None)
    source.close()
    names = {os.path.basename(source._path(0)), *(f"{number}.plan" for number in range(2, 9))}
    assert set(files(cache)) == names


def test_one_process_makes_a_plan_and_the_others_wait_for_it(on_disk, cache, monkeypatch):
    first, second = of(on_disk), of(on_disk)
    assert first.find(0) is None
    assert second.find(0) is None
    assert first._maker is not None
    assert second._maker is None
    np.testing.assert_array_equal(second.wait(0), first.wait(0))
    first.close()


def test_a_maker_that_is_killed_is_followed_by_another(on_disk, cache):
    source = of(on_disk)
    assert source.find(0) is None
    source._maker.kill()
    wait_until(lambda: source._maker.poll() is not None)
    np.testing.assert_array_equal(source.wait(0), in_memory(on_disk))
    source.close()
    assert files(cache) == [os.path.basename(source._path(0))]


def test_makers_that_are_killed_again_and_again_end_the_wait(on_disk, cache, monkeypatch):
    hold_up(monkeypatch)
    source = of(on_disk)
    with pytest.raises(Unavailable, match=r"killed 3 times, by signal 9; .*memory"):
        while source.find(0) is None:
            source._maker.kill()
            wait_until(lambda: source._maker.poll() is not None)


def test_closing_ends_the_maker_and_whoever_waits(on_disk, cache, monkeypatch):
    hold_up(monkeypatch)
    source = of(on_disk)
    assert source.find(0) is None
    maker = source._maker
    source.close()
    assert maker.returncode == -signal.SIGKILL
    with pytest.raises(RuntimeError, match="closed"):
        source.wait(0)


WAITING = """
import sys, time
from bert_jax.data import plans, stream
plans._IN_MEMORY = 0
source = plans.Plans(stream.Stream.open(sys.argv[1]), (0, "train", 0), 32, 0.1, "a")
popen = plans.subprocess.Popen
def slow(command, **named):
    return popen([sys.executable, "-c", "import sys, threading, time; from bert_jax.data import "
        "plans; threading.Thread(target=plans._end_with_parent).start(); time.sleep(100)"], **named)
plans.subprocess.Popen = slow
source.find(0)
print(source._maker.pid, flush=True)
if sys.argv[2] == "wait":
    time.sleep(100)
"""


@pytest.mark.parametrize("end", ["wait", "leave"])
def test_a_maker_ends_with_the_process_that_began_it(end, on_disk, cache):
    """Killed, or at its end while the next epoch is planned: nothing holds it up."""
    process = subprocess.Popen(
        [sys.executable, "-c", WAITING, on_disk.folder, end], stdout=subprocess.PIPE, text=True
    )
    maker = int(process.stdout.readline())
    if end == "wait":
        process.kill()
    process.wait(20)
    process.stdout.close()

    def ended():
        with contextlib.suppress(FileNotFoundError):
            return "State:\tZ" in pathlib.Path(f"/proc/{maker}/status").read_text()
        return True

    wait_until(ended)
    # Its lock is free: whoever needs the plan makes it.
    source = of(on_disk)
    np.testing.assert_array_equal(source.wait(0), in_memory(on_disk))
    source.close()


def test_a_plan_that_cannot_be_written_is_named(on_disk, cache):
    cache.parent.mkdir()
    cache.write_text("")
    with pytest.raises(InputError, match="is a file where a folder is needed"):
        of(on_disk).find(0)


def test_an_error_of_the_maker_is_told_in_its_line(on_disk, cache, monkeypatch, tmp_path):
    moved = stream.Stream(
        on_disk.ids,
        on_disk.sentence_offsets,
        on_disk.document_offsets,
        on_disk.unigrams,
        str(tmp_path / "gone"),
    )
    with pytest.raises(InputError, match=r"gone/stream\.json: no such file"):
        of(moved).wait(0)


def test_the_rows_of_a_first_plan_are_remembered(on_disk, cache, tmp_path, monkeypatch):
    counts = epath.Path(tmp_path / "plans.json")
    sources = [of(on_disk, counts=counts), of(on_disk, counts=counts, seed=1)]
    found = []
    for source in sources:
        while (rows := source.rows_per_epoch()) is None:
            source.pause()
        found.append(rows)
        source.close()
    assert found == [len(in_memory(on_disk, seed=seed)) for seed in (0, 1)]
    for path in cache.iterdir():
        path.unlink()
    monkeypatch.setattr(plans.subprocess, "Popen", None)
    assert [of(on_disk, counts=counts, seed=seed).rows_per_epoch() for seed in (0, 1)] == found
    monkeypatch.undo()
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    whole = counts.read_text()
    for text in ("{}", "", whole.replace("checksum", "check"), whole.replace(str(found[0]), "7")):
        counts.write_text(text)
        source = of(on_disk, counts=counts)
        while (rows := source.rows_per_epoch()) is None:
            source.pause()
        source.close()
        assert rows == found[0] and plans.read_counts(counts)


def test_a_small_split_is_planned_in_memory(on_disk, tmp_path, monkeypatch):
    monkeypatch.setenv("BERT_JAX_CACHE_DIR", str(tmp_path / "cache"))
    source = of(on_disk)
    plan = pairs.plan(on_disk, LENGTH, SHORT, source.key(0))
    found = source.find(0)
    assert sorted(found.tolist()) == sorted(plan.tolist())
    assert found.tolist() != plan.tolist()
    assert not (tmp_path / "cache").exists()
