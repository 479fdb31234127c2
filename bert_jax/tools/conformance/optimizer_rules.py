"""Compares updates and learning rates with float64, a step over several cores with single cores."""

import dataclasses
import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

from bert_jax.config import Model, Optimizer, Parallelism
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.tools.conformance import golden
from bert_jax.tools.conformance.rule import (
    ReferenceRule,
    count_differences,
    largest_difference,
    relative,
)
from bert_jax.training import optimizer, step
from bert_jax.training.objective import Pretraining

_rule = functools.partial(ReferenceRule, "optimizer")

_CORES, _ROWS, _LENGTH = 3, 2, 16  # replicas in the reference, rows of each, tokens of a row

_MODEL = Model(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=_LENGTH,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
_OPTIMIZER = Optimizer(clip="per_replica", reference_replicas=_CORES)
# A masked_lm_weight so small that run_pretraining.py's 1e-5 in the denominator matters.
_SMALL = 1e-5

# AdamWeightDecayOptimizer of optimization.py: parameters whose names match do not decay.
_REFERENCE_NO_DECAY = re.compile("LayerNorm|layer_norm|bias")


def check() -> Iterator[ReferenceRule]:
    """Checks the rules of the optimizer, and of the work of each core."""
    yield from _trajectory()
    yield from _schedule()
    yield _first_update()
    yield _decay()
    yield from _cores()


def _trajectory() -> Iterator[ReferenceRule]:
    """Compares each step; leaves are named bias or kernel, which decides whether they decay."""
    expected = golden.trajectory()
    cfg = Optimizer(name="bert_adam", peak_learning_rate=1e-2, warmup_steps=5, schedule="paper")
    steps = len(expected["learning_rate"])

    def tree(prefix: str, number: int | None = None) -> dict[str, Any]:
        leaves = {}
        for name in expected:
            if name.startswith(f"{prefix}."):
                value = expected[name] if number is None else expected[name][number]
                leaf = "bias" if _REFERENCE_NO_DECAY.search(name) else "kernel"
                leaves[name.removeprefix(f"{prefix}.")] = {leaf: jnp.asarray(value, jnp.float32)}
        return leaves

    tx = optimizer.make_optimizer(cfg)

    @jax.jit
    def advance(params: Any, state: Any, gradient: Any, number: int) -> tuple[Any, Any, jax.Array]:
        gradient, _ = optimizer.clip(gradient, cfg.clip_norm)
        rate = optimizer.schedule(cfg, steps, jnp.int32(number))
        update, state = tx.update(gradient, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, update), state, rate

    params = tree("init")
    state = tx.init(params)
    worst, rates = 0.0, []
    for number in range(steps):
        params, state, rate = advance(params, state, tree("grads", number), number)
        worst = max(worst, largest_difference(params, tree("params", number)))
        rates.append(float(rate))
    yield _rule(
        "Adam without bias correction, eps 1e-6, decay 0.01, clip 1.0",
        f"parameters of {steps} steps with float64",
        worst,
        1e-5,
    )
    err = relative(rates, expected["learning_rate"])
    yield _rule("linear warm-up, linear decay", f"{steps} learning rates with float64", err, 1e-6)


def _schedule() -> Iterator[ReferenceRule]:
    cfg, total = Optimizer(), 1_000_000
    peak, warmup = cfg.peak_learning_rate, cfg.warmup_steps

    def rate(step: int) -> float:
        return float(optimizer.schedule(cfg, total, jnp.int32(step)))

    yield _rule("the rate of step 0 is 0", "the rate with 0", rate(0))
    relative_rates = [rate(warmup - 1) / peak, rate(warmup) / peak, rate(total) / peak]
    yield _rule(
        "decay counts from step 0: the rate drops at the end of warm-up",
        "three rates of 1M steps with the formula",
        relative(relative_rates, [1 - 1 / warmup, 1 - warmup / total, 0.0]),
        1e-6,
    )


def _first_update() -> ReferenceRule:
    cfg = Optimizer(name="bert_adam", weight_decay=0.0)
    tx, params = optimizer.make_optimizer(cfg), {"kernel": jnp.zeros(3)}
    gradient = {"kernel": jnp.array([1.0, -1e-3, 1e-5])}
    (update,) = jax.tree.leaves(tx.update(gradient, tx.init(params), params)[0])
    g = np.asarray(gradient["kernel"], np.float64)
    return _rule(
        "the first update is 0.1 g / (sqrt(0.001) |g| + eps)",
        "three entries with float64",
        relative(update, 0.1 * g / (np.sqrt(0.001) * np.abs(g) + 1e-6)),
        1e-5,
    )


def _decay() -> ReferenceRule:
    """Checks that the parameters with weight decay are the reference's, which chooses by name."""
    tensors = golden.pytorch("model")
    # Each tensor is filled with its number, to find the reference's name of each parameter.
    numbers = {name: np.full(tensors[name].shape, i) for i, name in enumerate(tensors)}
    params = golden.convert(numbers)
    names = [list(tensors)[int(leaf.flat[0])] for leaf in jax.tree.leaves(params)]
    return _rule(
        "biases and layer norms do not decay, embeddings do",
        f"{len(names)} parameters with the reference's expression",
        count_differences(
            jax.tree.leaves(optimizer.decays(params)),
            [not _REFERENCE_NO_DECAY.search(name) for name in names],
        ),
    )


def _cores() -> Iterator[ReferenceRule]:
    clip_norm, compared = 0.1, f"gradient of {_CORES} cores with the sum of single cores"
    single = list(_gradients())
    norms = [float(optax.global_norm(gradient)) for gradient in single]
    if min(norms) <= clip_norm:
        raise ValueError(f"a core's gradient of norm {min(norms)} is not clipped at {clip_norm}")
    clipped = [
        jax.tree.map(lambda g, n=own: g * (clip_norm / n), gradient)
        for gradient, own in zip(single, norms, strict=True)
    ]
    err = largest_difference(_summed_gradient(clip_norm), jax.tree.map(lambda *g: sum(g), *clipped))
    yield _rule("each core clips its own gradient, then they are summed", compared, err, 1e-5)
    err = largest_difference(_summed_gradient(1e9), jax.tree.map(lambda *g: sum(g), *single))
    rule = "each core divides by its own weights + 1e-5, and its own rows"
    yield ReferenceRule("loss", rule, compared, err, 1e-5)


@functools.cache
def _batch() -> step.Batch:
    """Returns rows of all cores. The cores differ in predictions: the last core has almost none."""
    rng, count = np.random.default_rng(0), _CORES * _ROWS
    shape = (count, _LENGTH)
    weights = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [_SMALL, 0, 0], [0, 0, 0]])
    arrays = {
        "input_ids": rng.integers(5, 50, shape),
        "segment_ids": np.repeat([[0] * 8 + [1] * 8], count, axis=0),
        "input_mask": np.arange(_LENGTH) < rng.integers(8, _LENGTH, (count, 1)),
        "masked_lm_positions": np.repeat([[2, 4, 6]], count, axis=0),
        "masked_lm_ids": rng.integers(0, 50, (count, 3)),
        "next_sentence_labels": rng.integers(0, 2, count),
    }
    return {
        **{name: jnp.asarray(value, jnp.int32) for name, value in arrays.items()},
        "masked_lm_weights": jnp.asarray(weights, jnp.float32),
        "row_weights": jnp.ones(count),
        "rows": jnp.arange(count, dtype=jnp.uint32),
    }


def _summed_gradient(clip_norm: float) -> heads.Params:
    """Returns the gradient of a training step over all cores, which one device computes."""
    cfg = dataclasses.replace(_OPTIMIZER, clip_norm=clip_norm)
    mesh = jax.make_mesh((1,), ("data_0",), (AxisType.Auto,), devices=jax.devices()[:1])
    spec = step.StepSpec(Pretraining(_MODEL), cfg, Parallelism(), accumulation=1, mesh=mesh)
    train_step = step.make_train_step(spec, 1_000_000)
    state = step.init_state(Pretraining(_MODEL), cfg, 0)
    key = step.phase_key(_MODEL, seed=0, phase=0)
    window = step.empty_window(Pretraining(_MODEL).metrics)  # sums of metrics
    new, _ = train_step(state, window, _batch(), key)
    # The momentum before the first step is 0.
    return jax.tree.map(lambda m: m / (1 - cfg.b1), new["optimizer"][0].mu)


def _gradients() -> Iterator[heads.Params]:
    """Yields the gradient of each core, with the loss of run_pretraining.py."""
    params = step.init_state(Pretraining(_MODEL), _OPTIMIZER, 0)["params"]
    gradient = jax.jit(jax.grad(_core_loss))
    for core in range(_CORES):
        rows = slice(core * _ROWS, (core + 1) * _ROWS)
        yield gradient(params, {name: value[rows] for name, value in _batch().items()})


def _core_loss(params: heads.Params, part: step.Batch) -> jax.Array:
    masked_lm, next_sentence = heads.pretraining_logits(_MODEL, params, part, None, loop=Loop())

    def nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1])).sum(-1)

    weights = part["masked_lm_weights"]
    words = (weights * nll(masked_lm, part["masked_lm_ids"])).sum() / (weights.sum() + 1e-5)
    return words + nll(next_sentence, part["next_sentence_labels"]).mean()
