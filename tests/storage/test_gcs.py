"""The client of buckets that Orbax and jax are given."""

import asyncio
import importlib.util
import itertools
import types

import fake_gcs
import pytest
from etils import epath
from fake_gcs import Fault

from bert_jax.errors import Unavailable
from bert_jax.storage import retry  # buckets registers the client
from bert_jax.storage.storage import storage_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs the [gcs] extra"
)


@pytest.mark.parametrize("status", [403, 503])
def test_a_request_outlasts_ten_minutes_of_faults(status, monkeypatch):
    import fsspec
    import gcsfs.retry

    from bert_jax.storage import gcs

    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    async def away(self, *args, **kwargs):
        gcsfs.retry.validate_response(status, b"away", "b/x")

    files = fsspec.get_filesystem_class("gcs")
    assert files is gcs.RetryingFileSystem
    monkeypatch.setattr(gcs.asyncio, "sleep", sleep)
    monkeypatch.setattr(retry, "time", types.SimpleNamespace(monotonic=lambda: sum(waited)))
    monkeypatch.setattr(files, "_set_session", away)  # what a request does first
    said = []
    monkeypatch.setattr(retry.control, "report", said.append)
    with pytest.raises(Unavailable, match="gs://x"):
        asyncio.run(files._call(files.__new__(files), "GET", "b/{}/o", "x"))
    assert len(said) == 1 and "gs://x" in said[0]
    assert retry.GIVE_UP - retry.LONGEST_WAIT <= sum(waited) <= retry.GIVE_UP


@pytest.mark.parametrize("kind", ["write", "read", "list", "delete"])
def test_what_orbax_does_with_a_file_outlasts_a_fault(kind, objects):
    """Of the text of a small file a write is another call of the client than of an array."""
    path = epath.Path("gs://bucket/run/checkpoints/1/_METADATA")
    numbers = itertools.count()
    objects.fault = lambda method, name, what: (
        Fault(503) if what == kind and next(numbers) % 2 == 0 else None
    )
    path.write_text("text")
    assert path.read_text() == "text" and [*path.parent.iterdir()] == [path]
    path.parent.rmtree()
    assert not objects.files() and next(numbers) > 1


def folder_answers(folder):
    """Returns the answers of a folder to many requests."""
    steps = sorted(path.name for path in folder.iterdir())
    return {
        "names": steps,
        "files": sorted(path.name for path in folder.glob("*/*")),
        "kinds": [(folder / name).is_dir() for name in (*steps, "1/state", "1/none", "none")],
        "there": [(folder / name).exists() for name in ("1", "1/state/a", "1/st", "none", "1/b")],
        "text": (folder / "1" / "state" / "a").read_text(),
    }


def test_a_folder_that_nobody_changes_is_listed_once_and_answers_alike(objects):
    folder = epath.Path("gs://bucket/run/checkpoints")
    for name in ("1/state/a", "1/b", "12/b", "2/state/a"):
        objects.put(f"run/checkpoints/{name}", name.encode(), {})
    objects.put("run/checkpoints2/b", b"of another folder", {})
    wanted = folder_answers(folder)
    objects.requests.clear()
    with storage_of(folder).cache_reads(folder):
        assert folder_answers(folder) == folder_answers(folder) == wanted
        asked = [name for name, kind in objects.requests if kind == "read"]
        assert asked == ["run/checkpoints/1/state/a"]
        assert {path.name for path in folder.parent.iterdir()} == {"checkpoints", "checkpoints2"}
        (folder / "1" / "state" / "a").write_text("other")
        (folder / "3" / "b").write_text("new")
        changed = folder_answers(folder)
        assert changed["text"] == "other" and changed["names"] == ["1", "12", "2", "3"]
    assert folder_answers(folder) == changed


@pytest.mark.parametrize("change", [fake_gcs.emptied, fake_gcs.halved, fake_gcs.flipped])
def test_what_orbax_reads_and_is_damaged_on_its_way_is_read_again(change, objects):
    path = epath.Path("gs://bucket/run/checkpoints/1/_METADATA")
    objects.put("run/checkpoints/1/_METADATA", b'{"format": 1}', {})
    numbers = itertools.count()
    objects.fault = lambda method, name, what: (
        Fault(change=change) if next(numbers) % 2 == 0 else None
    )
    assert path.read_text() == '{"format": 1}' and next(numbers) > 1
    with path.open("rb") as file:  # a range, which has no checksum
        file.seek(2)
        assert change is fake_gcs.flipped or file.read() == b'format": 1}'
