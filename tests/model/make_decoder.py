"""Writes decoder/: what transformers' EncoderDecoderModel makes of a batch, as in make_modern."""

import pathlib

import make_modern
import numpy as np

FOLDER = pathlib.Path(__file__).parent / "decoder"
ROWS, SOURCE, TARGET = 3, 20, 14
# The last piece is one that greedy search comes to.
FIRST, LAST = 2, 51
SIZES = {**make_modern.SIZES, "num_hidden_layers": 2}
TIED = "decoder.cls.predictions.decoder."
GRADIENTS = {
    "cross_key": "decoder.bert.encoder.layer.0.crossattention.self.key.weight",
    "encoder": "encoder.encoder.layer.0.attention.self.value.weight",
}


def drawn(shapes: dict[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """Draws their tensors; both embeddings are the same."""
    own = {name: shape for name, shape in shapes.items() if not name.startswith(TIED)}
    made = make_modern.weights(own)
    for name in made:
        if name.startswith("decoder.bert.embeddings."):
            made[name] = made[name.replace("decoder.bert.", "encoder.")]
    return made


def batch() -> dict[str, np.ndarray]:
    """Returns a source with padding, and int64 [ROWS, TARGET]: ids, and labels or -100."""
    made = make_modern.batch(SIZES, ROWS, SOURCE)
    target = make_modern.batch(SIZES, ROWS, TARGET + 1)
    ids, mask = target["input_ids"], target["attention_mask"]
    ids[:, 0] = FIRST
    return {
        "input_ids": made["input_ids"],
        "attention_mask": made["attention_mask"],
        "decoder_input_ids": ids[:, :-1],
        "labels": np.where(mask[:, 1:] > 0, ids[:, 1:], -100),
    }


def outputs() -> dict[str, np.ndarray]:
    """Returns logits, 0 at padding, the loss, gradients, and what greedy search writes."""
    import torch
    import transformers

    encoder = transformers.BertConfig(**SIZES)
    decoder = transformers.BertConfig(**SIZES, is_decoder=True, add_cross_attention=True)
    config = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(encoder, decoder)
    config.decoder_start_token_id, config.pad_token_id = FIRST, SIZES["pad_token_id"]
    model = transformers.EncoderDecoderModel(config)
    state = model.state_dict()
    values = drawn({name: tuple(v.shape) for name, v in state.items()})
    word = "decoder.bert.embeddings.word_embeddings.weight"
    tied = {f"{TIED}weight": values[word], f"{TIED}bias": values["decoder.cls.predictions.bias"]}
    tensors = {name: torch.from_numpy(value) for name, value in (values | tied).items()}
    model.load_state_dict(tensors)
    model.eval()
    made = batch()
    found = model(**{name: torch.from_numpy(value) for name, value in made.items()})
    found.loss.backward()
    written = model.generate(
        torch.from_numpy(made["input_ids"]),
        attention_mask=torch.from_numpy(made["attention_mask"]),
        max_new_tokens=TARGET,
        do_sample=False,
        num_beams=1,
        eos_token_id=LAST,
        pad_token_id=LAST,
    ).numpy()[:, 1:]
    real = (made["labels"] >= 0)[..., None].astype(np.float32)
    parameters = dict(model.named_parameters())
    return {
        "logits": found.logits.detach().numpy() * real,
        "loss": found.loss.detach().numpy(),
        "greedy": np.pad(written, ((0, 0), (0, TARGET - written.shape[1])), constant_values=LAST),
        **{name: parameters[theirs].grad.numpy() for name, theirs in GRADIENTS.items()},
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    np.savez_compressed(FOLDER / "outputs.npz", **outputs())
