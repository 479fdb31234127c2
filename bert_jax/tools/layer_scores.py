"""Scores of each layer of an encoder on tasks: `bert-jax layers`.

A linear layer learns a task from the embeddings and from each layer of the frozen encoder, as in
`tasks.probes` (Jawahar et al. 2019, Tenney et al. 2019). A similarity task needs no training: the
prediction is the cosine of both texts' mean outputs. A further task, which needs no labels, is the
length of the first task's texts (the surface task of Conneau et al. 2018).
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from bert_jax.config import Task
from bert_jax.errors import InputError, prefix_errors
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.tasks import probes as probes_lib
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Example, Sentence, texts_of
from bert_jax.tasks.probes import Probe, Probes, draw_examples

FORMAT_VERSION = 1
_KINDS = ("classify", "pair", "tag", "regress")
_FLAG = "--tasks"
_LENGTH = "length"
# Bins of lengths; each bin has about as many texts.
_BINS = 6


def score_layers(
    paths: Sequence[str], trained: LoadedModel, report: Callable[[str], None]
) -> dict[str, Any]:
    """Scores each layer of a model on the tasks of experiment files, on all devices.

    Returns JSON; `tasks` has a `layer_record` for the length of texts, then one for each task.
    """
    tasks = [(name, task) for _, name, task in probes_lib.read_tasks(paths, _KINDS, _FLAG)]
    if _LENGTH in dict(tasks):
        raise InputError(f"{_FLAG}: the name {_LENGTH} is taken by length of texts; rename a task")
    files = [path for path, (_, task) in zip(paths, tasks, strict=True) if task.kind != "regress"]
    probes, first = Probes(files, where=_FLAG), tasks[0][1]
    with prefix_errors(_FLAG):
        splits = (draw_examples(first, split) for split in ("train", "validation"))
        lengths = _length_probe(first, *splits)
        similarity_pairs = {
            name: cast(list[Sentence], draw_examples(task, "validation"))  # of two texts
            for name, task in tasks
            if task.kind == "regress"
        }
    if lengths is None:
        report(f"layers: all texts of {paths[0]} have the same length: {_LENGTH} is not scored")
    else:
        probes.probes.insert(0, lengths)
    for name, pairs in similarity_pairs.items():
        if len({pair.label for pair in pairs}) < 2:
            raise InputError(
                f"{_FLAG}: {name}: all validation pairs have the same score; add different ones"
            )
    params = probes_lib.prepare_probes(probes, trained)  # of the model, on all devices
    records: dict[str, dict[str, Any]] = {}
    for probe in probes.probes:
        assert isinstance(probe, Probe)  # no other kind is among _KINDS
        metric, layer_scores = probe.task.main_score, probe.scores(params, layers="all")
        records[probe.name] = layer_record(probe.name, metric, probe.majority, layer_scores)
        report(f"layers: {probe.name} is scored")
    for name, pairs in similarity_pairs.items():
        metric = dict(tasks)[name].main_score
        records[name] = layer_record(name, metric, 0.0, _similarity(metric, pairs, trained))
        report(f"layers: {name} is scored")
    in_order = [records[name] for name in (_LENGTH, *dict(tasks)) if name in records]
    return {"format_version": FORMAT_VERSION, "step": trained.step, "tasks": in_order}


def layer_record(name: str, metric: str, guess: float, scores: Sequence[float]) -> dict[str, Any]:
    """Returns the JSON of a task's scores on the embeddings and on each layer.

    `guess` is the score of the majority baseline; 0 for a similarity. `best` is the layer with the
    highest score. `centre` is the average of the layers, weighted by how much each gains on the
    best score of all lower layers; 0 if none does. It is like the expected layer of Tenney et al.
    2019, whose probes read all layers below at once.
    """
    gains, best = np.diff(np.maximum.accumulate(scores)), int(np.argmax(scores))
    centre = float(gains @ np.arange(1, len(scores)) / gains.sum()) if gains.any() else 0.0
    record = {"name": name, "score": metric, "guess": guess, "scores": list(scores)}
    return record | {"best": best, "centre": centre}


def _length_probe(task: Task, train: list[Example], validation: list[Example]) -> Probe | None:
    """Returns a probe for the number of words of a text; None if it is always the same."""
    counts = [len(texts_of(example)[0].split()) for example in train]
    edges = np.unique(np.quantile(counts, np.arange(1, _BINS) / _BINS))
    edges = edges[edges < max(counts)]  # else the last bin would be empty
    if not len(edges):
        return None

    def label_lengths(examples: list[Example]) -> list[Example]:
        texts = [texts_of(example)[0] for example in examples]
        bins = [int(np.searchsorted(edges, len(text.split()))) for text in texts]
        return [Sentence(_LENGTH, (t,), str(b)) for t, b in zip(texts, bins, strict=True)]

    labels, source = tuple(map(str, range(len(edges) + 1))), ("jsonl:its texts",)  # not read
    limit = {"max_sequence_length": task.max_sequence_length}
    length = Task(kind="classify", train=source, validation=source, **limit)
    return Probe(_LENGTH, length, labels, label_lengths(train), label_lengths(validation))


def _similarity(metric: str, pairs: Sequence[Sentence], trained: LoadedModel) -> tuple[float, ...]:
    """Returns for each layer the correlation of cosines with the truth."""
    layers = range(trained.model.num_hidden_layers + 1)
    texts = [text for pair in pairs for text in pair.texts]
    vectors = trained.embed(texts, "mean", layers).reshape(len(pairs), 2, len(layers), -1)
    vectors = vectors / np.linalg.norm(vectors, axis=-1, keepdims=True)
    cosines = vectors.prod(axis=1).sum(-1)
    truth = np.array([pair.label for pair in pairs])
    return tuple(float(scores.score(metric, truth, values)) for values in cosines.T)
