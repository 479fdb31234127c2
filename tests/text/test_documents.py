"""Files to documents: layouts, encodings, compression, and what is refused."""

import bz2
import gzip
import json
import lzma
import tracemalloc

import numpy as np
import pyarrow.parquet
import pytest
import zstandard

from bert_jax.config import Corpus
from bert_jax.data import parts
from bert_jax.errors import InputError
from bert_jax.text import documents, sentence_splitter
from bert_jax.text import sources as text_sources

WRAPPED = "The first paragraph is broken\nover two lines. It has two sentences.\n\nThe second.\n"


def read(source, **settings):
    return list(documents.read(Corpus(sources=(source,), **settings)))


def write(path, text, encoding="utf-8"):
    path.write_bytes(text.encode(encoding))
    return path


def test_wrapped_lines_are_joined_and_blank_lines_end_paragraphs(tmp_path):
    write(tmp_path / "a.txt", WRAPPED + "  \t\nThe third\nends.\n")
    (document,) = read(f"text:{tmp_path}", layout="wrapped")
    assert document.paragraphs() == [
        "The first paragraph is broken over two lines. It has two sentences.",
        "The second.",
        "The third ends.",
    ]
    assert sentence_splitter.split(document, "en") == [
        "The first paragraph is broken over two lines.",
        "It has two sentences.",
        "The second.",
        "The third ends.",
    ]


def test_each_line_is_a_paragraph_in_paragraphs_by_line(tmp_path):
    write(tmp_path / "a.txt", "One here. Two here.\n\n  Three here.  \n")
    (document,) = read(f"text:{tmp_path}", layout="paragraphs_by_line")
    assert document.paragraphs() == ["One here. Two here.", "Three here."]
    assert sentence_splitter.split(document, "en") == ["One here.", "Two here.", "Three here."]


def test_blank_lines_part_documents_in_sentences_by_line(tmp_path):
    path = write(tmp_path / "a.txt", "\n\nOne. Not two.\nTwo.\n \t\n\nThree.\n")
    found = read(f"text:{tmp_path}", layout="sentences_by_line")
    assert [d.name for d in found] == [f"{path}:3", f"{path}:7"]
    # A line is taken at its word, although it might be split.
    split = [sentence_splitter.split(document, "en") for document in found]
    assert split == [["One. Not two.", "Two."], ["Three."]]


@pytest.mark.parametrize(
    ("longest", "layout"), [(200, "wrapped"), (201, "paragraphs_by_line"), (1, "wrapped")]
)
def test_per_file_decides_by_the_longest_line(tmp_path, longest, layout):
    write(tmp_path / "a.txt", "a\n" + "b" * longest + "\nc\n")
    (document,) = read(f"text:{tmp_path}")
    assert document.layout == layout


@pytest.mark.parametrize("layout", ["wrapped", "sentences_by_line"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_byte_order_marks_are_stripped(tmp_path, layout, encoding):
    start = "\ufeff" if encoding == "utf-8" else ""
    write(tmp_path / "a.txt", start + "Größe.\n", encoding)
    (document,) = read(f"text:{tmp_path}", layout=layout, encoding=encoding)
    assert document.paragraphs() == ["Größe."]


def test_compressed_files_read_as_plain_ones(tmp_path):
    (tmp_path / "b").mkdir()
    write(tmp_path / "a.txt", WRAPPED)
    (tmp_path / "b" / "b.txt.gz").write_bytes(gzip.compress(WRAPPED.encode()))
    # Two frames after one another: what `cat` of two files gives.
    half = len(WRAPPED) // 2
    for suffix, packer in PACKERS.items():
        frames = [packer.compress(part.encode()) for part in (WRAPPED[:half], WRAPPED[half:])]
        (tmp_path / f"c.txt.{suffix}").write_bytes(b"".join(frames))
    write(tmp_path / "notes.md", "no text file")
    found = read(f"text:{tmp_path}")
    assert [d.name.rsplit("/", 1)[1] for d in found] == [
        *("a.txt", "b.txt.gz", "c.txt.bz2", "c.txt.gz", "c.txt.xz", "c.txt.zst")
    ]
    assert len({d.text for d in found}) == 1


PACKERS = {"gz": gzip, "zst": zstandard, "bz2": bz2, "xz": lzma}


@pytest.mark.parametrize("suffix", PACKERS)
def test_a_damaged_compressed_file_is_refused_by_name(tmp_path, suffix):
    text = "".join(f"line {i * 7919 % 1009}\n" for i in range(3000)).encode()
    whole = PACKERS[suffix].compress(text)
    middle = len(whole) // 2
    changed = whole[:middle] + bytes(~b & 255 for b in whole[middle : middle + 9])
    latin = PACKERS[suffix].compress(b"\xe9" + 9 * text)
    for content in (whole[:middle], whole[:-1], changed + whole[middle + 9 :], text, latin[:-9]):
        (tmp_path / f"a.txt.{suffix}").write_bytes(content)
        with pytest.raises(InputError, match=rf"a\.txt\.{suffix}: damaged"):
            read(f"text:{tmp_path}")


def test_text_is_taken_from_the_field_named(tmp_path):
    rows = [{"text": "no", "body": "One\r\ntwo."}, {"body": " "}, {"body": "Three."}]
    lines = "\n\n".join(json.dumps(row) for row in rows)
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines.encode()))
    found = read(f"jsonl:{path}", text_field="body", layout="wrapped")
    assert [(d.name, d.paragraphs()) for d in found] == [
        (f"{path}:1", ["One two."]),
        (f"{path}:5", ["Three."]),
    ]


def test_a_line_without_a_text_is_named(tmp_path):
    for line in ('{"body": "x"}', '{"text": 3}', '["text"]', '{"text": "fine"', "[" * 100_000):
        write(tmp_path / "a.jsonl", '{"text": "fine"}\n' + line)
        for place in (tmp_path, f"file://{tmp_path}"):
            with pytest.raises(InputError, match=r"a\.jsonl:2: "):
                read(f"jsonl:{place}")


def test_half_of_a_surrogate_pair_in_json_becomes_a_replacement_character(tmp_path):
    # JSON can spell what no encoding can; tokenizers would fail on it in the middle of a corpus.
    write(tmp_path / "a.jsonl", r'{"text": "half \ud83d here, whole \ud83d\ude00 there"}')
    (document,) = read(f"jsonl:{tmp_path}")
    assert document.text == "half \ufffd here, whole 😀 there"


@pytest.mark.parametrize("layout", ["wrapped", "sentences_by_line"])
def test_an_undecodable_byte_is_named_by_file_and_offset(tmp_path, layout):
    """In a compressed file of the uncompressed bytes."""
    for before in (0, 100_000):
        text = b"Abc def.\n" * before + b"caf\xe9\n" + b"more\n" * 9
        (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text))
        with pytest.raises(InputError, match=rf"a\.txt\.gz: byte {9 * before + 3} is not utf-8"):
            read(f"text:{tmp_path}", layout=layout)
    write(tmp_path / "a.txt", "Plain text.\n")
    with pytest.raises(InputError, match=r"a\.txt: (byte 0 )?is not utf-16"):
        read(f"text:{tmp_path}", encoding="utf-16")


def test_a_line_of_a_document_knows_its_place(tmp_path):
    """Blank lines before a text are counted; a record has no lines of a file."""
    path = write(tmp_path / "a.txt", "\n \nOne.\nTwo.\n\n\nThree.\nFour.\n")
    (whole,) = read(f"text:{path}")
    assert [whole.location(n) for n in (0, 5)] == [f"{path}:3", f"{path}:8"]
    first, second = read(f"text:{path}", layout="sentences_by_line")
    assert [first.location(1), second.location(0), second.location(1)] == [
        f"{path}:{line}" for line in (4, 7, 8)
    ]
    path = write(tmp_path / "a.jsonl", '\n{"text": "\\nOne.\\nTwo."}\n')
    (record,) = read(f"jsonl:{path}")
    assert [record.location(0), record.location(1)] == [f"{path}:2"] * 2


def test_a_file_is_taken_by_its_name_whatever_stands_in_it(tmp_path):
    path = write(tmp_path / "book [1].txt", "Text.")
    for place in (path, f"file://{path}"):
        assert [d.text for d in read(f"text:{place}")] == ["Text."]


CONTRADICTIONS = {
    "wrapped": "".join(f"Paragraph {i} " + "is long " * 40 + "\n" for i in range(150)),
    "paragraphs_by_line": "".join(f"{'The' if i % 3 else 'goes'} line {i}\n" for i in range(150)),
    "sentences_by_line": "".join(f"{'The' if i % 3 else 'goes'} line {i}\n" for i in range(150)),
}


@pytest.mark.parametrize("layout", list(CONTRADICTIONS))
def test_a_file_of_over_100_lines_that_contradicts_the_layout_is_refused(tmp_path, layout):
    lines = CONTRADICTIONS[layout].splitlines(keepends=True)
    path = write(tmp_path / "a.txt", "".join(lines[:100]))
    assert read(f"text:{path}", layout=layout)
    write(path, "".join(lines))
    with pytest.raises(InputError, match=rf"a\.txt: .*corpus\.layout={layout}"):
        read(f"text:{path}", layout=layout)
    assert read(f"text:{path}")  # per_file decides for itself
    text = {
        "wrapped": "The first line of a paragraph\ngoes on here.\n\n" * 200,
        "paragraphs_by_line": ("A paragraph. " * 20 + "\n") * 200,
        "sentences_by_line": "A sentence stands here.\nAnd another.\n\n" * 600,
    }[layout]
    assert read(f"text:{write(path, text)}", layout=layout)


def test_empty_documents_are_passed_over(tmp_path):
    for name, text in {"a": "", "b": "\ufeff", "c": " \n\t\r\n", "d": "x\n"}.items():
        write(tmp_path / f"{name}.txt", text)
    for layout in ("per_file", "wrapped", "sentences_by_line"):
        assert [d.text for d in read(f"text:{tmp_path}", layout=layout)] == ["x"]


@pytest.mark.parametrize("layout", ["wrapped", "paragraphs_by_line", "sentences_by_line"])
def test_line_ends_do_not_make_another_text(tmp_path, layout):
    text = "One.\nTwo.\n\nThree.\n"
    expected = read(f"text:{write(tmp_path / 'a.txt', text)}", layout=layout)
    # The last line may lack its end.
    for other in (text.strip(), text.replace("\n", "\r\n"), text.strip().replace("\n", "\r\n")):
        found = read(f"text:{write(tmp_path / 'b.txt', other)}", layout=layout)
        assert [d.text for d in found] == [d.text for d in expected]


def test_sources_are_read_in_the_order_named(tmp_path):
    write(tmp_path / "a.txt", "text")
    write(tmp_path / "a.jsonl", '{"text": "json"}')
    corpus = Corpus(sources=(f"jsonl:{tmp_path}", f"text:{tmp_path}"))
    assert [d.text for d in documents.read(corpus)] == ["json", "text"]
    assert [row["bytes"] for row in text_sources.fingerprint(corpus)] == [16, 4]


# --- Pieces: large texts are not held ---

CHAPTERS = "\n\n".join(
    f"CHAPTER {n}\n\n  It was  the.\nBest of times {n}.\n \t\n\nÉnd of.\nIt." for n in range(60)
)


@pytest.mark.parametrize("starts", ["", "headings"])
@pytest.mark.parametrize("layout", ["wrapped", "paragraphs_by_line", "per_file"])
@pytest.mark.parametrize("newline", ["\n", "\r\n"])
def test_a_text_read_in_pieces_is_the_same_text(tmp_path, monkeypatch, layout, starts, newline):
    text = f"\ufeff \n\n {CHAPTERS}\n \n  ".replace("\n", newline)
    write(tmp_path / "a.txt", text)
    write(tmp_path / "a.jsonl", json.dumps({"text": text}))
    sources = (f"text:{tmp_path}", f"jsonl:{tmp_path}")

    def found():
        read_ = [d for s in sources for d in read(s, layout=layout, document_starts=starts)]
        assert all(d.chunks for d in read_)
        return [(d.name, d.line, d.layout, d.text, d.paragraphs()) for d in read_]

    whole = found()
    monkeypatch.setattr(documents, "_LONGEST_CHUNK", 90)
    monkeypatch.setattr(documents, "_HELD_CHUNKS", 2)
    assert found() == whole
    assert len(whole) == (2 if not starts else 120)


@pytest.mark.long
@pytest.mark.parametrize("layout", ["wrapped", "paragraphs_by_line", "sentences_by_line"])
@pytest.mark.parametrize("kind", ["text", "jsonl"])
def test_memory_does_not_grow_with_a_text(tmp_path, monkeypatch, kind, layout):
    monkeypatch.setattr(documents, "_LONGEST_CHUNK", 1 << 12)
    monkeypatch.setattr(parts, "_CHARACTERS", 1 << 12)
    text = "".join(f"Sentence {n} stands here.\n{chr(10) * (n % 9 == 0)}" for n in range(8_000))
    if layout == "sentences_by_line":
        text = text.replace("\n\n", "\n")
    write(tmp_path / "a.txt", text)
    write(tmp_path / "a.jsonl", json.dumps({"text": text}))
    corpus = Corpus(sources=(f"{kind}:{tmp_path}",), layout=layout)
    (extent,) = documents.extents(corpus)
    (folder := tmp_path / "made").mkdir()
    read_ = parts.Read("", corpus, parts.Part((extent,), (), 0))
    tracemalloc.start()
    read_.make(folder, lambda characters: None)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    words = np.fromfile(folder / "tokens.bin", np.uint32)
    assert len(words) == 8_000 * 5
    # A record of JSON is held: as a line, and as its text.
    assert peak < 2_500_000 + (3 * len(text) if kind == "jsonl" else 0)


@pytest.mark.parametrize("blank", [" ", "。"])
def test_a_paragraph_that_never_ends_is_cut_before_it_is_split(tmp_path, monkeypatch, blank):
    """What sentencex takes for one grows with its square."""
    seen = []
    segment = sentence_splitter.sentencex.segment

    def segmented(language, text):
        seen.append(len(text))
        return segment(language, text)

    monkeypatch.setattr(sentence_splitter.sentencex, "segment", segmented)
    text = blank.join(f"word{n}" for n in range(100_000))
    write(tmp_path / "a.txt", text)
    (document,) = read(f"text:{tmp_path}")
    found = "".join(sentence_splitter.split(document, "zh"))
    assert max(seen) <= 1 << 17
    assert "".join(found.split()) == "".join(text.split())


def test_a_null_is_a_text_that_is_not_there_in_every_kind_of_table(tmp_path):
    texts = ["One.", None, "Two."]
    (tmp_path / "a.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in texts))
    (tmp_path / "a.csv").write_text('text,n\nOne.,1\n"",2\nTwo.,3\n')
    pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / "a.parquet")
    for kind in ("jsonl", "csv", "parquet"):
        corpus = Corpus(sources=(f"{kind}:{tmp_path}",))
        assert [d.text for d in documents.read(corpus)] == ["One.", "Two."]
        (extent,) = documents.extents(corpus)
        (folder := tmp_path / kind).mkdir()
        record = parts.Read("", corpus, parts.Part((extent,), (), 0)).make(
            folder, lambda characters: None
        )
        assert record["empty"] == 1
