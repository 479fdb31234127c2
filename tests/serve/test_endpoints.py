"""What a service is made of: numbers as they are written, examples as they are read, a socket."""

import json
import socket

import numpy as np
import pytest
import samples
import tuned

from bert_jax.checkpoints.base import TextVectors
from bert_jax.config import Task
from bert_jax.embeddings import embed
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.serve import endpoints, service
from bert_jax.storage.mirror import open_workdir


def test_numbers_come_back_as_they_were_whether_read_as_float32_or_as_float64():
    """The first is the one whose shortest form in float32 rounds to its neighbour in float64."""
    hard = np.array([0x15AE43FD, 0x80000000, 1, 0x007FFFFF, 0x7F7FFFFF, 0x3F800000], np.uint32)
    bits = np.concatenate([hard, np.random.default_rng(0).integers(0, 2**32, 50_000, np.uint32)])
    numbers = bits.view(np.float32)
    numbers = numbers[np.isfinite(numbers)]
    text = endpoints.vector_json(numbers, "float")
    for found in (np.array(json.loads(text), np.float32), np.array(text[1:-1].split(","), "f4")):
        np.testing.assert_array_equal(found.view(np.uint32), numbers.view(np.uint32))


class Task_:
    """Answers with what it is asked."""

    def __init__(self, **task):
        files = "squad:x" if task["kind"] == "span" else "jsonl:x"
        task = Task(train=(files,), validation=(files,), **task)
        self.experiment = type("Experiment", (), {"name": "run", "task": task})
        self.kind = type("Kind", (), {"count_rows": lambda example, most: 1})

    def warm(self, sizes):
        pass

    def predict(self, examples):
        return [{"texts": list(getattr(e, "words", None) or e.texts)} for e in examples]


@pytest.mark.parametrize(
    ("kind", "given", "expected"),
    [
        ("classify", "a b", [["a b"]]),
        ("classify", ["a", "b"], [["a"], ["b"]]),
        ("tag", ["a b", "c"], [["a", "b"], ["c"]]),
        ("pair", ["a", "b"], [["a", "b"]]),
        ("pair", [["a", "b"], ["c", "d"]], [["a", "b"], ["c", "d"]]),
        ("classify", ["a", " "], "input[1]: "),
        ("classify", [["a", "b"]], "input[0]: "),
        ("pair", [["a", "b"], "c"], "input[1]: "),
        ("pair", [["a", 1]], "input[0]: "),
        ("pair", {"a": 1}, "input: "),
    ],
)
def test_examples_of_a_task(kind, given, expected):
    more = {"pair": {"second_column": "b"}, "tag": {"text_column": "0", "label_column": "1"}}
    answers = endpoints.PredictEndpoint(Task_(kind=kind, **more.get(kind, {})))
    if isinstance(expected, str):
        with pytest.raises(endpoints.RequestError) as caught:
            answers.items({"input": given}, endpoints.Limits())
        assert caught.value.status == 400 and expected in str(caught.value)
    else:
        items = answers.items({"input": given}, endpoints.Limits())
        results = answers.compute([asked for asked, _ in items])
        answer = json.loads("".join(answers.answer({"model": "m"}, results)))
        assert answer["model"] == "m" and [one["texts"] for one in answer["data"]] == expected


def test_a_text_that_asks_is_led_as_embed_leads_it(tmp_path):
    tuned.write_base(tmp_path / "base")
    trained = LoadedModel.of(open_workdir(tmp_path / "base"))
    trained.vectors = TextVectors(query_prefix="wa ", text_prefix="xa ")
    embedder = embed.Embedder(trained, embed.VectorOptions(), samples.mesh_of(1))
    vectors, found = endpoints.EmbedEndpoint("led", embedder), {}
    assert "'wa '" in vectors.description
    for role in (None, "text", "document", "query"):
        ((text, _),) = vectors.items({"input": "wb", "role": role}, endpoints.Limits())
        ((found[role], length),) = vectors.compute([text])
        (part,) = embedder.embed(["wb"], "query" if role == "query" else "document")
        np.testing.assert_array_equal(found[role], part.vectors[0])
        assert length == 4
    assert np.abs(found["query"] - found["text"]).max() > 0.1


def test_connections_are_tcp_to_asyncio_which_then_sends_at_once():
    """Of any other socket it leaves Nagle's algorithm on: an answer's second part waits 40 ms."""
    with service.bind_socket("127.0.0.1", 0) as bound:
        bound.listen()
        with socket.create_connection(bound.getsockname()), bound.accept()[0] as accepted:
            assert accepted.proto == socket.IPPROTO_TCP
