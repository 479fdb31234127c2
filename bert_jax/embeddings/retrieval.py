"""Retrieval tasks: reading of BEIR's files, and scores of a ranking.

A folder of BEIR (Thakur et al. 2021) holds corpus.jsonl with `_id`, `title` and `text`,
queries.jsonl with `_id` and `text`, and qrels/NAME.tsv with query id, text id and relevance.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from etils import epath

from bert_jax.embeddings import bm25
from bert_jax.embeddings import nearest as nearest_lib
from bert_jax.embeddings.forms import DENSE, VectorForm
from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.process import logger
from bert_jax.text.records import replace_surrogates

# Scores depend on the first texts of a ranking only.
_DEPTH = 10


@dataclass(frozen=True)
class Passage:
    """A text of the corpus, or a query. `examples.sha256` hashes the class's name: keep it."""

    location: str  # FILE:LINE, for messages
    id: str
    text: str
    # For a query, its relevant texts: {text id: grade above 0}; None for a text of the corpus.
    relevant: Mapping[str, int] | None = None


def read(path: str, split: str) -> list[Passage]:
    """Returns the queries that have judgements, then all texts, in the order of the files.

    `path` is a folder of BEIR, `split` the name of a file of qrels/.
    """
    folder = epath.Path(path)
    texts = [
        Passage(location, record["_id"], " ".join(filter(None, (record["title"], record["text"]))))
        for location, record in _records(folder / "corpus.jsonl")
    ]
    judged = _judgements(folder / "qrels" / f"{split}.tsv", {text.id for text in texts})
    queries = [
        Passage(location, record["_id"], record["text"], judged.pop(record["_id"]))
        for location, record in _records(folder / "queries.jsonl")
        if record["_id"] in judged
    ]
    if judged:
        raise InputError(
            f"{folder / 'queries.jsonl'}: no query {next(iter(judged))!r} of qrels/{split}.tsv"
        )
    return [*queries, *texts]


def _records(path: epath.Path) -> Iterator[tuple[str, dict[str, str]]]:
    seen = set[str]()
    with translate_parser_errors(path, "each line must be a JSON object with _id and text"):
        lines = path.read_text().split("\n")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = json.loads(line)
                location = f"{path}:{number}"
                texts = {"text": record["text"] or "", "title": record.get("title") or ""}
                for name, text in texts.items():
                    if not isinstance(text, str):
                        raise InputError(f"{location}: {name}={text!r}: must be a string")
                    texts[name] = replace_surrogates(text)
                if not "".join(texts.values()).strip():
                    raise InputError(f"{location}: the text is blank; add text or remove the line")
                record_id = str(record["_id"])
                if record_id in seen:
                    raise InputError(f"{location}: _id {record_id!r} occurs twice; make ids unique")
                seen.add(record_id)
                yield location, {"_id": record_id} | texts


def _judgements(path: epath.Path, known: set[str]) -> dict[str, dict[str, int]]:
    """Returns the grades above 0 of texts for each query; the last judgement of a text counts."""
    judged: dict[str, dict[str, int]] = {}
    with translate_parser_errors(
        path, "each line must be query id, text id and relevance, separated by tabs"
    ):
        rows = csv.reader(path.read_text().splitlines()[1:], delimiter="\t")
        for number, (query, text, relevance) in enumerate(rows, start=2):
            if text not in known:
                raise InputError(f"{path}:{number}: {text!r}: not in corpus.jsonl")
            judged.setdefault(query, {})[text] = int(relevance)
    relevant = {
        query: {text: grade for text, grade in grades.items() if grade > 0}
        for query, grades in judged.items()
    }
    if not any(relevant.values()):
        raise InputError(f"{path}: no text is relevant to any query")
    return relevant


def scores(
    vectors: Sequence[Any], passages: Sequence[Passage], form: VectorForm = DENSE
) -> dict[str, float]:
    """Returns retrieval metrics: those of the ranking of the texts for each query by their vectors.

    Args:
      vectors: the vector of each passage; dense ones are float32 [W], of length 1.
      passages: queries and texts in any order.
      form: of the vectors.

    Returns:
      `recall@1`, `recall@10`, `mrr@10` and `ndcg@10`; see `mean_metrics`.
    """
    queries, texts = split_by_role(passages)
    order = np.array([number for number, _ in texts])
    parts = nearest_lib.split_indices(order, form.block_texts)
    blocks = (form.stack([vectors[i] for i in part]) for part in parts)
    query_vectors = form.stack([vectors[number] for number, _ in queries])
    # One more than the depth, since the text with the query's own id is ignored.
    neighbours, _ = nearest_lib.nearest(blocks, query_vectors, _DEPTH + 1, form.score)
    return mean_metrics(queries, texts, neighbours)


def bm25_scores(passages: Sequence[Passage]) -> dict[str, float] | None:
    """Returns the metrics of BM25, the usual baseline; None and a warning without the library."""
    if not bm25.is_installed():
        logger.warning("there is no baseline for retrieval: %s", bm25.MISSING_MESSAGE)
        return None
    queries, texts = split_by_role(passages)
    neighbours, _ = bm25.nearest(contents(queries), contents(texts), _DEPTH + 1)
    return mean_metrics(queries, texts, neighbours)


def bm25_baseline(examples: Sequence[Any], main_score: str) -> tuple[str, float] | None:
    """Returns the name and the score of the BM25 baseline; None without BEIR or bm25s."""
    if not isinstance(examples[0], Passage):
        return None
    by_name = bm25_scores(examples)
    return ("BM25", by_name[main_score]) if by_name else None


# Passages with their indices among all passages.
Numbered = list[tuple[int, Passage]]


def split_by_role(passages: Sequence[Passage]) -> tuple[Numbered, Numbered]:
    """Returns the queries, and the texts from the largest id to the smallest, by code points.

    Ties are thus broken by descending id, as in trec_eval.
    """
    numbered = list(enumerate(passages))
    texts = [(i, passage) for i, passage in numbered if passage.relevant is None]
    texts.sort(key=lambda item: item[1].id, reverse=True)
    return [(i, passage) for i, passage in numbered if passage.relevant is not None], texts


def contents(passages: Numbered) -> list[str]:
    """Returns the texts of passages."""
    return [passage.text for _, passage in passages]


def mean_metrics(queries: Numbered, texts: Numbered, neighbours: np.ndarray) -> dict[str, float]:
    """Returns the mean metrics over all queries, as BEIR's evaluator and trec_eval compute them.

    A text with the query's own id is ignored. `neighbours` has for each query the numbers of its
    nearest texts, int [queries, K], the best first.
    """
    names, per_query = ("recall@1", "recall@10", "mrr@10", "ndcg@10"), []
    for (_, query), nearest in zip(queries, neighbours, strict=True):
        relevant = query.relevant or {}
        ids = [texts[i][1].id for i in nearest]
        gains = [relevant.get(text, 0) for text in ids if text != query.id]
        per_query.append(ranking_scores(gains[:_DEPTH], [*relevant.values()]))
    return {name: sum(one[name] for one in per_query) / len(per_query) for name in names}


def ranking_scores(gains: Sequence[float], relevant: Sequence[float]) -> dict[str, float]:
    """Returns the metrics of the ranking of one query; all are 0 if no text is relevant.

    Args:
      gains: the grades of the ranked texts, in their order; relevant texts have grades above 0.
      relevant: the grades above 0 of all relevant texts, ranked or not.

    Returns:
      `recall@1` and `recall@10` (share of all relevant texts that the first 1 or 10 are); `mrr@10`
      (1 / rank of the first relevant text); `ndcg@10` (Järvelin and Kekäläinen 2002); and `map`,
      the average precision of the whole ranking.
    """
    hits = [rank for rank, gain in enumerate(gains, start=1) if gain > 0]
    early = [rank for rank in hits if rank <= _DEPTH]
    best, count = sorted(relevant, reverse=True)[:_DEPTH], max(len(relevant), 1)
    precision_sum = sum(number / rank for number, rank in enumerate(hits, 1))
    return {
        "recall@1": (1 in hits) / count,
        "recall@10": len(early) / count,
        "mrr@10": 1 / early[0] if early else 0.0,
        "ndcg@10": _discounted_gain(gains[:_DEPTH]) / _discounted_gain(best) if best else 0.0,
        "map": precision_sum / count,
    }


def _discounted_gain(gains: Sequence[float]) -> float:
    return sum(max(gain, 0) / math.log2(rank) for rank, gain in enumerate(gains, start=2))
