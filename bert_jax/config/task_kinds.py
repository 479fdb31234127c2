"""The kinds of tasks: for each its scores, sources, settings, and the class that implements it.

To add a kind, write its class in a module of `bert_jax.tasks`, see `tasks.task_kind.TaskKind`, and
add it to `KINDS`. This module imports no JAX, so that checking settings does not wait for JAX.
"""

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from bert_jax.config.fields import Problem

_TABLES = ("tsv", "csv", "jsonl", "tfds")


@dataclass(frozen=True)
class KindSpec:
    """The settings and checks of a kind of task."""

    implementation: str  # MODULE:CLASS of `bert_jax.tasks`
    scores: tuple[str, ...]  # allowed values of `task.score`; the first is the default
    # Fields of `Task` that name the columns of an example's texts; for `span`, whose columns have
    # fixed names, these names.
    text_columns: tuple[str, ...] = ("text_column",)
    # Settings that not all kinds have: fields of `Task`, or names such as adapt.pooling.
    settings: tuple[str, ...] = ()
    formats: tuple[str, ...] = _TABLES  # formats from which examples can be read
    # Allowed values of `adapt.how`; (): no model can be fine-tuned on the kind.
    adapt_methods: tuple[str, ...] = ("full", "frozen", "lora")
    problems: Callable[[Any], Iterable[Problem]] = lambda task: ()  # checks a `Task` of the kind
    is_variadic: bool = False  # whether an example is a query with any number of texts
    makes_vectors: bool = False  # whether `embed` and `search` use the trained model

    @functools.cached_property
    def implementing_class(self) -> Any:
        """The class that implements the kind, a `tasks.task_kind.TaskKind`."""
        module, _, name = self.implementation.partition(":")
        return getattr(importlib.import_module(f"bert_jax.tasks.{module}"), name)


def _pair_problems(task: Any) -> Iterator[Problem]:
    if not task.second_column:
        example = "hypothesis" if task.text_column == "premise" else "text_b"
        why = f"task.kind={task.kind}: name the column of the second text, e.g. {example}"
        yield "second_column", why


def _choice_problems(task: Any) -> Iterator[Problem]:
    choices = len(task.choice_columns)
    if choices < 2:
        yield "choice_columns", "task.kind=choice needs at least two"
    if len(task.labels) not in (0, choices):
        yield "labels", f"name one for each of the {choices} choices, or none"


def _span_problems(task: Any) -> Iterator[Problem]:
    # A window holds [CLS], a question, a part of the context and two [SEP].
    room = task.max_sequence_length - task.max_query_length - 3
    rows = f"task.max_sequence_length={task.max_sequence_length} (SQuAD: 384)"
    if room <= 0:
        yield "max_query_length", f"{rows} has no room for a context next to the question"
    if task.document_stride > room:
        why = f"{rows} has room for {room} tokens next to a question of up to "
        yield "document_stride", f"{why}task.max_query_length={task.max_query_length}"


_TWO_TEXTS = ("text_column", "second_column")
_PAIR: Any = {"text_columns": _TWO_TEXTS, "problems": _pair_problems}
_LABEL_SCORES = ("accuracy", "f1", "macro_f1", "micro_f1", "matthews")
_PROMPTS = ("query_prefix", "text_prefix")
_RETRIEVER: Any = {
    "scores": ("ndcg@10", "mrr@10", "recall@10", "recall@1"),
    "text_columns": (*_TWO_TEXTS, "negative_column"),
    "formats": (*_TABLES, "beir"),
    "adapt_methods": ("full",),
    "problems": _pair_problems,
    "is_variadic": True,
    "makes_vectors": True,
}
_LABEL_SETTINGS = ("labels", "class_weights", "adapt.pooling")

KINDS = {
    "classify": KindSpec("labels:SentenceKind", _LABEL_SCORES, settings=_LABEL_SETTINGS),
    "pair": KindSpec("labels:SentenceKind", _LABEL_SCORES, settings=_LABEL_SETTINGS, **_PAIR),
    "regress": KindSpec(
        "labels:RegressionKind", ("spearman", "pearson"), _TWO_TEXTS, ("adapt.pooling",)
    ),
    "choice": KindSpec(
        "labels:ChoiceKind",
        ("accuracy",),
        ("text_column", "choice_columns"),
        ("labels", "adapt.pooling"),
        problems=_choice_problems,
    ),
    "tag": KindSpec(
        "labels:TagKind",
        ("entity_f1", "accuracy"),
        settings=("labels", "class_weights", "adapt.features"),
        formats=("conll", "jsonl", "tfds"),
    ),
    "span": KindSpec(
        "spans:SpanKind",
        ("f1", "exact_match"),
        ("question", "context"),
        ("document_stride", "max_query_length", "max_answer_length", "no_answer"),
        ("squad", "tfds"),
        problems=_span_problems,
    ),
    "generate": KindSpec(
        "generate:Generate",
        ("chrf", "bleu"),
        settings=("max_target_length",),
        adapt_methods=("full",),
    ),
    "minimal_pairs": KindSpec(
        "minimal_pairs:MinimalPairsKind",
        ("accuracy",),
        settings=("field_column",),  # the column of a pair's category
        adapt_methods=(),
        **_PAIR,
    ),
    "similar": KindSpec(
        "similar:Similar",
        # spearman and pearson are for pairs with a number, the others for `beir`.
        ("spearman", "pearson", "ndcg@10", "mrr@10", "recall@10", "recall@1"),
        (*_TWO_TEXTS, "negative_column"),
        (*_PROMPTS, "vectors"),
        (*_TABLES, "corpus", "beir"),
        adapt_methods=("full", "lora"),
        makes_vectors=True,
    ),
    "rank": KindSpec(
        "rank:Rank",
        ("ndcg@10", "mrr@10", "map"),
        settings=("ranking_loss", "adapt.pooling"),
        formats=("jsonl", "tfds", "beir"),
        is_variadic=True,
        **_PAIR,
    ),
    "sparse": KindSpec("retrievers.sparse:Sparse", settings=(*_PROMPTS, "sparse"), **_RETRIEVER),
    "multi_vector": KindSpec(
        "retrievers.multi_vector:MultiVector", settings=(*_PROMPTS, "multi_vector"), **_RETRIEVER
    ),
}

# Kinds on which a model can be fine-tuned.
TRAINABLE_KINDS = tuple(kind for kind, spec in KINDS.items() if spec.adapt_methods)

# A value of `task.kind`.
Kind = Literal[tuple(KINDS)]  # pyrefly: ignore[invalid-literal]


def kinds_with(setting: str) -> tuple[str, ...]:
    """Returns the kinds that have a setting, such as `labels` or `adapt.pooling`."""
    return tuple(k for k, spec in KINDS.items() if setting in spec.text_columns + spec.settings)
