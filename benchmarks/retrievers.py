"""CPU time of training and inference of text vectors and rerankers, and sentence-transformers'.

For each kind both sides begin with the same weights and learn the same batches of sentences of the
sample text, without dropout: contrastive losses, and for `rank` binary cross-entropy with a
negative. A step makes a batch, and computes forward, backward, clip and AdamW. The peer tokenizes
its texts in each step; ours are tokenized before, as in training. Then both compute the vectors of
these sentences, or for `rank` the scores of the pairs, from texts. Both sides have a process of
their own, and take turns on the same core. A ratio is the peer's CPU time over ours: above 1 we are
faster. `*_loss_difference` is relative, between the mean losses of the first turn; `*_difference`
is the largest absolute one between vectors or scores.
"""

import dataclasses
import json
import pathlib
import statistics
import tempfile
from collections.abc import Callable
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from benchmarks import embed, measure
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Head, TextVectors
from bert_jax.config import Adapt, Finetuning, MultiVectors, Optimizer, Parallelism, Task
from bert_jax.embeddings.embed import Embedder, VectorOptions
from bert_jax.embeddings.forms import FORMS
from bert_jax.interop import exporting
from bert_jax.pretraining.loaded_model import LoadedModel
from bert_jax.storage.mirror import open_workdir
from bert_jax.tasks.adaptation import base_head, base_params, read_base
from bert_jax.tasks.examples import Candidates, Tally
from bert_jax.tasks.finetuned_model import FinetunedModel
from bert_jax.tasks.task_kind import read_data
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib

# Fields of each task.
KINDS = {
    "similar": {"second_column": "positive"},
    "sparse": {"second_column": "positive"},
    "multi_vector": {"second_column": "positive"},
    "rank": {"second_column": "docs", "label_column": "labels"},
}
_BATCH = 32  # queries of a step
_NO_DROPOUT = ("hidden_dropout_prob", "attention_probs_dropout_prob", "head_dropout_prob")
Triples = list[list[str]]  # a query, a text that belongs to it, and a negative


def main() -> None:
    """Measures, kind after kind."""
    flags = measure.parser(
        __doc__,
        workdir=("runs/tiny", "a run with a masked LM head"),
        kinds=(",".join(KINDS), "values of task.kind"),
        max_length=(48, "tokens of a text"),
        steps=(4, "steps of a turn"),
        rounds=9,
        layer_loop=("auto", "value of parallelism.layer_loop in training"),
        python=measure.TORCH,
    ).parse_args()
    measure.restart_with(threads=1)
    figures, details = {}, {}
    count = 3 * _BATCH * flags.steps
    # Each text once: equal texts are no negatives of each other here, but are for the peer.
    texts = list(dict.fromkeys(embed.sample(2 * count)))[:count]
    triples = [texts[i : i + 3] for i in range(0, count, 3)]
    for kind in flags.kinds.split(","):
        length = flags.max_length * (2 if kind == "rank" else 1)
        with tempfile.TemporaryDirectory() as folder:
            found = compare(kind, triples, length, flags, pathlib.Path(folder))
        figures |= {f"{kind}_{name}": value for name, value in found[0].items()}
        details[kind] = found[1]
    measure.report("retrievers", figures, details, flags.out)


def compare(
    kind: str, triples: Triples, length: int, flags: Any, folder: pathlib.Path
) -> tuple[dict[str, float], dict[str, Any]]:
    """Returns figures and details of one kind."""
    base = base_of(LoadedModel.of(open_workdir(flags.workdir)), kind, length)
    base_lib.write(base, epath.Path(folder / "base"))
    model: LoadedModel = LoadedModel.of(open_workdir(folder / "base"))
    model = FinetunedModel.load(model) if kind == "rank" else model
    form = {"sparse": "masked_lm", "rank": "task"}.get(kind, "encoder")
    exporting.export(model, epath.Path(folder / "model"), form, "float32")
    file, out = folder / "train.jsonl", folder / "peer.npy"
    lines = [
        {"query": q, "positive": p, "docs": [p, n], "label": 0, "labels": [1, 0]}
        for q, p, n in triples
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = (f"jsonl:{file}",)
    fields = {"text_column": "query", "max_sequence_length": length, **KINDS[kind]}
    task = Task(kind=kind, train=source, validation=source, **fields)
    take, losses, order = training(task, str(folder / "base"), flags.steps, flags.layer_loop)
    run, vectors = prepare_use(model, kind, triples)
    with measure.peer(flags.python, "train", threads=1) as peer:
        built = {"kind": kind, "folder": str(folder / "model"), "batch": _BATCH}
        steps = [triples[i] for i in order]
        versions = peer("build", **built, triples=steps, max_length=length)
        used = measure.in_turns(
            {"ours": run, "peer": lambda: peer("use", triples=triples, out=str(out))},
            flags.rounds + 1,
        )
        trained = measure.in_turns({"ours": take, "peer": lambda: peer("take")}, flags.rounds + 1)
        peer_loss = peer("first_loss")
    seconds = {"training": trained, "use": used}
    count, figures = 2 * len(triples), dict[str, float]()
    for name, turns in seconds.items():
        ours, theirs = (turns[side][1:] for side in ("ours", "peer"))  # the first compiles
        _, figures[f"{name}_ratio"] = measure.times_faster(ours, theirs)
        figures[f"{name}_texts_per_cpu_second"] = count / statistics.median(ours)
    figures["loss_difference"] = abs(losses[0] / peer_loss - 1)
    figures["difference"] = float(np.abs(vectors[-1] - np.load(out)).max())
    return figures, {"versions": versions, "seconds": seconds}


def base_of(trained: LoadedModel, kind: str, length: int) -> LoadedModel:
    """Returns the base from which a kind begins: the run's weights, and random new layers."""
    rng, width = np.random.default_rng(0), trained.model.hidden_size
    form = kind if kind in FORMS else "dense"
    vectors = TextVectors(max_length=length, form=form, normalize=kind == "similar")
    params, head = jax.device_get(trained.params), None
    if kind == "multi_vector":
        kernel = rng.normal(0, width**-0.5, (width, MultiVectors().width))
        params = params | {"projection": {"kernel": kernel.astype(np.float32)}}
    if kind == "rank":
        kernel = rng.normal(0, width**-0.5, (width, 1)).astype(np.float32)
        settings = ("task.ranking_loss=binary_cross_entropy",)
        head = Head(("rank",), (), kernel, np.zeros(1, np.float32), settings=settings)
    return dataclasses.replace(trained, params=params, vectors=vectors, head=head, source="a run")


def prepare_use(
    model: LoadedModel, kind: str, triples: Triples
) -> tuple[Callable[[], float], list[np.ndarray]]:
    """Returns a function that adds vectors or scores to a list and returns CPU seconds; the list.

    The texts are the queries and their positives; a pair is a query with one of its two texts.
    """
    results: list[np.ndarray] = []
    if isinstance(model, FinetunedModel):
        examples = [Candidates("", q, (p, n), None) for q, p, n in triples]

        def compute() -> None:
            answers = model.task_model.predict(examples)
            ranked = [sorted(x["ranking"], key=lambda text: text["index"]) for x in answers]
            results.append(np.array([[text["score"] for text in texts] for texts in ranked]))
    else:
        embedder = Embedder(model, VectorOptions(), mesh_lib.make_mesh(Parallelism()))
        texts = [text for triple in triples for text in triple[:2]]

        def compute() -> None:
            parts = [part.vectors for part in embedder.embed(texts)]
            vectors = embedder.form.concatenate(parts)
            vectors = vectors.toarray() if kind == "sparse" else vectors
            results.append(vectors.vectors if kind == "multi_vector" else vectors)

    return lambda: measure.clocked(compute)[0], results


def training(
    task: Task, base_folder: str, steps: int, layer_loop: Literal["auto", "scan", "unroll"]
) -> tuple[Callable[[], float], list[float], np.ndarray]:
    """Prepares the training on the batches of the first steps.

    Returns:
      A function that trains and returns CPU seconds; a list to which it adds the mean loss; and the
      indices of the examples in the order of training.
    """
    optimizer = Optimizer(name="adamw", peak_learning_rate=1e-5, warmup_steps=0)
    adapt, fields = Adapt(**dict.fromkeys(_NO_DROPOUT, 0.0)), {"init_from": base_folder}
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
    params = base_params(base, objective)
    if (head := base_head(base, experiment, ())) is not None:
        params["head"] = head
    state["params"] |= feed.put(params, mesh_lib.replicated(mesh))
    key = step.phase_key(objective.model, 0, 0)
    per_example = data.training.rows.rows_per_example
    rows = np.arange(_BATCH * per_example)
    block = len(rows) if data.training.kind.packs_rows(on_cpu=True) else 0
    losses: list[float] = []

    def turn() -> None:
        nonlocal state
        window = step.empty_window(objective.metrics)
        for number in range(steps):
            batch = data.training.batch(block, number, rows)
            placed = feed.place(batch, rows, len(rows), mesh_lib.batch_sharding(mesh))
            state, window = run(state, window, placed, key)
        sums, _ = jax.device_get((window, state))
        # The penalty of `sparse` is left out: its weight rises from 0, and the peer's is constant.
        penalty = sums["penalty"][0] if "penalty" in sums else 0.0
        losses.append(float((sums["loss"][0] - penalty) / sums["loss"][1]))

    batches = data.training.batches
    order = np.concatenate([batches.step_rows(i)[::per_example] for i in range(steps)])
    return lambda: measure.clocked(turn)[0], losses, order // per_example


if __name__ == "__main__":
    main()
