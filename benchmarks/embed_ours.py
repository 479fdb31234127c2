"""Our side of `embed`, served from its own process."""

import pathlib

import jax
import numpy as np
from etils import epath

from benchmarks import measure, worker
from bert_jax.config import Parallelism
from bert_jax.interop import importing
from bert_jax.loaded import Loaded
from bert_jax.training import mesh as mesh_lib
from bert_jax.vectors import embed


class Ours:
    """One encoder, and the sentences."""

    def build(self, source: str, folder: str, max_length: int, devices: int) -> int:
        """Imports the weights; returns the tokens of all sentences."""
        jax.config.update("jax_num_cpu_devices", devices)
        self._folder = pathlib.Path(folder)
        base = epath.Path(folder) / "base"
        importing.import_weights(epath.Path(source), base, None, lambda line: None)
        trained = Loaded.of(base)
        mesh = mesh_lib.make_mesh(Parallelism())
        self._embedder = embed.Embedder(trained, embed.Features(), mesh, max_length)
        self._texts = (self._folder / "texts.txt").read_text().splitlines()
        pieces = (len(trained.tokenizer.encode(text)) for text in self._texts)
        return sum(min(count + 2, max_length) for count in pieces)

    def embed(self) -> tuple[float, float]:
        """Wall and CPU seconds from the sentences to their vectors."""
        made: list[np.ndarray] = []
        cpu, wall = measure.clocked(
            lambda: made.extend(found.vectors for found in self._embedder.embed(self._texts))
        )
        np.save(self._folder / "ours.npy", np.concatenate(made))
        return wall, cpu


if __name__ == "__main__":
    worker.serve(Ours())
