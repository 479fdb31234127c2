"""What a model gets wrong of a task's examples, as a line of bounded length that a report shows."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.config import Task
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Question, Sentence, Tagged

Answer = dict[str, Any]

# Mistakes that are kept, and how much of the text of each.
_WORST = 20
_CHARACTERS = 400
_WORDS = 60
# Labels that a table names one by one; types of entities; points of a regression.
_LABELS = 12
_TYPES = 30
_POINTS = 500
# What stands for the labels that a table does not name.
OTHERS = "(others)"


def of_answers(
    task: Task,
    labels: Sequence[str],
    answers: Sequence[Answer],
    examples: Sequence[Any],
    no_answer_threshold: float | None = None,
) -> dict[str, Any]:
    """Returns what is wrong with answers to labelled examples, as JSON.

    Args:
      task: whose examples they are.
      labels: of the task, in their order.
      answers: as `TaskKind.answers` gives them.
      examples: as many, labelled.
      no_answer_threshold: of spans, above which `no_answer` is the answer; None: it never is.

    Returns:
      `worst`: the worst mistakes, the worst first, with their `place`. Of labels `confusion`
      (counts by truth and prediction); of tags `types`; of numbers `points` and
      `mean_absolute_error`; of spans `outcomes`. `wrong`: how many examples, of tags words, have a
      wrong answer; of numbers and of texts there is none.
    """
    if task.kind == "regress":
        return _of_numbers(answers, examples)
    if task.kind == "tag":
        return _of_tags(task, answers, examples)
    if task.kind == "generate":
        return _of_texts(answers, examples)
    if task.kind == "span":
        return _of_spans(task, answers, examples, no_answer_threshold)
    return _of_labels(labels, answers, examples)


# --- labels -----------------------------------------------------------------------------------


def _of_labels(
    labels: Sequence[str], answers: Sequence[Answer], examples: Sequence[Sentence]
) -> dict[str, Any]:
    truth = [str(example.label) for example in examples]
    predicted = [answer["label"] for answer in answers]
    of_truth = [a["probabilities"][label] for a, label in zip(answers, truth, strict=True)]
    wrong = [int(i) for i in np.argsort(of_truth, kind="stable") if truth[i] != predicted[i]]
    worst = [
        _texts(examples[i])
        | {
            "truth": truth[i],
            "predicted": predicted[i],
            "truth_probability": of_truth[i],
            "probability": answers[i]["probabilities"][predicted[i]],
        }
        for i in wrong[:_WORST]
    ]
    return {
        "wrong": len(wrong),
        "worst": worst,
        "confusion": _confusion(labels, truth, predicted),
    }


def _confusion(
    labels: Sequence[str], truth: Sequence[str], predicted: Sequence[str]
) -> dict[str, Any]:
    """Returns counts, a row for each true label; the rarest of many labels are counted as one."""
    commonest = collections.Counter(truth)
    named = list(labels)
    if len(named) > _LABELS:
        kept = set(sorted(labels, key=lambda name: -commonest[name])[: _LABELS - 1])
        named = [*(name for name in labels if name in kept), OTHERS]
    number = {name: i for i, name in enumerate(named)}
    counts = np.zeros((len(named), len(named)), int)
    for a, b in zip(truth, predicted, strict=True):
        counts[number.get(a, len(named) - 1), number.get(b, len(named) - 1)] += 1
    return {"labels": named, "counts": counts.tolist()}


# --- numbers ----------------------------------------------------------------------------------


def _of_numbers(answers: Sequence[Answer], examples: Sequence[Sentence]) -> dict[str, Any]:
    truth = np.array([example.label for example in examples], np.float64)
    value = np.array([answer["value"] for answer in answers], np.float64)
    off = np.abs(value - truth)
    some = np.unique(np.linspace(0, len(truth) - 1, min(_POINTS, len(truth))).astype(int))
    return {
        "worst": [
            _texts(examples[i]) | {"truth": float(truth[i]), "predicted": float(value[i])}
            for i in np.argsort(-off, kind="stable")[:_WORST]
        ],
        "mean_absolute_error": float(off.mean()),
        "points": [[float(truth[i]), float(value[i])] for i in some],
    }


# --- tags -------------------------------------------------------------------------------------


def _of_tags(task: Task, answers: Sequence[Answer], examples: Sequence[Tagged]) -> dict[str, Any]:
    truth = [list(example.tags or ()) for example in examples]
    predicted = [answer["tags"] for answer in answers]
    wrong = [
        [i for i, (a, b) in enumerate(zip(*both, strict=True)) if a != b]
        for both in zip(truth, predicted, strict=True)
    ]
    order = sorted((i for i, places in enumerate(wrong) if places), key=lambda i: -len(wrong[i]))
    worst = []
    for i in order[:_WORST]:
        first = max(min(wrong[i][0] - 5, len(truth[i]) - _WORDS), 0)
        part = slice(first, first + _WORDS)
        words = [word[:_CHARACTERS] for word in examples[i].words[part]]
        tags = {"truth": truth[i][part], "predicted": predicted[i][part]}
        worst.append({"place": examples[i].place, "words": words, **tags})
    of_type = scores.entities if task.main_score == "entity_f1" else _as_entities
    return {
        "wrong": sum(map(len, wrong)),
        "worst": worst,
        "types": _types([of_type(tags) for tags in truth], [of_type(tags) for tags in predicted]),
    }


def _as_entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    return [(tag, place, place) for place, tag in enumerate(tags)]


def _types(
    truth: Sequence[Sequence[tuple[str, int, int]]],
    predicted: Sequence[Sequence[tuple[str, int, int]]],
) -> list[dict[str, Any]]:
    """Returns of each type how many there are, how many are predicted, and how many of these are
    there; the commonest first.
    """
    there, given, hits = (collections.Counter[str]() for _ in range(3))
    for ours, theirs in zip(truth, predicted, strict=True):
        there.update(kind for kind, *_ in ours)
        given.update(kind for kind, *_ in theirs)
        hits.update(kind for kind, *_ in set(ours) & set(theirs))
    types = sorted(there | given, key=lambda kind: (-there[kind], kind))[:_TYPES]
    return [{"type": t, "there": there[t], "predicted": given[t], "hits": hits[t]} for t in types]


# --- texts ------------------------------------------------------------------------------------


def _of_texts(answers: Sequence[Answer], examples: Sequence[Sentence]) -> dict[str, Any]:
    pairs = [(str(e.label), a["generated"]) for e, a in zip(examples, answers, strict=True)]
    by_text = [scores.chrf(truth, written) for truth, written in pairs]
    worst = [
        _texts(examples[i])
        | {
            "truth": pairs[i][0][:_CHARACTERS],
            "predicted": pairs[i][1][:_CHARACTERS],
            "chrf": by_text[i],
        }
        for i in np.argsort(by_text, kind="stable")[:_WORST]
    ]
    return {"worst": worst}


# --- spans ------------------------------------------------------------------------------------


def _of_spans(
    task: Task,
    answers: Sequence[Answer],
    examples: Sequence[Question],
    no_answer_threshold: float | None,
) -> dict[str, Any]:
    outcomes = collections.Counter[str]()
    mistakes = []
    for answer, example in zip(answers, examples, strict=True):
        text = answer["answer"]
        if no_answer_threshold is not None and answer["no_answer"] > no_answer_threshold:
            text = ""
        golds = [gold.text for gold in example.answers]
        f1 = scores.answer_f1(text, golds, task.no_answer)
        outcome = _outcome(text, golds, f1, scores.exact_match(text, golds, task.no_answer))
        outcomes[outcome] += 1
        if outcome not in ("right", "right to give none"):
            # The surest of those that share the fewest words come first.
            mistakes.append(
                (f1, -answer["best"][0]["score"], len(mistakes), text, outcome, example)
            )
    worst = [
        {
            "place": example.place,
            "question": example.question[:_CHARACTERS],
            "context": _around(example),
            "truth": [gold.text[:_CHARACTERS] for gold in example.answers[:3]],
            "predicted": text[:_CHARACTERS],
            "f1": f1,
            "outcome": outcome,
        }
        for f1, _, _, text, outcome, example in sorted(mistakes)[:_WORST]
    ]
    return {"wrong": len(mistakes), "worst": worst, "outcomes": dict(outcomes)}


def _outcome(text: str, golds: Sequence[str], f1: float, exact: float) -> str:
    if exact:
        return "right" if golds else "right to give none"
    if not golds:
        return "an answer where there is none"
    if not text:
        return "none where there is an answer"
    return "partly right" if f1 else "elsewhere"


def _around(example: Question) -> str:
    """Returns the part of a context around its first answer, or its beginning."""
    at = example.answers[0].start if example.answers else 0
    start = max(min(at - _CHARACTERS // 2, len(example.context) - _CHARACTERS), 0)
    end = start + _CHARACTERS
    before, after = "..." if start else "", "..." if end < len(example.context) else ""
    return f"{before}{example.context[start:end]}{after}"


def _texts(example: Sentence) -> dict[str, Any]:
    return {"place": example.place, "texts": [text[:_CHARACTERS] for text in example.texts]}


def guess(task: Task, labels: Sequence[str], examples: Sequence[Any]) -> tuple[str, float] | None:
    """Returns the best answer that reads no text, in words, and its main score.

    One label or tag for all examples, or no answer to any question; None where that scores
    nothing: of numbers, of entities, of texts, and where each question has an answer.

    Args:
      task: whose examples they are.
      labels: of the task, in their order.
      examples: labelled.
    """
    if task.kind == "span" and task.no_answer == "possible":
        nothing = {example.id: "" for example in examples}
        by_name = scores.span_scores(examples, nothing, "possible")
        return "never an answer", by_name[task.main_score]
    if task.kind in ("regress", "span", "generate") or task.main_score == "entity_f1":
        return None
    truth = np.array([labels.index(name) for example in examples for name in _names(example)])
    by_label = {
        name: scores.score(task.main_score, truth, np.full_like(truth, number))
        for number, name in enumerate(labels)
    }
    best = max(labels, key=lambda name: by_label[name])
    return f"always {best!r}", by_label[best]


def _names(example: Sentence | Tagged) -> tuple[str, ...]:
    return (example.tags or ()) if isinstance(example, Tagged) else (str(example.label),)
