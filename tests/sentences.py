"""Small bases with settings of vectors of texts, and texts, see `make_sentences.py`."""

import numpy as np

# An ordinary text, one with capitals, one that is cut, and an empty one.
TEXTS = ["wc", "XB wd xc ?", " ".join(["wa wb xa xd"] * 5), ""]
PIECES = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "?",
    "wa",
    "wb",
    "wc",
    "wd",
    "xa",
    "xb",
    "xd",
]
# Pooling, scaling to length 1, and a layer after the pooling: its width and its activation.
CASES = [
    ("mean", True, 0, "identity"),
    ("cls", False, 0, "identity"),
    ("last", True, 0, "identity"),
    ("cls", True, 24, "tanh"),
    ("mean", False, 6, "identity"),
]


def name_of(pooling: str, normalize: bool, width: int, activation: str) -> str:
    return f"{pooling}_{activation}" if width else pooling


def base_of(pooling: str, normalize: bool, width: int, activation: str):
    """Returns a base with prompts and a length limit."""
    import jax

    from bert_jax.checkpoints.base import Base, TextVectors
    from bert_jax.config import Model
    from bert_jax.model import heads
    from bert_jax.text.tokenizer import WordPiece

    model = Model(
        vocab_size=len(PIECES),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
    )
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: heads.init_params(model, jax.random.key(0)))
    params = jax.tree.map(lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), shapes)
    known = TextVectors(
        *(pooling, normalize, 12, "wa wb ", "xa "), dense_width=width, dense_activation=activation
    )
    if width:
        shapes = {"kernel": (16, width), "bias": (width,)}
        params["dense"] = {
            name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()
        }
    return Base(model, params, WordPiece(PIECES, "uncased"), vectors=known)
