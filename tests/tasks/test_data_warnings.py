"""Warnings about examples that make scores look better or worse than the model is."""

import dataclasses

import kinds
import pytest
from kinds import question, sentence, tagged

from bert_jax.tasks import examples, scores

# For each kind: an example, the same text with another label, and another text.
EXAMPLES = {
    "classify": [sentence("A b", label="x"), sentence("A b ", label="y")],
    "pair": [sentence("A", "b", label="x"), sentence("A", " b", label="y")],
    "regress": [sentence("A", "b", label=1.0), sentence("A", "b", label=2.0)],
    "choice": [sentence("A", "b", "c", label="0"), sentence("A", "b", "c", label="1")],
    "tag": [tagged("ab", ["O", "X"]), tagged("ab", ["X", "O"])],
    "span": [question("wa wb", "wa", number=1), question("wa wb", "wb", number=2)],
    "generate": [sentence("A", label="x"), sentence("A", label="y")],
}
EXAMPLES["classify"].append(sentence("A B", label="x"))
EXAMPLES["pair"].append(sentence("b", "A", label="x"))
EXAMPLES["regress"].append(sentence("A", "c", label=1.0))
EXAMPLES["choice"].append(sentence("A", "c", "b", label="1"))
EXAMPLES["tag"].append(tagged("ac", ["O", "X"]))
EXAMPLES["span"].append(question("wa", "wa", number=3))
EXAMPLES["generate"].append(sentence("a", label="x"))


def warnings_of(kind, train, validation, labels=()):
    """The warnings about a task; `generate` has the settings of `classify`."""
    task = kinds.task("classify" if kind == "generate" else kind)
    keys = {examples.text_key(example) for example in train}
    splits = {"train": train, "validation": validation}
    return scores.data_warnings(dataclasses.replace(task, kind=kind), labels, splits, keys)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_validation_texts_in_train_and_texts_with_several_labels_are_counted(kind):
    example, relabelled, other = EXAMPLES[kind]
    assert warnings_of(kind, [example], [other]) == []
    (overlap,) = warnings_of(kind, [example], [other, relabelled])
    assert overlap.startswith("1 of 2 ")
    several = warnings_of(kind, [example, other, relabelled, example], [other])[1:]
    if kind in ("span", "generate"):  # a text may have several answers
        assert several == []
    else:
        assert several[0].startswith("1 of 2 texts of train ")
    # The same label twice is one label.
    assert len(warnings_of(kind, [example, example], [other])) == 0


def test_texts_are_compared_after_unicode_normalization_and_with_their_case():
    composed, other = sentence("caf\u00e9 \uff11"), sentence("Cafe\u0301 1")
    for text, is_same in (("cafe\u0301 1", True), (" caf\u00e9 1\n", True), ("Caf\u00e9 1", False)):
        assert bool(warnings_of("classify", [composed], [sentence(text)])) is is_same
    assert warnings_of("classify", [composed], [other]) == []


def test_labels_that_look_alike_are_named():
    (line,) = warnings_of("classify", [], [], ("Good", "bad", "good"))
    assert "'Good' and 'good'" in line and "bad" not in line
    (line,) = warnings_of("classify", [], [], ("tr\u00e8s", "tre\u0300s"))
    assert r"tr\xe8s" in line and r"tre\u0300s" in line
    assert warnings_of("classify", [], [], ("B-PER", "I-PER")) == []
