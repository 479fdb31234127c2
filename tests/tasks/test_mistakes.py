"""What is kept of a model's mistakes, against scikit-learn, and by hand."""

import json

import kinds
import numpy as np
import pytest
from sklearn import metrics

from bert_jax.tasks import mistakes

# Of questions, and what is answered, by how much none is better.
ANSWERS = [["wa"], ["wa wb"], ["wa"], ["wa"], [], []]
GIVEN = [("wa", 0), ("wb", 0), ("wc", 0), ("wa", 1), ("wa", 1), ("wa", 0)]


def drawn(labels, count=400, seed=0):
    """Truth, probabilities that often have it, and the answers a model would give."""
    rng = np.random.default_rng(seed)
    truth = rng.integers(0, len(labels), count)
    logits = rng.normal(size=(count, len(labels))) + 1.5 * np.eye(len(labels))[truth]
    chances = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    answers = [
        {
            "label": labels[row.argmax()],
            "probabilities": dict(zip(labels, row.tolist(), strict=True)),
        }
        for row in chances
    ]
    examples = [kinds.sentence(f"text {i}", label=labels[t]) for i, t in enumerate(truth)]
    return truth, chances, answers, examples


def test_the_confusion_is_that_of_scikit_learn():
    labels = ("a", "b", "c")
    truth, chances, answers, examples = drawn(labels)
    line = mistakes.of_answers(kinds.task("classify"), labels, answers, examples)
    predicted = chances.argmax(axis=1)
    assert line["confusion"]["counts"] == metrics.confusion_matrix(truth, predicted).tolist()


def test_the_worst_mistakes_are_the_surest_and_few():
    labels = ("a", "b")
    truth, chances, answers, examples = drawn(labels)
    line = mistakes.of_answers(kinds.task("classify"), labels, answers, examples)
    of_truth = chances[np.arange(len(truth)), truth]
    assert line["wrong"] == (chances.argmax(axis=1) != truth).sum()
    assert len(line["worst"]) == 20
    given = [one["truth_probability"] for one in line["worst"]]
    assert given == pytest.approx(np.sort(of_truth)[:20])


def test_a_line_is_bounded_however_long_texts_are_and_however_many_labels():
    labels = tuple(f"label{i}" for i in range(200))
    truth, _, answers, _ = drawn(labels)
    examples = [kinds.sentence("x" * 100_000, label=labels[t]) for t in truth]
    line = mistakes.of_answers(kinds.task("classify"), labels, answers, examples)
    assert line["confusion"]["labels"][-1] == "(others)" and len(line["confusion"]["labels"]) == 12
    assert sum(map(sum, line["confusion"]["counts"])) == len(truth)
    assert len(json.dumps(line)) < 20_000


def test_types_of_entities_are_counted_as_conll_counts_them():
    """There: PER New, LOC York City; given: LOC New York City, PER Bob."""
    example = kinds.tagged(
        ["New", "York", "City", "saw", "Bob"], ["B-PER", "B-LOC", "I-LOC", "O", "B-PER"]
    )
    answer = {"words": list(example.words), "tags": ["B-LOC", "I-LOC", "I-LOC", "O", "B-PER"]}
    line = mistakes.of_answers(kinds.task("tag"), (), [answer], [example])
    assert line["types"] == [
        {"type": "PER", "there": 2, "predicted": 1, "hits": 1},
        {"type": "LOC", "there": 1, "predicted": 1, "hits": 0},
    ]
    assert line["wrong"] == 2 and line["worst"][0]["truth"][0] == "B-PER"


def test_a_late_mistake_in_a_long_sentence_is_shown():
    words = [f"w{i}" for i in range(500)]
    example = kinds.tagged(words, ["O"] * 500)
    answer = {"words": words, "tags": ["O"] * 499 + ["X"]}
    task = kinds.task("tag", score="accuracy")
    (worst,) = mistakes.of_answers(task, (), [answer], [example])["worst"]
    assert worst["words"][-1] == "w499" and len(worst["words"]) == 60


def test_numbers_that_are_furthest_off_come_first():
    examples = [kinds.sentence("a", "b", label=float(i)) for i in range(1000)]
    answers = [{"value": i + (50 if i == 7 else 1)} for i in range(1000)]
    line = mistakes.of_answers(kinds.task("regress"), (), answers, examples)
    assert line["worst"][0]["truth"] == 7 and len(line["points"]) == 500
    assert line["mean_absolute_error"] == pytest.approx((999 + 50) / 1000)


def test_what_becomes_of_questions_is_counted():
    task = kinds.task("span", no_answer="possible")
    examples = [kinds.question("wa wb wc", *gold, number=i) for i, gold in enumerate(ANSWERS)]
    answers = [
        {"id": example.id, "answer": text, "best": [{"score": 1.0}], "no_answer": nothing}
        for example, (text, nothing) in zip(examples, GIVEN, strict=True)
    ]
    line = mistakes.of_answers(task, (), answers, examples, 0.5)
    assert line["outcomes"] == {
        "right": 1,
        "partly right": 1,
        "elsewhere": 1,
        "none where there is an answer": 1,
        "right to give none": 1,
        "an answer where there is none": 1,
    }
    assert line["wrong"] == 4 and line["worst"][-1]["outcome"] == "partly right"


def test_guessing_of_tags_and_of_questions():
    tags = kinds.task("tag", score="accuracy")
    examples = [kinds.tagged(["a", "b", "c"], ["X", "X", "O"])]
    assert mistakes.guess(tags, ("O", "X"), examples) == ("always 'X'", pytest.approx(2 / 3))
    assert mistakes.guess(kinds.task("tag"), ("O", "B-X"), examples) is None
    assert mistakes.guess(kinds.task("regress"), (), examples) is None
    questions = [kinds.question("wa wb", *gold, number=i) for i, gold in enumerate(ANSWERS)]
    possible = kinds.task("span", no_answer="possible")
    assert mistakes.guess(possible, (), questions) == ("never an answer", pytest.approx(1 / 3))
    assert mistakes.guess(kinds.task("span"), (), questions[:4]) is None
