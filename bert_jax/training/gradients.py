"""The gradient of a step inside its `shard_map`: of one shard's rows, then reduced over shards.

Each shard goes through its micro-batches, and one reduction adds up the gradients of all shards.
Collectives are explicit, so the compiler need not infer them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax.config import Optimizer, Parallelism
from bert_jax.model import layers, losses
from bert_jax.model.encoder import Loop
from bert_jax.model.kernels import BY_DEVICE
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import recompute_check, sharding
from bert_jax.training.collectives import Collectives, method_of
from bert_jax.training.objective import Batch, ComparingObjective, Objective

Metrics = losses.Metrics
Counts = tuple[jax.Array, ...]


class StepSpec(NamedTuple):
    """The specification of a training step."""

    objective: Objective
    optimizer: Optimizer
    parallelism: Parallelism
    accumulation: int  # micro-batches, see `parallelism.accumulation_of`
    mesh: jax.sharding.Mesh


@dataclasses.dataclass(frozen=True)
class ShardGradient:
    """The gradient of a step, as the devices of one shard compute it."""

    spec: StepSpec
    partition: Any  # a `sharding.Partition` for each parameter

    def gradients(
        self,
        params: Any,
        fixed: Any,
        step: jax.Array,
        batch: Batch,
        key: jax.Array,
        other: Batch | None = None,
    ) -> Any:
        """Returns the gradient of the whole batch and its metrics, reduced over all shards.

        With `other`, the rows of another shard, it returns `recompute_check.fingerprints` instead.

        `clip="per_replica"` reproduces the reference on `reference_replicas` TPU cores: each core
        has its own denominators and its own clip, and the optimizer's wrapper adds the cores'
        gradients without dividing by their number. Otherwise the denominators are global and known
        from the data, so that micro-batches and shards only add.
        """
        spec, axes = self.spec, mesh_lib.batch_axes(self.spec.mesh)
        per_replica = spec.optimizer.clip == "per_replica"
        total = None if per_replica else lax.psum(spec.objective.counts(batch), axes)
        if spec.parallelism.state == "zero1":
            params = sharding.all_gather_params(params, self.partition, self._collectives)
        # The fingerprint is the gradient by `mark`, computed before devices add up their gradients.
        params = params, None if other is None else jnp.zeros(4)

        def run(params: Any, function: Callable[..., Any], micro: Batch, number: jax.Array) -> Any:
            """Calls a function of the objective with its arguments; `params` are sharded."""
            params, loop = self._layer_loop(*params)
            noise: layers.Noise
            if spec.objective.model.dropout_rng == "threefry8":
                noise = row_noise(micro, key)
            else:
                numbers = step, number, lax.axis_index(axes)
                noise = layers.ShardNoise(functools.reduce(jax.random.fold_in, numbers, key))
            return function(params, fixed, micro, noise, loop)

        sum_gradients = functools.partial(self._sum_micro_batches, run, params, total)
        if other is not None:
            return recompute_check.fingerprints(sum_gradients, other, batch, axes)
        (gradient, _), metrics = sum_gradients(batch)
        return self._reduce(gradient), lax.psum(metrics, axes)

    @property
    def _collectives(self) -> Collectives:
        spec, method = self.spec, method_of(mesh_lib.device_kind(self.spec.mesh))
        # With several micro-batches one sum over slices, after all of them, sends less.
        is_early = spec.parallelism.state == "zero3" and spec.accumulation == 1
        return Collectives(
            mesh_lib.data_axes(spec.mesh),
            gather_dtype=spec.objective.model.compute_dtype,
            reduce_dtype=spec.optimizer.gradient_reduction,
            method=method,
            slice_axes=tuple(axis for axis in spec.mesh.axis_names if axis == mesh_lib.SLICE),
            reduces_slices_early=is_early and method.sums == "by_layer",
        )

    def _layer_loop(self, params: Any, mark: jax.Array | None) -> tuple[Any, Loop]:
        """Returns whole parameters and the loop over layers, which gathers those of `zero3`."""
        model, parallelism = self.spec.objective.model, self.spec.parallelism
        # The compiler cannot partition a kernel over the devices that share a row.
        has_kernels = model.dropout_rng == "in_kernel" and parallelism.tensor == 1
        kernels = BY_DEVICE.get(mesh_lib.device_kind(self.spec.mesh)) if has_kernels else None
        loop = Loop(parallelism.remat, parallelism.layer_loop, kernels)
        if parallelism.state == "zero3":
            return gather_outside_layers(params, self.partition, self._collectives, loop, mark)
        return recompute_check.fingerprint_gradient(params, mark), loop

    def _sum_micro_batches(
        self, run: Callable[..., Any], params: Any, total: Counts | None, batch: Batch
    ) -> tuple[Any, Metrics]:
        """Returns ((gradient, sum of gradients' fingerprints), metrics) of the shard's rows.

        `total` are the denominators of the losses; None: each micro-batch has its own.
        """
        objective, optimizer = self.spec.objective, self.spec.optimizer

        def gradient(micro: Batch, number: jax.Array) -> tuple[Any, Metrics]:
            counts = objective.counts(micro) if total is None else total

            def loss(params: Any) -> tuple[jax.Array, Metrics]:
                metrics = run(params, objective.forward, micro, number)
                return objective.loss(metrics, counts), metrics | {"filled": _count_filled(micro)}

            (gradient, fingerprint), metrics = jax.grad(loss, has_aux=True)(params)
            if total is None:
                gradient, _ = optimizer_lib.clip(gradient, optimizer.clip_norm)
            return (gradient, fingerprint), metrics

        parts = self.spec.accumulation
        if total is None:
            parts = optimizer.reference_replicas // mesh_lib.batch_shards(self.spec.mesh)
        if parts > 1 and hasattr(objective, "compare"):
            assert total is not None  # an objective with `compare` has clip=global
            comparing = cast(ComparingObjective, objective)
            return _accumulate_compared(comparing, run, params, batch, parts, total)
        return _accumulate(gradient, batch, parts)

    def _reduce(self, gradient: Any) -> Any:
        """Sums the gradient over all shards; each device keeps its part."""
        state, collectives = self.spec.parallelism.state, self._collectives
        if state == "replicated":
            axes = mesh_lib.batch_axes(self.spec.mesh)
            return sharding.all_reduce_gradients(gradient, collectives._replace(axes=axes))
        if state == "zero1":
            gradient = sharding.reduce_scatter_gradients(gradient, self.partition, collectives)
        return sharding.all_reduce_unsharded(gradient, self.partition, collectives)


def gather_outside_layers(
    params: Any, partition: Any, collectives: Collectives, loop: Loop, mark: jax.Array | None = None
) -> tuple[Any, Loop]:
    """Gathers the parameters outside of layers; returns them and a loop that gathers each layer.

    With a mark all of them go through `recompute_check.fingerprint_gradient`.
    """

    def split(tree: Any) -> tuple[Any, Any]:
        encoder = dict(tree["encoder"])
        return encoder.pop("layers"), tree | {"encoder": encoder}

    (layers, outside), (layer_cuts, outside_cuts) = split(params), split(partition)
    outside = sharding.all_gather_params(outside, outside_cuts, collectives)
    outside = recompute_check.fingerprint_gradient(outside, mark)
    outside["encoder"]["layers"] = layers

    def gather(stacked: Any) -> tuple[Any, Callable[[Any], Any]]:
        def gather_layer(scanned: Any) -> Any:
            layer, copies = scanned
            layer = sharding.all_gather_layer(layer, copies, layer_cuts, collectives)
            return recompute_check.fingerprint_gradient(layer, mark)

        return (stacked, sharding.prefetch_layers(stacked, layer_cuts, collectives)), gather_layer

    return outside, loop._replace(gather=gather)


def row_noise(micro: Batch, key: jax.Array) -> layers.Noise:
    """Returns the dropout keys of `dropout_rng=threefry8`, a function of the rows' numbers."""
    noise = layers.RowNoise.of(key, micro["rows"])
    if "tokens" in micro:  # texts share rows, see `embeddings.packing`
        numbers = micro["places"] // micro["tokens"].shape[1]
        return layers.TextNoise(noise.keys, numbers, micro["positions"])
    return noise


def _count_filled(micro: Batch) -> jax.Array:
    """Returns (tokens without padding, positions) of a batch, float32 [2]."""
    real = micro["input_mask"].astype(jnp.float32)
    return jnp.stack([real.sum(), jnp.float32(real.size)])


def _accumulate(
    gradient: Callable[[Batch, jax.Array], tuple[Any, Metrics]], batch: Batch, parts: int
) -> tuple[Any, Metrics]:
    """Sums gradients and metrics over consecutive parts of the shard's rows."""
    if parts == 1:
        return gradient(batch, jnp.zeros([], jnp.int32))
    micro = _split_rows(batch, parts)
    shapes = jax.eval_shape(gradient, jax.tree.map(lambda x: x[0], micro), jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(sums: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, gradient(*part)), None

    return lax.scan(body, zeros, (micro, jnp.arange(parts)))[0]


def _accumulate_compared(
    objective: ComparingObjective,
    run: Callable[..., Any],
    params: Any,
    batch: Batch,
    parts: int,
    total: Counts,
) -> tuple[Any, Metrics]:
    """Sums gradients over parts of rows that are compared with each other (Gao et al. 2021).

    The vectors of all parts are computed first, without saving activations. The gradient of the
    loss by the vectors is computed for all parts at once; then the gradient of the vectors by the
    parameters, part by part, with the same noise. So activations take the memory of one part.
    """
    micro, numbers = _split_rows(batch, parts), jnp.arange(parts)
    compute_vectors = functools.partial(run, params, objective.vectors)
    vectors = lax.map(lambda part: compute_vectors(*part), (micro, numbers))

    def loss(vectors: jax.Array, params: Any) -> tuple[jax.Array, Metrics]:
        flat = vectors.reshape(-1, *vectors.shape[2:])
        metrics = run(params, functools.partial(objective.compare, flat), batch, numbers[0])
        return objective.loss(metrics, total), metrics | {"filled": _count_filled(batch)}

    (by_vectors, by_params), metrics = jax.grad(loss, argnums=(0, 1), has_aux=True)(vectors, params)

    def body(sums: Any, part: tuple[Batch, jax.Array, jax.Array]) -> tuple[Any, None]:
        rows, number, cotangent = part
        _, pull_back = jax.vjp(lambda params: run(params, objective.vectors, rows, number), params)
        return jax.tree.map(jnp.add, sums, *pull_back(cotangent)), None

    return lax.scan(body, by_params, (micro, numbers, by_vectors))[0], metrics


def _split_rows(batch: Batch, parts: int) -> Batch:
    """Returns consecutive parts of a shard's rows: [B, ...] -> [parts, B / parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
