"""The side of `parity` that runs in PyTorch's environment: loads the folders and compares."""

import json
import pathlib
import sys
from typing import Any

import numpy as np
import torch
import transformers

from benchmarks.peer import adamw, inputs

LOGITS = 2e-5
FIRST, EARLY, WHOLE = 20, 1e-4, 1e-3


class Checks:
    """Says each figure with its bound, and remembers whether all held."""

    def __init__(self):
        self.failed = 0

    def below(self, what: str, value: float, bound: float) -> None:
        self.failed += not value < bound  # NaN fails
        print(f"{what}: {value:.2e} (bound {bound:.0e}){'' if value < bound else '  FAILED'}")

    def holds(self, what: str, value: bool) -> None:
        self.failed += not value
        print(f"{what}: {'yes' if value else 'NO  FAILED'}")


def main() -> int:
    """Compares everything in the folder that the arguments name."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(2)
    folder, checks = pathlib.Path(sys.argv[1]), Checks()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}")
    expected = dict(np.load(folder / "outputs.npz"))
    says = json.loads((folder / "says.json").read_text())
    for kind, architecture in says["architectures"].items():
        compare_outputs(kind, architecture, folder, expected, checks)
    compare_tokens(says, folder, checks)
    compare_sentences(says, folder, checks)
    for run in sorted(folder.glob("training *.npz")):
        compare_training(run, says, folder, checks)
    return int(checks.failed > 0)


def load(kind: str, architecture: str, folder: pathlib.Path) -> tuple[Any, dict[str, Any]]:
    """The model of a form, and what loading says."""
    cls = getattr(transformers, architecture)
    return cls.from_pretrained(folder / kind, output_loading_info=True)


def compare_outputs(
    kind: str,
    architecture: str,
    folder: pathlib.Path,
    expected: dict[str, np.ndarray],
    checks: Checks,
) -> None:
    """Keys, outputs; then saves the model as a user would."""
    model, info = load(kind, architecture, folder)
    for keys in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        checks.holds(f"{kind}: no {keys}", not info[keys])
    model.eval()
    with torch.no_grad():
        found = model(**inputs(expected, model))
    at = torch.from_numpy(expected["masked_lm_positions"]).long()
    for theirs, ours in (
        ("prediction_logits", "prediction_logits"),
        ("logits", "prediction_logits"),
        ("seq_relationship_logits", "seq_relationship_logits"),
        ("last_hidden_state", "last_hidden_state"),
        ("pooler_output", "pooler_output"),
    ):
        value = getattr(found, theirs, None)
        if value is None:
            continue
        if ours == "prediction_logits":
            value = value.gather(1, at[..., None].expand(-1, -1, value.shape[-1]))
        off = np.abs(value.numpy() - expected[ours])
        if ours == "last_hidden_state":  # in a window of padding alone neither means anything
            off = off[expected["input_mask"] > 0]
        off = off.max()
        checks.below(f"{kind}: {theirs}, largest difference", float(off), LOGITS)
    model.save_pretrained(folder / f"saved_{kind}")
    # Users have either class's files.
    cls = transformers.BertTokenizer if kind == "masked_lm" else transformers.AutoTokenizer
    cls.from_pretrained(folder / kind).save_pretrained(folder / f"saved_{kind}")


def compare_tokens(says: dict[str, Any], folder: pathlib.Path, checks: Checks) -> None:
    """Ids of AutoTokenizer, lower-casing and not."""
    for name, ids in says["ids"].items():
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder / name)
        theirs = tokenizer(says["texts"], add_special_tokens=False)["input_ids"]
        checks.holds(f"{name}: AutoTokenizer's ids of {len(ids)} texts equal ours", theirs == ids)


def compare_sentences(says: dict[str, Any], folder: pathlib.Path, checks: Checks) -> None:
    """sentence-transformers gives the mean over a text's pieces."""
    from sentence_transformers import SentenceTransformer

    encoder = SentenceTransformer(str(folder / "encoder"), device="cpu")
    text = "We the people of the United States"
    batch = encoder.tokenizer(text, return_tensors="pt")
    model, _ = load("encoder", says["architectures"]["encoder"], folder)
    with torch.no_grad():
        mean = model.eval()(**batch).last_hidden_state[0].mean(0).numpy()
    off = np.abs(encoder.encode(text) - mean).max()
    checks.below("sentence-transformers: mean of the pieces, largest difference", off, 1e-6)


class Pretraining(torch.nn.Module):
    """A masked LM of theirs with the pooler and the next-sentence head of ours."""

    def __init__(self, masked_lm: Any, folder: pathlib.Path):
        super().__init__()
        self.masked_lm = masked_lm
        above = dict(np.load(folder / "above.npz"))
        self.pooler, self.next_sentence = (
            torch.nn.Linear(*above[f"{part}/kernel"].shape) for part in ("pooler", "next_sentence")
        )
        for part in ("pooler", "next_sentence"):
            layer = getattr(self, part)
            layer.weight.data = torch.from_numpy(above[f"{part}/kernel"].T.copy())
            layer.bias.data = torch.from_numpy(above[f"{part}/bias"])

    def loss(self, batch: dict[str, np.ndarray]) -> torch.Tensor:
        """Both losses' sum, or the one of masked LM where there are no pairs."""
        read, wanted = inputs(batch, self.masked_lm), targets(batch)
        found = self.masked_lm(**read, labels=wanted["labels"], output_hidden_states=True)
        if "next_sentence_labels" not in batch:
            return found.loss
        pooled = torch.tanh(self.pooler(found.hidden_states[-1][:, 0]))
        logits = self.next_sentence(pooled)
        return found.loss + torch.nn.functional.cross_entropy(logits, wanted["next_sentence_label"])


def compare_training(
    path: pathlib.Path, says: dict[str, Any], folder: pathlib.Path, checks: Checks
) -> None:
    """The losses of the same steps with torch.optim's AdamW, or its Muon for layers' matrices."""
    run, name = dict(np.load(path)), path.stem
    masked_lm, _ = load("masked_lm", says["architectures"]["masked_lm"], folder)
    model = Pretraining(masked_lm, folder)
    model.train()  # the dropout of its config is 0
    optimizers = [adamw(model, 0.01, lr=1e-3, betas=(0.9, 0.999), eps=1e-6)]
    if "muon" in name:
        optimizers.append(with_muon(model, optimizers[0]))
    off = []
    for number, (ours, rate) in enumerate(zip(run["losses"], run["learning_rates"], strict=True)):
        mark = f"{number}/"
        batch = {key.removeprefix(mark): run[key] for key in run if key.startswith(mark)}
        is_causal = "causal" in name and "next_sentence_labels" not in batch
        masked_lm.config.is_decoder = is_causal
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = float(rate) * group.get("times", 1.0)
            optimizer.zero_grad()
        loss = model.loss(batch)
        loss.backward()
        if is_causal:
            keep_idle(model, optimizers[0])
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        off.append(abs(loss.item() - float(ours)) / float(ours))
    print(f"{name}: loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}")
    checks.below(
        f"{name}: first {FIRST} steps, largest relative difference", max(off[:FIRST]), EARLY
    )
    checks.below(f"{name}: all {len(off)} steps, largest relative difference", max(off), WHOLE)


def with_muon(model: Pretraining, rest: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Takes the matrices of layers from one optimizer and gives them to Muon, in float32."""
    matrices = [
        value
        for key, value in model.named_parameters()
        if ".layer." in key and key.endswith("weight") and value.ndim == 2
    ]
    for group in rest.param_groups:
        group["params"] = [p for p in group["params"] if not any(p is m for m in matrices)]
    torch.Tensor.bfloat16 = torch.Tensor.float  # which its Newton-Schulz casts to
    # Ours is ten times the others' rate, 0.01 against 1e-3.
    muon = torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.01)
    for group in muon.param_groups:
        group["times"] = 10.0
    return muon


def keep_idle(model: Pretraining, optimizer: torch.optim.Optimizer) -> None:
    """Counts a step for heads that learn nothing in it, and changes nothing of them."""
    for head in (model.pooler, model.next_sentence):
        for value in head.parameters():
            state = optimizer.state[value]
            state["step"] = state.get("step", torch.tensor(0.0)) + 1
            for moment in ("exp_avg", "exp_avg_sq"):
                state.setdefault(moment, torch.zeros_like(value))


def targets(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Labels as their loss wants them: -100 where nothing is predicted."""
    labels = np.full(batch["input_ids"].shape, -100, np.int64)
    row, column = np.nonzero(batch["masked_lm_weights"])
    labels[row, batch["masked_lm_positions"][row, column]] = batch["masked_lm_ids"][row, column]
    wanted = {"labels": torch.from_numpy(labels)}
    if "next_sentence_labels" in batch:
        follows = torch.from_numpy(batch["next_sentence_labels"]).long()
        wanted["next_sentence_label"] = follows
    return wanted


if __name__ == "__main__":
    sys.exit(main())
