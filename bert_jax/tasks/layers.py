"""What each layer of an encoder knows, and where its heads look: `bert-jax layers`.

A linear layer reads a task off the embeddings and off each layer, as probes do (`tasks.probes`), on
the encoder as it is (Jawahar et al. 2019, Tenney et al. 2019). Of a similarity nothing is learned:
it is the cosine of the means of both texts' pieces. How long texts are is asked in any case, which
needs no labels and is the surface task of Conneau et al. 2018.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from bert_jax.config import Task
from bert_jax.errors import InputError, prefix_errors
from bert_jax.pretraining.loaded import Loaded
from bert_jax.tasks import probes as probes_lib
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Example, Sentence, display_texts
from bert_jax.tasks.probes import Probe, Probes, drawn

FORMAT_VERSION = 1
_KINDS = ("classify", "pair", "tag", "regress")
_WHERE = "--tasks"
_LENGTH = "length"
# Lengths are put into so many bins, as full as each other.
_BINS = 6


def score_layers(
    paths: Sequence[str], trained: Loaded, say: Callable[[str], None]
) -> dict[str, Any]:
    """Reads tasks off each layer of a run's checkpoint or a base, on all devices.

    Of the experiments in the files the task alone is read. Returns JSON: of the length of texts,
    then of the `tasks`, what `known` does.
    """
    tasks = [(name, task) for _, name, task in probes_lib.tasks_of(paths, _KINDS, _WHERE)]
    if _LENGTH in dict(tasks):
        raise InputError(f"{_WHERE}: the name {_LENGTH} is taken by length of texts; rename a task")
    linear = [path for path, (_, task) in zip(paths, tasks, strict=True) if task.kind != "regress"]
    asked, first = Probes(linear, where=_WHERE), tasks[0][1]
    with prefix_errors(_WHERE):
        lengths = _lengths(first, *(drawn(first, part) for part in ("train", "validation")))
        similar = {
            name: cast(list[Sentence], drawn(task, "validation"))
            for name, task in tasks
            if task.kind == "regress"
        }
    if lengths is None:
        say(f"layers: all texts of {paths[0]} have the same length: {_LENGTH} is not scored")
    asked.probes[:0] = [lengths] if lengths else []
    for name, pairs in similar.items():
        if len({pair.label for pair in pairs}) < 2:
            raise InputError(
                f"{_WHERE}: {name}: all pairs to score on have one similarity; give others"
            )
    params = probes_lib.load_probe(asked, trained)
    read: dict[str, dict[str, Any]] = {}
    for probe in asked.probes:
        assert isinstance(probe, Probe)  # no other kind is among _KINDS
        score, of_layers = probe.task.main_score, probe.scores(params, "all")
        read[probe.name] = known(probe.name, score, probe.majority, of_layers)
        say(f"layers: {probe.name} is scored")
    for name, pairs in similar.items():
        score = dict(tasks)[name].main_score
        read[name] = known(name, score, 0.0, _similarity(score, pairs, trained))
        say(f"layers: {name} is scored")
    each = [read[name] for name in (_LENGTH, *dict(tasks)) if name in read]
    return {"format_version": FORMAT_VERSION, "step": trained.step, "tasks": each}


def known(name: str, score: str, guess: float, scores: Sequence[float]) -> dict[str, Any]:
    """Returns a task as it is read off the embeddings and each layer, and the `best` of these.

    `guess` is the score without an encoder: of the commonest label; 0 of a similarity. The `centre`
    is the layer that adds to the embeddings on average, 0 if none does. Each counts by how much it
    adds to the best score below it, as in the expected layer of Tenney et al. 2019, whose probes
    read all layers below at once.
    """
    gains, best = np.diff(np.maximum.accumulate(scores)), int(np.argmax(scores))
    centre = float(gains @ np.arange(1, len(scores)) / gains.sum()) if gains.any() else 0.0
    read = {"name": name, "score": score, "guess": guess, "scores": list(scores)}
    return read | {"best": best, "centre": centre}


def _lengths(task: Task, train: list[Example], validation: list[Example]) -> Probe | None:
    """Returns the task of how many words a text has; None where all have as many."""

    def labelled(examples: list[Example]) -> list[Example]:
        texts = [display_texts(example)[0] for example in examples]
        bins = [int(np.searchsorted(edges, len(text.split()))) for text in texts]
        return [Sentence(_LENGTH, (t,), str(b)) for t, b in zip(texts, bins, strict=True)]

    counts = [len(display_texts(example)[0].split()) for example in train]
    edges = np.unique(np.quantile(counts, np.arange(1, _BINS) / _BINS))
    edges = edges[edges < max(counts)]
    if not len(edges):
        return None
    labels, source = tuple(map(str, range(len(edges) + 1))), ("jsonl:its texts",)
    length = {"max_sequence_length": task.max_sequence_length}
    asked = Task(kind="classify", train=source, validation=source, **length)
    return Probe(_LENGTH, asked, labels, labelled(train), labelled(validation))


def _similarity(score: str, pairs: Sequence[Sentence], trained: Loaded) -> tuple[float, ...]:
    """Returns the correlation of cosines with the truth, of each layer."""
    every = range(trained.model.num_hidden_layers + 1)
    texts = [text for pair in pairs for text in pair.texts]
    vectors = trained.embed(texts, "mean", every).reshape(len(pairs), 2, len(every), -1)
    vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    cosines = vectors.prod(axis=1).sum(-1)
    truth = np.array([pair.label for pair in pairs])
    return tuple(float(scores.score(score, truth, of_layer)) for of_layer in cosines.T)
