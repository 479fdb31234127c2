"""Writes tests/embeddings/sentences.npz: vectors by sentence-transformers from exported bases.

Run `python tests/embeddings/make_sentences.py FOLDER` in the environment of the project, then in
one with sentence-transformers 6.2.0 and NumPy: the first run writes bases and exports them, the
second computes the vectors.
"""

import pathlib
import sys

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
CASES = [("mean", True), ("cls", False), ("last", True)]


def base_of(pooling: str, normalize: bool):
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
    known = TextVectors(pooling, normalize, 12, "wa wb ", "xa ")
    return Base(model, params, WordPiece(PIECES, "uncased"), vectors=known)


def write_exports(folder: pathlib.Path) -> None:
    from etils import epath

    from bert_jax import cli
    from bert_jax.checkpoints import base as base_lib

    for pooling, normalize in CASES:
        base = folder / f"base_{pooling}"
        base_lib.write(base_of(pooling, normalize), epath.Path(base))
        export = ["export", "--workdir", str(base), "--as", "encoder"]
        assert cli.main([*export, "--out", str(folder / pooling)]) == 0


def write_vectors(folder: pathlib.Path) -> None:
    from sentence_transformers import SentenceTransformer

    vectors = {}
    for pooling, _ in CASES:
        model = SentenceTransformer(str(folder / pooling), device="cpu")
        vectors[f"{pooling}_text"] = model.encode_document(TEXTS)
        vectors[f"{pooling}_query"] = model.encode_query(TEXTS)
    np.savez_compressed(pathlib.Path(__file__).with_name("sentences.npz"), **vectors)


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    (write_vectors if folder.exists() else write_exports)(folder)
