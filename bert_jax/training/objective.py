"""What is learned: which parameters, and what a batch says of them."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax

from bert_jax.config import Data, Model
from bert_jax.model import heads, layers
from bert_jax.model import losses as losses_lib
from bert_jax.model.encoder import Loop
from bert_jax.training import sharding

Batch = dict[str, jax.Array]


class Objective(Protocol):
    """The mathematics of a step: it knows no devices, no optimizer and no files.

    Attributes:
      model: the encoder's shape and numerics.
      metrics: names of what `forward` returns.
      losses: those of them whose means are added up to the loss.
      rules: where the parameters are cut.
    """

    model: Model
    metrics: tuple[str, ...]
    losses: tuple[str, ...]
    rules: Sequence[sharding.Rule]

    def init_params(self, key: jax.Array) -> Any:
        """Returns fresh parameters, those that learn alone: nested dicts of float32 arrays."""

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows.

        Args:
          params: those that learn, whole except for what `loop` gathers.
          fixed: a tree of arrays that do not learn.
          batch: the rows.
          noise: of dropout; None drops nothing.
          loop: how the layers are run.
        """

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Returns what the sum of each of the `losses` is divided by; known from the data alone."""

    def loss(self, metrics: losses_lib.Metrics, counts: tuple[jax.Array, ...]) -> jax.Array:
        """Returns what is differentiated: the sums of some rows over the counts of all."""


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """Masked pieces and the next sentence (Devlin et al. 2018, section 3.1), or the first alone.

    Of the first alone the head of the second has parameters too, which learn nothing.
    """

    model: Model
    metrics: tuple[str, ...] = losses_lib.NAMES
    losses: tuple[str, ...] = ("masked_lm_loss", "next_sentence_loss")

    @classmethod
    def of(cls, model: Model, data: Data) -> "Pretraining":
        """Returns what `data.objective` names."""
        if data.objective == "mlm_nsp":
            return cls(model)
        return cls(model, losses_lib.MASKED_LM_NAMES, ("masked_lm_loss",))

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Returns where the parameters are cut."""
        return sharding.RULES[self.model.kind]

    def init_params(self, key: jax.Array) -> heads.Params:
        """Returns fresh parameters."""
        return heads.init_params(self.model, key)

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows; nothing is fixed."""
        del fixed
        logits = heads.pretraining_logits(self.model, params, batch, noise, loop)
        if self.metrics == losses_lib.MASKED_LM_NAMES:
            return losses_lib.masked_lm(logits[0], batch)
        return losses_lib.pretraining(*logits, batch)

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Counts masked pieces and pairs, by which the two losses are divided."""
        sums = batch["masked_lm_weights"].sum(), batch["row_weights"].sum()
        return sums[: len(self.losses)]

    def loss(self, metrics: losses_lib.Metrics, counts: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the two losses' sums of some rows over the counts of all."""
        predictions, *rows = counts
        masked_lm = metrics["masked_lm_loss"][0] / (predictions + losses_lib.MASKED_LM_EPS)
        if "next_sentence_loss" not in self.losses:
            return masked_lm
        return masked_lm + metrics["next_sentence_loss"][0] / rows[0]
