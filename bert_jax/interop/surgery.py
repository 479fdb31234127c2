"""Another vocabulary under the weights of a base."""

import dataclasses
from typing import Any, Literal

import jax
import numpy as np

from bert_jax.base import Base, Moments
from bert_jax.errors import InputError
from bert_jax.model.encoder import padded_vocab_size
from bert_jax.text.tokenizer import Tokenizer, WordPiece


def with_tokenizer(base: Base, tokenizer: Tokenizer) -> tuple[Base, int]:
    """The base with the pieces of another WordPiece vocabulary, and how many of them it knew.

    A piece that both have keeps its word embedding and output bias; a new one begins with the mean
    of the old ones, so that it is neither likely nor unlikely, and with moments of zero.

    Raises:
      InputError: one of the two is no WordPiece vocabulary.
    """
    for one in (base.tokenizer, tokenizer):
        if not isinstance(one, WordPiece):
            raise InputError(
                f"--tokenizer: only a WordPiece vocabulary can take another's place, not {one.kind}"
            )
    old = {base.tokenizer.piece(i): i for i in range(base.tokenizer.size)}
    rows = np.array([old.get(tokenizer.piece(i), -1) for i in range(tokenizer.size)])
    cfg = dataclasses.replace(base.model, vocab_size=tokenizer.size)

    def resized(tree: dict[str, Any], start: Literal["mean", "zero"]) -> dict[str, Any]:
        tree = jax.tree.map(np.asarray, tree)  # a tree of its own
        word, head = tree["encoder"]["embeddings"]["word"], tree["masked_lm"]
        for leaf, name in ((word, "embedding"), (head, "output_bias")):
            table = leaf[name][: base.model.vocab_size]
            new = np.zeros((padded_vocab_size(cfg), *table.shape[1:]), np.float32)
            if start == "mean":
                new[: tokenizer.size] = table.mean(0, dtype=np.float64)
            new[: tokenizer.size][rows >= 0] = table[rows[rows >= 0]]
            leaf[name] = new
        return tree

    moments = base.moments
    if moments is not None:
        trees = (resized(tree, "zero") for tree in (moments.mean, moments.square))
        moments = Moments(moments.step, *trees)
    params, changed = resized(base.params, "mean"), f"{base.source}, with another vocabulary"
    known = int((rows >= 0).sum())
    return Base(cfg, params, tokenizer, changed, base.fresh, moments), known
