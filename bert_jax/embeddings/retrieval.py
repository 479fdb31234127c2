"""Texts that are looked for among many: BEIR's files, and how well a ranking does.

A folder as BEIR has it (Thakur et al. 2021): corpus.jsonl with `_id`, `title` and `text`,
queries.jsonl with `_id` and `text`, qrels/NAME.tsv with a line of names, then query, text and how
relevant it is.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from etils import epath

from bert_jax.embeddings import nearest as nearest_lib
from bert_jax.errors import InputError, reading
from bert_jax.text.records import encodable

# How far a ranking is looked at.
_DEPTH = 10


@dataclass(frozen=True)
class Passage:
    """A text to be found, or a query, which knows what it should find."""

    place: str  # FILE:LINE, for messages
    id: str
    text: str
    # For a query, the grades above 0 of texts, by their ids; None for a text.
    relevant: Mapping[str, int] | None = None


def read(place: str, split: str) -> list[Passage]:
    """Returns the queries that have judgements, then all texts, in the order of the files.

    Args:
      place: the folder, see above.
      split: the file of qrels/.
    """
    folder = epath.Path(place)
    texts = [
        Passage(place, record["_id"], " ".join(filter(None, (record["title"], record["text"]))))
        for place, record in _records(folder / "corpus.jsonl")
    ]
    judged = _judgements(folder / "qrels" / f"{split}.tsv", {text.id for text in texts})
    queries = [
        Passage(place, record["_id"], record["text"], judged.pop(record["_id"]))
        for place, record in _records(folder / "queries.jsonl")
        if record["_id"] in judged
    ]
    if judged:
        raise InputError(
            f"{folder / 'queries.jsonl'}: has no query {next(iter(judged))!r}, of which "
            f"qrels/{split}.tsv speaks"
        )
    return [*queries, *texts]


def _records(path: epath.Path) -> Iterator[tuple[str, dict[str, str]]]:
    seen = set[str]()
    with reading(path, "each line must be a JSON object with _id and text"):
        lines = path.read_text().split("\n")
        for number, line in enumerate(lines, start=1):
            if line.strip():
                record = json.loads(line)
                place = f"{path}:{number}"
                texts = {"text": record["text"] or "", "title": record.get("title") or ""}
                for name, text in texts.items():
                    if not isinstance(text, str):
                        raise InputError(f"{place}: {name}={text!r}: is no text; make it one")
                    texts[name] = encodable(text)
                if not "".join(texts.values()).strip():
                    raise InputError(f"{place}: the text is blank; fill it in, or remove it")
                record_id = str(record["_id"])
                if record_id in seen:
                    raise InputError(f"{place}: _id {record_id!r} occurs twice; make ids unique")
                seen.add(record_id)
                yield place, {"_id": record_id} | texts


def _judgements(path: epath.Path, known: set[str]) -> dict[str, dict[str, int]]:
    """Returns the grades above 0 of texts for each query; the last judgement of a text counts."""
    judged: dict[str, dict[str, int]] = {}
    with reading(path, "each line must be query, text and relevance between tabs"):
        rows = csv.reader(path.read_text().splitlines()[1:], delimiter="\t")
        for number, (query, text, relevance) in enumerate(rows, start=2):
            if text not in known:
                raise InputError(f"{path}:{number}: {text!r}: corpus.jsonl has no such text")
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

    All texts except one with the query's own id are ranked by their cosine with the query. Of texts
    with equal cosines the text with the larger id, by code points, comes first. The scores of a
    query without relevant texts are 0.

    Args:
      vectors: the vector of each passage, float32 [W], of length 1.
      passages: queries and texts in any order.

    Returns:
      `recall@1` and `recall@10`, the shares of the relevant texts that come so early; `mrr@10`, one
      over the place of the first of them; `ndcg@10` (Järvelin and Kekäläinen 2002).
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
        sums["ndcg@10"] += _discounted(gains) / _discounted(best)
    return {name: value / len(queries) for name, value in sums.items()}


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(place) for place, gain in enumerate(gains, start=2))
