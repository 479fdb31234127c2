"""The share of a text that its vocabulary cannot read: pieces that are [UNK]."""

from collections.abc import Iterable, Sequence

import numpy as np

from bert_jax.text.tokenizer import Tokenizer

# More of them is no accident of spelling.
MOST = 0.02


class Share:
    """Counts the pieces of rows as they come, [CLS] and [SEP] left out."""

    def __init__(self, tokenizer: Tokenizer):
        self._unknown = tokenizer.unk_id
        self._around = [tokenizer.cls_id, tokenizer.sep_id]
        self._pieces = self._lost = 0

    def add(self, rows: Iterable[Sequence[int] | np.ndarray]) -> "Share":
        """Counts rows of ids; returns itself."""
        for row in rows:
            ids = np.asarray(row)
            self._pieces += len(ids) - int(np.isin(ids, self._around).sum())
            self._lost += int((ids == self._unknown).sum())
        return self

    @property
    def value(self) -> float:
        """The share of pieces that are unknown, in [0, 1]; of none 0."""
        return self._lost / max(self._pieces, 1)

    def warning(self, what: str) -> str:
        """Returns a line of warning about texts that `what` names; "" if few pieces are unknown."""
        if self.value <= MOST:
            return ""
        return (
            f"warning: {self.value:.0%} of {what} is [UNK]: the vocabulary cannot read it, and the "
            "model sees nothing there; use a model whose vocabulary is of this language and script"
        )
