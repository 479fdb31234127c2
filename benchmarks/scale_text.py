"""`prepare` on synthetic text of 70 MB, 700 MB and 3 GB: speed and memory.

`python -m benchmarks.scale_text` (`make scale-text`). Text of words by Zipf's law, of which new
ones never end, in sentences, paragraphs and documents of an encyclopedia's lengths, in JSON lines.
Each size is prepared with one worker, and the largest again with two, whose files must be the same
bytes.
What is done is kept until the end: the command goes on after a stop. Speed is per CPU second;
memory is anonymous memory of all processes together, sampled.
"""

import argparse
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
from typing import Any

import numpy as np

from benchmarks import measure

SIZES = (70, 700, 3_000)  # megabytes
# Disk that the text, the corpus, and what it is made of, take: times the text.
_DISK = 4.0
_FILE = 64  # megabytes
_SYLLABLES = [a + b for a in [*"bcdfghklmnprstvw", "st", "tr", "ch"] for b in "aeiou"]
# Ranks of common words, and the share of others.
_COMMON, _RARE = 8_000, 0.12
_ENDINGS = ["", "", "n", "r", "s", "ng", "rd", "lt"]


def main() -> None:
    """Prepares each size, and prints a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="megabytes of text")
    parser.add_argument("--folder", default="build/scale_text", help="where all of it lies")
    parser.add_argument("--keep", action="store_true", help="keep text and corpora at the end")
    parser.add_argument("--out", default="", help="folder of the result; default: results/")
    flags = parser.parse_args()
    sizes = [int(size) for size in flags.sizes.split(",")]
    folder = pathlib.Path(flags.folder)
    folder.mkdir(parents=True, exist_ok=True)
    needed = _DISK * (sum(sizes) + max(sizes)) * 1e6
    present = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())
    if shutil.disk_usage(folder).free < needed - present:
        sys.exit(f"{folder}: {(needed - present) / 1e9:.0f} GB of free disk are needed")
    rows = [prepared(folder, size, 1) for size in sizes]
    rows.append(prepared(folder, max(sizes), 2))
    alike = rows[-1]["files"] == rows[-2]["files"]
    for row in rows:
        print(
            f"{row['megabytes']:>6.0f} MB  {row['workers']} workers  {row['seconds']:8.1f} CPU s  "
            f"{row['megabytes'] / row['seconds']:5.2f} MB/CPU s  "
            f"{row['anonymous_megabytes']:6.0f} MB anonymous  {row['tokens']:>13,} tokens"
        )
    memory = [row["anonymous_megabytes"] for row in rows[:-1]]
    figures = {
        "least_mb_per_cpu_second": min(row["megabytes"] / row["seconds"] for row in rows),
        "most_anonymous_mb": max(memory),
        "most_over_least_memory": max(memory) / min(memory),
        "two_workers_same_bytes": alike,
    }
    measure.report("scale_text", figures, {"rows": rows}, flags.out)
    if not flags.keep:
        shutil.rmtree(folder)


def prepared(folder: pathlib.Path, megabytes: int, workers: int) -> dict[str, Any]:
    """Prepares text of some size in a process of its own; what was measured, if it was before."""
    result = folder / f"{megabytes}-{workers}.json"
    if result.exists():
        return json.loads(result.read_text())
    write_text(folder / f"text{megabytes}", megabytes)
    corpus = folder / f"corpus{megabytes}-{workers}"
    # Begun again, as it would measure only what was left.
    shutil.rmtree(corpus, ignore_errors=True)
    settings = [
        f'corpus.sources=["jsonl:{folder}/text{megabytes}"]',
        "corpus.validation_share=0.005",
        f"run.corpus_dir={corpus}",
    ]
    command = [sys.executable, "-m", "bert_jax.cli", "prepare", "experiments/bert_base.py"]
    command += [word for text in settings for word in ("--set", text)]
    command += ["--workers", str(workers), "--workdir", str(folder / "run")]
    process = subprocess.Popen(command, cwd=measure.ROOT, env=measure.environment(1, "shipped"))
    most = 0
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        most = max(most, anonymous_memory(process.pid))
        time.sleep(0.2)
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
    result.write_text(json.dumps(row))
    shutil.rmtree(corpus)
    return row


def anonymous_memory(pid: int) -> int:
    """Bytes of anonymous memory of a process and its children, now."""
    total = 0
    for number in [pid, *children(pid)]:
        try:
            lines = pathlib.Path(f"/proc/{number}/status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
    return total


def children(pid: int) -> list[int]:
    """Processes that a process has started."""
    try:
        tasks = list(pathlib.Path(f"/proc/{pid}/task").iterdir())
        return [int(n) for task in tasks for n in (task / "children").read_text().split()]
    except OSError:
        return []


def write_text(folder: pathlib.Path, megabytes: int) -> None:
    """Writes text in files of 64 MB, unless it is there."""
    folder.mkdir(exist_ok=True)
    written, number = 0, 0
    while written < megabytes * 1e6:
        path = folder / f"{number:04}.jsonl"
        if not path.exists():
            size = int(min(_FILE, megabytes - written / 1e6) * 1e6)
            temporary = path.with_suffix(".tmp")
            with temporary.open("w") as file:
                _write_file(file, number, size)
            temporary.rename(path)
        written += path.stat().st_size
        number += 1


def _write_file(file: Any, number: int, size: int) -> None:
    rng = np.random.default_rng(number)
    written = 0
    while written < size:
        # The rank of a word: Zipf's law for the commonest; of the others new ones never end, as in
        # an encyclopedia, where their number grows as the 0.65th power of the text.
        uniform = 1 - rng.random(200_000)
        common = np.exp(uniform * np.log(_COMMON))
        rare = _COMMON * uniform ** (-1 / 0.65)
        ranks = np.where(rng.random(len(uniform)) < _RARE, rare, common)
        words = [_word(rank) for rank in np.minimum(ranks, 2.0**40).astype(np.int64).tolist()]
        at = 0
        while at < len(words) and written < size:
            count = int(np.clip(rng.lognormal(5.6, 1.0), 20, 20_000))  # words of a document
            text = _document(words[at : at + count], rng)
            at += count
            line = json.dumps({"text": text}) + "\n"
            file.write(line)
            written += len(line)


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


_KNOWN: dict[int, str] = {}


def _word(rank: int) -> str:
    """The word of a rank: the commoner the shorter."""
    word = _KNOWN.get(rank)
    if word is None:
        rest, word = rank, ""
        while rest:
            rest, syllable = divmod(rest - 1, len(_SYLLABLES))
            word += _SYLLABLES[syllable]
        word += _ENDINGS[rank % len(_ENDINGS)]
        if len(_KNOWN) < 200_000:
            _KNOWN[rank] = word
    return word


if __name__ == "__main__":
    main()
