"""Scores agree with SciPy, scikit-learn, conlleval and the script of SQuAD; see make_suite_scores.

The scripts have read our files of predictions.
"""

import json

import make_suite_scores
import pytest
import suite_data
from make_suite_scores import TASKS

from bert_jax.tasks import examples, scores

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
