"""Scores against published examples, definitions written out slowly, and cases by hand."""

import math
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.tasks import scores
from bert_jax.tasks.examples import AnswerSpan, Question


def test_scikit_learns_published_examples():
    """From the pages of f1_score, matthews_corrcoef and accuracy_score."""
    truth, predicted = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 2, 1, 0, 0, 1])
    assert scores.score("macro_f1", truth, predicted) == pytest.approx(0.26, abs=0.007)
    # F1 of 0 is 4/5 (2 of 3 predicted, 2 of 2 there), of 1 and 2 it is 0.
    assert scores.score("macro_f1", truth, predicted) == pytest.approx(4 / 15)
    assert scores.score("micro_f1", truth, predicted) == pytest.approx(1 / 3)
    truth, predicted = np.array([1, 1, 1, 0]), np.array([1, 0, 1, 1])
    assert scores.score("matthews", truth, predicted) == pytest.approx(-1 / 3)
    assert scores.score("accuracy", np.array([0, 1, 2, 3]), np.array([0, 2, 1, 3])) == 0.5


def test_binary_f1_is_of_label_one():
    # Label 1: 2 right, 3 predicted, 4 there: precision 2/3, recall 1/2, F1 4/7. Label 0: 1 right, 3
    # predicted, 2 there: precision 1/3, recall 1/2, F1 2/5.
    truth, predicted = np.array([1, 1, 1, 1, 0, 0]), np.array([1, 1, 0, 0, 1, 0])
    assert scores.score("f1", truth, predicted) == pytest.approx(4 / 7)
    assert scores.score("f1", 1 - truth, 1 - predicted) == pytest.approx(2 / 5)


def test_scores_of_nothing_predicted_are_zero_and_no_error():
    none, some = np.array([0, 0]), np.array([0, 1])
    assert scores.score("f1", none, none) == 0.0
    assert scores.score("f1", some, none) == scores.score("f1", none, some) == 0.0
    assert scores.score("matthews", some, none) == scores.score("matthews", none, some) == 0.0
    assert scores.entity_f1([("O",)], [("O",)]) == 0.0


@pytest.mark.parametrize("name", ["pearson", "spearman"])
def test_correlation_with_a_constant_is_zero_and_with_no_number_none(name):
    rising = np.arange(7.0)
    for constant in (0.0, 0.1, 1e30):
        assert scores.score(name, rising, np.full(7, constant)) == 0.0
        assert scores.score(name, np.full(7, constant), rising) == 0.0
    assert scores.score(name, np.ones(1), np.ones(1)) == 0.0
    for bad in (math.nan, math.inf):
        assert math.isnan(scores.score(name, np.array([1.0, 2.0]), np.array([1.0, bad])))


ENTITIES = [
    ("O O", []),
    ("B-X I-X O", [("X", 0, 1)]),
    ("B-X B-X", [("X", 0, 0), ("X", 1, 1)]),
    # I- without B- begins an entity: at the start, and after O.
    ("I-X I-X O I-X", [("X", 0, 1), ("X", 3, 3)]),
    # Another type ends one entity and begins another, whatever stands before the hyphen.
    ("B-X I-Y I-Y", [("X", 0, 0), ("Y", 1, 2)]),
    ("I-X B-Y I-X", [("X", 0, 0), ("Y", 1, 1), ("X", 2, 2)]),
    # B- after I- of its own type begins another.
    ("I-X B-X I-X", [("X", 0, 0), ("X", 1, 2)]),
    # Types with hyphens, and none.
    ("B-a-b I-a-b I-a", [("a-b", 0, 1), ("a", 2, 2)]),
    ("B I O I", [("", 0, 1), ("", 3, 3)]),
    ("B-O I-O O", [("O", 0, 1)]),
]


@pytest.mark.parametrize(("tags", "expected"), ENTITIES)
def test_entities_begin_and_end_as_in_conlleval(tags, expected):
    assert scores.entities(tags.split()) == expected


def test_seqevals_published_example():
    """From its README: MISC is found one word too early, PER is right."""
    truth = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    predicted = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    assert scores.entity_f1(truth, predicted) == 0.5


# --- spans: cases worked out by hand from the official definitions of SQuAD 1.1 and 2.0 ---


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Cat", "cat"),
        ("a  cat\tsat\n", "cat sat"),
        # Punctuation goes before articles are looked for, and leaves no blank.
        ("U.S.A.", "usa"),
        ("well-known", "wellknown"),
        ("the-cat", "thecat"),
        ("A.", ""),
        # Articles are whole words.
        ("Athens and another theatre", "athens and another theatre"),
        ("the an a The", ""),
        # Of Unicode's punctuation nothing goes, and a mark ends a word, so the article goes.
        ("“the” cat", "“ ” cat"),
        ("Café ÉCOLE", "café école"),
        # As Python lowers it: İ becomes i and a combining dot.
        ("İ", "i\u0307"),
        ("一 只\u3000猫", "一 只 猫"),
        (string.punctuation, ""),
    ],
)
def test_texts_are_normalized(text, expected):
    assert scores.normalize_answer(text) == expected


GOLDEN = [
    # predicted, answers, exact match, F1
    ("the Denver Broncos!", ["Denver Broncos"], 1, 1),
    # The best of the answers: 2/3 of the first, 1/2 of the second (shared 1, of 1 and 3 words).
    ("Broncos", ["Denver Broncos", "Denver's best Broncos"], 0, 2 / 3),
    ("Broncos", ["Denver's best Broncos", "broncos,"], 1, 1),
    # A word counts as often as both have it: shared 2 of 3 predicted and 2 there: 2 * 2 / 5.
    ("no no no", ["no no"], 0, 4 / 5),
    # Shared new and york once each: 2 * 2 / (4 + 2).
    ("New York New York", ["new york"], 0, 2 / 3),
    # Order does not count in F1.
    ("York New", ["New York"], 0, 1),
    # Said alone, a word with its hyphen is another.
    ("well known", ["well-known"], 0, 0),
    # One word each: nothing is shared by halves, so F1 is exact match.
    ("卡罗来纳黑豹", ["卡罗来纳黑豹队"], 0, 0),
    # A full stop of Chinese is no ASCII punctuation.
    ("黑豹队。", ["黑豹队"], 0, 0),
    ("黑豹队.", ["黑豹队"], 1, 1),
    ("", ["Denver"], 0, 0),
]


@pytest.mark.parametrize("no_answer", ["never", "possible"])
@pytest.mark.parametrize(("predicted", "answers", "exact", "f1"), GOLDEN)
def test_golden_cases_of_both_versions(predicted, answers, exact, f1, no_answer):
    assert scores.exact_match(predicted, answers, no_answer) == exact
    assert scores.answer_f1(predicted, answers, no_answer) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("predicted", "answers", "no_answer", "exact", "f1"),
    [
        # No answer is there: only to say none is right.
        ("", [], "possible", 1, 1),
        ("Denver", [], "possible", 0, 0),
        # Nothing is left of "The". 1.1: nothing equals nothing, but no word is shared.
        ("The", ["The"], "never", 1, 0),
        # 2.0: an answer of which nothing is left does not count, and without others "" is right.
        ("The", ["The"], "possible", 1, 1),
        ("", ["The"], "possible", 1, 1),
        ("Denver", ["The"], "possible", 0, 0),
        # With others it is left out: "" is wrong. 1.1 keeps it.
        ("", ["The", "Denver"], "possible", 0, 0),
        ("", ["The", "Denver"], "never", 1, 0),
        ("the", [], "possible", 1, 1),
    ],
)
def test_golden_cases_of_nothing(predicted, answers, no_answer, exact, f1):
    assert scores.exact_match(predicted, answers, no_answer) == exact
    assert scores.answer_f1(predicted, answers, no_answer) == f1


words = st.lists(st.sampled_from(["a", "The", "cat", "Cat.", "sat", "黑", "-"]), max_size=5).map(
    " ".join
)


def question(number, answers):
    parts = tuple(AnswerSpan(text, 0) for text in answers)
    return Question(f"f: question {number}", str(number), "?", "C", parts, bool(parts))


def test_means_are_over_questions():
    questions = [question(0, ["new york"]), question(1, ["cat"]), question(2, [])]
    predicted = {"0": "york", "1": "Cat", "2": "dog"}
    found = scores.span_scores(questions, predicted, "possible")
    # Exact: 0, 1, 0. F1: 2/3, 1, 0.
    assert found == pytest.approx({"f1": 5 / 9, "exact_match": 1 / 3})
    found = scores.span_scores(questions[:2], predicted, "never")
    assert found == pytest.approx({"f1": 5 / 6, "exact_match": 0.5})


def f1_under(threshold, questions, predicted, no_answer_scores):
    kept = {i: "" if no_answer_scores[i] > threshold else text for i, text in predicted.items()}
    return scores.span_scores(questions, kept, "possible")["f1"]


def test_the_best_threshold_of_a_case_worked_out():
    """Sorted by their scores for no answer: a right, b none, c half right, d none.

    Refusing all gives 2 of 4. Answering a gives 3. Answering a and b loses b again: 2; then c gains
    2/3; then d is lost as well.
    """
    questions = [question("c", ["new york"]), question("d", []), question("a", ["x"])]
    questions.append(question("b", []))
    predicted = {"a": "x", "b": "y", "c": "york", "d": "z"}
    no_answer = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}
    assert scores.best_threshold(questions, predicted, no_answer) == 0.1
    assert f1_under(0.1, questions, predicted, no_answer) == 0.75
    # Where b is predicted to have none, all up to c are answered: 1 + 1 + 2/3 + 1.
    assert scores.best_threshold(questions, predicted | {"b": ""}, no_answer) == 0.3


def test_where_no_answer_is_best_all_are_refused_and_equal_scores_together():
    questions = [question(0, []), question(1, [])]
    predicted = {"0": "x", "1": "y"}
    assert scores.best_threshold(questions, predicted, {"0": 0.5, "1": 0.6}) == 0.0
    found = scores.best_threshold(questions, predicted, {"0": -3.0, "1": 2.0})
    assert -3.001 < found < -3.0
    # To answer the first alone would give 2 of 2; a threshold cannot.
    questions = [question(0, ["x"]), question(1, [])]
    assert scores.best_threshold(questions, predicted, {"0": 0.5, "1": 0.5}) == 0.0


levels = st.integers(-3, 3).map(float)
cases = st.lists(
    st.tuples(st.sampled_from([(), ("cat",), ("cat sat",)]), words, levels), min_size=1, max_size=7
)


@given(cases)
def test_no_threshold_is_better_than_the_best(given_cases):
    questions = [question(i, answers) for i, (answers, _, _) in enumerate(given_cases)]
    predicted = {str(i): text for i, (_, text, _) in enumerate(given_cases)}
    level = {str(i): value for i, (_, _, value) in enumerate(given_cases)}
    best = scores.best_threshold(questions, predicted, level)
    best_f1 = f1_under(best, questions, predicted, level)
    for threshold in (-4.0, *level.values()):
        assert f1_under(threshold, questions, predicted, level) <= best_f1 + 1e-9
