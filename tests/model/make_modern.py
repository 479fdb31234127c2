"""Writes modern/: what transformers' ModernBERT makes of random weights and one batch.

Run in an environment of its own with torch 2.13.0 and transformers 5.23.0:
python tests/model/make_modern.py. Float32, no dropout. The weights are not kept: `weights` draws
them again.
"""

import pathlib

import numpy as np

FOLDER = pathlib.Path(__file__).parent / "modern"
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_attention_heads": 2,
    "intermediate_size": 20,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}
# Of ModernBertConfig. A window of 8 places lets a token see 4 on each side, of rows of 24.
CONFIG = {**SIZES, "num_hidden_layers": 7, "local_attention": 8}
ROWS, LENGTH = 3, 24
_IGNORED = -100


def weights(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Draws tensors of these names and shapes, float32: scales around 1, all others around 0."""
    rng = np.random.default_rng(0)
    made = {}
    for name, shape in sorted(shapes.items()):
        value = rng.standard_normal(shape)
        is_scale = "norm" in name.lower() and name.endswith("weight")
        made[name] = (1 + 0.3 * value if is_scale else 0.2 * value).astype(np.float32)
    return made


def batch(config: dict[str, int], rows: int, length: int) -> dict[str, np.ndarray]:
    """Draws int64 [rows, length]: ids, padding behind all rows but the first, and labels."""
    rng = np.random.default_rng(1)
    ids = rng.integers(5, config["vocab_size"], (rows, length))
    lengths = np.array([length, *rng.integers(length // 2, length, rows - 1)])
    mask = (np.arange(length) < lengths[:, None]).astype(np.int64)
    predicted = (rng.random((rows, length)) < 0.2) & (mask > 0)
    labels = np.where(predicted, rng.integers(5, config["vocab_size"], ids.shape), _IGNORED)
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": labels}


def outputs() -> dict[str, np.ndarray]:
    """Returns hidden_states [L + 1, ROWS, LENGTH, D], logits, loss, and gradients by `grad.NAME`.

    At padding they are 0.
    """
    import torch
    import transformers

    model = transformers.ModernBertForMaskedLM(transformers.ModernBertConfig(**CONFIG))
    state = model.state_dict()
    drawn = weights({name: tuple(v.shape) for name, v in state.items() if name != "decoder.weight"})
    drawn["decoder.weight"] = drawn["model.embeddings.tok_embeddings.weight"]
    model.load_state_dict({name: torch.from_numpy(value) for name, value in drawn.items()})
    model.eval()
    made = batch(CONFIG, ROWS, LENGTH)
    inputs = {name: torch.from_numpy(value) for name, value in made.items()}
    found = model(**inputs, output_hidden_states=True)
    found.loss.backward()
    real = made["attention_mask"][..., None]
    hidden = torch.stack(found.hidden_states).detach().numpy()
    gradients = {f"grad.{name}": p.grad.numpy() for name, p in model.named_parameters()}
    return {
        "hidden_states": hidden * real.astype(np.float32),
        "logits": found.logits.detach().numpy() * real.astype(np.float32),
        "loss": found.loss.detach().numpy(),
        **gradients,
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / "outputs.npz", **outputs())
