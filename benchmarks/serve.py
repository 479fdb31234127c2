"""Requests a second and latencies of `bert-jax serve` against `embed` in bulk: `make bench-serve`.

A service in a process of its own is asked for the vector of a sentence at a time by 1, 8 and 64
clients, threads that keep their connections; then this process embeds the same sentences in bulk.
They take turns. A ratio is sentences a second of the clients over those of `embed`, and of CPU
time `embed`'s over the service's, clients left out: below 1 `embed` is better.
"""

import argparse
import collections
import contextlib
import http.client
import itertools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import jax
import numpy as np
from etils import epath

from benchmarks import measure
from benchmarks.embed import sample
from bert_jax import base as base_lib
from bert_jax.config import Model, Parallelism
from bert_jax.loaded import Loaded
from bert_jax.model import heads
from bert_jax.text import vocabulary
from bert_jax.text.tokenizer import WordPiece
from bert_jax.training import mesh as mesh_lib
from bert_jax.vectors import embed


def main() -> None:
    """Measures in rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", default="", help="a base or a run; default: random weights")
    parser.add_argument("--clients", default="1,8,64")
    parser.add_argument("--sentences", type=int, default=2_000, help="of a round in bulk")
    parser.add_argument("--seconds", type=float, default=10, help="of each number of clients")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a sentence")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = sample(flags.sentences)
        workdir = flags.workdir or random_base(pathlib.Path(folder) / "base", texts)
        compare(workdir, texts, flags)


def random_base(folder: pathlib.Path, texts: list[str]) -> str:
    """A base of MiniLM's shape that knows the words of the sample."""
    words = collections.Counter(re.findall(r"[a-z]+|[^\sa-z]", " ".join(texts).lower()))
    pieces = [*vocabulary.SPECIALS, *sorted(words)]
    model = Model(
        vocab_size=len(pieces),
        hidden_size=384,
        num_hidden_layers=6,
        num_attention_heads=12,
        intermediate_size=1536,
    )
    params = jax.device_get(heads.init_params(model, jax.random.key(0)))
    base = base_lib.Base(model, params, WordPiece(pieces, "uncased"), "random")
    base_lib.write(base, epath.Path(folder))
    return str(folder)


@contextlib.contextmanager
def service(workdir: str, max_length: int) -> Iterator[tuple[int, int]]:
    """The process and the port of a service."""
    words = ["--workdir", workdir, "--port", "0", "--max-length", str(max_length)]
    with subprocess.Popen(
        [sys.executable, "-m", "bert_jax.cli", "serve", *words],
        stdout=subprocess.PIPE,
        text=True,
        env=measure.environment(os.cpu_count() or 1, "shipped"),
    ) as process:
        assert process.stdout
        line = process.stdout.readline()
        try:
            yield process.pid, int(re.search(r":(\d+)/", line)[1])
        finally:
            process.terminate()
            print(process.stdout.read(), end="")


def ask(port: int, clients: int, seconds: float, texts: list[str]) -> dict[str, list[float]]:
    """Latencies by HTTP's status of clients that ask one after the other."""
    latencies: dict[str, list[float]] = collections.defaultdict(list)
    ends = time.monotonic() + seconds
    failed: list[BaseException] = []

    def client(number: int) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
            for text in itertools.islice(itertools.cycle(texts), number * 31, None):
                began = time.monotonic()
                if began > ends:
                    return
                body = json.dumps({"input": text, "encoding_format": "base64"})
                connection.request("POST", "/v1/embeddings", body)
                answer = connection.getresponse()
                fields = json.loads(answer.read())
                assert ("data" in fields) == (answer.status == 200)
                latencies[str(answer.status)].append(time.monotonic() - began)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise RuntimeError(f"{len(failed)} of {clients} clients lost an answer") from failed[0]
    return dict(latencies)


def compare(workdir: str, texts: list[str], flags: argparse.Namespace) -> None:
    """Rounds of both sides in turns."""
    trained = Loaded.of(epath.Path(workdir))
    mesh = mesh_lib.make_mesh(Parallelism())
    embedder = embed.Embedder(trained, embed.Features(), mesh, flags.max_length)
    embedder.warm()
    bulk: list[tuple[float, float]] = []
    counts = [int(count) for count in flags.clients.split(",")]
    rounds: dict[int, list[dict]] = {count: [] for count in counts}
    with service(workdir, flags.max_length) as (pid, port):
        for _ in range(flags.rounds):
            cpu, wall = measure.clocked(lambda: list(embedder.embed(texts)))
            bulk.append((wall, cpu))
            print(f"embed: {len(texts) / bulk[-1][0]:.0f} sentences a second", flush=True)
            for count in counts:
                wall, cpu = time.perf_counter(), measure.cpu_seconds(pid)
                latencies = ask(port, count, flags.seconds, texts)
                wall, cpu = time.perf_counter() - wall, measure.cpu_seconds(pid) - cpu
                answered = latencies.get("200", [])
                rounds[count].append(
                    {
                        "wall": wall,
                        "cpu": cpu,
                        "answered": len(answered),
                        "refused": sum(map(len, latencies.values())) - len(answered),
                        "p50": float(np.percentile(answered, 50)),
                        "p99": float(np.percentile(answered, 99)),
                    }
                )
                print(f"{count} clients: {rounds[count][-1]}", flush=True)
    figures = summary(bulk, rounds, len(texts))
    details = {"sentences": len(texts), "workdir": flags.workdir, "bulk": bulk, "served": rounds}
    measure.report("serve", figures, details, flags.out)


def summary(
    bulk: list[tuple[float, float]], rounds: dict[int, list[dict]], sentences: int
) -> dict[str, float]:
    """Medians over rounds; see above for the ratios."""
    in_bulk, cpu_in_bulk = (float(np.median([turn[i] for turn in bulk])) for i in (0, 1))
    figures = {"embed_sentences_per_second": sentences / in_bulk}
    for count, turns in rounds.items():
        rate = float(np.median([turn["answered"] / turn["wall"] for turn in turns]))
        cpu = float(np.median([turn["cpu"] / turn["answered"] for turn in turns]))
        figures[f"requests_per_second_{count}"] = rate
        for name in ("p50", "p99"):
            figures[f"{name}_ms_{count}"] = 1e3 * float(np.median([t[name] for t in turns]))
        figures[f"ratio_{count}"] = rate * in_bulk / sentences
        figures[f"cpu_ratio_{count}"] = cpu_in_bulk / sentences / cpu
        figures[f"refused_{count}"] = sum(turn["refused"] for turn in turns)
    return figures


if __name__ == "__main__":
    main()
