"""Which checkpoints are kept: the newest, the best, and every k-th for good."""

from collections.abc import Sequence
from typing import Any

from bert_jax.config import Run


class Kept:
    """Orbax's question which checkpoints to keep, answered by what the JSON beside them says.

    Not its `best_fn` with `max_to_keep`, which removes the newest; nor its metrics, files without
    which it cannot be opened.
    """

    def __init__(self, run: Run):
        self.losses: dict[int, float | None] = {}
        self._run = run

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Of each checkpoint, the oldest first."""
        del context
        steps = [found.step for found in checkpoints]
        known = [(self.losses[s], s) for s in steps if self.losses.get(s) is not None]
        kept = {*sorted(steps)[-self._run.keep_checkpoints :]}
        kept.update(step for _, step in sorted(known)[: self._run.keep_best])
        every = self._run.keep_every
        return [step in kept or (every > 0 and step % every == 0) for step in steps]
