"""Retrieval tasks: reading of BEIR's files, and scores of a ranking.

A folder of BEIR (Thakur et al. 2021) holds corpus.jsonl with `_id`, `title` and `text`,
queries.jsonl with `_id` and `text`, and qrels/NAME.tsv with query id, text id and relevance.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from etils import epath

from bert_jax.embeddings import nearest as nearest_lib
from bert_jax.errors import InputError, translate_parser_errors
from bert_jax.text.records import encodable

# Scores depend on the first texts of a ranking only.
_DEPTH = 10


@dataclass(frozen=True)
class Passage:
    """A text of the corpus, or a query with its relevant texts."""

    location: str  # FILE:LINE, for messages
    id: str
    text: str
    # For a query, the grades above 0 of texts by text id; None for a text.
    relevant: Mapping[str, int] | None = None


def read(path: str, split: str) -> list[Passage]:
    """Returns the queries that have judgements, then all texts, in the order of the files.

    Args:
      path: a folder of BEIR.
      split: the name of a file of qrels/.
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
                    texts[name] = encodable(text)
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


def scores(vectors: Sequence[np.ndarray], passages: Sequence[Passage]) -> dict[str, float]:
    """Returns the mean scores over all queries, as BEIR's evaluator and trec_eval compute them.

    All texts except one with the query's own id are ranked by their cosine with the query. If
    cosines are equal, the text with the larger id, by code points, comes first. The scores of a
    query without relevant texts are 0.

    Args:
      vectors: the vector of each passage, float32 [W], of length 1.
      passages: queries and texts in any order.

    Returns:
      `recall@1` and `recall@10`, the shares of relevant texts among the first 1 and 10, `mrr@10`
      (1 / rank of the first relevant text) and `ndcg@10` (Järvelin and Kekäläinen 2002).
    """
    queries = [i for i, passage in enumerate(passages) if passage.relevant is not None]
    texts = [i for i, passage in enumerate(passages) if passage.relevant is None]
    texts = np.array(sorted(texts, key=lambda i: passages[i].id, reverse=True))
    blocks = (np.stack([vectors[i] for i in part]) for part in nearest_lib.parts(texts))
    query_vectors = np.stack([vectors[i] for i in queries])
    # One more than the depth, since the text with the query's own id is removed below.
    neighbours, _ = nearest_lib.nearest(blocks, query_vectors, _DEPTH + 1)
    sums = dict.fromkeys(("recall@1", "recall@10", "mrr@10", "ndcg@10"), 0.0)
    for query, nearest in zip(queries, texts[neighbours], strict=True):
        relevant = passages[query].relevant
        if not relevant:
            continue
        ranking = [passages[i].id for i in nearest if passages[i].id != passages[query].id]
        gains = [relevant.get(text, 0) for text in ranking[:_DEPTH]]
        hits = [rank for rank, gain in enumerate(gains) if gain]
        sums["recall@1"] += (0 in hits) / len(relevant)
        sums["recall@10"] += len(hits) / len(relevant)
        sums["mrr@10"] += 1 / (1 + hits[0]) if hits else 0.0
        best = sorted(relevant.values(), reverse=True)[:_DEPTH]
        sums["ndcg@10"] += _discounted_gain(gains) / _discounted_gain(best)
    return {name: value / len(queries) for name, value in sums.items()}


def _discounted_gain(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(rank) for rank, gain in enumerate(gains, start=2))
