"""A run at the paper's size: a corpus of Wikipedia's lengths, written straight.

`python -m benchmarks.scale_run`. Writes a corpus of 6.4 million documents and 4 billion ids, its
source next to it as a (sparse) file of 20 GB, and asks fresh processes: CPU seconds and memory from
the start to the first batch, with nothing planned (cold) and with all of it (warm); of a plan, at
128 and at 512; of batches, alone and while the next epoch is planned. It takes 12 GB of disk, goes
on after a stop with what is missing, and removes everything at the end.
"""

import argparse
import contextlib
import functools
import gzip
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from etils import epath

from benchmarks import measure
from bert_jax import config
from bert_jax.config import Experiment, Parallelism
from bert_jax.data import build, corpus, stream
from bert_jax.data.batches import TrainBatches
from bert_jax.running.pretraining import Prepared
from bert_jax.storage.workdir import COMPLETE, Workdir, sealed
from bert_jax.text import sources as text_sources

VOCABULARY = measure.ROOT / "bert_jax" / "conformance" / "files" / "bert_base_uncased_vocab.txt.gz"
# Of Wikipedia: sentences of 25 pieces, articles of 25 sentences, a few of them of thousands.
SENTENCE, SENTENCE_SIGMA = 25, 0.6
DOCUMENT_SIGMA = 1.3
VALIDATION_SHARE = 0.005
# Sentences drawn, and ids written, at once.
_DRAWN, _WRITTEN = 1 << 22, 1 << 24
_GIGABYTES = 12
# Windows of so many batches, and how many of each kind.
_BATCHES, _ROUNDS = 100, 15


def main() -> None:
    """Writes the corpus, and measures what is not measured yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--documents", type=float, default=6.4e6)
    parser.add_argument("--ids", type=float, default=4e9)
    parser.add_argument("--source-gigabytes", type=float, default=20.0)
    parser.add_argument("--folder", default="build/scale_run", help="where all of it is kept")
    parser.add_argument("--only", default="", help="one of the parts")
    parser.add_argument("--keep", action="store_true", help="leave the corpus there")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    flags = parser.parse_args()
    folder = pathlib.Path(flags.folder).absolute()
    if flags.child:
        print(json.dumps(CHILDREN[flags.child](folder)))
        return
    require_room(folder, flags.ids)
    if not (folder / "corpus" / COMPLETE).exists():
        source = int(1e9 * flags.source_gigabytes)
        write_corpus(folder, int(flags.documents), int(flags.ids), source)
    kept = folder / "measured.json"
    found: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    for part in [flags.only] if flags.only else PARTS:
        if part not in found:
            found[part] = PARTS[part](folder)
            kept.write_text(json.dumps(found))
        print(f"{part}:", *(f"{k}={v:.4g}" for k, v in found[part].items()), flush=True)
    if flags.only:
        return
    figures = {f"{part}_{name}": value for part in found for name, value in found[part].items()}
    details = {"documents": flags.documents, "ids": flags.ids}
    measure.report("scale_run", figures, details, flags.out)
    if not flags.keep:
        shutil.rmtree(folder)


def require_room(folder: pathlib.Path, ids: float) -> None:
    """Ends the benchmark if the disk has no room for what is not there yet."""
    folder.mkdir(parents=True, exist_ok=True)
    there = sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())
    wanted, free = _GIGABYTES * 1e9 * ids / 4e9 - there, shutil.disk_usage(folder).free
    if free < wanted:
        sys.exit(
            f"scale_run: {folder} needs {wanted / 1e9:.1f} GB more and the disk has "
            f"{free / 1e9:.1f}; name another with --folder"
        )


def experiment(folder: pathlib.Path) -> Experiment:
    """LARGE on this corpus."""
    settings = [
        f"corpus.sources=text:{folder / 'text'}",
        f"corpus.tokenizer={folder / 'vocab.txt'}",
        "corpus.layout=sentences_by_line",
        f"run.corpus_dir={folder / 'corpus'}",
    ]
    large = config.load(str(measure.ROOT / "experiments" / "bert_large.py"))
    return config.override(large, settings)


# --- The corpus ---------------------------------------------------------------------------------


def write_corpus(folder: pathlib.Path, count: int, ids: int, source: int) -> None:
    """What `prepare` makes of a few lines, with other splits and another source in its place."""
    (folder / "text").mkdir(exist_ok=True)
    (folder / "vocab.txt").write_bytes(gzip.decompress(VOCABULARY.read_bytes()))
    text = folder / "text" / "all.txt"
    text.write_text("\n".join(f"Document {i} .\nIts end .\n" for i in range(3_000)))
    scaled, made = experiment(folder), epath.Path(folder / "corpus")
    made.rmtree(missing_ok=True)
    corpus.prepare(scaled.corpus, scaled.model.vocab_size, made, print)
    (made / COMPLETE).unlink()
    os.truncate(text, source)
    manifest = json.loads((made / "manifest.json").read_text())
    held_out = int(count * VALIDATION_SHARE)
    sizes = {"train": (count - held_out, 1 - VALIDATION_SHARE)}
    sizes["validation"] = (held_out, VALIDATION_SHARE)
    for number, (split, (its_count, share)) in enumerate(sizes.items()):
        counts = write_split(made / "stream" / split, number, its_count, int(ids * share))
        manifest["splits"][split] |= counts
    manifest["sources"] = text_sources.fingerprint(scaled.corpus)
    manifest["files"] = build.listed(made)
    manifest.pop("checksum")
    (made / "manifest.json").write_text(json.dumps(sealed(manifest)))
    (made / COMPLETE).touch()


def write_split(folder: epath.Path, seed: int, count: int, ids: int) -> dict[str, int]:
    """Writes a split's stream; returns its counts."""
    rng = np.random.default_rng(seed)
    mean = ids / count / SENTENCE
    centre = np.log(mean) - DOCUMENT_SIGMA**2 / 2
    sizes = np.ceil(rng.lognormal(centre, DOCUMENT_SIGMA, count) - 0.5).astype(np.int64)
    sizes = np.maximum(sizes, 1)
    offsets = np.zeros(count + 1, np.uint64)
    np.cumsum(sizes, out=offsets[1:], dtype=np.uint64)
    (folder / "document_offsets.bin").write_bytes(offsets.tobytes())
    sentences, total = int(offsets[-1]), 0
    with (folder / "sentence_offsets.bin").open("wb") as file:
        file.write(np.uint64(0).tobytes())
        for start in range(0, sentences, _DRAWN):
            drawn = min(_DRAWN, sentences - start)
            centre = np.log(SENTENCE) - SENTENCE_SIGMA**2 / 2
            lengths = np.ceil(rng.lognormal(centre, SENTENCE_SIGMA, drawn) - 0.5)
            ends = np.cumsum(np.maximum(lengths, 1).astype(np.uint64)) + np.uint64(total)
            file.write(ends.tobytes())
            total = int(ends[-1])
    vocab_size = 30_522
    block = rng.integers(1_000, vocab_size, _WRITTEN, dtype=np.uint16)
    unigrams = np.zeros(vocab_size, np.int64)
    with (folder / "ids.bin").open("wb") as file:
        for start in range(0, total, _WRITTEN):
            part = block[: total - start]
            file.write(part.tobytes())
            unigrams += np.bincount(part, minlength=vocab_size)
    (folder / "unigrams.bin").write_bytes(unigrams.tobytes())
    arrays = {
        "ids": ["uint16", total],
        "sentence_offsets": ["uint64", sentences + 1],
        "document_offsets": ["uint64", count + 1],
        "unigrams": ["int64", vocab_size],
    }
    meta = {"format_version": stream.FORMAT_VERSION, "arrays": arrays}
    (folder / "stream.json").write_text(json.dumps(meta) + "\n")
    return {"documents": count, "sentences": sentences, "tokens": total}


# --- What is measured ---------------------------------------------------------------------------


def child(folder: pathlib.Path, part: str) -> dict[str, float]:
    """What a fresh process measures."""
    command = [sys.executable, "-m", "benchmarks.scale_run", "--child", part]
    environment = measure.environment(len(os.sched_getaffinity(0)), "shipped")
    environment["BERT_JAX_CACHE_DIR"] = str(folder / "cache")
    done = subprocess.run(
        [*command, "--folder", str(folder)],
        cwd=measure.ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def cpu_seconds() -> float:
    """CPU seconds of this process and of those it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def memory(pid: int) -> dict[str, float]:
    """Gigabytes of a process: held, and mapped from files."""
    lines = pathlib.Path(f"/proc/{pid}/status").read_text().splitlines()
    kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
    return {"held_gb": kilobytes["RssAnon:"] / 1e6, "mapped_gb": kilobytes["RssFile:"] / 1e6}


def starts(folder: pathlib.Path) -> dict[str, float]:
    """From nothing to a first batch, with nothing planned and with all of it."""
    shutil.rmtree(folder / "cache", ignore_errors=True)
    (folder / "corpus" / "plans.json").unlink(missing_ok=True)
    return {
        f"{kind}_{name}": value
        for kind in ("cold", "warm")
        for name, value in child(folder, "start").items()
    }


def start(folder: pathlib.Path) -> dict[str, float]:
    """All that `pretrain` does with a corpus before its first step."""
    from bert_jax.running import peers as peers_lib
    from bert_jax.running.pretraining import PretrainingSetup
    from bert_jax.training import mesh as mesh_lib

    scaled = experiment(folder)
    workdir = Workdir(folder / "run", scaled.run.corpus_dir)
    setup = PretrainingSetup(scaled, workdir, lambda line: None)
    with peers_lib.connected() as peers:
        setup.prepare(peers.count)
        job = setup.open(mesh_lib.make_mesh(scaled.parallelism), peers)
        phase = job.batches(0)
        while not phase.ready(0):
            time.sleep(0.05)
        phase.batch(0, np.arange(phase.batch_size))
        phase.close()  # before the next epoch's plan counts, which is no part of a start
        return {"cpu_seconds": cpu_seconds(), **memory(os.getpid())}


def plan(folder: pathlib.Path, phase: int) -> dict[str, float]:
    """An epoch that nobody planned yet; memory is that of the process that does."""
    source = batches_of(folder, phase).plans
    before, held = cpu_seconds(), 0.0
    while (found := source.find(99)) is None:
        with contextlib.suppress(AttributeError, FileNotFoundError, KeyError):  # not yet, no more
            held = max(held, memory(source._maker.process.pid)["held_gb"])
        time.sleep(0.02)
    source.close()
    size = os.path.getsize(found.filename)
    os.unlink(found.filename)
    seconds = cpu_seconds() - before
    return {
        "cpu_seconds": seconds,
        "rows": len(found),
        "microseconds_a_row": 1e6 * seconds / len(found),
        "bytes_a_row": size / len(found),
        "held_gb": held,
    }


def batches(folder: pathlib.Path) -> dict[str, float]:
    """Batches on a device, in turns with the maker of a plan halted and at work."""
    from bert_jax.training import feed
    from bert_jax.training import mesh as mesh_lib

    train, other = batches_of(folder, 0), batches_of(folder, 0)
    while not train.ready(0):
        time.sleep(0.05)
    sharding = mesh_lib.batch_sharding(mesh_lib.make_mesh(Parallelism()))
    windows: dict[str, list[tuple[float, float]]] = {"alone": [], "planning": []}
    with feed.Feed(train.batch, 0, 10**6, 256, sharding, 4, 0, print) as source:
        for _ in range(_BATCHES):
            next(source)
        epoch, maker = 99, None
        try:
            for _ in range(_ROUNDS):
                if maker is None or maker.poll() is not None:
                    epoch += 1
                    other.plans.find(epoch)
                    maker = other.plans._maker.process
                    time.sleep(2)  # until it is past its imports
                for kind, number in (("alone", signal.SIGSTOP), ("planning", signal.SIGCONT)):
                    maker.send_signal(number)
                    cpu, wall = time.process_time(), time.perf_counter()
                    for _ in range(_BATCHES):
                        next(source)
                    spent = time.process_time() - cpu, time.perf_counter() - wall
                    windows[kind].append(spent)
        finally:
            other.close()
            train.close()
    alone, planning = (np.median(np.array(windows[k]), axis=0) for k in ("alone", "planning"))
    return {
        "alone_a_second": _BATCHES / alone[1],
        "planning_a_second": _BATCHES / planning[1],
        "planning_over_alone": alone[1] / planning[1],
        "alone_a_cpu_second": _BATCHES / alone[0],
        "planning_a_cpu_second": _BATCHES / planning[0],
        "planning_over_alone_cpu": alone[0] / planning[0],
    }


def batches_of(folder: pathlib.Path, phase: int) -> TrainBatches:
    """The batches of a phase."""
    scaled = experiment(folder)
    return Prepared.open(epath.Path(scaled.run.corpus_dir)).train_batches(scaled, phase)


CHILDREN: dict[str, Callable[[pathlib.Path], dict[str, float]]] = {
    "start": start,
    "plan_128": lambda folder: plan(folder, 0),
    "plan_512": lambda folder: plan(folder, 1),
    "batches": batches,
}
PARTS: dict[str, Callable[[pathlib.Path], dict[str, float]]] = {
    "start": starts,
    **{part: functools.partial(child, part=part) for part in ("plan_128", "plan_512", "batches")},
}


if __name__ == "__main__":
    main()
