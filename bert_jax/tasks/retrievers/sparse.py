"""The kind `sparse`: a weight for each token of the vocabulary, as SPLADE (Formal et al. 2021).

The masked-LM head gives each token of a text a logit for each token of the vocabulary. The vector
of a text is log(1 + relu(maximum over its tokens)). A penalty makes most weights 0, so that an
inverted index can store the vectors of texts.

Shape letters: B rows, V tokens of the vocabulary.
"""

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from scipy.sparse import csr_array

from bert_jax.checkpoints.base import Base
from bert_jax.config import Finetuning, Model, SparseVectors
from bert_jax.embeddings.forms import FORMS
from bert_jax.errors import InputError
from bert_jax.model import heads, layers, similarity, transformer
from bert_jax.model import losses as losses_lib
from bert_jax.model.encoder import Loop, fill_params, params_of
from bert_jax.model.kinds import encoder_functions
from bert_jax.tasks.retrievers.retriever import Retriever, RetrieverObjective
from bert_jax.tasks.rows import Batch as HostBatch
from bert_jax.tasks.rows import TaskBatches, TaskRows
from bert_jax.tasks.similar import encode_texts
from bert_jax.tasks.task_objective import Batch, Tree
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import sharding


class EncoderWithMaskedLM(nnx.Module):
    """An encoder, and the head that gives logits of tokens."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.encoder = encoder_functions(cfg).encoder(cfg, rngs=rngs)
        self.masked_lm = transformer.MaskedLM(cfg, rngs=rngs)


@dataclasses.dataclass(frozen=True)
class SparseObjective(RetrieverObjective):
    """The `Objective` of sparse vectors: a loss on scores, and a penalty on weights."""

    @property
    def metrics(self) -> tuple[str, ...]:
        return (*super().metrics, "penalty")

    @property
    def rules(self) -> tuple[sharding.Rule, ...]:
        return tuple(sharding.masked_lm_rules(self.model))

    def init_params(self, key: jax.Array) -> Tree:
        return params_of(EncoderWithMaskedLM(self.model, rngs=nnx.Rngs(params=key)))

    def vectors(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the vector of each row, float32 [B, V], at least 0."""
        model = fill_params(params, EncoderWithMaskedLM, self.model)
        hidden, mask = encode_texts(model.encoder, self.model, batch, noise, loop)
        logits = heads.token_logits(model, self.model, hidden)
        return similarity.pool_logits(logits, mask)[:, : self.model.vocab_size]  # no padding

    def compress_output(self, values: np.ndarray) -> csr_array:
        return csr_array(values[None])

    def score_pairs(self, queries: jax.Array, texts: jax.Array) -> jax.Array:
        return similarity.dot_products(queries, texts)

    def compare(
        self,
        vectors: jax.Array,
        params: Any,
        fixed: Any,
        batch: Batch,
        noise: layers.Noise | None,
        loop: Loop,
    ) -> losses_lib.Metrics:
        metrics = super().compare(vectors, params, fixed, batch, noise, loop)
        settings, per_example = cast(SparseVectors, self.settings), self.rows_per_example
        axes = mesh_lib.manual_axes()
        weights = (batch["row_weights"] * (batch["keys"] > 0)).reshape(-1, per_example)
        grouped = vectors.reshape(*weights.shape, -1)
        parts = (settings.query_penalty, slice(0, 1)), (settings.document_penalty, slice(1, None))
        penalty = sum(
            coefficient
            * similarity.flops_penalty(
                grouped[:, part].reshape(-1, grouped.shape[2]), weights[:, part].reshape(-1), axes
            )
            for coefficient, part in parts
        )
        penalty = penalty * batch["penalty_share"][0]
        # Times the total count, by which all metrics are divided later.
        count = metrics["loss"][1]
        total = jax.lax.psum(count, axes) if axes else count
        metrics["penalty"] = jnp.stack([penalty * total, count])
        return metrics | {"loss": metrics["loss"].at[0].add(penalty * total)}


class SparseBatches(TaskBatches):
    """Batches with `penalty_share` [B], the factor of the penalties, which rises to 1 at first."""

    def __init__(self, rows: TaskRows, pad_id: int, experiment: Finetuning):
        super().__init__(rows, pad_id, experiment.batch_size, experiment.seed)
        examples = len(rows.ids) // rows.rows_per_example
        steps = math.ceil(experiment.epochs * examples / experiment.batch_size)
        self._warmup_steps = max(int(steps * experiment.sparse.penalty_warmup), 1)

    def batch(self, step: int, indices: np.ndarray) -> HostBatch:
        share = np.float32(min(step / self._warmup_steps, 1) ** 2)
        return super().batch(step, indices) | {"penalty_share": np.full(len(indices), share)}


class Sparse(Retriever):
    """The task kind `sparse`."""

    reads, form, form_name = "masked_lm", FORMS["sparse"], "sparse"
    objective_class = SparseObjective

    def make_batches(self, rows: TaskRows, experiment: Finetuning) -> TaskBatches:
        return SparseBatches(rows, self.tokenizer.pad_id, experiment)

    def objective_fields(self, experiment: Finetuning, base: Base) -> dict[str, Any]:
        if any(part.startswith("masked_lm") for part in base.fresh):
            raise InputError(
                f"--from {experiment.init_from}: its masked LM head is untrained, and task.kind="
                "sparse needs it; import weights with this head"
            )
        return super().objective_fields(experiment, base)
