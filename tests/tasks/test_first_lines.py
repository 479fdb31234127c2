"""What a fine-tuning says before it learns: labels, guessing, and text it cannot read."""

import collections
import json

import pytest
import tuned
from sklearn import metrics

from bert_jax import cli
from bert_jax.config import Task
from bert_jax.tasks import mistakes
from bert_jax.tasks.examples import Sentence
from bert_jax.text import unknown
from bert_jax.text.tokenizer import WordPiece


def held_out(*labels):
    return [Sentence("file:1", ("text",), label) for label in labels]


def task(score=""):
    return Task(kind="classify", train=("tsv:a",), validation=("tsv:b",), score=score)


@pytest.mark.parametrize(("score", "best"), [("accuracy", "no"), ("f1", "yes"), ("macro_f1", "no")])
def test_guessing_is_the_best_single_label(score, best):
    truth = [0, 0, 0, 1, 1]
    examples = held_out(*("no" if number == 0 else "yes" for number in truth))
    guess = [["no", "yes"].index(best)] * 5
    want = {
        "accuracy": metrics.accuracy_score(truth, guess),
        "f1": metrics.f1_score(truth, guess, pos_label=1),
        "macro_f1": metrics.f1_score(truth, guess, average="macro"),
    }[score]
    words, value = mistakes.guess(task(score), ("no", "yes"), examples)
    assert words == f"always {best!r}" and value == pytest.approx(want)


def test_the_share_of_unknown_pieces_leaves_out_what_stands_around():
    vocabulary = WordPiece(tuned.PIECES, "uncased")
    share = unknown.Share(vocabulary).add([[2, 1, 6, 3], [2, 6, 6, 3, 6, 1, 3]])
    assert share.value == 2 / 6
    assert share.warning("train").startswith("warning: 33% of train is [UNK]")
    few = unknown.Share(vocabulary).add([[2, *[6] * 98, 1, 1, 3]])
    assert few.value == 0.02 and not few.warning("train")
    assert unknown.Share(vocabulary).value == 0


def test_text_that_the_vocabulary_cannot_read_and_guessing_are_said(tmp_path, monkeypatch, capsys):
    tuned.write_base(tmp_path / "base")
    tuned.write_task(tmp_path, "classify")
    monkeypatch.chdir(tmp_path)
    rows = tuned.lines("test")
    (tmp_path / "test").write_text(
        "".join(json.dumps(row | {"sentence": "很好"}) + "\n" for row in rows)
    )
    assert tuned.finetune() == 0
    printed = "".join(capsys.readouterr())
    counts = collections.Counter(row["label"] for row in tuned.lines("train"))
    assert f"labels bad {counts['bad']}, good {counts['good']}; f1 is of 'good'" in printed
    assert "unknown pieces: 0.0% of train, 100.0% of validation" in printed
    assert "warning: 100% of validation is [UNK]" in printed
    assert printed.count("; always 'good': accuracy 0.5455") >= 3  # at first, and at each score
    assert "guess" not in (tmp_path / "run" / "metrics.jsonl").read_text()
    first, last = tuned.lines("run/predictions.jsonl")
    assert first["kind"] == "task" and first["guess"] == ["always 'good'", 6 / 11]
    assert first["unknown"] == {"train": 0.0, "validation": 1.0} and first["total_steps"] == 4
    assert last["kind"] == "mistakes" and sum(map(sum, last["confusion"]["counts"])) == 11
    assert tuned.predict(capsys, "wa")
    capsys.readouterr()
    assert cli.main(["predict", "--workdir", "run", "很好"]) == 0
    assert "warning: 100% of the text is [UNK]" in capsys.readouterr().err
    assert cli.main(["embed", "--workdir", "base", "train", "--out", "v.npz"]) == 0
    assert "% of their pieces are unknown" in "".join(capsys.readouterr())
