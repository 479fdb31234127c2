"""What each layer of an encoder knows, and where its heads look: `bert-jax layers`.

A linear layer reads a task off the embeddings and off each layer, as probes do (`tasks.probes`), on
the encoder as it is (Jawahar et al. 2019, Tenney et al. 2019). Of a similarity nothing is learned:
it is the cosine of the means of both texts' pieces. How long texts are is asked in any case, which
needs no labels and is the surface task of Conneau et al. 2018.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from bert_jax.config import Parallelism, Run, Task
from bert_jax.errors import InputError
from bert_jax.loaded import Loaded
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks import probes as probes_lib
from bert_jax.tasks import scores
from bert_jax.tasks.examples import Example, Sentence, Tagged
from bert_jax.tasks.probes import Probe, Probes
from bert_jax.training import mesh as mesh_lib

FORMAT_VERSION = 1
_KINDS = ("classify", "pair", "tag", "regress")
_WHERE = "--tasks"
_LENGTH = "length"
# Lengths are put into so many bins, as full as each other.
_BINS = 6
_PAIRS = 1_000


@dataclasses.dataclass(frozen=True)
class Knowledge:
    """A task as it is read off the layers."""

    name: str  # of the task's file
    score: str  # which one
    guess: float  # the score without an encoder: of the commonest label; 0 of a similarity
    scores: tuple[float, ...]  # of the embeddings, then of each layer

    @property
    def best(self) -> int:
        """Returns the layer with the highest score, the lowest of them."""
        return int(np.argmax(self.scores))

    @property
    def centre(self) -> float:
        """Returns the layer that adds to the embeddings on average; 0 if none does.

        Each layer counts by how much it adds to the best score below it, as in the expected layer
        of Tenney et al. 2019, whose probes read all layers below at once.
        """
        gains = np.diff(np.maximum.accumulate(self.scores))
        numbers = np.arange(1, len(self.scores))
        return float(gains @ numbers / gains.sum()) if gains.any() else 0.0


def ask(paths: Sequence[str], trained: Loaded, say: Callable[[str], None]) -> list[Knowledge]:
    """Reads tasks off each layer of a run's checkpoint or a base, on all devices.

    Args:
      paths: task files, or experiments of fine-tunings as JSON; of them the task alone is read.
      trained: whose encoder.
      say: is given each task when it is done.

    Returns:
      The length of texts, then the tasks.
    """
    tasks = [(name, task) for _, name, task in probes_lib.tasks_of(paths, _KINDS, _WHERE)]
    if _LENGTH in dict(tasks):
        raise InputError(f"{_WHERE}: the name {_LENGTH} is taken by length of texts; rename a task")
    linear = [path for path, (_, task) in zip(paths, tasks, strict=True) if task.kind != "regress"]
    asked, first = Probes(linear, where=_WHERE), tasks[0][1]
    lengths = _lengths(first, *(_drawn(first, name) for name in ("train", "validation")))
    if lengths is None:
        say(f"layers: all texts of {paths[0]} have the same length: {_LENGTH} is not scored")
    asked.probes[:0] = [lengths] if lengths else []
    similar = {name: _drawn(task, "validation") for name, task in tasks if task.kind == "regress"}
    for name, pairs in similar.items():
        if len({pair.label for pair in pairs if isinstance(pair, Sentence)}) < 2:
            raise InputError(
                f"{_WHERE}: {name}: all pairs to score on have one similarity; give others"
            )
    mesh = mesh_lib.make_mesh(Parallelism())
    asked.open(trained.model, trained.tokenizer, Parallelism(), mesh, Run().eval_batch_size)
    params = jax.device_put(trained.params, mesh_lib.replicated(mesh))
    read: dict[str, Knowledge] = {}
    for probe in asked.probes:
        assert isinstance(probe, Probe)
        score, guess = probe.task.main_score, probe.majority
        by_layer = tuple(asked.score_of_layers(probe, params))
        read[probe.name] = Knowledge(probe.name, score, guess, by_layer)
        say(f"layers: {probe.name} is scored")
    for name, pairs in similar.items():
        score = dict(tasks)[name].main_score
        read[name] = Knowledge(name, score, 0.0, _similarity(score, pairs, trained))
        say(f"layers: {name} is scored")
    return [read[name] for name in (_LENGTH, *dict(tasks)) if name in read]


def record_of(trained: Loaded, known: Sequence[Knowledge]) -> dict[str, Any]:
    """Returns the JSON of what was read off a checkpoint."""
    tasks = [dataclasses.asdict(one) | {"best": one.best, "centre": one.centre} for one in known]
    return {"format_version": FORMAT_VERSION, "step": trained.step, "tasks": tasks}


def _drawn(task: Task, name: str) -> list[Example]:
    try:
        there = examples_lib.read(task, getattr(task, name), "labelled")
    except InputError as error:
        raise InputError(f"{_WHERE}: {error}") from error
    return probes_lib.drawn(there, _PAIRS)


def _lengths(task: Task, train: list[Example], validation: list[Example]) -> Probe | None:
    """Returns the task of how many words a text has; None where all have as many."""

    def words(example: Example) -> str:
        if isinstance(example, Tagged):
            return " ".join(example.words)
        assert isinstance(example, Sentence)
        return example.texts[0]

    def labelled(examples: list[Example]) -> list[Example]:
        texts = [words(example) for example in examples]
        bins = [int(np.searchsorted(edges, len(text.split()))) for text in texts]
        return [Sentence(_LENGTH, (t,), str(b)) for t, b in zip(texts, bins, strict=True)]

    counts = [len(words(example).split()) for example in train]
    edges = np.unique(np.quantile(counts, np.arange(1, _BINS) / _BINS))
    edges = edges[edges < max(counts)]
    if not len(edges):
        return None
    labels, source = tuple(map(str, range(len(edges) + 1))), ("jsonl:its texts",)
    length = {"max_sequence_length": task.max_sequence_length}
    asked = Task(kind="classify", train=source, validation=source, **length)
    return Probe(_LENGTH, asked, labels, labelled(train), labelled(validation))


def _similarity(score: str, pairs: Sequence[Example], trained: Loaded) -> tuple[float, ...]:
    """Returns the correlation of cosines with the truth, of each layer."""
    every, sides = range(trained.model.num_hidden_layers + 1), []
    for side in range(2):
        texts = [pair.texts[side] for pair in pairs if isinstance(pair, Sentence)]
        vectors = trained.embed(texts, layers=every).reshape(len(texts), len(every), -1)
        sides.append(vectors / np.linalg.norm(vectors, axis=-1, keepdims=True))
    cosines = (sides[0] * sides[1]).sum(-1)
    truth = np.array([pair.label for pair in pairs if isinstance(pair, Sentence)])
    return tuple(float(scores.score(score, truth, of_layer)) for of_layer in cosines.T)
