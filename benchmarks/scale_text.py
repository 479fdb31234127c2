"""`prepare` on synthetic text of 70 MB, 700 MB and 3 GB: speed and memory.

`python -m benchmarks.scale_text` (`make scale-text`). Text of words by Zipf's law, of which new
ones never end, in sentences, paragraphs and documents of an encyclopedia's lengths, in JSON lines.
Each size is prepared with one worker, and the largest again with two, whose files must be the same
bytes.
What is done is kept until the end: the command goes on after a stop. Speed is per CPU second;
memory is anonymous memory of all processes together, sampled.
"""

import functools
import hashlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from benchmarks import measure

_DISK = 4.0  # for the text, the corpus, and what it is made of: times the text
_FILE = 64  # megabytes
_SYLLABLES = [a + b for a in [*"bcdfghklmnprstvw", "st", "tr", "ch"] for b in "aeiou"]
# Ranks of common words, and the share of others.
_COMMON, _RARE = 8_000, 0.12
_ENDINGS = ["", "", "n", "r", "s", "ng", "rd", "lt"]


def main() -> None:
    """Prepares each size."""
    sizes, where = ("70,700,3000", "megabytes of text"), ("build/scale_text", "where all lies")
    flags = measure.parser(__doc__, sizes=sizes, folder=where).parse_args()
    sizes, folder = [int(size) for size in flags.sizes.split(",")], pathlib.Path(flags.folder)
    measure.require_room(folder, _DISK * (sum(sizes) + max(sizes)) * 1e6)
    rows = [prepared(folder, *row) for row in [*((size, 1) for size in sizes), (max(sizes), 2)]]
    memory = [row["anonymous_megabytes"] for row in rows[:-1]]
    figures = {
        "least_mb_per_cpu_second": min(row["megabytes"] / row["seconds"] for row in rows),
        "most_anonymous_mb": max(memory),
        "most_over_least_memory": max(memory) / min(memory),
        "two_workers_same_bytes": rows[-1]["files"] == rows[-2]["files"],
    }
    measure.report("scale_text", figures, {"rows": rows}, flags.out)
    shutil.rmtree(folder)


def prepared(folder: pathlib.Path, megabytes: int, workers: int) -> dict[str, Any]:
    """Prepares text of some size in a process of its own; what was measured, if it was before."""
    result, corpus = (folder / f"{kind}{megabytes}-{workers}" for kind in ("row", "corpus"))
    if result.exists():
        return json.loads(result.read_text())
    text = folder / f"text{megabytes}"
    write_text(text, megabytes)
    # Begun again, as it would measure only what was left.
    shutil.rmtree(corpus, ignore_errors=True)
    command = [
        *(sys.executable, "-m", "bert_jax.cli", "prepare", "experiments/bert_base.py"),
        *("--set", f'corpus.sources=["jsonl:{text}"]', "--set", "corpus.validation_share=0.005"),
        *("--set", f"run.corpus_dir={corpus}", "--workers", str(workers)),
        *("--workdir", str(folder / "run")),
    ]
    process = subprocess.Popen(command, cwd=measure.ROOT, env=measure.environment(1, "shipped"))
    most, pid = 0.0, 0
    while not pid:
        most = max(most, measure.resident(process.pid)[0])
        time.sleep(0.2)
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
    if status:
        sys.exit(f"prepare of {megabytes} MB with {workers} workers ended with {status}")
    manifest = json.loads((corpus / "manifest.json").read_text())
    files = hashlib.sha256(json.dumps(manifest["files"], sort_keys=True).encode()).hexdigest()
    row = {
        "megabytes": sum(source["bytes"] for source in manifest["sources"]) / 1e6,
        "workers": workers,
        "seconds": usage.ru_utime + usage.ru_stime,
        "anonymous_megabytes": most / 1e6,
        "tokens": sum(split["tokens"] for split in manifest["splits"].values()),
        "files": files,
    }
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    result.write_text(json.dumps(row))
    shutil.rmtree(corpus)
    return row


def write_text(folder: pathlib.Path, megabytes: int) -> None:
    """Writes text in files of 64 MB, unless it is there."""
    folder.mkdir(exist_ok=True)
    for number in range(math.ceil(megabytes / _FILE)):
        path, left = folder / f"{number:04}.jsonl", min(_FILE, megabytes - number * _FILE) * 1e6
        if not path.exists():
            with path.with_suffix(".tmp").open("w") as file:
                for line in _lines(number):
                    file.write(line)
                    left -= len(line)
                    if left <= 0:
                        break
            path.with_suffix(".tmp").rename(path)


def _lines(number: int) -> Iterator[str]:
    """Yields documents without end, as JSON lines."""
    rng = np.random.default_rng(number)
    while True:
        # The rank of a word: Zipf's law for the commonest; of the others new ones never end, as in
        # an encyclopedia, where their number grows as the 0.65th power of the text.
        uniform = 1 - rng.random(200_000)
        common = np.exp(uniform * np.log(_COMMON))
        rare = _COMMON * uniform ** (-1 / 0.65)
        ranks = np.where(rng.random(len(uniform)) < _RARE, rare, common)
        words = [_word(rank) for rank in np.minimum(ranks, 2.0**40).astype(np.int64).tolist()]
        at = 0
        while at < len(words):
            count = int(np.clip(rng.lognormal(5.6, 1.0), 20, 20_000))  # words of a document
            yield json.dumps({"text": _document(words[at : at + count], rng)}) + "\n"
            at += count


def _document(words: list[str], rng: np.random.Generator) -> str:
    """Sentences of some 20 words, paragraphs of some 5 sentences."""
    lengths = rng.integers(5, 36, len(words) // 5 + 1).tolist()
    text, at = [], 0
    for number, length in enumerate(lengths):
        sentence = words[at : at + length]
        if not sentence:
            break
        if len(sentence) > 12:
            sentence[len(sentence) // 3] += ","
        text.append(sentence[0].capitalize() + " " + " ".join(sentence[1:]) + ".")
        text.append("\n" if number % 5 == 4 else " ")
        at += length
    return "".join(text).strip()


@functools.lru_cache(200_000)
def _word(rank: int) -> str:
    """The word of a rank: the commoner the shorter."""
    rest, word = rank, ""
    while rest:
        rest, syllable = divmod(rest - 1, len(_SYLLABLES))
        word += _SYLLABLES[syllable]
    return word + _ENDINGS[rank % len(_ENDINGS)]


if __name__ == "__main__":
    main()
