"""The kind `rank`: sorts texts by how well they answer a query, as a cross-encoder does.

An encoder reads the query and a text together (Nogueira and Cho 2019), and the head gives one
number for the pair. This is slower than comparing vectors, and more exact; so it reranks the texts
that a first stage has found. Losses are those of sentence-transformers: BinaryCrossEntropyLoss,
MSELoss, and ListNetLoss (Cao et al. 2007).

Shape letters: E examples, K texts of an example, padded to the longest list.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.checkpoints.base import Base
from bert_jax.config import Finetuning, Task
from bert_jax.embeddings import bm25, retrieval
from bert_jax.embeddings.retrieval import Passage
from bert_jax.embeddings.search import SearchHit
from bert_jax.errors import InputError
from bert_jax.model import losses as losses_lib
from bert_jax.tasks.examples import Candidates, Cells, Sentence, parse_number
from bert_jax.tasks.finetuned_model import TaskModel
from bert_jax.tasks.formats import require_text
from bert_jax.tasks.labels import SentenceKind
from bert_jax.tasks.rows import TaskRows
from bert_jax.tasks.task_kind import Answer, Answers, ComparedAnswer, Outputs, Scores, TaskKind
from bert_jax.tasks.task_objective import Batch, TaskObjective

# Number of texts of a BEIR folder that BM25 chooses for each query, as in BEIR's reranking.
_CANDIDATES = 100


def ranking_loss(loss: str, logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    """Returns (sum, count) of `task.ranking_loss`, float32 [2].

    The count is that of lists for `list_net`, else of texts.

    Args:
      loss: the value of `task.ranking_loss`.
      logits: outputs of the head, float32 [E, K].
      targets: `Candidates.scores`, float32 [E, K]; nan for padding.
      weights: of the examples, float32 [E]; 0 excludes an example.
    """
    is_text = jnp.isfinite(targets)
    if loss == "list_net":
        truth = jax.nn.softmax(jnp.where(is_text, targets, -jnp.inf))
        # -1e9, since the probability 0 of padding times -inf would be nan.
        losses = -(truth * jax.nn.log_softmax(jnp.where(is_text, logits, -1e9))).sum(axis=1)
    else:
        weights, targets = weights[:, None] * is_text, jnp.where(is_text, targets, 0.0)
        if loss == "mse":
            losses = jnp.square(logits - targets)
        else:
            losses = optax.sigmoid_binary_cross_entropy(logits, targets)
    return jnp.stack([(weights * losses).sum(), weights.sum()])


@dataclasses.dataclass(frozen=True)
class RankObjective(TaskObjective):
    """The `Objective` of `rank`.

    A batch has K rows for each example, one for each text; each has the `targets` of all K texts.
    """

    ranking_loss: str = "binary_cross_entropy"

    def measure(self, logits: jax.Array, batch: Batch) -> losses_lib.Metrics:
        k = batch["targets"].shape[1]
        targets, weights = batch["targets"][::k], batch["row_weights"][::k]
        return {"loss": ranking_loss(self.ranking_loss, logits.reshape(-1, k), targets, weights)}

    def counts(self, batch: Batch) -> tuple[jax.Array, ...]:
        """Counts the texts or, for `list_net`, the lists."""
        logits = jnp.zeros(batch["targets"].shape[0])  # the count is the same for all logits
        return (self.measure(logits, batch)["loss"][1],)


def candidates_from_cells(task: Task, location: str, texts: Cells, labels: Cells) -> Candidates:
    """Returns the example of a query, a list of texts and, unless `labels` is [], their scores."""
    query_cell, candidates_cell = texts
    columns = (task.second_column, task.label_column)
    for column, value in zip(columns, [candidates_cell, *labels], strict=False):
        if not isinstance(value, list) or not value:
            raise InputError(f"{location}: column {column!r} must be a non-empty list")
    query = require_text(query_cell, f"column {task.text_column!r}", location)
    candidates = [require_text(x, f"text {i}", location) for i, x in enumerate(candidates_cell, 1)]
    if not labels:
        return Candidates(location, query, tuple(candidates), None)
    scores = scores_from_cell(location, labels[0], len(candidates))
    if task.ranking_loss == "list_net" and len(scores) < 2:
        raise InputError(
            f"{location}: has one text, which list_net cannot compare with others; add texts, "
            "or set task.ranking_loss=binary_cross_entropy"
        )
    if task.ranking_loss == "binary_cross_entropy" and not all(0 <= x <= 1 for x in scores):
        raise InputError(
            f"{location}: a score is not within 0 and 1, as task.ranking_loss="
            "binary_cross_entropy needs; scale the scores, or set task.ranking_loss=list_net"
        )
    return Candidates(location, query, tuple(candidates), scores)


def scores_from_cell(location: str, cell: list[Any], count: int) -> tuple[float, ...]:
    """Returns the scores of the `count` texts of an example."""
    scores = tuple(parse_number(x, f"score {i}", location) for i, x in enumerate(cell, 1))
    if len(scores) != count:
        raise InputError(f"{location}: {count} texts, but {len(scores)} scores")
    return scores


class Rank(TaskKind):
    """The kind `rank`: a row for each pair of a query and a text.

    A labelled example has as many rows as the longest list that was read so far; shorter lists are
    padded with empty texts. Padding is in no loss and in no answer.
    """

    learns, answer_field, output_count = "numbers", "ranking", 1
    objective_class = RankObjective
    parse_cells = staticmethod(candidates_from_cells)

    @staticmethod
    def parse_texts(location: str, number: int, texts: Sequence[str]) -> Candidates:
        return Candidates(location, texts[0], tuple(texts[1:]), None)

    @staticmethod
    def parse_passages(passages: Sequence[Passage]) -> Iterator[Candidates]:
        """Yields for each query (a `Passage` too) the texts that BM25 ranks first, in its order."""
        queries, texts = retrieval.split_by_role(passages)
        contents = map(retrieval.contents, (queries, texts))
        # One text more, since BEIR ignores a text that has the id of the query.
        top_texts, _ = bm25.nearest(*contents, count=_CANDIDATES + 1)
        for (_, query), top in zip(queries, top_texts, strict=True):
            chosen = [text for _, text in map(texts.__getitem__, top) if text.id != query.id]
            chosen, grades = chosen[:_CANDIDATES], query.relevant or {}  # grades by text id
            scores = tuple(float(grades.get(text.id, 0)) for text in chosen)
            candidates = tuple(text.text for text in chosen)
            chosen_ids = {text.id for text in chosen}
            missed = tuple(float(grade) for id_, grade in grades.items() if id_ not in chosen_ids)
            yield Candidates(query.location, query.text, candidates, scores, missed)

    def objective_fields(self, experiment: Finetuning, base: Base) -> dict[str, Any]:
        return {"ranking_loss": experiment.task.ranking_loss}

    def rows(self, examples: Sequence[Candidates]) -> TaskRows:
        """Returns K rows for each example; too long pairs are truncated as in `SentenceKind.rows`.

        K is the length of the longest list so far, in all calls. `targets` are float32 [rows, K]:
        for each row the scores of all texts of its example, nan for padding. In
        `binary_cross_entropy` grades of BEIR above 1 count as 1.

        Unlabelled examples have a row for each of their texts, since no loss compares them. So a
        batch of a prediction has few rows, even if a list is long.
        """
        if examples[0].scores is None:
            pairs = [Sentence(x.location, x.texts, None) for x in examples]
            return SentenceKind(self.task, (), self.tokenizer).rows(pairs)
        longest = max(len(example.candidates) for example in examples)
        k = self.rows_per_example = max(self.rows_per_example, longest)
        filled = [
            Sentence(x.location, (*x.texts, *[""] * (k - len(x.candidates))), None)
            for x in examples
        ]
        # `SentenceKind` pairs the first text of an example with each of the others.
        rows = SentenceKind(self.task, (), self.tokenizer).rows(filled)
        rows.rows_per_example = k
        targets = np.full((len(examples), k), np.nan, np.float32)
        for target, example in zip(targets, examples, strict=True):
            target[: len(example.candidates)] = example.scores
        if self.task.ranking_loss == "binary_cross_entropy":
            targets = np.minimum(targets, 1)
        rows.row_arrays["targets"] = np.repeat(targets, k, axis=0)
        return rows

    def count_rows(self, example: Candidates, limit: int) -> int:
        return len(example.candidates)

    def example_fields(self, example: Candidates) -> dict[str, Any]:
        return {"query": example.query}

    def predict_scores(
        self, outputs: Outputs, rows: TaskRows, examples: Sequence[Candidates]
    ) -> Iterator[np.ndarray]:
        """Yields predicted scores of the texts of each example without padding, float32 [texts]."""
        logits, start = np.concatenate(outputs), 0
        for example in examples:
            count = len(example.candidates)
            yield logits[start : start + count]
            start += max(count, rows.rows_per_example)

    def answer_scores(self, scores: np.ndarray) -> np.ndarray:
        """Converts head outputs to the scores in answers, float64."""
        if self.task.ranking_loss == "binary_cross_entropy":
            return 1 / (1 + np.exp(-scores))
        return scores

    def answers(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Candidates]) -> Answers:
        """Returns the `ranking` of the texts of each example, the best first.

        Each text has its `index` in the example, from 0, and its `score`: the head's output, for
        `binary_cross_entropy` as a probability.
        """
        answers = []
        all_scores = self.predict_scores(outputs, rows, examples)
        for example, logits in zip(examples, all_scores, strict=True):
            values = self.answer_scores(logits.astype(np.float64))
            order = np.argsort(-logits, kind="stable")
            ranking = [
                {"index": int(i), "score": float(values[i]), "text": example.candidates[i]}
                for i in order
            ]
            answers.append({"ranking": ranking})
        return answers

    def scores(self, outputs: Outputs, rows: TaskRows, examples: Sequence[Candidates]) -> Scores:
        """Returns the means over queries; ties are broken against the model."""
        rankings = []
        all_scores = self.predict_scores(outputs, rows, examples)
        for example, logits in zip(examples, all_scores, strict=True):
            truth = np.array(example.scores)
            rankings.append(_score_ranking(example, truth[np.lexsort((truth, -logits))]))
        return {
            name: float(np.mean([ranking[name] for ranking in rankings]))
            for name in self.task.spec.scores
        }

    def compare_answer(self, answer: Answer, example: Candidates) -> ComparedAnswer:
        """Returns the text with the highest label, the text that is ranked first, and an error.

        The error is 1 - 1 / rank of the first relevant text. `example.scores` are the true ones.
        """
        assert example.scores is not None
        order = [text["index"] for text in answer["ranking"]]
        gains = [example.scores[i] for i in order]
        reciprocal_rank = _score_ranking(example, gains)["mrr@10"]
        best = example.candidates[int(np.argmax(example.scores))]
        return ComparedAnswer([best], [example.candidates[order[0]]], 1 - reciprocal_rank)

    def mistake_texts(self, example: Candidates) -> Sequence[str]:
        return (example.query,)

    def baseline(self, examples: Sequence[Candidates]) -> tuple[str, float] | None:
        """Returns the score of BM25's order, if BM25 has chosen the candidates."""
        if examples[0].missed is None:
            return None
        main = self.task.main_score
        values = [_score_ranking(example, example.scores or ())[main] for example in examples]
        return "BM25", float(np.mean(values))


def _score_ranking(example: Candidates, gains: Sequence[float] | np.ndarray) -> Mapping[str, float]:
    """Returns the metrics of one ranking; `gains` are the texts' true scores in ranked order."""
    relevant = [gain for gain in gains if gain > 0]
    return retrieval.ranking_scores(list(gains), [*relevant, *(example.missed or ())])


def rerank(
    model: TaskModel, queries: Sequence[str], hits: Sequence[Sequence[SearchHit]], top: int
) -> list[list[SearchHit]]:
    """Returns the `top` best hits of each query, sorted by a model of task.kind=rank.

    `hits` has for each query the results of a first stage.
    """
    examples = [
        Candidates(f"query {number}", query, tuple(hit.text for hit in nearest), None)
        for number, (query, nearest) in enumerate(zip(queries, hits, strict=True), 1)
    ]
    reranked = []
    for nearest, answer in zip(hits, model.predict(examples), strict=True):
        best = answer["ranking"][:top]
        reranked.append([dataclasses.replace(nearest[x["index"]], score=x["score"]) for x in best])
    return reranked
