"""Gradients in micro-batches, for an objective that compares all rows with each other."""

import dataclasses

import jax
import jax.numpy as jnp
import kinds
import numpy as np
import samples
from jax.sharding import PartitionSpec

from bert_jax.config import Model, Optimizer, Parallelism
from bert_jax.training.gradients import ShardGradient
from bert_jax.training.step import StepSpec

ROWS, WIDTH, PARTS = 8, 4, 4


@dataclasses.dataclass(frozen=True)
class Noisy:
    """An objective whose vectors are `weight * x` with dropout."""

    model: Model
    calls: list  # for each call its rows and its dropout mask

    def __hash__(self):
        return id(self)

    def counts(self, batch):
        return (batch["row_weights"].sum(),)

    def vectors(self, params, fixed, batch, noise, loop):
        kept = noise.keep(batch["x"].shape, 0.5)
        jax.debug.callback(
            lambda *args: self.calls.append([np.array(x) for x in args]), batch["x"], kept
        )
        return batch["x"] * params["weight"] * kept

    def compare(self, vectors, params, fixed, batch, noise, loop):
        products = vectors @ vectors.T  # of all rows
        return {"loss": jnp.stack([jnp.tanh(products).sum(), batch["row_weights"].sum()])}

    def loss(self, metrics, counts):
        return metrics["loss"][0] / counts[0]


def test_dropout_is_the_same_in_both_passes_of_each_part():
    """Here dropout is drawn for a whole part, not for each row (`rbg16`)."""
    model = dataclasses.replace(kinds.MODEL, dropout_rng="rbg16")
    objective, parallelism = Noisy(model, []), Parallelism(accumulation=(PARTS,))
    mesh = samples.mesh_of(1, parallelism)
    spec = StepSpec(objective, Optimizer(), parallelism, PARTS, mesh)
    x = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
    weights = np.ones(ROWS, np.float32)
    batch = {"x": x, "row_weights": weights, "input_mask": np.ones((ROWS, 1), np.int32)}
    params, key = {"weight": np.float32(0.7)}, jax.random.key(1, impl="rbg")

    def shard(params, batch):
        gradient = ShardGradient(spec, {"weight": None})
        return gradient.gradients(params, None, jnp.int32(3), batch, key)

    whole = PartitionSpec()
    run = jax.shard_map(shard, mesh=mesh, in_specs=(whole, whole), out_specs=whole, check_vma=False)
    gradient, metrics = jax.block_until_ready(jax.jit(run)(params, batch))
    jax.effects_barrier()
    masks = []
    for part in np.split(x, PARTS):
        forward, backward = (mask for rows, mask in objective.calls if (rows == part).all())
        np.testing.assert_array_equal(forward, backward)
        masks.append(forward)
    assert len({mask.tobytes() for mask in masks}) == PARTS

    v = x.astype(np.float64) * np.concatenate(masks)
    products = v @ v.T  # times the weight's square
    expected = (2 * 0.7 * products / np.cosh(0.49 * products) ** 2).sum() / ROWS
    np.testing.assert_allclose(gradient["weight"], expected, rtol=1e-5)
    np.testing.assert_allclose(metrics["loss"][0], np.tanh(0.49 * products).sum(), rtol=1e-5)
