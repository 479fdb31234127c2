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
    # Of a query: how relevant texts are, by their ids, those above 0 alone; None of a text.
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
                    raise InputError(f"{place}: the text is blank; fill it in, or leave it out")
                name = str(record["_id"])
                if name in seen:
                    raise InputError(f"{place}: _id {name!r} occurs twice; give each its own")
                seen.add(name)
                yield place, {"_id": name} | texts


def _judgements(path: epath.Path, known: set[str]) -> dict[str, dict[str, int]]:
    """Returns how relevant texts are to each query; the last judgement of a text counts."""
    judged: dict[str, dict[str, int]] = {}
    with reading(path, "each line must be query, text and relevance between tabs"):
        rows = csv.reader(path.read_text().splitlines()[1:], delimiter="\t")
        for number, (query, text, relevance) in enumerate(rows, start=2):
            if text not in known:
                raise InputError(f"{path}:{number}: {text!r}: corpus.jsonl has no such text")
            judged.setdefault(query, {})[text] = int(relevance)
    relevant = {
        query: {text: value for text, value in of_query.items() if value > 0}
        for query, of_query in judged.items()
    }
    if not any(relevant.values()):
        raise InputError(f"{path}: no text is relevant to any query")
    return relevant


def scores(vectors: Sequence[np.ndarray], passages: Sequence[Passage]) -> dict[str, float]:
    """Returns the means over queries, as BEIR's evaluator and trec_eval compute them.

    All texts are ranked by their cosine with the query, except a text with the query's own id. Of
    texts with equal cosines the larger id, by code points, comes first. A query to which no text is
    relevant counts as 0.

    Args:
      vectors: of each passage, float32 [W], of length 1.
      passages: queries and texts in any order.

    Returns:
      `recall@1` and `recall@10`, the shares of the relevant texts that come so early; `mrr@10`, one
      over the place of the first of them; `ndcg@10` (Järvelin and Kekäläinen 2002).
    """
    queries = [i for i, passage in enumerate(passages) if passage.relevant is not None]
    texts = [i for i, passage in enumerate(passages) if passage.relevant is None]
    texts = np.array(sorted(texts, key=lambda i: passages[i].id, reverse=True))
    blocks = (np.stack([vectors[i] for i in part]) for part in nearest_lib.parts(texts))
    asked = np.stack([vectors[i] for i in queries])
    # One more than is looked at: the query's own text is left out.
    places, _ = nearest_lib.nearest(blocks, asked, _DEPTH + 1)
    sums = dict.fromkeys(("recall@1", "recall@10", "mrr@10", "ndcg@10"), 0.0)
    for query, nearest in zip(queries, texts[places], strict=True):
        relevant = passages[query].relevant
        if not relevant:
            continue
        ranking = [passages[i].id for i in nearest if passages[i].id != passages[query].id]
        gains = [relevant.get(text, 0) for text in ranking[:_DEPTH]]
        hits = [place for place, gain in enumerate(gains) if gain]
        sums["recall@1"] += hits[:1] == [0] and 1 / len(relevant)
        sums["recall@10"] += len(hits) / len(relevant)
        sums["mrr@10"] += 1 / (1 + hits[0]) if hits else 0.0
        best = sorted(relevant.values(), reverse=True)[:_DEPTH]
        sums["ndcg@10"] += _discounted(gains) / _discounted(best)
    return {name: value / len(queries) for name, value in sums.items()}


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(place) for place, gain in enumerate(gains, start=2))
