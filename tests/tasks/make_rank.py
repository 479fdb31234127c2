"""Writes tests/tasks/rank.npz: losses of sentence-transformers' cross-encoders, and gradients.

Run `python tests/tasks/make_rank.py` in an environment with sentence-transformers 6.2.0, PyTorch
2.13 and NumPy. A model that gives its logits stands for an encoder.

`logits` and `scores` are float32 [E, K], `scores` nan where a list is shorter. For each of LOSSES
there are `NAME_loss` and `NAME_gradient` by the logits.
"""

import pathlib

import numpy as np
import torch
from sentence_transformers import CrossEncoder
from sentence_transformers.cross_encoder import losses

LENGTHS = (5, 2, 1, 4)
LOSSES = {
    "binary_cross_entropy": losses.BinaryCrossEntropyLoss,
    "mse": losses.MSELoss,
    "list_net": losses.ListNetLoss,
}


class Given(CrossEncoder):
    """A model whose logits are given, in the order in which it is called."""

    num_labels, device = 1, torch.device("cpu")

    def __init__(self, logits: torch.Tensor):
        torch.nn.Module.__init__(self)
        object.__setattr__(self, "logits", logits)
        self.done = 0

    def preprocess(self, pairs: list, **_: object) -> dict:
        return {"pairs": torch.zeros(len(pairs))}

    def forward(self, features: dict) -> dict:
        start, self.done = self.done, self.done + len(features["pairs"])
        return {"scores": self.logits[start : self.done, None]}


def main() -> None:
    rng = np.random.default_rng(0)
    shape = len(LENGTHS), max(LENGTHS)
    is_text = np.arange(shape[1]) < np.array(LENGTHS)[:, None]
    found = {
        "logits": rng.normal(0, 3, shape).astype(np.float32),
        "scores": np.where(is_text, rng.uniform(0, 1, shape), np.nan).astype(np.float32),
    }
    for name, loss in LOSSES.items():
        logits = torch.from_numpy(found["logits"][is_text]).requires_grad_()
        scores = torch.from_numpy(found["scores"][is_text])
        inputs, labels = [["q"] * len(scores), ["d"] * len(scores)], scores
        if name == "list_net":
            inputs = [["q"] * len(LENGTHS), [["d"] * length for length in LENGTHS]]
            labels = list(scores.split(LENGTHS))
        value = loss(Given(logits))(inputs, labels)
        value.backward()
        gradient = np.zeros(shape, np.float32)
        gradient[is_text] = logits.grad.numpy()
        found |= {f"{name}_loss": value.detach().numpy(), f"{name}_gradient": gradient}
    np.savez_compressed(pathlib.Path(__file__).with_name("rank.npz"), **found)


if __name__ == "__main__":
    main()
