"""PyTorch's BertForPreTraining (transformers), served to `torch_step` from its own environment.

`stock` is the model as it is shipped: scores of the whole vocabulary at every position. `patched`
gathers the masked positions before the head, which is not what a user gets, but the stronger peer.
"""

import torch
from transformers import BertConfig, BertForPreTraining

from benchmarks import measure, shapes, worker

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def adamw(model: torch.nn.Module, weight_decay: float, **settings) -> torch.optim.Optimizer:
    """AdamW; neither biases nor layer norms decay."""
    named, kept = list(model.named_parameters()), ("bias", "LayerNorm.weight", "norm.weight")
    groups = [
        {"params": [p for n, p in named if not n.endswith(kept)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n.endswith(kept)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **settings)


class Peer:
    """One model and optimizer; entries differ in how the loss is computed."""

    def __init__(self):
        torch.set_num_interop_threads(1)
        self._losses = {}

    def build(
        self, shape: str, sequence: int, batch: int = 0, device: measure.Device = "cpu"
    ) -> dict[str, str]:
        """Makes the model; returns versions."""
        self._shape, self._device = shapes.sized(shape, sequence, batch), device
        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=shapes.VOCAB_SIZE,
            hidden_size=self._shape.width,
            num_hidden_layers=self._shape.layers,
            num_attention_heads=self._shape.heads,
            intermediate_size=4 * self._shape.width,
            attn_implementation="sdpa",
        )
        self._model = BertForPreTraining(config).train().to(device)
        self._optimizer = adamw(self._model, 0.01, lr=1e-5, eps=1e-6, fused=True)
        arrays = shapes.make_batch(self._shape, 0)
        self._batch = {k: torch.from_numpy(v).long() for k, v in arrays.items() if k != "rows"}
        labels = torch.full_like(self._batch["input_ids"], -100)
        labels.scatter_(1, self._batch["masked_lm_positions"], self._batch["masked_lm_ids"])
        self._batch["labels"] = labels
        self._batch = {name: values.to(device) for name, values in self._batch.items()}
        return measure.versions(["torch", "transformers", "numpy"])

    def add(self, entry: str, dtype: str, kind: str, how: str) -> float:
        """Adds a way to the loss, runs it three times and returns its first loss."""
        function = {"stock": self._stock, "patched": self._patched}[kind]
        if how == "compiled":
            function = torch.compile(function)
        self._losses[entry] = function, DTYPES[dtype]
        first = float(self._step(entry))
        for _ in range(2):
            self._step(entry)
        return first

    def step(self, entry: str) -> tuple[float, float]:
        """CPU and wall seconds of a step, the mean of one turn."""

        def turn() -> None:
            for _ in range(self._shape.turn):
                loss = self._step(entry)
            float(loss)  # waits for a GPU

        cpu, wall = measure.clocked(turn)
        return cpu / self._shape.turn, wall / self._shape.turn

    def _step(self, entry: str) -> torch.Tensor:
        function, dtype = self._losses[entry]
        with torch.autocast(self._device, torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = function(self._batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _stock(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self._model(
            input_ids=batch["input_ids"],
            token_type_ids=batch["segment_ids"],
            attention_mask=batch["input_mask"],
            labels=batch["labels"],
            next_sentence_label=batch["next_sentence_labels"],
        ).loss

    def _patched(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        hidden, pooled = self._model.bert(
            input_ids=batch["input_ids"],
            token_type_ids=batch["segment_ids"],
            attention_mask=batch["input_mask"],
            return_dict=False,
        )
        index = batch["masked_lm_positions"][:, :, None].expand(-1, -1, hidden.shape[-1])
        scores = self._model.cls.predictions(hidden.gather(1, index))
        follows = self._model.cls.seq_relationship(pooled)
        cross_entropy = torch.nn.functional.cross_entropy
        masked_lm = cross_entropy(scores.flatten(0, 1).float(), batch["masked_lm_ids"].flatten())
        return masked_lm + cross_entropy(follows.float(), batch["next_sentence_labels"])


if __name__ == "__main__":
    worker.serve(Peer())
