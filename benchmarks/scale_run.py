"""A run at the paper's size: a corpus of Wikipedia's lengths, written straight.

`python -m benchmarks.scale_run`. Writes a corpus of 6.4 million documents and 4 billion ids, its
source next to it as a (sparse) file of 20 GB, and asks fresh processes: CPU seconds and memory from
the start to the first batch, with nothing planned (cold) and with all of it (warm); of a plan, at
128 and at 512; of batches, alone and while the next epoch is planned. It takes 12 GB of disk, goes
on after a stop with what is missing, and removes everything at the end.
"""

import argparse
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
from etils import epath

from benchmarks import measure
from bert_jax import config
from bert_jax.config import Experiment, Parallelism, Run
from bert_jax.data import build, corpus, stream
from bert_jax.data.batches import TrainBatches
from bert_jax.distributed import peers as peers_lib
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.pretraining.pretraining_job import PretrainingJob
from bert_jax.storage.workdir import COMPLETE, Workdir, with_checksum
from bert_jax.text import sources as text_sources
from bert_jax.training import feed
from bert_jax.training import mesh as mesh_lib

# Of Wikipedia: sentences of 25 pieces, articles of 25 sentences, a few of them of thousands.
DOCUMENTS, IDS, SOURCE = 6_400_000, 4_000_000_000, 20_000_000_000
SENTENCE, SENTENCE_SIGMA, DOCUMENT_SIGMA = 25, 0.6, 1.3
VALIDATION_SHARE, _DISK = 0.005, 12e9
# Sentences drawn, and ids written, at once.
_DRAWN, _WRITTEN = 1 << 22, 1 << 24
_VOCAB_SIZE = 30_522
# Windows of so many batches, and how many of each kind.
_BATCHES, _ROUNDS = 100, 15


def main() -> None:
    """Writes the corpus, and measures what is not measured yet."""
    flags = measure.parser(
        __doc__,
        size=(1.0, "of the corpus, times Wikipedia's"),
        folder=("build/scale_run", "where all of it is kept"),
        part=("", argparse.SUPPRESS),
    ).parse_args()
    folder = pathlib.Path(flags.folder).absolute()
    if flags.part:
        return print(json.dumps(PARTS[flags.part](folder)))
    measure.require_room(folder, _DISK * flags.size)
    if not (folder / "corpus" / COMPLETE).exists():
        write_corpus(folder, flags.size)
    kept = folder / "measured.json"
    found = json.loads(kept.read_text()) if kept.exists() else {}
    for part in PARTS:
        if part not in found:
            found[part] = measured(folder, part)
            kept.write_text(json.dumps(found))
        print(f"{part}:", *(f"{k}={v:.4g}" for k, v in found[part].items()), flush=True)
    figures = {f"{part}_{name}": value for part in found for name, value in found[part].items()}
    measure.report("scale_run", figures, {"size": flags.size}, flags.out)
    shutil.rmtree(folder)


def experiment(folder: pathlib.Path) -> Experiment:
    """LARGE on this corpus."""
    settings = [f"corpus.sources=text:{folder / 'text'}", "corpus.layout=sentences_by_line"]
    settings += [f"corpus.tokenizer={folder / 'vocab.txt'}", f"run.corpus_dir={folder / 'corpus'}"]
    large = config.load(str(measure.ROOT / "experiments" / "bert_large.py"))
    return config.override(large, settings)


def write_corpus(folder: pathlib.Path, size: float) -> None:
    """What `prepare` makes of a few lines, with other splits and another source in its place."""
    (folder / "text").mkdir(exist_ok=True)
    (folder / "vocab.txt").write_text(measure.vocabulary())
    text = folder / "text" / "all.txt"
    text.write_text("\n".join(f"Document {i} .\nIts end .\n" for i in range(3_000)))
    scaled, made = experiment(folder), epath.Path(folder / "corpus")
    made.rmtree(missing_ok=True)
    corpus.prepare(scaled.corpus, scaled.model.vocab_size, made, print)
    (made / COMPLETE).unlink()
    os.truncate(text, int(SOURCE * size))
    manifest = json.loads((made / "manifest.json").read_text())
    shares = {"train": 1 - VALIDATION_SHARE, "validation": VALIDATION_SHARE}
    for seed, (split, share) in enumerate(shares.items()):
        counts = int(DOCUMENTS * size * share), int(IDS * size * share)
        manifest["splits"][split] |= write_split(made / "stream" / split, seed, *counts)
    manifest["sources"] = text_sources.fingerprint(scaled.corpus)
    manifest["files"] = build.hash_files(made)
    manifest.pop("checksum")
    (made / "manifest.json").write_text(json.dumps(with_checksum(manifest)))
    (made / COMPLETE).touch()


def write_split(folder: epath.Path, seed: int, count: int, ids: int) -> dict[str, int]:
    """Writes a split's stream; returns its counts."""
    rng = np.random.default_rng(seed)

    def lengths(mean: float, sigma: float, count: int) -> np.ndarray:
        drawn = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count)
        return np.maximum(np.ceil(drawn - 0.5), 1).astype(np.uint64)

    sizes = lengths(ids / count / SENTENCE, DOCUMENT_SIGMA, count)
    offsets = np.concatenate([np.zeros(1, np.uint64), np.cumsum(sizes)])
    (folder / "document_offsets.bin").write_bytes(offsets.tobytes())
    sentences, total = int(offsets[-1]), 0
    with (folder / "sentence_offsets.bin").open("wb") as file:
        file.write(np.uint64(0).tobytes())
        for start in range(0, sentences, _DRAWN):
            drawn = lengths(SENTENCE, SENTENCE_SIGMA, min(_DRAWN, sentences - start))
            ends = np.cumsum(drawn) + np.uint64(total)
            file.write(ends.tobytes())
            total = int(ends[-1])
    block = rng.integers(1_000, _VOCAB_SIZE, _WRITTEN, dtype=np.uint16)
    unigrams = np.zeros(_VOCAB_SIZE, np.int64)
    with (folder / "ids.bin").open("wb") as file:
        for start in range(0, total, _WRITTEN):
            part = block[: total - start]
            file.write(part.tobytes())
            unigrams += stream.count(part, _VOCAB_SIZE)
    (folder / "unigrams.bin").write_bytes(unigrams.tobytes())
    arrays = {
        "ids": ["uint16", total],
        "sentence_offsets": ["uint64", sentences + 1],
        "document_offsets": ["uint64", count + 1],
        "unigrams": ["int64", _VOCAB_SIZE],
    }
    meta = {"format_version": stream.FORMAT_VERSION, "arrays": arrays}
    (folder / "stream.json").write_text(json.dumps(meta) + "\n")
    return {"documents": count, "sentences": sentences, "tokens": total}


def measured(folder: pathlib.Path, part: str) -> dict[str, float]:
    """What a fresh process measures."""
    module = [sys.executable, "-m", "benchmarks.scale_run"]
    environment = measure.environment(len(os.sched_getaffinity(0)), "shipped")
    environment["BERT_JAX_CACHE_DIR"] = str(folder / "cache")
    words = ["--folder", str(folder), "--part", part]
    out = subprocess.check_output([*module, *words], cwd=measure.ROOT, env=environment)
    return json.loads(out.splitlines()[-1])


def cold_start(folder: pathlib.Path) -> dict[str, float]:
    """A start with nothing planned."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    (folder / "corpus" / "plans.json").unlink(missing_ok=True)
    return start(folder)


def start(folder: pathlib.Path) -> dict[str, float]:
    """All that `pretrain` does with a corpus before its first step."""
    scaled = experiment(folder)
    job = PretrainingJob(scaled, Workdir(folder / "run", scaled.run.corpus_dir), lambda line: None)
    with peers_lib.connect_processes() as peers:
        job.prepare(peers)
        job.open(mesh_lib.make_mesh(scaled.parallelism), peers)
        phase = job.training.phase_batches_at(0)
        while not phase.is_ready(0):
            time.sleep(0.05)
        phase.make_batch(0, np.arange(phase.batch_size))
        phase.stop_planning()  # before the next epoch's plan counts, which is no part of a start
        held, mapped = measure.resident(os.getpid())
    return {"cpu_seconds": sum(os.times()[:4]), "held_gb": held / 1e9, "mapped_gb": mapped / 1e9}


def plan(folder: pathlib.Path, phase: int) -> dict[str, float]:
    """An epoch that nobody planned yet; memory is that of the process that does."""
    source = batches_of(folder, phase).plans
    # Of this process and of those it waited for.
    before, held = sum(os.times()[:4]), 0.0
    while (found := source.find_or_begin(99)) is None:
        if maker := source._worker:
            held = max(held, measure.resident(maker.process.pid)[0])
        time.sleep(0.02)
    source.close()
    seconds, size = sum(os.times()[:4]) - before, os.path.getsize(found.filename)
    os.unlink(found.filename)
    return {
        "cpu_seconds": seconds,
        "rows": len(found),
        "microseconds_a_row": 1e6 * seconds / len(found),
        "bytes_a_row": size / len(found),
        "held_gb": held / 1e9,
    }


def batches(folder: pathlib.Path) -> dict[str, float]:
    """Batches on a device, in turns with the maker of a plan halted and at work."""
    train, other = batches_of(folder, 0), batches_of(folder, 0)
    while not train.is_ready(0):
        time.sleep(0.05)
    sharding = mesh_lib.batch_sharding(mesh_lib.make_mesh(Parallelism()))
    windows: dict[str, list[tuple[float, float]]] = {"alone": [], "planning": []}
    with feed.Feed(train.batch, range(10**6), 256, sharding, Run(), print) as source:

        def window() -> None:
            for _ in range(_BATCHES):
                next(source)

        window()
        epoch, maker = 99, None
        try:
            for _ in range(_ROUNDS):
                if maker is None or other.plans.find_or_begin(epoch) is not None:
                    epoch += 1
                    other.plans.find_or_begin(epoch)
                    maker = other.plans._worker.process
                    time.sleep(2)  # until it is past its imports
                for kind, number in (("alone", signal.SIGSTOP), ("planning", signal.SIGCONT)):
                    maker.send_signal(number)
                    windows[kind].append(measure.clocked(window))
        finally:
            other.close()
            train.close()
    (alone_cpu, alone), (busy_cpu, busy) = (np.median(windows[kind], axis=0) for kind in windows)
    return {
        "alone_a_second": _BATCHES / alone,
        "planning_a_second": _BATCHES / busy,
        "planning_over_alone": alone / busy,
        "planning_over_alone_cpu": alone_cpu / busy_cpu,
    }


def batches_of(folder: pathlib.Path, phase: int) -> TrainBatches:
    """The batches of a phase."""
    scaled = experiment(folder)
    return PreparedCorpus.open(epath.Path(scaled.run.corpus_dir)).train_batches(scaled, phase)


PARTS = {
    "start_cold": cold_start,
    "start_warm": start,
    "plan_128": functools.partial(plan, phase=0),
    "plan_512": functools.partial(plan, phase=1),
    "batches": batches,
}


if __name__ == "__main__":
    main()
