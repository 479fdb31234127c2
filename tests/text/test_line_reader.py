"""Lines of files, as they stand there."""

import gzip

import pytest
import zstandard

from bert_jax.errors import InputError
from bert_jax.text import line_reader


def write(path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def test_files_follow_each_other_compressed_or_not(tmp_path):
    plain = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\n\ntwo\r\nthree")
    zipped = write(tmp_path / "b.txt.gz", gzip.compress(b"four\n"))
    packed = write(tmp_path / "c.zst", zstandard.compress("fünf\u2028\x0b\n".encode()))
    found = list(line_reader.read([plain, zipped, packed]))
    assert [text for _, text in found] == ["one", "", "two\r", "three", "four", "fünf\u2028\x0b"]
    assert [where for where, _ in found[2:5]] == [f"{plain}:3", f"{plain}:4", f"{zipped}:1"]


def test_what_is_no_text_is_named(tmp_path):
    there = write(tmp_path / "a.txt", b"wa\nwb \xff\n")
    with pytest.raises(InputError, match=r"a\.txt:2: byte 3 "):
        list(line_reader.read([there]))
    with pytest.raises(InputError, match=rf"{tmp_path}: "):
        list(line_reader.read([str(tmp_path)]))
    with pytest.raises(InputError, match=r"b\.txt: no such file"):  # before any is read
        line_reader.read([there, str(tmp_path / "b.txt")])
