"""Writes tests/embeddings/sentences.npz: vectors of sentence-transformers, of what `export` wrote.

Run `python tests/embeddings/make_sentences.py FOLDER` in the environment of the project, then in
one with sentence-transformers 6.2.0 and NumPy: the first writes bases and their exports, the second
asks these.
"""

import pathlib
import sys

import numpy as np

# Cut, empty, in capitals, and of the usual kind.
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
    """A base that has prompts and cuts texts."""
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
        place = folder / f"base_{pooling}"
        base_lib.write(base_of(pooling, normalize), epath.Path(place))
        export = ["export", "--workdir", str(place), "--as", "encoder"]
        assert cli.main([*export, "--out", str(folder / pooling)]) == 0


def write_vectors(folder: pathlib.Path) -> None:
    from sentence_transformers import SentenceTransformer

    found = {}
    for pooling, _ in CASES:
        model = SentenceTransformer(str(folder / pooling), device="cpu")
        found[f"{pooling}_text"] = model.encode_document(TEXTS)
        found[f"{pooling}_query"] = model.encode_query(TEXTS)
    np.savez_compressed(pathlib.Path(__file__).with_name("sentences.npz"), **found)


if __name__ == "__main__":
    place = pathlib.Path(sys.argv[1])
    (write_vectors if place.exists() else write_exports)(place)
