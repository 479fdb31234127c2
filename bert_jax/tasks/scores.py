"""Scores of predictions against the truth, in [0, 1] or [-1, 1], more is better.

Those of GLUE (Wang et al. 2019), and how its tasks are named here. `f1` is of label 1: where its
name does not sort last, name both in `task.labels`.

| task      | kind     | score                                        |
|-----------|----------|----------------------------------------------|
| CoLA      | classify | matthews                                     |
| SST-2     | classify | accuracy                                     |
| MRPC      | pair     | f1 and accuracy (label 1: "equivalent")      |
| QQP       | pair     | f1 and accuracy (label 1: "duplicate")       |
| STS-B     | regress  | pearson and spearman                         |
| MNLI      | pair     | accuracy, on matched and mismatched examples |
| QNLI      | pair     | accuracy                                     |
| RTE, WNLI | pair     | accuracy                                     |

Labels and numbers are scored by scikit-learn and SciPy, which are imported when they are needed;
tags by F1 of entities as CoNLL counts them; spans as SQuAD 1.1 (Rajpurkar et al. 2016) and 2.0
(Rajpurkar et al. 2018) do, in shares where the official scripts have percents.
"""

import collections
import re
import string
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.tasks.examples import NoAnswer, Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(name: str, truth: Any, predicted: Any) -> float:
    """Returns the score of this name for labels or numbers.

    Args:
      name: `accuracy`; `f1`, of label 1; `macro_f1`, the mean over the labels in either array;
        `micro_f1`; `matthews`, for more than two labels Gorodkin's R_K; `pearson`; `spearman`.
        Where a score is 0/0, as F1 of a label in neither array and a correlation with a constant,
        it is 0.
      truth: int[N] numbers of labels; float[N] for `pearson` and `spearman`, which are nan if a
        number is not finite.
      predicted: the same of a model.
    """
    if name in ("pearson", "spearman"):
        return _correlation(name, truth, predicted)
    from sklearn import metrics

    if name == "accuracy":
        return float(metrics.accuracy_score(truth, predicted))
    if name == "matthews":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a single label
            return float(metrics.matthews_corrcoef(truth, predicted))
    labels, average = ([1], "macro") if name == "f1" else (None, name.removesuffix("_f1"))
    options = {"labels": labels, "average": average, "zero_division": 0.0}
    return float(metrics.f1_score(truth, predicted, **options))


def _correlation(name: str, truth: Any, predicted: Any) -> float:
    from scipy import stats

    truth, predicted = np.asarray(truth, np.float64), np.asarray(predicted, np.float64)
    if not (np.isfinite(truth).all() and np.isfinite(predicted).all()):
        return float("nan")
    if np.ptp(truth) == 0 or np.ptp(predicted) == 0:
        return 0.0
    correlate = stats.pearsonr if name == "pearson" else stats.spearmanr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of numbers that are nearly constant
        return float(correlate(truth, predicted).statistic)


# --- tags ---------------------------------------------------------------------------------------


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns the entities in a sentence's tags: type, first word, last word.

    As the script conlleval of CoNLL-2000 reads them, and seqeval by default: an entity begins at
    B-TYPE, and at I-TYPE if the word before is outside or of another type; it goes on over I-TYPE
    of its own type. So I- without B- is an entity, B- always begins another, and a change of type
    inside ends one and begins the next. A type may be empty.

    Args:
      tags: of its words, each O, B-TYPE or I-TYPE.
    """
    spans: list[tuple[str, int, int]] = []
    before = "O"
    for place, tag in enumerate(tags):
        if tag != "O":
            kind = tag[2:]
            if tag[0] == "I" and before != "O" and before[2:] == kind:
                spans[-1] = (kind, spans[-1][1], place)
            else:
                spans.append((kind, place, place))
        before = tag
    return spans


def entity_f1(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """Returns F1 of the entities of all sentences together (micro-averaged); 0 if there are none.

    A predicted entity is right if one of its type is there with the same first and last word.
    """
    hits = total = 0
    for true_tags, predicted_tags in zip(truth, predicted, strict=True):
        there, given = set(entities(true_tags)), set(entities(predicted_tags))
        hits += len(there & given)
        total += len(there) + len(given)
    return 2 * hits / total if total else 0.0


# --- spans --------------------------------------------------------------------------------------


def normalized(text: str) -> str:
    """Returns what of an answer is compared: lower case, without ASCII punctuation and articles.

    In this order; then white space is one blank between words. Punctuation goes without leaving a
    blank: `U.S.` is `us`, and `well-known` one word. A Chinese answer is one word, so that its F1
    is its exact match.
    """
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(predicted: str, answers: Sequence[str], no_answer: NoAnswer) -> float:
    """Returns 1 if a predicted answer equals a given one, both normalized, else 0.

    Args:
      predicted: an answer; "" for none.
      answers: those that people gave; with `possible` there may be none.
      no_answer: `never` as SQuAD 1.1 counts, `possible` as SQuAD 2.0 does.
    """
    return max(float(normalized(predicted) == normalized(a)) for a in _golds(answers, no_answer))


def answer_f1(predicted: str, answers: Sequence[str], no_answer: NoAnswer) -> float:
    """Returns F1 of the words that a predicted answer shares with a given one, the most of all.

    A word counts as often as both have it. If no word is left of one of them, SQuAD 2.0 counts 1
    if none is left of both, else 0, and SQuAD 1.1 counts 0 always. Arguments as of `exact_match`.
    """

    def f1(answer: str) -> float:
        ours = collections.Counter(normalized(predicted).split())
        theirs = collections.Counter(normalized(answer).split())
        if not ours or not theirs:
            return float(no_answer == "possible" and ours == theirs)
        return 2 * (ours & theirs).total() / (ours.total() + theirs.total())

    return max(f1(answer) for answer in _golds(answers, no_answer))


def _golds(answers: Sequence[str], no_answer: NoAnswer) -> Sequence[str]:
    """Returns the right answers.

    SQuAD 2.0 leaves out answers of which nothing is left; without any, "" is the right one.
    """
    if no_answer == "possible":
        return [answer for answer in answers if normalized(answer)] or [""]
    return answers


def span_scores(
    questions: Sequence[Question], predicted: Mapping[str, str], no_answer: NoAnswer
) -> dict[str, float]:
    """Returns the means of `f1` and `exact_match` over questions.

    Args:
      questions: at least one, labelled.
      predicted: an answer to each by its id; "" for none.
      no_answer: as in `exact_match`.
    """
    golds = [(predicted[q.id], [a.text for a in q.answers], no_answer) for q in questions]
    return {
        "f1": float(np.mean([answer_f1(*gold) for gold in golds])),
        "exact_match": float(np.mean([exact_match(*gold) for gold in golds])),
    }


def best_threshold(
    questions: Sequence[Question],
    predicted: Mapping[str, str],
    no_answer_scores: Mapping[str, float],
) -> float:
    """Returns the threshold under which SQuAD 2.0's mean F1 is best, the lowest of equals.

    A question is given no answer if its score for having none is greater. As best_f1_thresh of the
    official script, with three differences. Questions with equal scores fall on one side here,
    while the script may count a threshold that separates them. Where no answer at all is best, the
    script gives 0, which is right for probabilities alone; here it is 0 if all scores are
    positive, else just below the least. And an answer of which nothing is left ("the") is right
    here where there is none, as in `answer_f1`, and wrong in the script's search.

    Args:
      questions: at least one, labelled.
      predicted: an answer to each by its id, even where none is likely; "" if there is none.
      no_answer_scores: by id, finite; more where no answer is likelier.
    """
    order = sorted(questions, key=lambda q: no_answer_scores[q.id])
    levels = np.array([no_answer_scores[q.id] for q in order], np.float64)
    gains = np.array(
        [
            answer_f1(predicted[q.id], [a.text for a in q.answers], "possible") - (not q.possible)
            for q in order
        ]
    )
    # Thresholds between questions of different scores: the first i are answered.
    answered = np.flatnonzero(np.append(levels[1:] > levels[:-1], True)) + 1
    refused = float(sum(not q.possible for q in order))
    totals = refused + np.append(0.0, np.cumsum(gains)[answered - 1])
    best = int(np.argmax(totals))
    if best:
        return float(levels[answered[best - 1] - 1])
    return 0.0 if levels[0] > 0 else float(np.nextafter(levels[0], -np.inf))
