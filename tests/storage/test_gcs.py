"""The client of buckets that Orbax and jax are given."""

import asyncio
import importlib.util
import itertools
import types

import pytest
from etils import epath
from fake_gcs import Fault

from bert_jax.errors import Unavailable
from bert_jax.storage import buckets, retry  # buckets registers the client

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
    assert files is gcs.PatientFileSystem and buckets
    monkeypatch.setattr(gcs.asyncio, "sleep", sleep)
    monkeypatch.setattr(retry, "time", types.SimpleNamespace(monotonic=lambda: sum(waited)))
    monkeypatch.setattr(files, "_set_session", away)  # what a request does first
    said = []
    monkeypatch.setattr(retry, "say", said.append)
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
