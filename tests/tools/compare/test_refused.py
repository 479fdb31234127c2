"""Tables that cannot be, and folders that are none: what is refused, before anything is run."""

import json
import pathlib

import pytest
from kinds import write_task_file
from made import TASK, compare, fake_runs, small, write_table, write_task

from bert_jax.config import Row, Table
from bert_jax.errors import InputError


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"rows": ()}, "table.rows="),
        ({"rows": ("a", "a")}, "table.rows"),
        ({"columns": ()}, "table.columns="),
        ({"columns": ("los",)}, "did you mean loss?"),
        ({"columns": ("probe:",)}, "'probe:'"),
        ({"columns": ("reach:much",)}, "'reach:much'"),
        ({"columns": ("loss", "loss")}, "table.columns"),
        ({"seeds": ()}, "table.seeds="),
        ({"seeds": (1, 1)}, "table.seeds"),
        ({"seeds": (-1,)}, "table.seeds="),
        ({"steps": 5, "cpu_seconds": 2.0}, "table.cpu_seconds="),
        ({"steps": -1}, "table.steps=-1"),
        ({"name": "a b"}, "table.name='a b'"),
    ],
)
def test_what_is_no_table_is_refused_by_name(here, fields, name):
    names = fields.get("rows", ("a",))
    rows = tuple(Row(name=row, experiment=small(here)) for row in names)
    given = {"name": "t", "columns": ("loss",)} | fields | {"rows": rows}
    with pytest.raises(InputError) as caught:
        Table(**given)
    assert name in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [
        *("corpus.case=cased", "data.objective=mlm", "model.vocab_size=44", "data.eval_rows=5"),
        *("data.eval_seed=5", "data.short_seq_prob=0.2"),
    ],
)
def test_rows_that_share_no_held_out_text_have_no_loss_to_compare(here, setting):
    rows = tuple(
        Row(name=name, experiment=small(here, *more))
        for name, more in (("a", ()), ("b", [setting]))
    )
    with pytest.raises(InputError, match="column accuracy") as caught:
        Table(name="t", rows=rows, columns=("steps", "accuracy"))
    assert setting.partition("=")[0] in str(caught.value)
    assert Table(name="t", rows=rows, columns=("steps", "cpu_seconds"))


@pytest.mark.parametrize("column", ["cpu_seconds", "reach:1", "loss"])
def test_rows_of_which_one_alone_would_be_run_have_no_seconds_to_compare(here, column):
    placed = small(here, "parallelism.layer_loop=unroll")
    rows = (Row(name="a", experiment=small(here)), Row(name="b", experiment=placed))
    if column == "loss":
        assert Table(name="t", rows=rows, columns=(column,))
    budget = {"cpu_seconds": 5.0} if column == "loss" else {}
    with pytest.raises(InputError, match=r"table\.rows: b .*parallelism"):
        Table(name="t", rows=rows, columns=(column,), **budget)


@pytest.mark.parametrize(
    ("base", "other"),
    [
        ("data.objective=mlm", "data.short_seq_prob=0.2"),
        ("corpus.sources=text:a,text:b", "corpus.mixture=3,1"),
        ("corpus.sources=text:/here/./text", "corpus.sources=text:/there/./text"),
    ],
)
def test_rows_of_the_same_held_out_text_compare_wherever_it_lies(here, base, other):
    rows = (Row(name="a", experiment=small(here, base)),)
    rows += (Row(name="b", experiment=small(here, base, other)),)
    assert Table(name="t", rows=rows, columns=("loss",))


def is_refused(capsys, words):
    """In one line, before anything is made."""
    there = pathlib.Path("w").exists()
    assert compare() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and pathlib.Path("w").exists() == there


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", "table.py: defines no table() -> Table"),
        ("def table():\n    return 3", "table() returned int"),
        ("def table():\n    return 1 / 0", "table.py:2: ZeroDivisionError"),
        (None, "table.py: no such table"),
    ],
)
def test_files_that_give_no_table_are_named(here, capsys, text, words):
    if text is not None:
        (here / "table.py").write_text(text)
    is_refused(capsys, words)


@pytest.mark.parametrize(
    ("column", "words"),
    [
        ("probe:nowhere.py", "nowhere.py"),
        ("finetune:pairs.py", "write probe:"),
        ("finetune:long.py", "task.max_sequence_length=64"),
        ("finetune:tags.py adapt.how=frozen adapt.features=concat_last_four", "adapt.features="),
        ("finetune:gone.py", "finetune:gone.py: gone: "),
        ("finetune:task.py batch_size=none", "--set batch_size=none"),
        ("finetune:./task.py", "two tasks of this name"),
        ("finetune:task.py batch_size=2", "two tasks of this name"),
        ("probe:task.py batch_size=2", "write finetune:"),
        ("suite:nowhere:data", "nowhere: no such suite"),
        ("suite:glue:nowhere", "nowhere"),
    ],
)
def test_tasks_that_cannot_be_asked_are_named_before_anything_is_run(here, capsys, column, words):
    write_task(here)
    renamed = TASK.replace('"small"', '"other"')
    (here / "long.py").write_text(
        renamed.replace("max_sequence_length=32", "max_sequence_length=64")
    )
    (here / "gone.py").write_text(renamed.replace("jsonl:train", "jsonl:gone"))
    (here / "pairs").write_text('{"good": "wa", "bad": "wb", "label": "x"}\n')
    columns = {"text_column": "good", "second_column": "bad"}
    pairs = {"kind": "minimal_pairs", "validation": ("jsonl:pairs",)}
    write_task_file(here / "pairs.py", **pairs, **columns)
    (here / "tags").write_text("wa O\n")
    columns = {"text_column": "0", "label_column": "1", "max_sequence_length": 32}
    sources = {"train": ("conll:tags",), "validation": ("conll:tags",)}
    write_task_file(here / "tags.py", kind="tag", **sources, **columns)
    write_table(here, ("finetune:task.py", column))
    is_refused(capsys, words)


def test_a_folder_of_other_things_and_a_changed_record_are_refused(here, capsys, monkeypatch):
    write_table(here, budget="steps=1")
    is_refused(capsys, "row base: 1 steps are too few")
    write_table(here, ("loss",))
    pathlib.Path("w").mkdir()
    pathlib.Path("w/mine").touch()
    is_refused(capsys, "w: holds other files and no table")
    pathlib.Path("w/mine").unlink()
    fake_runs(monkeypatch)
    assert compare() == 0
    file = pathlib.Path("w/table.json")
    text = file.read_text()
    file.write_text(text.replace("4.0", "3.0"))
    is_refused(capsys, "was changed since it was written")
    # Values of an earlier version do not say which text they are of.
    file.write_text(json.dumps(json.loads(text) | {"format_version": 1}))
    is_refused(capsys, "format_version")
