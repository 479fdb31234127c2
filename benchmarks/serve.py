"""Requests a second and latencies of `bert-jax serve` against `embed` in bulk: `make bench-serve`.

A service in a process of its own is asked for the vector of a sentence at a time by 1, 8 and 64
clients, threads that keep their connections; then this process embeds the same sentences in bulk.
They take turns. A ratio is sentences a second of the clients over those of `embed`, and of CPU
time `embed`'s over the service's, clients left out: below 1 `embed` is better.
"""

import concurrent.futures
import contextlib
import functools
import http.client
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath

from benchmarks import measure
from benchmarks.embed import bulk, embedder_of, sample
from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Model
from bert_jax.model import heads
from bert_jax.text.tokenizer import WordPiece


def main() -> None:
    """Measures in rounds."""
    flags = measure.parser(
        __doc__,
        workdir=("", "a base or a run; default: random weights"),
        clients="1,8,64",
        sentences=(2_000, "of a round in bulk"),
        seconds=(10.0, "of each number of clients"),
        rounds=3,
        max_length=(256, "tokens of a sentence"),
    ).parse_args()
    texts = sample(flags.sentences)
    with tempfile.TemporaryDirectory() as folder:
        workdir = flags.workdir or random_base(f"{folder}/base")
        embedder = embedder_of(workdir, flags.max_length)
        embedder.warm()
        with service(workdir, flags.max_length) as (pid, port):
            turns = {"embed": lambda: bulk(embedder, texts, [])}
            for count in flags.clients.split(","):
                turns[count] = functools.partial(ask, pid, port, int(count), flags.seconds, texts)
            rounds = measure.in_turns(turns, flags.rounds)
    details = {"sentences": len(texts), "workdir": flags.workdir, "rounds": dict(rounds)}
    figures = summary(rounds.pop("embed"), rounds, len(texts))
    measure.report("serve", figures, details, flags.out)


def random_base(folder: str) -> str:
    """A base of MiniLM's shape, and of its vocabulary."""
    pieces = measure.vocabulary().split("\n")[:-1]
    size = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12}
    model = Model(vocab_size=len(pieces), intermediate_size=1536, **size)
    params = jax.device_get(heads.init_params(model, jax.random.key(0)))
    base = base_lib.Base(model, params, WordPiece(pieces, "uncased"), "random")
    base_lib.write(base, epath.Path(folder))
    return folder


@contextlib.contextmanager
def service(workdir: str, max_length: int) -> Iterator[tuple[int, int]]:
    """The process and the port of a service."""
    words = ["--workdir", workdir, "--port", "0", "--max-length", str(max_length)]
    command = [sys.executable, "-m", "bert_jax.cli", "serve", *words]
    environment = measure.environment(os.cpu_count() or 1, "shipped")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            yield process.pid, int(re.search(r":(\d+)/", process.stdout.readline())[1])
        finally:
            process.terminate()
            print(process.stdout.read(), end="")


def ask(pid: int, port: int, clients: int, seconds: float, texts: list[str]) -> dict[str, float]:
    """What clients take and get that ask one after the other."""
    ends = time.monotonic() + seconds

    def client(number: int) -> list[tuple[int, float]]:
        connection, found = http.client.HTTPConnection("127.0.0.1", port, timeout=120), []
        for text in itertools.islice(itertools.cycle(texts), number * 31, None):
            if (began := time.monotonic()) > ends:
                break
            body = json.dumps({"input": text, "encoding_format": "base64"})
            connection.request("POST", "/v1/embeddings", body)
            answer = connection.getresponse()
            assert ("data" in json.loads(answer.read())) == (answer.status == 200)
            found.append((answer.status, time.monotonic() - began))
        return found

    wall, cpu = time.perf_counter(), measure.cpu_seconds(pid)
    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        answers = list(itertools.chain(*pool.map(client, range(clients))))
    latencies = [latency for status, latency in answers if status == 200]
    return {
        "wall": time.perf_counter() - wall,
        "cpu": measure.cpu_seconds(pid) - cpu,
        "answered": len(latencies),
        "refused": len(answers) - len(latencies),
        "p50": float(np.percentile(latencies, 50)),
        "p99": float(np.percentile(latencies, 99)),
    }


def summary(
    in_bulk: list[tuple[float, float]], rounds: dict[str, list[dict]], sentences: int
) -> dict[str, float]:
    """Medians over rounds; see above for the ratios."""
    cpu, wall = (float(np.median(seconds)) for seconds in zip(*in_bulk, strict=True))
    figures = {"embed_sentences_per_second": sentences / wall}
    for count, turns in rounds.items():
        rate = float(np.median([turn["answered"] / turn["wall"] for turn in turns]))
        figures[f"requests_per_second_{count}"] = rate
        for name in ("p50", "p99"):
            figures[f"{name}_ms_{count}"] = 1e3 * float(np.median([t[name] for t in turns]))
        figures[f"ratio_{count}"] = rate * wall / sentences
        served = float(np.median([turn["cpu"] / turn["answered"] for turn in turns]))
        figures[f"cpu_ratio_{count}"] = cpu / sentences / served
        figures[f"refused_{count}"] = sum(turn["refused"] for turn in turns)
    return figures


if __name__ == "__main__":
    main()
