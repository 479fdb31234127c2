"""Corruption that computes on: before one step of so many, each device's rows are done twice.

A replay is a program of its own, which changes nothing: every device goes through two batches of
the step to come, the rows of another device and its own. Of each it takes a fingerprint, of the
metrics and of the gradient before devices add theirs up; two that did the same rows must agree to
the bit. So nothing of it may depend on where a row is computed: `model.dropout_rng=threefry8`.

Where two differ, the rows are turned further and all is done once more: a third device says which
of the two erred. Where devices share rows, all of them together are what is called a device here.
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

    It is the sum of theirs, byte by byte. So those of layers and micro-batches add up as gradients
    do, without loss up to 65,536 of them: wherever one bit differs the sum does.
    """
    words = jnp.stack([checksums.sum_of(leaf)[0] for leaf in jax.tree.leaves(tree)])
    return lax.bitcast_convert_type(words, jnp.uint8).astype(jnp.float32).sum(axis=0)


def watched(tree: Any, mark: jax.Array | None) -> Any:
    """Returns the tree; the gradient by `mark`, float32 [4], is the fingerprint of that by it."""
    return tree if mark is None else _watched(tree, mark)


@jax.custom_vjp
def _watched(tree: Any, mark: jax.Array) -> Any:
    del mark
    return tree


_watched.defvjp(
    lambda tree, mark: (tree, None), lambda kept, gradient: (gradient, fingerprint(gradient))
)


def fingerprints(
    summed: Callable[[Batch], Any], other: Batch, batch: Batch, axes: tuple[str, ...]
) -> jax.Array:
    """Returns fingerprints of all shards: float32 [shard, 2, 4], of its batch and of the other.

    `summed` of a batch is ((gradient, fingerprint of those added up), metrics); `axes` are those
    that it is cut along.
    """

    def of(rows: Batch) -> jax.Array:
        (_, seen), metrics = summed(rows)
        return seen + fingerprint(metrics)

    # A loop: both are done by the same instructions.
    both = lax.map(of, jax.tree.map(lambda *x: jnp.stack(x), batch, other))
    return lax.all_gather(both, axes)


@functools.partial(jax.jit, static_argnums=(1, 2))
def rotate_batch(batch: Batch, shift: int, mesh: jax.sharding.Mesh) -> Batch:
    """Returns the batch with each device's rows on that so many shards further."""
    rows = shift * (len(batch["rows"]) // mesh_lib.batch_shards(mesh))
    batch = jax.tree.map(lambda x: jnp.roll(x, rows, axis=0), batch)
    return lax.with_sharding_constraint(batch, mesh_lib.batch_sharding(mesh))


# --- between steps ------------------------------------------------------------------------------


class SilentCorruption(Exception):
    """Devices came to another result of the same rows than others did."""

    def __init__(self, devices: Sequence[jax.Device], is_sure: bool, is_last: bool):
        self.devices = devices
        self.is_sure = is_sure  # else it is one of them
        self.is_last = is_last  # they err again and again: to go on is of no use


def erring(replays: Sequence[tuple[int, np.ndarray]]) -> tuple[list[set[int]], bool]:
    """Returns who erred in each replay of one step, and whether that is sure; else one of them did.

    A replay is (by how many devices the rows were turned, `fingerprints`). What two devices come to
    is right.
    """
    erred, is_sure = [set() for _ in replays], True
    for rows in range(len(replays[0][1])):
        results = collections.defaultdict(list)
        for number, (shift, seen) in enumerate(replays):
            other = (rows + shift) % len(seen)
            results[seen[rows, 0].tobytes()].append((rows, number))
            results[seen[other, 1].tobytes()].append((other, number))
        right = [r for r, done in results.items() if len({device for device, _ in done}) > 1]
        is_sure &= len(right) == 1
        for result, done in results.items():
            for device, number in done if right != [result] else ():
                erred[number].add(device)
    return erred, is_sure


class Replay:
    """The replays of a run on these devices, and which of them erred so far."""

    def __init__(self, mesh: jax.sharding.Mesh):
        self._mesh = mesh
        self._devices = mesh.devices.reshape(mesh_lib.batch_shards(mesh), -1)
        self._named: set[int] = set()  # in this process's life
        self._was_clean = True

    def before(self, train_step: Callable, program: Callable) -> Callable:
        """Returns a step with a replay before it, of `step.make_replay`, which it waits for.

        It raises Erred where devices differ.
        """

        def step(state: Any, window: Any, batch: Batch, key: jax.Array, fixed: Any) -> Any:
            given, replays = (state["params"], fixed, state["step"], batch, key), []
            for shift in (1, 1 if len(self._devices) == 2 else 2):
                other = rotate_batch(batch, shift, self._mesh)
                replays.append((shift, jax.device_get(program(*given, other))))
                erred, is_sure = erring(replays)
                if not any(erred):
                    self._was_clean = True
                    return train_step(state, window, batch, key, fixed)
            raise self._corruption(erred, is_sure)

        return step

    def _corruption(self, erred: list[set[int]], is_sure: bool) -> SilentCorruption:
        places = set().union(*erred)
        always = is_sure and bool(set.intersection(*erred))
        is_last = always or not self._was_clean or bool(places & self._named)
        self._named, self._was_clean = self._named | places, False
        return SilentCorruption(self._devices[sorted(places)].flatten().tolist(), is_sure, is_last)
