"""Scores of predictions, in [0, 1] or [-1, 1], higher is better; also warnings about the data.

`f1` is the F1 of the second label. Labels are sorted unless `task.labels` gives their order.

scikit-learn and SciPy score labels and numbers; sacreBLEU (the [generate] extra) scores generated
texts. They are imported at first use. Tags are scored by the F1 of entities as in CoNLL; spans as
in SQuAD 1.1 (Rajpurkar et al. 2016) and 2.0 (Rajpurkar et al. 2018), but as fractions, not percent.
"""

import collections
import re
import string
import unicodedata
import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from bert_jax.config import Task
from bert_jax.tasks.examples import NoAnswer, Question, text_key

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(name: str, truth: Any, predicted: Any) -> float:
    """Returns a score of predicted labels or numbers.

    Args:
      name: `accuracy`; `f1`, of label 1; `macro_f1`, the mean over the labels in either array;
        `micro_f1`; `matthews`, for more than two labels Gorodkin's R_K; `pearson`; `spearman`.
        A score of 0/0 is 0, such as the F1 of a label in neither array, or a correlation with a
        constant.
      truth: int[N] label numbers; float[N] for `pearson` and `spearman`, which are nan if a number
        is not finite.
      predicted: a model's predictions, in the same form.
    """
    if name in ("pearson", "spearman"):
        return _correlation(name, truth, predicted)
    from sklearn import metrics

    if name == "accuracy":
        return float(metrics.accuracy_score(truth, predicted))
    if name == "matthews":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warns if all labels are equal
            return float(metrics.matthews_corrcoef(truth, predicted))
    labels, average = ([1], "macro") if name == "f1" else (None, name.removesuffix("_f1"))
    options: Any = {"labels": labels, "average": average, "zero_division": 0.0}
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
        warnings.simplefilter("ignore")  # of nearly constant numbers
        return float(correlate(truth, predicted).statistic)


# --- texts --------------------------------------------------------------------------------------


def text_scores(truth: Sequence[str], generated: Sequence[str]) -> dict[str, float]:
    """Returns chrF2 (Popović 2015) and BLEU (Papineni et al. 2002) of a corpus, in [0, 1].

    Uses the default settings of sacreBLEU (Post 2018): characters without blanks for `chrf`, words
    as split by the script mteval-v13a for `bleu`, and case matters (`case:mixed` in its signature).
    """
    import sacrebleu

    return {
        "chrf": sacrebleu.corpus_chrf(list(generated), [list(truth)]).score / 100,
        "bleu": sacrebleu.corpus_bleu(list(generated), [list(truth)]).score / 100,
    }


# --- tags ---------------------------------------------------------------------------------------


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Returns the entities in a sentence's tags: type, first word, last word.

    As in the script conlleval of CoNLL-2000, and by default in seqeval: an entity begins at B-TYPE,
    and at I-TYPE if the previous word is outside or has another type; it continues over I-TYPE of
    its own type. So I- without B- is an entity, B- always begins an entity, and a change of type
    ends one and begins the next. Tags are O, B-TYPE or I-TYPE; a type may be empty.
    """
    spans: list[tuple[str, int, int]] = []
    previous = "O"
    for word, tag in enumerate(tags):
        if tag != "O":
            kind = tag[2:]
            if tag[0] == "I" and previous != "O" and previous[2:] == kind:
                spans[-1] = (kind, spans[-1][1], word)
            else:
                spans.append((kind, word, word))
        previous = tag
    return spans


def entity_f1(truth: Sequence[Sequence[str]], predicted: Sequence[Sequence[str]]) -> float:
    """Returns F1 of the entities of all sentences together (micro-averaged); 0 if there are none.

    A predicted entity is right if a true one has the same type, first word and last word.
    """
    hits = total = 0
    for true_tags, predicted_tags in zip(truth, predicted, strict=True):
        true_entities = set(entities(true_tags))
        predicted_entities = set(entities(predicted_tags))
        hits += len(true_entities & predicted_entities)
        total += len(true_entities) + len(predicted_entities)
    return 2 * hits / total if total else 0.0


# --- spans --------------------------------------------------------------------------------------


def normalize_answer(text: str) -> str:
    """Returns an answer in lower case without ASCII punctuation, then without articles.

    Words are separated by one blank. Punctuation is removed without leaving a blank: `U.S.` becomes
    `us`, and `well-known` one word. A Chinese answer is one word, so its F1 is its exact match.
    """
    text = text.lower().translate(_NO_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(predicted: str, answers: Sequence[str], no_answer: NoAnswer) -> float:
    """Returns 1 if a predicted answer ("" for none) equals a reference, both normalized, else 0.

    `no_answer` is `never` for the rules of SQuAD 1.1, and `possible` for those of 2.0.
    """
    return max(
        float(normalize_answer(predicted) == normalize_answer(a))
        for a in _references(answers, no_answer)
    )


def answer_f1(predicted: str, answers: Sequence[str], no_answer: NoAnswer) -> float:
    """Returns the F1 of the words of a predicted answer and of the reference that is most similar.

    Words are compared as multisets. If a normalized text is empty, SQuAD 1.1 counts
    0; SQuAD 2.0 counts 1 if both are empty, else 0. The arguments are those of `exact_match`.
    """

    def f1(answer: str) -> float:
        words = collections.Counter(normalize_answer(predicted).split())
        true_words = collections.Counter(normalize_answer(answer).split())
        if not words or not true_words:
            return float(no_answer == "possible" and words == true_words)
        return 2 * (words & true_words).total() / (words.total() + true_words.total())

    return max(f1(answer) for answer in _references(answers, no_answer))


def _references(answers: Sequence[str], no_answer: NoAnswer) -> Sequence[str]:
    """Returns the references; in SQuAD 2.0 those with words or, if there are none, ""."""
    if no_answer == "possible":
        return [answer for answer in answers if normalize_answer(answer)] or [""]
    return answers


def span_scores(
    questions: Sequence[Question], predicted: Mapping[str, str], no_answer: NoAnswer
) -> dict[str, float]:
    """Returns the means of `f1` and `exact_match` over labelled questions, at least one.

    `predicted` has the answer to each question by its id, "" for none.
    """
    arguments = [(predicted[q.id], [a.text for a in q.answers], no_answer) for q in questions]
    return {
        "f1": float(np.mean([answer_f1(*args) for args in arguments])),
        "exact_match": float(np.mean([exact_match(*args) for args in arguments])),
    }


def best_threshold(
    questions: Sequence[Question],
    predicted: Mapping[str, str],
    no_answer_scores: Mapping[str, float],
) -> float:
    """Returns the threshold with the best mean F1 of SQuAD 2.0, the lowest of equally good ones.

    The answer to a question is none if its score for no answer is above the threshold. This is
    best_f1_thresh of the official script, with three differences. Questions with equal scores fall
    on one side of the threshold here; the script may separate them. If it is best to answer no
    question, the script returns 0, which some scores may not exceed; if so, the threshold here is
    just below the lowest score. A predicted answer that is empty when
    normalized ("the") is right here for a question without answer, as in `answer_f1`, but wrong in
    the script's search.

    Args:
      questions: at least one, labelled.
      predicted: the best answer to each question by its id, even if it probably has none.
      no_answer_scores: by id, finite; the higher, the more probably the question has no answer.
    """
    order = sorted(questions, key=lambda q: no_answer_scores[q.id])
    sorted_scores = np.array([no_answer_scores[q.id] for q in order], np.float64)
    f1 = [answer_f1(predicted[q.id], [a.text for a in q.answers], "possible") for q in order]
    without_answer = np.array([not q.has_answer for q in order], np.float64)
    gains = np.array(f1) - without_answer  # of answering a question instead of not
    # The possible numbers of answered questions: a threshold cannot separate equal scores.
    answered = np.flatnonzero(np.append(sorted_scores[1:] > sorted_scores[:-1], True)) + 1
    totals = without_answer.sum() + np.append(0.0, np.cumsum(gains)[answered - 1])
    best = int(np.argmax(totals))
    if best:
        return float(sorted_scores[answered[best - 1] - 1])
    return 0.0 if sorted_scores[0] > 0 else float(np.nextafter(sorted_scores[0], -np.inf))


# --- the data -----------------------------------------------------------------------------------


def data_warnings(
    task: Task,
    labels: Sequence[str],
    examples: Mapping[str, Sequence[Any]],
    train_keys: Collection[int],
) -> list[str]:
    """Returns warnings about examples that make scores misleading.

    `examples` has the labelled ones by split: `validation`, and `train` if the task learns labels.
    `train_keys` has the `text_key` of each training example.
    """
    warnings_, held_out = [], examples["validation"]
    if shared := [example for example in held_out if text_key(example) in train_keys]:
        warnings_.append(
            f"{len(shared):,} of {len(held_out):,} validation examples have the text of a training "
            f"example (the first: {shared[0].location}); scores of them say little about new texts"
        )
    must_agree = task.spec.implementing_class.duplicates_must_agree
    for name, split in examples.items() if must_agree else ():
        truths: dict[int, Any] = {}  # by text, its first label
        ambiguous: dict[int, str] = {}  # by text, the location of another label
        for example in split:
            key, truth = text_key(example), example.label_names or example.label
            if truths.setdefault(key, truth) != truth:
                ambiguous.setdefault(key, example.location)
        if ambiguous:
            warnings_.append(
                f"{len(ambiguous):,} of {len(truths):,} texts of {name} have several "
                f"{'labels' if labels else 'numbers'} (the first: {next(iter(ambiguous.values()))})"
            )
    variants: dict[str, list[str]] = collections.defaultdict(list)
    for label in labels:
        variants[unicodedata.normalize("NFKC", label).casefold()].append(label)
    for names in variants.values():
        if len(names) > 1:
            distinct = {unicodedata.normalize("NFC", name) for name in names}
            # `ascii` tells apart names that look the same.
            shown = " and ".join(map(ascii if len(distinct) < len(names) else repr, names))
            warnings_.append(
                f"the labels {shown} differ only in case or in Unicode normalization; if they are "
                "one label, use one spelling in all rows"
            )
    return warnings_
