"""A training step over a few of the reference's cores, and what each core alone would give."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType

from bert_jax.config import Model, Optimizer, Parallelism
from bert_jax.model import heads
from bert_jax.model.encoder import Loop
from bert_jax.training import step
from bert_jax.training.objective import Pretraining

CORES, _ROWS, _LENGTH = 3, 2, 16

MODEL = Model(
    vocab_size=50,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    max_position_embeddings=_LENGTH,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
_OPTIMIZER = Optimizer(clip="per_replica", reference_replicas=CORES)
# So little that run_pretraining.py's 1e-5 in the denominator shows.
_FEW = 1e-5


@functools.cache
def batch() -> step.Batch:
    """Rows of all cores, with other counts of predictions on each; hardly one on the last."""
    rng, count = np.random.default_rng(0), CORES * _ROWS
    shape = (count, _LENGTH)
    weights = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [0, 0, 0], [_FEW, 0, 0], [0, 0, 0]])
    made = {
        "input_ids": rng.integers(5, 50, shape),
        "segment_ids": np.repeat([[0] * 8 + [1] * 8], count, axis=0),
        "input_mask": np.arange(_LENGTH) < rng.integers(8, _LENGTH, (count, 1)),
        "masked_lm_positions": np.repeat([[2, 4, 6]], count, axis=0),
        "masked_lm_ids": rng.integers(0, 50, (count, 3)),
        "next_sentence_labels": rng.integers(0, 2, count),
    }
    return {
        **{name: jnp.asarray(value, jnp.int32) for name, value in made.items()},
        "masked_lm_weights": jnp.asarray(weights, jnp.float32),
        "row_weights": jnp.ones(count),
        "rows": jnp.arange(count, dtype=jnp.uint32),
    }


def summed_gradient(clip_norm: float) -> heads.Params:
    """The gradient that a training step over all cores gives to its optimizer."""
    cfg = dataclasses.replace(_OPTIMIZER, clip_norm=clip_norm)
    mesh = jax.make_mesh((1,), ("data_0",), (AxisType.Auto,), devices=jax.devices()[:1])
    train_step = step.make_train_step(Pretraining(MODEL), cfg, Parallelism(), 1, 1_000_000, mesh)
    state = step.init_state(Pretraining(MODEL), cfg, 0)
    key = step.phase_key(MODEL, 0, 0)
    new, _ = train_step(state, step.empty_window(Pretraining(MODEL)), batch(), key)
    # Before the first step there is no momentum.
    return jax.tree.map(lambda m: m / (1 - cfg.b1), new["optimizer"][0].mu)


def gradients() -> Iterator[heads.Params]:
    """Each core's own gradient before that step, its loss written from run_pretraining.py."""
    params = step.init_state(Pretraining(MODEL), _OPTIMIZER, 0)["params"]
    gradient = jax.jit(jax.grad(_core_loss))
    for core in range(CORES):
        rows = slice(core * _ROWS, (core + 1) * _ROWS)
        yield gradient(params, {name: value[rows] for name, value in batch().items()})


def _core_loss(params: heads.Params, part: step.Batch) -> jax.Array:
    masked_lm, next_sentence = heads.pretraining_logits(MODEL, params, part, None, Loop())

    def nll(logits: jax.Array, labels: jax.Array) -> jax.Array:
        return -(jax.nn.log_softmax(logits) * jax.nn.one_hot(labels, logits.shape[-1])).sum(-1)

    weights = part["masked_lm_weights"]
    words = (weights * nll(masked_lm, part["masked_lm_ids"])).sum() / (weights.sum() + 1e-5)
    return words + nll(next_sentence, part["next_sentence_labels"]).mean()
