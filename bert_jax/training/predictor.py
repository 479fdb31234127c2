"""What a model says of a text: pieces for [MASK], and whether B follows A."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.text.vocabulary import MASK

# Inputs are padded to a multiple of this, so that lengths share compiled programs.
_LENGTH_STEP = 32


@dataclasses.dataclass
class Prediction:
    """The model's answer to a text.

    Attributes:
      masks: for each [MASK] in order, the likeliest pieces with their probabilities.
      is_next: probability that B follows A; None without B.
    """

    masks: list[list[tuple[str, float]]]
    is_next: float | None


class Predictor:
    """A model's heads and its tokenizer; parameters are given with each text."""

    def __init__(self, model: Model, tokenizer: Tokenizer):
        self._model, self._tokenizer = model, tokenizer
        self._logits = jax.jit(
            functools.partial(heads.pretraining_logits, model, noise=None, loop=Loop())
        )

    def predict(self, params: Any, a: str, b: str | None, top: int) -> Prediction:
        """Fills every [MASK] of A and B with its `top` likeliest pieces.

        Raises:
          InputError: longer than the position table.
        """
        second = None if b is None else self.encode(b)
        return self.predict_ids(params, self.encode(a), second, top)

    def predict_ids(self, params: Any, a: list[int], b: list[int] | None, top: int) -> Prediction:
        """As `predict`, of ids without [CLS] and [SEP]."""
        probs, is_next = self.probabilities(params, a, b)
        return Prediction([self.likeliest(p, top) for p in probs], is_next)

    def likeliest(self, probs: np.ndarray, top: int) -> list[tuple[str, float]]:
        """The `top` likeliest pieces of one [MASK] with their probabilities."""
        order = np.argsort(-probs, kind="stable")[:top]
        return [(self._tokenizer.piece(int(i)), float(probs[i])) for i in order]

    def probabilities(
        self, params: Any, a: list[int], b: list[int] | None
    ) -> tuple[np.ndarray, float | None]:
        """What the model makes of ids without [CLS] and [SEP].

        Returns:
          float32 [masks, vocabulary] for the [MASK]s of A and B in order, and the probability that
          B follows A, None without B.

        Raises:
          InputError: longer than the position table.
        """
        tok = self._tokenizer
        first = [tok.cls_id, *a, tok.sep_id]
        second = [] if b is None else [*b, tok.sep_id]
        ids = first + second
        limit = self._model.max_position_embeddings
        if len(ids) > limit:
            raise InputError(f"text of {len(ids)} pieces; the model reads {limit} at most")
        length = min(-(-len(ids) // _LENGTH_STEP) * _LENGTH_STEP, limit)
        column = np.arange(length)
        masks = [i for i, token in enumerate(ids) if token == tok.mask_id]
        # At least one position, and a width that texts share.
        width = -(-max(len(masks), 1) // 8) * 8
        batch = {
            "input_ids": np.pad(ids, (0, length - len(ids)), constant_values=tok.pad_id)[None],
            "segment_ids": ((column >= len(first)) & (column < len(ids)))[None],
            "input_mask": (column < len(ids))[None],
            "masked_lm_positions": np.pad(masks, (0, width - len(masks)))[None],
        }
        batch = {name: jnp.asarray(value, jnp.int32) for name, value in batch.items()}
        masked_lm, next_sentence = self._logits(params, batch)
        probs = np.asarray(jax.nn.softmax(masked_lm[0, : len(masks), : self._model.vocab_size]))
        return probs, None if b is None else float(jax.nn.softmax(next_sentence[0])[0])

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which [MASK] stands for itself."""
        parts = text.split(MASK)
        ids = self._tokenizer.encode(parts[0])
        for part in parts[1:]:
            ids = [*ids, self._tokenizer.mask_id, *self._tokenizer.encode(part)]
        return ids
