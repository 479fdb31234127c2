"""Updates, rates and the clip against a trajectory in float64 and the reference's formulas."""

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from bert_jax.config import Optimizer
from bert_jax.conformance import cores, golden, pytorch
from bert_jax.conformance.rule import Rule, count_of_different, largest_difference, relative
from bert_jax.training import optimizer

_rule = functools.partial(Rule, "optimizer")

# optimization.py, AdamWeightDecayOptimizer: names found by these do not decay.
_REFERENCE_NO_DECAY = re.compile("LayerNorm|layer_norm|bias")


def check() -> Iterator[Rule]:
    """Yields the rules of the optimizer, compared."""
    yield from _trajectory()
    yield from _schedule()
    yield _first_update()
    yield _decay()
    yield _clip()


def _trajectory() -> Iterator[Rule]:
    """The reference's names end in bias or LayerNorm...; ours in bias or kernel."""
    theirs = golden.trajectory()
    cfg = Optimizer(name="bert_adam", peak_learning_rate=1e-2, warmup_steps=5, schedule="paper")
    steps = len(theirs["learning_rate"])

    def tree(prefix: str, step: int | None = None) -> dict[str, Any]:
        found = {}
        for name in theirs:
            if name.startswith(f"{prefix}."):
                value = theirs[name] if step is None else theirs[name][step]
                leaf = "bias" if _REFERENCE_NO_DECAY.search(name) else "kernel"
                found[name.removeprefix(f"{prefix}.")] = {leaf: jnp.asarray(value, jnp.float32)}
        return found

    tx = optimizer.make(cfg)

    @jax.jit
    def step(params: Any, state: Any, gradient: Any, number: int) -> tuple[Any, Any, jax.Array]:
        gradient, _ = optimizer.clip(gradient, cfg.clip_norm)
        rate = optimizer.schedule(cfg, steps, jnp.int32(number))
        update, state = tx.update(gradient, state, params)
        return jax.tree.map(lambda p, u: p - rate * u, params, update), state, rate

    params = tree("init")
    state = tx.init(params)
    worst, rates = 0.0, []
    for number in range(steps):
        params, state, rate = step(params, state, tree("grads", number), number)
        worst = max(worst, largest_difference(params, tree("params", number)))
        rates.append(float(rate))
    yield _rule(
        "Adam without bias correction, eps 1e-6, decay 0.01, clip 1.0",
        f"parameters of {steps} steps with float64",
        worst,
        1e-5,
    )
    yield _rule(
        "linear warm-up, linear decay",
        f"{steps} learning rates with float64",
        relative(rates, theirs["learning_rate"]),
        1e-6,
    )


def _schedule() -> Iterator[Rule]:
    cfg, total = Optimizer(), 1_000_000
    peak, warmup = cfg.peak_learning_rate, cfg.warmup_steps

    def rate(step: int) -> float:
        return float(optimizer.schedule(cfg, total, jnp.int32(step)))

    yield _rule("the rate of step 0 is 0", "the rate with 0", rate(0))
    jump = [rate(warmup - 1) / peak, rate(warmup) / peak, rate(total) / peak]
    yield _rule(
        "decay counts from step 0: the rate falls where warm-up ends",
        "three rates of 1M steps with the formula",
        relative(jump, [1 - 1 / warmup, 1 - warmup / total, 0.0]),
        1e-6,
    )


def _first_update() -> Rule:
    cfg = Optimizer(name="bert_adam", weight_decay=0.0)
    tx, params = optimizer.make(cfg), {"kernel": jnp.zeros(3)}
    gradient = {"kernel": jnp.array([1.0, -1e-3, 1e-5])}
    update, _ = tx.update(gradient, tx.init(params), params)
    g = np.asarray(gradient["kernel"], np.float64)
    return _rule(
        "the first update is 0.1 g / (sqrt(0.001) |g| + eps)",
        "three entries with float64",
        relative(update["kernel"], 0.1 * g / (np.sqrt(0.001) * np.abs(g) + 1e-6)),
        1e-5,
    )


def _decay() -> Rule:
    """Which of our parameters decay, by the reference's names for them."""
    tensors = golden.pytorch("model")
    # Every tensor filled with its number, so that ours say which of theirs they are.
    numbers = {name: np.full(tensors[name].shape, i) for i, name in enumerate(tensors)}
    ours = pytorch.convert(numbers)
    theirs = [list(tensors)[int(leaf.flat[0])] for leaf in jax.tree.leaves(ours)]
    return _rule(
        "biases and layer norms do not decay, embeddings do",
        f"{len(theirs)} parameters with the reference's expression",
        count_of_different(
            jax.tree.leaves(optimizer.decays(ours)),
            [not _REFERENCE_NO_DECAY.search(name) for name in theirs],
        ),
    )


def _clip() -> Rule:
    norm = 0.1
    ours = cores.summed_gradient(norm)
    clipped = []
    for gradient in cores.gradients():
        length = float(optax.global_norm(gradient))
        if length <= norm:
            raise ValueError(f"a core's gradient of norm {length} is not clipped at {norm}")
        clipped.append(jax.tree.map(lambda g, n=length: g * (norm / n), gradient))
    theirs = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), clipped)
    return _rule(
        "each core clips its own gradient, then they are summed",
        f"a step of {cores.CORES} cores with each alone",
        largest_difference(ours, theirs),
        1e-5,
    )
