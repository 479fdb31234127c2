"""Writes tests/tasks/similar.npz: losses of sentence-transformers, and their gradients.

Run `python tests/tasks/make_similar.py` in an environment with sentence-transformers 6.2.0,
PyTorch 2.13 and NumPy. A model that gives its input as embeddings stands for an encoder.

For each of CASES there are `NAME_vectors`, float32 [E, texts, D], of length 1, `NAME_loss` and
`NAME_gradient` by the vectors; `scores` [E] and `taught` [E, D] are what cosines and vectors learn.
"""

import pathlib

import numpy as np
import torch
from sentence_transformers.sentence_transformer import losses

EXAMPLES, WIDTH, TEMPERATURE, DIMENSIONS = 12, 16, 0.05, (4, 16)
# Texts of an example, the loss, and whether it is summed over DIMENSIONS.
CASES = {
    "pairs": (2, "contrastive", False),
    "triples": (3, "contrastive", False),
    "triples_cut": (3, "contrastive", True),
    "scores": (2, "cosine", False),
    "scores_cut": (2, "cosine", True),
    "teacher": (1, "distil", False),
}


class Given(torch.nn.Module):
    """A model whose embeddings are its input."""

    def forward(self, features: dict) -> dict:
        return {"sentence_embedding": features["embedding"]}

    def get_embedding_dimension(self) -> int:
        return WIDTH


def loss_of(name: str, is_cut: bool) -> torch.nn.Module:
    """The loss of sentence-transformers that a word of `vectors.loss` stands for."""
    model = Given()
    loss = {
        "contrastive": lambda: losses.MultipleNegativesRankingLoss(
            model,
            scale=1 / TEMPERATURE,
            directions=("query_to_doc", "doc_to_query"),
            partition_mode="per_direction",
        ),
        "cosine": lambda: losses.CosineSimilarityLoss(model),
        "distil": lambda: losses.MSELoss(model),
    }[name]()
    return losses.MatryoshkaLoss(model, loss, list(DIMENSIONS)) if is_cut else loss


def main() -> None:
    rng = np.random.default_rng(0)

    def unit(*shape: int) -> np.ndarray:
        values = rng.normal(size=shape)
        return (values / np.linalg.norm(values, axis=-1, keepdims=True)).astype(np.float32)

    found = {
        "scores": rng.uniform(0, 1, EXAMPLES).astype(np.float32),
        "taught": unit(EXAMPLES, WIDTH),
    }
    labels = {"cosine": found["scores"], "distil": found["taught"], "contrastive": found["scores"]}
    for name, (texts, loss, is_cut) in CASES.items():
        vectors = torch.from_numpy(unit(EXAMPLES, texts, WIDTH)).requires_grad_()
        columns = [{"embedding": vectors[:, i]} for i in range(texts)]
        value = loss_of(loss, is_cut)(columns, torch.from_numpy(labels[loss]))
        value.backward()
        found[f"{name}_vectors"] = vectors.detach().numpy()
        found[f"{name}_loss"] = value.detach().numpy()
        found[f"{name}_gradient"] = vectors.grad.numpy()
    np.savez_compressed(pathlib.Path(__file__).with_name("similar.npz"), **found)


if __name__ == "__main__":
    main()
