"""The side of `finetune_parity` that runs in PyTorch's environment."""

import json
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peer import adamw

Arrays = dict[str, np.ndarray]


class Tuned(torch.nn.Module):
    """transformers' BertModel with a task's layer."""

    def __init__(self, folder: pathlib.Path, settings: dict[str, Any], kernel: np.ndarray):
        super().__init__()
        hidden, attention, head = settings["dropout"]
        self.bert = transformers.BertModel.from_pretrained(
            folder,
            hidden_dropout_prob=hidden,
            attention_probs_dropout_prob=attention,
            add_pooling_layer=settings["reads"] == "pooled",
        )
        self.dropout = torch.nn.Dropout(head)
        self.head = torch.nn.Linear(*kernel.shape)
        with torch.no_grad():
            self.head.weight.copy_(torch.tensor(kernel.T))
            self.head.bias.zero_()

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """[B, outputs] or [B, S, outputs]"""
        found = self.bert(
            input_ids=batch["input_ids"].long(),
            token_type_ids=batch["segment_ids"].long(),
            attention_mask=batch["input_mask"].long(),
        )
        hidden = found.pooler_output
        return self.head(self.dropout(found.last_hidden_state if hidden is None else hidden))


def loss_of(logits: torch.Tensor, batch: dict[str, torch.Tensor], settings: dict[str, Any]):
    """As transformers' heads have it; padding is no place of an answer."""
    entropy, kind = torch.nn.functional.cross_entropy, settings["kind"]
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
        rows_per_example = settings["rows_per_example"]
        return entropy(logits.reshape(-1, rows_per_example), targets[::rows_per_example])
    return entropy(logits, targets)


def main() -> int:
    """Trains on the batches of the folder; writes the losses and the scores of held-out rows."""
    base, folder = map(pathlib.Path, sys.argv[1:])
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(2)
    settings = json.loads((folder / "settings.json").read_text())
    torch.manual_seed(settings["seed"])
    batches = dict(np.load(folder / "training.npz"))
    model = Tuned(base, settings, batches.pop("head/kernel"))
    batches.pop("head/bias")
    rates, widths = batches.pop("learning_rates"), batches.pop("widths")
    update = adamw(
        model, settings["weight_decay"], betas=tuple(settings["betas"]), eps=settings["eps"]
    )
    model.train()
    losses = []
    for number, (rate, width) in enumerate(zip(rates, widths, strict=True)):
        batch = tensors({name: values[number] for name, values in batches.items()}, width)
        update.zero_grad()
        loss = loss_of(model(batch), batch, settings)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings["clip"])
        for group in update.param_groups:
            group["lr"] = rate
        update.step()
        losses.append(float(loss))
    model.eval()
    found = {"losses": np.array(losses)}
    with torch.no_grad():
        for number in range(len(list(folder.glob("held_out_*.npz")))):
            batch = dict(np.load(folder / f"held_out_{number}.npz"))
            found[f"logits_{number}"] = model(tensors(batch, None)).numpy()
    np.savez(folder / "peer.npz", **found)
    return 0


def tensors(batch: Arrays, width: int | None) -> dict[str, torch.Tensor]:
    """A batch, cut to its own length."""
    return {
        name: torch.tensor(values[:, :width] if values.ndim == 2 else values)
        for name, values in batch.items()
        if name != "rows"
    }


if __name__ == "__main__":
    sys.exit(main())
