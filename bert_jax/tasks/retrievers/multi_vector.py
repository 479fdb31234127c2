"""The kind `multi_vector`: a vector for each token, as ColBERT (Khattab and Zaharia 2020).

The score of a text for a query is MaxSim, see `similarity.max_similarities`. A query is extended
with [MASK] to a fixed number of tokens; unlike in the paper, its other tokens attend to them.
Punctuation in texts has no vector. ColBERT marks queries and texts by a first token; here prompts
(`task.query_prefix`, `task.text_prefix`) do so.

Shape letters: B rows, S tokens, P width of a vector.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.checkpoints.base import Base, TextVectors
from bert_jax.config import Finetuning, MultiVectors, Task
from bert_jax.embeddings.embed import TextRole
from bert_jax.embeddings.forms import FORMS, TokenSelection
from bert_jax.errors import InputError
from bert_jax.model import layers, similarity
from bert_jax.model.encoder import Loop, fill_params, initializer
from bert_jax.model.kinds import encoder_functions
from bert_jax.tasks.retrievers.retriever import Retriever, RetrieverObjective
from bert_jax.tasks.rows import TaskRows
from bert_jax.tasks.task_kind import Outputs
from bert_jax.tasks.task_objective import HEAD_RULE, Batch, Tree, encode_texts
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import sharding


@dataclasses.dataclass(frozen=True)
class MultiVectorObjective(RetrieverObjective):
    """The `Objective` of vectors of tokens."""

    @property
    def base_parts(self) -> tuple[str, ...]:
        return "encoder", "projection"  # the parts of a base that are kept

    @property
    def rules(self) -> Sequence[sharding.Rule]:
        kept = (rule for rule in super().rules if rule != HEAD_RULE)
        return [*kept, sharding.Rule("projection/kernel")]  # on each device, whole

    def init_params(self, key: jax.Array) -> Tree:
        params = super().init_params(key)
        del params["head"]
        shape = self.model.hidden_size, cast(MultiVectors, self.settings).width
        kernel = initializer(self.model)(jax.random.fold_in(key, 0), shape, jnp.float32)
        return params | {"projection": {"kernel": kernel}}

    def vectors(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the vectors of the tokens of each row, float32 [B, S, P], of length 1."""
        encoder = fill_params(params["encoder"], encoder_functions(self.model).encoder, self.model)
        hidden, _ = encode_texts(encoder, self.model, batch, noise, loop)
        return similarity.project(hidden, params["projection"]["kernel"])

    def scoring_inputs(self, vectors: jax.Array, batch: Batch) -> Any:
        return vectors, batch["token_weights"]

    def score_pairs(self, queries: Any, texts: Any) -> jax.Array:
        length = cast(MultiVectors, self.settings).query_length or queries[0].shape[1]
        # Rows are padded to the longest text, but queries have at most `length` tokens.
        shortened = jax.tree.map(lambda x: x[:, :length], queries)
        return similarity.max_similarities(shortened, texts)


class MultiVector(Retriever):
    """The task kind `multi_vector`."""

    form, form_name = FORMS["multi_vector"], "multi_vector"
    objective_class = MultiVectorObjective

    def __init__(
        self,
        task: Task,
        labels: tuple[str, ...],
        tokenizer: Tokenizer,
        vectors: TextVectors = TextVectors(),  # noqa: B008
    ):
        super().__init__(task, labels, tokenizer, vectors)
        self._selection = TokenSelection(tokenizer, vectors)

    @classmethod
    def vector_settings(cls, experiment: Finetuning, base: Base) -> TextVectors:
        settings = experiment.multi_vector
        return dataclasses.replace(
            super().vector_settings(experiment, base),
            query_length=settings.query_length,
            skipped_tokens=settings.skipped_tokens,
        )

    def objective_fields(self, experiment: Finetuning, base: Base) -> dict[str, Any]:
        width = experiment.multi_vector.width
        if "projection" in base.params:
            base_width = base.params["projection"]["kernel"].shape[1]
            if base_width != width:
                raise InputError(
                    f"multi_vector.width={width}: the vectors of {experiment.init_from} have "
                    f"{base_width} numbers; set it to {base_width}"
                )
        return super().objective_fields(experiment, base)

    def row(self, text: str, role: TextRole, location: str) -> np.ndarray:
        row = super().row(text, role, location)
        return self._selection.resize_query(row) if role == "query" else row

    def add_token_weights(self, rows: TaskRows, roles: Sequence[TextRole]) -> None:
        """Adds `token_weights`, 1 for tokens that have a vector."""
        rows.token_arrays["token_weights"] = [
            self._selection.has_vector(ids, role == "query").astype(np.float32)
            for ids, role in zip(rows.ids, roles, strict=True)
        ]

    def row_vectors(self, outputs: Outputs, rows: TaskRows) -> Sequence[np.ndarray]:
        weights = rows.token_arrays["token_weights"]
        return [vectors[kept > 0] for vectors, kept in zip(outputs, weights, strict=True)]
