"""What a head says of many rows."""

from typing import Any

import jax
import numpy as np

from bert_jax.config import Parallelism
from bert_jax.tasks.objective import TaskObjective
from bert_jax.tasks.rows import Batch, Rows
from bert_jax.training import feed, step
from bert_jax.training import lines as lines_lib
from bert_jax.training import mesh as mesh_lib


class Forward:
    """A head over its encoder, compiled for the devices of a mesh, without noise."""

    def __init__(self, objective: TaskObjective, parallelism: Parallelism, mesh: jax.sharding.Mesh):
        self._objective, self._mesh = objective, mesh
        self._logits = step.make_rows_step(objective, objective.logits, parallelism, mesh)
        self._measured = jax.jit(objective.measured, out_shardings=mesh_lib.replicated(mesh))

    def outputs(
        self, params: Any, fixed: Any, batches: list[tuple[np.ndarray, Batch]], rows: Rows
    ) -> tuple[list[np.ndarray], float]:
        """The scores of every row, and the mean loss; nan if rows have no targets.

        Args:
          params: those that learn.
          fixed: those that do not.
          batches: of `rows`, as tasks.rows.eval_batches gives them.
          rows: all of them.

        Returns:
          float32 [outputs] or [n, outputs] of each row, in the order of the rows.
        """
        found: list[Any] = [None] * len(rows.ids)
        sums = np.zeros(2)
        sharding = mesh_lib.batch_sharding(self._mesh)
        placed = feed.place_all([batch for _, batch in batches], sharding)
        labelled = bool(rows.numbers or rows.tokens)
        for (which, _), batch in zip(batches, placed, strict=True):
            logits = self._logits(params, fixed, batch)
            if labelled:
                sums += lines_lib.fetch(self._measured(logits, batch)["loss"])
            for row, scores in zip(which, lines_lib.fetch(logits), strict=False):
                found[row] = scores if scores.ndim == 1 else scores[: rows.lengths[row]]
        return found, float(sums[0] / sums[1]) if labelled else float("nan")
