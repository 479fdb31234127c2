"""Writes causal/: what transformers' decoders make of a batch, drawn and run as in make_modern."""

import pathlib

import make_modern
import numpy as np
from make_modern import SIZES

FOLDER = pathlib.Path(__file__).parent / "causal"
ROWS, LENGTH = 3, 24
# A window of 8 places lets a token see 4 to its left; of the decoder's window, which is counted
# twice and itself included, those are 10.
CONFIGS = {
    "bert": {**SIZES, "num_hidden_layers": 2, "is_decoder": True},
    "modern": {**SIZES, "num_hidden_layers": 4, "local_attention": 10},
}
CLASSES = {
    "bert": ("BertLMHeadModel", "BertConfig"),
    "modern": ("ModernBertDecoderForCausalLM", "ModernBertDecoderConfig"),
}
# Of theirs, the gradient that goes through everything.
GRADIENTS = {
    "bert": "bert.embeddings.word_embeddings.weight",
    "modern": "model.embeddings.tok_embeddings.weight",
}


def batch() -> dict[str, np.ndarray]:
    """Returns ids and mask, int64 [ROWS, LENGTH]: padding behind all rows but the first."""
    made = make_modern.batch(SIZES, ROWS, LENGTH)
    return {name: made[name] for name in ("input_ids", "attention_mask")}


def outputs(kind: str) -> dict[str, np.ndarray]:
    """Returns logits, 0 at padding, the loss of the next pieces, and one gradient."""
    import torch
    import transformers

    model_class, config_class = (getattr(transformers, name) for name in CLASSES[kind])
    model = model_class(config_class(**CONFIGS[kind]))
    state, tied = model.state_dict(), dict(model._tied_weights_keys)
    shapes = {name: tuple(value.shape) for name, value in state.items() if name not in tied}
    drawn = make_modern.weights(shapes)
    drawn |= {copy: drawn[original] for copy, original in tied.items()}
    model.load_state_dict({name: torch.from_numpy(value) for name, value in drawn.items()})
    model.eval()
    made = batch()
    inputs = {name: torch.from_numpy(value) for name, value in made.items()}
    labels = np.where(made["attention_mask"] > 0, made["input_ids"], -100)
    found = model(**inputs, labels=torch.from_numpy(labels))
    found.loss.backward()
    real = made["attention_mask"][..., None].astype(np.float32)
    return {
        f"{kind}.logits": found.logits.detach().numpy() * real,
        f"{kind}.loss": found.loss.detach().numpy(),
        f"{kind}.gradient": dict(model.named_parameters())[GRADIENTS[kind]].grad.numpy(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / "outputs.npz", **outputs("bert"), **outputs("modern"))
