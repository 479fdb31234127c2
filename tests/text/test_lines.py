"""Lines of files, as they stand there."""

import gzip

import pytest
import zstandard

from bert_jax.errors import InputError
from bert_jax.text import lines


def write(path, data: bytes) -> str:
    path.write_bytes(data)
    return str(path)


def test_files_follow_each_other_compressed_or_not(tmp_path):
    plain = write(tmp_path / "a.txt", b"\xef\xbb\xbfone\n\ntwo\r\nthree")
    zipped = write(tmp_path / "b.txt.gz", gzip.compress(b"four\n"))
    packed = write(tmp_path / "c.zst", zstandard.compress("fünf\u2028\x0b\n".encode()))
    found = list(lines.read([plain, zipped, packed]))
    assert [text for _, text in found] == ["one", "", "two\r", "three", "four", "fünf\u2028\x0b"]
    assert [where for where, _ in found[2:5]] == [f"{plain}:3", f"{plain}:4", f"{zipped}:1"]


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.txt", b"wa\nwb \xff\n", "a.txt:2: byte 3 of the line is not UTF-8"),
        ("a.txt.gz", gzip.compress(bytes(99), mtime=0)[:-9], "a.txt.gz: damaged"),
        ("a.txt.gz", b"plain", "a.txt.gz: damaged"),
    ],
)
def test_what_is_no_text_is_named(name, data, said, tmp_path):
    with pytest.raises(InputError) as caught:
        list(lines.read([write(tmp_path / name, data)]))
    assert said in str(caught.value)


def test_a_missing_file_is_named_before_any_is_read(tmp_path):
    there = write(tmp_path / "a.txt", b"\xff")
    with pytest.raises(InputError, match=r"b\.txt: no such file"):
        lines.read([there, str(tmp_path / "b.txt")])
    with pytest.raises(InputError, match="cannot be read \\(Is a directory\\)"):
        list(lines.read([str(tmp_path)]))
