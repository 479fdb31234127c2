"""Sentences a second of `bert-jax embed` against PyTorch and transformers: `make bench-embed`.

Both sides get the same sentences of the sample text and the same weights, and give the mean of a
sentence's tokens. Each runs in an environment and a process of its own, with the C library's memory
as it is shipped; they take turns, and only one computes at a time. The peer sorts by length, too,
and its time is that of the best of some batch sizes. A ratio is the peer's time over ours: above 1
we are faster. `first` is the first turn of each process, ours with compiling.
"""

import statistics
import tempfile

import numpy as np
from etils import epath

from benchmarks import measure
from bert_jax.config import Corpus, Parallelism
from bert_jax.embeddings.embed import Embedder, VectorOptions
from bert_jax.interop import importing
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir
from bert_jax.text import documents, sentence_splitter
from bert_jax.training import mesh as mesh_lib


def main() -> None:
    """Measures, and compares the vectors."""
    flags = measure.parser(
        __doc__,
        sentences=10_000,
        max_length=(256, "tokens of a sentence"),
        batches=("32,64,128", "the peer's, in sentences"),
        source=("", "weights; default: the peer's MiniLM package"),
        threads=2,
        rounds=5,
        python=measure.TORCH,
    ).parse_args()
    measure.restart_with(flags.threads, "shipped")
    texts, vectors = sample(flags.sentences), []
    other = measure.peer(flags.python, "embed", flags.threads, "shipped")
    with tempfile.TemporaryDirectory() as folder, other as peer:
        base, cut = epath.Path(folder) / "base", {"max_length": flags.max_length}
        out = f"{folder}/peer.npy"
        source, versions = peer("build", source=flags.source, texts=texts, out=out, **cut)
        importing.import_weights(epath.Path(source), base, None, lambda line: None)
        embedder = embedder_of(base, **cut)
        turns = {"ours": lambda: bulk(embedder, texts, vectors)}
        for size in map(int, flags.batches.split(",")):
            turns[f"peer {size}"] = lambda size=size: peer("embed", size=size)
        found = measure.in_turns(turns, flags.rounds + 1)
        off = np.abs(np.concatenate(vectors)[-len(texts) :] - np.load(out)).max()
    first = {entry: seconds.pop(0) for entry, seconds in found.items()}
    details = {"versions": versions, "threads": flags.threads, "first": first, "seconds": found}
    measure.report("embed", figures(found, first, len(texts), off), details, flags.out)


def sample(count: int) -> list[str]:
    """Sentences of the sample text, taken evenly from all of it; again if there are too few."""
    read = documents.read(Corpus(sources=(measure.SAMPLE,)))
    found = [" ".join(line.split()) for d in read for line in sentence_splitter.split(d, "en")]
    return [found[i * max(len(found), count) // count % len(found)] for i in range(count)]


def embedder_of(workdir: epath.PathLike, max_length: int) -> Embedder:
    """The encoder of a base or a run, on all devices."""
    trained, mesh = LoadedModel.of(open_workdir(workdir)), mesh_lib.make_mesh(Parallelism())
    return Embedder(trained, VectorOptions(), mesh, max_length)


def bulk(embedder: Embedder, texts: list[str], vectors: list[np.ndarray]) -> tuple[float, float]:
    """Adds the vectors of all texts; returns CPU and wall seconds."""
    return measure.clocked(lambda: vectors.extend(e.vectors for e in embedder.embed(texts)))


def figures(seconds: dict, first: dict, count: int, difference: float) -> dict[str, float]:
    """Sentences a second; the best peer's time over ours: best over best, median over median."""
    (cpu_ratio, cpu_ratio_median), (ratio, ratio_median) = (
        measure.times_faster(*([turn[clock] for turn in seconds[entry]] for entry in seconds))
        for clock in (0, 1)
    )
    rate = count / statistics.median(turn[1] for turn in seconds["ours"])
    return {
        "sentences_per_second": rate,
        "peer_sentences_per_second": rate / ratio_median,
        "ratio": ratio,
        "ratio_median": ratio_median,
        "cpu_ratio": cpu_ratio,
        "cpu_ratio_median": cpu_ratio_median,
        "first_ratio": min(f[1] for e, f in first.items() if e != "ours") / first["ours"][1],
        "largest_difference": float(difference),
    }


if __name__ == "__main__":
    main()
