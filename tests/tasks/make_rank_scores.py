"""Writes tests/tasks/rank.json: rankings of candidates, and their scores by trec_eval.

Run `python tests/tasks/make_rank_scores.py` in an environment with pytrec_eval-terrier 0.5.11 and
NumPy. Each query has `grades` and `outputs` of its candidates, all outputs different, and the
grades of the relevant texts that are `missed`. The reciprocal rank counts up to place 10, and the
mean is over all queries.
"""

import json
import pathlib

import numpy as np
import pytrec_eval

MEASURES = {"ndcg@10": "ndcg_cut_10", "mrr@10": "recip_rank", "map": "map"}


def make_query(rng: np.random.Generator) -> dict:
    """Returns a random query; some have no relevant text, some more than ten candidates."""
    count = int(rng.choice([1, 2, 9, 10, 11, 25]))
    return {
        "grades": rng.choice([-1, 0, 0, 0, 1, 3], count).tolist(),
        "outputs": (rng.permutation(count) - 3.0).tolist(),
        "missed": rng.integers(1, 4, rng.choice([0, 0, 3, 12])).tolist(),
    }


def scores(queries: list[dict]) -> dict[str, float]:
    """Returns the mean scores that trec_eval gives to the rankings."""
    qrels, run = {}, {}
    for number, query in enumerate(queries):
        found = {f"d{i}": grade for i, grade in enumerate(query["grades"])}
        missed = {f"m{i}": grade for i, grade in enumerate(query["missed"])}
        qrels[str(number)] = found | missed
        run[str(number)] = {f"d{i}": output for i, output in enumerate(query["outputs"])}
    evaluator = pytrec_eval.RelevanceEvaluator(qrels, {"ndcg_cut.10", "recip_rank", "map"})
    measured = list(evaluator.evaluate(run).values())
    assert len(measured) == len(queries)
    for one in measured:
        one["recip_rank"] *= one["recip_rank"] > 1 / 10.5
    return {
        name: sum(one[theirs] for one in measured) / len(measured)
        for name, theirs in MEASURES.items()
    }


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    cases = [[make_query(rng) for _ in range(count)] for count in (1, 3, 8)]
    lines = [json.dumps({"queries": case, "scores": scores(case)}) for case in cases]
    path = pathlib.Path(__file__).with_name("rank.json")
    path.write_text("[\n" + ",\n".join(lines) + "\n]\n")
