"""Scores agree with SciPy, scikit-learn, conlleval and the script of SQuAD; see make_suite_scores.

The scripts have read our files of predictions. For SQuAD 1.1, the rules of Rajpurkar et al. 2016,
section 6.1, are written here once more.
"""

import json
import random
import re
import string

import make_suite_scores
import pytest
import suite_data
from make_suite_scores import TASKS

from bert_jax.tasks import examples, scores
from bert_jax.tasks.examples import AnswerSpan, Question

GOLDEN = json.loads(make_suite_scores.GOLDEN.read_text())


@pytest.mark.parametrize("kind", ["labels", "numbers"])
def test_scores_of_labels_and_numbers(kind):
    case = GOLDEN[kind]
    for name, value in case["scores"].items():
        assert scores.score(name, case["truth"], case["predicted"]) == pytest.approx(value)


@pytest.mark.parametrize("scheme", suite_data.CONLL)
def test_scores_of_tags_and_the_file_that_conlleval_reads(scheme):
    case = GOLDEN[scheme]
    count = sum(map(len, case["truth"]))
    assert case["printed"][0].startswith(f"processed {count} tokens with ")
    f1 = scores.entity_f1(case["truth"], case["predicted"])
    assert case["printed"][1].endswith(f"FB1: {100 * f1:6.2f}")
    text = make_suite_scores.tag_file(case["truth"], case["predicted"])
    sentences = [block.split("\n") for block in text.removesuffix("\n\n").split("\n\n")]
    assert [[line.split(" ")[1] for line in lines] for lines in sentences] == case["truth"]
    assert [[line.split(" ")[2] for line in lines] for lines in sentences] == case["predicted"]


def test_scores_of_answers_and_the_file_that_the_script_of_squad_reads(tmp_path):
    case, printed = GOLDEN["answers"], GOLDEN["answers"]["printed"]
    path = tmp_path / "data.json"
    path.write_text(suite_data.squad(40, "v2.0"))
    questions = examples.read(TASKS["SQuAD-2.0"], (f"squad:{path}",), "labelled")
    found = scores.span_scores(questions, case["predicted"], "possible")
    assert 100 * found["f1"] == pytest.approx(printed["f1"])
    assert 100 * found["exact_match"] == pytest.approx(printed["exact"])
    assert json.loads(make_suite_scores.answer_file(case["predicted"])) == case["predicted"]


def bag(text: str) -> list[str]:
    """Returns the words of an answer in order, without articles and punctuation."""
    kept = "".join(c for c in text.casefold() if c not in string.punctuation)
    return [word for word in re.split(r"\s+", kept) if word not in ("", "a", "an", "the")]


def squad_1_1(predicted: list[str], answers: list[list[str]]) -> tuple[float, float]:
    """Returns exact match and F1 in percent: means over questions of the best right answer."""
    exact, f1 = 0.0, 0.0
    for text, right in zip(predicted, answers, strict=True):
        found = []
        for answer in right:
            left, common = bag(answer), 0
            for word in bag(text):
                if word in left:
                    left.remove(word)
                    common += 1
            sizes = len(bag(text)) + len(bag(answer))
            found.append((bag(text) == bag(answer), 2 * common / sizes if common else 0.0))
        exact += max(equal for equal, _ in found)
        f1 += max(overlap for _, overlap in found)
    return 100 * exact / len(predicted), 100 * f1 / len(predicted)


def test_scores_of_answers_by_the_rules_of_squad_1_1():
    draw = random.Random(0)
    words = [
        "the",
        "a",
        "an",
        "The,",
        "wa",
        "wb",
        "wc.",
        "wa-wb",
        "(wc)",
        "1,000",
        "u.s.",
        "it's",
        "Wa",
        "é",
        "$5",
        "...",
        "",
    ]

    def text(most):
        return " ".join(draw.choices(words, k=draw.randint(1, most)))

    answers = [[text(4) for _ in range(draw.randint(1, 3))] for _ in range(400)]
    predicted = [draw.choice(a) if draw.random() < 0.3 else text(5) for a in answers]
    questions = [
        Question("x", f"q{i}", "?", "x", tuple(AnswerSpan(t, 0) for t in right), True)
        for i, right in enumerate(answers)
    ]
    given = {f"q{i}": answer for i, answer in enumerate(predicted)}
    found = scores.span_scores(questions, given, TASKS["SQuAD-1.1"].no_answer)
    exact, f1 = squad_1_1(predicted, answers)
    assert 100 * found["exact_match"] == pytest.approx(exact)
    assert 100 * found["f1"] == pytest.approx(f1)
    assert 20 < exact < f1 < 80
