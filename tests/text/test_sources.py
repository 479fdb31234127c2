"""Which files of a folder a source reads, which it leaves out, and that it says so."""

import bz2
import glob
import gzip
import json
import lzma
import os
import re

import fsspec
import pytest
import zstandard
from etils import epath

from bert_jax.config import Corpus
from bert_jax.data import corpus
from bert_jax.errors import InputError
from bert_jax.text import documents
from bert_jax.text import sources as text_sources
from bert_jax.tools import doctor
from bert_jax.tools.doctor import text as doctor_text

PACKERS = {"gz": gzip.compress, "xz": lzma.compress, "bz2": bz2.compress, "zst": zstandard.compress}


def text_of(name):
    return f"This is the text of {name}. It has two sentences.\n"


# Files that text: reads, and files that no text: source reads.
READ = ["B.TXT", "a.txt", "c.text", "sub/d.txt", "sub/h.TXT.GZ", *(f"e.txt.{p}" for p in PACKERS)]
UNREAD = ["a.jsonl", "sub/b.JSONL.xz", "c.md", "noext"]
HIDDEN = [".cache.md", "_SUCCESS", "README.md", "license", "sub/.git/config"]


def fill(folder, names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        ending = name.rpartition(".")[2].lower()
        content = text_of(name)
        if ".jsonl" in name.lower():
            content = json.dumps({"text": content}) + "\n"
        path.write_bytes(PACKERS.get(ending, bytes)(content.encode()))
    return folder


def texts(source):
    return [document.text + "\n" for document in documents.read(Corpus(sources=(source,)))]


def test_endings_are_read_in_any_case_and_any_compression(tmp_path):
    folder = fill(tmp_path / "mix", [*READ, *UNREAD, *HIDDEN])
    assert [*text_sources.require_files(f"text:{folder}")] == sorted(str(folder / n) for n in READ)
    assert texts(f"text:{folder}") == [text_of(name) for name in sorted(READ)]
    assert texts(f"jsonl:{folder}") == [text_of(name) for name in ("a.jsonl", "sub/b.JSONL.xz")]


def test_files_of_plain_names_keep_their_order(tmp_path):
    """A corpus of such a folder that was prepared before is still the same."""
    names = ["b.txt", "a b.txt", "a/c.txt", "a.txt", "a-b/x.txt", "Z.txt", ".h/i.txt", "é.txt"]
    folder = fill(tmp_path / "plain", names)
    (folder / "link.txt").symlink_to("b.txt")
    found = list(text_sources.require_files(f"text:{folder}"))
    wanted = glob.glob(f"{folder}/**/*.txt", recursive=True, include_hidden=True)
    assert found == sorted(wanted) and len(found) == len(names) + 1


def test_a_path_is_a_source_by_its_ending_or_by_the_files_below_it(tmp_path, monkeypatch):
    fill(tmp_path, ["tables/a.md", "tables/b/c.csv.gz", "mixed/a.jsonl", "mixed/b.txt"])
    fill(tmp_path, ["two_kinds/a.jsonl", "two_kinds/b.csv"])
    monkeypatch.chdir(tmp_path)
    paths = "novels/ ./a:b.jsonl.gz a.parquet.gz gs://b/novels/ gs:// hf://datasets/*.parquet"
    wanted = "text:novels jsonl:./a:b.jsonl.gz text:a.parquet.gz text:gs://b/novels text:gs://"
    paths += " jsonl:gs://b/novels tfds:novels tables/ mixed two_kinds"
    wanted += " parquet:hf://datasets/*.parquet jsonl:gs://b/novels tfds:novels csv:tables"
    wanted += " text:mixed text:two_kinds"
    assert [text_sources.source_from_path(path) for path in paths.split()] == wanted.split()


def test_a_source_without_a_kind_has_that_of_its_ending():
    sources = ("a.jsonl.gz", "b/*.parquet", "novels", "c.txt", "d.parquet.gz")
    kinds = [source.partition(":")[0] for source in Corpus(sources=sources).sources]
    assert kinds == ["jsonl", "parquet", "text", "text", "text"]


def test_linked_folders_are_entered_once_and_no_file_is_read_twice(tmp_path):
    folder = fill(tmp_path / "mix", ["a.txt", "sub/b.txt"])
    fill(tmp_path / "elsewhere", ["z0.txt", "z1.txt", "deep/z2.txt"])
    for name, target in {
        "filelink.txt": "../elsewhere/z0.txt",
        "linked": "../elsewhere",
        "linked_again": "../elsewhere",
        "deeper": "../elsewhere/deep",
        "loop": ".",
        "sub/up": "..",
        "../elsewhere/back": "../mix",
    }.items():
        (folder / name).symlink_to(target)
    found = list(text_sources.require_files(f"text:{folder}"))
    assert len(set(map(os.path.realpath, found))) == len(found)
    assert [os.path.relpath(path, folder) for path in found] == [
        *("a.txt", "deeper/z2.txt", "filelink.txt", "linked/z1.txt", "sub/b.txt")
    ]
    for pattern in (f"{folder}/**/*.txt", f"{folder}/**"):
        assert list(text_sources.require_files(f"text:{pattern}")) == found
        assert not text_sources.describe_unread(Corpus(sources=(f"text:{pattern}",)))


@pytest.mark.parametrize("start", ["", "mix/", "./", "ABS/mix/", "nowhere/"])
def test_patterns_match_what_pythons_glob_matches(tmp_path, monkeypatch, start):
    names = ["a.txt", "b/a.txt", "b/c/a.txt", "b/c.txt/x", ".h/a.txt", "b/.h.txt", "bb/[a].txt"]
    fill(tmp_path / "mix", names)
    monkeypatch.chdir(tmp_path)
    start = start.replace("ABS", str(tmp_path))
    ends = ["**", "**/*.txt", "*/**", "**/c/*", "**/**/a*", "b/**", "**/.h/*", "**/.*", "**.txt"]
    for end in [*ends, "*/**/[ab].txt", "**/b/**/?.txt", "*", "*/*.txt"]:
        wanted = sorted(set(filter(os.path.isfile, glob.glob(start + end, recursive=True))))
        if wanted:
            assert list(text_sources.find_files(f"text:{start}{end}")[0]) == wanted, end
        else:
            with pytest.raises(InputError, match=re.escape(start + end)):
                text_sources.find_files(f"text:{start}{end}")


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch):
    folder = fill(tmp_path / "mix", ["a.txt", "closed/b.txt"])
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(InputError, match="mix/closed"):
        text_sources.require_files(f"text:{folder}")


def test_prepare_and_doctor_count_the_same_files_that_are_left_out(tmp_path):
    many = [f"{number}.txt" for number in range(20)]
    folder = fill(tmp_path / "mix", [*many, *UNREAD, *HIDDEN])
    settings = Corpus(sources=(f"text:{folder}",), validation_share=0.4)
    (line,) = text_sources.describe_unread(settings)
    for words in ("4 files", "1 .jsonl", "1 .jsonl.xz", "1 .md", f"jsonl:{folder}"):
        assert words in line
    for _ in range(2):  # made, and found as prepared
        said = []
        corpus.prepare(settings, 60, epath.Path(tmp_path / "c"), said.append)
        assert [one for one in said if line in one]
    for found in (doctor.examine(str(folder)), doctor_text.examine(settings)):
        assert [one.message for one in found if one.rule is doctor_text.LEFT_OUT] == [line]


def test_a_file_that_another_source_reads_is_not_left_out(tmp_path):
    folder = fill(tmp_path / "mix", ["a.txt", "a.jsonl", "b.csv"])
    (tmp_path / "same").symlink_to("mix")
    (line,) = text_sources.describe_unread(
        Corpus(sources=(f"text:{folder}", f"jsonl:{tmp_path}/same", f"text:{folder}/a*.txt"))
    )
    assert "1 file" in line and f"csv:{folder}" in line
    assert text_sources.describe_unread(Corpus(sources=(f"parquet:{folder}/*.csv",))) == []


def test_folders_that_a_pattern_matches_are_left_out_by_name(tmp_path):
    fill(tmp_path, ["a.txt", "other/d.txt", ".hidden/e.txt"])
    (line,) = text_sources.describe_unread(Corpus(sources=(f"text:{tmp_path}/*",)))
    assert "1 folder" in line and f"{tmp_path}/other/" in line
    assert text_sources.describe_unread(Corpus(sources=(f"text:{tmp_path}/**",))) == []


def test_a_folder_without_files_of_a_kind_names_the_kinds_it_holds(tmp_path):
    fill(tmp_path, ["a.jsonl", "b.txt"])
    with pytest.raises(InputError, match=r"csv:.*1 \.jsonl.*jsonl:.*text:"):
        text_sources.require_files(f"csv:{tmp_path}")


def test_a_bucket_and_another_address_are_read_as_a_folder(objects, tmp_path):
    folder = fill(tmp_path / "mix", [*READ, *UNREAD, *HIDDEN])
    memory = fsspec.filesystem("memory")
    for path in filter(os.path.isfile, map(str, folder.rglob("*"))):
        name, data = os.path.relpath(path, folder), epath.Path(path).read_bytes()
        objects.put(f"mix/{name}", data, {})
        memory.pipe(f"/mix/{name}", data)
    (line,) = text_sources.describe_unread(Corpus(sources=(f"text:{folder}",)))
    for place in ("gs://bucket/mix", "memory://mix"):
        found = [path.rpartition("mix/")[2] for path in text_sources.require_files(f"text:{place}")]
        assert found == sorted(READ)
        there = text_sources.describe_unread(Corpus(sources=(f"text:{place}",)))
        assert there == [line.replace(str(folder), place)]


def test_doctor_examines_a_folder_in_a_bucket(objects):
    for name in ("a.TXT", "b.jsonl"):
        objects.put(f"mix/{name}", b'{"text": "One sentence. Another one."}', {})
    found = doctor.examine("gs://bucket/mix")
    assert {doctor_text.LEFT_OUT, doctor_text.TOO_FEW} <= {one.rule for one in found}
