"""State cut over devices: the same run, and a table that errs by name."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import samples
from compare import assert_close
from jax.extend import core
from test_collectives import RING, torus  # noqa: F401
from test_step import assert_same_run, reference  # noqa: F401

from bert_jax.config import Optimizer, Parallelism
from bert_jax.errors import InputError
from bert_jax.model import heads, losses
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import sharding, step
from bert_jax.training.collectives import Method
from bert_jax.training.objective import Pretraining

STEPS = 10
KERNEL = ("encoder", "layers", "query", "kernel")


@pytest.mark.long
@pytest.mark.parametrize(
    "method",
    [RING, Method(order="innermost"), RING._replace(order="cores_first")],
    ids=lambda m: m.order,
)
def test_a_run_is_the_same_however_state_travels(method, torus, reference):  # noqa: F811
    """On 2 x 2 devices, against one that holds everything; with dropout."""
    torus(method)
    parallelism = Parallelism(state="zero3")
    assert_same_run(samples.run(STEPS, devices=4, parallelism=parallelism), reference)


MUON = Optimizer(name="muon", peak_learning_rate=1e-3, warmup_steps=2)


@pytest.fixture(scope="module")
def orthogonal():
    return samples.run(STEPS, optimizer=MUON)


@pytest.mark.parametrize(
    ("setting", "platform", "devices", "expected"),
    [
        ("auto", "cpu", 1, "unroll"),
        ("auto", "cpu", 2, "scan"),
        ("auto", "tpu", 1, "scan"),
        ("scan", "cpu", 1, "scan"),
        ("unroll", "tpu", 4, "unroll"),
    ],
)
def test_layers_are_unrolled_by_default_on_a_single_cpu(setting, platform, devices, expected):
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(devices=np.array([device] * devices), size=devices)
    assert mesh_lib.layer_loop(Parallelism(layer_loop=setting), mesh) == expected


@pytest.mark.parametrize(
    ("dtype", "platform", "devices", "expected"),
    [
        ("bfloat16", "cpu", 1, "by_chunk"),
        ("float32", "cpu", 1, "all_logits"),
        ("bfloat16", "cpu", 2, "all_logits"),
        ("bfloat16", "tpu", 1, "all_logits"),
    ],
)
def test_the_token_loss_is_computed_in_chunks_where_that_is_faster(
    dtype, platform, devices, expected
):
    device = types.SimpleNamespace(platform=platform)
    mesh = types.SimpleNamespace(devices=np.array([device] * devices), size=devices)
    model = dataclasses.replace(samples.MODEL, compute_dtype=dtype)
    assert mesh_lib.token_loss(model, mesh) == expected


@pytest.mark.long
@pytest.mark.parametrize(
    ("devices", "parallelism"),
    [
        (4, Parallelism(state="zero1")),
        pytest.param(2, Parallelism(state="zero3"), marks=pytest.mark.long),
        pytest.param(4, Parallelism(state="zero3", tensor=2), marks=pytest.mark.long),
    ],
    ids=lambda value: value if isinstance(value, int) else f"{value.state}-tensor{value.tensor}",
)
def test_orthogonal_updates_are_the_same_on_any_devices(devices, parallelism, orthogonal):
    """Layers' matrices do not share out evenly over the devices."""
    parted = samples.run(STEPS, devices, optimizer=MUON, parallelism=parallelism)
    assert_same_run(parted, orthogonal, 1e-4)


@pytest.mark.long
def test_orthogonal_updates_are_the_same_in_rings(orthogonal, torus):  # noqa: F811
    torus(RING)
    parallelism = Parallelism(state="zero3")
    parted = samples.run(STEPS, 4, optimizer=MUON, parallelism=parallelism)
    assert_same_run(parted, orthogonal, 1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(state="zero3"),
        pytest.param(Parallelism(state="zero3", tensor=2, remat="dots"), marks=pytest.mark.long),
    ],
    ids=lambda m: m.state,
)
def test_a_modern_encoder_sharded_equals_replicated(parallelism):
    model = dataclasses.replace(
        samples.MODEL,
        kind="modern",
        num_hidden_layers=4,
        local_window=5,
        initialization="scaled",
        output_table="own",
    )
    alone = samples.run(3, model=model)
    assert_same_run(samples.run(3, devices=4, model=model, parallelism=parallelism), alone)


@pytest.mark.long
def test_relative_positions_sharded_equal_replicated():
    model = dataclasses.replace(samples.MODEL, relative_position_buckets=8)
    parallelism = Parallelism(state="zero3", tensor=2, remat="dots")
    alone = samples.run(3, model=model)
    assert_same_run(samples.run(3, devices=4, model=model, parallelism=parallelism), alone)


@pytest.mark.long
@pytest.mark.parametrize("name", ["lamb", "stable_adamw"])
def test_norms_of_tensors_are_those_of_whole_ones(name):
    optimizer = dataclasses.replace(samples.OPTIMIZER, name=name)
    alone = samples.run(3, optimizer=optimizer)
    parallelism = Parallelism(state="zero3", tensor=2)
    assert_same_run(samples.run(3, devices=4, optimizer=optimizer, parallelism=parallelism), alone)


@pytest.mark.parametrize("parallelism", ["zero1", "zero3"])
def test_a_device_holds_its_share_of_parameters_and_moments(parallelism):
    parallelism = Parallelism(state=parallelism, tensor=2)
    mesh = samples.mesh_of(4, parallelism)
    state = step.abstract_state(Pretraining(samples.MODEL), samples.OPTIMIZER, parallelism, mesh)
    moments = jax.tree.leaves_with_path(state["optimizer"])
    cut = [leaf for path, leaf in moments if path[-len(KERNEL) :] == _path(KERNEL)]
    assert len(cut) == 2
    for leaf in [state["params"]["encoder"]["layers"]["query"]["kernel"], *cut]:
        layers_, rows, columns = leaf.shape
        assert leaf.sharding.shard_shape(leaf.shape) == (layers_, rows // 2, columns // 2)
    assert state["step"].sharding.is_fully_replicated


def _path(names):
    return tuple(jax.tree_util.DictKey(name) for name in names)


@pytest.mark.parametrize(
    "parallelism",
    [
        Parallelism(state="zero3"),
        pytest.param(Parallelism(state="zero1", tensor=2), marks=pytest.mark.long),
    ],
)
def test_evaluation_of_cut_parameters_is_that_of_whole_ones(parallelism):
    batch = samples.train_batches().batch(0, np.arange(8))
    params = heads.init_params(samples.MODEL, jax.random.key(0))
    found = []
    for chosen, devices in ((Parallelism(), 1), (parallelism, 4)):
        mesh = samples.mesh_of(devices, chosen)
        zero = {name: jnp.zeros(2) for name in losses.names("mlm_nsp")}
        found.append(
            step.make_eval_step(Pretraining(samples.MODEL), chosen, mesh)(params, zero, batch)
        )
    assert_close(found[1], found[0], 1e-6)


def test_zero1_reduces_once_however_often_it_accumulates():
    """No collective runs more often with more micro-batches; gradients travel layer by layer."""
    layers_ = samples.MODEL.num_hidden_layers
    counts = [_collectives(Parallelism(state="zero1", accumulation=n), n) for n in (1, 4)]
    assert counts[0] == counts[1]
    outside, inside = counts[0]
    assert inside == {"reduce_scatter": 6 * layers_}
    assert outside["reduce_scatter"] + 6 == outside["all_gather"] > 6


def test_zero3_gathers_a_layer_where_it_is_used():
    outside, inside = _collectives(Parallelism(state="zero3"), 1)
    layers_ = samples.MODEL.num_hidden_layers
    assert inside["all_gather"] >= 6 * layers_ and inside["reduce_scatter"] == 6 * layers_
    assert 0 < outside["reduce_scatter"] < 6


def _collectives(parallelism, parts):
    """How often each collective runs outside and inside of loops over layers or micro-batches."""
    mesh = samples.mesh_of(2, parallelism)
    spec = step.StepSpec(Pretraining(samples.MODEL), samples.OPTIMIZER, parallelism, parts, mesh)
    run = step.make_train_step(spec, 100)
    state = step.abstract_state(Pretraining(samples.MODEL), samples.OPTIMIZER, parallelism, mesh)
    batch = samples.train_batches().batch(0, np.arange(8))
    key = step.phase_key(samples.MODEL, 0, 0)
    outside, inside = {}, {}

    def walk(jaxpr, looped, times=1):
        for eqn in jaxpr.eqns:
            name = eqn.primitive.name
            if name in ("all_gather", "reduce_scatter", "psum", "psum_invariant", "all_to_all"):
                counts = inside if looped else outside
                counts[name] = counts.get(name, 0) + times
            rounds = times * (eqn.params["length"] if name == "scan" else 1)
            for value in jax.tree.leaves(
                eqn.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr)
            ):
                if isinstance(value, core.ClosedJaxpr):
                    walk(value.jaxpr, looped or name == "scan", rounds)
                elif isinstance(value, core.Jaxpr):
                    walk(value, looped or name == "scan", rounds)

    walk(
        jax.make_jaxpr(run)(
            state, step.empty_window(Pretraining(samples.MODEL).metrics), batch, key
        ).jaxpr,
        False,
    )
    return outside, inside


# --- the table ---------------------------------------------------------------------------------


RULES = sharding.pretraining_rules(samples.MODEL)


def _cuts(parallelism, rules=RULES, model=samples.MODEL, devices=4):
    shapes = jax.eval_shape(lambda: heads.init_params(model, jax.random.key(0)))
    return sharding.partitions(shapes, parallelism, samples.mesh_of(devices, parallelism), rules)


@pytest.mark.parametrize(
    "fields",
    [
        {"type_vocab_size": 0, "relative_position_buckets": 32},
        {"kind": "modern", "global_every": 1, "output_table": "own"},
    ],
)
def test_parameters_that_only_some_models_have_find_their_rules(fields):
    model = dataclasses.replace(samples.MODEL, **fields)
    for state in ("replicated", "zero3"):
        _cuts(Parallelism(state=state), sharding.pretraining_rules(model), model)


def _word(rule):
    return rule.path.startswith("encoder/embeddings/w")


@pytest.mark.parametrize(
    ("rules", "parallelism", "words"),
    [
        ([r for r in RULES if "pooler" not in r.path], {}, r"pooler/bias.*none"),
        ([*RULES, sharding.Rule("adapter/kernel")], {}, "adapter/kernel"),
        (
            [sharding.Rule(r.path, (0,), 0) if _word(r) else r for r in RULES],
            {"tensor": 2},
            r"encoder/embeddings/word/embedding.*dimension 0",
        ),
    ],
    ids=["no rule", "no parameter", "two axes in one dimension"],
)
def test_a_table_that_does_not_fit_is_named(rules, parallelism, words):
    with pytest.raises(ValueError, match=words):
        _cuts(Parallelism(state="zero1", **parallelism), rules)


def test_what_devices_do_not_divide_is_named():
    model = dataclasses.replace(
        samples.MODEL, hidden_size=36, num_attention_heads=3, intermediate_size=42
    )
    with pytest.raises(InputError, match=r"parallelism.state=zero3: encoder/layers/output/kernel"):
        _cuts(Parallelism(state="zero3"), model=model)
    for tensor in (3, 4):
        with pytest.raises(InputError, match=f"parallelism.tensor={tensor}"):
            samples.mesh_of(4, Parallelism(tensor=tensor))


@dataclasses.dataclass(frozen=True, order=True)
class Chip:
    slice_index: int
    coords: tuple[int, ...]
    core_on_chip: int
    device_kind: str = "TPU v3"


@pytest.mark.parametrize(
    ("sizes", "cores", "layout", "expected"),
    [
        ((1, 8, 8, 1), 1, {}, {"data_0": 8, "data_1": 8}),
        ((1, 4, 4, 1), 2, {}, {"data_0": 4, "data_1": 8}),
        ((1, 2, 2, 4), 1, {}, {"data_0": 2, "data_1": 2, "data_2": 4}),
        ((1, 2, 2, 4), 1, {"tensor": 2}, {"data_0": 2, "data_1": 2, "data_2": 2, "tensor": 2}),
        ((1, 2, 2, 1), 1, {"tensor": 2}, {"data_0": 2, "tensor": 2}),
        ((2, 4, 4, 1), 1, {}, {"slice": 2, "data_0": 4, "data_1": 4}),
        ((2, 4, 4, 1), 1, {"slices": 4}, {"slice": 4, "data_0": 2, "data_1": 4}),
        ((1, 4, 4, 1), 1, {"slices": 8}, {"slice": 8, "data_0": 2}),
        ((2, 4, 4, 1), 1, {"slices": 2, "tensor": 4}, {"slice": 2, "data_0": 4, "tensor": 4}),
        # 4,096 chips of v3, of which LARGE can be cut over 1,024 devices at most.
        ((1, 128, 32, 1), 2, {"slices": 8}, {"slice": 8, "data_0": 16, "data_1": 64}),
        ((2, 4, 4, 1), 1, {"slices": 3}, "parallelism.slices=3"),
        ((4, 2, 2, 1), 1, {"slices": 2}, "parallelism.slices=2"),
    ],
)
def test_axes_are_slices_and_the_dimensions_of_their_torus(sizes, cores, layout, expected):
    places = [(*place, core) for place in np.ndindex(*sizes) for core in range(cores)]
    order = np.random.default_rng(0).permutation(len(places))
    devices = [Chip(places[i][0], places[i][1:-1], places[i][-1]) for i in order]
    if isinstance(expected, str):
        with pytest.raises(InputError, match=expected):
            mesh_lib.make_mesh(Parallelism(**layout), devices)
        return
    mesh = mesh_lib.make_mesh(Parallelism(**layout), devices)
    assert dict(mesh.shape) == expected
    for part in mesh.devices if "slice" in expected else [mesh.devices]:
        assert len({device.slice_index for device in part.flat}) == 1
        assert list(part.flat) == sorted(part.flat)


def test_each_reduction_begins_with_the_cores_of_a_tpu7x_chip():
    devices = [Chip(0, place[:3], place[3], "TPU7x") for place in np.ndindex(2, 2, 1, 2)]
    mesh = mesh_lib.make_mesh(Parallelism(), devices)
    assert dict(mesh.shape) == {"data_0": 2, "data_1": 2, "data_2": 2}
    assert all(first.coords == second.coords for first, second in mesh.devices.reshape(-1, 2))
    shapes = jax.eval_shape(lambda: heads.init_params(samples.MODEL, jax.random.key(0)))
    cuts = sharding.partitions(shapes, Parallelism(state="zero3"), mesh, RULES)
    leaves = jax.tree.leaves(cuts, is_leaf=lambda leaf: isinstance(leaf, sharding.Partition))
    orders = {cut.axes for cut in leaves if cut.axes}
    assert orders == {("data_2", "data_0", "data_1"), ("data_2", "data_1", "data_0")}
