"""Losses and metrics against PyTorch's and against run_pretraining.py in float64."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax.conformance import cores, golden, pytorch
from bert_jax.conformance.rule import Rule, largest_difference, relative
from bert_jax.model import heads, losses
from bert_jax.model.encoder import Loop

_rule = functools.partial(Rule, "loss")


def check() -> Iterator[Rule]:
    """Yields the rules of losses and metrics, compared."""
    yield _total()
    yield _per_core()
    yield from _metrics()


def _total() -> Rule:
    params = jax.tree.map(jnp.asarray, pytorch.convert(golden.pytorch("model")))
    batch = pytorch.batch(golden.pytorch("batch"))
    logits = heads.pretraining_logits(pytorch.CONFIG, params, batch, None, Loop())
    sums = losses.pretraining(*logits, batch)
    loss = sum(float(sums[k][0] / sums[k][1]) for k in ("masked_lm_loss", "next_sentence_loss"))
    return _rule(
        "masked LM + next sentence",
        "the loss of a batch with PyTorch's",
        relative(loss, golden.pytorch("outputs")["loss"]),
        1e-5,
    )


def _per_core() -> Rule:
    theirs = functools.reduce(lambda a, b: jax.tree.map(jnp.add, a, b), cores.gradients())
    return _rule(
        "each core divides by its own weights + 1e-5, and its own rows",
        f"a step of {cores.CORES} cores with each alone",
        largest_difference(cores.summed_gradient(1e9), theirs),
        1e-5,
    )


def _metrics() -> Iterator[Rule]:
    """Labels of id 0 count: weights alone say what is no label."""
    rng = np.random.default_rng(0)
    words, pairs = rng.normal(size=(6, 4, 30)), rng.normal(size=(6, 2))
    labels = np.where(rng.random((6, 4)) < 0.5, words.argmax(-1), 0)
    weights = (rng.random((6, 4)) < 0.7).astype(np.float64)
    next_labels = rng.integers(0, 2, 6)
    sums = losses.pretraining(
        jnp.asarray(words, jnp.float32),
        jnp.asarray(pairs, jnp.float32),
        {
            "masked_lm_ids": jnp.asarray(labels),
            "masked_lm_weights": jnp.asarray(weights, jnp.float32),
            "next_sentence_labels": jnp.asarray(next_labels),
            "row_weights": jnp.ones(6),
        },
    )

    def means(logits: np.ndarray, labels: np.ndarray, weights: np.ndarray) -> dict[str, float]:
        chosen = np.take_along_axis(logits, labels[..., None], -1)[..., 0]
        nll = np.log(np.exp(logits).sum(-1)) - chosen
        hits = logits.argmax(-1) == labels
        return {
            "loss": (weights * nll).sum() / weights.sum(),
            "accuracy": (weights * hits).sum() / weights.sum(),
        }

    expected = {"masked_lm": means(words, labels, weights)}
    expected["next_sentence"] = means(pairs, next_labels, np.ones(6))
    told = {"masked_lm": ", a label of id 0 counts as any"}
    for task, values in expected.items():
        found = [float(sums[f"{task}_{name}"][0] / sums[f"{task}_{name}"][1]) for name in values]
        yield _rule(
            f"{task}_loss and {task}_accuracy are weighted means{told.get(task, '')}",
            "both with float64",
            relative(found, list(values.values())),
            1e-6,
        )
