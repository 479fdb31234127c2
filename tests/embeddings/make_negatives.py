"""Writes tests/embeddings/negatives.json: hard negatives that sentence-transformers mines.

Run `python tests/embeddings/make_negatives.py` in an environment with sentence-transformers 6.2.0,
datasets, PyTorch 2.13 and NumPy. A model with given vectors stands for an encoder.

`vectors` has the vector of each query and text by name; `pairs` are queries and answers, two each,
since the depth there counts from the most answers that a query has; `corpus` are further texts. A
case has the `limits` and the `mined` lists: query, answer, negatives.
"""

import json
import pathlib

import numpy as np
import torch
from datasets import Dataset
from sentence_transformers.util import mine_hard_negatives

# count, skip, depth, margin
LIMITS = [(3, 0, 20, 0.05), (2, 4, 12, 0.3), (4, 0, 5, 0.0)]


class Given:
    """A model whose vectors are given."""

    device = torch.device("cpu")

    def __init__(self, vectors: dict[str, list[float]]):
        self.vectors = vectors

    def encode(self, texts: list[str], **_: object) -> np.ndarray:
        return np.array([self.vectors[text] for text in texts], np.float32)

    encode_query = encode_document = encode

    def similarity(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(a) @ torch.as_tensor(b).T

    def similarity_pairwise(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (torch.as_tensor(a) * torch.as_tensor(b)).sum(1)


def main() -> None:
    rng = np.random.default_rng(0)
    queries, answers = [f"q{i}" for i in range(8)], [f"a{i}" for i in range(16)]
    corpus = [f"t{i}" for i in range(30)]
    values = rng.normal(size=(len(queries + answers + corpus), 4))
    values /= np.linalg.norm(values, axis=1, keepdims=True)
    vectors = dict(zip(queries + answers + corpus, values.round(4).tolist(), strict=True))
    for query, answer in zip(2 * queries, answers, strict=True):  # answers are near
        vectors[answer] = [round((2 * a + b) / 3, 4) for a, b in
                           zip(vectors[query], vectors[answer], strict=True)]  # fmt: skip
    pairs = [(query, answers[i + 8 * j]) for i, query in enumerate(queries) for j in range(2)]
    cases = []
    for count, skip, depth, margin in LIMITS:
        options = {"output_format": "triplet", "verbose": False, "num_negatives": count}
        mined = mine_hard_negatives(
            Dataset.from_dict({"query": [q for q, _ in pairs], "answer": [a for _, a in pairs]}),
            Given(vectors),
            corpus=corpus + answers,
            range_min=skip,
            range_max=depth,
            relative_margin=margin,
            **options,
        )
        lists: dict[tuple[str, str], list[str]] = {}
        for row in mined:
            lists.setdefault((row["query"], row["answer"]), []).append(row["negative"])
        found = [[*pair, negatives] for pair, negatives in lists.items()]
        cases.append({"limits": [count, skip, depth, margin], "mined": found})
    given = {"vectors": vectors, "pairs": pairs, "corpus": corpus}
    path = pathlib.Path(__file__).with_name("negatives.json")
    path.write_text(json.dumps(given | {"cases": cases}) + "\n")


if __name__ == "__main__":
    main()
