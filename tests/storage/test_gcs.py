"""The client of buckets that Orbax and jax are given."""

import asyncio
import importlib.util

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("gcsfs") is None, reason="needs the [gcs] extra"
)


def test_a_request_outlasts_ten_minutes_of_faults(monkeypatch):
    import fsspec
    import gcsfs.retry

    from bert_jax.storage import mirror  # noqa: F401  # which registers it

    waited = []

    async def sleep(seconds):
        waited.append(seconds)

    async def away(self, *args, **kwargs):
        raise gcsfs.retry.HttpError({"code": 503, "message": "away"})

    files = fsspec.get_filesystem_class("gcs")
    monkeypatch.setattr(gcsfs.retry.asyncio, "sleep", sleep)
    monkeypatch.setattr(files, "_set_session", away)  # what a request does first
    with pytest.raises(gcsfs.retry.HttpError):
        asyncio.run(files._request(files.__new__(files), "GET", "b/x"))
    assert 600 < sum(waited) < 700
