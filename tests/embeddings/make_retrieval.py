"""Writes tests/embeddings/retrieval.json: hard rankings and their scores by trec_eval.

Run `python tests/embeddings/make_retrieval.py [SEED [CASES [FILE]]]` in an environment with
pytrec_eval-terrier 0.5.11 and NumPy. The rules around trec_eval are those of BEIR's
`EvaluateRetrieval.evaluate` (Thakur et al. 2021): a text with the query's own id is removed
(`ignore_identical_ids`), the last judgement of a text counts, and the mean is over all queries with
judgements. The reciprocal rank counts up to place 10.

A case has `queries` and `texts`, their ids; `products`, [queries, texts], in sixteenths; `judged`,
lines of query, text and grade; `scores`.
"""

import json
import pathlib
import sys

import numpy as np
import pytrec_eval

# Ids whose order differs as numbers, as UTF-16, or without case.
HARD_IDS = ["10", "9", "A", "a", "é", "z", "\uff21", "\U0001f600", "a b", "a-"]


def case(rng: np.random.Generator) -> dict:
    """Returns a random case with many equal products; half of the queries have a text's id."""
    names = [*HARD_IDS, *(f"d{i}" for i in range(60))]
    texts = [str(name) for name in rng.permutation(names)[: rng.choice([3, 9, 10, 11, 40])]]
    count = int(rng.integers(2, 9))
    queries = [texts[i] for i in rng.permutation(len(texts))[: count // 2]]
    queries += [f"q{i}" for i in range(count - len(queries))]
    products = rng.integers(-16, 17, (count, len(texts))) // rng.choice([1, 5, 16])
    judged = []
    for number, query in enumerate(queries[: count - int(rng.integers(0, 2))]):
        size = int(rng.integers(1, min(len(texts), 14) + 1))
        chosen = rng.choice(len(texts), size, replace=False)
        # Only the first query is sure to have relevant texts.
        grades = rng.choice([-1, 0, 0, 1, 1, 2, 3], size) if number else rng.integers(1, 4, size)
        judged += [[query, texts[t], int(g)] for t, g in zip(chosen, grades, strict=True)]
        if number and query in texts and rng.random() < 0.5:
            judged.append([query, query, 2])  # judges the text with the query's id, perhaps again
    order = [int(i) for i in rng.permutation(len(judged))]
    return {
        "queries": queries,
        "texts": texts,
        "products": products.tolist(),
        "judged": [judged[i] for i in order],
    }


def scores(case: dict) -> dict[str, float]:
    """Returns the scores that trec_eval gives to a case."""
    qrels: dict[str, dict[str, int]] = {}
    for query, text, grade in case["judged"]:
        qrels.setdefault(query, {})[text] = grade
    run = {
        query: {t: p / 16 for t, p in zip(case["texts"], row, strict=True) if t != query}
        for query, row in zip(case["queries"], case["products"], strict=True)
    }
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recall.1,10", "recip_rank"})
    measured = list(evaluator.evaluate(run).values())
    assert len(measured) == len(qrels)
    query_scores = [
        {
            "recall@1": one["recall_1"],
            "recall@10": one["recall_10"],
            "mrr@10": one["recip_rank"] if one["recip_rank"] > 1 / 10.5 else 0.0,
            "ndcg@10": one["ndcg_cut_10"],
        }
        for one in measured
    ]
    return {k: sum(one[k] for one in query_scores) / len(measured) for k in query_scores[0]}


if __name__ == "__main__":
    given = sys.argv[1:]
    seed, count, file = [*given, *("6", "5", "")[len(given) :]]
    rng = np.random.default_rng(int(seed))
    cases = [case(rng) for _ in range(int(count))]
    lines = [json.dumps(one | {"scores": scores(one)}) for one in cases]
    path = pathlib.Path(file or pathlib.Path(__file__).with_name("retrieval.json"))
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
