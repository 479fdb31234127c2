"""The endpoints of the server: text vectors, and the answers of a fine-tuned run."""

import base64
import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from bert_jax.embeddings.embed import Embedder, Role
from bert_jax.errors import InputError, pluralize
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.finetuned_model import TaskModel
from bert_jax.text.records import replace_surrogates

# A text or an example of a request, and its cost in rows.
Item = tuple[Any, int]
_ROW_CHARACTERS = 2**13  # tokenizing this many characters costs about as much as computing a row
_BATCH_SIZES = (1, 8)  # of a fine-tuned run: for a single example, and for several
_RETRY_SECONDS = 1
_CHUNK_RESULTS = 16  # results in one chunk of a response


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits for clients."""

    requests: int = 256  # in progress at once; the next one gets status 503
    texts: int = 2048  # texts or examples of a request
    bytes: int = 2**21  # of a request's body
    # Maximum time from the start of a request to its answer, and maximum time for which a
    # connection may be silent or leave its response unread.
    seconds: float = 30.0
    # Maximum rows of an example, and rows at which a batch is full. A small model
    # computes 128 rows of 512 tokens in seconds on a CPU.
    rows: int = 128


class RequestError(Exception):
    """An error response to a client; `param` names the invalid field of the request."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

    def response(self) -> Response:
        """Returns the response in OpenAI's format, with Retry-After if a retry may succeed."""
        headers = {"Retry-After": str(_RETRY_SECONDS)} if self.status == 503 else {}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": None}
        return JSONResponse({"error": error}, self.status, headers)


class EmbedEndpoint:
    """Text vectors in OpenAI's format. All programs are compiled at the start."""

    path = "/v1/embeddings"

    def __init__(self, name: str, embedder: Embedder):
        self.name, self.embedder = name, embedder
        self.description = f"{embedder.width} numbers per vector"
        if prefix := embedder.prefixes["query"]:
            self.description += f'; requests with "role": "query" get the prefix {prefix!r}'
        self.warm = embedder.warm
        self.warm()  # raises if the model cannot compute

    def items(self, body: dict[str, Any], limits: Limits) -> list[Item]:
        """Returns the texts, each with the prefix of its role."""
        if body.get("encoding_format") not in (None, "float", "base64"):
            raise RequestError(400, "encoding_format: must be float or base64", "encoding_format")
        role = body.get("role")
        if role in (None, "text"):  # "text" is a former name of the role
            role = "document"
        if role not in ("document", "query"):
            raise RequestError(400, "role: must be document or query", "role")
        size, width = body.get("dimensions"), self.embedder.width
        if size is not None and not (type(size) is int and 1 <= size <= width):
            raise RequestError(400, f"dimensions: vectors have {width} numbers", "dimensions")
        return self.text_items(parse_input(body, 1, limits.texts), role)

    def text_items(self, examples: list[list[str]], role: Role) -> list[Item]:
        """Returns texts with the prefix of a role."""
        prefix = self.embedder.prefixes[role]
        return [(prefix + text, 1 + len(text) // _ROW_CHARACTERS) for (text,) in examples]

    def compute(self, texts: list[str]) -> list[tuple[Any, int]]:
        """Returns the vector and the token count of each text; texts already have prefixes.

        A dense vector is float32 [W], a sparse one a `csr_array` [1, V].
        """
        parts = list(self.embedder.embed_lines((("input", text) for text in texts), "prompted"))
        vectors = self.embedder.form.concatenate([part.vectors for part in parts])
        if self.embedder.form_name == "sparse":
            vectors = [vectors[[i]] for i in range(len(texts))]
        lengths = np.concatenate([part.lengths for part in parts])
        return list(zip(vectors, lengths.tolist(), strict=True))

    def answer(self, body: dict[str, Any], results: list[Any]) -> Iterator[str]:
        """Yields JSON: the `embedding` of each text, as numbers or bytes, and the tokens used.

        `dimensions` truncates vectors, and scales them to length 1 if whole vectors have length 1.
        """
        encoding, size = body.get("encoding_format"), body.get("dimensions")
        if size is not None:
            results = [(self._rescale(vector[:size]), length) for vector, length in results]
        tokens = sum(length for _, length in results)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        data = (
            f'{{"object": "embedding", "index": {i}, "embedding": {vector_json(vector, encoding)}}}'
            for i, (vector, _) in enumerate(results)
        )
        return list_json({"model": body["model"], "usage": usage}, data)

    def _rescale(self, vector: np.ndarray) -> np.ndarray:
        if not self.embedder.features.normalize:
            return vector
        return vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)


class PredictEndpoint:
    """The answers of a fine-tuned run, as in `predict`. All programs are compiled at the start."""

    path = "/predict"

    def __init__(self, model: TaskModel):
        self.name, self._model = model.experiment.name, model
        self.task = model.experiment.task
        self._text_count = len(self.task.text_columns)
        self.description = f"{pluralize(self._text_count, 'text')} per example"
        self.warm()

    def warm(self) -> None:
        """Compiles all programs; raises if the model cannot compute."""
        self._model.warm(_BATCH_SIZES)

    def items(self, body: dict[str, Any], limits: Limits, field: str = "input") -> list[Item]:
        """Returns the examples of a field."""
        examples = []
        for number, texts in enumerate(parse_input(body, self._text_count, limits.texts, field)):
            where = f"{field}[{number}]"
            try:
                (example,) = examples_lib.parse_arguments(self.task, texts, number + 1)
            except InputError as error:
                raise RequestError(400, f"{where}: {error}", field) from error
            rows = self._model.kind.count_rows(example, limits.rows)
            if rows > limits.rows:
                message = f"{where}: has more than --max-windows {limits.rows} windows; split it"
                raise RequestError(413, message, field)
            examples.append((example, rows + sum(map(len, texts)) // _ROW_CHARACTERS))
        return examples

    def compute(self, examples: list[examples_lib.Example]) -> list[dict[str, Any]]:
        """Returns the answer to each example."""
        return list(self._model.predict(examples))

    def answer(self, body: dict[str, Any], results: list[Any]) -> Iterator[str]:
        """Yields JSON: the answers in the order of the examples."""
        return list_json({"model": body["model"]}, map(json.dumps, results))


def list_json(fields: dict[str, Any], data: Iterator[str]) -> Iterator[str]:
    """Yields a list of JSON values in OpenAI's format, in chunks."""
    return join_json(json.dumps({"object": "list"} | fields)[:-1] + ', "data": [', data, "]}")


def join_json(start: str, data: Iterator[str], end: str) -> Iterator[str]:
    """Yields `start`, JSON values (at least one) with commas between them, and `end`, in chunks."""
    separator = start
    while chunk := ", ".join(itertools.islice(data, _CHUNK_RESULTS)):
        yield separator + chunk
        separator = ", "
    yield end


def vector_json(vector: np.ndarray, encoding: str | None) -> str:
    """Returns float32 [W] as JSON: its bytes in base64, or numbers with nine digits.

    Nine digits restore the same bits, even if parsed as float64 (IEEE 754-2008, section 5.12.2).
    """
    if encoding == "base64":
        return f'"{base64.b64encode(vector.astype("<f4").data).decode()}"'
    text = "%.9g," * len(vector) % tuple(vector.tolist())
    return f"[{text.replace('-0,', '-0.0,')[:-1]}]"  # -0 would be an integer, without its sign


def parse_input(
    body: dict[str, Any], text_count: int, max_examples: int, field: str = "input"
) -> list[list[str]]:
    """Returns the examples in a field, which is an example or a list of at most `max_examples`.

    An example is a list of `text_count` texts, or the text itself if `text_count` is 1.
    """
    value = body.get(field)
    texts = value if text_count > 1 and isinstance(value, list) else [value]
    if texts and all(isinstance(text, str) for text in texts):  # one example
        value = [value]
    if not isinstance(value, list) or not value:
        raise RequestError(400, f"{field}: must be a text, or a list that is not empty", field)
    if len(value) > max_examples:
        message = f"{field}: {len(value)} texts; at most {max_examples} per request"
        raise RequestError(413, message, field)
    examples: list[Any] = [[item] if text_count == 1 else item for item in value]
    for number, texts in enumerate(examples):
        why = ""
        if not isinstance(texts, list) or len(texts) != text_count:
            why = f"an example of this task has {pluralize(text_count, 'text')}"
        elif not all(isinstance(text, str) for text in texts):
            why = "must be a text; token ids are not supported"
        elif replace_surrogates("".join(texts)) != "".join(texts):
            why = "is not text: contains half of a surrogate pair"
        if why:
            raise RequestError(400, f"{field}[{number}]: {why}", field)
    return examples
