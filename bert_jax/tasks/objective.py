"""The loss of a task, over an encoder that is adapted to it."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import Adapt, Kind, Model
from bert_jax.model import layers
from bert_jax.model import losses as losses_lib
from bert_jax.model.encoder import Loop
from bert_jax.tasks import adapt as adapt_lib
from bert_jax.tasks import heads
from bert_jax.training import sharding

Batch = dict[str, jax.Array]

# Padding is never the beginning or the end of an answer.
_NO_PLACE = -1e9


@dataclasses.dataclass(frozen=True)
class TaskObjective:
    """See training.objective.Objective.

    Attributes:
      model: of the base, with the dropout and the type of `adapt`.
      kind: of the task.
      reads: what its head reads.
      outputs: how many scores its head gives.
      together: rows that make one example.
      adapt: what learns.
      fresh_parts: of the base, what it never learned.
    """

    model: Model
    kind: Kind
    reads: heads.Reads
    outputs: int
    together: int
    adapt: Adapt
    fresh_parts: tuple[str, ...] = ()

    losses: tuple[str, ...] = ("loss",)

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what `forward` returns."""
        return ("loss",) if self.kind == "regress" else ("loss", "accuracy")

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Where the parameters that learn are cut."""
        return adapt_lib.rules(self.adapt, self.reads == "pooled", self.fresh_parts)

    def init_params(self, key: jax.Array) -> Any:
        """Those that learn, fresh; an encoder among them is to be replaced by the base's."""
        whole = heads.init_params(self.model, self.reads, self.outputs, key)
        return adapt_lib.learns(self.adapt, whole, self.fresh_parts, key)

    def logits(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Scores of the head: float32 [B, outputs], or [B, S, outputs] if it reads all pieces."""
        return heads.task_logits(
            self.model,
            self.reads,
            self.outputs,
            adapt_lib.whole(self.adapt, params, fixed),
            batch,
            noise,
            self.adapt.head_dropout_prob,
            loop,
        )

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """See `Objective`."""
        return self.measured(self.logits(params, fixed, batch, noise, loop), batch)

    def measured(self, logits: jax.Array, batch: Batch) -> losses_lib.Metrics:
        """Sums and counts of the loss, and but for regressions of the hits."""
        weights = batch["row_weights"]
        if self.kind == "regress":
            errors = weights * jnp.square(logits[:, 0] - batch["targets"])
            return {"loss": jnp.stack([errors.sum(), weights.sum()])}
        if self.kind == "span":
            logits = jnp.where(batch["input_mask"][..., None] > 0, logits, _NO_PLACE)
            parts = [
                losses_lib.classification(logits[..., i], batch[name], weights)
                for i, name in enumerate(("starts", "ends"))
            ]
            # As the reference: the mean of both.
            loss, hits = ((a + b) / 2 for a, b in zip(*parts, strict=True))
            return {"loss": loss, "accuracy": hits}
        targets = batch["targets"]
        if self.kind == "tag":
            weights = batch["target_weights"] * weights[:, None]
        elif self.kind == "choice":
            logits = logits.reshape(-1, self.together)
            targets, weights = targets[:: self.together], weights[:: self.together]
        loss, hits = losses_lib.classification(logits, targets, weights)
        return {"loss": loss, "accuracy": hits}

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """See `Objective`: examples, of tags their words."""
        weights = batch["row_weights"]
        if self.kind == "tag":
            return ((batch["target_weights"] * weights[:, None]).sum(),)
        return (weights.sum() / self.together,)

    def loss(self, metrics: losses_lib.Metrics, counts: tuple[jax.Array, ...]) -> jax.Array:
        """See `Objective`."""
        return metrics["loss"][0] / counts[0]
