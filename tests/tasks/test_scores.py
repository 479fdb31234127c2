"""Scores against SciPy, published examples, and definitions written out slowly."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
import scipy.stats
from damage import few
from hypothesis import assume, given
from hypothesis import strategies as st

from bert_jax.config import SCORES
from bert_jax.tasks import scores

labels = st.integers(0, 3)
pairs_of_labels = st.lists(st.tuples(labels, labels), min_size=1, max_size=30)


def columns(pairs):
    return np.array([a for a, _ in pairs]), np.array([b for _, b in pairs])


def slow_f1(pairs, label):
    """From precision and recall; 0 where nothing is right."""
    right = sum(a == b == label for a, b in pairs)
    if not right:
        return Fraction(0)
    precision = Fraction(right, sum(b == label for _, b in pairs))
    recall = Fraction(right, sum(a == label for a, _ in pairs))
    return 2 * precision * recall / (precision + recall)


def test_scikit_learns_published_examples():
    """From the pages of f1_score, matthews_corrcoef and accuracy_score."""
    truth, said = np.array([0, 1, 2, 0, 1, 2]), np.array([0, 2, 1, 0, 0, 1])
    assert scores.macro_f1(truth, said) == pytest.approx(0.26, abs=0.007)
    # F1 of 0 is 4/5 (2 of 3 said, 2 of 2 there), of 1 and 2 it is 0.
    assert scores.macro_f1(truth, said) == pytest.approx(4 / 15)
    assert scores.micro_f1(truth, said) == pytest.approx(1 / 3)
    truth, said = np.array([1, 1, 1, 0]), np.array([1, 0, 1, 1])
    assert scores.matthews(truth, said) == pytest.approx(-1 / 3)
    assert scores.accuracy(np.array([0, 1, 2, 3]), np.array([0, 2, 1, 3])) == 0.5


def test_binary_f1_is_of_label_one():
    # Label 1: 2 right, 3 said, 4 there: precision 2/3, recall 1/2, F1 4/7. Label 0: 1 right, 3
    # said, 2 there: precision 1/3, recall 1/2, F1 2/5.
    truth, said = np.array([1, 1, 1, 1, 0, 0]), np.array([1, 1, 0, 0, 1, 0])
    assert scores.f1(truth, said) == pytest.approx(4 / 7)
    assert scores.f1(1 - truth, 1 - said) == pytest.approx(2 / 5)


def test_scores_of_nothing_said_are_zero_and_no_error():
    none, some = np.array([0, 0]), np.array([0, 1])
    assert scores.f1(none, none) == 0.0
    assert scores.f1(some, none) == scores.f1(none, some) == 0.0
    assert scores.matthews(some, none) == scores.matthews(none, some) == 0.0
    assert scores.entity_f1([("O",)], [("O",)]) == 0.0


@given(pairs_of_labels)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(pairs):
    truth, said = columns(pairs)
    assert scores.f1(truth, said) == pytest.approx(float(slow_f1(pairs, 1)))
    present = {label for pair in pairs for label in pair}
    mean = sum(slow_f1(pairs, label) for label in present) / len(present)
    assert scores.macro_f1(truth, said) == pytest.approx(float(mean))
    assert scores.micro_f1(truth, said) == pytest.approx(scores.accuracy(truth, said))


@given(pairs_of_labels)
def test_matthews_is_the_correlation_of_the_labels_as_unit_vectors(pairs):
    """Gorodkin's definition; for two labels Pearson's correlation of 0 and 1."""
    truth, said = columns(pairs)
    x, y = np.eye(4)[truth], np.eye(4)[said]
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    spread = (x * x).sum() * (y * y).sum()
    expected = (x * y).sum() / math.sqrt(spread) if spread > 1e-9 else 0.0
    assert scores.matthews(truth, said) == pytest.approx(expected, abs=1e-12)
    truth, said = truth % 2, said % 2
    assert scores.matthews(truth, said) == pytest.approx(scores.pearson(truth, said), abs=1e-12)


# Few different numbers, so that many are equal.
numbers = st.integers(-4, 4).map(lambda n: n / 2) | st.floats(-1e3, 1e3, allow_subnormal=False)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=20))
def test_correlations_are_scipys(pairs):
    truth, said = columns(pairs)
    assume(min(np.ptp(truth), np.ptp(said)) > 1e-3)
    assert scores.pearson(truth, said) == pytest.approx(
        scipy.stats.pearsonr(truth, said).statistic, abs=1e-9
    )
    assert scores.spearman(truth, said) == pytest.approx(
        scipy.stats.spearmanr(truth, said).statistic, abs=1e-12
    )


@pytest.mark.parametrize("score", [scores.pearson, scores.spearman])
def test_correlation_with_a_constant_is_zero(score):
    rising = np.arange(7.0)
    for constant in (0.0, 0.1, 1e300):
        assert score(rising, np.full(7, constant)) == 0.0
        assert score(np.full(7, constant), rising) == 0.0
    assert score(np.ones(1), np.ones(1)) == 0.0


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1.0, 1e200, 1e308])
def test_correlation_does_not_depend_on_the_scale(scale):
    values = np.array([0.1, 0.5, 0.9, 1.0])
    assert scores.pearson(values, values * scale) == pytest.approx(1.0, abs=1e-3)
    assert scores.pearson(values, -values * scale) == pytest.approx(-1.0, abs=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_number_that_is_not_finite_has_no_correlation(bad):
    for score in (scores.pearson, scores.spearman):
        assert math.isnan(score(np.array([1.0, 2.0]), np.array([1.0, bad])))


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


def slow_entities(tags):
    """Every stretch of words of one type that begins where one may and cannot go on."""

    def begins(place):
        prefix, _, kind = tags[place].partition("-")
        before = tags[place - 1] if place else "O"
        fresh = before == "O" or before.partition("-")[2] != kind
        return prefix == "B" or (prefix == "I" and fresh)

    def goes_on(place):
        return place < len(tags) and tags[place] != "O" and not begins(place)

    return {
        (tags[first].partition("-")[2], first, last)
        for first, last in itertools.combinations_with_replacement(range(len(tags)), 2)
        if begins(first)
        and all(goes_on(place) for place in range(first + 1, last + 1))
        and not goes_on(last + 1)
    }


tags = st.sampled_from(["O", "B-X", "I-X", "B-Y", "I-Y"])
tagged = st.lists(st.lists(st.tuples(tags, tags), min_size=1, max_size=8), min_size=1, max_size=4)


@given(tagged)
@few()
def test_entity_scores_are_those_of_sets_of_entities(sentences):
    truth = [tuple(a for a, _ in sentence) for sentence in sentences]
    said = [[b for _, b in sentence] for sentence in sentences]
    there = {(i, *entity) for i, s in enumerate(truth) for entity in slow_entities(s)}
    told = {(i, *entity) for i, s in enumerate(said) for entity in slow_entities(s)}
    together, by_type = scores.entity_scores(truth, said)

    def of(kinds):
        a = {entity for entity in there if entity[1] in kinds}
        b = {entity for entity in told if entity[1] in kinds}
        return scores.EntityScores(
            precision=len(a & b) / max(len(b), 1),
            recall=len(a & b) / max(len(a), 1),
            f1=2 * len(a & b) / max(len(a) + len(b), 1),
            support=len(a),
        )

    assert together == of({"X", "Y"})
    assert by_type == {kind: of({kind}) for kind in {entity[1] for entity in there | told}}
    assert list(by_type) == sorted(by_type)
    assert scores.entity_f1(truth, said) == together.f1


def test_seqevals_published_example():
    """From its README: MISC is found one word too early, PER is right."""
    truth = [["O", "O", "O", "B-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    said = [["O", "O", "B-MISC", "I-MISC", "I-MISC", "I-MISC", "O"], ["B-PER", "I-PER", "O"]]
    together, by_type = scores.entity_scores(truth, said)
    assert together == scores.EntityScores(0.5, 0.5, 0.5, 2)
    assert by_type == {
        "MISC": scores.EntityScores(0.0, 0.0, 0.0, 1),
        "PER": scores.EntityScores(1.0, 1.0, 1.0, 1),
    }
    assert scores.accuracy(truth, said) == 0.8


def test_every_score_that_a_task_can_name_is_known():
    classes = np.array([0, 1, 1, 0])
    words = [("B-X", "O"), ("O", "B-Y")]
    for shape, names in SCORES.items():
        if shape != "span":
            for name in names:
                perfect = words if shape == "tag" else classes
                assert scores.score(name, perfect, perfect) == pytest.approx(1.0), name
    assert scores.score("pearson", classes, 1 - classes) == pytest.approx(-1.0)


@pytest.mark.parametrize("name", sorted({n for s, ns in SCORES.items() if s != "span" for n in ns}))
def test_what_is_not_said_of_each_example_has_no_score(name):
    for truth, said in ([[1, 0], [1]], [[], []]):
        with pytest.raises(ValueError, match="examples, but"):
            scores.score(name, truth, said)
    if name in SCORES["tag"]:
        with pytest.raises(ValueError, match="sentence 1: 2 words, but 1 tags"):
            scores.score(name, [("O",), ("O", "O")], [("O",), ("O",)])
