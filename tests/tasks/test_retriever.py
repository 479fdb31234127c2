"""The kinds `sparse` and `multi_vector` against sentence-transformers (`make_retriever.py`)."""

import dataclasses
import functools
import pathlib
from types import SimpleNamespace

import hf_folder
import jax
import kinds
import numpy as np
import pytest
import samples
from jax.sharding import PartitionSpec

from bert_jax.checkpoints.base import Base
from bert_jax.config import (
    Adapt,
    Finetuning,
    MultiVectors,
    Optimizer,
    Parallelism,
    SparseVectors,
    Task,
)
from bert_jax.embeddings.embed import Embedder, VectorOptions
from bert_jax.embeddings.forms import FORMS
from bert_jax.interop import huggingface, weights
from bert_jax.tasks.examples import Candidates
from bert_jax.tasks.finetuning_job import FinetuningJob
from bert_jax.tasks.retrievers.sparse import SparseObjective
from bert_jax.training import gradients, sharding, step
from bert_jax.training import mesh as mesh_lib

GOLDEN = np.load(pathlib.Path(__file__).with_name("retriever.npz"))
VOCAB = [*hf_folder.VOCAB[:5], ".", "?", *(f"w{i}" for i in range(7, hf_folder.PIECES))]
LOSSES = ("contrastive", "margin_mse", "kl_divergence")
NAMES = {"sparse": SparseVectors, "multi_vector": MultiVectors}
CASES = [(kind, loss) for kind in NAMES for loss in LOSSES]
OWN = {
    "sparse": {"query_penalty": 0.02, "document_penalty": 0.01},
    "multi_vector": {"query_length": 8, "width": 12},
}


def finetuning(kind, loss="contrastive", **fields):
    """As in `make_retriever.py`: prompts, lengths, weights of penalties."""
    task = Task(
        kind=kind,
        train=("jsonl:x",),
        validation=("beir:x:test",),
        second_column="texts",
        max_sequence_length=24,
        query_prefix="w20 ",
        text_prefix="w21 w22 ",
    )
    temperature = 1.5 if loss == "kl_divergence" else 1.0
    how = NAMES[kind](loss=loss, temperature=temperature, **OWN[kind])
    return Finetuning(name="x", task=task, batch_size=4, **{kind: how}, **fields)


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Base:
    """The model of the golden file, without dropout, with the projection of vectors of tokens."""
    folder = tmp_path_factory.mktemp("golden") / "model"
    read = huggingface.read_folder(hf_folder.write(folder, vocab=VOCAB), lambda line: None)
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    read.model = dataclasses.replace(read.model, **rates)
    bias = read.params["masked_lm"]["output_bias"]
    bias[: hf_folder.PIECES] -= 0.5  # as in `make_retriever.py`
    read.params["projection"] = {"kernel": GOLDEN["projection"]}
    return read


def examples(kind, base, loss="contrastive"):
    """The kind and its rows of all examples of the golden file."""
    how = finetuning(kind, loss)
    implementation = how.task.spec.implementing_class
    made = implementation(how.task, (), base.tokenizer, implementation.vector_settings(how, base))
    lists = [
        Candidates("f:1", str(query), tuple(map(str, documents)), tuple(map(float, scores)))
        for query, documents, scores in zip(
            GOLDEN["queries"], GOLDEN["documents"], GOLDEN["teacher"], strict=True
        )
    ]
    return made, lists


def gradient_of(kind, loss, base, devices, accumulation=1):
    """The loss and the gradient of a step on a mesh, as training computes them."""
    made, lists = examples(kind, base, loss)
    rows = made.rows(lists)
    made.rows_per_example = rows.rows_per_example
    objective = made.make_objective(finetuning(kind, loss, adapt=Adapt(**no_dropout())), base)
    parallelism = Parallelism(accumulation=accumulation)
    mesh = samples.mesh_of(devices, parallelism)
    batch = rows.batch(np.arange(len(rows.ids)), 32, base.tokenizer.pad_id)
    batch |= {"row_weights": np.ones(len(rows.ids), np.float32)}
    batch |= {"rows": np.arange(len(rows.ids), dtype=np.uint32)}
    batch["penalty_share"] = np.ones(len(rows.ids), np.float32)
    params = {name: base.params[name] for name in objective.base_parts}
    shapes = jax.eval_shape(lambda: params)
    partition = sharding.partitions(shapes, parallelism, mesh, objective.rules)
    spec = step.StepSpec(objective, Optimizer(), parallelism, accumulation, mesh)

    def shard(params, batch):
        key = jax.random.key(0)
        return gradients.ShardGradient(spec, partition).gradients(params, None, 0, batch, key)

    specs = PartitionSpec(), mesh_lib.batch_spec(mesh)
    run = mesh_lib.map_shards(shard, mesh, specs, PartitionSpec())
    gradient, metrics = jax.jit(run)(params, batch)
    return jax.device_get(gradient), metrics["loss"][0] / metrics["loss"][1], params


def no_dropout():
    return dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)


@functools.cache
def tensors_of(kind):
    return [name.split("/", 1)[1] for name in GOLDEN if name.startswith(f"{kind}_contrastive/")]


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize(("kind", "loss"), CASES)
def test_losses_and_gradients_equal_those_of_sentence_transformers(kind, loss, devices, base):
    gradient, value, _ = gradient_of(kind, loss, base, devices)
    assert value == pytest.approx(float(GOLDEN[f"{kind}_{loss}"]), rel=1e-6)
    named = {"projection": gradient.pop("projection", {}).get("kernel")}
    heads = {name: base.params[name] for name in ("pooler", "masked_lm", "next_sentence")}
    named |= weights.export_tensors(heads | gradient, base.model, "BertForPreTraining")
    for name in tensors_of(kind):
        expected = GOLDEN[f"{kind}_{loss}/{name}"]
        error = np.linalg.norm(named[name][: len(expected)] - expected)
        # Twice the rounding that remains where the loss is compared alone.
        assert error < 2e-6 * max(np.linalg.norm(expected), 1), name


@pytest.mark.parametrize("devices", [1, 4])
@pytest.mark.parametrize("loss", LOSSES)
def test_losses_of_given_sparse_vectors_equal_those_of_sentence_transformers(loss, devices):
    vectors = GOLDEN["given"]
    count, texts, width = vectors.shape
    how = SparseVectors(loss=loss, temperature=1.5 if loss[0] == "k" else 1.0, **OWN["sparse"])
    shape = "numbers", "masked_lm", 0, texts, Adapt()
    objective = SparseObjective(kinds.MODEL, *shape, settings=how)
    batch = {
        "keys": np.arange(1, 1 + count * texts, dtype=np.uint32),
        "row_weights": np.ones(count * texts, np.float32),
        "penalty_share": np.ones(count * texts, np.float32),
        "scores": np.repeat(GOLDEN["teacher"], texts, axis=0),
    }

    mesh = samples.mesh_of(devices, Parallelism())
    rows, axes = mesh_lib.batch_spec(mesh), mesh_lib.batch_axes(mesh)

    def shard(vectors, batch):
        counts = jax.lax.psum(objective.counts(batch), axes)

        def value_of(vectors):
            return objective.loss(objective.compare(vectors, {}, None, batch, None, None), counts)

        value, gradient = jax.value_and_grad(value_of)(vectors)
        return jax.lax.psum(value, axes), gradient

    run = mesh_lib.map_shards(shard, mesh, (rows, rows), (PartitionSpec(), rows))
    value, gradient = jax.jit(run)(vectors.reshape(-1, width), batch)
    assert value == pytest.approx(float(GOLDEN[f"given_{loss}"]), rel=1e-6)
    expected = GOLDEN[f"given_{loss}/vectors"].reshape(-1, width)
    np.testing.assert_allclose(gradient, expected, atol=1e-6 * np.abs(expected).max())


@pytest.mark.long
@pytest.mark.parametrize("kind", NAMES)
def test_cached_gradients_are_those_of_the_whole_batch(kind, base):
    cached, value, _ = gradient_of(kind, "contrastive", base, 2, accumulation=2)
    whole, expected, _ = gradient_of(kind, "contrastive", base, 1)
    assert value == pytest.approx(float(expected), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(cached), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-6 * max(np.abs(theirs).max(), 1))


def sparse_vectors(base, made):
    """Sparse vectors of the golden file's texts, as `embed` computes them; two are left out."""
    model = dataclasses.replace(base, vectors=made.vectors)
    embedder = Embedder(model, VectorOptions(), samples.mesh_of(1, Parallelism()))
    documents = np.delete(GOLDEN["documents"].reshape(-1), [1, 2])
    texts = {"query": GOLDEN["queries"], "document": documents}
    parts = [part for role, some in texts.items() for part in embedder.embed(map(str, some), role)]
    return np.concatenate([part.vectors.toarray() for part in parts])


@pytest.mark.parametrize("shift", [-20, 20])
def test_training_starts_with_sparse_vectors(shift, base):
    """Each token is active in 4 of 14 texts, in none or in all before; padding is no text."""
    made, lists = examples("sparse", base)
    lists[0] = dataclasses.replace(lists[0], candidates=lists[0].candidates[:1], scores=(1.0,))
    rows = made.rows(lists)
    made.rows_per_example = rows.rows_per_example
    params = jax.tree.map(np.copy, base.params)
    params["masked_lm"]["output_bias"] += shift
    shifted = dataclasses.replace(base, params=params)
    assert np.all((sparse_vectors(shifted, made) > 0) == (shift > 0))

    def adjust(base, share):
        settings = SparseVectors(initial_share=share)
        experiment = dataclasses.replace(finetuning("sparse"), sparse=settings)
        return made.adjust_base(base, made.make_objective(experiment, base), rows)[0]

    adjusted = adjust(shifted, 0.25)
    active = (sparse_vectors(adjusted, made) > 0).sum(axis=0)
    assert active.max() == 4 and (active == 4).mean() > 0.99  # one has two equal logits
    assert adjust(adjusted, 0.3) is adjusted  # is sparse
    assert adjust(shifted, 0.0) is shifted


def test_a_run_starts_from_the_adjusted_base(base):
    """The job asks the kind to adjust the base, reports it, and takes the new biases."""
    experiment, lines = finetuning("sparse"), []
    made, lists = examples("sparse", base)
    objective = made.make_objective(experiment, base)
    rows = made.rows(lists)
    made.rows_per_example = rows.rows_per_example
    job = SimpleNamespace(
        experiment=experiment,
        data=SimpleNamespace(training=SimpleNamespace(kind=made, rows=rows)),
        objective=objective,
        report=lines.append,
        labels=(),
        _base=base,
    )
    fresh = jax.tree.map(jax.numpy.zeros_like, base.params)
    state, _ = FinetuningJob.initial_state(job, {"params": fresh})
    expected, line = made.adjust_base(base, objective, rows)
    bias = np.asarray(state["params"]["masked_lm"]["output_bias"])
    np.testing.assert_array_equal(bias, expected.params["masked_lm"]["output_bias"])
    assert not np.array_equal(bias, base.params["masked_lm"]["output_bias"])
    assert lines == [line] and "output biases shifted" in line


@pytest.mark.parametrize("kind", NAMES)
def test_scores_equal_those_of_sentence_transformers(kind, base):
    """As `embed` and `search` compute them."""
    implementation = finetuning(kind).task.spec.implementing_class
    vectors = implementation.vector_settings(finetuning(kind), base)
    model = dataclasses.replace(base, vectors=vectors)
    embedder = Embedder(model, VectorOptions(normalize=True), samples.mesh_of(1, Parallelism()))
    texts = {"query": GOLDEN["queries"], "document": GOLDEN["documents"].reshape(-1)}
    parts = {
        role: FORMS[kind].concatenate([p.vectors for p in embedder.embed(map(str, some), role)])
        for role, some in texts.items()
    }
    scores = FORMS[kind].score(parts["query"], parts["document"])
    expected = GOLDEN[f"{kind}_scores"]
    np.testing.assert_allclose(scores, expected, rtol=1e-5)
