"""Updates against the papers in NumPy float64. The reference's: `conformance.optimizer_rules`."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_close

from bert_jax.config import Optimizer
from bert_jax.training import muon
from bert_jax.training import optimizer as optimizer_lib


def tree(seed):
    """Leaves that decay and leaves that do not, some of them stacked, LoRA's among them."""
    rng = np.random.default_rng(seed)
    # The first layer's are a hundred times the others', so that one norm for all of them shows.
    by_layer = rng.normal(size=(3, 4, 2)) * np.array([100.0, 1.0, 1.0])[:, None, None]
    return {
        "encoder": {
            "layers": {
                "query": {"kernel": rng.normal(size=(3, 4, 5)), "bias": rng.normal(size=(3, 5))},
                "output_layer_norm": {"scale": rng.normal(size=(3, 4))},
            }
        },
        "masked_lm": {"output_bias": rng.normal(size=7)},
        "word": {"embedding": rng.normal(size=(7, 4))},
        "lora": {"query": {"down": by_layer, "up": rng.normal(size=(3, 2, 5))}},
    }


def decays(path):
    return path.endswith(("kernel", "embedding", "down", "up"))


def is_stacked(path):
    return "layers" in path or "lora" in path


def flat(nested, prefix=""):
    if isinstance(nested, dict):
        return {k: v for n, x in nested.items() for k, v in flat(x, f"{prefix}{n}/").items()}
    return {prefix.rstrip("/"): np.asarray(nested, np.float64)}


def orthogonal(matrix):
    """Jordan et al. 2024, for a matrix [in, out]."""
    x = matrix / (np.linalg.norm(matrix) + 1e-7)
    for _ in range(5):
        x = 3.4445 * x + (-4.7750 * x @ x.T + 2.0315 * x @ x.T @ x @ x.T) @ x
    return x * max(1.0, matrix.shape[1] / matrix.shape[0]) ** 0.5


def by_hand(cfg, params, gradients, rate):
    """Kingma and Ba 2015; Loshchilov and Hutter 2019; You et al. 2019; Wortsman et al. 2023."""
    params, m, v = flat(params), {}, {}
    for t, gradient in enumerate(map(flat, gradients), 1):
        for k, g in gradient.items():
            if cfg.name == "muon" and k.endswith("layers/query/kernel"):
                m[k] = cfg.momentum * m.get(k, 0) + (1 - cfg.momentum) * g
                ahead = cfg.momentum * m[k] + (1 - cfg.momentum) * g
                update = np.stack(list(map(orthogonal, ahead))) + cfg.weight_decay * params[k]
                rate_ratio = cfg.matrix_learning_rate / cfg.peak_learning_rate
                params[k] = params[k] - rate * rate_ratio * update
                continue
            m[k] = cfg.b1 * m.get(k, 0) + (1 - cfg.b1) * g
            v[k] = cfg.b2 * v.get(k, 0) + (1 - cfg.b2) * g * g
            update = m[k] / (1 - cfg.b1**t) / (np.sqrt(v[k] / (1 - cfg.b2**t)) + cfg.eps)
            if decays(k):
                update = update + cfg.weight_decay * params[k]
                if cfg.name == "lamb":
                    tensors = list(params[k]) if is_stacked(k) else [params[k]]
                    updates = list(update) if is_stacked(k) else [update]
                    ratios = [
                        np.linalg.norm(p.ravel()) / np.linalg.norm(u.ravel())
                        for p, u in zip(tensors, updates, strict=True)
                    ]
                    scaled = [r * u for r, u in zip(ratios, updates, strict=True)]
                    update = np.stack(scaled) if is_stacked(k) else scaled[0]
            if cfg.name == "stable_adamw":
                of_each = list(zip(g, v[k], strict=True)) if is_stacked(k) else [(g, v[k])]
                rms = [
                    np.sqrt(np.mean(g * g / np.maximum(v / (1 - cfg.b2**t), cfg.eps**2)))
                    for g, v in of_each
                ]
                slower = np.maximum(1.0, rms).reshape(-1, *[1] * (update.ndim - 1))
                update = update / (slower if is_stacked(k) else slower.ravel()[0])
            params[k] = params[k] - rate * update
    return params


@pytest.mark.parametrize("name", ["adamw", "lamb", "stable_adamw", "muon"])
@pytest.mark.parametrize("steps", [1, 5])
def test_updates_equal_the_papers(name, steps):
    cfg = Optimizer(name=name, weight_decay=0.03, b2=0.98, matrix_learning_rate=3e-4)
    tx = optimizer_lib.make_optimizer(cfg)
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree(0))
    state = tx.init(params)
    # They grow, so that stable_adamw has something to do.
    gradients = [
        jax.tree.map(lambda g, size=2.0**seed: g * size, tree(seed)) for seed in range(1, steps + 1)
    ]
    for gradient in gradients:
        gradient = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient)
        direction, state = tx.update(gradient, state, params)  # to subtract, unlike optax's
        params = jax.tree.map(lambda p, u: p - 0.01 * u, params, direction)
    assert_close(flat(params), by_hand(cfg, tree(0), gradients, 0.01), 1e-6 if steps == 1 else 1e-5)


def test_lamb_moves_tensors_of_zeros_as_adam_does():
    """The trust ratio is 1 where a norm is 0 (You et al. 2019, algorithm 2)."""
    params = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), tree(0))
    gradient = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree(1))
    updates = []
    for name in ("lamb", "adamw"):
        tx = optimizer_lib.make_optimizer(Optimizer(name=name))
        updates.append(flat(tx.update(gradient, tx.init(params), params)[0]))
    assert_close(*updates, 1e-6)
    assert all(np.any(update) for update in updates[0].values())


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # (step, share of the peak): a warm-up of 10 of 100 steps.
        ("linear", [(0, 0.0), (5, 0.5), (10, 1.0), (55, 0.5), (100, 0.0)]),
        ("cosine", [(0, 0.0), (5, 0.5), (10, 1.0), (55, 0.5), (100, 0.0)]),
    ],
)
def test_schedules(schedule, expected):
    cfg = Optimizer(schedule=schedule, peak_learning_rate=0.02, warmup_steps=10)
    for step, share in expected:
        rate = optimizer_lib.schedule(cfg, 100, jnp.int32(step))
        np.testing.assert_allclose(rate, 0.02 * share, atol=1e-9)


@pytest.mark.parametrize("schedule", ["paper", "linear", "cosine", "wsd"])
def test_a_schedule_without_a_warm_up_begins_at_its_peak(schedule):
    """`paper`, as in BERT, decays from step 0 on; the others do after the warm-up."""
    cfg = Optimizer(schedule=schedule, peak_learning_rate=0.02, warmup_steps=0, decay_steps=10)
    assert float(optimizer_lib.schedule(cfg, 100, jnp.int32(0))) == np.float32(0.02)


@pytest.mark.parametrize("shape", ["linear", "one_minus_sqrt"])
def test_wsd_warms_up_stays_and_decays(shape):
    cfg = Optimizer(
        schedule="wsd", peak_learning_rate=0.02, warmup_steps=10, decay_steps=16, decay_shape=shape
    )
    shares = [(0, 0.0), (5, 0.5), (10, 1.0), (60, 1.0), (84, 1.0), (100, 0.0)]
    shares += [(88, 0.75 if shape == "linear" else 0.5)]  # a quarter of the decay is done
    for step, share in shares:
        rate = optimizer_lib.schedule(cfg, 100, jnp.int32(step))
        np.testing.assert_allclose(rate, 0.02 * share, atol=1e-9)
    stable = dataclasses.replace(cfg, decay_steps=0)
    assert float(optimizer_lib.schedule(stable, 100, jnp.int32(99))) == np.float32(0.02)


def test_clip_scales_down_and_never_up():
    gradient = {"a": jnp.array([3.0, 4.0])}
    clipped, norm = optimizer_lib.clip(gradient, 1.0)
    np.testing.assert_allclose(clipped["a"], [0.6, 0.8], rtol=1e-6)
    assert float(norm) == 5.0
    same, _ = optimizer_lib.clip(gradient, 10.0)
    np.testing.assert_array_equal(same["a"], gradient["a"])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
@pytest.mark.parametrize("shape", [(2, 12, 7), (2, 7, 12), (3, 8, 8)])
def test_singular_values_come_near_to_one_and_vectors_stay(shape, dtype, tolerance):
    matrices = np.random.default_rng(0).normal(size=shape)
    made = np.asarray(jax.jit(muon.newton_schulz, static_argnums=1)(matrices, dtype))
    for before, after in zip(matrices, made, strict=True):
        u, sizes, vt = np.linalg.svd(before, full_matrices=False)
        values = u.T @ after @ vt.T
        assert np.abs(values - np.diag(np.diag(values))).max() < tolerance
        # Five steps lift what is a fiftieth of the norm or more.
        lifted = np.diag(values)[sizes > 0.02 * np.linalg.norm(before)]
        assert len(lifted) > 5 and 0.3 < lifted.min() < np.diag(values).max() < 1.3


def test_lower_layers_learn_slower():
    """Howard and Ruder 2018: by one factor a layer, from the heads down to the embeddings."""
    ones = {
        "encoder": {
            "embeddings": {"word": {"embedding": jnp.ones((5, 2))}},
            "layers": {"query": {"kernel": jnp.ones((3, 2, 2)), "bias": jnp.ones((3, 2))}},
        },
        "decoder": {"layers": {"query": {"bias": jnp.ones((3, 2))}}},  # counts as a head
        "pooler": {"kernel": jnp.ones((2, 2))},
    }
    scale = optimizer_lib.scale_by_layer(0.5)
    scaled, _ = scale.update(ones, scale.init(ones), ones)
    layers = scaled["encoder"]["layers"]["query"]
    assert layers["bias"].tolist() == [[0.125] * 2, [0.25] * 2, [0.5] * 2]
    assert layers["kernel"][:, 1, 0].tolist() == [0.125, 0.25, 0.5]
    assert (scaled["encoder"]["embeddings"]["word"]["embedding"] == 0.0625).all()
    for part in ("decoder", "pooler"):
        assert all((leaf == 1.0).all() for leaf in jax.tree.leaves(scaled[part]))


def test_a_tensor_of_zeros_is_updated_by_lamb_as_by_adamw():
    """Its norm is no measure of a step, nor is that of an update of zeros."""
    scale = optimizer_lib.scale_by_stacked_trust_ratio()
    zeros, twos = {"kernel": jnp.zeros((3, 3))}, {"kernel": jnp.full((3, 3), 2.0)}
    for update, params in ((twos, zeros), (zeros, twos)):
        scaled, _ = scale.update(update, scale.init(params), params)
        np.testing.assert_array_equal(scaled["kernel"], update["kernel"])
