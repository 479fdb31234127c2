"""Which errors pass, and how long one waits for them."""

import errno
import json
import math
import socket
import types

import pytest
from etils import epath
from fake_gcs import Fault, emptied, halved

from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import retry

PASSES = [
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EIO, "Input/output error"),
    OSError(errno.EMFILE, "Too many open files"),
    ConnectionResetError("reset by peer"),
    TimeoutError(),
    socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution"),
    ValueError("UNAVAILABLE: Error opening kvstore"),
    ValueError("DEADLINE_EXCEEDED: GCS request"),
    RuntimeError("HTTP response code: 503 with body 'try later'"),
    Unavailable("elsewhere"),
]
STAYS = [
    OSError(errno.ENOENT, "No such file or directory"),
    FileNotFoundError("gone"),
    OSError(errno.ENOSPC, "No space left on device"),
    ValueError("NOT_FOUND: no manifest"),
    ValueError("Error reading array index"),
    RuntimeError("HTTP response code: 501"),
    InputError("bad"),
    KeyError("x"),
]


def raised_from(cause):
    error = ValueError("Failed to load the checkpoint")
    error.__cause__ = cause
    return error


def test_errors_of_networks_and_machines_pass_and_no_others():
    for error in [*PASSES, *STAYS]:
        expected = error in PASSES
        assert retry.is_transient(error) == retry.is_transient(raised_from(error)) == expected


def test_statuses_as_gcsfs_raises_them():
    gcsfs_retry = pytest.importorskip("gcsfs.retry")
    for status in (400, 401, 403, 404, 408, 412, 429, 500, 501, 503):
        with pytest.raises(Exception) as caught:
            gcsfs_retry.validate_response(status, b"why", "b/o")
        assert retry.is_transient(caught.value) == (status in (408, 429, 500, 503))
        assert retry.is_denied(caught.value) == (status in (401, 403))


@pytest.mark.parametrize("change", [emptied, halved, lambda body: b"[]"])
def test_an_answer_that_a_client_cannot_read_passes(change, objects):
    """An upload parses it outside of the call that is repeated."""
    objects.fault = lambda method, name, kind: Fault(change=change) if kind == "write" else None
    with pytest.raises((ValueError, AttributeError)) as caught:
        epath.Path("gs://bucket/run/file").write_text("text")
    assert retry.is_transient(caught.value)


def test_a_file_that_cannot_be_read_stays():
    with pytest.raises(ValueError) as caught:
        json.loads("")
    assert not retry.is_transient(caught.value)


@pytest.fixture
def waits(monkeypatch):
    """The clock, which waiting alone moves; gives the waits. Threads of others keep theirs."""
    found = []
    clock = types.SimpleNamespace(monotonic=lambda: sum(found), sleep=found.append)
    monkeypatch.setattr(retry, "time", clock)
    return found


def failing(times, error):
    left = [error] * times

    def work():
        if left:
            raise left.pop()
        return "done"

    return work


def test_what_fails_for_a_while_is_done_in_the_end_with_growing_waits(waits, monkeypatch):
    said = []
    monkeypatch.setattr(retry.control, "report", said.append)
    assert retry.call_with_retries(failing(6, PASSES[0]), "gs://b/x") == "done"
    assert len(waits) == 6 and waits[-1] > 5 * waits[0]
    assert len(said) == 1 and "gs://b/x" in said[0]


def test_what_fails_for_long_is_unavailable(waits):
    with pytest.raises(Unavailable, match=r"gs://b/x: out of reach for 900 seconds"):
        retry.call_with_retries(failing(1000, TimeoutError()), "gs://b/x", seconds=900)
    assert 900 - retry.LONGEST_WAIT <= sum(waits) <= 900
    assert max(waits) <= retry.LONGEST_WAIT


def test_who_is_to_stop_waits_for_half_a_minute(waits, monkeypatch):
    monkeypatch.setattr(retry.control, "deadline", math.inf)
    calls = iter(range(1000))

    def work():
        if next(calls) == 3:
            retry.control.shorten()
            waits.append(0.0)  # the time
        raise TimeoutError

    with pytest.raises(Unavailable):
        retry.call_with_retries(work, "gs://b/x")
    assert 15 < sum(waits[waits.index(0.0) :]) <= 30


def test_what_does_not_pass_or_was_found_to_be_bad_input_is_raised_at_once(waits):
    refused = InputError("gs://b: this account may not list")
    refused.__cause__ = ValueError("PERMISSION_DENIED: no access")
    for error in (KeyError("x"), refused):
        with pytest.raises(type(error)):
            retry.call_with_retries(failing(1, error), "gs://b/x")
    assert not waits


def test_rights_that_are_refused_are_bad_input_at_first_and_pass_later(waits):
    denied = ValueError("PERMISSION_DENIED: no access")
    with pytest.raises(InputError, match="may not be used"):
        retry.call_with_retries(failing(1, denied), "gs://b/x", denied="refuse")
    assert not waits
    assert retry.call_with_retries(failing(3, denied), "gs://b/x") == "done"


def test_a_reason_is_named_once_if_retries_are_within_retries():
    def read():
        raise OSError(errno.EIO, "Input/output error")

    def open_folder():
        return retry.call_with_retries(read, "gs://b/x", seconds=0)

    with pytest.raises(Unavailable) as raised:
        retry.call_with_retries(open_folder, "gs://b", seconds=0)
    reason = "(OSError: [Errno 5] Input/output error)"
    assert str(raised.value) == f"gs://b: out of reach for 0 seconds {reason}; run again to resume"
