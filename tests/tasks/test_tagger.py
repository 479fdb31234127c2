"""BiLSTM layers over what a frozen encoder's layers hold, against NumPy, and from end to end."""

import dataclasses

import broken
import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import samples
import tuned
from etils import epath
from lstm import lstm

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import Adapt, Parallelism
from bert_jax.model import heads
from bert_jax.model.encoder import Loop, fill_params
from bert_jax.tasks import task_objective
from bert_jax.tasks import task_objective as objective_lib
from bert_jax.text.tokenizer import WordPiece
from bert_jax.training import sharding

DEEP = dataclasses.replace(kinds.MODEL, num_hidden_layers=4, hidden_size=8)
LENGTHS = (7, 4)


def drawn(features):
    """A tagger whose parameters are not as freshly made, as a dict."""
    adapt = Adapt(how="frozen", features=features)
    task = dataclasses.replace(kinds.objective("tag"), model=DEEP, adapt=adapt)
    params = task.init_params(jax.random.key(0))
    rng = np.random.default_rng(1)
    return task, jax.tree.map(lambda p: p + 0.3 * rng.normal(size=p.shape).astype("f4"), params)


def module_of(task, params):
    """The module that holds them, by the way that the objective takes."""
    args = DEEP, "tokens", task.outputs, task.adapt.features
    return fill_params(params, objective_lib.EncoderWithHead, *args).tagger


@pytest.mark.parametrize(
    "features",
    [
        *("mixed", "concat_last_four", "sum_last_four"),
        *(pytest.param(name, marks=pytest.mark.long) for name in ("embeddings", "last")),
        "second_to_last",
    ],
)
def test_what_is_read_and_two_layers_are_those_of_numpy_in_float64(features):
    task, params = drawn(features)
    rng = np.random.default_rng(2)
    every = rng.normal(size=(5, 2, 7, 8))
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["tagger"])
    if features == "mixed":
        powers = np.exp(wide["mixture"]["weights"])
        shares = powers / powers.sum()
        inputs = wide["mixture"]["scale"] * sum(s * x for s, x in zip(shares, every, strict=True))
    else:
        inputs = {
            "embeddings": every[0],
            "last": every[4],
            "second_to_last": every[3],
            "sum_last_four": every[1] + every[2] + every[3] + every[4],
            "concat_last_four": np.concatenate([every[i] for i in (1, 2, 3, 4)], axis=-1),
        }[features]
    mask = np.arange(7) < np.array(LENGTHS)[:, None]
    module = module_of(task, params)
    found = task_objective.run_tagger(
        module, features, jnp.asarray(every, jnp.float32), mask, None, 0.1
    )
    for row, length in enumerate(LENGTHS):
        x = inputs[row, :length]
        for layer in ("lower", "upper"):
            gates = wide[layer]["gates"]
            left = lstm(x, gates["kernel"][0], gates["bias"][0])
            right = lstm(x[::-1], gates["kernel"][1], gates["bias"][1])[::-1]
            x = np.concatenate([left, right], axis=1)
        np.testing.assert_allclose(found[row, :length], x, atol=1e-5)


def test_a_tagger_learns_with_its_head_and_a_frozen_encoder_does_not():
    task, params = drawn("mixed")
    assert set(params) == {"head", "tagger"}
    whole = jax.eval_shape(lambda: params)
    sharding.partitions(whole, Parallelism(), samples.mesh_of(1), task.rules)
    base = dataclasses.replace(task, adapt=Adapt()).init_params(jax.random.key(3))
    rows = kinds.kind_of("tag").rows(kinds.examples("tag"))
    batch = {"row_weights": np.ones(4, np.float32), **rows.batch(np.arange(4), 40, 0)}

    def loss(params):
        found = task.forward(params, {"encoder": base["encoder"]}, batch, None, Loop())
        return task.loss(found, task.counts(batch))

    gradient = jax.jit(jax.grad(loss))(params)
    for name in ("head", "tagger"):
        for leaf in jax.tree.leaves(gradient[name]):
            assert np.abs(leaf).max() > 0


TWO = dataclasses.replace(tuned.MODEL, num_hidden_layers=2)


@pytest.fixture
def base(tmp_path, monkeypatch):
    """The current folder, with a base of random weights."""
    monkeypatch.chdir(tmp_path)
    params = jax.device_get(heads.init_params(TWO, jax.random.key(0)))
    base_lib.write(
        base_lib.Base(TWO, params, WordPiece(tuned.PIECES, "uncased"), "a test"),
        epath.Path("base"),
    )


@pytest.mark.long
def test_a_tagger_learns_and_answers(base):
    """As ELMo is used: frozen, its layers mixed, below a BiLSTM."""
    tuned.write_task(epath.Path("."), "tag", how="frozen", epochs=6)
    tuned.finetune("--set", "adapt.features=mixed")
    scores = [line for line in tuned.lines("run/metrics.jsonl") if line["kind"] == "scores"]
    assert scores[-1]["accuracy"] > 0.9
    assert scores[-1]["loss"] < scores[0]["loss"]
    assert tuned.predict("wa xb") == [{"words": ["wa", "xb"], "tags": ["0", "1"]}]
    broken.fails("predict --workdir run wa --from nowhere", "nowhere")


def test_layers_that_are_not_there_are_refused(base):
    tuned.write_task(epath.Path("."), "tag", how="frozen")
    setting = "adapt.features=sum_last_four"
    words = f"{setting}: base has 2 layers, but 4 are needed"
    broken.fails(f"{tuned.FINETUNE} --set {setting}", words)
    assert not epath.Path("run").exists()
