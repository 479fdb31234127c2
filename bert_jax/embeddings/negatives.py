"""Hard negatives: texts that are near to a query without answering it.

A first stage, either vectors or BM25, scores all texts for each query. Texts that answer the query
are excluded, and so are texts whose score is close to that of an answer, since many of them are
answers that nobody has labelled (Moreira et al. 2024, NV-Retriever, section 3). The rules are those
of `mine_hard_negatives` of sentence-transformers.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from etils import epath

from bert_jax.embeddings import nearest as nearest_lib
from bert_jax.embeddings.embed import Embedder
from bert_jax.errors import InputError, pluralize
from bert_jax.storage.workdir import create_folder, write_atomic

_QUERIES = 256  # compared with all texts at a time

# (queries, texts) -> for each query the score of each text, float32 [texts].
FirstStage = Callable[[Sequence[str], Sequence[str]], Iterator[np.ndarray]]


class MiningLimits(NamedTuple):
    """The rules by which texts near to a query become negatives."""

    count: int  # maximum number of negatives of a query
    skip: int  # number of the nearest candidates that are left out
    depth: int  # number of the nearest texts that are considered
    # A negative scores at most the lowest score of an answer, less this share of its magnitude.
    margin: float


class MinedPair(NamedTuple):
    """A query, a text that answers it, and negatives, the nearest first."""

    query: str
    positive: str
    negatives: list[str]


def vector_first_stage(embedder: Embedder) -> FirstStage:
    """Returns the first stage that compares the vectors of queries and texts."""

    def score(queries: Sequence[str], texts: Sequence[str]) -> Iterator[np.ndarray]:
        text_vectors, query_vectors = (
            embedder.form.concatenate([part.vectors for part in parts])
            for parts in (embedder.embed(texts), embedder.embed(queries, "query"))
        )
        for start in range(0, len(queries), _QUERIES):
            yield from embedder.form.score(query_vectors[start : start + _QUERIES], text_vectors)

    return score


def mine(
    pairs: Sequence[tuple[str, str]], corpus: Sequence[str], stage: FirstStage, limits: MiningLimits
) -> Iterator[MinedPair]:
    """Yields each pair with its negatives, grouped by query.

    Args:
      pairs: queries and texts that answer them; a query may have several answers.
      corpus: texts among which negatives are sought, besides the answers of all queries.
      stage: scores texts.
      limits: which texts become negatives.
    """
    texts = list(dict.fromkeys([*corpus, *(answer for _, answer in pairs)]))
    index = {text: i for i, text in enumerate(texts)}
    answers: dict[str, list[int]] = {}
    for query, answer in dict.fromkeys(pairs):
        answers.setdefault(query, []).append(index[answer])
    for (query, indices), scores in zip(answers.items(), stage([*answers], texts), strict=True):
        lowest = scores[indices].min()
        highest_allowed = lowest - abs(lowest) * limits.margin
        nearest = nearest_lib.largest_indices(scores, limits.depth + len(indices))
        allowed = [i for i in nearest if i not in indices and scores[i] <= highest_allowed]
        # `depth` also counts the skipped ones.
        chosen = allowed[limits.skip : limits.depth][: limits.count]
        for i in indices:
            yield MinedPair(query, texts[i], [texts[j] for j in chosen])


def write(mined: Iterator[MinedPair], out: epath.Path) -> str:
    """Writes pairs with their negatives as JSON lines; leaves out pairs without negatives.

    A line has `query`, `positive` and the first `negative`, for task.kind=similar, and the lists
    `docs` and `labels`, for task.kind=rank. Returns a message with the counts.
    """
    counts = {"pairs": 0, "negatives": 0, "without": 0}

    def lines() -> Iterator[str]:
        for query, positive, negatives in mined:
            counts["pairs" if negatives else "without"] += 1
            counts["negatives"] += len(negatives)
            if negatives:
                labels = [1.0, *[0.0] * len(negatives)]
                fields = {"query": query, "positive": positive, "negative": negatives[0]}
                fields |= {"docs": [positive, *negatives], "labels": labels}
                yield json.dumps(fields, ensure_ascii=False) + "\n"
        if not counts["pairs"]:
            raise InputError(
                f"none of the {counts['without']:,} pairs has a negative; lower --margin or "
                "--skip, raise --depth, or give more texts with --corpus"
            )

    with create_folder(out.parent):
        write_atomic(out, lines())
    shown = f"{pluralize(counts['pairs'], 'pair')} with {counts['negatives']:,} negatives"
    return f"{shown}; {counts['without']:,} without a negative are left out"
