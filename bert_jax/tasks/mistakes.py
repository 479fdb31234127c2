"""What a model gets wrong of a task's examples, in a few lines, and what needs no model at all."""

import collections
from collections.abc import Sequence
from typing import Any

import numpy as np

from bert_jax.config import Task
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Example, names_of, texts_of
from bert_jax.tasks.rows import Answer, TaskKind

# Mistakes and confusions that are kept, and how many characters of a text.
_MOST, _CHARACTERS = 20, 400


def of_answers(
    kind: TaskKind, labels: Sequence[str], answers: Sequence[Answer], examples: Sequence[Example]
) -> dict[str, Any]:
    """Returns what is wrong with answers to labelled examples, as JSON of bounded length.

    Returns:
      `wrong`: how many are not right. `worst`: of these the furthest off, the furthest first, with
      `place`, `texts`, `truth`, `predicted` and, of labels, `probability`, that of the prediction.
      Of labels and tags `confusions`: the commonest [truth, predicted, how often].
    """
    judged = [kind.judged(answer, e) for answer, e in zip(answers, examples, strict=True)]
    wrong = [i for i in np.argsort([-one.off for one in judged], kind="stable") if judged[i].off]
    worst = []
    for i in wrong[:_MOST]:
        truth, predicted = (" ".join(names)[:_CHARACTERS] for names in judged[i][:2])
        mistake = {"place": examples[i].place, "truth": truth, "predicted": predicted}
        if "probabilities" in answers[i]:
            mistake["probability"] = answers[i]["probabilities"][answers[i]["label"]]
        worst.append(mistake | {"texts": [t[:_CHARACTERS] for t in texts_of(examples[i])]})
    line = {"wrong": len(wrong), "worst": worst}
    if labels:
        pairs = (zip(*judged[i][:2], strict=True) for i in wrong)
        confusions = collections.Counter(pair for of_one in pairs for pair in of_one)
        line["confusions"] = [[*pair, count] for pair, count in confusions.most_common(_MOST)]
    return line


def guess(task: Task, labels: Sequence[str], examples: Sequence[Any]) -> tuple[str, float] | None:
    """Returns the best answer that reads no text, in words, and its main score.

    One label or tag for all examples, or no answer to any question; None where that scores
    nothing: of numbers, of entities, of texts, and where each question has an answer.
    """
    if task.kind == "span" and task.no_answer == "possible":
        nothing = {example.id: "" for example in examples}
        by_name = scores.span_scores(examples, nothing, "possible")
        return "never an answer", by_name[task.main_score]
    if not labels or task.main_score == "entity_f1":
        return None
    truth = np.array([labels.index(name) for example in examples for name in names_of(example)])
    by_label = {
        name: scores.score(task.main_score, truth, np.full_like(truth, number))
        for number, name in enumerate(labels)
    }
    best = max(labels, key=lambda name: by_label[name])
    return f"always {best!r}", by_label[best]
