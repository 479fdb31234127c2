"""Texts that are looked for among many: BEIR's files, and how well a ranking does.

A folder as BEIR has it (Thakur et al. 2021): corpus.jsonl with `_id`, `title` and `text`,
queries.jsonl with `_id` and `text`, qrels/NAME.tsv with a line of names, then query, text and how
relevant it is.

Shape letters: Q queries, N texts.
"""

import csv
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from etils import epath

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
    # Of a query: how relevant texts are, by their ids, those alone that are; None of a text.
    relevant: Mapping[str, int] | None = None


def read(place: str, split: str) -> list[Passage]:
    """Returns the queries that have relevant texts, then all texts, in the order of the files.

    Args:
      place: the folder, see above.
      split: the file of qrels/.
    """
    folder = epath.Path(place)
    texts = [
        Passage(place, record["_id"], " ".join(filter(None, (record["title"], record["text"]))))
        for place, record in _records(folder / "corpus.jsonl")
    ]
    known = {text.id for text in texts}
    if len(known) < len(texts):
        raise InputError(f"{folder / 'corpus.jsonl'}: texts share an _id; give each its own")
    judged = _judgements(folder / "qrels" / f"{split}.tsv", known)
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
                yield place, {"_id": str(record["_id"])} | texts


def _judgements(path: epath.Path, known: set[str]) -> dict[str, dict[str, int]]:
    """Returns which texts are relevant to each query, above 0 alone."""
    judged: dict[str, dict[str, int]] = {}
    with reading(path, "each line must be query, text and relevance between tabs"):
        rows = csv.reader(path.read_text().splitlines()[1:], delimiter="\t")
        for number, (query, text, relevance) in enumerate(rows, start=2):
            if text not in known:
                raise InputError(f"{path}:{number}: {text!r}: corpus.jsonl has no such text")
            if int(relevance) > 0:
                judged.setdefault(query, {})[text] = int(relevance)
    if not judged:
        raise InputError(f"{path}: no text is relevant to any query")
    return judged


def scores(
    cosines: np.ndarray, texts: Sequence[str], relevant: Sequence[Mapping[str, int]]
) -> dict[str, float]:
    """Returns the means over queries, as trec_eval has them: of equal texts the larger id is first.

    Args:
      cosines: [Q, N].
      texts: ids of the N texts.
      relevant: of each query, how relevant texts are, by id.

    Returns:
      `recall@1` and `recall@10`, the shares of the relevant texts that come so early; `mrr@10`, one
      over the place of the first of them; `ndcg@10` (Järvelin and Kekäläinen 2002).
    """
    by_id = np.argsort(np.argsort(np.array(texts)))  # the place of each id among all
    sums = dict.fromkeys(("recall@1", "recall@10", "mrr@10", "ndcg@10"), 0.0)
    for row, wanted in zip(cosines, relevant, strict=True):
        depth = min(_DEPTH, len(row))
        least = np.partition(row, -depth)[-depth]
        near = np.flatnonzero(row >= least)  # more than the depth where texts are equal
        order = near[np.lexsort((-by_id[near], -row[near]))][:depth]
        gains = [wanted.get(texts[i], 0) for i in order]
        hits = [place for place, gain in enumerate(gains) if gain]
        sums["recall@1"] += bool(gains[0]) / len(wanted)
        sums["recall@10"] += len(hits) / len(wanted)
        sums["mrr@10"] += 1 / (1 + hits[0]) if hits else 0.0
        best = sorted(wanted.values(), reverse=True)[:_DEPTH]
        sums["ndcg@10"] += _discounted(gains) / _discounted(best)
    return {name: value / len(relevant) for name, value in sums.items()}


def _discounted(gains: Sequence[int]) -> float:
    return sum(gain / math.log2(place) for place, gain in enumerate(gains, start=2))
