"""Text at an address: in a bucket, or where another client of fsspec reads; what they answer."""

import collections
import gzip
import itertools
import re
import threading
import time

import fake_gcs
import fsspec
import pyarrow
import pyarrow.parquet
import pytest
from etils import epath
from fake_gcs import Fault
from fsspec.implementations.memory import MemoryFileSystem

from bert_jax.config import Corpus
from bert_jax.data import corpus, parts
from bert_jax.errors import InputError, Unavailable
from bert_jax.storage import buckets, copies, retry
from bert_jax.text import documents, line_reader
from bert_jax.text import sources as text_sources


def read(source, **settings):
    return [d.text for d in documents.read(Corpus(sources=(source,), **settings))]


@pytest.mark.parametrize("word", ["text", "parquet"])
def test_files_in_a_bucket_that_fails_are_read_as_those_here(objects, tmp_path, word, monkeypatch):
    monkeypatch.setattr(buckets, "_RANGE", 100)
    local = tmp_path / "a.txt.gz" if word == "text" else tmp_path / "a.parquet"
    texts = [f"Text {i}." for i in range(200)]
    if word == "text":
        local.write_bytes(gzip.compress("\n\n".join(texts).encode()))
    else:
        pyarrow.parquet.write_table(pyarrow.table({"body": texts}), local)
    objects.put(f"texts/{word}/sub/{local.name}", local.read_bytes(), {})
    objects.put(f"texts/{word}/sub/", b"", {})  # as the console makes a folder
    objects.put(f"texts/{word}/sub/note.md", b"no text", {})
    # Each request fails more often than gcsfs itself tries.
    asked = collections.defaultdict(itertools.count)
    objects.fault = lambda method, name, kind: Fault(503) if next(asked[kind]) % 30 < 8 else None
    wanted = read(f"{word}:{local}", text_field="body")
    there = f"{word}:gs://bucket/texts/{word}"
    for place in (there, f"{there}/", f"{there}/**/a.*", f"{there}/sub/{local.name}"):
        assert read(place, text_field="body") == wanted
        (row,) = text_sources.fingerprint(Corpus(sources=(place,), text_field="body"))
        assert row["bytes"] == local.stat().st_size
        assert text_sources.sha256(row["file"]) == text_sources.sha256(str(local))


@pytest.mark.parametrize("word, line", [("jsonl", '{"text": "Text %d."}\n'), ("csv", "text%d\n")])
def test_an_object_is_asked_for_a_range_at_a_time(objects, word, line, monkeypatch):
    monkeypatch.setattr(buckets, "_RANGE", 2**16)
    content = "text\n" * (word == "csv") + "".join(line % i for i in range(20_000))
    objects.put(f"texts/a.{word}", content.encode(), {})
    assert len(read(f"{word}:gs://bucket/texts")) == 20_000
    asked = [kind for _, kind in objects.requests if kind == "read"]
    assert len(asked) < 2 * (len(content) / 2**16 + 5)  # each range twice: it has no checksum


def test_many_small_objects_are_asked_for_once_each(objects, tmp_path, monkeypatch):
    monkeypatch.setattr(fake_gcs, "_PAGE", 1000)
    for number in range(100):
        objects.put(f"texts/{number}.txt", f"Text {number}.".encode(), {})
    source = Corpus(sources=("text:gs://bucket/texts",))
    at_once, most, lock = 0, 0, threading.Lock()

    def count(method, name, kind):
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        time.sleep(0.01)
        with lock:
            at_once -= 1

    objects.fault = count
    corpus.prepare(source, 40, epath.Path(tmp_path) / "corpus", lambda line: None)
    asked = collections.Counter(name for name, _ in objects.requests)
    assert all(asked[name] == 1 for name in objects.files()) and asked.total() < 110
    assert 4 < most <= copies.SMALL_STREAMS


def test_text_that_is_replaced_while_it_is_read_is_refused(objects, tmp_path, monkeypatch):
    monkeypatch.setattr(retry, "GIVE_UP", 5.0)
    for number in range(30):
        objects.put(f"texts/{number}.txt", f"Text {number}.".encode(), {})

    def replace(method, name, kind):
        if name == "texts/29.txt" and b"Other" not in objects.files()[name]:
            objects.put("texts/17.txt", b"Other 17", {})
            objects.put("texts/29.txt", b"Other 29", {})

    objects.fault = replace
    with pytest.raises(InputError, match=r"gs://bucket/texts/(17|29)\.txt: changed"):
        corpus.prepare(
            Corpus(sources=("text:gs://bucket/texts",)), 40, epath.Path(tmp_path), lambda line: None
        )


@pytest.mark.parametrize("place", ["", "none", "none/*.txt", "texts/*.csv", "texts/sub.txt"])
def test_text_that_is_not_in_its_bucket_is_refused(objects, place):
    objects.put("texts/sub.txt.md", b"no text", {})
    with pytest.raises(InputError, match=rf"text:gs://bucket/{re.escape(place)}: no such files"):
        read(f"text:gs://bucket/{place}")
    objects.role = "objectCreator"
    buckets._granted.clear()
    with pytest.raises(InputError, match=r"may not (list|read) objects of the bucket bucket"):
        read(f"text:gs://bucket/{place}")
    for nowhere in ("", "b*/texts"):
        with pytest.raises(InputError, match=r"gs://: names no bucket"):
            read(f"text:gs://{nowhere}")


def test_an_object_that_clients_unpack_unasked_is_refused(objects):
    objects.put("texts/a.txt", gzip.compress(b"Text."), {})
    objects.encoding = "gzip"
    with pytest.raises(InputError, match=r"gs://bucket/texts/a\.txt: .*Content-Encoding: gzip"):
        read("text:gs://bucket/texts")


class Silent(Exception):
    """What no client that we know raises."""


class ConnectError(Exception):
    """As httpx calls a network that fails."""


ConnectError.__module__ = "httpx"


class Elsewhere(MemoryFileSystem):
    """Another client of fsspec, which says other things of a file that it has listed."""

    protocol, store, pseudo_dirs, cachable = "elsewhere", {}, [""], False
    error, is_listed, size, version = None, False, 5, "1"

    @classmethod
    def _strip_protocol(cls, path):
        return super()._strip_protocol(path.replace("elsewhere://", "memory://"))

    def info(self, path, **kwargs):
        if self.error:
            raise self.error
        more = {"StorageClass": "x"} if Elsewhere.is_listed else {"VersionId": "y"}
        about = super().info(path, **kwargs) | more | {"ETag": f'"{self.version}"'}
        return about | {"size": self.size, "created": None}


@pytest.fixture
def elsewhere(monkeypatch):
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    fsspec.filesystem("elsewhere").pipe("/texts/a.txt", b"Text.")
    for name in ("error", "is_listed", "size", "version"):
        monkeypatch.setattr(Elsewhere, name, getattr(Elsewhere, name))
    return Elsewhere


def test_a_file_is_known_again_by_its_version_alone(elsewhere):
    (part,) = parts.plan(Corpus(sources=("text:elsewhere://texts/a.txt",)))
    elsewhere.is_listed = True
    assert [d.chunks for d in part.documents(Corpus(sources=("text:x",))) if d.chunks]
    elsewhere.version = "2"
    with pytest.raises(InputError, match="changed while it was read"):
        list(part.documents(Corpus(sources=("text:x",))))
    elsewhere.size = None
    with pytest.raises(InputError, match=r"a\.txt: .*report its size"):
        parts.plan(Corpus(sources=("text:elsewhere://texts/a.txt",)))


@pytest.mark.parametrize(
    ("error", "kind"), [(Silent("nobody"), InputError), (ConnectError("nobody"), Unavailable)]
)
def test_what_a_client_raises_is_one_line(elsewhere, error, kind):
    corpus_of = Corpus(sources=("text:elsewhere://texts/a.txt",))
    assert text_sources.fingerprint(corpus_of)
    elsewhere.error = error
    with pytest.raises(kind, match=r"elsewhere://texts/a\.txt: .*nobody"):
        text_sources.fingerprint(corpus_of)
    with pytest.raises(kind, match=r"x://a: .*nobody"), line_reader.translate_errors("x://a"):
        raise error


def test_a_corpus_whose_bucket_is_out_of_reach_is_used_as_prepared(objects, tmp_path, monkeypatch):
    rows = b"".join(b'{"text": "One of %d here. Another there."}\n' % n for n in range(20))
    objects.put("texts.jsonl", rows, {})
    claim = Corpus(sources=("jsonl:gs://bucket/texts.jsonl",), validation_share=0.3)
    folder = epath.Path(tmp_path / "c")
    made = corpus.prepare(claim, 100, folder, lambda line: None)
    objects.fault = lambda method, name, kind: Fault(503)
    monkeypatch.setattr(corpus, "_COMPARE_SECONDS", 0.2)
    lines = []
    assert corpus.prepare(claim, 100, folder, lines.append) == made
    (line,) = lines
    assert "used as prepared" in line and "out of reach" in line
