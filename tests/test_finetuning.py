"""A task in an experiment file: which sources, columns and labels go together."""

from typing import get_args

import pytest

from bert_jax import config
from bert_jax.config import KINDS as SPECS
from bert_jax.config import Finetuning, Kind, Task
from bert_jax.errors import InputError

KINDS = {
    "classify": {},
    "pair": {"second_column": "b"},
    "regress": {"second_column": "b"},
    "choice": {"choice_columns": ("b", "c")},
    "tag": {"text_column": "0", "label_column": "1"},
    "span": {"max_sequence_length": 384},
    "generate": {},
}
FORMS = {
    "tsv": "tsv:x",
    "csv": "csv:x",
    "jsonl": "jsonl:x",
    "conll": "conll:x",
    "squad": "squad:x",
    "tfds": "tfds:x/y:1.0.0:train",
}


def task(kind="classify", source=None, **settings):
    source = source or FORMS[SPECS[kind].formats[0]]
    fields = {"train": (source,), "validation": (source,)} | KINDS[kind] | settings
    return Task(kind=kind, **fields)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_is_read_from_the_sources_that_can_hold_it(kind):
    for word, source in FORMS.items():
        if word in SPECS[kind].formats:
            assert task(kind, source).train == (source,)
        else:
            with pytest.raises(InputError, match=rf"task\.train: '{word}:x': task.kind={kind} "):
                task(kind, source)


def test_columns_without_names_are_numbers():
    numbers = {"text_column": "3", "label_column": "1"}
    assert task(source="tsv:x", header="none", **numbers)
    for source in ("tsv:x", "csv:x"):
        for column in ("sentence", "-1", "\u0663"):
            with pytest.raises(InputError, match=r"as numbers from 0, not "):
                task(source=source, header="none", **numbers | {"text_column": column})
    with pytest.raises(InputError, match=r"'conll:x' .*as numbers from 0, not 'label'"):
        task("tag", label_column="label")
    # JSON names its columns whatever the header is.
    assert task(source="jsonl:x", header="none")


def test_a_task_is_described_by_fields_of_it_alone():
    described = {
        "kind": "pair",
        "train": ["data/my pairs.csv.gz", "jsonl:more"],
        "validation": ["dev.TSV"],
        "text_column": "premise",
        "second_column": "hypothesis",
    }
    made, origin = config.finetuning_of(described, None, ["epochs=1"])
    assert made.name == "my-pairs" and made.epochs == 1.0
    assert made.task == Task(
        kind="pair",
        train=("csv:data/my pairs.csv.gz", "jsonl:more"),
        validation=("tsv:dev.TSV",),
        text_column="premise",
        second_column="hypothesis",
    )
    assert origin["experiment"] == "the command line" and origin["settings"] == ["epochs=1"]
    span = {"kind": "span", "train": ["a.json"], "validation": ["b.json"]}
    made, _ = config.finetuning_of(span, "runs/squad.1", [])
    assert made.name == "squad" and made.task.train == ("squad:a.json",)
    for changed, words in (
        ({"kind": None}, "--kind: name a TASKFILE"),
        ({"validation": None}, "--validation: name a TASKFILE"),
        ({"train": ["a.txt"]}, "--train a.txt: the name does not say which format"),
        ({"kind": "classify"}, "task.second_column"),
    ):
        wrong = {name: value for name, value in (described | changed).items() if value}
        with pytest.raises(InputError, match=words):
            config.finetuning_of(wrong, None, [])


# Of each kind what flags and --set give next to --kind, --train and --validation.
BY_FLAGS = {
    "classify": ({"header": "none", "text_column": "3", "label_column": "1"}, []),
    "pair": ({"second_column": "b"}, []),
    "regress": ({"second_column": "b", "label_column": "value"}, ["task.score=pearson"]),
    "choice": ({}, ["task.choice_columns=b,c"]),
    "tag": ({"text_column": "0", "label_column": "1"}, ["task.labels=O,B-X"]),
    "span": ({}, ["task.no_answer=possible"]),
    "generate": ({"label_column": "b"}, ["task.max_target_length=20"]),
    "similar": ({}, ["vectors.loss=distil", "vectors.teacher=base"]),
    "rank": ({"second_column": "docs"}, ["task.ranking_loss=mse"]),
    "sparse": ({"second_column": "docs"}, ["sparse.loss=margin_mse"]),
    "multi_vector": ({"second_column": "docs"}, ["multi_vector.query_length=8"]),
}


@pytest.mark.parametrize(
    "kind", sorted({*get_args(Kind)} - {"minimal_pairs"})
)  # nothing is learned
def test_each_kind_is_said_by_flags_and_settings_alone(kind):
    """However many of its required fields have no flag."""
    fields, settings = BY_FLAGS[kind]
    source = FORMS[SPECS[kind].formats[0]]
    held_out = "beir:x:test" if kind == "similar" else source
    given = {"kind": kind, "train": [source], "validation": [held_out]}
    sets = [*settings, "optimizer.peak_learning_rate=1e-4"]
    made, origin = config.finetuning_of(given | fields, None, sets)
    flat = dict(config.flatten(made))
    for name, value in fields.items():
        assert flat[f"task.{name}"] == value
    for setting in settings:
        path, _, value = setting.partition("=")
        assert str(flat[path]) in (value, str(tuple(value.split(","))))
    # What is not named is as in a file that does not name it.
    usual = Finetuning(name="x", task=made.task, vectors=made.vectors)
    assert made.run == usual.run and made.optimizer.schedule == usual.optimizer.schedule
    assert made.optimizer.peak_learning_rate == 1e-4 and origin["settings"] == sets


def test_windows_may_lie_side_by_side():
    """Of 68 ids [CLS], 64 of a question and two [SEP] leave one; of 194 they leave 127."""
    assert task("span", max_sequence_length=68, document_stride=1)
    assert task("span", max_sequence_length=194, document_stride=127)
    with pytest.raises(InputError, match=r"document_stride=128: .* room for 127 "):
        task("span", max_sequence_length=194)
    # Others have no windows.
    assert task("classify", max_sequence_length=8)


def test_the_first_score_of_a_kind_decides_unless_another_is_named():
    assert task("regress").main_score == "spearman"
    assert task("regress", score="pearson").main_score == "pearson"
