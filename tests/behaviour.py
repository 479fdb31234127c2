"""What the package does, as hashes: a net for changes that are to change nothing.

    PYTHONPATH=.:tests python -m behaviour             compares with tests/golden/behaviour.json
    PYTHONPATH=.:tests python -m behaviour --write     writes that file again: read the difference
    PYTHONPATH=.:tests python -m behaviour --against COMMIT

The file holds what is the same on every machine: corpora, batches, exports of given weights, plans
of stored programs. What rounding touches depends on the machine: lowered steps, and the lines of
short runs, one of them resumed and one rolled back. Those `--against` makes twice here, of this
checkout and of another commit, by that commit's own form of this script.
"""

import argparse
import contextlib
import gzip
import hashlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import small_run

if __name__ == "__main__":
    os.environ.update(small_run.settings(devices=4))

import broken
import hf_folder
import jax
import numpy as np
from etils import epath

from bert_jax import config
from bert_jax.data import corpus
from bert_jax.pretraining import evaluators
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.tools.plan import bundles, hlo, schedule
from bert_jax.tools.plan import compile as compile_lib
from bert_jax.tools.verify import child
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib
from bert_jax.training import step as step_lib

ROOT = pathlib.Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "behaviour.json"

# Long enough for several epochs in both phases.
STEPS = ("phases.0.steps=60", "phases.1.steps=20")
CORPORA = {
    "sentences_by_line": (),
    "wrapped": ("corpus.layout=wrapped", "corpus.sources=text:files"),
    "jsonl": ("corpus.sources=jsonl:rows.jsonl",),
    "trained": ("corpus.tokenizer=train", "model.vocab_size=60"),
    "cut": ("corpus.layout=per_file", "corpus.cut_documents=4"),
    "mixture": ("corpus.sources=text:text,jsonl:rows.jsonl",),
}
BATCHES = {
    "mlm_nsp": (),
    "whole_word": ("data.masking=whole_word", *CORPORA["trained"]),
    "static": ("data.dupe_factor=3",),
    **small_run.OBJECTIVES,
    "per_document": ("data.objective=mlm", "data.attention=per_document"),
    "mixture": (
        *("data.objective=mlm", "corpus.sources=text:text,jsonl:rows.jsonl"),
        "corpus.mixture=0.3,0.7",
    ),
}
# Steps whose lowered form is compared, at full size.
LOWERED = (
    *("tiny", "tiny_paper", "mini", "bert_base", "bert_base_pod", "bert_large", "bert_large_pod"),
    *("modern_17m", "modern_base_pod", "modern_large_pod", "alibi", "electra"),
)


def sha(*parts: bytes | np.ndarray) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part if isinstance(part, bytes) else part.tobytes())
    return digest.hexdigest()[:16]


def of_arrays(tree: dict[str, np.ndarray]) -> str:
    return sha(
        *(f"{n} {v.dtype} {v.shape}".encode() + v.tobytes() for n, v in sorted(tree.items()))
    )


def prepared(name: str, settings: tuple[str, ...]) -> tuple[config.Experiment, PreparedCorpus]:
    """The small experiment with some settings, and its corpus."""
    words = [*STEPS, *settings, f"run.corpus_dir=corpus_{name}"]
    broken.said(["prepare", "small.py", *(f"--set={word}" for word in words)])
    experiment = config.override(config.load("small.py"), words)
    return experiment, PreparedCorpus.open(epath.Path(f"corpus_{name}"))


def corpora() -> Iterator[tuple[str, str]]:
    """Ids and sentences of both splits, and vocabularies."""
    for name, settings in CORPORA.items():
        folder = prepared(name, settings)[1].folder
        for split in ("train", "validation"):
            stream = corpus.open_stream(folder, split)
            parts = (stream.ids, stream.sentence_offsets, stream.document_offsets)
            yield f"corpus {name} {split}", sha(*map(np.ascontiguousarray, parts))
        vocabularies = sorted(pathlib.Path(folder, "tokenizer").glob("vocab*"))
        yield f"corpus {name} vocabulary", sha(*(path.read_bytes() for path in vocabularies))


def batches() -> Iterator[tuple[str, str]]:
    """Every batch of both phases: beginnings, ends of epochs; and the held-out rows."""
    mesh = mesh_lib.make_mesh(config.Parallelism(), jax.devices()[:1])
    for name, settings in BATCHES.items():
        experiment, given = prepared(f"of_{name}", settings)
        for number, phase in enumerate(experiment.phases):
            train = given.train_batches(experiment, number)
            rows = np.arange(phase.batch_size)
            each = (of_arrays(train.batch(step, rows)) for step in range(phase.steps))
            yield f"batches {name} phase {number}", sha(*map(str.encode, each))
        held_out = evaluators.HeldOutRows.of(given, experiment, mesh)
        yield f"batches {name} held out", sha(*(of_arrays(b).encode() for b in held_out.batches))


def exports() -> Iterator[tuple[str, str]]:
    """What `import` and `export` make of weights that are given."""
    hf_folder.write(pathlib.Path("given"))
    broken.said("import given --workdir base")
    for kind in ("pretraining", "masked_lm", "encoder"):
        broken.said(f"export --workdir base --as {kind} --out {kind}")
        for file in ("model.safetensors", "config.json", "vocab.txt", "tokenizer_config.json"):
            yield f"export {kind} {file}", sha(pathlib.Path(kind, file).read_bytes())


def plans() -> Iterator[tuple[str, str]]:
    """What is read off programs that a TPU's compiler made."""
    for path in sorted((ROOT / "tests" / "tools" / "plan" / "modules").glob("*.txt.gz")):
        text = gzip.decompress(path.read_bytes()).decode()
        is_module = text.startswith("HloModule")  # else the listing of one kernel
        read = (
            schedule.read_program(hlo.parse(text)) if is_module else bundles.scheduled_cycles(text)
        )
        yield f"plan {path.name}", sha(repr(read).encode())


def everywhere() -> dict[str, str]:
    """What is the same on every machine."""
    parts = (corpora, batches, exports, plans)
    return {name: value for part in parts for name, value in part()}


def here() -> dict[str, str]:
    """What depends on the machine: lowered steps, lines of short runs."""
    made: dict[str, str] = {}
    for name in LOWERED:
        experiment = config.load(str(ROOT / "experiments" / f"{name}.py"))
        mesh = mesh_lib.make_mesh(experiment.parallelism)
        objective = objective_lib.pretraining_objective(experiment.model, experiment.data)
        layout = (experiment.optimizer, experiment.parallelism, mesh)
        state = step_lib.abstract_state(objective, *layout)
        for number in range(len(experiment.phases)):
            text = compile_lib.lower_step(experiment, number, mesh, state).as_text()
            made[f"lowered {name} phase {number}"] = sha(text.encode())
    runs = {"mlm_nsp": (), **small_run.OBJECTIVES}
    for name, settings in runs.items():
        words = ["pretrain", "small.py", "--workdir", f"run_{name}"]
        broken.said([*words, *(f"--set={s}" for s in (*settings, f"run.corpus_dir=of_{name}"))])
    resumed = ("pretrain", "small.py", "--workdir", "run_resumed")
    small_run.killed(9, signal.SIGKILL, *resumed, devices=4)
    broken.said([*resumed])
    bad = child.Plan(nonfinite_steps=(9, 10, 11)).to_json()
    words = ("pretrain", "small.py", "--workdir", "run_rolled_back")
    done = small_run.command(
        "-m", "bert_jax.tools.verify.child", bad, *words, "--set", "optimizer.bad_steps_in_a_row=3"
    )
    assert done.returncode == 0, done.stderr
    for path in sorted(pathlib.Path(".").glob("run_*/metrics.jsonl")):
        made[f"lines of {path.parent}"] = sha(path.read_bytes())
    return made


def against(commit: str) -> dict[str, str]:
    """What `here` says in another commit's checkout."""
    with tempfile.TemporaryDirectory() as folder:
        add = ["git", "worktree", "add", "--quiet", "--detach", folder, commit]
        subprocess.run(add, cwd=ROOT, check=True)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "behaviour", "--here"],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": f"{folder}:{folder}/tests"},
                stdout=subprocess.PIPE,
                check=True,
            )
        finally:
            remove = ["git", "worktree", "remove", "--force", folder]
            subprocess.run(remove, cwd=ROOT, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def differences(old: dict[str, str], new: dict[str, str]) -> list[str]:
    """Names every value that is not the same on both sides."""
    names = sorted(old.keys() | new.keys())
    return [
        f"{name}: {old.get(name)} -> {new.get(name)}"
        for name in names
        if old.get(name) != new.get(name)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the file again")
    parser.add_argument("--here", action="store_true", help="print what depends on the machine")
    parser.add_argument("--against", metavar="COMMIT", help="compare that with another commit's")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        small_run.write_text(pathlib.Path("."))
        texts = pathlib.Path("text/all.txt").read_text().split("\n\n")
        rows = [json.dumps({"text": text[::-1].replace(" .", ".")}) for text in texts[:20]]
        pathlib.Path("files").mkdir()
        for number, text in enumerate(texts):
            pathlib.Path("files", f"{number:02}.txt").write_text(text + "\n")
        pathlib.Path("rows.jsonl").write_text("\n".join(rows) + "\n")
        new = here() if args.here or args.against else everywhere()
    if args.here:
        print(json.dumps(new))
        return 0
    if args.write:
        GOLDEN.write_text(json.dumps(new, indent=0) + "\n")
        return 0
    old = against(args.against) if args.against else json.loads(GOLDEN.read_text())
    found = differences(old, new)
    print("\n".join([*found, f"{len(new)} values, {len(found)} differences"]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
