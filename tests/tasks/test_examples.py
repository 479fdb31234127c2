"""Files with examples: how they are read, and what is refused, by file and line."""

import csv
import gzip
import io
import json

import pytest
from damage import few
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.config import Task
from bert_jax.errors import InputError
from bert_jax.tasks import examples
from bert_jax.tasks.examples import Sentence, Tagged


def task(kind="classify", source="jsonl:none", **settings):
    needed = {
        "pair": {"second_column": "b"},
        "regress": {"second_column": "b"},
        "choice": {"choice_columns": ("b", "c")},
        "span": {"max_sequence_length": 384},
    }
    fields = {"train": (source,), "validation": (source,)} | needed.get(kind, {}) | settings
    return Task(kind=kind, **fields)


def write(path, content):
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(tmp_path, word, content, labelled="labelled", kind="classify", **settings):
    source = f"{word}:{write(tmp_path / f'x.{word}', content)}"
    return examples.read(task(kind, source, **settings), (source,), labelled)


def lines_of(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


COLUMNS = [("label", "sentence", "id"), ("1", "A text.", "7"), ("0", 'An "other", long.', "8")]
WRITTEN = {
    "tsv": 'label\tsentence\tid\n1\tA text.\t7\n0\tAn "other", long.\t8\n',
    "csv": 'label,sentence,id\n1,A text.,7\n0,"An ""other"", long.",8\n',
    "jsonl": lines_of(dict(zip(COLUMNS[0], row, strict=True)) for row in COLUMNS[1:]),
}
PLACES = {"tsv": (2, 3), "csv": (2, 3), "jsonl": (1, 2)}


@pytest.mark.parametrize("word", WRITTEN)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_columns_are_found_by_name_in_any_order(tmp_path, word, mark, end):
    found = read(tmp_path, word, mark + WRITTEN[word].replace("\n", end))
    first, second = (f"{tmp_path / f'x.{word}'}:{line}" for line in PLACES[word])
    assert found == [
        Sentence(first, ("A text.",), "1"),
        Sentence(second, ('An "other", long.',), "0"),
    ]
    # The last line may lack its end, and empty lines are no examples.
    assert read(tmp_path, word, WRITTEN[word].rstrip("\n")) == found
    assert read(tmp_path, word, WRITTEN[word] + "\n\n") == found


@pytest.mark.parametrize("word", WRITTEN)
def test_labels_may_be_missing_where_they_are_not_read(tmp_path, word):
    content = {"tsv": "sentence\nA text.\n", "csv": "sentence\nA text.\n"}
    content["jsonl"] = '{"sentence": "A text."}\n'
    for text in (WRITTEN[word], content[word]):
        found = read(tmp_path, word, text, "unlabelled")
        assert (found[0].texts, found[0].label) == (("A text.",), None)
    with pytest.raises(InputError, match=r":1: no column 'label'"):
        read(tmp_path, word, content[word])


def test_columns_have_numbers_where_no_line_names_them(tmp_path):
    """As in CoLA: source, label, mark, sentence."""
    settings = {"header": "none", "text_column": "3", "label_column": "1"}
    found = read(tmp_path, "tsv", "gj04\t1\t\tOur friends.\ngj04\t0\t*\tHim here.\n", **settings)
    assert [(e.texts, e.label) for e in found] == [(("Our friends.",), "1"), (("Him here.",), "0")]
    assert found[0].place.endswith("x.tsv:1")
    with pytest.raises(InputError, match=r"x\.tsv:1: no column '3', but '0', '1', '2'"):
        read(tmp_path, "tsv", "a\t1\tb\n", **settings)


def test_a_source_is_read_for_its_kind(tmp_path):
    row = {"sentence": "A", "b": "B", "c": "C", "label": 1}
    (pair,) = read(tmp_path, "jsonl", lines_of([row]), kind="pair")
    (choice,) = read(tmp_path, "jsonl", lines_of([row]), kind="choice")
    (regress,) = read(tmp_path, "jsonl", lines_of([row]), kind="regress")
    assert (pair.texts, pair.label) == (("A", "B"), "1")
    assert (choice.texts, choice.label) == (("A", "B", "C"), "1")
    assert (regress.texts, regress.label) == (("A", "B"), 1.0)
    with pytest.raises(InputError, match=r"source: 'squad:x': task\.kind=pair reads"):
        examples.read(task("pair"), ("squad:x",), "labelled")


def test_a_long_document_is_a_column_of_csv(tmp_path):
    (found,) = read(tmp_path, "csv", f'sentence,label\n"{"wa, " * 50_000}",1\n')
    assert len(found.texts[0]) == 200_000


def test_quoted_columns_of_csv_hold_newlines_and_their_record_is_called_by_its_first(tmp_path):
    content = 'sentence,label\n"one\ntwo\r\n\nthree",a\nfour,b\n'
    first, second = read(tmp_path, "csv", content)
    assert first.texts == ("one\ntwo\n\nthree",)
    assert (first.place[-2:], second.place[-2:]) == (":2", ":6")


def test_quotation_marks_mean_nothing_in_tsv(tmp_path):
    (found,) = read(tmp_path, "tsv", 'sentence\tlabel\n"half a quote\ta\n')
    assert found.texts == ('"half a quote',)


def test_sources_are_read_in_order_and_may_be_compressed(tmp_path):
    write(tmp_path / "a.tsv.gz", gzip.compress(WRITTEN["tsv"].encode()))
    write(tmp_path / "b.jsonl", WRITTEN["jsonl"])
    sources = (f"jsonl:{tmp_path}/b.jsonl", f"tsv:{tmp_path}/a.tsv.gz")
    found = examples.read(task(), sources, "labelled")
    assert [e.label for e in found] == ["1", "0"] * 2
    assert found[2].place == f"{tmp_path}/a.tsv.gz:2"


# What a text or label of these files can be: TSV parts columns at tabs and lines at newlines.
texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\t\n\r\ufeff"), min_size=1, max_size=12
).filter(str.strip)
tables = st.lists(st.tuples(texts, texts), min_size=1, max_size=5)


@given(rows=tables, order=st.permutations(["sentence", "label", "more"]))
@few()
def test_any_texts_come_back_from_tsv_csv_and_json(tmp_path_factory, rows, order):
    folder = tmp_path_factory.mktemp("any")
    columns = [{"sentence": text, "label": label, "more": "x"} for text, label in rows]
    as_lists = [order, *([row[name] for name in order] for row in columns)]
    comma = io.StringIO()
    csv.writer(comma).writerows(as_lists)
    written = {
        "tsv": "".join("\t".join(row) + "\n" for row in as_lists),
        "csv": comma.getvalue(),
        "jsonl": lines_of(columns),
    }
    for word, content in written.items():
        found = read(folder, word, content)
        assert [(e.texts[0], e.label) for e in found] == [(t, b.strip()) for t, b in rows]


CONLL = "-DOCSTART- -X- O\n\nEU NNP B-ORG\nrejects VBZ O\n\n\nOf  IN\tO\nIt PRP O\n"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_words_and_tags_stand_in_lines_of_columns(tmp_path, end):
    settings = {"kind": "tag", "text_column": "0", "label_column": "2"}
    found = read(tmp_path, "conll", CONLL.replace("\n", end), **settings)
    place = tmp_path / "x.conll"
    assert found == [
        Tagged(f"{place}:3", ("EU", "rejects"), ("B-ORG", "O")),
        Tagged(f"{place}:7", ("Of", "It"), ("O", "O")),
    ]
    assert read(tmp_path, "conll", CONLL.strip() + "\n\n\n", **settings) == found
    (plain,) = read(tmp_path, "conll", "EU\nrejects\n", "unlabelled", **settings)
    assert (plain.words, plain.tags) == (("EU", "rejects"), None)


def test_a_document_mark_ends_a_sentence_and_wide_blanks_part_no_columns(tmp_path):
    settings = {"kind": "tag", "text_column": "0", "label_column": "1"}
    content = "当\tO\n-DOCSTART-\tO\n中\u3000国\tB-LOC\n \t \n国\tO"
    found = read(tmp_path, "conll", content, **settings)
    assert [e.words for e in found] == [("当",), ("中\u3000国",), ("国",)]
    assert [e.place[-2:] for e in found] == [":1", ":3", ":5"]


def test_words_and_tags_may_be_lists_in_json(tmp_path):
    settings = {"kind": "tag", "text_column": "tokens", "label_column": "tags"}
    rows = [{"tokens": ["EU", "New York"], "tags": [3, "O"]}]
    (found,) = read(tmp_path, "jsonl", lines_of(rows), **settings)
    assert (found.words, found.tags) == (("EU", "New York"), ("3", "O"))


def test_labels_of_json_may_be_integers_and_booleans(tmp_path):
    rows = [{"sentence": "A", "label": label} for label in (0, True, " yes ")]
    assert [e.label for e in read(tmp_path, "jsonl", lines_of(rows))] == ["0", "true", "yes"]


@pytest.mark.parametrize("label", ["3.8", " -1 ", "5", "1e-3", ".5", "2."])
def test_labels_of_a_regression_are_numbers(tmp_path, label):
    (found,) = read(tmp_path, "tsv", f"label\tb\tsentence\n{label}\tB\tA\n", kind="regress")
    assert found.label == float(label)


def test_half_of_a_surrogate_pair_in_json_becomes_a_replacement_character(tmp_path):
    content = r'{"sentence": "half \ud83d here, whole \ud83d\ude00", "label": 1}'
    (found,) = read(tmp_path, "jsonl", content)
    assert found.texts == ("half \ufffd here, whole 😀",)


TABLE = "sentence\tlabel\nA\t1\n"
BROKEN = [  # kind, format, content, what is named
    ("classify", "tsv", "", "x.tsv: "),
    ("classify", "csv", "sentence,label\n", "x.csv: "),
    ("classify", "tsv", TABLE + "B\n", "x.tsv:3: "),
    ("classify", "tsv", "\n" + TABLE + "B\t1\t2\n", "x.tsv:4: "),
    ("classify", "tsv", "a\tlabel\nA\t1\n", "x.tsv:1: no column 'sentence'"),
    (
        "classify",
        "tsv",
        "sentence\tlabel\tlabel\nA\t1\t1\n",
        "x.tsv:1: more than one column 'label'",
    ),
    ("classify", "tsv", TABLE + " \t1\n", "x.tsv:3: column 'sentence'"),
    ("classify", "tsv", TABLE + "B\t \n", "x.tsv:3: column 'label'"),
    ("classify", "tsv", TABLE.encode() + b"caf\xe9\t1\n", "x.tsv:3: byte 3"),
    ("classify", "csv", 'sentence,label\nA,1\n"B,1\nC,1\n', "x.csv:3: "),
    ("classify", "jsonl", '{"sentence": "A", "label": 1}\n{', "x.jsonl:2: "),
    ("classify", "jsonl", "[" * 100_000, "x.jsonl:1: "),
    ("classify", "jsonl", '{"sentence": 3, "label": 1}', "x.jsonl:1: column 'sentence'"),
    ("classify", "jsonl", '{"sentence": "A", "label": null}', "x.jsonl:1: column 'label'"),
    ("words", "conll", "a O\nb\n", "x.conll:2: "),
    ("words", "conll", "a\nb\n", "x.conll:1: no column '1'"),
    ("words", "conll", "-DOCSTART- O\n\n", "x.conll: "),
    ("words", "conll", "a O\n\u3000 O\n", "x.conll:1: word 2"),
    ("lists", "jsonl", '{"w": ["a", "b"], "t": ["O"]}', "x.jsonl:1: 2 words"),
    ("lists", "jsonl", '{"w": [], "t": []}', "x.jsonl:1: column 'w'"),
    ("lists", "jsonl", '{"w": "a b", "t": ["O", "O"]}', "x.jsonl:1: column 'w'"),
    ("lists", "jsonl", '{"w": ["a"], "t": "O"}', "x.jsonl:1: column 't'"),
    ("lists", "jsonl", '{"w": ["a", " "], "t": ["O", "O"]}', "x.jsonl:1: word 2"),
    ("lists", "jsonl", '{"w": ["a", 3], "t": ["O", "O"]}', "x.jsonl:1: word 2"),
    ("lists", "jsonl", '{"w": ["a", "b"], "t": ["O", ""]}', "x.jsonl:1: tag 2"),
    ("lists", "jsonl", '{"w": ["a", "b"], "t": ["O", null]}', "x.jsonl:1: tag 2"),
]
SETTINGS = {
    "classify": {},
    "words": {"kind": "tag", "text_column": "0", "label_column": "1"},
    "lists": {"kind": "tag", "text_column": "w", "label_column": "t"},
}


@pytest.mark.parametrize(("kind", "word", "content", "named"), BROKEN)
def test_what_is_wrong_is_named_by_file_and_line(tmp_path, kind, word, content, named):
    with pytest.raises(InputError) as caught:
        read(tmp_path, word, content, **SETTINGS[kind])
    assert named in str(caught.value)


@pytest.mark.parametrize(
    "label", ["", "good", "nan", "inf", "1e999", "1_0", "\u0663", None, True, [1.0], float("nan")]
)
def test_a_label_that_is_no_number_is_named(tmp_path, label):
    row = {"sentence": "A", "b": "B", "label": 1}
    with pytest.raises(InputError, match=r"x\.jsonl:2: column 'label'"):
        read(tmp_path, "jsonl", lines_of([row, row | {"label": label}]), kind="regress")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for source, why in [
        (f"tsv:{tmp_path}/none", "none: cannot be read"),
        (f"tsv:{tmp_path}", "cannot be read"),
        (f"tsv:{write(tmp_path / 'a.gz', 'no gzip')}", r"a\.gz: damaged"),
    ]:
        with pytest.raises(InputError, match=why):
            examples.read(task(), (source,), "labelled")


def sentences(*labels):
    return [Sentence(f"f:{i}", ("A",), label) for i, label in enumerate(labels, 2)]


def tagged(*tags):
    return Tagged("f:9", tuple(f"w{i}" for i in range(len(tags))), tags)


def test_labels_are_those_named_or_those_found():
    assert examples.labels_of(task(), sentences("b", "a", "b")) == ("a", "b")
    named = task(labels=("c", "b", "a"))
    assert examples.labels_of(named, sentences("b", "a")) == ("c", "b", "a")
    assert examples.labels_of(task("choice"), sentences("1", "1")) == ("0", "1")
    letters = task("choice", labels=("A", "B"))
    assert examples.labels_of(letters, sentences("B")) == ("A", "B")
    assert examples.labels_of(task("regress"), sentences(1.5)) == ()
    assert examples.labels_of(task("span", "squad:x"), []) == ()
    # Data is noisy: I- without B- is no error.
    assert examples.labels_of(task("tag"), [tagged("I-X", "O", "B")]) == ("B", "I-X", "O")


@pytest.mark.parametrize(
    ("task", "train", "words"),
    [
        (task(), sentences("a", "a"), "'label' has but one label, 'a'"),
        (task(labels=("a", "b")), sentences("a", "c"), "f:3: label 'c' is none of 'a', 'b'"),
        (task("choice"), sentences("2"), "f:2: label '2' is none of '0', '1'"),
        (
            task(score="f1"),
            sentences("a", "c", "b"),
            "task.score=f1: is of two labels, and there are",
        ),
        (task("tag"), [tagged("NN", "VB")], "task.score=entity_f1: the tag 'NN'"),
        (task("tag"), [tagged("O", "B-")], "task.score=entity_f1: the tag 'B-'"),
    ],
)
def test_labels_that_cannot_be_learned_are_refused(task, train, words):
    with pytest.raises(InputError) as caught:
        examples.labels_of(task, train)
    assert words in str(caught.value)


def test_tags_of_any_kind_are_taken_where_no_entities_are_scored():
    accuracy = task("tag", score="accuracy")
    assert examples.labels_of(accuracy, [tagged("VB", "S-X", "NN")]) == ("NN", "S-X", "VB")


def test_a_label_that_is_not_known_is_named_by_its_place():
    examples.require_known(("a", "b"), sentences("a", None, "b"))
    with pytest.raises(InputError, match="f:3: label 'c' is none of 'a', 'b'"):
        examples.require_known(("a", "b"), sentences("a", "c"))
    with pytest.raises(InputError, match="f:9: word 2, 'w1': tag 'B-X' is none of 'O'"):
        examples.require_known(("O",), [tagged("O", "B-X")])
    many = [str(i) for i in range(100)]
    with pytest.raises(InputError, match=r"'19', and 80 more, those of task\.labels"):
        examples.require_known(many, sentences("x"))


def test_the_hash_is_of_what_is_learned_from():
    base = sentences("a", "b")
    hashes = {
        examples.sha256(given, labels)
        for given, labels in [
            (base, ("a", "b")),
            (base, ("b", "a")),
            (base[::-1], ("a", "b")),
            (base[:1], ("a", "b")),
            (sentences("a", None), ("a", "b")),
            (sentences("a", "None"), ("a", "b")),
            ([Sentence("f:2", ("A", "b"), None)], ()),
            ([Sentence("f:2", ("Ab",), None)], ()),
            ([Tagged("f:2", ("A", "b"), None)], ()),
            (sentences(1.0), ()),
            (sentences(1.0000000000000002), ()),
        ]
    }
    assert len(hashes) == 11
    moved = [Sentence(f"g:{i}", ("A",), label) for i, label in enumerate("ab")]
    assert examples.sha256(moved, ("a", "b")) == examples.sha256(base, ("a", "b"))


# --- typed texts ---


def parsed(task, *texts):
    return list(examples.parse_lines(task, ((f"f:{i}", t) for i, t in enumerate(texts, 1))))


def test_a_tab_separates_the_texts_of_a_line_and_is_one_where_there_is_one_text():
    (one,) = parsed(task("classify"), "a\tb")
    assert one.texts == ("a\tb",) and one.label is None
    for kind in ("pair", "regress"):
        assert parsed(task(kind), "a b\tc")[0].texts == ("a b", "c")
    assert parsed(task("choice"), "a\tb\tc d")[0].texts == ("a", "b", "c d")
    assert parsed(task("tag"), " a  b\tc ")[0].words == ("a", "b", "c")


def test_typed_questions_are_numbered_and_blank_lines_are_none():
    span = task("span", "squad:x")
    first, second = parsed(span, "a ?\t b c", "", " \t", "d ?\te")
    assert (first.id, first.question, first.context) == ("1", "a ?", " b c")
    assert (second.id, second.place) == ("2", "f:4")


def test_arguments_are_taken_so_many_at_a_time():
    pairs = list(examples.parse_arguments(task("pair"), ["a", "b", "c\td", "e"]))
    assert [pair.texts for pair in pairs] == [("a", "b"), ("c\td", "e")]
    words = list(examples.parse_arguments(task("tag"), ["a b", "c"]))
    assert [t.words for t in words] == [("a", "b"), ("c",)]
    with pytest.raises(InputError, match="TEXT 3: 1 texts"):
        list(examples.parse_arguments(task("pair"), ["a", "b", "c"]))


@pytest.mark.parametrize(
    ("kind", "line", "what"),
    [
        ("pair", "a", "f:1: 1 texts, but task.kind=pair takes 2; a line is A<tab>B"),
        ("pair", "a\tb\tc", "f:1: 3 texts"),
        ("choice", "a\tb", "task.kind=choice takes 3"),
        ("span", "a", "QUESTION<tab>CONTEXT"),
        ("span", "a\t ", "f:1: text 2 is blank"),
    ],
)
def test_too_few_too_many_or_blank_texts_are_refused(kind, line, what):
    with pytest.raises(InputError) as caught:
        parsed(task(kind, "squad:x" if kind == "span" else "jsonl:x"), line)
    assert what in str(caught.value)


@pytest.mark.parametrize("word", ["csv", "jsonl"])
def test_examples_with_blank_cells_are_left_out_by_choice_alone(tmp_path, word):
    content = {
        "csv": "sentence,label\nwa,1\n ,0\nwb,\nwc,0\n",
        "jsonl": lines_of(
            {"sentence": text, "label": label}
            for text, label in (("wa", "1"), (None, "0"), ("wb", " "), ("wc", "0"))
        ),
    }[word]
    with pytest.raises(InputError, match=r"(blank; .* set task\.blank_cells=skip|null)"):
        read(tmp_path, word, content)
    source, places = f"{word}:{tmp_path / f'x.{word}'}", []
    skipping = task("classify", source, blank_cells="skip")
    found = examples.read(skipping, (source,), "labelled", places)
    assert [(example.texts, example.label) for example in found] == [(("wa",), "1"), (("wc",), "0")]
    first = PLACES[word][0]
    path = tmp_path / f"x.{word}"
    assert places == [f"{path}:{first + 1}", f"{path}:{first + 2}"]
    assert examples.in_words({"train": places, "more": []}) == (
        f"2 of train (the first at {path}:{first + 1}), 0 of more"
    )
    only = write(tmp_path / f"only.{word}", "".join(content.splitlines(True)[:1]))
    if word == "jsonl":
        only.write_text('{"sentence": "", "label": "1"}\n')
    why = "; left out for blank cells: 1 of them" if word == "jsonl" else "$"
    with pytest.raises(InputError, match=f"holds no examples{why}"):
        examples.read(skipping, (f"{word}:{only}",), "labelled")
