"""Other ways of exchanging the same: sums in another order, state cut in another order of axes."""

import functools

import jax
import ml_dtypes
import numpy as np
import pytest
import samples
from compare import assert_identical
from jax.sharding import PartitionSpec
from small_run import on_eight, saves_in

from bert_jax.config import Model, Parallelism
from bert_jax.model import heads
from bert_jax.training import collectives, sharding, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.collectives import Collectives, Method
from bert_jax.training.objective import Pretraining

RING = Method(gather="at_once", scatter="ring", order="balanced")
# Meshes of four devices, and of eight.
GRIDS = {4: ((4,), (2, 2)), 8: ((8,), (2, 4), (2, 2, 2))}


@functools.cache
def grid(*sizes: int) -> jax.sharding.Mesh:
    names = tuple(f"data_{n}" for n in range(len(sizes)))
    devices = np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes)
    return jax.sharding.Mesh(devices, names)


@pytest.mark.parametrize("size", range(1, 17))
def test_a_folded_ring_loads_each_link_of_a_line_once(size):
    ring = collectives.folded_ring(size)
    assert sorted(ring) == list(range(size))
    passed = [
        (at, at + step)
        for source, target in zip(ring, ring[1:] + ring[:1], strict=True)
        for step in [1 if target > source else -1]
        for at in range(source, target, step)
    ]
    assert len(passed) == len(set(passed)) == 2 * (size - 1)


def summed_in_order(gradients: np.ndarray, dtype: type) -> np.ndarray:
    """The parts [devices, devices, ...] that devices keep, added up one by one round the ring."""
    size = len(gradients)
    ring = collectives.folded_ring(size)
    parts = []
    for device in range(size):
        first = ring.index(device) + 1
        total = np.zeros((), dtype)
        for source in ring[first:] + ring[:first]:
            total = (total + gradients[source, device].astype(dtype)).astype(dtype)
        parts.append(total)
    return np.stack(parts)


@pytest.mark.parametrize("width", [3, 128], ids=["plain", "kernel"])
@pytest.mark.parametrize("reduction", ["float32", "bfloat16"])
def test_a_ring_adds_up_in_the_reduction_type(reduction, width):
    """Bit for bit: one device's share after another's is added, and what is sent on is rounded."""
    gradients = np.random.default_rng(0).normal(size=(4, 4 * 16, width)).astype(np.float32)
    how = Collectives(("data_0",), "float32", reduction, RING)
    spec = PartitionSpec("data_0")
    run = jax.jit(
        jax.shard_map(
            lambda g: collectives.reduce_scatter(g[0], 0, how),
            mesh=grid(4),
            in_specs=spec,
            out_specs=spec,
            check_vma=False,
        )
    )
    dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[reduction]
    # The last sum, which is not sent, may be more exact.
    expected = summed_in_order(gradients.reshape(4, 4, 16, width), dtype)
    assert_identical(np.asarray(run(gradients)).astype(dtype), expected.reshape(64, width))


def check_grids(devices: int) -> None:
    """Each way gives what the plain one gives, along each order of axes and each dimension."""
    random = np.random.default_rng(0)
    for sizes in GRIDS[devices]:
        mesh = grid(*sizes)
        axes = mesh.axis_names
        for order in (axes, axes[::-1]):
            for dimension in (0, 1):
                cut = PartitionSpec(*[None] * dimension, order)
                found = []
                gradients = random.normal(size=(devices, 16, 24)).astype(np.float32)
                for method in (Method(), RING):
                    how = Collectives(order, "bfloat16", "float32", method)

                    def both(shard, gradient, how=how, dimension=dimension):
                        whole, back = jax.vjp(
                            lambda s: collectives.all_gather(s, dimension, how), shard
                        )
                        return whole, back(gradient[0])[0]

                    run = jax.shard_map(
                        both,
                        mesh=mesh,
                        in_specs=(cut, PartitionSpec(axes)),
                        out_specs=(PartitionSpec(), cut),
                        check_vma=False,
                    )
                    found.append(jax.device_get(jax.jit(run)(gradients[0], gradients)))
                (whole, mine), (other_whole, other_mine) = found
                assert_identical(other_whole, whole)
                assert_identical(whole, gradients[0].astype(ml_dtypes.bfloat16).astype(np.float32))
                exact = gradients.astype(np.float64).sum(axis=0)
                np.testing.assert_allclose(mine, exact, rtol=0, atol=2e-6)
                np.testing.assert_allclose(other_mine, exact, rtol=0, atol=2e-6)


def test_ring_and_joint_gather_equal_the_plain_ones_on_four_devices():
    check_grids(4)


@pytest.mark.long
def test_ring_and_joint_gather_equal_the_plain_ones_on_eight_devices():
    on_eight("import test_collectives; test_collectives.check_grids(8)")


@pytest.fixture
def torus(monkeypatch):
    """Sets how this machine's devices, as a torus of 2 x 2, exchange what they do."""
    monkeypatch.setattr(mesh_lib, "_torus", lambda devices: np.array(devices).reshape(2, 2))

    def use(method: Method) -> None:
        monkeypatch.setitem(collectives.METHODS, "cpu", method)
        forget()

    def forget() -> None:
        step.make_train_step.cache_clear()
        step.abstract_state.cache_clear()

    yield use
    forget()


def test_a_step_is_compiled_with_its_devices_options(torus, monkeypatch):
    torus(Method(compiler_options=(("one", True),)))
    seen = []
    monkeypatch.setattr(jax, "jit", lambda function, **kwargs: seen.append(kwargs))
    mesh = samples.mesh_of(4, Parallelism())
    spec = step.StepSpec(Pretraining(samples.MODEL), samples.OPTIMIZER, Parallelism(), 1, mesh)
    for further, expected in [((), {"one": True}), ((("two", 2),), {"one": True, "two": 2})]:
        step.make_train_step(spec, 100, further)
        assert seen.pop()["compiler_options"] == expected
    layout = Parallelism(state="zero3", slices=2)
    spec = spec._replace(parallelism=layout, mesh=samples.mesh_of(4, layout))
    step.make_train_step(spec, 100)
    assert dict(collectives._SLICE_OPTIONS).items() < seen.pop()["compiler_options"].items()


@pytest.mark.long
@pytest.mark.parametrize("slices", [(1, 1), (2, 1), (2, 4)])
def test_a_checkpoint_is_restored_in_another_order_of_axes(slices, torus, tmp_path):
    """Or on another number of slices."""
    objective, abstract = Pretraining(samples.MODEL), []
    for order, cut in zip(("outermost", "innermost"), slices, strict=True):
        torus(Method(order=order))
        parallelism = Parallelism(state="zero3", slices=cut)
        mesh = samples.mesh_of(4, parallelism)
        abstract.append(step.abstract_state(objective, samples.OPTIMIZER, parallelism, mesh))
    places = [jax.tree.map(lambda leaf: leaf.sharding, one) for one in abstract]
    assert places[0] != places[1]
    state = jax.device_put(step.init_state(objective, samples.OPTIMIZER, 0), places[0])
    with saves_in(tmp_path) as saved:
        saved.save(7, state, {})
        saved.wait()
        restored = saved.checkpoints.restore(7, abstract[1])
    assert jax.tree.map(lambda leaf: leaf.sharding, restored.state) == places[1]
    assert_identical(jax.device_get(restored.state), jax.device_get(state))


@pytest.mark.long
@pytest.mark.parametrize("sizes", [(2, 2), (2, 1, 2)])
def test_each_axis_gets_its_share_of_a_layer(sizes, monkeypatch):
    """Of LARGE's matrices: 4 of the width squared, 2 of four times as much; and of the others."""
    monkeypatch.setitem(collectives.METHODS, "cpu", RING)
    large = Model(
        hidden_size=1024, num_attention_heads=16, num_hidden_layers=2, intermediate_size=4096
    )
    shapes = jax.eval_shape(lambda: heads.init_params(large, jax.random.key(0)))
    mesh = grid(*sizes)
    tree = sharding.partitions(shapes, Parallelism(state="zero3"), mesh, Pretraining(large).rules)
    load = dict.fromkeys(mesh.axis_names, 0)
    for leaf, cut in zip(
        jax.tree.leaves(shapes["encoder"]["layers"]),
        jax.tree.leaves(
            tree["encoder"]["layers"], is_leaf=lambda x: isinstance(x, sharding.Partition)
        ),
        strict=True,
    ):
        if cut.data is None:
            assert cut.axes == ()
        else:
            assert sorted(cut.axes) == list(mesh.axis_names)
            load[cut.axes[0]] += leaf.size
    # A layer has two matrices as large as four others together: 6 and 6, or 4, 4 and 4.
    assert len(set(load.values())) == 1
    outside = {
        tree["pooler"]["kernel"].axes,
        tree["encoder"]["embeddings"]["word"]["embedding"].axes,
    }
    assert len(outside) == 2
