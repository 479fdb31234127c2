"""Sentences a second of `bert-jax embed` against PyTorch and transformers: `make bench-embed`.

Both sides get the same sentences of the sample text and the same weights, and give the mean of a
sentence's tokens. Each runs in an environment and a process of its own, with the C library's memory
as it is shipped; they take turns, and only one computes at a time. The peer sorts by length, too,
and its time is that of the best of some batch sizes. A ratio is the peer's time over ours: above 1
we are faster. `first` is the first turn of each process, ours with compiling.
"""

import argparse
import pathlib
import sys
import tempfile
from typing import Any

import numpy as np

from benchmarks import measure
from benchmarks.worker import Worker
from bert_jax.config import Corpus
from bert_jax.text import documents, sentences

SAMPLE = "jsonl:experiments/sample_text/speeches.jsonl.gz"


def main() -> None:
    """Measures, and compares the vectors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sentences", type=int, default=10_000)
    parser.add_argument("--max-length", type=int, default=256, help="tokens of a sentence")
    parser.add_argument("--batches", default="32,64,128", help="the peer's, in sentences")
    parser.add_argument("--source", default="", help="weights; default: the peer's MiniLM package")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--devices", type=int, default=1, help="CPU devices that ours makes of them"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--python", default=".venv-torch/bin/python", help="with torch")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        compare(pathlib.Path(folder), flags)


def sample(count: int) -> list[str]:
    """Sentences of the sample text, taken evenly from all of it; again if there are too few."""
    found = [
        " ".join(sentence.split())
        for document in documents.read(Corpus(sources=(SAMPLE,)))
        for sentence in sentences.split(document, "en")
    ]
    return [found[i * max(len(found), count) // count % len(found)] for i in range(count)]


def compare(folder: pathlib.Path, flags: argparse.Namespace) -> None:
    """Rounds of both sides in turns."""
    (folder / "texts.txt").write_text("\n".join(sample(flags.sentences)) + "\n")
    with (
        Worker(sys.executable, "benchmarks.embed_ours", flags.threads, "shipped") as ours,
        Worker(flags.python, "benchmarks.embed_peer", flags.threads, "shipped") as peer,
    ):
        source = flags.source or peer.ask("packaged")
        built = {"source": source, "folder": str(folder), "max_length": flags.max_length}
        versions = peer.ask("build", threads=flags.threads, **built)
        tokens = ours.ask("build", devices=flags.devices, **built)
        turns: dict[str, tuple[Worker, dict[str, Any]]] = {"ours": (ours, {})}
        for size in map(int, flags.batches.split(",")):
            turns[f"peer {size}"] = peer, {"size": size}
        # Wall and CPU seconds.
        found: dict[str, list[tuple[float, float]]] = {entry: [] for entry in turns}
        for number in range(flags.rounds + 1):
            for entry in list(turns)[:: 1 if number % 2 == 0 else -1]:
                worker, arguments = turns[entry]
                found[entry].append(worker.ask("embed", **arguments))
                wall, cpu = found[entry][-1]
                print(
                    f"{entry}{'' if number else ', first'}: {wall:.2f} s, {cpu:.2f} s of CPU; "
                    f"{flags.sentences / wall:.0f} sentences a second",
                    flush=True,
                )
        difference = np.abs(np.load(folder / "ours.npy") - np.load(folder / "peer.npy")).max()
    first = {entry: turns.pop(0) for entry, turns in found.items()}
    details = {
        "versions": versions,
        "sentences": flags.sentences,
        "tokens": tokens,
        "threads": flags.threads,
        "devices": flags.devices,
        "first": first,
        "seconds": found,
    }
    measure.report("embed", figures(found, first, flags.sentences, difference), details, flags.out)


def figures(
    seconds: dict[str, list[tuple[float, float]]],
    first: dict[str, tuple[float, float]],
    count: int,
    difference: float,
) -> dict[str, float]:
    """Sentences a second; the best peer's time over ours: best over best, median over median."""
    kinds = {}
    for i, kind in enumerate(("wall", "cpu")):
        spreads = {
            entry: measure.spread([turn[i] for turn in found]) for entry, found in seconds.items()
        }
        kinds[kind] = {
            which: (
                spreads["ours"][which],
                min(s[which] for e, s in spreads.items() if e != "ours"),
            )
            for which in ("min", "median")
        }
    wall, cpu = kinds["wall"], kinds["cpu"]
    return {
        "sentences_per_second": count / wall["median"][0],
        "peer_sentences_per_second": count / wall["median"][1],
        "ratio": wall["min"][1] / wall["min"][0],
        "ratio_median": wall["median"][1] / wall["median"][0],
        "cpu_ratio": cpu["min"][1] / cpu["min"][0],
        "cpu_ratio_median": cpu["median"][1] / cpu["median"][0],
        "first_ratio": min(f[0] for e, f in first.items() if e != "ours") / first["ours"][0],
        "largest_difference": float(difference),
    }


if __name__ == "__main__":
    main()
