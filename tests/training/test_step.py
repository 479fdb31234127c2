"""A training step gives the same result in every layout."""

import dataclasses
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from compare import assert_close, assert_identical

from bert_jax.config import Optimizer, Parallelism
from bert_jax.data import batches
from bert_jax.model import heads, losses
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import step
from bert_jax.training.collectives import METHODS, Method
from bert_jax.training.objective import Pretraining

STEPS = 10


@pytest.fixture(scope="module")
def reference():
    return samples.run(STEPS)


def assert_same_run(run, reference, tolerance=1e-5):
    """Compares losses of every step, (sum, count) pairs, and the final parameters; with dropout."""
    (state, seen), (ref_state, ref_seen) = run, reference
    for ours, theirs in zip(seen, ref_seen, strict=True):
        losses = [name for name in theirs if name.endswith("_loss")]
        assert len(losses) == 2
        for name in (*losses, "gradient_norm"):
            assert ours[name][1] == theirs[name][1]
            np.testing.assert_allclose(ours[name][0], theirs[name][0], rtol=tolerance)
    assert_close(state["params"], ref_state["params"], tolerance)


@pytest.mark.parametrize(
    ("devices", "parallelism"),
    [
        (4, Parallelism(state="zero3", tensor=2)),
        *(
            pytest.param(devices, parallelism, marks=pytest.mark.long)
            for devices, parallelism in (
                (4, Parallelism()),
                (4, Parallelism(state="zero1", accumulation=2)),
                (2, Parallelism(accumulation=4)),
                (1, Parallelism(remat="full")),
                (1, Parallelism(layer_loop="scan")),
                (4, Parallelism(state="zero3")),
                (4, Parallelism(state="zero1", tensor=2)),
                (4, Parallelism(state="zero3", accumulation=2, remat="dots")),
                (4, Parallelism(state="zero3", layer_loop="unroll", remat="full")),
            )
        ),
    ],
    ids=lambda m: (
        f"{m.state}-tensor{m.tensor}-{m.accumulation[0]}-{m.remat}-{m.layer_loop}"
        if isinstance(m, Parallelism)
        else m
    ),
)
def test_a_layout_does_not_change_the_run(devices, parallelism, reference):
    """Against one device that holds everything; with dropout."""
    assert_same_run(samples.run(STEPS, devices=devices, parallelism=parallelism), reference)


@pytest.mark.long
def test_prefetched_parameters_get_the_same_gradients(reference, monkeypatch):
    """Gathers attention matrices at once for all layers, feed-forward ones layer by layer."""
    monkeypatch.setitem(METHODS, "cpu", Method(prefetch_bytes=32 * 32 * 4))
    step.make_train_step.cache_clear()
    layout = Parallelism(state="zero3", remat="dots")
    assert_same_run(samples.run(STEPS, devices=2, parallelism=layout), reference)
    step.make_train_step.cache_clear()


@pytest.fixture(scope="module")
def per_replica():
    optimizer = dataclasses.replace(
        samples.OPTIMIZER, clip="per_replica", reference_replicas=4, clip_norm=0.5
    )
    return optimizer, samples.run(STEPS, optimizer=optimizer)


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "parallelism"),
    [
        (4, Parallelism()),
        pytest.param(4, Parallelism(state="zero1", slices=2), marks=pytest.mark.long),
    ],
)
def test_per_replica_clip_is_the_same_on_any_devices(devices, parallelism, per_replica):
    optimizer, reference = per_replica
    ours = samples.run(STEPS, devices=devices, optimizer=optimizer, parallelism=parallelism)
    assert_same_run(ours, reference)


@pytest.mark.long
def test_per_replica_clip_sums_the_clipped_gradients_of_the_groups(per_replica):
    """Against each group alone, with its own denominators, clipped in NumPy."""
    optimizer, (_, seen) = per_replica
    model = samples.MODEL
    params = heads.init_params(model, jax.random.key(0, impl="threefry2x32"))
    whole = samples.train_batches().batch(0, np.arange(8))
    key = step.phase_key(model, 0, 0)
    total, group_gradient = None, jax.jit(jax.grad(_reference_loss), static_argnums=1)
    for group in range(4):
        part = {k: jnp.asarray(v[2 * group : 2 * group + 2]) for k, v in whole.items()}
        gradient = jax.device_get(group_gradient(params, model, part, key))
        norm = np.sqrt(
            sum(float((g.astype(np.float64) ** 2).sum()) for g in jax.tree.leaves(gradient))
        )
        assert norm > optimizer.clip_norm
        clipped = jax.tree.map(lambda g, n=norm: g * (optimizer.clip_norm / n), gradient)
        total = clipped if total is None else jax.tree.map(np.add, total, clipped)
    norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in jax.tree.leaves(total)))
    np.testing.assert_allclose(seen[0]["gradient_norm"][0], norm, rtol=1e-5)


def _reference_loss(params, model, part, key):
    from bert_jax.model import layers
    from bert_jax.model.encoder import Loop

    noise = layers.RowNoise.of(key, part["rows"])
    sums = losses.pretraining(*heads.pretraining_logits(model, params, part, noise, Loop()), part)
    (mlm, weights), (nsp, rows) = sums["masked_lm_loss"], sums["next_sentence_loss"]
    return mlm / (weights + 1e-5) + nsp / rows


def test_rows_of_weight_zero_change_nothing():
    """Evaluation fills its last batch up with such rows."""
    model, mesh = samples.MODEL, samples.mesh_of(1)
    evaluate = step.make_eval_step(Pretraining(model), Parallelism(), mesh)
    params = heads.init_params(model, jax.random.key(0))
    batch = samples.train_batches().batch(0, np.arange(8))
    zero = {name: jnp.zeros(2) for name in losses.names("mlm_nsp")}
    alone = evaluate(params, zero, {k: v[:5] for k, v in batch.items()})
    batch["row_weights"][5:] = 0
    batch["masked_lm_weights"][5:] = 0
    assert_close(evaluate(params, zero, batch), alone, 1e-6)


def test_a_step_that_is_not_finite_changes_no_parameter():
    before = {}

    def begin(state):
        state["step"] = jnp.int32(5)
        before.update(jax.device_get(state))

    def spoil(batch):
        batch["masked_lm_weights"][3, 0] = np.nan

    new, (window,) = samples.run(1, change_state=begin, change_batch=spoil)
    assert new["step"] == 6 and new["bad_in_a_row"] == 1
    assert_identical(new["params"], before["params"])
    assert_identical(new["optimizer"], before["optimizer"])
    assert window["bad_steps"].tolist() == [1.0, 1.0]
    assert window["masked_lm_loss"].tolist() == [0.0, 0.0]


def test_a_skipped_step_does_nothing_but_count():
    before = {}

    def begin(state):
        state |= {"step": jnp.int32(7), "skipped_steps": state["skipped_steps"].at[3].set(7)}
        before.update(jax.device_get(state))

    new, _ = samples.run(1, change_state=begin)
    assert new["step"] == 8 and new["bad_in_a_row"] == 0
    assert_identical(new["params"], before["params"])


@pytest.mark.parametrize(
    ("loss", "norm", "is_skipped", "bad_in_a_row", "is_applied", "is_counted", "bad_after"),
    [
        (1.0, 1.0, False, 0, True, True, 0),
        (1.0, 1.0, False, 2, True, True, 0),
        (np.nan, 1.0, False, 0, False, True, 1),
        (1.0, np.inf, False, 2, False, True, 3),
        # A skipped step sets bad_in_a_row to 0, though the metric bad_steps counts it.
        (1.0, 1.0, True, 2, False, True, 0),
        (np.nan, 1.0, True, 2, False, True, 0),
        # Three bad steps in a row: nothing changes until the host has decided.
        (1.0, 1.0, False, 3, False, False, 3),
        (np.nan, 1.0, False, 3, False, False, 3),
        (1.0, 1.0, True, 3, False, False, 3),
    ],
)
def test_effects_of_a_step(loss, norm, is_skipped, bad_in_a_row, is_applied, is_counted, bad_after):
    optimizer = dataclasses.replace(samples.OPTIMIZER, bad_steps_in_a_row=3)
    spec = step.StepSpec(Pretraining(samples.MODEL, "mlm"), optimizer, Parallelism(), 1, None)
    metrics = {name: jnp.array([1.0, 1.0]) for name in spec.objective.metrics}
    metrics |= {name: jnp.array([loss, 1.0]) for name in spec.objective.losses}
    state = {
        "step": jnp.int32(7),
        "params": jnp.zeros(2),
        "optimizer": jnp.zeros(3),
        "skipped_steps": jnp.array([3, 7 if is_skipped else 8, -1]),
        "bad_in_a_row": jnp.int32(bad_in_a_row),
    }
    new = {"params": jnp.ones(2), "optimizer": jnp.ones(3)}
    window = step.empty_window(spec.objective.metrics)
    window |= {"filled": jnp.array([2.0, 4.0])}
    metrics |= {"filled": jnp.array([1.0, 1.0])}
    update = step._Update(new, metrics, jnp.float32(norm), jnp.float32(0.1))
    after, window = step._apply_if_good(spec, state, window, update)
    assert (after["step"], after["bad_in_a_row"]) == (7 + is_counted, bad_after)
    assert after["params"].tolist() == [is_applied] * 2
    assert after["optimizer"].tolist() == [is_applied] * 3
    assert after["skipped_steps"].tolist() == state["skipped_steps"].tolist()
    assert window["bad_steps"].tolist() == [is_counted and not is_applied, is_counted]
    assert window["filled"].tolist() == [2 + is_applied, 4 + is_applied]
    assert window[step.WORST_STEP].tolist() == ([loss, 7] if is_applied else [0, 0])


@pytest.mark.parametrize("name", ["bert_adam", "adamw", "lamb", "stable_adamw", "muon"])
def test_parts_without_gradients_keep_weights_and_moments(name):
    """Masked LM alone teaches neither the pooler nor the next sentence head."""
    objective = Pretraining(samples.MODEL, "mlm")
    optimizer = dataclasses.replace(samples.OPTIMIZER, name=name, layer_decay=0.9)
    shapes = jax.eval_shape(lambda: step.init_state(objective, optimizer, 0))
    updated, before = (
        {part: jax.tree.map(lambda x, v=value: np.full(x.shape, v), shapes[part]) for part in parts}
        for value, parts in ((1, ("params", "optimizer")), (0, shapes))
    )
    after = step._restore_idle(updated, before, objective.idle)
    assert after.keys() == updated.keys()
    for path, leaf in jax.tree.leaves_with_path(after):
        is_idle = bool({getattr(key, "key", None) for key in path} & {"pooler", "next_sentence"})
        assert leaf.all() == (not is_idle), jax.tree_util.keystr(path)


def test_vocabulary_padding_stays_zero(reference):
    params = reference[0]["params"]
    assert not params["encoder"]["embeddings"]["word"]["embedding"][100:].any()
    assert not params["masked_lm"]["output_bias"][100:].any()
    assert params["masked_lm"]["output_bias"][:100].any()


@pytest.mark.long
def test_bfloat16_follows_float32(reference):
    """Compute and gradient reduction in bfloat16, parameters in float32."""
    model = dataclasses.replace(samples.MODEL, compute_dtype="bfloat16")
    optimizer = dataclasses.replace(samples.OPTIMIZER, gradient_reduction="bfloat16")
    state, seen = samples.run(STEPS, devices=2, model=model, optimizer=optimizer)
    assert {leaf.dtype for leaf in jax.tree.leaves(state["params"])} == {np.dtype("float32")}
    for ours, theirs in zip(seen, reference[1], strict=True):
        np.testing.assert_allclose(
            ours["masked_lm_loss"][0], theirs["masked_lm_loss"][0], rtol=0.02
        )
    np.testing.assert_allclose(
        seen[0]["gradient_norm"][0], reference[1][0]["gradient_norm"][0], rtol=0.01
    )
    # Losses under Adam hardly show gradients of wrong scale or sign, so the gradients are compared
    # leaf by leaf, as Adam's first moments after one step.
    ours, theirs = (
        optimizer_lib.moments(samples.run(1, **more)[0]["optimizer"]).mu
        for more in ({"devices": 2, "model": model, "optimizer": optimizer}, {})
    )
    compared = 0
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        norms = np.linalg.norm(x), np.linalg.norm(y)
        if norms[1] > 1e-8:  # attention's key bias: its gradient is only rounding error
            assert norms[0] == pytest.approx(norms[1], rel=0.01)
            assert np.vdot(x, y) > 0.999 * norms[0] * norms[1]
            compared += 1
    assert compared == len(jax.tree.leaves(ours)) - 1


class _Spy(Pretraining):
    """Learns nothing; records dropout's random bits. `fixed`, frozen parameters, is unused."""

    bits: ClassVar[list[bytes]] = []

    def forward(self, params, fixed, batch, noise, loop):
        drawn = noise.keep((256,), 0.5)
        jax.debug.callback(lambda bits: self.bits.append(np.asarray(bits).tobytes()), drawn)
        return {name: jnp.array([0.0, 1.0]) for name in self.metrics}


def test_rbg_dropout_differs_between_steps_micro_batches_and_shards():
    model = dataclasses.replace(samples.MODEL, dropout_rng="rbg16")
    _Spy.bits.clear()
    samples.run(2, devices=2, model=model, parallelism=Parallelism(accumulation=2), learns=_Spy)
    jax.effects_barrier()
    assert len(_Spy.bits) == len(set(_Spy.bits)) == 8


def test_logits_are_computed_only_at_predicted_positions():
    """No array of the compiled step has sequence and vocabulary dimensions."""
    shape = batches.BatchShape(sequence_length=20, max_predictions=3, batch_size=8)
    batch = samples.train_batches(shape).batch(0, np.arange(8))
    mesh = samples.mesh_of(1)
    spec = step.StepSpec(Pretraining(samples.MODEL), samples.OPTIMIZER, Parallelism(), 1, mesh)
    train_step = step.make_train_step(spec, 100)
    state = step.init_state(Pretraining(samples.MODEL), samples.OPTIMIZER, 0)
    key = step.phase_key(samples.MODEL, 0, 0)
    text = train_step.lower(
        state, step.empty_window(Pretraining(samples.MODEL).metrics), batch, key
    ).as_text()
    assert "8x3x1024xf32" in text or "24x1024xf32" in text
    assert "20x1024xf32" not in text and "160x1024xf32" not in text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bfloat16_on_one_cpu_has_chunks_of_logits_and_short_products_in_muon(dtype):
    model = dataclasses.replace(samples.MODEL, vocab_size=2_000, compute_dtype=dtype)
    objective, mesh = Pretraining(model), samples.mesh_of(1)
    optimizer = Optimizer(name="muon", peak_learning_rate=1e-3)
    batch = samples.train_batches(samples.SHAPE).batch(0, np.arange(8))
    state, window = step.init_state(objective, optimizer, 0), step.empty_window(objective.metrics)
    train_step = step.make_train_step(
        step.StepSpec(objective, optimizer, Parallelism(), 1, mesh), 100
    )
    eval_step = step.make_eval_step(objective, Parallelism(), mesh)
    trained = train_step.lower(state, window, batch, step.phase_key(model, 0, 0)).as_text()
    sums = {name: jnp.zeros(2) for name in objective.metrics}
    for text in (trained, eval_step.lower(state["params"], sums, batch).as_text()):
        assert ("24x1024xf32" in text) == (dtype == "bfloat16")
        assert ("x2048xf32>" in text) == (dtype == "float32")
    gram = re.compile(r"batching_dims = \[0\] x \[0\].*: \(tensor<2x32x32xbf16>")
    assert bool(gram.search(trained)) == (dtype == "bfloat16")


def test_state_and_window_are_donated(monkeypatch):
    make, recorded = step.make_train_step, []

    def recording(*args):
        def train_step(state, window, *more):
            recorded.extend([state["params"]["pooler"]["kernel"], window["masked_lm_loss"]])
            return make(*args)(state, window, *more)

        return train_step

    monkeypatch.setattr(step, "make_train_step", recording)
    samples.run(1)
    assert len(recorded) == 2 and all(array.is_deleted() for array in recorded)
