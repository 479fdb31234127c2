"""What is served: vectors of texts, or a fine-tuned run's answers, and what may be asked."""

import base64
import dataclasses
import itertools
import json
from collections.abc import Iterator
from typing import Any

import numpy as np
from starlette.responses import JSONResponse, Response

from bert_jax.embeddings.embed import Embedder
from bert_jax.errors import InputError, pluralize
from bert_jax.tasks import examples as examples_lib
from bert_jax.tasks.predict import TaskModel
from bert_jax.text.records import encodable

# What is asked about, a text or an example, and how many rows it is as much work as: its own, and
# one for so many characters that are cut into pieces.
Item = tuple[Any, int]
_CHARACTERS = 2**13
# Examples of a batch of a fine-tuned run: of what waits alone, and of what waits together.
_BATCHES = (1, 8)
_RETRY_SECONDS = 1
_WRITTEN = 16  # results of an answer that are written at once


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that clients may ask."""

    requests: int = 256  # under way at once; one more is answered 503
    texts: int = 2048  # of a request, or examples
    bytes: int = 2**21  # of its body
    # Until it is answered, its body arriving among them, and that a connection may be silent, or
    # read nothing of what it is sent.
    seconds: float = 30.0
    # Of a turn, and of an example: of 512 tokens each, seconds of a small model on a CPU.
    rows: int = 128


class Refused(Exception):
    """An error that a client is answered, and which field of its request is at fault."""

    def __init__(self, status: int, message: str, param: str | None = None):
        super().__init__(message)
        self.status, self.param = status, param

    def response(self) -> Response:
        """Returns it in OpenAI's form; what may succeed later names when."""
        headers = {"Retry-After": str(_RETRY_SECONDS)} if self.status == 503 else {}
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.param, "code": None}
        return JSONResponse({"error": error}, self.status, headers)


class EmbedEndpoint:
    """Vectors of texts, in OpenAI's form; every program that they need is compiled first."""

    path = "/v1/embeddings"

    def __init__(self, name: str, embedder: Embedder):
        self.name, self._embedder = name, embedder
        self.about = f"{embedder.width} numbers a vector"
        if first := embedder.prefixes["query"]:
            self.about += f'; {first!r} stands before texts of requests with "role": "query"'
        self.warm = embedder.warm  # raises if nothing can be computed
        self.warm()

    def items(self, body: dict[str, Any], limits: Limits) -> list[Item]:
        """Returns the texts, and before each what the encoder knows its role by."""
        if body.get("encoding_format") not in (None, "float", "base64"):
            raise Refused(400, "encoding_format: must be float or base64", "encoding_format")
        role = "text" if body.get("role") is None else body["role"]
        if role not in ("text", "query"):
            raise Refused(400, "role: must be text or query", "role")
        size, width = body.get("dimensions"), self._embedder.width
        if size is not None and not (type(size) is int and 1 <= size <= width):
            raise Refused(400, f"dimensions: vectors have {width} numbers", "dimensions")
        asked, first = _asked(body, 1, limits.texts), self._embedder.prefixes[role]
        return [(first + text, 1 + len(text) // _CHARACTERS) for (text,) in asked]

    def compute(self, items: list[str]) -> list[tuple[np.ndarray, int]]:
        """Returns of each text its vector, float32 [W], and how many tokens were read."""
        parts = list(self._embedder.embed(items, "led", lambda _: "input"))
        vectors = np.concatenate([part.vectors for part in parts])
        lengths = np.concatenate([part.lengths for part in parts])
        return list(zip(vectors, lengths.tolist(), strict=True))

    def answer(self, body: dict[str, Any], results: list[Any]) -> Iterator[str]:
        """Yields JSON: an `embedding` a text, as numbers or their bytes, and the tokens used.

        With `dimensions` they are the first numbers, of length 1 if the whole vector is.
        """
        form, size = body.get("encoding_format"), body.get("dimensions")
        if size is not None:
            results = [(self._cut(vector[:size]), length) for vector, length in results]
        tokens = sum(length for _, length in results)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens}
        data = (
            f'{{"object": "embedding", "index": {number}, "embedding": {_written(vector, form)}}}'
            for number, (vector, _) in enumerate(results)
        )
        return _listing({"model": body["model"], "usage": usage}, data)

    def _cut(self, vector: np.ndarray) -> np.ndarray:
        if self._embedder.features.length == "as_is":
            return vector
        return vector / max(float(np.linalg.norm(vector)), np.finfo(np.float32).tiny)


class PredictEndpoint:
    """Answers of a fine-tuned run, as `predict` gives them; programs are compiled first."""

    path = "/predict"

    def __init__(self, model: TaskModel):
        self.name, self._model = model.experiment.name, model
        self._task = model.experiment.task
        self._texts = examples_lib.texts_per_example(self._task)
        self.about = f"{pluralize(self._texts, 'text')} an example"
        self.warm()

    def warm(self) -> None:
        """Compiles every program; raises if nothing can be computed."""
        self._model.warm(_BATCHES)

    def items(self, body: dict[str, Any], limits: Limits) -> list[Item]:
        """Returns the examples."""
        examples = []
        for number, texts in enumerate(_asked(body, self._texts, limits.texts)):
            where = f"input[{number}]"
            try:
                (example,) = examples_lib.parse_arguments(self._task, texts, number + 1)
            except InputError as error:
                raise Refused(400, f"{where}: {error}", "input") from error
            rows = self._model.kind.rows_of(example, limits.rows)
            if rows > limits.rows:
                message = f"{where}: more than --max-rows {limits.rows} windows; send it in parts"
                raise Refused(413, message, "input")
            examples.append((example, rows + sum(map(len, texts)) // _CHARACTERS))
        return examples

    def compute(self, items: list[examples_lib.Example]) -> list[dict[str, Any]]:
        """Returns an answer an example."""
        return list(self._model.predict(items))

    def answer(self, body: dict[str, Any], results: list[Any]) -> Iterator[str]:
        """Yields JSON: the answers in the examples' order."""
        return _listing({"model": body["model"]}, map(json.dumps, results))


def _listing(fields: dict[str, Any], data: Iterator[str]) -> Iterator[str]:
    """Yields a list of JSON values, in OpenAI's form, in parts."""
    before = json.dumps({"object": "list"} | fields)[:-1] + ', "data": ['
    while part := ", ".join(itertools.islice(data, _WRITTEN)):
        yield before + part
        before = ", "
    yield "]}"


def _written(vector: np.ndarray, form: str | None) -> str:
    """Returns JSON of float32 [W]: its bytes, or a list of numbers in nine digits, which are the
    same bits again, read as float32 or rounded from float64 (IEEE 754-2008, section 5.12.2).
    """
    if form == "base64":
        return f'"{base64.b64encode(vector.astype("<f4").data).decode()}"'
    text = "%.9g," * len(vector) % tuple(vector.tolist())
    return f"[{text.replace('-0,', '-0.0,')[:-1]}]"  # -0 would be an integer, without its sign


def _asked(body: dict[str, Any], parts: int, most: int) -> list[list[str]]:
    """Returns the texts that a request asks about: of each item so many, of one a text alone."""
    given = body.get("input")
    alone = given if parts > 1 and isinstance(given, list) else [given]
    given = [given] if alone and all(isinstance(text, str) for text in alone) else given
    if not isinstance(given, list) or not given:
        raise Refused(400, "input: a text is needed, or a list that is not empty", "input")
    if len(given) > most:
        raise Refused(413, f"input: {len(given)} texts; at most {most} a request", "input")
    items: list[Any] = [[item] if parts == 1 else item for item in given]
    for number, texts in enumerate(items):
        why = ""
        if not isinstance(texts, list) or len(texts) != parts:
            why = f"an example of this task has {pluralize(parts, 'text')}"
        elif not all(isinstance(text, str) for text in texts):
            why = "must be a text; ids of pieces are not taken"
        elif encodable("".join(texts)) != "".join(texts):
            why = "is not text: half of a surrogate pair"
        if why:
            raise Refused(400, f"input[{number}]: {why}", "input")
    return items
