"""What is kept of a model's mistakes, and what a fine-tuning says before it learns."""

import collections
import json

import broken
import kinds
import numpy as np
import pytest
import tuned
from sklearn import metrics

from bert_jax.tasks import task_kind
from bert_jax.text.tokenizer import UnknownShare, WordPiece

# Of questions, and what is answered.
ANSWERS = [["wa"], ["wa wb"], ["wa"], ["wa"], [], []]
GIVEN = ["wa", "wb", "wc", "", "", "wa"]


def line_of(kind, answers, examples, **settings):
    of = task_kind.make_kind(kinds.task(kind, **settings), kinds.LABELS[kind], kinds.TOKENIZER)
    return of.mistakes(answers, examples)


def guess_of(task, labels, examples):
    return task_kind.make_kind(task, labels, kinds.TOKENIZER).baseline(examples)


def test_the_worst_mistakes_of_labels_are_the_surest_and_confusions_scikit_learn_s():
    labels, rng = kinds.LABELS["classify"], np.random.default_rng(0)
    truth = rng.integers(0, 3, 400)
    chances = rng.dirichlet(np.ones(3), size=400)
    predicted = chances.argmax(axis=1)
    answers = [
        {"label": labels[p], "probabilities": dict(zip(labels, row.tolist(), strict=True))}
        for p, row in zip(predicted, chances, strict=True)
    ]
    examples = [kinds.sentence("x" * 100_000, label=labels[t]) for t in truth]
    line = line_of("classify", answers, examples)
    wrong = np.flatnonzero(predicted != truth)
    of_truth = chances[np.arange(400), truth]
    first = wrong[np.argsort(of_truth[wrong])[:20]]
    assert line["wrong"] == len(wrong) and len(line["worst"]) == 20
    assert [one["probability"] for one in line["worst"]] == chances.max(axis=1)[first].tolist()
    assert [one["truth"] for one in line["worst"]] == [labels[truth[i]] for i in first]
    counts = metrics.confusion_matrix(truth, predicted)
    for a, b, count in line["confusions"]:
        assert a != b and count == counts[labels.index(a), labels.index(b)]
    assert len(line["confusions"]) == 6 and len(json.dumps(line)) < 20_000


def test_mistakes_of_the_other_kinds():
    tagged = kinds.tagged(["wa", "wb", "wc"], ["B-X", "I-X", "O"])
    line = line_of("tag", [{"tags": ["O", "B-X", "O"]}], [tagged])
    assert sorted(line["confusions"]) == [["B-X", "O", 1], ["I-X", "B-X", 1]]
    assert (line["worst"][0]["truth"], line["worst"][0]["predicted"]) == ("B-X I-X", "O B-X")
    assert line["wrong"] == 1 and line["worst"][0]["texts"] == ["wa wb wc"]

    numbers = [kinds.sentence("a", "b", label=float(i)) for i in range(100)]
    line = line_of("regress", [{"value": i + (50 if i == 7 else 1)} for i in range(100)], numbers)
    assert (line["worst"][0]["truth"], line["worst"][0]["predicted"]) == ("7", "57")
    assert line["wrong"] == 100 and "confusions" not in line

    asked = [kinds.question("wa wb wc", *gold, number=i) for i, gold in enumerate(ANSWERS)]
    line = line_of("span", [{"answer": text} for text in GIVEN], asked, no_answer="possible")
    assert [one["texts"][0] for one in line["worst"]] == ["wa wb ?"] * 4 and line["wrong"] == 4
    assert line["worst"][-1]["predicted"] == "wb"  # is partly right


@pytest.mark.parametrize(("score", "best"), [("accuracy", "no"), ("f1", "yes"), ("macro_f1", "no")])
def test_guessing_is_the_best_single_label(score, best):
    truth = [0, 0, 0, 1, 1]
    examples = [kinds.sentence("a", label=("no", "yes")[number]) for number in truth]
    guess = [["no", "yes"].index(best)] * 5
    want = {
        "accuracy": metrics.accuracy_score(truth, guess),
        "f1": metrics.f1_score(truth, guess, pos_label=1),
        "macro_f1": metrics.f1_score(truth, guess, average="macro"),
    }[score]
    words, value = guess_of(kinds.task("classify", score=score), ("no", "yes"), examples)
    assert words == f"always {best!r}" and value == pytest.approx(want)


def test_guessing_of_tags_and_of_questions():
    tags = kinds.task("tag", score="accuracy")
    examples = [kinds.tagged(["a", "b", "c"], ["X", "X", "O"])]
    assert guess_of(tags, ("O", "X"), examples) == ("always 'X'", pytest.approx(2 / 3))
    assert guess_of(kinds.task("tag"), ("O", "B-X"), examples) is None
    assert guess_of(kinds.task("regress"), (), examples) is None
    questions = [kinds.question("wa wb", *gold, number=i) for i, gold in enumerate(ANSWERS)]
    possible = kinds.task("span", no_answer="possible")
    assert guess_of(possible, (), questions) == ("never an answer", pytest.approx(1 / 3))
    assert guess_of(kinds.task("span"), (), questions[:4]) is None


def test_the_share_of_unknown_pieces_leaves_out_what_stands_around():
    vocabulary = WordPiece(tuned.PIECES, "uncased")
    share = UnknownShare(vocabulary).add([[2, 1, 6, 3], [2, 6, 6, 3, 6, 1, 3]])
    assert share.value == 2 / 6 and "33%" in share.warning("train")
    few = UnknownShare(vocabulary).add([[2, *[6] * 98, 1, 1, 3]])
    assert few.value == 0.02 and not few.warning("train")
    assert UnknownShare(vocabulary).value == 0


@pytest.mark.long
def test_text_that_the_vocabulary_cannot_read_and_guessing_are_said(tmp_path, monkeypatch):
    tuned.write_base(tmp_path / "base")
    tuned.write_task(tmp_path, "classify")
    monkeypatch.chdir(tmp_path)
    rows = [row | {"sentence": "很好"} for row in tuned.lines("test")]
    (tmp_path / "test").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = tuned.finetune()
    counts = collections.Counter(row["label"] for row in tuned.lines("train"))
    assert f"labels bad {counts['bad']}, good {counts['good']}; f1 is of 'good'" in printed
    assert "unknown tokens: 0.0% of train, 100.0% of validation" in printed
    assert printed.count("; always 'good': accuracy 0.5455") >= 3  # at first, and at each score
    first, last = tuned.lines("run/predictions.jsonl")
    assert first["kind"] == "task" and first["guess"] == ["always 'good'", 6 / 11]
    assert first["unknown"] == {"train": 0.0, "validation": 1.0} and first["total_steps"] == 4
    assert last["kind"] == "mistakes" and last["wrong"] == sum(x[2] for x in last["confusions"])
    code, err = broken.call("predict --workdir run 很好")
    assert code == 0 and "100% of the text is [UNK]" in err
    embedded = broken.said("embed --workdir base train --out v.npz")
    assert "% of the tokens are unknown" in embedded
