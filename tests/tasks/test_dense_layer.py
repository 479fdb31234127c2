"""`similar` from a base whose vectors pass a linear layer after the pooling."""

import dataclasses
import json
import pathlib

import broken
import jax
import numpy as np
import pytest
import sentences
from etils import epath
from test_similar import here, write_task  # noqa: F401

import bert_jax
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import Base
from bert_jax.config import Adapt, Finetuning, Optimizer, Task
from bert_jax.embeddings.embed import Embedder, VectorOptions
from bert_jax.model.encoder import Loop
from bert_jax.tasks import rows as rows_lib
from bert_jax.tasks import similar
from bert_jax.tasks.adaptation import base_params
from bert_jax.tasks.examples import Sentence
from bert_jax.tasks.similar import Similar
from bert_jax.training import mesh as mesh_lib


def dense_base() -> Base:
    """A base whose vectors pass a layer after the pooling: 16 -> 6 numbers."""
    base = sentences.base_of("mean", False, 6, "identity")
    return dataclasses.replace(base, vectors=dataclasses.replace(base.vectors, max_length=0))


def test_a_layer_after_the_pooling_is_trained_as_it_is_used():
    base, source = dense_base(), ("jsonl:x",)
    task = Task(
        kind="similar", train=source, validation=source, max_sequence_length=20, second_column="b"
    )
    experiment = Finetuning(name="dense", task=task, optimizer=Optimizer(warmup_steps=0))
    kind = Similar(similar.inherit_prefixes(task, base.vectors), (), base.tokenizer)
    texts = ["wa wb", "xa ?", "wa wd xb"]
    rows = kind.rows([Sentence("", (text,), None) for text in texts])
    order, batch = rows_lib.eval_batches(rows, base.tokenizer.pad_id, 3)[0]
    embedder = Embedder(base, VectorOptions(normalize=True), mesh_lib.one_device())
    (wanted,) = embedder.embed(texts)
    for how in ("full", "lora"):
        adapt = Adapt(how=how)
        objective = kind.make_objective(dataclasses.replace(experiment, adapt=adapt), base)
        params, fixed = objective.init_params(jax.random.key(0)), None
        assert ("dense" in params) == (how == "full")
        if how == "full":
            params = params | base_params(base, objective)
        else:
            fixed = base_params(base, objective)
        vectors = objective.vectors(params, fixed, batch, None, Loop())
        np.testing.assert_allclose(vectors, wanted.vectors[order], atol=1e-6)
        assert objective.text_vectors.dense_width == 6


@pytest.mark.long
@pytest.mark.parametrize("how", ["full", "lora"])
def test_a_run_from_a_base_with_a_layer_keeps_it(how, here):  # noqa: F811
    base_lib.write(dense_base(), epath.Path("dense"))
    write_task("dimensions=(4, 6)")
    settings = f"--set adapt.how={how}"
    broken.said(f"finetune task.py --from dense --workdir run {settings}")
    broken.said("export --workdir run --out out")
    broken.said("import out --workdir again")
    run, again = (bert_jax.load(name) for name in ("run", "again"))
    vectors = run.embed(["wa wb", "xa xb"])
    assert vectors.shape == (2, 6)
    np.testing.assert_allclose(again.embed(["wa wb", "xa xb"]), vectors, atol=1e-6)
    kernel = np.asarray(run.params["dense"]["kernel"])
    is_kept = np.array_equal(kernel, dense_base().params["dense"]["kernel"])
    assert is_kept == (how == "lora")  # which trains only what is beside kernels
    np.testing.assert_array_equal(again.params["dense"]["kernel"], kernel)
    said = [broken.said(f"evaluate --workdir {x} --task task.py") for x in ("run", "again")]
    scores = [json.loads(x.splitlines()[-1])["scores"]["small"] for x in said]
    assert scores[0] == pytest.approx(scores[1])
    # A run for another task has the base's layer, too.
    write_task()
    text = pathlib.Path("task.py").read_text().replace('"similar"', '"regress"')
    pathlib.Path("task.py").write_text(text)
    broken.said("finetune task.py --from dense --workdir other")
    assert bert_jax.load("other").embed("wa").shape == (1, 6)


@pytest.mark.parametrize(
    ("vectors", "named"),
    [
        ("dimensions=(8,)", "vectors.dimensions"),
        ('loss="distil", teacher="wide.npz"', "vectors.teacher"),
        ('loss="distil", teacher="wide.npz", projection="linear"', "vectors.projection"),
    ],
)
def test_what_a_layer_after_the_pooling_cannot_learn_is_named(here, vectors, named):  # noqa: F811
    np.savez("wide.npz", vectors=np.ones((32, 16), np.float32))
    base_lib.write(dense_base(), epath.Path("dense"))
    write_task(vectors)
    broken.fails("finetune task.py --from dense --workdir run", named)
    assert not pathlib.Path("run").exists()
