"""Rows that are no examples, fields within fields, and what a refusal says about columns."""

import json

import kinds
import pytest
from test_examples import task

from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.errors import InputError
from bert_jax.tasks import examples

_SQUAD = {"id": "a", "question": "wa ?", "answers": [{"text": "wb", "answer_start": 3}]}
_WRONG = _SQUAD | {"id": "b", "answers": [{"text": "wb", "answer_start": 0}]}
SQUAD = {"data": [{"paragraphs": [{"context": "wa wb", "qas": [_SQUAD, _WRONG]}]}]}

# Kind, format, content, fields, how many examples are left, and what stands behind the name of the
# file in each broken place.
ROWS = [
    # As QQP has them: lines with too few or too many columns.
    ("classify", "tsv", "sentence\tlabel\nA\t1\nB\nC\t0\t1\nD\t0\n", {}, 2, [":3", ":4"]),
    ("classify", "csv", "sentence,label\nA,1\nB\n", {}, 1, [":3"]),
    # As MNLI has them: a label that stands for none.
    ("classify", "csv", "sentence,label\nA,1\nB,-\nC,0\n", {"labels": ("1", "0")}, 2, [":3"]),
    (
        "classify",
        "jsonl",
        '{"sentence": "A", "label": 1}\n{"sentence": "B"}\n{\n',
        {},
        1,
        [":2", ":3"],
    ),
    ("regress", "jsonl", '{"sentence": "A", "b": "B", "label": 1}\n[]', {}, 1, [":2"]),
    ("regress", "tsv", "sentence\tb\tlabel\nA\tB\t1\nA\tB\tn/a\n", {}, 1, [":3"]),
    # A sentence is left out whole.
    ("words", "conll", "a O\nb O\n\nc O\nd\n\ne O\n", {}, 2, [":4"]),
    ("lists", "jsonl", '{"w": ["a"], "t": ["O"]}\n{"w": ["a"], "t": []}\n', {}, 1, [":2"]),
    ("span", "squad", json.dumps(SQUAD), {}, 1, [": data[0].paragraphs[0].qas[1]"]),
]


def read(path, word, kind="classify", **settings):
    """The examples of a file, and where its broken rows stand."""
    tally, source = examples.Tally(), f"{word}:{path}"
    found = examples.read(task(kind, source, **settings), (source,), "labelled", tally)
    return found, [place.removeprefix(str(path)) for place, _ in tally.broken]


@pytest.mark.parametrize(("kind", "word", "content", "fields", "left", "places"), ROWS)
def test_broken_rows_are_refused_by_line_or_left_out_and_counted(
    kind, word, content, fields, left, places, tmp_path
):
    path = tmp_path / f"x.{word}"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read(path, word, kind, **fields)
    named = "question b" if kind == "span" else f"{path}{places[0] if kind != 'words' else ':5'}"
    assert named in str(caught.value) and "task.broken_rows" in str(caught.value)
    found, broken = read(path, word, kind, broken_rows="skip", **fields)
    assert broken == places and len(found) == left


def test_a_wrong_column_is_no_matter_of_rows(tmp_path):
    """With all rows left out the first one says what is wrong."""
    path = tmp_path / "x.tsv"
    path.write_text("text\tlabel\nA\t1\nB\t0\n")
    with pytest.raises(InputError, match=r"x\.tsv:2: no column 'sentence' among 'text', 'label'"):
        read(path, "tsv", broken_rows="skip")
    path.write_text('{"text": "A"}\n{"text": "B"}\n')
    with pytest.raises(InputError, match=r"2 rows .*x\.tsv:1: no column 'sentence' among 'text'"):
        read(path, "jsonl", broken_rows="skip")


def test_a_run_of_the_time_before_is_read():
    of_now = Finetuning(name="x", task=kinds.task("classify", broken_rows="skip"))
    saved = json.loads(config.to_json(of_now))
    saved["task"]["blank_cells"] = saved["task"].pop("broken_rows")
    before = config.from_json(json.dumps(saved), "experiment.json", Finetuning)
    assert before == of_now and before.task.broken_rows == "skip"
    stops = config.override(of_now, ["task.blank_cells=stop"])
    assert stops.task.broken_rows == "stop"


def test_fields_within_others_are_named_with_dots(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"data": {"text": "A", "more": {"y": 1}}}, {"data": {"text": "B"}, "data.more.y": 0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"text_column": "data.text", "label_column": "data.more.y"}
    found, _ = read(path, "jsonl", **names)
    # A key that holds the dots itself comes first.
    assert [(e.texts, e.label) for e in found] == [(("A",), "1"), (("B",), "0")]
    with pytest.raises(InputError) as caught:
        read(path, "jsonl", **names | {"text_column": "data.txt"})
    for name in (f"{path}:1", "'data.txt'", "'data.text'", "'data.more.y'"):
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("word", "content", "named"),
    [
        ("csv", "sentence;label\nA;1\n", "semicolons"),
        ("csv", 'sentence;label\n"A, b";1\nx;0\n', "semicolons"),
        ("csv", "sentence;label\nA, b;1\n", "semicolons"),
        ("csv", "sentence\tlabel\nA\t1\n", "tsv:"),
        ("tsv", "sentence,label\nA,1\n", "csv:"),
    ],
)
def test_a_table_with_other_separators_is_said_to_have_them(word, content, named, tmp_path):
    path = tmp_path / f"x.{word}"
    path.write_text(content)
    with pytest.raises(InputError, match=f"{named}") as caught:
        read(path, word)
    assert str(path) in str(caught.value)
