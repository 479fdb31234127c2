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
from bert_jax.config import Finetuning, Model, Parallelism, SparseVectors
from bert_jax.embeddings.forms import FORMS
from bert_jax.errors import InputError
from bert_jax.model import heads, layers, similarity, transformer
from bert_jax.model import losses as losses_lib
from bert_jax.model.encoder import Loop, fill_params, params_of
from bert_jax.model.kinds import encoder_functions
from bert_jax.tasks.adaptation import base_params, run_rows
from bert_jax.tasks.retrievers.retriever import Retriever, RetrieverObjective
from bert_jax.tasks.rows import INPUT_NAMES, TaskBatches, TaskRows, eval_batches
from bert_jax.tasks.rows import Batch as HostBatch
from bert_jax.tasks.task_objective import Batch, TaskObjective, Tree, encode_texts
from bert_jax.training import feed, sharding, step
from bert_jax.training import mesh as mesh_lib

# Number of training texts that determine the initial biases, and of texts in a batch of them.
_CALIBRATION_TEXTS, _CALIBRATION_ROWS = 512, 16


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
        return similarity.saturate(self.max_logits(params, fixed, batch, noise, loop))

    def max_logits(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns for each row the maximum logit of each token, float32 [B, V]."""
        model = fill_params(params, EncoderWithMaskedLM, self.model)
        hidden, mask = encode_texts(model.encoder, self.model, batch, noise, loop)
        logits = heads.token_logits(model, self.model, hidden)
        return similarity.max_logits(logits, mask)[:, : self.model.vocab_size]  # no padding

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
        # Metrics are summed over shards and divided by the total count, which this product undoes.
        count = metrics["loss"][1]
        total = jax.lax.psum(count, axes) if axes else count
        metrics["penalty"] = jnp.stack([penalty * total, count])
        return metrics | {"loss": metrics["loss"].at[0].add(penalty * total)}


class SparseBatches(TaskBatches):
    """Batches with `penalty_share` [B], a factor of the penalties that first rises from 0 to 1."""

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

    def adjust_base(
        self, base: Base, objective: TaskObjective, rows: TaskRows | None
    ) -> tuple[Base, str]:
        """Shifts the output biases so that all tokens are active in equally few training texts.

        A token is active in a text if its weight is above 0. Masked LM learns logits up to a
        constant for each position, so almost all tokens, or none, may be active in all texts, whose
        scores are then almost equal. Here each token becomes active in `sparse.initial_share` of a
        sample, unless vectors are already as sparse. Also returns a line about the shift to print.
        """
        objective, rows = cast(SparseObjective, objective), cast(TaskRows, rows)
        share = cast(SparseVectors, objective.settings).initial_share
        if not share:
            return base, ""
        sample = _sample_texts(rows)
        mesh = mesh_lib.one_device()  # so that the biases do not depend on the number of devices
        compute = step.make_rows_step(objective, objective.max_logits, Parallelism(), mesh)
        params = feed.put(base_params(base, objective), mesh_lib.replicated(mesh))

        def run(batch: Any) -> jax.Array:
            return compute(params, None, {name: batch[name] for name in INPUT_NAMES})

        batches = eval_batches(sample, self.tokenizer.pad_id, _CALIBRATION_ROWS)
        logits = np.stack(run_rows(run, batches, sample, mesh))  # [texts, V]
        if 0 < (logits > 0).mean() <= share:
            return base, ""
        shifts = np.quantile(logits, 1 - share, axis=0).astype(np.float32)
        bias = np.array(base.params["masked_lm"]["output_bias"])
        bias[: len(shifts)] -= shifts
        before, after = ((x > 0).sum(axis=1).mean() for x in (logits, logits - shifts))
        masked_lm = base.params["masked_lm"] | {"output_bias": bias}
        return dataclasses.replace(base, params=base.params | {"masked_lm": masked_lm}), (
            f"sparse: output biases shifted so that each token is active in {share:.1%} of "
            f"{len(logits):,} texts; on average {after:,.0f} tokens of a text are active, before "
            f"{before:,.0f} of {len(shifts):,}"
        )


def _sample_texts(rows: TaskRows) -> TaskRows:
    """Returns the rows of about `_CALIBRATION_TEXTS` texts, of evenly spaced examples."""
    per_example = rows.rows_per_example
    examples = len(rows.ids) // per_example
    count = min(max(_CALIBRATION_TEXTS // per_example, 1), examples)
    selected = np.arange(count) * examples // count
    indices = (selected[:, None] * per_example + np.arange(per_example)).reshape(-1)
    is_text = rows.row_arrays["keys"][indices] > 0
    return TaskRows([rows.ids[i] for i in indices[is_text]], rows.limit)
