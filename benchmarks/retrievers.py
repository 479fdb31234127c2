"""Training of sparse vectors, vectors of tokens and rerankers against sentence-transformers.

Both sides begin with the weights of a run, and learn the same pairs of sentences of the sample
text, without dropout: contrastive losses, and for `rank` binary cross-entropy with a negative. A
step makes a batch, and computes forward, backward, clip and AdamW. The peer tokenizes its texts in
each step; ours are tokenized before, as in training. Each side has a process of its own on one
core; they take turns. A ratio is the peer's CPU time over ours: above 1 we are faster.
"""

import json
import pathlib
import statistics
import tempfile
from collections.abc import Callable
from typing import Literal

import jax
import numpy as np
from etils import epath

from benchmarks import embed, measure
from bert_jax.config import Adapt, Finetuning, MultiVectors, Optimizer, Parallelism, Task
from bert_jax.interop import exporting
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks.adaptation import base_params, read_base
from bert_jax.tasks.examples import Tally
from bert_jax.tasks.task_kind import read_data
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib

# Fields of each task.
KINDS = {
    "sparse": {"second_column": "positive"},
    "multi_vector": {"second_column": "positive"},
    "rank": {"second_column": "docs", "label_column": "labels"},
}
_BATCH = 32  # queries of a step
_NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "head_dropout_prob")


def main() -> None:
    """Measures, kind after kind."""
    flags = measure.parser(
        __doc__,
        workdir=("runs/tiny", "a run with a masked LM head"),
        max_length=(48, "tokens of a text"),
        steps=(8, "steps of a turn"),
        rounds=5,
        layer_loop=("scan", "value of parallelism.layer_loop"),
        python=measure.TORCH,
    ).parse_args()
    measure.restart_with(threads=1)
    figures, details = {}, {}
    with tempfile.TemporaryDirectory() as name:
        model, file = pathlib.Path(name) / "model", pathlib.Path(name) / "train.jsonl"
        texts = embed.sample(3 * _BATCH * flags.steps)
        triples = [texts[i : i + 3] for i in range(0, len(texts), 3)]  # the third is a negative
        lines = [
            {"query": q, "positive": p, "docs": [p, n], "label": 0, "labels": [1, 0]}
            for q, p, n in triples
        ]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        trained = LoadedModel.of(open_workdir(flags.workdir))
        exporting.export(trained, epath.Path(model), "masked_lm", "float32")
        for kind, fields in KINDS.items():
            length = flags.max_length * (2 if kind == "rank" else 1)
            source = (f"jsonl:{file}",)
            texts = {"text_column": "query", "max_sequence_length": length, **fields}
            task = Task(kind=kind, train=source, validation=source, **texts)
            take = training(task, flags.workdir, flags.steps, flags.layer_loop)
            with measure.peer(flags.python, "train", threads=1) as peer:
                built = {"kind": kind, "folder": str(model), "triples": triples}
                versions = peer("build", **built, batch=_BATCH, max_length=length)
                turns = {"ours": take, "peer": lambda peer=peer: peer("take")}
                seconds = measure.in_turns(turns, flags.rounds + 1)
            seconds = {side: found[1:] for side, found in seconds.items()}  # the first compiles
            best, median = measure.times_faster(seconds["ours"], seconds["peer"])
            rate = 2 * _BATCH * flags.steps / statistics.median(seconds["ours"])
            figures |= {f"{kind}_ratio": best, f"{kind}_ratio_median": median}
            figures |= {f"{kind}_texts_per_cpu_second": rate}
            details[kind] = {"versions": versions, "seconds": seconds}
    measure.report("retrievers", figures, details, flags.out)


def training(
    task: Task, workdir: str, steps: int, layer_loop: Literal["scan", "unroll"]
) -> Callable[[], float]:
    """Returns a function that trains on the batches of the first steps; it returns CPU seconds."""
    optimizer = Optimizer(name="adamw", peak_learning_rate=1e-5, warmup_steps=0)
    adapt, fields = Adapt(**dict.fromkeys(_NO_DROPOUT, 0.0)), {"init_from": workdir}
    fields |= {"optimizer": optimizer, "adapt": adapt, "batch_size": _BATCH}
    if task.kind == "multi_vector":  # as the peer's default
        fields["multi_vector"] = MultiVectors(query_length=0, skipped_tokens="none")
    experiment = Finetuning(name=task.kind, task=task, **fields)
    base = read_base(experiment)
    data = read_data(experiment, base, {"train": Tally(), "validation": Tally()})
    objective, parallelism = data.objective, Parallelism(layer_loop=layer_loop)
    mesh = mesh_lib.make_mesh(parallelism)
    spec = step.StepSpec(objective, optimizer, parallelism, 1, mesh)
    run = step.make_train_step(spec, 1_000)
    state = step.make_init(objective, optimizer, parallelism, mesh)(0)
    state["params"] |= feed.put(base_params(base, objective), mesh_lib.replicated(mesh))
    window, key = step.empty_window(objective.metrics), step.phase_key(objective.model, 0, 0)
    rows = np.arange(_BATCH * data.training.kind.rows_per_example)

    def turn() -> None:
        nonlocal state, window
        for number in range(steps):
            batch = data.training.batch(len(rows), number, rows)
            placed = feed.place(batch, rows, len(rows), mesh_lib.batch_sharding(mesh))
            state, window = run(state, window, placed, key)
        jax.block_until_ready(state)

    return lambda: measure.clocked(turn)[0]


if __name__ == "__main__":
    main()
