"""Paths in the format of Text Embeddings Inference (TEI), a server of embeddings.

    POST /embed         texts -> a vector of each text
    POST /embed_sparse  texts -> for each text the tokens whose weights are not 0
    POST /rerank        a query and texts -> the index and the score of each text, the best first
    POST /predict       with `inputs`: texts or pairs -> the labels of each, the most probable first

Fields and defaults are those of router/src/http/types.rs in TEI 1.9. Texts that are too long are
always truncated at their end; the field `truncate` has no effect.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from bert_jax.serve.endpoints import (
    EmbedEndpoint,
    Item,
    Limits,
    PredictEndpoint,
    RequestError,
    join_json,
    parse_input,
    vector_json,
)

_TINY = np.finfo(np.float32).tiny


def formats_of(endpoint: Any) -> dict[str, Any]:
    """Returns the TEI formats of an endpoint by path.

    A format replaces `items` and `answer` of the endpoint, not `compute`.
    """
    if type(endpoint) is EmbedEndpoint:
        return {"/embed": VectorFormat(endpoint)}
    if isinstance(endpoint, PredictEndpoint) and endpoint.task.kind == "rank":
        return {"/rerank": RankFormat(endpoint)}
    if isinstance(endpoint, PredictEndpoint) and endpoint.task.kind in ("classify", "pair"):
        return {"/predict": LabelFormat(endpoint)}
    return {}


def _text_items(endpoint: EmbedEndpoint, body: dict[str, Any], limits: Limits) -> list[Item]:
    """Returns the texts of `inputs`, each with the prompt of `prompt_name`, by default none."""
    _require_right_truncation(body)
    name = body.get("prompt_name")
    if name not in (None, "query", "document"):
        raise RequestError(400, "prompt_name: must be query or document", "prompt_name")
    examples = parse_input(body, 1, limits.texts, "inputs")
    return endpoint.text_items(examples, name or "prompted")  # "prompted": adds no prompt


class VectorFormat:
    """The format of `/embed`."""

    def __init__(self, endpoint: EmbedEndpoint):
        self._endpoint = endpoint

    def items(self, body: dict[str, Any], limits: Limits) -> list[Item]:
        """Returns the texts, each with its prompt."""
        embedder, size = self._endpoint.embedder, body.get("dimensions")
        if not body.get("normalize", True) and embedder.features.normalize:
            raise RequestError(400, "normalize: this model's vectors have length 1", "normalize")
        if size is not None and not (type(size) is int and 1 <= size <= embedder.width):
            message = f"dimensions: vectors have {embedder.width} numbers"
            raise RequestError(400, message, "dimensions")
        return _text_items(self._endpoint, body, limits)

    def answer(self, body: dict[str, Any], results: list[Any]) -> Iterator[str]:
        """Yields JSON: a list of vectors, of length 1 unless `normalize` is false."""
        vectors = (vector[: body.get("dimensions")] for vector, _ in results)
        if body.get("normalize", True):
            vectors = (vector / max(float(np.linalg.norm(vector)), _TINY) for vector in vectors)
        return join_json("[", (vector_json(vector, None) for vector in vectors), "]")


class SparseEndpoint(EmbedEndpoint):
    """Sparse vectors of texts. All programs are compiled at the start."""

    path = "/embed_sparse"

    def items(self, body: dict[str, Any], limits: Limits) -> list[Item]:
        """Returns the texts, each with its prompt."""
        return _text_items(self, body, limits)

    def answer(self, body: dict[str, Any], results: list[Any]) -> Iterator[str]:
        """Yields JSON: for each text the `index` of each token and its weight as `value`."""
        texts = (
            [
                {"index": int(i), "value": float(x)}
                for i, x in zip(row.indices, row.data, strict=True)
            ]
            for row, _ in results
        )
        return join_json("[", map(json.dumps, texts), "]")


class RankFormat:
    """The format of `/rerank`, for a run of task.kind=rank."""

    def __init__(self, endpoint: PredictEndpoint):
        self._endpoint = endpoint

    def items(self, body: dict[str, Any], limits: Limits) -> list[Item]:
        """Returns an item for each text."""
        _require_right_truncation(body)
        ((query,),) = parse_input(body, 1, 1, "query")
        pairs = [[query, text] for (text,) in parse_input(body, 1, limits.texts, "texts")]
        return self._endpoint.items({"texts": pairs}, limits, "texts")

    def answer(self, body: dict[str, Any], results: list[Any]) -> Iterator[str]:
        """Yields JSON: a list of `index`, `score` and, if asked for, `text`, the best first.

        With `raw_scores`, a score is an output of the head, else the sigmoid of this output.
        """
        outputs = np.array([result["ranking"][0]["score"] for result in results])
        if self._endpoint.task.ranking_loss == "binary_cross_entropy":  # scores are sigmoids here
            sigmoids = np.clip(outputs, _TINY, 1 - np.finfo(float).epsneg)
            outputs = np.log(sigmoids) - np.log1p(-sigmoids)
        scores = outputs if body.get("raw_scores") else 1 / (1 + np.exp(-outputs))
        ranks = []
        for i in np.argsort(-outputs, kind="stable").tolist():
            text = {"text": results[i]["ranking"][0]["text"]} if body.get("return_text") else {}
            ranks.append({"index": i, "score": float(scores[i]), **text})
        return join_json("[", map(json.dumps, ranks), "]")


class LabelFormat:
    """The format of `/predict` for runs with labels; bodies with `input` have the endpoint's own.

    `inputs` is a text, a pair of texts, or a list whose items are lists of one or two texts.
    """

    def __init__(self, endpoint: PredictEndpoint):
        self._endpoint = endpoint

    def items(self, body: dict[str, Any], limits: Limits) -> list[Item]:
        """Returns the examples."""
        if "inputs" not in body:
            return self._endpoint.items(body, limits)
        _require_right_truncation(body)
        if body.get("raw_scores"):
            raise RequestError(400, "raw_scores: only probabilities are supported", "raw_scores")
        value = body["inputs"]
        examples = value if _is_batch(value) else [value]
        if len(self._endpoint.task.text_columns) == 1:
            examples = [x[0] if isinstance(x, list) and len(x) == 1 else x for x in examples]
        return self._endpoint.items({"inputs": examples}, limits, "inputs")

    def answer(self, body: dict[str, Any], results: list[Any]) -> Iterator[str]:
        """Yields JSON: a list of labels with probabilities; for a batch, a list of such lists."""
        if "inputs" not in body:
            return self._endpoint.answer(body, results)
        labels = [
            [{"score": p, "label": label} for label, p in sorted(pairs, key=lambda x: -x[1])]
            for pairs in (result["probabilities"].items() for result in results)
        ]
        return iter([json.dumps(labels if _is_batch(body["inputs"]) else labels[0])])


def _is_batch(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], list)


def _require_right_truncation(body: dict[str, Any]) -> None:
    if str(body.get("truncation_direction", "right")).lower() != "right":
        message = "truncation_direction: texts are truncated on the right"
        raise RequestError(400, message, "truncation_direction")
