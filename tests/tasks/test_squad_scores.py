"""SQuAD's scores: cases worked out by hand from the official definitions of 1.1 and 2.0."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bert_jax.tasks import squad_scores
from bert_jax.tasks.examples import Answer, Question


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
    assert squad_scores.normalized(text) == expected


GOLDEN = [
    # said, answers, exact match, F1
    ("the Denver Broncos!", ["Denver Broncos"], 1, 1),
    # Shared: denver; said 1 word, there 2: precision 1, recall 1/2, F1 2/3.
    ("Denver", ["Denver Broncos"], 0, 2 / 3),
    ("Carolina Panthers", ["Denver Broncos"], 0, 0),
    # The best of the answers: 2/3 of the first, 1/2 of the second (shared 1, of 1 and 3 words).
    ("Broncos", ["Denver Broncos", "Denver's best Broncos"], 0, 2 / 3),
    ("Broncos", ["Denver's best Broncos", "broncos,"], 1, 1),
    # A word counts as often as both have it: shared 2 of 3 said and 2 there: 2 * 2 / 5.
    ("no no no", ["no no"], 0, 4 / 5),
    # Shared new and york once each: 2 * 2 / (4 + 2).
    ("New York New York", ["new york"], 0, 2 / 3),
    # Order does not count in F1.
    ("York New", ["New York"], 0, 1),
    # Said alone, a word with its hyphen is another.
    ("well known", ["well-known"], 0, 0),
    ("Über", ["über"], 1, 1),
    # One word each: nothing is shared by halves, so F1 is exact match.
    ("卡罗来纳黑豹", ["卡罗来纳黑豹队"], 0, 0),
    ("卡罗来纳黑豹队", ["卡罗来纳黑豹队"], 1, 1),
    # A full stop of Chinese is no ASCII punctuation.
    ("黑豹队。", ["黑豹队"], 0, 0),
    ("黑豹队.", ["黑豹队"], 1, 1),
    ("", ["Denver"], 0, 0),
]


@pytest.mark.parametrize("no_answer", ["never", "possible"])
@pytest.mark.parametrize(("said", "answers", "exact", "f1"), GOLDEN)
def test_golden_cases_of_both_versions(said, answers, exact, f1, no_answer):
    assert squad_scores.exact_match(said, answers, no_answer) == exact
    assert squad_scores.f1(said, answers, no_answer) == pytest.approx(f1)


@pytest.mark.parametrize(
    ("said", "answers", "no_answer", "exact", "f1"),
    [
        # No answer is there: only to say none is right.
        ("", [], "possible", 1, 1),
        ("Denver", [], "possible", 0, 0),
        # Nothing is left of "The". 1.1: nothing equals nothing, but no word is shared.
        ("The", ["The"], "never", 1, 0),
        ("a", ["The"], "never", 1, 0),
        ("The", ["Denver"], "never", 0, 0),
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
def test_golden_cases_of_nothing(said, answers, no_answer, exact, f1):
    assert squad_scores.exact_match(said, answers, no_answer) == exact
    assert squad_scores.f1(said, answers, no_answer) == f1


words = st.lists(st.sampled_from(["a", "The", "cat", "Cat.", "sat", "黑", "-"]), max_size=5).map(
    " ".join
)


@given(words, words, st.sampled_from(["never", "possible"]))
def test_f1_is_symmetric_and_bounded(a, b, no_answer):
    if no_answer == "never" or (squad_scores.normalized(a) and squad_scores.normalized(b)):
        forth, back = (squad_scores.f1(x, [y], no_answer) for x, y in ((a, b), (b, a)))
        assert forth == back
    f1 = squad_scores.f1(a, [b], no_answer)
    assert 0 <= f1 <= 1
    if squad_scores.normalized(a):
        assert squad_scores.exact_match(a, [b], no_answer) <= f1
    assert squad_scores.f1(a, [b, a], no_answer) >= f1


def question(number, answers):
    parts = tuple(Answer(text, 0) for text in answers)
    return Question(f"f: question {number}", str(number), "?", "C", parts, bool(parts))


def test_means_are_told_of_questions_with_and_without_an_answer():
    questions = [question(0, ["new york"]), question(1, ["cat"]), question(2, [])]
    said = {"0": "york", "1": "Cat", "2": "dog"}
    found = squad_scores.scores(questions, said, "possible")
    # Exact: 0, 1, 0. F1: 2/3, 1, 0.
    assert found == {
        "all": squad_scores.SpanScores(pytest.approx(1 / 3), pytest.approx(5 / 9), 3),
        "answer": squad_scores.SpanScores(0.5, pytest.approx(5 / 6), 2),
        "none": squad_scores.SpanScores(0.0, 0.0, 1),
    }
    assert list(squad_scores.scores(questions[:2], said, "never")) == ["all"]
    assert list(squad_scores.scores(questions[2:], said, "possible")) == ["all", "none"]


def test_the_best_threshold_of_a_case_worked_out():
    """Sorted by their scores for no answer: a right, b none, c half right, d none.

    Refusing all gives 2 of 4. Answering a gives 3. Answering a and b loses b again: 2; then c gains
    2/3 of F1 and nothing of exact match; then d is lost as well. Both are best where a alone is
    answered.
    """
    questions = [question("c", ["new york"]), question("d", []), question("a", ["x"])]
    questions.append(question("b", []))
    said = {"a": "x", "b": "y", "c": "york", "d": "z"}
    no_answer = {"a": 0.1, "b": 0.2, "c": 0.3, "d": 0.4}
    best = squad_scores.Threshold(0.1, 0.75)
    assert squad_scores.best_thresholds(questions, said, no_answer) == {
        "exact_match": best,
        "f1": best,
    }
    # Where b is said to have none, all up to c are answered for F1: 1 + 1 + 2/3 + 1.
    found = squad_scores.best_thresholds(questions, said | {"b": ""}, no_answer)
    assert found["exact_match"] == best
    assert found["f1"] == squad_scores.Threshold(0.3, pytest.approx((3 + 2 / 3) / 4))


def test_where_no_answer_is_best_all_are_refused():
    questions = [question(0, []), question(1, [])]
    said = {"0": "x", "1": "y"}
    found = squad_scores.best_thresholds(questions, said, {"0": 0.5, "1": 0.6})
    assert found["f1"] == squad_scores.Threshold(0.0, 1.0)
    found = squad_scores.best_thresholds(questions, said, {"0": -3.0, "1": 2.0})
    assert found["f1"].score == 1.0
    assert -3.001 < found["f1"].value < -3.0


def test_questions_of_equal_scores_are_answered_or_refused_together():
    """To answer the first alone would give 2 of 2; a threshold cannot."""
    questions = [question("a", ["x"]), question("b", [])]
    said = {"a": "x", "b": "y"}
    found = squad_scores.best_thresholds(questions, said, {"a": 0.5, "b": 0.5})
    assert found["exact_match"] == squad_scores.Threshold(0.0, 0.5)


levels = st.integers(-3, 3).map(float)
cases = st.lists(
    st.tuples(st.sampled_from([(), ("cat",), ("cat sat",)]), words, levels), min_size=1, max_size=7
)


@given(cases)
def test_no_threshold_is_better_than_the_best(asked):
    questions = [question(i, answers) for i, (answers, _, _) in enumerate(asked)]
    said = {str(i): text for i, (_, text, _) in enumerate(asked)}
    level = {str(i): value for i, (_, _, value) in enumerate(asked)}

    def mean(threshold, name):
        kept = {i: "" if level[i] > threshold else text for i, text in said.items()}
        return getattr(squad_scores.scores(questions, kept, "possible")["all"], name)

    for name, best in squad_scores.best_thresholds(questions, said, level).items():
        assert mean(best.value, name) == pytest.approx(best.score)
        for threshold in (-4.0, *level.values()):
            assert mean(threshold, name) <= best.score + 1e-9
