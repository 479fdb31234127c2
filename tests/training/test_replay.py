"""Devices that err and compute on: who is found, by which replay, and what the run does then."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from compare import assert_identical
from jax import lax
from small_run import final_state, pretrain

from bert_jax.config import Parallelism, Run
from bert_jax.errors import InputError, Unavailable
from bert_jax.running.checkpoint import Kept
from bert_jax.training import feed, replay, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

ANY = -1
NONE = {"device": -9, "rows": ANY, "leaf": 0, "place": 0, "bit": 0, "layer": np.nan}


@dataclasses.dataclass(frozen=True)
class Faulty(Pretraining):
    """Flips a bit of one number of a gradient, as `fixed` says, before anything is added up.

    device: along DATA, which errs; rows: the number of the first of the rows it errs with, or ANY;
    leaf, place, bit: of all gradients it sees; layer: of parameters that are gathered layer by
    layer those whose first query weight is this.
    """

    def forward(self, params, fixed, batch, noise, loop):
        errs = lax.axis_index(mesh_lib.axes_here()) == fixed["device"]
        errs &= (fixed["rows"] == ANY) | (fixed["rows"] == batch["rows"][0].astype(jnp.int32))
        gather = loop.gather

        def gathered(layer):
            layer = gather(layer)
            of_layer = layer.query.kernel[...].ravel()[0] == fixed["layer"]
            return passing(layer, fixed, errs & of_layer)

        params = passing(params, fixed, errs & jnp.isnan(fixed["layer"]))
        return super().forward(params, None, batch, noise, loop._replace(gather=gathered))


@jax.custom_vjp
def passing(tree, fault, errs):
    return tree


def backward(kept, gradient):
    fault, errs = kept
    leaves, tree = jax.tree.flatten(gradient)
    for number, leaf in enumerate(leaves):
        bits = lax.bitcast_convert_type(leaf, jnp.uint32).ravel()
        flip = (errs & (fault["leaf"] == number)).astype(jnp.uint32) << fault["bit"]
        place = fault["place"] % leaf.size
        bits = bits.at[place].set(bits[place] ^ flip).reshape(leaf.shape)
        leaves[number] = lax.bitcast_convert_type(bits, jnp.float32)
    return jax.tree.unflatten(tree, leaves), None, None


passing.defvjp(lambda tree, fault, errs: (tree, (fault, errs)), backward)


class Bench:
    """A state on some devices, and replays of its first step."""

    def __init__(self, devices, parallelism, **changes):
        optimizer = dataclasses.replace(samples.OPTIMIZER, **changes)
        self.mesh, objective = samples.mesh_of(devices, parallelism), Faulty(samples.MODEL)
        spec = objective, optimizer, parallelism, parallelism.accumulation_of(0)
        abstract = step.abstract_state(objective, optimizer, parallelism, self.mesh)
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
        self.state = jax.device_put(step.init_state(objective, optimizer, 0), places)
        self.replay, self.program = replay.Replay(2, self.mesh), step.make_replay(*spec, self.mesh)
        rows, sharding = np.arange(8), mesh_lib.batch_sharding(self.mesh)
        self.batch = feed.place(samples.train_batches().batch(0, rows), rows, 8, sharding)
        self.key = step.phase_key(samples.MODEL, 0, 0)

    def find(self, *faults):
        """What is raised where the first replay has the first fault, the second the second."""
        left, program = [dict(NONE, **fault) for fault in faults], self.program

        def one(params, fixed, *rest):
            return program(params, left.pop(0), *rest)

        done = self.replay.before(lambda *args: "done", one)
        try:
            return done(self.state, None, self.batch, self.key, None)
        except replay.Erred as erred:
            return [device.id for device in erred.devices], erred.is_sure, erred.is_last


LAYOUTS = {
    "replicated": (4, Parallelism(accumulation=2), {}),
    "zero1": (4, Parallelism(state="zero1"), {}),
    "zero3": (4, Parallelism(state="zero3", remat="dots"), {}),
    "groups": (4, Parallelism(), {"clip": "per_replica", "reference_replicas": 8}),
    "tensor": (4, Parallelism(state="zero3", tensor=2), {}),
}
