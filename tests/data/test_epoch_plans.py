"""Plans as files: made once a host, by a process of its own, and made again where they are bad."""

import contextlib
import dataclasses
import json
import os
import pickle
import time

import dying
import numpy as np
import pytest
import test_batches as alone
from etils import epath

from bert_jax.data import plans, stream
from bert_jax.errors import InputError, Unavailable


def write_stream(folder, documents=200):
    """A stream on disk, as `prepare` leaves it."""
    made = alone.make_stream(documents)
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


SPEC = plans.PlanSpec((0, "train", 0), 32, 0.1)


def of(split, corpus="a", counts=None):
    return plans.Plans(split, SPEC, corpus, counts)


@pytest.fixture(scope="module")
def expected(on_disk):
    """The plans of two epochs, as those of a small split are made."""
    with pytest.MonkeyPatch.context() as small:
        small.setattr(plans, "_IN_MEMORY", 1 << 20)
        source = of(on_disk)
        return [source.wait(epoch) for epoch in (0, 3)]


def wait_until(holds):
    limit = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


def names(cache, suffix=".plan"):
    return sorted(path.name for path in cache.iterdir() if path.name.endswith(suffix))


def test_a_plan_on_disk_is_that_in_memory_and_is_made_once(on_disk, cache, expected, monkeypatch):
    source, second = of(on_disk), of(on_disk)
    with contextlib.closing(source):
        assert source.find_or_begin(3) is second.find_or_begin(3) is None
        assert source._worker is not None and second._worker is None
        np.testing.assert_array_equal(source.wait(3), expected[1])
    (name,) = names(cache)
    size = 10 * len(expected[1])
    assert size < (cache / name).stat().st_size < size + 1000
    # Another process, and one that was given the source by pickle, map the same file.
    monkeypatch.setattr(plans, "PlanWorker", None)
    for other in (second, pickle.loads(pickle.dumps(source))):
        np.testing.assert_array_equal(other.find_or_begin(3), expected[1])
    # One that was cut off goes.
    path = cache / name
    for content in (path.read_bytes()[:-3], b"", b"\0" * 100):
        path.write_bytes(content)
        assert plans.read(str(path)) is None and not path.exists()


def test_rows_of_a_first_plan_are_counted_once(on_disk, cache, expected, tmp_path, monkeypatch):
    counts = epath.Path(tmp_path) / "plans.json"
    with contextlib.closing(of(on_disk, counts=counts)) as source:
        source.wait(0)
        assert source.count_rows() == len(expected[0])
    monkeypatch.setattr(plans, "PlanWorker", None)
    for path in cache.iterdir():
        path.unlink()
    assert of(on_disk, counts=counts).count_rows() == len(expected[0])
    whole = counts.read_text()
    for text in ("{}", "", whole.replace("checksum", "check"), whole.replace("length", "s")):
        counts.write_text(text)
        assert plans.read_counts(counts) == {} or text == whole


def test_what_a_plan_hangs_on_has_a_file_of_its_own(on_disk):
    others = {"key_parts": (1, "train", 0), "sequence_length": 33, "short_seq_prob": 0.2}
    others |= {"row_kind": "sentences"}
    specs = [SPEC, *(SPEC._replace(**{name: value}) for name, value in others.items())]
    parts = (on_disk, "a"), (on_disk, "b"), (on_disk.part(0, 9), "a"), (on_disk.part(9, 18), "a")
    found = [plans.Plans(split, spec, name) for split, name in parts for spec in specs]
    assert len({one._path(epoch) for one in found for epoch in (0, 1)}) == 4 * 5 * 2


def test_the_plans_used_last_are_kept(on_disk, cache):
    cache.mkdir(parents=True)
    (cache / ".killed.plan.1.tmp").write_bytes(b"half a plan")
    os.utime(cache / ".killed.plan.1.tmp", (0, 0))
    for number in range(9):
        path = cache / f"{number}.plan"
        path.write_bytes(b"")
        os.utime(path, (number, number))
    with contextlib.closing(of(on_disk)) as source:
        source.wait(0)
        wait_until(lambda: not (cache / "1.plan").exists())
    assert set(names(cache)) > {f"{number}.plan" for number in range(2, 9)}
    assert len(names(cache)) == 8 and not names(cache, ".tmp")


def test_a_maker_that_is_killed_is_followed_by_another(on_disk, cache, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(plans, "_write_in_background", dying.kill_worker)
        with pytest.raises(Unavailable, match=r"3 times.*code -9"):
            of(on_disk).wait(0)
        # Closing ends one, and whoever waits for it.
        patch.setattr(plans, "_write_in_background", dying.sleep)
        source = of(on_disk)
        assert source.find_or_begin(0) is None
        maker = source._worker.process
        source.close()
        assert maker.returncode == -9
        with pytest.raises(RuntimeError):
            source.wait(0)
    with contextlib.closing(of(on_disk)) as source:
        assert source.find_or_begin(0) is None
        source._worker.process.kill()
        source._worker.process.wait()
        source.wait(0)


def test_an_error_of_the_maker_is_told_in_its_line(on_disk, cache, tmp_path):
    moved = dataclasses.replace(on_disk, folder=str(tmp_path / "gone"))
    with pytest.raises(InputError, match=r"gone/stream\.json"):
        of(moved).wait(0)
    assert not names(cache)
    for path in cache.iterdir():
        path.unlink()
    cache.rmdir()
    cache.write_text("")
    with pytest.raises(InputError, match=str(cache)):
        of(on_disk).find_or_begin(0)
