"""Files with examples: how they are read, and what is refused, by file and line."""

import csv
import gzip
import io
import json

import kinds
import pytest
from damage import few
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.errors import InputError
from bert_jax.tasks import examples
from bert_jax.tasks.examples import Sentence, Tagged

TAGS = {
    "words": {"kind": "tag"},
    "lists": {"kind": "tag", "text_column": "w", "label_column": "t"},
}


def task(kind="classify", source="jsonl:none", **settings):
    """Of a kind, or of the tags of either form."""
    fields = {"kind": kind, "train": (source,), "validation": (source,)}
    return kinds.task(**fields | TAGS.get(kind, {}) | settings)


def read(tmp_path, word, content, labelled="labelled", kind="classify", **settings):
    path = tmp_path / f"x.{word}"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return examples.read(task(kind, f"{word}:{path}", **settings), (f"{word}:{path}",), labelled)


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


COLUMNS = [("label", "sentence", "id"), ("1", "A text.", "7"), ("0", 'An "other", long.', "8")]
WRITTEN = {
    "tsv": 'label\tsentence\tid\n1\tA text.\t7\n0\tAn "other", long.\t8\n',
    "csv": 'label,sentence,id\n1,A text.,7\n0,"An ""other"", long.",8\n',
    "jsonl": lines_of(dict(zip(COLUMNS[0], row, strict=True)) for row in COLUMNS[1:]),
}
FIRST = {"tsv": 2, "csv": 2, "jsonl": 1}


@pytest.mark.parametrize("word", WRITTEN)
def test_columns_are_found_by_name_in_any_order(tmp_path, word):
    """With a byte-order mark or none, either end of lines, and blank lines behind."""
    places = [f"{tmp_path}/x.{word}:{FIRST[word] + number}" for number in (0, 1)]
    expected = [
        Sentence(places[0], ("A text.",), "1"),
        Sentence(places[1], ('An "other", long.',), "0"),
    ]
    for content in (
        *(WRITTEN[word], "\ufeff" + WRITTEN[word].replace("\n", "\r\n")),
        *(WRITTEN[word].rstrip("\n"), WRITTEN[word] + "\n\n"),
    ):
        assert read(tmp_path, word, content) == expected
    bare = "sentence\nA text.\n" if word != "jsonl" else '{"sentence": "A text."}\n'
    for content in (WRITTEN[word], bare):
        found = read(tmp_path, word, content, "unlabelled")
        assert (found[0].texts, found[0].label) == (("A text.",), None)


def test_columns_have_numbers_where_no_line_names_them(tmp_path):
    """As in CoLA: source, label, mark, sentence."""
    settings = {"header": "none", "text_column": "3", "label_column": "1"}
    found = read(tmp_path, "tsv", "gj04\t1\t\tOur friends.\ngj04\t0\t*\tHim here.\n", **settings)
    assert [(e.texts, e.label) for e in found] == [(("Our friends.",), "1"), (("Him here.",), "0")]
    assert found[0].location.endswith("x.tsv:1")


def test_a_source_is_read_for_its_kind(tmp_path):
    row = lines_of([{"sentence": "A", "b": "B", "c": "C", "label": 1}])
    for kind, texts, label in (
        ("pair", ("A", "B"), "1"),
        ("choice", ("A", "B", "C"), "1"),
        ("regress", ("A", "B"), 1.0),
    ):
        (found,) = read(tmp_path, "jsonl", row, kind=kind)
        assert (found.texts, found.label) == (texts, label)
    with pytest.raises(InputError, match=r"source: 'squad:x': task\.kind=pair reads"):
        examples.read(task("pair"), ("squad:x",), "labelled")


def test_cells_of_csv_hold_newlines_and_much_text_and_those_of_tsv_quotation_marks(tmp_path):
    long = "wa, " * 50_000
    content = f'sentence,label\n"one\ntwo\r\n\nthree",a\n"{long}",b\n'
    first, second = read(tmp_path, "csv", content)
    assert (first.texts, second.texts) == (("one\ntwo\n\nthree",), (long,))
    assert (first.location[-2:], second.location[-2:]) == (":2", ":6")
    (found,) = read(tmp_path, "tsv", 'sentence\tlabel\n"half a quote\ta\n')
    assert found.texts == ('"half a quote',)


def test_sources_are_read_in_order_and_may_be_compressed(tmp_path):
    (tmp_path / "a.tsv.gz").write_bytes(gzip.compress(WRITTEN["tsv"].encode()))
    (tmp_path / "b.jsonl").write_text(WRITTEN["jsonl"])
    sources = (f"jsonl:{tmp_path}/b.jsonl", f"tsv:{tmp_path}/a.tsv.gz")
    found = examples.read(task(), sources, "labelled")
    assert [e.label for e in found] == ["1", "0"] * 2
    assert found[2].location == f"{tmp_path}/a.tsv.gz:2"


# What a text or label of these files can be: TSV parts columns at tabs and lines at newlines.
texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\n\r\ufeff"), min_size=1, max_size=12
).filter(str.strip)
tables = st.lists(st.tuples(texts, texts), min_size=1, max_size=5)


@pytest.mark.long
@given(rows=tables, order=st.permutations(["sentence", "label", "more"]))
@few()
def test_any_texts_come_back_from_tsv_csv_and_json(tmp_path_factory, rows, order):
    folder = tmp_path_factory.mktemp("any")
    columns = [{"sentence": text, "label": label, "more": "x"} for text, label in rows]
    as_lists = [order, *([row[name] for name in order] for row in columns)]
    comma = io.StringIO()
    csv.writer(comma).writerows(as_lists)
    tsv = "".join("\t".join(row) + "\n" for row in as_lists)
    for word, content in (("tsv", tsv), ("csv", comma.getvalue()), ("jsonl", lines_of(columns))):
        found = read(folder, word, content)
        assert [(e.texts[0], e.label) for e in found] == [(t, b.strip()) for t, b in rows]


CONLL = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\nOf  IN\tO\nIt PRP O\n"


def test_words_and_tags_stand_in_lines_of_columns(tmp_path):
    settings = {"kind": "tag", "text_column": "0", "label_column": "2"}
    place = tmp_path / "x.conll"
    for content in (CONLL, CONLL.replace("\n", "\r\n"), CONLL.strip() + "\n\n\n"):
        assert read(tmp_path, "conll", content, **settings) == [
            Tagged(f"{place}:3", ("EU", "rejects"), ("B-ORG", "O")),
            Tagged(f"{place}:7", ("Of", "It"), ("O", "O")),
        ]
    (plain,) = read(tmp_path, "conll", "EU\nrejects\n", "unlabelled", **settings)
    assert (plain.words, plain.tags) == (("EU", "rejects"), None)
    # A mark ends a sentence, and wide blanks part no columns.
    content = "当\tO\n-DOCSTART-\tO\n中\u3000国\tB-LOC\n \t \n国\tO"
    found = read(tmp_path, "conll", content, kind="words")
    assert [e.words for e in found] == [("当",), ("中\u3000国",), ("国",)]
    assert [e.location[-2:] for e in found] == [":1", ":3", ":5"]


def test_values_of_json_and_numbers(tmp_path):
    (found,) = read(
        tmp_path, "jsonl", lines_of([{"w": ["EU", "New York"], "t": [3, "O"]}]), kind="lists"
    )
    assert (found.words, found.tags) == (("EU", "New York"), ("3", "O"))
    rows = [{"sentence": "A", "label": label} for label in (0, True, " yes ")]
    assert [e.label for e in read(tmp_path, "jsonl", lines_of(rows))] == ["0", "true", "yes"]
    content = r'{"sentence": "half \ud83d here, whole \ud83d\ude00", "label": 1}'
    assert read(tmp_path, "jsonl", content)[0].texts == ("half \ufffd here, whole 😀",)
    for label in ("3.8", " -1 ", "1e-3", ".5", "2."):
        content = f"label\tb\tsentence\n{label}\tB\tA\n"
        assert read(tmp_path, "tsv", content, kind="regress")[0].label == float(label)


TABLE = "sentence\tlabel\nA\t1\n"
BROKEN = [  # kind, format, content, what is named
    ("classify", "tsv", "", "x.tsv: "),
    ("classify", "csv", "sentence,label\n", "x.csv: "),
    ("classify", "tsv", TABLE + "B\n", "x.tsv:3: "),
    ("classify", "tsv", "a\tlabel\nA\t1\n", "x.tsv:2: no column 'sentence'"),
    ("classify", "tsv", "sentence\tlabel\tlabel\nA\t1\t1\n", "column 'label'"),
    ("classify", "tsv", TABLE + " \t1\n", "x.tsv:3: column 'sentence'"),
    ("classify", "tsv", TABLE + "B\t \n", "x.tsv:3: column 'label'"),
    ("classify", "tsv", TABLE.encode() + b"caf\xe9\t1\n", "x.tsv:3: byte 3"),
    ("classify", "csv", 'sentence,label\nA,1\n"B,1\nC,1\n', "x.csv:3: "),
    ("classify", "jsonl", '{"sentence": "A", "label": 1}\n{', "x.jsonl:2: "),
    ("classify", "jsonl", "[" * 100_000, "x.jsonl:1: "),
    ("classify", "jsonl", '{"sentence": 3, "label": 1}', "x.jsonl:1: column 'sentence'"),
    ("classify", "jsonl", '{"sentence": "A", "label": null}', "x.jsonl:1: column 'label'"),
    ("words", "conll", "a O\nb\n", "x.conll:2: "),
    ("words", "conll", "-DOCSTART- O\n\n", "x.conll: "),
    ("words", "conll", "a O\n\u3000 O\n", "x.conll:1: word 2"),
    ("lists", "jsonl", '{"w": ["a", "b"], "t": ["O"]}', "x.jsonl:1: 2 words"),
    ("lists", "jsonl", '{"w": [], "t": []}', "x.jsonl:1: column 'w'"),
    ("lists", "jsonl", '{"w": ["a"], "t": "O"}', "x.jsonl:1: column 't'"),
    ("lists", "jsonl", '{"w": ["a", 3], "t": ["O", "O"]}', "x.jsonl:1: word 2"),
    ("lists", "jsonl", '{"w": ["a", "b"], "t": ["O", ""]}', "x.jsonl:1: tag 2"),
    *(
        ("regress", "jsonl", lines_of([{"sentence": "A", "b": "B", "label": x}]), "column 'label'")
        for x in ("", "good", "1e999", "1_0", "\u0663", None, True, [1.0])
    ),
]


@pytest.mark.parametrize(("kind", "word", "content", "named"), BROKEN)
def test_what_is_wrong_is_named_by_file_and_line(tmp_path, kind, word, content, named):
    with pytest.raises(InputError) as caught:
        read(tmp_path, word, content, kind=kind)
    assert named in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "a.gz").write_text("no gzip")
    for name in ("none", "", "a.gz"):
        with pytest.raises(InputError, match=f"{tmp_path}/{name}: "):
            examples.read(task(), (f"tsv:{tmp_path}/{name}",), "labelled")


# --- labels ---


def sentences(*labels):
    return [Sentence(f"f:{i}", ("A",), label) for i, label in enumerate(labels, 2)]


def tagged(*tags):
    return Tagged("f:9", tuple(f"w{i}" for i in range(len(tags))), tags)


def test_labels_are_those_named_or_those_found():
    for of, train, labels in (
        (task(), sentences("b", "a", "b"), ("a", "b")),
        (task(labels=("c", "b", "a")), sentences("b", "a"), ("c", "b", "a")),
        (task("choice"), sentences("1", "1"), ("0", "1")),
        (task("choice", labels=("A", "B")), sentences("B"), ("A", "B")),
        (task("regress"), sentences(1.5), ()),
        (task("span", "squad:x"), [], ()),
        # Data is noisy: I- without B- is no error.
        (task("tag"), [tagged("I-X", "O", "B")], ("B", "I-X", "O")),
        # Where no entities are scored any tag is taken.
        (task("tag", score="accuracy"), [tagged("VB", "S-X", "NN")], ("NN", "S-X", "VB")),
    ):
        assert examples.find_labels(of, train) == labels


@pytest.mark.parametrize(
    ("task", "train", "words"),
    [
        (task(), sentences("a", "a"), "'label' has only one label, 'a'"),
        (task(labels=("a", "b")), sentences("a", "c"), "f:3: label 'c'"),
        (task("choice"), sentences("2"), "f:2: label '2'"),
        (task(score="f1"), sentences("a", "c", "b"), "task.score=f1"),
        (task("tag"), [tagged("NN", "VB")], "'NN'"),
        (task("tag"), [tagged("O", "B-")], "'B-'"),
        (task("tag", labels=("O", "B-X")), [tagged("O", "I-X")], "f:9: word 2: tag 'I-X'"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(task, train, words):
    with pytest.raises(InputError) as caught:
        examples.find_labels(task, train)
    assert words in str(caught.value)


def test_the_hash_is_of_what_is_learned_from():
    base = sentences("a", "b")
    hashes = {
        examples.sha256(given, labels)
        for given, labels in [
            *((base, ("a", "b")), (base, ("b", "a")), (base[::-1], ("a", "b"))),
            *((sentences("a", None), ("a", "b")), (sentences("a", "None"), ("a", "b"))),
            ([Sentence("f:2", ("A", "b"), None)], ()),
            ([Sentence("f:2", ("Ab",), None)], ()),
            ([Tagged("f:2", ("A", "b"), None)], ()),
            *((sentences(1.0), ()), (sentences(1.0000000000000002), ())),
        ]
    }
    assert len(hashes) == 10
    moved = [Sentence(f"g:{i}", ("A",), label) for i, label in enumerate("ab")]
    assert examples.sha256(moved, ("a", "b")) == examples.sha256(base, ("a", "b"))


# --- typed texts ---


def parsed(task, *texts):
    return list(examples.parse_lines(task, ((f"f:{i}", t) for i, t in enumerate(texts, 1))))


def test_texts_are_typed_in_lines_and_as_arguments():
    """Tabs part the texts of an example, and are one where it has one text."""
    (one,) = parsed(task("classify"), "a\tb")
    assert one.texts == ("a\tb",) and one.label is None
    assert parsed(task("pair"), "a b\tc")[0].texts == ("a b", "c")
    assert parsed(task("choice"), "a\tb\tc d")[0].texts == ("a", "b", "c d")
    assert parsed(task("tag"), " a  b\tc ")[0].words == ("a", "b", "c")
    first, second = parsed(task("span", "squad:x"), "a ?\t b c", "", " \t", "d ?\te")
    assert (first.id, first.question, first.context) == ("1", "a ?", " b c")
    assert (second.id, second.location) == ("2", "f:4")
    pairs = list(examples.parse_arguments(task("pair"), ["a", "b", "c\td", "e"]))
    assert [pair.texts for pair in pairs] == [("a", "b"), ("c\td", "e")]
    for kind, line, what in (
        ("pair", "a\tb\tc", "f:1: 3 texts"),
        ("choice", "a\tb", "takes 3"),
        ("span", "a\t ", "f:1: text 2 is blank"),
    ):
        with pytest.raises(InputError, match=what):
            parsed(task(kind, "squad:x" if kind == "span" else "jsonl:x"), line)
