"""Exact match and F1 of SQuAD 1.1 (Rajpurkar et al. 2016) and SQuAD 2.0 (Rajpurkar et al. 2018).

All are shares in [0, 1]; the official scripts give them times 100.

Words are what white space parts. A Chinese answer is one word, so that its F1 is its exact match.
"""

import collections
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bert_jax.tasks.examples import NoAnswer, Question

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalized(text: str) -> str:
    """What of a text is compared: lower case, without ASCII punctuation and articles.

    In this order; then white space is one blank between words. Punctuation goes without leaving a
    blank: `U.S.` is `us`, and `well-known` one word.
    """
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(said: str, answers: Sequence[str], no_answer: NoAnswer) -> float:
    """1 if what is said equals an answer, both normalized, else 0.

    Args:
      said: an answer; "" for none.
      answers: those that people gave; with `possible` there may be none.
      no_answer: `never` as SQuAD 1.1 counts, `possible` as SQuAD 2.0 does.
    """
    return max(float(normalized(said) == normalized(a)) for a in _golds(answers, no_answer))


def f1(said: str, answers: Sequence[str], no_answer: NoAnswer) -> float:
    """F1 of the words that what is said shares with an answer, of the answers the most.

    A word counts as often as both have it. If no word is left of one of them, SQuAD 2.0 counts 1 if
    none is left of both, else 0, and SQuAD 1.1 counts 0 always.

    Args:
      said: an answer; "" for none.
      answers: those that people gave; with `possible` there may be none.
      no_answer: `never` as SQuAD 1.1 counts, `possible` as SQuAD 2.0 does.
    """
    return max(_f1(said, answer, no_answer) for answer in _golds(answers, no_answer))


def _golds(answers: Sequence[str], no_answer: NoAnswer) -> Sequence[str]:
    """SQuAD 2.0 leaves out answers of which nothing is left; without any, "" is the right one."""
    if no_answer == "possible":
        return [answer for answer in answers if normalized(answer)] or [""]
    return answers


def _f1(said: str, answer: str, no_answer: NoAnswer) -> float:
    said_words = collections.Counter(normalized(said).split())
    true_words = collections.Counter(normalized(answer).split())
    if not said_words or not true_words:
        return float(no_answer == "possible" and said_words == true_words)
    shared = (said_words & true_words).total()
    return 2 * shared / (said_words.total() + true_words.total())


@dataclass(frozen=True)
class SpanScores:
    """Means over questions.

    Attributes:
      exact_match, f1: as the functions of these names.
      count: how many questions.
    """

    exact_match: float
    f1: float
    count: int


def scores(
    questions: Sequence[Question], said: Mapping[str, str], no_answer: NoAnswer
) -> dict[str, SpanScores]:
    """The scores of `all` questions, and of those that have an `answer` and have `none`.

    Args:
      questions: at least one, labelled.
      said: an answer to each by its id; "" for none.
      no_answer: as in `f1`.

    Returns:
      Three entries, or `all` alone if no question is without an answer.
    """
    groups = {"all": list(questions)}
    if any(not q.possible for q in questions):
        groups["answer"] = [q for q in questions if q.possible]
        groups["none"] = [q for q in questions if not q.possible]
    return {
        name: SpanScores(
            exact_match=float(np.mean(_exact_matches(group, said, no_answer))),
            f1=float(np.mean(_f1s(group, said, no_answer))),
            count=len(group),
        )
        for name, group in groups.items()
        if group
    }


@dataclass(frozen=True)
class Threshold:
    """Where to stop answering, and the mean score then.

    Attributes:
      value: a question is given no answer if its score for having none is greater.
      score: the mean of exact match or F1 over all questions.
    """

    value: float
    score: float


def best_thresholds(
    questions: Sequence[Question], said: Mapping[str, str], no_answer_scores: Mapping[str, float]
) -> dict[str, Threshold]:
    """The thresholds under which SQuAD 2.0's `exact_match` and `f1` are best, the lowest of equals.

    As the official script has it (best_exact_thresh, best_f1_thresh), but for three cases.
    Questions with equal scores fall on one side here, while the script may count a threshold that
    parts them. Where no answer at all is best, the script gives 0, which is right for
    probabilities alone; here it is 0 if all scores are positive, else just below the least. And
    to say "the" where there is no answer is right here, as in `f1`, and wrong in the script's
    search.

    Args:
      questions: at least one, labelled.
      said: an answer to each by its id, even where none is likely; "" if there is none.
      no_answer_scores: by id, finite; more where no answer is likelier.
    """
    order = sorted(questions, key=lambda q: no_answer_scores[q.id])
    levels = np.array([no_answer_scores[q.id] for q in order], np.float64)
    refused = np.array([float(not q.possible) for q in order])
    lowest = 0.0 if levels[0] > 0 else float(np.nextafter(levels[0], -np.inf))
    # Thresholds between questions of different scores: the first i are answered.
    answered = np.flatnonzero(np.append(levels[1:] > levels[:-1], True)) + 1
    found = {}
    for name, one_by_one in (("exact_match", _exact_matches), ("f1", _f1s)):
        gains = np.array(one_by_one(order, said, "possible")) - refused
        totals = refused.sum() + np.append(0.0, np.cumsum(gains)[answered - 1])
        best = int(np.argmax(totals))
        value = float(levels[answered[best - 1] - 1]) if best else lowest
        found[name] = Threshold(value, float(totals[best] / len(order)))
    return found


def _exact_matches(
    questions: Sequence[Question], said: Mapping[str, str], no_answer: NoAnswer
) -> list[float]:
    return [exact_match(said[q.id], [a.text for a in q.answers], no_answer) for q in questions]


def _f1s(
    questions: Sequence[Question], said: Mapping[str, str], no_answer: NoAnswer
) -> list[float]:
    return [f1(said[q.id], [a.text for a in q.answers], no_answer) for q in questions]
