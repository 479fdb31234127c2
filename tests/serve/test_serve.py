"""Vectors and answers over HTTP, asked through sockets: many clients, bad ones, and the end."""

import base64
import contextlib
import http.client
import itertools
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import samples
import small_run
import tuned
from broken import fails

from bert_jax.embeddings import embed
from bert_jax.errors import InputError
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.serve import endpoints, service
from bert_jax.storage.mirror import open_workdir

TEXTS = ["wa wb", "", "xa " * 90, "wc ? xd", "\u65e5\x00 wa"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    tuned.write_base(tmp_path_factory.mktemp("serve") / "base")
    return LoadedModel.of(open_workdir(tmp_path_factory.getbasetemp() / "serve0" / "base"))


@pytest.fixture(scope="module")
def embedder(trained):
    return embed.Embedder(trained, embed.VectorOptions(), samples.mesh_of(1))


@pytest.fixture(scope="module")
def vectors(embedder):
    return endpoints.EmbedEndpoint("base", embedder)


class Gate:
    """A model that computes only while it is open."""

    path, name, description = "/v1/embeddings", "gate", ""

    def __init__(self, vectors):
        self.vectors, self.open, self.sizes = vectors, threading.Event(), []
        self.items, self.answer = vectors.items, vectors.answer

    def compute(self, items):
        self.open.wait()
        self.sizes.append(len(items))
        if "fail" in items:
            raise InputError("numbers that are not finite")
        return self.vectors.compute(items)


@contextlib.contextmanager
def running(answers, limits=None):
    """Yields the port of a service that ends afterwards."""
    limits = limits or endpoints.Limits()
    bound = service.bind_socket("127.0.0.1", 0)
    bound.listen(2048)
    server = service.make_server(service.Service(answers, limits), limits.seconds)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        yield bound.getsockname()[1]
    finally:
        if isinstance(answers, Gate):
            answers.open.set()  # if a test has failed before
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def port(vectors):
    with running(vectors) as port:
        yield port


def ask(port, body, path="/v1/embeddings", method="POST"):
    """Status, headers, and the JSON of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        connection.request(method, path, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.headers, json.loads(answer.read())


def metrics(port):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    with contextlib.closing(connection):
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def until(condition):
    """Waits for a state that other threads bring about."""
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError


def is_error(answer, status):
    """OpenAI's form: https://platform.openai.com/docs/guides/error-codes."""
    found, _, body = answer
    assert found == status
    assert list(body) == ["error"] and set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].isprintable()
    return body["error"]


# --- answers ------------------------------------------------------------------------------------


def test_vectors_are_those_of_embed_as_numbers_and_as_bytes(port, embedder):
    """As OpenAI's clients ask: of their own accord they take base64 and unpack it as float32."""
    (part,) = embedder.embed(TEXTS)
    for form in ("float", "base64"):
        asked = {"input": TEXTS, "model": "any", "encoding_format": form, "user": "u"}
        status, headers, body = ask(port, asked)
        assert (status, headers["content-type"]) == (200, "application/json")
        found = [one["embedding"] for one in body["data"]]
        if form == "base64":
            found = [np.frombuffer(base64.b64decode(one), np.float32) for one in found]
        np.testing.assert_array_equal(np.array(found, np.float32), part.vectors)
        assert [one["index"] for one in body["data"]] == [0, 1, 2, 3, 4]
        assert {one["object"] for one in body["data"]} == {"embedding"}
        assert (body["object"], body["model"]) == ("list", "any")
        # [CLS] and [SEP] of each; the third is cut to the 64 that the model reads.
        assert body["usage"] == {"prompt_tokens": 4 + 2 + 64 + 5 + 4, "total_tokens": 79}
    # A text alone is a list of one, and the model's name may be left out.
    status, _, body = ask(port, {"input": TEXTS[0]})
    assert status == 200 and body["model"] == "base" and len(body["data"]) == 1
    status, _, body = ask(port, {"input": TEXTS[0], "dimensions": 8})
    # Alone: among others it is a row of a larger product, whose sums are rounded otherwise.
    (alone,) = embedder.embed(TEXTS[:1])
    cut = alone.vectors[0, :8]
    if embedder.features.normalize:
        cut = cut / np.linalg.norm(cut)
    np.testing.assert_allclose(body["data"][0]["embedding"], cut, rtol=1e-6)


def test_no_text_needs_a_program_that_was_not_compiled_at_the_start(vectors, embedder):
    embedder.warm()  # what was compiled before may have been given back
    programs = embedder._program._cache_size()
    assert programs == 6  # of 16, 32 and 64 tokens, for one text and for several
    for count in range(0, 99, 9):
        list(embedder.embed(["wa " * count] * (1 + count % 4)))
    assert embedder._program._cache_size() == programs


def test_what_waits_together_is_computed_together_and_each_gets_its_own(vectors, embedder):
    gate = Gate(vectors)
    texts = [f"{a} {b}" for a, b in itertools.product(tuned.GOOD + tuned.BAD, repeat=2)]
    (part,) = embedder.embed(texts)
    with running(gate) as port, ThreadPoolExecutor(64) as clients:
        answers = [clients.submit(ask, port, {"input": text}) for text in texts]
        until(lambda: metrics(port)["bert_jax_requests_under_way"] == 64)
        gate.open.set()
        for answer, expected in zip(answers, part.vectors, strict=True):
            status, _, body = answer.result()
            found = np.float32(body["data"][0]["embedding"])
            assert status == 200 and np.abs(found - expected).max() < 1e-5
        assert sum(gate.sizes) == 64 and len(gate.sizes) < 16
        seen = metrics(port)
        assert seen['bert_jax_requests_total{code="200"}'] == seen["bert_jax_texts_total"] == 64
        assert seen["bert_jax_answer_seconds_count"] == 64
        assert seen['bert_jax_answer_seconds_bucket{le="+Inf"}'] == 64


def test_a_turn_is_of_so_many_rows_whatever_an_item_has(vectors):
    """Behind ten of 50 rows each one is answered after the first turn, of three of them."""
    gate = Gate(vectors)
    gate.items = lambda body, limits: [(text, 50) for text in body["input"]]
    with running(gate) as port, ThreadPoolExecutor(2) as clients:
        large = clients.submit(ask, port, {"input": ["wa"] * 10})
        until(lambda: metrics(port)["bert_jax_rows_under_way"] == 500)
        small = clients.submit(ask, port, {"input": ["xa"]})
        until(lambda: metrics(port)["bert_jax_rows_under_way"] == 550)
        gate.open.set()
        assert large.result()[0] == small.result()[0] == 200
        until(lambda: metrics(port)["bert_jax_rows_under_way"] == 0)
    assert gate.sizes == [3, 3, 3, 2]
    found = vectors.items({"input": ["wa", "wa " * 2**15]}, endpoints.Limits())
    assert [rows for _, rows in found] == [1, 13]


# --- clients that are no good -------------------------------------------------------------------


BAD = [
    (b"\xff\xfe\x00garbage", 400, "not JSON", None),
    (b'{"input": "wa"', 400, "not JSON", None),
    (b"[" * 100_000, 400, "not JSON", None),
    (b'["wa"]', 400, "a JSON object", None),
    ({"input": []}, 400, "input: ", "input"),
    ({"input": [1, 2, 3]}, 400, "input[0]: ", "input"),
    ({"input": ["wa", ["wb"]]}, 400, "input[1]: ", "input"),
    (b'{"input": "\\ud800"}', 400, "surrogate", "input"),
    ({"input": ["wa"] * 2049}, 413, "2048", "input"),
    ({"input": "w" * 2**24}, 413, "2097152 bytes", None),
    ({"input": "wa", "model": 1}, 400, "model: ", "model"),
    ({"input": "wa", "encoding_format": "hex"}, 400, "base64", "encoding_format"),
    ({"input": "wa", "role": "ask"}, 400, "role: must be document or query", "role"),
    ({"input": "wa", "dimensions": 17}, 400, "16 numbers", "dimensions"),
]


def test_a_bad_request_is_answered_with_what_is_wrong(port):
    for body, status, message, param in BAD:
        error = is_error(ask(port, body), status)
        assert message in error["message"], body
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
    for path, method, status in (("/v1/chat", "POST", 404), ("/v1/embeddings", "PUT", 405)):
        assert "POST /v1/embeddings" in is_error(ask(port, {}, path, method), status)["message"]
    assert ask(port, b"", "/health", "GET")[2] == {"status": "ready", "model": "base"}


def post(fields):
    body = json.dumps(fields)
    head = "POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def exchange(port, data):
    """What comes back until the other side closes."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def test_what_is_not_http_is_answered(port):
    asked = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\n"
    for data in (b"\x16\x03\x01\x02\x00garbage\r\n\r\n", asked + b"Content-Length: -1\r\n\r\n"):
        assert exchange(port, data).startswith(b"HTTP/1.1 400 ")
    assert ask(port, {"input": "wa"})[0] == 200


def test_clients_that_leave_are_forgotten_and_what_they_wanted_is_not_computed(vectors):
    gate = Gate(vectors)
    asked = post({"input": ["wa"] * 200})
    with running(gate) as port:
        under_way = []
        for data in (asked[:-9], asked):
            under_way.append(socket.create_connection(("127.0.0.1", port)))
            under_way[-1].sendall(data)
        until(lambda: metrics(port)["bert_jax_requests_under_way"] == 2)
        for connection in under_way:
            connection.close()
        until(lambda: metrics(port)["bert_jax_left_total"] == 2)
        assert metrics(port)["bert_jax_requests_under_way"] == 0
        gate.open.set()
        assert ask(port, {"input": "wa"})[0] == 200
    assert gate.sizes == [128, 1]


@pytest.mark.long
def test_a_client_that_does_not_read_is_under_way_until_it_is_cut_off(vectors):
    """One that reads slowly gets all of it; of neither answer more is made than it can hold."""
    gate = Gate(vectors)
    made, part = {"slow": 0, "never": 0}, "x" * 2**16

    def answer(body, results):
        for _ in range(256):
            made[body["model"]] += 1
            yield part

    gate.answer = answer
    gate.open.set()

    with running(gate, endpoints.Limits(seconds=3)) as port:
        with socket.socket() as slow, socket.socket() as never:
            for client, name in ((slow, "slow"), (never, "never")):
                client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**16)
                client.connect(("127.0.0.1", port))
                client.sendall(post({"input": "wa", "model": name}))
            until(lambda: metrics(port)["bert_jax_requests_under_way"] == 2)
            size = 0
            while metrics(port)["bert_jax_requests_under_way"] == 2:
                assert max(made.values()) < 200
                size += len(slow.recv(2**16))
                time.sleep(0.05)
            assert made["never"] < 200
            size += sum(map(len, iter(lambda: slow.recv(2**20), b"")))
        assert size > 256 * len(part)
        until(lambda: metrics(port)["bert_jax_requests_under_way"] == 0)


def test_connections_are_limited_and_one_that_ends_makes_room(vectors):
    with running(vectors, endpoints.Limits(requests=64)) as port, contextlib.ExitStack() as stack:
        taken = []
        for _ in range(128):
            taken.append(stack.enter_context(socket.create_connection(("127.0.0.1", port))))
        assert exchange(port, post({"input": "wa"})).startswith(b"HTTP/1.1 503 ")
        taken[0].close()
        until(lambda: exchange(port, post({"input": "wa"})).startswith(b"HTTP/1.1 200 "))


def test_what_all_requests_hold_is_bounded(monkeypatch, vectors):
    monkeypatch.setattr(service, "_MAX_ROWS", 300)
    gate = Gate(vectors)
    with running(gate) as port, ThreadPoolExecutor(1) as clients:
        first = clients.submit(ask, port, {"input": ["wa"] * 200})
        until(lambda: metrics(port)["bert_jax_rows_under_way"] >= 200)
        assert "rows" in is_error(ask(port, {"input": ["wa"] * 200}), 503)["message"]
        assert "rows" in is_error(ask(port, {"input": ["wa"] * 301}), 413)["message"]
        gate.open.set()
        assert first.result()[0] == 200
        until(lambda: metrics(port)["bert_jax_rows_under_way"] == 0)
        assert ask(port, {"input": ["wa"] * 200})[0] == 200


def test_more_than_the_queue_holds_is_refused_and_counted_and_nothing_is_lost(vectors):
    gate = Gate(vectors)
    with running(gate, endpoints.Limits(requests=64)) as port, ThreadPoolExecutor(64) as clients:
        answers = [clients.submit(ask, port, {"input": "wa"}) for _ in range(64)]
        until(lambda: metrics(port)["bert_jax_requests_under_way"] == 64)
        refused = ask(port, {"input": "wa"})
        assert "64 of at most 64 requests are in progress" in is_error(refused, 503)["message"]
        assert refused[1]["Retry-After"] == "1"
        gate.open.set()
        assert [answer.result()[0] for answer in answers] == [200] * 64
        seen = metrics(port)
        assert seen["bert_jax_refused_total"] == seen['bert_jax_requests_total{code="503"}'] == 1


def test_time_is_limited_for_answers_bodies_and_silence(vectors):
    gate = Gate(vectors)
    asked = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    with running(gate, endpoints.Limits(seconds=1)) as port, ThreadPoolExecutor(3) as clients:
        waits = clients.submit(ask, port, {"input": "wa"})
        halfway, silent = (clients.submit(exchange, port, data) for data in (asked, b""))
        assert "no answer within 1 s" in is_error(waits.result(), 503)["message"]
        assert halfway.result().startswith(b"HTTP/1.1 408 ")
        assert silent.result() == b""
        gate.open.set()
        assert ask(port, {"input": "wa"})[0] == 200


def test_what_the_model_cannot_compute_is_an_error_of_its_request_alone(vectors, embedder):
    gate = Gate(vectors)
    with running(gate) as port, ThreadPoolExecutor(4) as clients:
        first = clients.submit(ask, port, {"input": "wa"})
        until(lambda: metrics(port)["bert_jax_requests_under_way"] == 1)
        given = (["fail"], ["wa", "xb", "xa"], ["wb", "fail", "wc"])
        answers = [clients.submit(ask, port, {"input": texts}) for texts in given]
        until(lambda: metrics(port)["bert_jax_rows_under_way"] == 8)
        gate.open.set()
        error = is_error(answers[0].result(), 500)
        assert (error["type"], error["message"]) == ("server_error", "numbers that are not finite")
        is_error(answers[2].result(), 500)
        status, _, body = answers[1].result()
        assert status == first.result()[0] == 200
        found = [one["embedding"] for one in body["data"]]
        (part,) = embedder.embed(given[1])
        np.testing.assert_allclose(np.float32(found), part.vectors, atol=1e-5)


def test_where_nothing_can_be_computed_any_more_the_service_ends(monkeypatch, vectors):
    broken = service.Service(Gate(vectors), endpoints.Limits())
    monkeypatch.setattr(broken, "_next_turn", lambda: 1 // 0)
    with service.bind_socket("127.0.0.1", 0) as bound, ThreadPoolExecutor(1) as clients:
        bound.listen()
        clients.submit(exchange, bound.getsockname()[1], post({"input": "wa"}))
        with pytest.raises(SystemExit, match="ZeroDivisionError"):
            service.make_server(broken, 1.0).run(sockets=[bound])


# --- the command --------------------------------------------------------------------------------


def test_a_start_that_cannot_be_is_one_line(port, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base("base")
    for arguments, *words in (
        ("--workdir nowhere --port 0", "nowhere"),
        ("--workdir base --port 70000", "--port", "70000"),
        (f"--workdir base --port {port}", f"--port {port}"),  # is taken
        ("--workdir base --host 300.0.0.1 --port 0", "--host 300.0.0.1"),
        ("--workdir base --host a..b --port 0", "--host a..b"),
        ("--workdir base --queue 63", "--queue", "64"),
        ("--workdir base --port 0 --layers 4", "--layers 4"),
        ("--workdir base --port 0 --from base", "--from"),
    ):
        fails(f"serve {arguments}", *words)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "bert_jax.serve.service")
    monkeypatch.delattr("bert_jax.serve.service")
    fails("serve --workdir base", "uvicorn is not installed: pip install 'bert-jax[serve]'")


@contextlib.contextmanager
def process(folder, *arguments):
    """A service of its own, and its port."""
    words = [sys.executable, "-m", "bert_jax.cli", "serve", "--port", "0", *arguments]
    environment = os.environ | small_run.settings(devices=1)
    with subprocess.Popen(
        words, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as started:
        try:
            line = started.stdout.readline().decode()
            yield started, int(re.search(r":(\d+)/", line)[1])
        finally:
            started.kill()


@pytest.mark.long
def test_a_fine_tuned_run_answers_as_predict_and_ends_when_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tuned.write_base(tmp_path / "base")
    tuned.write_task(tmp_path, "pair")
    tuned.finetune()
    pairs = [["wa wb", "xa"], ["xb", "xc xd " * 9], ["wa", "wb"]]
    expected = tuned.predict(*itertools.chain(*pairs))
    with process(tmp_path, "--workdir", "run") as (started, port), ThreadPoolExecutor(8) as clients:
        status, _, body = ask(port, {"input": pairs}, "/predict")
        assert status == 200
        for found, other in zip(body["data"], expected, strict=True):
            assert (found["texts"], found["label"]) == (other["texts"], other["label"])
            for label, chance in found["probabilities"].items():
                assert chance == pytest.approx(other["probabilities"][label], rel=1e-5)
        asked = {"input": pairs * 600}
        answers = [clients.submit(ask, port, asked, "/predict") for _ in range(8)]
        until(lambda: metrics(port)["bert_jax_requests_under_way"] == 8)
        started.send_signal(signal.SIGTERM)
        for answer in answers:
            status, _, body = answer.result()
            assert status == 200 and len(body["data"]) == 1800
        out, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (0, b"")
    assert out.decode().endswith("serve: ended; requests answered: 9 with 200\n")
