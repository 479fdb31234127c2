"""A base made ready for a task: its objective, and what of its weights learns or stays."""

import dataclasses
import hashlib
from typing import Any

import jax
import numpy as np
from etils import epath

from bert_jax import base as base_lib
from bert_jax.config import Adapt, Finetuning, Model
from bert_jax.errors import InputError
from bert_jax.predict import Trained
from bert_jax.tasks import shape as shape_lib
from bert_jax.tasks.objective import TaskObjective
from bert_jax.text.tokenizer import Tokenizer


@dataclasses.dataclass
class Adapted:
    """Weights of a base that a task's head reads, and their names.

    Attributes:
      model: of the base, with the dropout and the type of `adapt`.
      params: `encoder` and `pooler`, on the host.
      fresh_parts: of these, what never learned.
      tokenizer: of the base.
      sha256: of the weights and the tokenizer: what a difference to them belongs to.
    """

    model: Model
    params: dict[str, Any]
    fresh_parts: tuple[str, ...]
    tokenizer: Tokenizer
    sha256: str

    @classmethod
    def of(cls, claim: Finetuning) -> "Adapted":
        """Reads the base that a claim names.

        Raises:
          InputError: it names none, or there is none, or it does not read such long rows.
        """
        if not claim.init_from:
            raise InputError("--from: name a base or a run whose encoder is to be adapted")
        trained = Trained.of(epath.Path(claim.init_from))
        limit = trained.model.max_position_embeddings
        if claim.task.max_sequence_length > limit:
            raise InputError(
                f"task.max_sequence_length={claim.task.max_sequence_length}: longer than the "
                f"position table of {claim.init_from}, {limit}"
            )
        params = {name: trained.params[name] for name in ("encoder", "pooler")}
        params = jax.device_get(params)
        fresh = tuple(name for name in trained.fresh if name in params)
        digest = hashlib.sha256(trained.tokenizer.sha256.encode())
        for path, leaf in sorted(base_lib.flat(params).items()):
            digest.update(path.encode())
            digest.update(np.ascontiguousarray(leaf).data)
        model = _adapted_model(trained.model, claim.adapt)
        return cls(model, params, fresh, trained.tokenizer, digest.hexdigest())

    def objective(self, claim: Finetuning, shape: shape_lib.Shape, together: int) -> TaskObjective:
        """What is learned of it."""
        return TaskObjective(
            self.model,
            claim.task.kind,
            shape.reads,
            shape.outputs,
            together,
            claim.adapt,
            self.fresh_parts,
        )

    def read_by(self, shape: shape_lib.Shape) -> dict[str, Any]:
        """The weights that the task's head reads, on the host."""
        names = ("encoder", "pooler") if shape.reads == "pooled" else ("encoder",)
        return {name: self.params[name] for name in names}


def _adapted_model(model: Model, adapt: Adapt) -> Model:
    frozen = adapt.how == "frozen"  # what does not learn is read as it is
    return dataclasses.replace(
        model,
        hidden_dropout_prob=0.0 if frozen else adapt.hidden_dropout_prob,
        attention_probs_dropout_prob=0.0 if frozen else adapt.attention_probs_dropout_prob,
        compute_dtype=adapt.compute_dtype,
    )
