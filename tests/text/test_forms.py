"""Text as people have it: one file of many documents, WikiText, tables, wrong bytes, addresses."""

import csv
import gzip
import io
import itertools
import json

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from etils import epath

from bert_jax.config import Corpus
from bert_jax.data import corpus, parts
from bert_jax.errors import InputError
from bert_jax.text import documents, records, sentence_splitter
from bert_jax.text import sources as text_sources
from bert_jax.text.vocabulary import SPECIALS
from bert_jax.tools.doctor import text as doctor_text


def read(source, **settings):
    return list(documents.read(Corpus(sources=(source,), **settings)))


WIKITEXT = """
 = Gold dollar =

 The gold dollar or gold one @-@ dollar piece was a coin . It was <unk> in 1849 .

 = = Background = =

 In 1791 , <unk> proposed a coin . x = 1 and y = 2 .

 = Plain maskray =

 The plain maskray is a stingray .
"""
NOVELS = """A licence of some words.

 EMMA

BOOK I

CHAPTER I

Emma Woodhouse, handsome, clever, and rich. She read
Chapter 7 of the book.

CHAPTER II

Mr. Weston was a native of Highbury.

Chapter the Last

The end.
"""


def test_wiki_titles_begin_documents_and_their_sections_do_not(tmp_path):
    (tmp_path / "wiki.test.tokens").write_text(WIKITEXT)
    found = read(f"text:{tmp_path}/*.tokens", document_starts="headings")
    assert [d.text.split("\n")[0] for d in found] == ["= Gold dollar =", "= Plain maskray ="]
    assert "Background" in found[0].text
    # A place is a line of the file.
    assert [d.location(0).rpartition(":")[2] for d in found] == ["2", "10"]


def test_parts_of_books_begin_documents_unless_they_stand_in_a_sentence(tmp_path):
    """Headings one after another begin one document, as a book and its first chapter."""
    (tmp_path / "novels.txt").write_text(NOVELS)
    found = read(f"text:{tmp_path}", document_starts="headings", layout="wrapped")
    assert [d.text.split("\n")[0] for d in found] == [
        "A licence of some words.",
        "BOOK I",
        "CHAPTER II",
        "Chapter the Last",
    ]
    assert "CHAPTER I\n\nEmma" in found[1].text and "Chapter 7" in found[1].text
    # Nothing is lost.
    assert "".join("".join(d.text.split()) for d in found) == "".join(NOVELS.split())


def test_markdown_titles_and_a_regular_expression(tmp_path):
    (tmp_path / "a.txt").write_text("# One\n\nText.\n\n## Within\n\n# Two\n\nText.\n")
    assert len(read(f"text:{tmp_path}", document_starts="headings")) == 2
    (tmp_path / "a.txt").write_text("***\nText.\n*** b\nText.\nnot ***\n")
    found = read(f"text:{tmp_path}", document_starts=r"\*{3}")
    assert [d.text for d in found] == ["***\nText.", "*** b\nText.\nnot ***"]


def test_the_layout_is_that_of_the_file_and_not_of_its_parts(tmp_path):
    (tmp_path / "a.txt").write_text("# A\n\nShort.\n\n# B\n\n" + "long " * 50)
    found = read(f"text:{tmp_path}", document_starts="headings")
    assert [d.layout for d in found] == ["paragraphs_by_line"] * 2


def test_each_source_has_a_field_which_is_missed_before_any_work(tmp_path):
    number = itertools.count()
    with open(tmp_path / "a.jsonl", "w") as file:
        for _ in range(30):
            file.write(json.dumps({"text": f"{words(next(number))}."}) + "\n")
    table = pyarrow.table({"body": [f"{words(next(number))}." for _ in range(30)]})
    pyarrow.parquet.write_table(table, tmp_path / "b.parquet")
    sources = (f"jsonl:{tmp_path}/a.jsonl", f"parquet:{tmp_path}/b.parquet")
    for order in (sources, sources[::-1]):
        said = []
        folder = epath.Path(tmp_path / "c")
        with pytest.raises(InputError, match=r"a\.jsonl|b\.parquet"):
            corpus.prepare(Corpus(sources=order), 40, folder, said.append)
        assert not said and not folder.exists()
    claim = Corpus(sources=sources, text_field="text,body", mixture=(1, 1))
    made = corpus.prepare(claim, 40, folder, said.append)
    assert sum(split["documents"] for split in made["splits"].values()) == 60
    assert not [f for f in doctor_text.examine(claim) if f.rule is doctor_text.REFUSED]


@pytest.mark.parametrize(("count", "lengths"), [(7, [7]), (29, [9, 10, 10]), (30, [10] * 3)])
def test_a_long_text_is_cut_into_documents_of_like_length(tmp_path, count, lengths):
    (tmp_path / "a.txt").write_text(" ".join(f"Sentence {i} is here." for i in range(count)))
    (whole,) = read(f"text:{tmp_path}")
    cut = sentence_splitter.split_document(whole, Corpus(sources=("text:a",), cut_documents=10))
    assert [len(own) for _, own in cut] == lengths
    assert [s for _, own in cut for s in own] == sentence_splitter.split(whole, "en")


def words(seed):
    letters = np.random.default_rng(seed).choice(list("abcdefgh"), (9, 4))
    return " ".join("".join(word) for word in letters)


def test_one_long_text_is_refused_by_the_settings_that_help_and_then_taken(tmp_path):
    text = " ".join(f"{words(i).capitalize()}." for i in range(200))
    (tmp_path / "book.txt").write_text(text)
    vocab = tmp_path / "vocab.txt"
    pieces = [*SPECIALS, *".abcdefgh", *(f"##{c}" for c in "abcdefgh")]
    vocab.write_text("\n".join(pieces) + "\n")
    settings = {"sources": (f"text:{tmp_path}/book.txt",), "tokenizer": str(vocab)}
    with pytest.raises(InputError) as caught:
        corpus.prepare(Corpus(**settings), 22, epath.Path(tmp_path / "c"), lambda line: None)
    for name in ("layout=", "document_starts=headings", "cut_documents="):
        assert f"corpus.{name}" in str(caught.value)
    made = corpus.prepare(
        Corpus(**settings, cut_documents=10), 22, epath.Path(tmp_path / "c"), lambda line: None
    )
    assert [made["splits"][s]["documents"] for s in ("train", "validation")] == [12, 8]
    assert sum(made["splits"][s]["sentences"] for s in ("train", "validation")) == 200


def prepared(folder, size, *texts, **settings):
    """Manifest, tokenizer and lines of a corpus of these texts, a file each, or of those there."""
    (folder / "text").mkdir(exist_ok=True)
    for number, text in enumerate(texts):
        (folder / "text" / f"{number:03}.txt").write_text(text)
    given = {"sources": (f"text:{folder}/text",), "validation_share": 0.4} | settings
    said, made = [], epath.Path(folder / f"of {size}")
    manifest = corpus.prepare(Corpus(**given), size, made, said.append)
    return manifest, corpus.open_tokenizer(made, manifest), said


@pytest.mark.parametrize(("kind", "size"), [("wordpiece", 23), ("unigram", 15)])
def test_the_text_s_own_unknown_word_becomes_unk(tmp_path, kind, size):
    lines = [f"{words(i)} <unk> {words(-i % 99)} <unk>.\n" for i in range(100)]
    texts = ["".join(lines[i : i + 4]) for i in range(0, 100, 4)]
    settings = {"layout": "sentences_by_line", "unknown_word": "<unk>", "tokenizer_kind": kind}
    made, vocabulary, _ = prepared(tmp_path, size, *texts, **settings)
    assert sum(made["splits"][s]["unknown_tokens"] for s in ("train", "validation")) == 200
    assert not {"<", "u", "unk"} & {vocabulary.token(i) for i in range(vocabulary.size)}


ROWS = [("1", 'A "quoted", text.\nOf two lines.'), ("2", "Größe."), ("3", "")]


def write_table(folder, kind):
    path = folder / f"a.{kind}"
    if kind == "parquet":
        table = pyarrow.table({"id": [r[0] for r in ROWS], "body": [r[1] for r in ROWS]})
        pyarrow.parquet.write_table(table, path, row_group_size=1)
        return path
    with io.StringIO(newline="") as text:
        if kind == "csv.gz":
            csv.writer(text).writerows([("id", "body"), *ROWS])
        else:
            text.write("id\tbody\n" + "".join(f"{i}\t{t.replace(chr(10), ' ')}\n" for i, t in ROWS))
        data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data) if kind == "csv.gz" else data)
    return path


@pytest.mark.parametrize("kind", ["csv.gz", "tsv", "parquet"])
def test_a_column_of_a_table_is_text(tmp_path, kind):
    path = write_table(tmp_path, kind)
    word = kind.split(".")[0]
    found = read(f"{word}:{tmp_path}", text_field="body")
    first = ROWS[0][1] if kind != "tsv" else ROWS[0][1].replace("\n", " ")
    assert [d.text for d in found] == [first, "Größe."]
    places = {"csv": (2, 4), "tsv": (2, 3), "parquet": (0, 1)}[word]
    assert [d.location(0) for d in found] == [f"{path}:{place}" for place in places]
    with pytest.raises(InputError, match=rf"{path}.*'text'.* 'id', 'body'.*corpus\.text_field="):
        read(f"{word}:{path}")


def test_a_damaged_table_is_named(tmp_path):
    for word, content, place in (
        ("csv", 'text,b\n"open,1\n', r"a\.csv:2: "),
        ("csv", "text,b\none\n", r"a\.csv:2: 1 columns"),
        ("parquet", "text", r"a\.parquet: "),
    ):
        (tmp_path / f"a.{word}").write_text(content)
        with pytest.raises(InputError, match=place):
            read(f"{word}:{tmp_path}")


def test_a_column_of_numbers_and_one_within_another(tmp_path):
    rows = [{"title": "T", "body": f"Text {i}."} for i in range(5)]
    table = pyarrow.table({"article": rows, "text": range(5), "texts": [["a"]] * 5})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    for name in ("text", "texts.list.element"):
        with pytest.raises(InputError, match=f"column '{name}' holds no texts"):
            read(f"parquet:{tmp_path}", text_field=name)
    found = read(f"parquet:{tmp_path}", text_field="article.body")
    assert [d.text for d in found] == [row["body"] for row in rows]


NESTED = [{"id": i, "data": {"text": f"Text {i}.", "page": {"number": i}}} for i in range(5)]


def test_a_field_within_another_is_read_from_json_as_from_parquet(tmp_path):
    rows = [*NESTED, {"id": 5, "data": {"text": None}}, {"id": 6, "data": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    found = [
        [d.text for d in read(f"{word}:{tmp_path}", text_field="data.text")]
        for word in ("jsonl", "parquet")
    ]
    assert found[0] == found[1] == [row["data"]["text"] for row in NESTED]


def test_a_key_that_has_the_dot_itself_is_the_field():
    record = {"a": {"b": 1, "c.d": 2, "null": None}, "a.b": 3, "a.x": {"y": 4}}
    names = ["a.b", "a.c.d", "a.x.y", "a.null", "a.null.z"]
    assert [records.field_value(record, name) for name in names] == [3, 2, 4, None, None]
    for name in ("a.b.c", "a.d", "b", ""):
        with pytest.raises(KeyError):
            records.field_value(record, name)
    assert records.field_names(record) == ["a.b", "a.c.d", "a.null", "a.b", "a.x.y"]
    assert records.field_names(NESTED[0]) == ["id", "data.text", "data.page.number"]


@pytest.mark.parametrize(
    ("word", "field", "named"),
    [
        ("jsonl", "text", "'data.page.number'"),
        ("jsonl", "id", "column 'id' is 0, not a text"),
        ("jsonl", "data", "column 'data' is .*'data.text'"),
        ("parquet", "text", "'data.page.number'"),
        ("parquet", "id", "'id'.*'data.text'"),
        ("csv", "text", "'id', 'data'"),
        ("csv", "data", "'id', 'data', 'data'"),
    ],
)
def test_a_refused_field_is_told_which_fields_there_are(tmp_path, word, field, named):
    path = tmp_path / f"a.{word}"
    if word == "parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(NESTED), path)
    elif word == "csv":
        path.write_text("id,data,data\n1,2,3\n")
    else:
        path.write_text(json.dumps(NESTED[0]))
    with pytest.raises(InputError, match=rf"{path.name}.*{named}.*corpus\.text_field="):
        read(f"{word}:{tmp_path}", text_field=field)


def test_a_large_parquet_file_is_read_in_parts(tmp_path):
    texts = [f"{i} " * 100 for i in range(100)]
    pyarrow.parquet.write_table(
        pyarrow.table({"text": texts}), tmp_path / "a.parquet", row_group_size=10
    )
    settings = Corpus(sources=(f"parquet:{tmp_path}",))
    extents = list(documents.extents(settings, 9_000))
    assert len(extents) == len(records.divide_parquet(extents[0].path, "text", 9_000)) > 2
    found = [d for extent in extents for d in documents.read_extent(extent, settings)]
    assert [d.text for d in found] == [text.strip() for text in texts]
    assert [d.name.rpartition(":")[2] for d in found] == [str(i) for i in range(100)]


@pytest.mark.parametrize("word", ["text", "csv", "parquet"])
def test_files_at_an_address_are_read_as_those_here(tmp_path, word):
    memory = fsspec.filesystem("memory")
    local = tmp_path / "a.txt" if word == "text" else write_table(tmp_path, f"{word}.gz"[:7])
    if word == "text":
        local.write_text("Text.")
    memory.pipe(f"/forms-{word}/{local.name}", local.read_bytes())
    there = f"{word}:memory://forms-{word}"
    for place in (there, f"{there}/*", f"{there}/{local.name}"):
        found = read(place, text_field="body")
        assert [d.text for d in found] == [
            d.text for d in read(f"{word}:{local}", text_field="body")
        ]
    settings = Corpus(sources=(there,), text_field="body")
    (row,) = text_sources.fingerprint(settings)
    assert row["bytes"] == local.stat().st_size
    assert text_sources.sha256(row["file"]) == text_sources.sha256(str(local))
    (part,) = parts.plan(settings)
    found = [(d.name, d.text) for d in part.documents(settings) if d.chunks]
    assert found == [(d.name, d.text) for d in read(there, text_field="body")]
    memory.pipe(f"/forms-{word}/{local.name}", b"changed")
    assert text_sources.fingerprint(settings) != [row]
    memory.pipe(f"/forms-{word}.md", local.read_bytes())  # a name that is asked for may end so
    assert text_sources.sha256(f"memory://forms-{word}.md") == text_sources.sha256(str(local))


@pytest.mark.parametrize("place", ["nowhere://a", "memory://none/*.txt"])
def test_an_address_with_nothing_behind_it_is_refused(place):
    with pytest.raises(InputError, match=place.partition("/")[0]):
        read(f"text:{place}")


@pytest.mark.parametrize("layout", ["wrapped", "sentences_by_line"])
def test_wrong_bytes_are_replaced_by_choice(tmp_path, layout):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 one.\n")
    with pytest.raises(InputError, match=r"byte 3 .*bert-jax doctor.*encoding_errors=replace"):
        read(f"text:{tmp_path}", layout=layout)
    (document,) = read(f"text:{tmp_path}", layout=layout, encoding_errors="replace")
    assert document.text == "caf\ufffd one."


def test_utf8_under_another_name_is_refused_by_prepare(tmp_path):
    """Windows-1252 reads any bytes: the files that are UTF-8 would be garbled without a word."""
    for number in range(20):
        encoding = "utf-8" if number == 7 else "windows-1252"
        text = f"Größe über Öfen, {words(number)} — täglich."
        (tmp_path / f"{number:02}.txt").write_bytes(text.encode(encoding))
    settings = Corpus(sources=(f"text:{tmp_path}",), encoding="windows-1252", validation_share=0.4)
    with pytest.raises(InputError, match=r"07\.txt: is UTF-8.*corpus\.encoding="):
        corpus.prepare(settings, 60, epath.Path(tmp_path / "c"), lambda line: None)
    (tmp_path / "07.txt").unlink()
    corpus.prepare(settings, 60, epath.Path(tmp_path / "c"), lambda line: None)


def test_prepare_says_how_much_is_unknown_and_warns(tmp_path):
    vocab = tmp_path / "vocab.txt"
    vocab.write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nab\n.\n")
    texts = [f"{'ab ' * number}x ab." for number in range(20)]
    made, _, said = prepared(tmp_path, 7, *texts, tokenizer=str(vocab))
    counts = made["splits"]["train"]
    share = 100 * counts["unknown_tokens"] / counts["tokens"]
    assert share > 2
    (line,) = [line for line in said if line.startswith("prepare: train")]
    assert f", {share:.1f}% of them unknown" in line
    assert any(f"warning: {share:.0f}% of train is [UNK]" in line for line in said)


def test_words_too_long_for_pieces_train_no_vocabulary_and_are_counted(tmp_path):
    """A pair of letters of such a word is merged again and again: training would stand still."""
    texts = [f"{words(number)} <unk> {words(99 - number)}." for number in range(20)]
    texts.append(f"{'ab' * 200_000} {'c' * 201} {'d' * 200}")
    _, opened, said = prepared(tmp_path, 26, *texts, unknown_word="<unk>")
    assert any("2 words of over 200 characters" in line for line in said)
    assert "##ab" not in {opened.token(i) for i in range(opened.size)}


def test_what_is_no_prose_by_its_name_is_not_read_as_prose(tmp_path):
    for name in ("a.jsonl", "b.csv.gz", "c.parquet"):
        (tmp_path / name).write_bytes(b"{}")
        with pytest.raises(InputError, match=rf"{name} .* {name.split('.')[1]}:"):
            read(f"text:{tmp_path}/{name[0]}*")
