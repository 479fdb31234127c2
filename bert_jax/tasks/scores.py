"""Scores of what is said of examples against the truth, all in [0, 1] or [-1, 1], more is better.

Those of GLUE (Wang et al. 2019), and how its tasks are named here. `f1` is of label 1: where its
name does not sort last, name both in `task.labels`.

| task      | shape    | score                                        |
|-----------|----------|----------------------------------------------|
| CoLA      | classify | matthews                                     |
| SST-2     | classify | accuracy                                     |
| MRPC      | pair     | f1 and accuracy (label 1: "equivalent")      |
| QQP       | pair     | f1 and accuracy (label 1: "duplicate")       |
| STS-B     | regress  | pearson and spearman                         |
| MNLI      | pair     | accuracy, on matched and mismatched examples |
| QNLI      | pair     | accuracy                                     |
| RTE, WNLI | pair     | accuracy                                     |

Spans are scored by `squad_scores`.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Tags = Sequence[Sequence[str]]


def score(name: str, truth: Any, said: Any) -> float:
    """The score of this name, of those that `finetuning.SCORES` has for other shapes than spans.

    Args:
      name: `accuracy`, `f1`, `macro_f1`, `micro_f1`, `matthews`, `pearson`, `spearman` or
        `entity_f1`.
      truth: int[N] numbers of labels; float[N] for a regression; for tags N sequences of them.
      said: the same of a model.
    """
    return _SCORES[name](truth, said)


def accuracy(truth: Any, said: Any) -> float:
    """The share of examples whose label is right; of tagged sentences the share of words.

    Args:
      truth: int[N], or N sequences of tags.
      said: the same, of the same lengths.
    """
    _require_same_length(truth, said)
    if isinstance(truth[0], tuple | list):
        _require_same_lengths(truth, said)
        truth = [tag for tags in truth for tag in tags]
        said = [tag for tags in said for tag in tags]
    return float(np.mean(np.asarray(truth) == np.asarray(said)))


def f1(truth: Any, said: Any) -> float:
    """F1 of label 1: 2 tp / (2 tp + fp + fn); 0 if label 1 is neither there nor said.

    Args:
      truth: int[N], 0 or 1.
      said: int[N], the same.
    """
    hits, sizes = _by_label(truth, said)
    return _ratio(2 * hits[1], sizes[1])


def macro_f1(truth: Any, said: Any) -> float:
    """The mean of F1 over the labels that are there or said, as scikit-learn takes them.

    Args:
      truth: int[N].
      said: int[N].
    """
    hits, sizes = _by_label(truth, said)
    return float(np.mean([_ratio(2 * hits[label], size) for label, size in sizes.items()]))


def micro_f1(truth: Any, said: Any) -> float:
    """F1 of tp, fp and fn summed over all labels. With one label an example, it is the accuracy.

    Args:
      truth: int[N].
      said: int[N].
    """
    hits, sizes = _by_label(truth, said)
    return _ratio(2 * sum(hits.values()), sum(sizes.values()))


def matthews(truth: Any, said: Any) -> float:
    """Matthews' correlation, for more than two labels as Gorodkin 2004 (R_K) gives it.

    With N examples, c of them right, t_k of label k and p_k said to be:
    (c N - sum t_k p_k) / sqrt((N^2 - sum t_k^2) (N^2 - sum p_k^2)); 0 if one label alone is there
    or said.

    Args:
      truth: int[N].
      said: int[N].
    """
    truth, said = _labels(truth), _labels(said)
    _require_same_length(truth, said)
    there, told = Counter(truth), Counter(said)
    count = len(truth)
    right = sum(a == b for a, b in zip(truth, said, strict=True))
    # Whole numbers of any size, so that nothing is rounded before the end.
    covariance = count * right - sum(there[label] * told[label] for label in there)
    spread_there = count**2 - sum(n**2 for n in there.values())
    spread_told = count**2 - sum(n**2 for n in told.values())
    if not spread_there * spread_told:
        return 0.0
    return covariance / float(spread_there * spread_told) ** 0.5


def pearson(truth: Any, said: Any) -> float:
    """Pearson's correlation; 0 if either is constant, nan if a number is not finite.

    Args:
      truth: float[N].
      said: float[N].
    """
    truth, said = np.asarray(truth, np.float64), np.asarray(said, np.float64)
    _require_same_length(truth, said)
    if not (np.isfinite(truth).all() and np.isfinite(said).all()):
        return float("nan")
    # Not by their spread: the mean of equal numbers may differ from them by rounding.
    if truth.min() == truth.max() or said.min() == said.max():
        return 0.0
    return float(np.clip(np.dot(_unit(truth), _unit(said)), -1.0, 1.0))


def spearman(truth: Any, said: Any) -> float:
    """Spearman's correlation: Pearson's of ranks, equal numbers sharing the mean of theirs.

    0 if either is constant, nan if a number is not finite.

    Args:
      truth: float[N].
      said: float[N].
    """
    truth, said = np.asarray(truth, np.float64), np.asarray(said, np.float64)
    if not (np.isfinite(truth).all() and np.isfinite(said).all()):
        return float("nan")
    return pearson(_ranks(truth), _ranks(said))


@dataclass(frozen=True)
class EntityScores:
    """Scores of the entities of one type, or of all.

    Attributes:
      precision: the share of entities said that are there; 0 if none is said.
      recall: the share of entities there that are said; 0 if none is there.
      f1: their harmonic mean; 0 if nothing is right.
      support: entities that are there.
    """

    precision: float
    recall: float
    f1: float
    support: int


def entities(tags: Sequence[str]) -> list[tuple[str, int, int]]:
    """Entities in a sentence's tags: type, first word, last word.

    As the script conlleval of CoNLL-2000 reads them, and seqeval by default: an entity begins at
    B-TYPE, and at I-TYPE if the word before is outside or of another type; it goes on over I-TYPE
    of its own type. So I- without B- is an entity, B- always begins another, and a change of type
    inside ends one and begins the next. A type may be empty.

    Args:
      tags: of its words, each O, B-TYPE or I-TYPE.
    """
    found: list[tuple[str, int, int]] = []
    before = "O"
    for place, tag in enumerate(tags):
        if tag != "O":
            kind = tag[2:]
            if tag[0] == "I" and before != "O" and before[2:] == kind:
                found[-1] = (kind, found[-1][1], place)
            else:
                found.append((kind, place, place))
        before = tag
    return found


def entity_scores(truth: Tags, said: Tags) -> tuple[EntityScores, dict[str, EntityScores]]:
    """Scores of all entities together (micro-averaged), and of each type.

    An entity said is right if one of its type is there with the same first and last word.

    Args:
      truth: the tags of N sentences.
      said: the same, as long sentence by sentence.
    """
    _require_same_lengths(truth, said)
    hits: Counter[str] = Counter()
    there: Counter[str] = Counter()
    told: Counter[str] = Counter()
    for true_tags, said_tags in zip(truth, said, strict=True):
        true_entities, said_entities = set(entities(true_tags)), set(entities(said_tags))
        hits.update(kind for kind, _, _ in true_entities & said_entities)
        there.update(kind for kind, _, _ in true_entities)
        told.update(kind for kind, _, _ in said_entities)
    by_type = {
        kind: _entity_scores(hits[kind], there[kind], told[kind])
        for kind in sorted(there.keys() | told.keys())
    }
    return _entity_scores(hits.total(), there.total(), told.total()), by_type


def entity_f1(truth: Tags, said: Tags) -> float:
    """F1 of all entities together, as `entity_scores` counts them."""
    return entity_scores(truth, said)[0].f1


_SCORES = {
    "accuracy": accuracy,
    "f1": f1,
    "macro_f1": macro_f1,
    "micro_f1": micro_f1,
    "matthews": matthews,
    "pearson": pearson,
    "spearman": spearman,
    "entity_f1": entity_f1,
}


def _entity_scores(hits: int, there: int, told: int) -> EntityScores:
    return EntityScores(
        precision=_ratio(hits, told),
        recall=_ratio(hits, there),
        f1=_ratio(2 * hits, there + told),
        support=there,
    )


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def _labels(values: Any) -> list[int]:
    return np.asarray(values).tolist()


def _by_label(truth: Any, said: Any) -> tuple[Counter[int], Counter[int]]:
    """By label: how often it is rightly said (tp), and how often there or said (2 tp + fp + fn)."""
    truth, said = _labels(truth), _labels(said)
    _require_same_length(truth, said)
    sizes = Counter(truth) + Counter(said)
    hits = Counter(a for a, b in zip(truth, said, strict=True) if a == b)
    return hits, sizes


def _unit(values: np.ndarray) -> np.ndarray:
    """float64[N] less its mean, of length 1; scaled first, since squares over- and underflow."""
    values = values / np.abs(values).max()
    values = values - values.mean()
    values = values / np.abs(values).max()
    return values / np.linalg.norm(values)


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


def _require_same_length(truth: Sequence[Any], said: Sequence[Any]) -> None:
    if len(truth) != len(said) or not len(truth):
        raise ValueError(f"{len(truth)} examples, but {len(said)} are said")


def _require_same_lengths(truth: Tags, said: Tags) -> None:
    _require_same_length(truth, said)
    for number, (a, b) in enumerate(zip(truth, said, strict=True)):
        if len(a) != len(b):
            raise ValueError(f"sentence {number}: {len(a)} words, but {len(b)} tags are said")
