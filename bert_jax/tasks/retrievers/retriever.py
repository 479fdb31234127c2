"""What the kinds `sparse` and `multi_vector` share: examples, rows, losses and scores.

An encoder reads queries and texts separately, and a score compares the vectors of both. So the
vectors of texts can be stored, as with `similar`. Losses are those of sentence-transformers:
MultipleNegativesRanking, MarginMSE and DistillKLDiv.

Shape letters: B rows, E examples, K texts of an example, padded to the longest list.
"""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, Self, cast

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.checkpoints.base import Base, TextVectors
from bert_jax.config import Finetuning, MultiVectors, SparseVectors, Task
from bert_jax.embeddings import retrieval
from bert_jax.embeddings.embed import TextRole
from bert_jax.embeddings.forms import DENSE, VectorForm
from bert_jax.embeddings.retrieval import Passage
from bert_jax.errors import InputError
from bert_jax.model import layers, similarity
from bert_jax.model import losses as losses_lib
from bert_jax.model.encoder import Loop
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.examples import Candidates, Cells, Tally
from bert_jax.tasks.formats import require_text
from bert_jax.tasks.rank import Rank, scores_from_cell
from bert_jax.tasks.rows import TaskBatches, TaskRows
from bert_jax.tasks.similar import inherit_prefixes
from bert_jax.tasks.task_kind import Outputs, Scores, TrainingSet
from bert_jax.tasks.task_objective import Batch, TaskObjective
from bert_jax.text.tokenizer import Tokenizer, add_special_tokens
from bert_jax.training import mesh as mesh_lib

_Examples = Sequence[Candidates | Passage]


@dataclasses.dataclass(frozen=True)
class RetrieverObjective(TaskObjective):
    """An objective that scores the texts of a batch for its queries.

    A batch has 1 + K rows for each example: the query and its texts.
    """

    settings: SparseVectors | MultiVectors = dataclasses.field(default_factory=SparseVectors)
    # How a text becomes a vector, for `embed`.
    text_vectors: TextVectors = dataclasses.field(default_factory=TextVectors)

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("loss", "accuracy") if self.settings.loss == "contrastive" else ("loss",)

    @property
    def notes(self) -> dict[str, Any]:
        return {"vectors": dataclasses.asdict(self.text_vectors)}

    def vectors(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        """Returns the vectors of each row, float32 [B, ...]; see `TaskObjective.logits`."""
        raise NotImplementedError

    def predict(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> jax.Array:
        return self.vectors(params, fixed, batch, noise, loop)

    def scoring_inputs(self, vectors: jax.Array, batch: Batch) -> Any:
        """Returns the inputs of `score_pairs` for all rows: arrays [B, ...]."""
        return vectors

    def score_pairs(self, queries: Any, texts: Any) -> jax.Array:
        """Returns the scores of all pairs, float32 [n, m]; see `similarity.Score`."""
        raise NotImplementedError

    def compare(
        self,
        vectors: jax.Array,
        params: Any,
        fixed: Any,
        batch: Batch,
        noise: layers.Noise | None,
        loop: Loop,
    ) -> losses_lib.Metrics:
        """Returns {metric: [sum, weight]} of a batch, including the loss, from its vectors."""
        settings, per_example, axes = self.settings, self.rows_per_example, mesh_lib.manual_axes()
        rows = jax.tree.map(
            lambda x: x.reshape(-1, per_example, *x.shape[1:]), self.scoring_inputs(vectors, batch)
        )
        queries = jax.tree.map(lambda x: x[:, 0], rows)
        texts = jax.tree.map(lambda x: x[:, 1:], rows)
        weights = batch["row_weights"][::per_example]
        loss = settings.loss
        if loss == "contrastive":
            keys = batch["keys"].reshape(-1, per_example)  # hashes of texts, see `Retriever.rows`
            losses, hits = similarity.batch_losses(
                self.score_pairs, (queries, texts), keys, weights, 1 / settings.temperature, axes
            )
            sums = {"loss": (weights * losses).sum(), "accuracy": (weights * hits).sum()}
            return {name: jnp.stack([x, weights.sum()]) for name, x in sums.items()}
        single_queries = jax.tree.map(lambda x: x[:, None], queries)
        scores = jax.vmap(self.score_pairs)(single_queries, texts)[:, 0]
        targets = batch["scores"][::per_example]
        sums = similarity.score_distillation(loss, scores, targets, weights, settings.temperature)
        return {"loss": sums}  # [sum, weight]

    def forward(
        self, params: Any, fixed: Any, batch: Batch, noise: layers.Noise | None, loop: Loop
    ) -> losses_lib.Metrics:
        vectors = self.vectors(params, fixed, batch, noise, loop)
        return self.compare(vectors, params, fixed, batch, noise, loop)

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Counts the queries or, for margin_mse, the texts after the first of each query."""
        weights = batch["row_weights"][:: self.rows_per_example]
        if self.settings.loss == "margin_mse":
            is_text = jnp.isfinite(batch["scores"][:: self.rows_per_example, 1:])
            weights = weights[:, None] * is_text
        return (weights.sum(),)


def candidates_from_cells(task: Task, location: str, texts: Cells, labels: Cells) -> Candidates:
    """Returns an example: a query, its text or list of texts, and their scores if labelled.

    The text of `task.negative_column` follows the others.
    """
    query = require_text(texts[0], f"column {task.text_column!r}", location)
    listed = [text for cell in texts[1:] for text in (cell if isinstance(cell, list) else [cell])]
    candidates = tuple(require_text(x, f"text {i}", location) for i, x in enumerate(listed, 1))
    if not candidates:
        raise InputError(f"{location}: column {task.second_column!r} must not be empty")
    if not labels:
        return Candidates(location, query, candidates, None)
    cell = labels[0] if isinstance(labels[0], list) else [labels[0]]
    scores = scores_from_cell(location, cell, len(candidates))
    return Candidates(location, query, candidates, scores)


def _role_of(passage: Passage) -> TextRole:
    return "document" if passage.relevant is None else "query"


class Retriever(Rank):
    """A kind that scores texts for a query by their vectors: a row for each query and each text."""

    reads = "vectors"  # vectors are compared without a head
    parse_cells = staticmethod(candidates_from_cells)
    form: ClassVar[VectorForm] = DENSE
    form_name: ClassVar[Literal["sparse", "multi_vector"]]

    def __init__(
        self,
        task: Task,
        labels: tuple[str, ...],
        tokenizer: Tokenizer,
        vectors: TextVectors = TextVectors(),  # noqa: B008
    ):
        super().__init__(task, labels, tokenizer)
        self.vectors = vectors
        self._prefixes = {"query": vectors.query_prefix, "document": vectors.text_prefix}
        # Room for a text's tokens after the longer prefix; its final space belongs to these tokens.
        longest = max(len(tokenizer.encode(x.rstrip())) for x in self._prefixes.values())
        self._text_limit = max(task.max_sequence_length - 2 - longest, 0)

    @staticmethod
    def parse_passages(passages: Sequence[Passage]) -> Iterator[Any]:
        return iter(passages)  # all texts are ranked, in `Rank` only those of a first stage

    @classmethod
    def restore(
        cls, task: Task, labels: tuple[str, ...], base: Base, notes: Mapping[str, Any]
    ) -> Self:
        return cls(task, labels, base.tokenizer, TextVectors(**notes["vectors"]))

    @classmethod
    def vector_settings(cls, experiment: Finetuning, base: Base) -> TextVectors:
        """Returns how the trained model computes vectors."""
        task = inherit_prefixes(experiment.task, base.vectors)
        return TextVectors(
            max_length=task.max_sequence_length,
            query_prefix=task.query_prefix,
            text_prefix=task.text_prefix,
            form=cls.form_name,
        )

    def make_validation_kind(self, task: Task) -> Self:
        return type(self)(task, self.labels, self.tokenizer, self.vectors)

    @classmethod
    def read_training(
        cls, experiment: Finetuning, base: Base, tally: Tally, run_teacher: bool = True
    ) -> TrainingSet:
        del run_teacher  # scores of a teacher are read from the examples
        task = experiment.task
        retriever = cls(task, (), base.tokenizer, cls.vector_settings(experiment, base))
        loss = getattr(experiment, task.kind).loss
        label_mode: examples_lib.Labelling = "unlabelled" if loss == "contrastive" else "labelled"
        examples = cast(list[Candidates], examples_lib.read(task, task.train, label_mode, tally))
        for example in examples:
            if loss != "contrastive" and len(example.candidates) < 2:
                raise InputError(
                    f"{example.location}: has one text, which {task.kind}.loss={loss} cannot "
                    f"compare with others; add texts, or set {task.kind}.loss=contrastive"
                )
        rows = retriever.rows(examples)
        retriever.rows_per_example = rows.rows_per_example
        batches = retriever.make_batches(rows, experiment)
        hashes = (examples_lib.sha256(examples, ()),)
        keys = frozenset(map(examples_lib.text_key, examples))
        return TrainingSet(
            retriever, len(examples), batches, rows, examples=(), identity=hashes, text_keys=keys
        )

    def make_batches(self, rows: TaskRows, experiment: Finetuning) -> TaskBatches:
        """Returns the batches of the training rows."""
        return TaskBatches(rows, self.tokenizer.pad_id, experiment.batch_size, experiment.seed)

    def objective_fields(self, experiment: Finetuning, base: Base) -> dict[str, Any]:
        settings = getattr(experiment, self.task.kind)
        return {"settings": settings, "text_vectors": self.vector_settings(experiment, base)}

    def row(self, text: str, role: TextRole, location: str) -> np.ndarray:
        """Returns the token ids of a text with its prefix, truncated, int32 [n]."""
        tokens = self.encode(self._prefixes[role] + text, location)
        kept = tokens[: self.task.max_sequence_length - 2]
        return add_special_tokens(self.tokenizer, kept, None)[0]

    def rows(self, examples: _Examples) -> TaskRows:
        """Returns a row for each passage, or 1 + K rows for each query with its texts.

        `keys` are equal for texts of equal tokens, and 0 for padding. `scores` are float32
        [rows, K]: for each row the scores of all texts of its example, nan for padding.
        """
        if isinstance(examples[0], Passage):  # so are the others
            passages = cast(Sequence[Passage], examples)
            return self._make_rows([(x.text, _role_of(x), x.location) for x in passages])
        lists = cast(Sequence[Candidates], examples)
        count = max(len(example.candidates) for example in lists)
        texts, keys = list[tuple[str, TextRole, str]](), list[int]()
        scores = np.full((len(lists), count), np.nan, np.float32)
        for example, targets in zip(lists, scores, strict=True):
            location, missing = example.location, count - len(example.candidates)
            texts.append((example.query, "query", location))  # in the order of `example.texts`
            padded = [*example.candidates, *[""] * missing]
            texts.extend((text, "document", location) for text in padded)
            keys += [*(self._key(text, location) for text in example.texts), *[0] * missing]
            if example.scores is not None:
                targets[: len(example.scores)] = example.scores
        rows = self._make_rows(texts)
        rows.rows_per_example = 1 + count
        rows.row_arrays["keys"] = np.array(keys, np.uint32)
        if lists[0].scores is not None:
            rows.row_arrays["scores"] = np.repeat(scores, 1 + count, axis=0)
        return rows

    def _make_rows(self, texts: Sequence[tuple[str, TextRole, str]]) -> TaskRows:
        """Returns a row for each (text, role, location)."""
        rows = TaskRows([self.row(*text) for text in texts], self.task.max_sequence_length)
        self.add_token_weights(rows, [role for _, role, _ in texts])
        return rows

    def add_token_weights(self, rows: TaskRows, roles: Sequence[TextRole]) -> None:
        """Adds `token_weights` to rows, 1 for tokens that have a vector; by default nothing."""

    def _key(self, text: str, location: str) -> int:
        """Returns a hash of the tokens of a text that fit into a row, at least 1."""
        tokens = self.encode(text, location)[: self._text_limit]
        return max(zlib.crc32(np.array(tokens, np.uint32).tobytes()), 1)

    def row_vectors(self, outputs: Outputs, rows: TaskRows) -> Sequence[Any]:
        """Returns the vectors of each row, for `VectorForm.stack`."""
        return outputs

    def predict_scores(
        self, outputs: Outputs, rows: TaskRows, examples: Sequence[Candidates]
    ) -> Iterator[np.ndarray]:
        vectors, count = self.row_vectors(outputs, rows), rows.rows_per_example
        for number, example in enumerate(examples):
            first = number * count
            texts = vectors[first + 1 : first + 1 + len(example.candidates)]
            yield self.form.score(self.form.stack([vectors[first]]), self.form.stack(texts))[0]

    def answer_scores(self, scores: np.ndarray) -> np.ndarray:
        return scores  # answers show them as they are

    def scores(self, outputs: Outputs, rows: TaskRows, examples: _Examples) -> Scores:
        """Returns retrieval metrics of a BEIR folder, else mean ranking metrics of the queries."""
        if isinstance(examples[0], Passage):
            vectors = self.row_vectors(outputs, rows)
            return retrieval.scores(vectors, cast(Sequence[Passage], examples), self.form)
        return super().scores(outputs, rows, cast(Sequence[Candidates], examples))

    def baseline(self, examples: _Examples) -> tuple[str, float] | None:
        """Returns the score of BM25 on a BEIR folder."""
        return retrieval.bm25_baseline(examples, self.task.main_score)
