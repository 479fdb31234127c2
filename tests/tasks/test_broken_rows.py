"""Rows that are not valid examples, nested fields, and errors about columns."""

import json

import kinds
import pytest
from test_examples import task

from bert_jax import config
from bert_jax.config import Finetuning
from bert_jax.errors import InputError
from bert_jax.tasks import examples

_QUESTION = {"id": "a", "question": "wa ?", "answers": [{"text": "wb", "answer_start": 3}]}
_WRONG_OFFSET = _QUESTION | {"id": "b", "answers": [{"text": "wb", "answer_start": 0}]}
_PARAGRAPH = {"context": "wa wb", "qas": [_QUESTION, _WRONG_OFFSET]}
SQUAD = {"data": [{"paragraphs": [_PARAGRAPH]}]}

# Task kind, format, content, task settings, number of valid examples, and the locations of the
# broken rows after the file's name.
ROWS = [
    # Lines with too few or too many columns, as in QQP.
    ("classify", "tsv", "sentence\tlabel\nA\t1\nB\nC\t0\t1\nD\t0\n", {}, 2, [":3", ":4"]),
    ("classify", "csv", "sentence,label\nA,1\nB\n", {}, 1, [":3"]),
    # Blank cells.
    ("classify", "csv", "sentence,label\nA,1\n ,0\nB,\nC,0\n", {}, 2, [":3", ":4"]),
    # A label that means "no label", as in MNLI.
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
    # A sentence with one broken line is skipped as a whole.
    ("words", "conll", "a O\nb O\n\nc O\nd\n\ne O\n", {}, 2, [":4"]),
    ("lists", "jsonl", '{"w": ["a"], "t": ["O"]}\n{"w": ["a"], "t": []}\n', {}, 1, [":2"]),
    ("span", "squad", json.dumps(SQUAD), {}, 1, [": data[0].paragraphs[0].qas[1]"]),
]


def read(path, file_format, kind="classify", **settings):
    """The examples of a file, and the locations of its broken rows."""
    tally, source = examples.Tally(), f"{file_format}:{path}"
    valid = examples.read(task(kind, source, **settings), (source,), "labelled", tally)
    return valid, [place.removeprefix(str(path)) for place, _ in tally.broken]


@pytest.mark.parametrize(("kind", "file_format", "content", "settings", "count", "broken"), ROWS)
def test_broken_rows_are_refused_by_line_or_skipped_and_counted(
    kind, file_format, content, settings, count, broken, tmp_path
):
    path = tmp_path / f"x.{file_format}"
    path.write_text(content)
    with pytest.raises(InputError) as caught:
        read(path, file_format, kind, **settings)
    # The error names the question, or the line of the word.
    location = {"span": "question b", "words": f"{path}:5"}.get(kind, f"{path}{broken[0]}")
    assert location in str(caught.value) and "task.broken_rows" in str(caught.value)
    valid, skipped = read(path, file_format, kind, broken_rows="skip", **settings)
    assert skipped == broken and len(valid) == count


def test_a_missing_column_is_an_error_even_if_broken_rows_are_skipped(tmp_path):
    path = tmp_path / "x.tsv"
    path.write_text("text\tlabel\nA\t1\nB\t0\n")
    with pytest.raises(InputError, match=r"x\.tsv:2: no column 'sentence' among 'text', 'label'"):
        read(path, "tsv", broken_rows="skip")
    path.write_text('{"text": "A"}\n{"text": "B"}\n')
    with pytest.raises(InputError, match=r"2 rows .*x\.tsv:1: no column 'sentence' among 'text'"):
        read(path, "jsonl", broken_rows="skip")


def test_the_former_name_of_broken_rows_is_read():
    experiment = Finetuning(name="x", task=kinds.task("classify", broken_rows="skip"))
    fields = json.loads(config.to_json(experiment))
    fields["task"]["blank_cells"] = fields["task"].pop("broken_rows")
    loaded = config.from_json(json.dumps(fields), "experiment.json", Finetuning)
    assert loaded == experiment and loaded.task.broken_rows == "skip"
    overridden = config.override(experiment, ["task.blank_cells=stop"])
    assert overridden.task.broken_rows == "stop"


def test_nested_fields_are_named_with_dots(tmp_path):
    path = tmp_path / "x.jsonl"
    rows = [{"data": {"text": "A", "more": {"y": 1}}}, {"data": {"text": "B"}, "data.more.y": 0}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    columns = {"text_column": "data.text", "label_column": "data.more.y"}
    valid, _ = read(path, "jsonl", **columns)
    # A key that contains the dots itself takes precedence.
    assert [(e.texts, e.label) for e in valid] == [(("A",), "1"), (("B",), "0")]
    with pytest.raises(InputError) as caught:
        read(path, "jsonl", **columns | {"text_column": "data.txt"})
    for part in (f"{path}:1", "'data.txt'", "'data.text'", "'data.more.y'"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("file_format", "content", "advice"),
    [
        ("csv", "sentence;label\nA;1\n", "semicolons"),
        ("csv", 'sentence;label\n"A, b";1\nx;0\n', "semicolons"),
        ("csv", "sentence;label\nA, b;1\n", "semicolons"),
        ("csv", "sentence\tlabel\nA\t1\n", "tsv:"),
        ("tsv", "sentence,label\nA,1\n", "csv:"),
    ],
)
def test_an_error_names_the_separator_that_a_table_seems_to_have(
    file_format, content, advice, tmp_path
):
    path = tmp_path / f"x.{file_format}"
    path.write_text(content)
    with pytest.raises(InputError, match=advice) as caught:
        read(path, file_format)
    assert str(path) in str(caught.value)
