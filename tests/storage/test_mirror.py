"""Runs in buckets: what is sent, who owns a run, and which files win."""

import json
import os
import pathlib
import threading
import time

import pytest
from etils import epath
from fake_gcs import Fault
from test_buckets import only

from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.locks import Holder
from bert_jax.storage.mirror import Mirror
from bert_jax.storage.workdir import (
    Workdir,
)

RUN = epath.Path("gs://bucket/run")


def opened(on="here"):
    """The run's workdir as a machine of this name has it."""
    os.environ["BERT_JAX_CACHE_DIR"] = str(
        pathlib.Path(os.environ["BERT_JAX_CACHE_DIR"]).parent / on
    )
    return mirror.open_workdir(RUN, to_write=True)


def started(workdir):
    run_mirror = Mirror(workdir)
    workdir.root.mkdir(parents=True, exist_ok=True)
    run_mirror.acquire(Holder.this_process())
    return run_mirror


# --- What a run writes ---


def test_what_was_written_is_sent_and_only_what_has_changed(objects):
    workdir = opened()
    run_mirror = started(workdir)
    workdir.metrics.write_text("1\n")
    workdir.timings.write_text("1\n")
    (workdir.root / "others").write_text("")
    (workdir.profile / "plugins").mkdir(parents=True)
    for number in range(2):
        (workdir.profile / "plugins" / f"process_{number}.x").write_text("")
    run_mirror.flush()
    files = {name.removeprefix("run/") for name in objects.files()}
    assert files == {"OWNER", "metrics.jsonl", "timings.jsonl", "profile/plugins/process_0.x"}
    objects.writes.clear()
    workdir.metrics.write_text("1\n2\n")
    run_mirror.flush()
    assert objects.writes == [("run/metrics.jsonl", 4)]
    run_mirror.flush()
    assert len(objects.writes) == 1


def test_a_thread_sends_without_being_asked_and_a_failing_network_keeps_nothing_back_for_good(
    objects, monkeypatch
):
    monkeypatch.setattr(mirror, "_UPLOAD_EVERY", 0.01)
    workdir = opened()
    run_mirror = started(workdir)
    failed = threading.Event()

    def fault(method, name, kind):
        if name != "run/metrics.jsonl" or failed.is_set():
            return None
        failed.set()
        return Fault(400)  # which nobody expects

    objects.fault = fault
    with run_mirror:
        workdir.metrics.write_text("1\n")
        while "run/metrics.jsonl" not in objects.files():
            time.sleep(0.01)
    assert failed.is_set()


def test_a_local_run_is_not_mirrored(tmp_path):
    run_mirror = Mirror(Workdir(tmp_path / "run"))
    with run_mirror:
        run_mirror.acquire(Holder.this_process())
        run_mirror.flush()
        run_mirror.discard(["metrics.jsonl"])
    assert not (tmp_path / "run").exists()


# --- Who owns a run ---


def test_a_run_that_another_start_has_taken_ends_and_writes_no_more(objects):
    first = opened("first")
    run_mirror = started(first)
    first.metrics.write_text("1\n")
    run_mirror.flush()
    started(opened("second"))
    first.metrics.write_text("1\n2\n")
    with pytest.raises(InputError, match=r"gs://bucket/run: .* process \d+ of "):
        run_mirror.flush()
    with pytest.raises(InputError, match="taken over"):
        run_mirror.require_owned()
    run_mirror.discard(["metrics.jsonl"])
    assert objects.files()["run/metrics.jsonl"] == b"1\n"
    assert "run/OWNER" in objects.files()


def test_an_owner_that_cannot_be_read_is_not_another(objects):
    workdir = opened()
    run_mirror = started(workdir)
    for content in (b"", b"{}", b"\xff", b'{"format_version": 2}'):
        objects.put("run/OWNER", content, {})
        run_mirror.flush()
    objects.delete("run/OWNER", {})
    run_mirror.flush()
    objects.fault = only("read", Fault(503), times=9)
    run_mirror.flush()


def test_other_processes_know_the_owner_and_send_their_traces(objects):
    started(opened("first"))
    workdir = opened("second")
    other = Mirror(workdir, 1)
    other.token = mirror.read_holder(workdir).token
    (workdir.profile).mkdir(parents=True)
    (workdir.profile / "process_1.x").write_text("")
    workdir.metrics.write_text("left by another start")
    other.flush()
    assert objects.files().keys() == {"run/OWNER", "run/profile/process_1.x"}


@pytest.mark.parametrize("between", ["nobody", "another machine"])
def test_the_last_owners_files_win(between, objects):
    """What it has not sent is still there; what another machine did is not undone."""
    here = opened("here")
    started(here).flush()
    here.metrics.write_text("1\nnot sent\n")
    here.origin.write_text("of the first start")  # its experiment and --set
    if between == "another machine":
        there = opened("there")
        run_mirror = started(there)
        there.metrics.write_text("1\n2\n")
        run_mirror.flush()
    here = opened("here")
    run_mirror = started(here)
    if between == "nobody":
        assert here.metrics.read_text() == "1\nnot sent\n"
        run_mirror.flush()
        assert objects.files()["run/metrics.jsonl"] == b"1\nnot sent\n"
    else:
        assert here.metrics.read_text() == "1\n2\n"
        assert not here.origin.exists()


def test_a_run_removed_from_its_bucket_is_gone_here(objects):
    here = opened()
    run_mirror = started(here)
    here.metrics.write_text("1\n")
    run_mirror.flush()
    for name in objects.files():
        objects.delete(name, {})
    started(here)
    assert not here.metrics.exists()


def test_a_start_that_is_to_leave_nothing_leaves_nothing(objects):
    workdir = opened()
    run_mirror = started(workdir)
    workdir.metrics.write_text("1\n")
    run_mirror.flush()
    run_mirror.discard(["metrics.jsonl", "timings.jsonl"])
    assert not objects.files()


# --- What is read ---


def test_small_files_are_as_the_bucket_has_them_each_time(objects):
    objects.put("run/metrics.jsonl", b"1\n", {})
    objects.put("run/timings.jsonl", b"1\n", {})
    objects.put("run/novel.txt", b"large", {})
    view = mirror.open_workdir(RUN)
    assert view.metrics.read_text() == "1\n" and view.checkpoints == RUN / "checkpoints"
    objects.put("run/metrics.jsonl", b"1\n2\n", {})
    objects.delete("run/timings.jsonl", {})
    objects.requests.clear()
    view = mirror.open_workdir(RUN)
    assert view.metrics.read_text() == "1\n2\n"
    assert {path.name for path in view.root.iterdir()} == {"metrics.jsonl"}
    mirror.open_workdir(RUN)
    assert [name for name, kind in objects.requests if kind == "read"] == ["run/metrics.jsonl"]


def test_whether_a_run_in_a_bucket_is_running(objects):
    for started_ago, line_ago, kind, is_running in (
        (60, None, "", True),
        (3600, None, "", False),
        (3600, 60, "train", True),
        (3600, 60, "end", False),
        (60, 3600, "end", True),
        (7200, 3600, "train", False),
    ):
        me = Holder.this_process()
        owner = Holder(me.token, me.host, me.process, me.since - started_ago)
        objects.put("run/OWNER", owner.text().encode(), {})
        if line_ago is not None:
            line = {"step": 1, "kind": kind, "time": me.since - line_ago}
            objects.put("run/timings.jsonl", json.dumps(line).encode() + b"\n", {})
        assert mirror.is_running(mirror.open_workdir(RUN)) == is_running


def test_a_folder_of_other_things_is_no_run(objects):
    objects.put("run/novel.txt", b"x", {})
    with pytest.raises(InputError, match="gs://bucket/run: holds other files and no run"):
        mirror.open_workdir(RUN, to_write=True)
