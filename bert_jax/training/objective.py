"""Objectives: the parameters that a step trains, and its metrics and loss on a batch."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np

from bert_jax.config import Data, Experiment, Model, Phase, code
from bert_jax.model import heads, layers
from bert_jax.model import losses as losses_lib
from bert_jax.model.encoder import Loop
from bert_jax.training import sharding

Batch = dict[str, jax.Array]


class Objective(Protocol):
    """The mathematics of a step, independent of devices, optimizer and files.

    Objectives that compute the same are equal and hashable, as frozen dataclasses are, since they
    key the cache of compiled steps. With custom code (`data.code`) a function of (model, data)
    makes it. An optional `idle` names parameters that get no gradient and stay unchanged.
    """

    @property
    def model(self) -> Model:
        """The encoder's shape and numerics."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the metrics that `forward` returns."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the metrics whose means add up to the loss."""

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Sharding rules: exactly one for each parameter, by its path."""

    def init_params(self, key: jax.Array) -> Any:
        """Returns new trainable parameters: nested dicts of float32 arrays.

        In pre-training `encoder` has the structure of `model.heads.init_params`, and `pooler`,
        `masked_lm` and `next_sentence` are the heads of `model.heads`. Parameters with other names
        are private to the objective.
        """

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows: {name: float32 [2], a sum and a count}.

        Args:
          params: the trainable parameters, whole except for those that `loop` gathers.
          fixed: the frozen parameters, a tree of arrays.
          batch: the rows.
          noise: the dropout keys; None: no dropout.
          loop: how layers are iterated.
        """

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Returns the denominator of each of the `losses`, which depends on the data alone."""

    def loss(self, metrics: losses_lib.Metrics, counts: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the function to differentiate: the sums of some rows over the counts of all."""


class ComparingObjective(Objective, Protocol):
    """An objective that compares the rows of all micro-batches with each other.

    `forward` must equal `compare` on `vectors`.
    """

    def vectors(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the vector of each row, float32 [B, D]."""

    def compare(
        self,
        vectors: jax.Array,
        params: Any,
        fixed: Any,
        batch: Batch,
        noise: layers.Noise | None,
        loop: Loop,
    ) -> losses_lib.Metrics:
        """Computes the metrics of the rows from their vectors, without dropout."""


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """Masked tokens, and sentence pairs (Devlin et al. 2018, section 3.1): see `losses.TASKS`.

    Without pairs the parameters of the pairs' head exist, but are `idle`.
    """

    model: Model
    learns: str = "mlm_nsp"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Returns the names of the metrics that `forward` returns."""
        return losses_lib.names(self.learns)

    @property
    def losses(self) -> tuple[str, ...]:
        """Returns the names of the metrics whose means add up to the loss."""
        return self.metrics[::2]

    @property
    def idle(self) -> tuple[str, ...]:
        """Returns the names of parameters that get no gradient and stay unchanged."""
        return () if len(self.losses) > 1 else ("pooler", "next_sentence")

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Returns the sharding rules of the parameters."""
        return sharding.pretraining_rules(self.model)

    def init_params(self, key: jax.Array) -> heads.Params:
        """Returns new parameters."""
        return heads.init_params(self.model, key)

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows; there are no frozen parameters."""
        del fixed
        return heads.pretraining_metrics(self.model, params, batch, noise, loop, self.learns)

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Counts predicted tokens and pairs, the denominators of the two losses."""
        sums = batch["masked_lm_weights"].sum(), batch["row_weights"].sum()
        return sums[: len(self.losses)]

    def loss(self, metrics: losses_lib.Metrics, counts: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the sums of the losses of some rows over the counts of all."""
        token_loss, *pair_losses = self.losses
        loss = metrics[token_loss][0] / (counts[0] + losses_lib.MASKED_LM_EPS)
        for name in pair_losses:
            loss = loss + metrics[name][0] / counts[1]
        return loss


def pretraining_objective(model: Model, data: Data) -> Objective:
    """Returns the objective of `data.objective`, or of custom code."""
    if data.code:
        return code.load_function(data.code)(model, data)
    return Pretraining(model, data.objective)


def make_objective(experiment: Experiment, number: int) -> Objective:
    """Returns the objective of a phase; all phases of a run have the same parameters."""
    return pretraining_objective(experiment.model_of(number), experiment.data_of(number))


def metric_names(experiment: Experiment) -> tuple[str, ...]:
    """Returns the names of the metrics of all phases of a run."""
    objectives = (make_objective(experiment, number) for number in range(len(experiment.phases)))
    return tuple(dict.fromkeys(name for objective in objectives for name in objective.metrics))


def abstract_batch(phase: Phase, data: Data) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of a batch of `data.batches` for a step of the phase."""
    rows, tokens = (phase.batch_size,), (phase.batch_size, phase.sequence_length)
    masked = phase.batch_size, phase.max_predictions_per_seq
    shapes: dict[str, tuple[tuple[int, ...], type]] = {
        "rows": (rows, np.uint32),
        "row_weights": (rows, np.float32),
        "input_ids": (tokens, np.int32),
        "segment_ids": (tokens, np.int32),
        "input_mask": (tokens, np.int32),
        "masked_lm_positions": (masked, np.int32),
        "masked_lm_ids": (masked, np.int32),
        "masked_lm_weights": (masked, np.float32),
    }
    if data.attention == "per_document":
        shapes |= {"example_numbers": (tokens, np.int32), "positions": (tokens, np.int32)}
    if data.row_kind != "sentences":
        shapes["next_sentence_labels"] = rows, np.int32
    return {name: jax.ShapeDtypeStruct(*value) for name, value in shapes.items()}
