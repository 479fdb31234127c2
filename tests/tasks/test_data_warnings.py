"""What is said about examples that make scores look better or worse than the model is."""

import dataclasses
import json
import pathlib
import re

import broken
import kinds
import pytest
import tuned
from kinds import question, sentence, tagged

from bert_jax.tasks import examples, scores
from bert_jax.tools.report import page
from bert_jax.tools.report.records import Record

# Of each kind a training example, the same text with another answer, and another text.
TEXTS = {
    "classify": (
        sentence("A b", label="x"),
        sentence("A b ", label="y"),
        sentence("A B", label="x"),
    ),
    "pair": (
        *(sentence("A", "b", label="x"), sentence("A", " b", label="y")),
        sentence("b", "A", label="x"),
    ),
    "regress": (
        *(sentence("A", "b", label=1.0), sentence("A", "b", label=2.0)),
        sentence("A", "c", label=1.0),
    ),
    "choice": (
        *(sentence("A", "b", "c", label="0"), sentence("A", "b", "c", label="1")),
        sentence("A", "c", "b", label="1"),
    ),
    "tag": (tagged("ab", ["O", "X"]), tagged("ab", ["X", "O"]), tagged("ac", ["O", "X"])),
    "span": (
        question("wa wb", "wa", number=1),
        *(question("wa wb", "wb", number=2), question("wa", "wa", number=3)),
    ),
    "generate": (sentence("A", label="x"), sentence("A", label="y"), sentence("a", label="x")),
}


def warned(kind, train, held_out, labels=()):
    """What is said of a task; `generate` has the fields of `classify`."""
    task = kinds.task("classify" if kind == "generate" else kind)
    keys = {examples.text_key(example) for example in train}
    parts = {"train": train, "validation": held_out}
    return scores.data_warnings(dataclasses.replace(task, kind=kind), labels, parts, keys)


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_that_were_learned_and_texts_with_several_answers_are_counted(kind):
    first, same, other = TEXTS[kind]
    assert warned(kind, [first], [other]) == []
    (both,) = warned(kind, [first], [other, same])
    assert both.startswith("1 of 2 ")
    several = warned(kind, [first, other, same, first], [other])[1:]
    if kind in ("span", "generate"):  # which may be answered in several ways
        assert several == []
    else:
        assert several[0].startswith("1 of 2 texts of train ")
    # An answer that comes twice is one.
    assert len(warned(kind, [first, first], [other])) == 0


def test_texts_are_the_same_in_all_forms_of_unicode_but_not_in_another_case():
    composed, other = sentence("caf\u00e9 \uff11"), sentence("Cafe\u0301 1")
    for text, same in (("cafe\u0301 1", True), (" caf\u00e9 1\n", True), ("Caf\u00e9 1", False)):
        assert bool(warned("classify", [composed], [sentence(text)])) is same
    assert warned("classify", [composed], [other]) == []


def test_labels_that_look_alike_are_named():
    (line,) = warned("classify", [], [], ("Good", "bad", "good"))
    assert "'Good' and 'good'" in line and "bad" not in line
    (line,) = warned("classify", [], [], ("tr\u00e8s", "tre\u0300s"))
    assert r"tr\xe8s" in line and r"tre\u0300s" in line
    assert warned("classify", [], [], ("B-PER", "I-PER")) == []


@pytest.mark.long
def test_a_run_says_it_at_the_start_and_on_its_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    tuned.write_task(tmp_path, "classify")
    rows = tuned.lines("train")
    rows += [row | {"label": "Good"} for row in rows if row["label"] == "good"]
    pathlib.Path("train").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = tuned.finetune()
    record = Record.read("run")
    kept = record.written("task")["warnings"]
    good = {row["sentence"] for row in rows if row["label"] == "good"}
    assert [line.split()[0] for line in kept] == ["11", str(len(good)), "the"]
    text = page.render([record])
    for line in kept:
        assert f"{line}\n" in printed
        assert line.split(" (")[0].replace("'", "&#39;") in text
    assert kept[0] in broken.said("finetune --workdir run")


@pytest.mark.long
def test_questions_that_are_cut_are_counted_and_files_scored_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    tuned.write_task(tmp_path, "span")
    other = json.dumps(tuned.questions(6))
    pathlib.Path("other.json").write_text(re.sub(r'"q(\d)', r'"p\1', other))
    files = "task.validation=squad:test,squad:other.json"
    printed = tuned.finetune("--set", "task.max_query_length=1", "--set", files)
    assert "task.max_query_length=1: 16 of train, 17 of validation" in printed
    (scored,) = tuned.predict("--score")
    assert scored["examples"] == 17
    for name, source in (("test", "squad:test"), ("other", "squad:other.json")):
        (of_one,) = tuned.predict("--score", "--source", source)
        assert scored[f"f1/{name}"] == pytest.approx(of_one["f1"])
    # While it learns, too, by the threshold that is best for all.
    (*_, last) = (line for line in tuned.lines("run/metrics.jsonl") if line["kind"] == "scores")
    for name in ("f1", "f1/test", "f1/other"):
        assert last[name] == pytest.approx(scored[name])
