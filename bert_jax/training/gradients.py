"""Computes the gradient of a step inside its `shard_map`.

A shard here is the part of the batch on one device, or on the devices along `tensor`. Each shard
goes through its micro-batches, and one reduction adds up the gradients of all shards. Collectives
are explicit, so the compiler need not infer them.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from bert_jax.config import Optimizer, Parallelism
from bert_jax.model import cudnn_attention, layers, losses
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

        `fixed` are frozen parameters. The losses are divided by `objective.counts` of the whole
        batch, so gradients of micro-batches and shards need only be added. But
        `clip="per_replica"` reproduces google-research/bert on `reference_replicas` TPU cores: each
        core divides by its own counts and clips its own gradient, and the cores' gradients are
        added without division by their number.
        """
        spec, axes = self.spec, mesh_lib.batch_axes(self.spec.mesh)
        per_replica = spec.optimizer.clip == "per_replica"
        total = None if per_replica else lax.psum(spec.objective.counts(batch), axes)
        if spec.parallelism.state == "zero1":
            params = sharding.all_gather_params(params, self.partition, self._collectives)
        # `mark` is an input that changes nothing. `recompute_check.fingerprint_gradient` makes the
        # gradient with respect to it a fingerprint of the gradient of this shard's rows.
        mark = None if other is None else jnp.zeros(4)

        def call(
            params_and_mark: Any, method: Callable[..., Any], micro: Batch, number: jax.Array
        ) -> Any:
            """Calls a method of the objective for the micro-batch with this number."""
            params, loop = self._prepare_params(*params_and_mark)
            noise: layers.Noise
            if spec.objective.model.dropout_rng == "threefry8":
                noise = row_noise(micro, key)
            else:
                numbers = step, number, lax.axis_index(axes)
                noise = layers.ShardNoise(functools.reduce(jax.random.fold_in, numbers, key))
            return method(params, fixed, micro, noise, loop)

        sum_gradients = functools.partial(self._sum_micro_batches, call, (params, mark), total)
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

    def _prepare_params(self, params: Any, mark: jax.Array | None) -> tuple[Any, Loop]:
        """Returns whole parameters and the loop over layers; with `zero3` it gathers each layer."""
        model, parallelism = self.spec.objective.model, self.spec.parallelism
        # The compiler cannot partition a kernel over the devices that share a row.
        has_kernels = model.dropout_rng == "in_kernel" and parallelism.tensor == 1
        kernels = BY_DEVICE.get(mesh_lib.device_kind(self.spec.mesh)) if has_kernels else None
        refusal = cudnn_attention.refusal(model, self.spec.mesh.devices.flat[0], parallelism)
        layer_loop = mesh_lib.layer_loop(parallelism, self.spec.mesh)
        token_loss = mesh_lib.token_loss(model, self.spec.mesh)
        loop = Loop(parallelism.remat, layer_loop, kernels, refusal is None, token_loss)
        if parallelism.state == "zero3":
            return gather_outside_layers(params, self.partition, self._collectives, loop, mark)
        return recompute_check.fingerprint_gradient(params, mark), loop

    def _sum_micro_batches(
        self, call: Callable[..., Any], params_and_mark: Any, total: Counts | None, batch: Batch
    ) -> tuple[Any, Metrics]:
        """Returns ((gradient, sum of gradients' fingerprints), metrics) of the shard's rows.

        `call` is the function in `gradients`. `total` are the denominators of the losses; None:
        each micro-batch has its own.
        """
        objective, optimizer = self.spec.objective, self.spec.optimizer

        def differentiate(micro: Batch, number: jax.Array) -> tuple[Any, Metrics]:
            counts = objective.counts(micro) if total is None else total

            def loss(params_and_mark: Any) -> tuple[jax.Array, Metrics]:
                metrics = call(params_and_mark, objective.forward, micro, number)
                return objective.loss(metrics, counts), metrics | {"filled": _count_filled(micro)}

            (gradient, fingerprint), metrics = jax.grad(loss, has_aux=True)(params_and_mark)
            if total is None:
                gradient, _ = optimizer_lib.clip(gradient, optimizer.clip_norm)
            return (gradient, fingerprint), metrics

        parts = self.spec.accumulation
        if total is None:
            parts = optimizer.reference_replicas // mesh_lib.batch_shards(self.spec.mesh)
        if parts > 1 and hasattr(objective, "compare"):
            assert total is not None  # an objective with `compare` has clip=global
            comparing = cast(ComparingObjective, objective)
            return _accumulate_compared(comparing, call, params_and_mark, batch, parts, total)
        return _accumulate(differentiate, batch, parts)

    def _reduce(self, gradient: Any) -> Any:
        """Sums the gradient over all shards; each device keeps its shards of sharded parameters."""
        state, collectives = self.spec.parallelism.state, self._collectives
        if state == "replicated":
            axes = mesh_lib.batch_axes(self.spec.mesh)
            return sharding.all_reduce_gradients(gradient, collectives._replace(axes=axes))
        if state == "zero1":
            gradient = sharding.reduce_scatter_gradients(gradient, self.partition, collectives)
        # With `zero3` the backward pass of each gather has reduce-scattered the gradient.
        return sharding.finish_reduction(gradient, self.partition, collectives)


def gather_outside_layers(
    params: Any, partition: Any, collectives: Collectives, loop: Loop, mark: jax.Array | None = None
) -> tuple[Any, Loop]:
    """Gathers the parameters outside of layers; returns them and a loop that gathers each layer.

    With a mark every gathered parameter goes through `recompute_check.fingerprint_gradient`.
    """

    def split(tree: Any) -> tuple[Any, Any]:
        encoder = dict(tree["encoder"])
        return encoder.pop("layers"), tree | {"encoder": encoder}

    (layers, outside), (layer_cuts, outside_cuts) = split(params), split(partition)
    outside = sharding.all_gather_params(outside, outside_cuts, collectives)
    outside = recompute_check.fingerprint_gradient(outside, mark)
    outside["encoder"]["layers"] = layers

    def gather(stacked: Any) -> tuple[Any, Callable[[Any], Any]]:  # see `Loop.gather`
        def gather_layer(scanned: Any) -> Any:
            layer, prefetched = scanned
            layer = sharding.all_gather_layer(layer, prefetched, layer_cuts, collectives)
            return recompute_check.fingerprint_gradient(layer, mark)

        return (stacked, sharding.prefetch_layers(stacked, layer_cuts, collectives)), gather_layer

    return outside, loop._replace(gather=gather)


def row_noise(micro: Batch, key: jax.Array) -> layers.Noise:
    """Returns the `threefry8` noise, a function of the rows' numbers in the phase."""
    noise = layers.RowNoise.of(key, micro["rows"])
    if "row_indices" in micro:  # texts share rows, see `embeddings.packing`
        slot_length = micro["row_indices"].shape[1]
        numbers = micro["slot_indices"] // slot_length  # of each token's text
        return layers.TextNoise(noise.keys, numbers, micro["positions"])
    return noise


def _count_filled(micro: Batch) -> jax.Array:
    """Returns (tokens without padding, positions) of a batch, float32 [2]."""
    real = micro["input_mask"].astype(jnp.float32)
    return jnp.stack([real.sum(), jnp.float32(real.size)])


def _accumulate(
    differentiate: Callable[[Batch, jax.Array], tuple[Any, Metrics]], batch: Batch, parts: int
) -> tuple[Any, Metrics]:
    """Sums gradients and metrics over consecutive parts of the shard's rows."""
    if parts == 1:
        return differentiate(batch, jnp.zeros([], jnp.int32))
    micro = _split_rows(batch, parts)
    shapes = jax.eval_shape(differentiate, jax.tree.map(lambda x: x[0], micro), jnp.int32(0))
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

    def body(sums: Any, part: tuple[Batch, jax.Array]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, differentiate(*part)), None

    return lax.scan(body, zeros, (micro, jnp.arange(parts)))[0]


def _accumulate_compared(
    objective: ComparingObjective,
    call: Callable[..., Any],
    params_and_mark: Any,
    batch: Batch,
    parts: int,
    total: Counts,
) -> tuple[Any, Metrics]:
    """Sums gradients over micro-batches whose rows are compared with each other.

    This is gradient caching (Gao et al. 2021) for a contrastive loss. The vectors of all rows are
    computed first, without saving activations. The gradient with respect to the vectors is computed
    for all rows at once, and so is that of parameters which the comparison itself uses. The
    gradient from the vectors to the parameters follows, one micro-batch after the other, with the
    same noise. So activations take the memory of one micro-batch.
    """
    micro, numbers = _split_rows(batch, parts), jnp.arange(parts)
    compute_vectors = functools.partial(call, params_and_mark, objective.vectors)
    vectors = lax.map(lambda part: compute_vectors(*part), (micro, numbers))

    def loss(vectors: jax.Array, params_and_mark: Any) -> tuple[jax.Array, Metrics]:
        compare = functools.partial(objective.compare, vectors.reshape(-1, *vectors.shape[2:]))
        metrics = call(params_and_mark, compare, batch, numbers[0])
        return objective.loss(metrics, total), metrics | {"filled": _count_filled(batch)}

    gradients, metrics = jax.grad(loss, argnums=(0, 1), has_aux=True)(vectors, params_and_mark)
    vectors_gradient, first_sum = gradients

    def body(sums: Any, part: tuple[Batch, jax.Array, jax.Array]) -> tuple[Any, None]:
        rows, number, cotangent = part
        _, pull_back = jax.vjp(lambda p: call(p, objective.vectors, rows, number), params_and_mark)
        return jax.tree.map(jnp.add, sums, *pull_back(cotangent)), None

    return lax.scan(body, first_sum, (micro, numbers, vectors_gradient))[0], metrics


def _split_rows(batch: Batch, parts: int) -> Batch:
    """Returns consecutive parts of a shard's rows: [B, ...] -> [parts, B / parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
