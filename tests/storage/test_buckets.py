"""Buckets: rights, and networks that fail."""

import hashlib
import itertools

import fake_gcs
import pytest
from etils import epath
from fake_gcs import Fault

from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import buckets, copies, retry
from bert_jax.storage.storage import storage_of

RUN = epath.Path("gs://bucket/run")
OPERATIONS = {
    "list": lambda: storage_of(RUN).names(RUN),
    "read": lambda: storage_of(RUN).read(RUN / "there"),
    "write": lambda: storage_of(RUN).write(RUN / "new", "text"),
    "delete": lambda: buckets.remove([RUN / "there"]),
}


def only(kind, fault, times=10**9):
    """Faults of the first requests of a kind."""
    left = iter(range(times))
    return lambda method, name, what: (
        fault if what == kind and next(left, None) is not None else None
    )


DAMAGES = {
    "emptied": Fault(change=fake_gcs.emptied),
    "halved": Fault(change=fake_gcs.halved),
    "flipped": Fault(change=fake_gcs.flipped),
    "broken off": Fault(breaks_off=True),
}
CONTENT = bytes(range(256)) * 40


def read_opened(path):
    with storage_of(path).open(path) as file:
        return file.read()


def read_fetched(path, tmp_path):
    copies.download(path, epath.Path(tmp_path))
    return (tmp_path / path.name).read_bytes()


READS = {
    "read": lambda path, _: storage_of(path).read(path),
    "opened": lambda path, _: read_opened(path),
    "fetch": read_fetched,
    "epath": lambda path, _: path.read_bytes(),
    "sha256": lambda path, _: (storage_of(path).sha256(path) == SHA256) * CONTENT,
}
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("way", READS)
def test_content_that_is_not_what_the_bucket_states_is_read_again(
    way, damage, objects, tmp_path, monkeypatch
):
    """A third of all answers are damaged, those about objects among them."""
    monkeypatch.setattr(retry, "GIVE_UP", 10.0)
    monkeypatch.setattr(buckets, "_RANGE", 3000)
    monkeypatch.setattr(copies, "PIECE", 6000)
    objects.put("run/there", CONTENT, {})
    for begin in range(3):
        turns = itertools.count(begin)
        objects.fault = lambda *_, turns=turns: None if next(turns) % 3 else DAMAGES[damage]
        assert READS[way](RUN / "there", tmp_path) == CONTENT


@pytest.mark.parametrize("way", ["read", "opened", "fetch"])
def test_content_that_stays_other_than_stated_is_out_of_reach(way, objects, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "GIVE_UP", 0.1)
    objects.put("run/there", CONTENT, {})
    objects.fault = lambda method, name, kind: Fault(change=fake_gcs.halved)
    with pytest.raises(Unavailable, match="gs://bucket/run/there"):
        READS[way](RUN / "there", tmp_path)


def test_a_write_whose_answer_is_lost_is_done(objects):
    objects.fault = only("write", Fault(0, is_done=True), times=1)
    storage_of(RUN).write(RUN / "new", "text")
    assert objects.files() == {"run/new": b"text"}


def test_a_large_file_is_sent_over_faults_and_told_from_a_changed_one(objects, tmp_path):
    data = bytes(range(256)) * 24_000  # 6 MB: gcsfs sends so much in a session
    (tmp_path / "large").write_bytes(data)
    buckets._granted.add(("bucket", "write"))
    objects.fault = only("write", Fault(503), times=8)  # more than the client's own tries
    buckets.upload(tmp_path / "large", RUN / "large")
    assert objects.files() == {"run/large": data}
    sent = buckets.describe(RUN / "large")
    assert sent is not None and buckets.has_same_content(tmp_path / "large", sent)
    for other in (data[:-1], data[:-1] + b"x"):
        (tmp_path / "large").write_bytes(other)
        assert not buckets.has_same_content(tmp_path / "large", sent)


def test_a_token_or_a_role_that_is_refused_at_first_is_named(objects):
    for right in ("list", "read", "write"):
        objects.fault = only(right, Fault(401))
        with pytest.raises(InputError, match=rf"may not {right} objects of the bucket bucket"):
            buckets.require_writable(RUN)
        buckets._granted.clear()
    objects.reset()
    for role, right in {
        "objectCreator": "list",
        "objectViewer": "create",
        "legacyBucketWriter": "get",
        "objectViewer,objectCreator": "delete",
    }.items():
        objects.role = role
        with pytest.raises(InputError, match=rf"storage\.objects\.{right}\b"):
            buckets.require_writable(RUN)
        buckets._granted.clear()
    objects.role = "objectUser"
    buckets.require_writable(RUN)


def test_a_list_that_is_cut_short_passes(objects):
    objects.put("run/there", b"text", {})
    objects.fault = only("list", Fault(200), times=2)  # with half an answer
    assert storage_of(RUN).names(RUN) == {"there"}


def test_what_a_server_does_not_know_is_named_at_once(objects):
    objects.put("run/there", b"text", {})
    objects.fault = only("write", Fault(501))
    with pytest.raises(InputError, match=r"/bucket/.*501"):
        OPERATIONS["write"]()
    assert len([kind for _, kind in objects.requests if kind == "write"]) <= 6  # gcsfs's own tries


def test_what_a_killed_question_for_rights_left_is_nobodys_and_goes(objects):
    objects.fault = only("read", Fault(403))
    with pytest.raises(InputError):
        buckets.require_writable(RUN)
    assert objects.files() and not storage_of(RUN).names(RUN)
    objects.reset_faults()
    buckets.require_writable(RUN)
    assert not objects.files()
