"""What is learned: which parameters, and what a batch says of them."""

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
    """The mathematics of a step: it knows no devices, no optimizer and no files.

    Two that compute the same are equal and hashable, as frozen dataclasses are: compiled steps are
    found by them. An experiment's own (`data.code`) is what a function of (model, data) returns.
    One that has `idle` names there what of its parameters learns nothing: that stays as it is.

    """

    @property
    def model(self) -> Model:
        """The encoder's shape and numerics."""

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of what `forward` returns."""

    @property
    def losses(self) -> tuple[str, ...]:
        """Those of the metrics whose means are added up to the loss."""

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Sharding rules: exactly one for each parameter, by its path."""

    def init_params(self, key: jax.Array) -> Any:
        """Returns fresh parameters, those that learn alone: nested dicts of float32 arrays.

        In pre-training `encoder` is as `model.heads.init_params` has it. Those under `pooler`,
        `masked_lm` and `next_sentence` are taken for the heads of `model.heads`; what has other
        names stays the objective's own.
        """

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows: {name: float32 [2], a sum and a count}.

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


class ComparingObjective(Objective, Protocol):
    """An objective that compares the rows of all micro-batches with each other.

    Its `forward` is `compare` of `vectors`.
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
        """Computes the metrics of the rows from their vectors; they depend on no noise."""


@dataclasses.dataclass(frozen=True)
class Pretraining:
    """Pieces and pairs (Devlin et al. 2018, section 3.1), or the first alone: `losses.LEARNED`.

    Of the first alone the head of the second has parameters too, which are `idle`.
    """

    model: Model
    learns: str = "mlm_nsp"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Returns the names of what `forward` returns."""
        return losses_lib.names(self.learns)

    @property
    def losses(self) -> tuple[str, ...]:
        """Returns those whose means are added up to the loss."""
        return self.metrics[::2]

    @property
    def idle(self) -> tuple[str, ...]:
        """Returns the names of parameters that learn nothing of it, and stay as they are."""
        return () if len(self.losses) > 1 else ("pooler", "next_sentence")

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        """Returns where the parameters are cut."""
        return sharding.pretraining_rules(self.model)

    def init_params(self, key: jax.Array) -> heads.Params:
        """Returns fresh parameters."""
        return heads.init_params(self.model, key)

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        """Computes the metrics of some rows; nothing is fixed."""
        del fixed
        logits = heads.pretraining_logits(self.model, params, batch, noise, loop)
        return losses_lib.pretraining(*logits, batch, self.learns)

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Counts predicted pieces and pairs, by which the two losses are divided."""
        sums = batch["masked_lm_weights"].sum(), batch["row_weights"].sum()
        return sums[: len(self.losses)]

    def loss(self, metrics: losses_lib.Metrics, counts: tuple[jax.Array, ...]) -> jax.Array:
        """Returns the two losses' sums of some rows over the counts of all."""
        of_pieces, *of_pairs = self.losses
        loss = metrics[of_pieces][0] / (counts[0] + losses_lib.MASKED_LM_EPS)
        for name in of_pairs:
            loss = loss + metrics[name][0] / counts[1]
        return loss


def of(model: Model, data: Data) -> Objective:
    """Returns what is learned in pre-training: what `data.objective` names, or own code."""
    if data.code:
        return code.function(data.code)(model, data)
    return Pretraining(model, data.objective)


def make_objective(experiment: Experiment, number: int) -> Objective:
    """Returns what a phase learns; all of a run have the same parameters."""
    return of(experiment.model_of(number), experiment.data_of(number))


def measured(experiment: Experiment) -> tuple[str, ...]:
    """Returns the names of what any phase of a run measures."""
    objectives = (make_objective(experiment, number) for number in range(len(experiment.phases)))
    return tuple(dict.fromkeys(name for objective in objectives for name in objective.metrics))


def abstract_batch(phase: Phase, data: Data) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns shapes and dtypes of what `data.batches` gives for a step of the phase."""
    rows, length = phase.batch_size, phase.sequence_length
    masked = phase.max_predictions_per_seq
    shapes: dict[str, tuple[tuple[int, ...], type]] = {"rows": ((rows,), np.uint32)}
    if data.attention == "per_document":
        of_tokens = (rows, length), np.int32
        shapes |= {"example_numbers": of_tokens, "positions": of_tokens}
    shapes |= {
        "row_weights": ((rows,), np.float32),
        "input_ids": ((rows, length), np.int32),
        "segment_ids": ((rows, length), np.int32),
        "input_mask": ((rows, length), np.int32),
        "masked_lm_positions": ((rows, masked), np.int32),
        "masked_lm_ids": ((rows, masked), np.int32),
        "masked_lm_weights": ((rows, masked), np.float32),
    }
    if data.units != "sentences":
        shapes["next_sentence_labels"] = (rows,), np.int32
    return {name: jax.ShapeDtypeStruct(*value) for name, value in shapes.items()}
