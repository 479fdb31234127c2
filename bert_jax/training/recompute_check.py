"""Recompute checks: detect silent data corruption by computing each device's rows twice.

A check is a separate program that runs before every N-th step and changes nothing. Every device
computes the step's gradient for its own rows and for the rows of another device, and a fingerprint
of metrics and gradient before gradients are added up over devices. Two devices with the same rows
must agree to the bit, so no result may depend on the device: `model.dropout_rng=threefry8`.

If two devices differ, the rows are rotated further and computed once more: a third device shows
which of the two is faulty. Devices that share rows count as one device here.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from bert_jax.training import checksums
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Batch

# --- in a step ----------------------------------------------------------------------------------


def fingerprint(tree: Any) -> jax.Array:
    """Returns a checksum of all arrays of a tree: whole numbers, float32 [4].

    It sums the arrays' checksums, byte by byte. So fingerprints of layers and micro-batches add up
    like gradients, exactly for up to 65,536 arrays, and one changed bit changes the sum.
    """
    words = jnp.stack([checksums.array_checksum(leaf)[0] for leaf in jax.tree.leaves(tree)])
    return lax.bitcast_convert_type(words, jnp.uint8).astype(jnp.float32).sum(axis=0)


def fingerprint_gradient(tree: Any, mark: jax.Array | None) -> Any:
    """Returns the tree; its gradient's fingerprint becomes the gradient of `mark`, float32 [4]."""
    return tree if mark is None else _fingerprint_gradient(tree, mark)


@jax.custom_vjp
def _fingerprint_gradient(tree: Any, mark: jax.Array) -> Any:
    del mark
    return tree


_fingerprint_gradient.defvjp(
    lambda tree, mark: (tree, None), lambda residuals, gradient: (gradient, fingerprint(gradient))
)


def fingerprints(
    sum_gradients: Callable[[Batch], Any], other: Batch, batch: Batch, axes: tuple[str, ...]
) -> jax.Array:
    """Returns fingerprints of all shards, float32 [shard, 2, 4]: of a shard's rows and of `other`.

    `sum_gradients` returns ((gradient, sum of gradients' fingerprints), metrics) of a batch; `axes`
    are the axes of the batch.
    """

    def compute(rows: Batch) -> jax.Array:
        (_, gradient_fingerprint), metrics = sum_gradients(rows)
        return gradient_fingerprint + fingerprint(metrics)

    # A loop, so that the same instructions compute both.
    both = lax.map(compute, jax.tree.map(lambda *x: jnp.stack(x), batch, other))
    return lax.all_gather(both, axes)


@functools.partial(jax.jit, static_argnums=(1, 2))
def rotate_batch(batch: Batch, shift: int, mesh: jax.sharding.Mesh) -> Batch:
    """Moves each device's rows `shift` shards further."""
    rows = shift * (len(batch["rows"]) // mesh_lib.batch_shards(mesh))
    batch = jax.tree.map(lambda x: jnp.roll(x, rows, axis=0), batch)
    return lax.with_sharding_constraint(batch, mesh_lib.batch_sharding(mesh))


# --- between steps ------------------------------------------------------------------------------


class SilentCorruption(Exception):
    """Devices computed a result that differs from other devices' result for the same rows."""

    def __init__(self, devices: Sequence[jax.Device], is_sure: bool, is_repeated: bool):
        self.devices = devices
        self.is_sure = is_sure  # False: at least one of the devices is faulty
        self.is_repeated = is_repeated  # the devices fail repeatedly, so the run should not resume


def find_faulty(checks: Sequence[tuple[int, np.ndarray]]) -> tuple[list[set[int]], bool]:
    """Returns the faulty devices in each check of one step, and whether all of them are faulty.

    A check is (the number of shards by which rows were rotated, `fingerprints`). A result that two
    devices agree on is right. If the second value is False, at least one of the devices is faulty.
    """
    faulty, is_sure = [set() for _ in checks], True
    for shard in range(len(checks[0][1])):
        results = collections.defaultdict(list)
        for check, (shift, prints) in enumerate(checks):
            other = (shard + shift) % len(prints)
            results[prints[shard, 0].tobytes()].append((shard, check))
            results[prints[other, 1].tobytes()].append((other, check))
        right = [r for r, runs in results.items() if len({device for device, _ in runs}) > 1]
        is_sure &= len(right) == 1
        for result, runs in results.items():
            for device, check in runs if right != [result] else ():
                faulty[check].add(device)
    return faulty, is_sure


class RecomputeCheck:
    """The recompute checks of a run on these devices, and the devices found faulty so far."""

    def __init__(self, mesh: jax.sharding.Mesh):
        self._mesh = mesh
        self._devices = mesh.devices.reshape(mesh_lib.batch_shards(mesh), -1)
        self._reported: set[int] = set()  # since this process started
        self._was_clean = True

    def wrap_step(self, train_step: Callable, compute_fingerprints: Callable) -> Callable:
        """Wraps the train step so that a check runs first.

        `compute_fingerprints` is the result of `step.make_fingerprints`. The step raises
        SilentCorruption if devices differ.
        """

        def step(state: Any, window: Any, batch: Batch, key: jax.Array, fixed: Any) -> Any:
            args, checks = (state["params"], fixed, state["step"], batch, key), []
            for shift in (1, 1 if len(self._devices) == 2 else 2):
                other = rotate_batch(batch, shift, self._mesh)
                checks.append((shift, jax.device_get(compute_fingerprints(*args, other))))
                faulty, is_sure = find_faulty(checks)
                if not any(faulty):
                    self._was_clean = True
                    return train_step(state, window, batch, key, fixed)
            raise self._corruption(faulty, is_sure)

        return step

    def _corruption(self, faulty: list[set[int]], is_sure: bool) -> SilentCorruption:
        indices = set().union(*faulty)
        always = is_sure and bool(set.intersection(*faulty))
        is_repeated = always or not self._was_clean or bool(indices & self._reported)
        self._reported, self._was_clean = self._reported | indices, False
        devices = self._devices[sorted(indices)].flatten().tolist()
        return SilentCorruption(devices, is_sure, is_repeated)
