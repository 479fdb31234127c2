"""Losses of tasks against formulas in NumPy, and what of a base learns."""

import dataclasses
import functools
import types

import jax
import jax.numpy as jnp
import kinds
import numpy as np
import pytest
import samples
import scipy.special
from compare import assert_close, assert_identical
from kinds import LABELS, MODEL, base_params, kind_of, objective, without_dropout
from sklearn.metrics import log_loss
from sklearn.utils.class_weight import compute_class_weight

from bert_jax.checkpoints import base as base_lib
from bert_jax.config import LORA_TARGETS, Adapt, Finetuning, Parallelism
from bert_jax.model.encoder import Loop
from bert_jax.tasks import rows
from bert_jax.tasks import task_objective as objective_lib
from bert_jax.tasks.finetuning_job import FinetuningJob
from bert_jax.tasks.task_objective import TaskObjective
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import sharding

KINDS = list(LABELS)


def batch_of(kind, which=(0, 3, 1, 2), length=40):
    rows = kind_of(kind).rows(kinds.examples(kind))
    which = np.array(which)
    weights = np.ones(len(which), np.float32)
    return {"row_weights": weights, **rows.batch(which, length, kinds.TOKENIZER.pad_id)}


def nll(logits, label):
    logits = np.asarray(logits, np.float64)
    return np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[label]


def by_hand(kind, logits, batch):
    """The mean loss of a batch, example by example, and how many hit, in float64."""
    losses, hits = [], []

    def classified(scores, label):
        losses.append(nll(scores, label))
        hits.append(np.argmax(scores) == label)

    for i, weight in enumerate(batch["row_weights"]):
        if not weight:
            continue
        if kind == "regress":
            losses.append((float(logits[i, 0]) - float(batch["targets"][i])) ** 2)
        elif kind == "choice":
            if i % 2 == 0:
                classified(logits[i : i + 2, 0], batch["targets"][i])
        elif kind == "tag":
            for j in np.flatnonzero(batch["target_weights"][i]):
                classified(logits[i, j], batch["targets"][i, j])
        elif kind == "span":
            real = logits[i, : batch["input_mask"][i].sum()]
            both = [(real[:, k], batch[n][i]) for k, n in enumerate(("starts", "ends"))]
            losses.append(np.mean([nll(*one) for one in both]))
            hits.append(np.mean([np.argmax(scores) == label for scores, label in both]))
        else:
            classified(logits[i], batch["targets"][i])
    return np.mean(losses), np.mean(hits) if hits else None, len(losses)


@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_the_formulas(kind):
    """Rows of weight 0 and padding count nothing, whatever the scores are there."""
    task = objective(kind)
    batch = batch_of(kind)
    batch["row_weights"][2:] = 0
    outputs = (task.outputs,) if task.reads == "pooled" else (40, task.outputs)
    logits = np.random.default_rng(0).normal(size=(4, *outputs)).astype(np.float32) * 3
    if kind == "span":
        logits[batch["input_mask"] == 0] = 80  # higher than any other
    loss, accuracy, count = by_hand(kind, logits, batch)
    found = jax.jit(task.measure)(logits, batch)
    assert set(found) == set(task.metrics)
    np.testing.assert_allclose(found["loss"][0] / found["loss"][1], loss, rtol=1e-6)
    (counted,) = task.counts(batch)
    assert float(found["loss"][1]) == float(counted) == count
    np.testing.assert_allclose(task.loss(found, (counted,)), loss, rtol=1e-6)
    if kind != "regress":
        np.testing.assert_allclose(found["accuracy"][0] / count, accuracy, rtol=1e-6)


@functools.cache
def logits_of(task):
    fixed = None if task.adapt.how == "full" else base_params(task.reads)
    return jax.jit(lambda params, batch: task.logits(params, fixed, batch, None, Loop()))


def run_logits(task, params, batch):
    ids = {name: batch[name] for name in ("input_ids", "segment_ids", "input_mask")}
    return np.asarray(logits_of(task)(params, ids))


def model_logits(reads, params, batch):
    ids = {name: batch[name] for name in ("input_ids", "segment_ids", "input_mask")}
    task = TaskObjective(MODEL, "labels", reads, params["head"]["bias"].size, 1, Adapt())
    return np.asarray(jax.jit(lambda p: task.logits(p, None, ids, None, Loop()))(params))


OF_BERT = tuple(name for name in LORA_TARGETS if name != "gate")
EVERY_TARGET = Adapt(how="lora", lora_rank=3, lora_alpha=6.0, lora_targets=OF_BERT)


@pytest.mark.parametrize("how", [pytest.param("full", marks=pytest.mark.long), "lora"])
def test_a_modern_encoder_is_adapted_as_any_other(how):
    """Every kernel can be; before the first step nothing has changed; each has its rule."""
    model = dataclasses.replace(
        MODEL, kind="modern", num_hidden_layers=4, local_window=8, initializer_range=0.3
    )
    adapt = Adapt(how=how, lora_targets=LORA_TARGETS)
    task = dataclasses.replace(objective("pair"), model=model, adapt=adapt)
    whole = dataclasses.replace(task, adapt=Adapt())
    base = whole.init_params(jax.random.key(0))
    learning = task.init_params(jax.random.key(0))
    assert base.keys() == {"encoder", "masked_lm", "head"}
    fixed = None if how == "full" else {name: base[name] for name in ("encoder", "masked_lm")}
    batch = batch_of("pair")
    ids = {name: batch[name] for name in ("input_ids", "segment_ids", "input_mask")}
    found = jax.jit(lambda p: task.logits(p, fixed, ids, None, Loop()))(learning)
    expected = jax.jit(lambda p: whole.logits(p, None, ids, None, Loop()))(base)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert np.std(found, axis=0).max() > 1e-4
    mesh = samples.mesh_of(2)
    parallelism = Parallelism(state="zero3" if how == "full" else "replicated")
    sharding.partitions(jax.eval_shape(lambda: learning), parallelism, mesh, task.rules)


def test_thin_matrices_begin_as_nothing_and_add_their_product():
    task = objective("classify", EVERY_TARGET)
    learning = task.init_params(jax.random.key(1))
    assert set(learning) == {"head", "lora"} and set(learning["lora"]) == {*OF_BERT}
    base = base_params("pooled")
    whole = objective_lib.merged_params(task.adapt, learning, base)
    assert_identical({name: whole[name] for name in base}, base)
    for thin in learning["lora"].values():
        assert not thin["up"].any() and np.abs(thin["down"]).min() > 0
    # No two begin alike.
    downs = [np.asarray(thin["down"]).ravel()[:5].tolist() for thin in learning["lora"].values()]
    assert len({tuple(down) for down in downs}) == 6

    rng = np.random.default_rng(0)
    learning["lora"] = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), learning["lora"]
    )
    expected = jax.tree.map(np.array, base)
    for name, thin in learning["lora"].items():
        for layer in range(2):
            product = thin["down"][layer].astype(np.float64) @ thin["up"][layer]
            expected["encoder"]["layers"][name]["kernel"][layer] += (6.0 / 3) * product
    whole = objective_lib.merged_params(task.adapt, learning, base)
    assert_close({name: whole[name] for name in base}, expected, 1e-6)
    assert_identical(whole["head"], learning["head"])
    batch = batch_of("classify")
    found = run_logits(task, learning, batch)
    np.testing.assert_allclose(found, model_logits("pooled", whole, batch), atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "fresh", "expected"),
    [
        ("full", (), {"encoder", "pooler", "head"}),
        ("frozen", (), {"head"}),
        ("lora", ("pooler",), {"head", "lora", "pooler"}),
    ],
)
def test_what_learns_has_a_gradient_and_nothing_else_is_kept(how, fresh, expected):
    """A pooler that the base never had learns with the head: there is nothing in it to keep."""
    adapt, model = without_dropout(how=how)
    task = objective("classify", adapt, model, fresh)
    params = task.init_params(jax.random.key(2))
    assert set(params) == expected
    fixed = None if how == "full" else base_params("pooled")
    batch = batch_of("classify")

    def loss(params):
        return task.loss(task.forward(params, fixed, batch, None, Loop()), task.counts(batch))

    gradient = jax.jit(jax.grad(loss))(params)
    for name in expected - {"lora"}:
        assert any(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient[name])), name
    if how == "lora":
        for thin in gradient["lora"].values():  # as `up` is zero, `down` waits a step
            assert np.abs(thin["up"]).max() > 0 and not thin["down"].any()


def test_a_layer_learns_by_so_much_slower_than_the_one_above():
    """Of two layers at 0.5: head and decoder 1, upper layer 1/2, lower 1/4, embeddings 1/8."""
    params = objective("pair").init_params(jax.random.key(0))
    params["decoder"] = {"layers": params["encoder"]["layers"]}
    ones = jax.tree.map(jnp.ones_like, params)
    scale = optimizer_lib.scale_by_layer(0.5)
    found, _ = scale.update(ones, scale.init(params), params)
    seen = {path: np.asarray(leaf) for path, leaf in jax.tree.leaves_with_path(found)}
    for path, leaf in seen.items():
        name = "/".join(key.key for key in path)
        if name.startswith("encoder/layers/"):
            np.testing.assert_array_equal(leaf[0], 0.25, name)
            np.testing.assert_array_equal(leaf[1], 0.5, name)
        else:
            expected = 0.125 if name.startswith("encoder/embeddings/") else 1.0
            np.testing.assert_array_equal(leaf, expected, name)
    tops = {path[0].key for path in seen}
    assert tops == {"encoder", "decoder", "pooler", "head"}


def test_decay_by_layer_is_of_the_whole_update():
    """Weight decay and trust ratio among it: a lower layer's learning rate is lower."""
    params = base_params("pooled")
    gradient = jax.tree.map(lambda p: 0.3 * p + 0.01, params)
    cfg = dataclasses.replace(kinds.OPTIMIZER, name="lamb", weight_decay=0.1)
    plain, slower = (
        optimizer_lib.make_optimizer(dataclasses.replace(cfg, layer_decay=decay))
        for decay in (1.0, 0.5)
    )
    ours, theirs = (
        jax.jit(lambda p, tx=tx: tx.update(gradient, tx.init(p), p)[0])(params)
        for tx in (slower, plain)
    )
    expected, _ = optimizer_lib.scale_by_layer(0.5).update(theirs, None)
    assert_close(ours, expected, 1e-6)
    kernels = [tree["encoder"]["layers"]["query"]["kernel"] for tree in (ours, theirs)]
    np.testing.assert_allclose(kernels[0][0], kernels[1][0] / 4, rtol=1e-6)


@pytest.mark.parametrize("kind", ["classify", "tag"])
def test_balanced_weights_are_those_of_scikit_learn_in_the_loss_alone(kind):
    labelled = kinds.examples(kind, 12)
    if kind == "classify":  # twelve, of which `a` is ten, and `c` none
        names = ["b" if number in (3, 7) else "a" for number in range(12)]
        labelled = [kinds.sentence("wa", label=name) for name in names]
    of = kind_of(kind).rows(labelled)
    weights = rows.balanced_weights(of, 3)
    if kind == "classify":
        there = of.row_arrays["targets"]
    else:
        there = [x for t, w in zip(*of.token_arrays.values(), strict=True) for x in t[w > 0]]
    classes = np.unique(there)
    expected = compute_class_weight("balanced", classes=classes, y=there)
    np.testing.assert_allclose([weights[i] for i in classes], expected)
    assert [weights[i] for i in range(3) if i not in classes] == [1.0] * (3 - len(classes))

    ((which, batch),) = rows.eval_batches(of, 0, len(of.ids))
    plain = objective(kind)
    weighted = dataclasses.replace(plain, class_weights=weights)
    shape = batch["input_ids"].shape if kind == "tag" else (len(which),)
    logits = np.random.default_rng(0).normal(size=(*shape, 3)).astype(np.float32)
    found, before = (jax.jit(task.measure)(logits, batch) for task in (weighted, plain))
    np.testing.assert_array_equal(found["accuracy"], before["accuracy"])
    chances = scipy.special.softmax(logits.astype(np.float64), axis=-1)
    counted = batch["target_weights"] > 0 if kind == "tag" else np.ones(shape, bool)
    truth = batch["targets"][counted]
    sum_ = log_loss(
        truth, chances[counted], labels=[0, 1, 2], normalize=False,
        sample_weight=np.array(weights)[truth],
    )  # fmt: skip
    np.testing.assert_allclose(found["loss"], [sum_, counted.sum()], rtol=1e-5)


@pytest.mark.parametrize(
    ("kind", "labels", "order"),
    [
        ("classify", ("b", "a", "c"), [1, 0, 2]),
        ("pair", ("a", "b", "c"), [0, 1, 2]),
        ("classify", ("a", "b"), None),
        ("classify", ("a", "b", "d"), None),
        ("tag", ("a", "b", "c"), None),
    ],
)
def test_a_task_of_the_same_kind_and_labels_begins_with_the_head_of_its_base(kind, labels, order):
    held = base_lib.Head(
        ("classify", "pair"), ("a", "b", "c"), np.arange(6.0).reshape(2, 3), np.arange(3.0)
    )
    setup = FinetuningJob.__new__(FinetuningJob)
    setup._base = base_lib.Base(None, {}, None, head=held)
    setup.data = types.SimpleNamespace(kind=types.SimpleNamespace(labels=labels))
    setup.experiment = Finetuning(name="x", task=kinds.task(kind), adapt=Adapt(how="frozen"))
    fresh = {"kernel": jnp.full((2, 3), 9.0), "bias": jnp.full(3, 9.0)}
    state, _ = setup.initial_state({"params": {"head": fresh}, "step": 0})
    expected = (
        fresh if order is None else {"kernel": held.kernel[:, order], "bias": held.bias[order]}
    )
    for name, value in expected.items():
        np.testing.assert_array_equal(state["params"]["head"][name], value)
