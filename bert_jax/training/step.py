"""One training step and one evaluation step, over the devices of a mesh.

The gradient is a `shard_map`, manual over the axes of the batch: see `training.gradients`.

The state is everything that a run remembers:
    step            int32 [], steps done
    params          nested dict, float32
    optimizer       optax state
    skipped_steps   int32 [64], steps that change nothing but `step`; unused entries are -1
    bad_in_a_row    int32 [], bad steps since the last good or skipped one

A step is bad if its loss or gradient is not finite. When `bad_in_a_row` reaches
`optimizer.bad_steps_in_a_row`, the state is latched: steps change nothing, not even `step`, until
the host reads the state and decides what to do.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from bert_jax.config import MAX_SKIPPED_STEPS, Model, Optimizer, Parallelism
from bert_jax.model import cudnn_attention, losses
from bert_jax.model.encoder import Loop
from bert_jax.training import gradients as gradients_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import muon, sharding
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training.collectives import Collectives, CompilerOptions, method_of
from bert_jax.training.gradients import StepSpec
from bert_jax.training.objective import Batch, Objective

State = dict[str, Any]
Metrics = losses.Metrics

_DROPOUT = 0x64726F70
_CACHED_PROGRAMS = 8  # the most compiled steps of each kind that are kept

# Metrics of a step in addition to the objective's, each as (sum, count).
OWN_METRICS = ("gradient_norm", "learning_rate", "filled", "bad_steps")
# An entry of the window (see `make_train_step`): (loss, step) of the step with the highest loss.
WORST_STEP = "worst_step"


def init_state(objective: Objective, optimizer: Optimizer, seed: int) -> State:
    """Returns the state before the first step, which depends only on the seed."""
    params = objective.init_params(jax.random.key(seed, impl="threefry2x32"))
    return {
        "step": jnp.zeros([], jnp.int32),
        "params": params,
        "optimizer": optimizer_lib.make_optimizer(optimizer).init(params),
        "skipped_steps": jnp.full(MAX_SKIPPED_STEPS, -1, jnp.int32),
        "bad_in_a_row": jnp.zeros([], jnp.int32),
    }


@functools.lru_cache
def abstract_state(
    objective: Objective, optimizer: Optimizer, parallelism: Parallelism, mesh: jax.sharding.Mesh
) -> State:
    """Returns shapes, dtypes and shardings of the state without computing it."""
    shapes = jax.eval_shape(lambda: init_state(objective, optimizer, 0))
    replicated = mesh_lib.replicated(mesh)
    partition = sharding.partitions(shapes["params"], parallelism, mesh, objective.rules)
    params = sharding.shardings(partition, mesh)
    shardings = jax.tree.map(lambda _: replicated, shapes) | {
        "params": params,
        "optimizer": sharding.like_params(shapes["optimizer"], params, replicated),
    }
    return jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), shapes, shardings
    )


def empty_window(metrics: tuple[str, ...]) -> Metrics:
    """Returns zero sums of the run's metrics, the window before any steps."""
    return {name: jnp.zeros(2, jnp.float32) for name in (*metrics, *OWN_METRICS, WORST_STEP)}


@functools.lru_cache(maxsize=_CACHED_PROGRAMS)
def make_init(
    objective: Objective, optimizer: Optimizer, parallelism: Parallelism, mesh: jax.sharding.Mesh
) -> Callable[[int], State]:
    """Compiles `seed -> state before the first step`."""
    abstract = abstract_state(objective, optimizer, parallelism, mesh)
    return jax.jit(
        lambda seed: init_state(objective, optimizer, seed),
        out_shardings=jax.tree.map(lambda leaf: leaf.sharding, abstract),
        static_argnums=0,
    )


# This is not a part of `make_init`: if the state does not fit into the devices' memory, a process
# that waits for the other result of the same program waits forever.
@functools.lru_cache(maxsize=_CACHED_PROGRAMS)
def make_empty_window(metrics: tuple[str, ...], mesh: jax.sharding.Mesh) -> Callable[[], Metrics]:
    """Compiles `empty_window`, whole on all devices."""
    return jax.jit(lambda: empty_window(metrics), out_shardings=mesh_lib.replicated(mesh))


def phase_key(model: Model, seed: int, phase: int) -> jax.Array:
    """Returns the key from which a phase draws dropout."""
    impl = "threefry2x32" if model.dropout_rng == "threefry8" else "rbg"
    # _DROPOUT is a large number: the parameters' keys fold small numbers into the same seed.
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=impl), _DROPOUT), phase)


def self_check_options(device_kind: str) -> CompilerOptions:
    """Returns the compiler's options for a step in which a TPU checks its own arithmetic.

    Each operation is repeated and its results are compared; a difference halts the program with an
    error. The values are those of axlearn (`infer_xsc_compiler_options`), without its test of the
    links between chips, which takes minutes to compile.
    """
    one_core = device_kind in ("TPU v5 lite", "TPU v5e", "TPU v6 lite", "TPU v6e", "TPU7x")
    return (
        ("xla_tpu_enable_sdc_checker", True),
        ("xla_tpu_sdc_check_repeat_count", 2),
        ("xla_tpu_sdc_check_halt_on_detection", True),
        # Where no second core can repeat an operation, the instructions are doubled.
        ("xla_tpu_sdc_replicate_llo", one_core),
        ("xla_tpu_sdc_checker_alternate_megacore_cores", True),
    )


# Cached: a run that resumes or rolls back, or the next run of a sweep, need not trace again.
@functools.lru_cache(maxsize=_CACHED_PROGRAMS)
def make_train_step(
    spec: StepSpec, total_steps: int, compiler_options: CompilerOptions = ()
) -> Callable[..., tuple[State, Metrics]]:
    """Compiles `(state, window, batch, phase key, fixed) -> (state, window)`.

    The state and the window are donated. The window has the sums of metrics since it was last
    emptied. `fixed` has the frozen parameters, whole on all devices; it is optional. `total_steps`,
    of all phases, is the schedule's length; `compiler_options` are added to those of the devices'
    `collectives.Method`, see `self_check_options`.
    """
    objective, optimizer, parallelism, _, mesh = spec
    state = abstract_state(objective, optimizer, parallelism, mesh)
    partition = sharding.partitions(state["params"], parallelism, mesh, objective.rules)
    orthogonalize = muon.make_orthogonalize(partition, mesh, objective.model.compute_dtype)
    tx = optimizer_lib.make_optimizer(optimizer, orthogonalize)
    gradients = _map_gradients(spec, partition, (sharding.specs(partition), PartitionSpec()))

    def train_step(
        state: State, window: Metrics, batch: Batch, key: jax.Array, fixed: Any = None
    ) -> tuple[State, Metrics]:
        gradient, metrics = gradients(state["params"], fixed, state["step"], batch, key)
        if optimizer.clip == "global":
            gradient, norm = optimizer_lib.clip(gradient, optimizer.clip_norm)
        else:
            norm = optax.global_norm(gradient)
        rate = optimizer_lib.schedule(optimizer, total_steps, state["step"])
        update, opt_state = tx.update(gradient, state["optimizer"], state["params"])
        params = jax.tree.map(lambda p, u: p - rate * u, state["params"], update)

        new = {"params": params, "optimizer": opt_state}
        new = _restore_idle(new, state, getattr(objective, "idle", ()))
        return _apply_if_good(spec, state, window, _Update(new, metrics, norm, rate))

    out = jax.tree.map(lambda s: s.sharding, state), mesh_lib.replicated(mesh)
    method = method_of(mesh_lib.device_kind(mesh), mesh.shape.get(mesh_lib.SLICE, 1))
    options = dict(method.compiler_options) | dict(compiler_options)
    return jax.jit(
        train_step, donate_argnums=(0, 1), out_shardings=out, compiler_options=options or None
    )


@functools.lru_cache(maxsize=_CACHED_PROGRAMS)
def make_fingerprints(spec: StepSpec) -> Callable[..., jax.Array]:
    """Compiles `(params, fixed, step, batch, phase key, other) -> recompute_check.fingerprints`.

    The fingerprints are those of the gradients of `make_train_step`. `other` is the result of
    `recompute_check.rotate_batch`.
    """
    objective, optimizer, parallelism, _, mesh = spec
    state = abstract_state(objective, optimizer, parallelism, mesh)
    partition = sharding.partitions(state["params"], parallelism, mesh, objective.rules)
    fingerprints = _map_gradients(spec, partition, PartitionSpec(), mesh_lib.batch_spec(mesh))
    method = method_of(mesh_lib.device_kind(mesh), mesh.shape.get(mesh_lib.SLICE, 1))
    return jax.jit(fingerprints, compiler_options=dict(method.compiler_options) or None)


def _map_gradients(
    spec: StepSpec, partition: Any, out: Any, *other: PartitionSpec
) -> Callable[..., Any]:
    """Maps `ShardGradient.gradients` over all shards."""
    whole, rows = PartitionSpec(), mesh_lib.batch_spec(spec.mesh)
    args = (sharding.specs(partition), whole, whole, rows, whole, *other)
    function = gradients_lib.ShardGradient(spec, partition).gradients
    return mesh_lib.map_shards(function, spec.mesh, args, out)


def _restore_idle(new: State, old: State, idle: tuple[str, ...]) -> State:
    """Returns `new` with the old parameters and moments of idle heads.

    Idle heads have no loss in this objective: weight decay must not change them.
    """

    def restore(path: tuple[Any, ...], new_leaf: jax.Array, old_leaf: jax.Array) -> jax.Array:
        # The names are "params" or "optimizer", and then the parameter's path.
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        return old_leaf if names[1:2] and names[1] in idle else new_leaf

    return jax.tree.map_with_path(restore, new, {name: old[name] for name in new})


class _Update(NamedTuple):
    """The outcome of a step, before it is known whether the step is good."""

    state: State  # new `params` and `optimizer`
    metrics: Metrics
    norm: jax.Array  # of the gradient, before clipping
    rate: jax.Array  # learning rate


def _apply_if_good(
    spec: StepSpec, state: State, window: Metrics, update: _Update
) -> tuple[State, Metrics]:
    """Returns the new state if the step is good, else the old; and the window with its metrics.

    A bad step and a step that is listed as skipped are only counted. If the state is latched,
    nothing changes.
    """
    new, metrics, norm, rate = update
    loss = sum(metrics[n][0] / jnp.maximum(metrics[n][1], 1.0) for n in spec.objective.losses)
    finite = jnp.isfinite(norm) & jnp.isfinite(loss)
    included = jnp.all(state["skipped_steps"] != state["step"])
    latched = state["bad_in_a_row"] >= spec.optimizer.bad_steps_in_a_row
    good = finite & included & ~latched
    select = functools.partial(jnp.where, good)
    bad_in_a_row = jnp.where(finite | ~included, 0, state["bad_in_a_row"] + 1)
    next_state = {
        "step": state["step"] + jnp.where(latched, 0, 1),
        "params": jax.tree.map(select, new["params"], state["params"]),
        "optimizer": jax.tree.map(select, new["optimizer"], state["optimizer"]),
        "skipped_steps": state["skipped_steps"],
        "bad_in_a_row": jnp.where(latched, state["bad_in_a_row"], bad_in_a_row),
    }
    one, counted = jnp.ones([]), jnp.where(latched, 0.0, 1.0)
    metrics |= {"gradient_norm": jnp.stack([norm, one]), "learning_rate": jnp.stack([rate, one])}
    # Bad steps do not enter the means.
    added = {name: jnp.where(good, pair, 0.0) for name, pair in metrics.items()}
    added["bad_steps"] = jnp.stack([jnp.where(good, 0.0, counted), counted])
    worst = window[WORST_STEP]
    sums = window | {name: window[name] + pair for name, pair in added.items()}
    current = jnp.stack([loss, state["step"].astype(jnp.float32)])
    return next_state, sums | {WORST_STEP: jnp.where(good & (loss > worst[0]), current, worst)}


@functools.lru_cache(maxsize=_CACHED_PROGRAMS)
def make_eval_step(
    objective: Objective, parallelism: Parallelism, mesh: jax.sharding.Mesh
) -> Callable[[Any, Metrics, Batch], Metrics]:
    """Compiles `(params, sums, batch) -> sums` with the metrics of the batch added."""

    def metrics(*args: Any) -> Metrics:
        return lax.psum(objective.forward(*args), mesh_lib.batch_axes(mesh))

    sharded = _map_without_dropout(objective, metrics, parallelism, mesh, PartitionSpec())

    def eval_step(params: Any, sums: Metrics, batch: Batch) -> Metrics:
        return jax.tree.map(jnp.add, sums, sharded(params, None, batch))

    return jax.jit(eval_step)


def make_rows_step(
    objective: Objective,
    function: Callable[..., jax.Array],
    parallelism: Parallelism,
    mesh: jax.sharding.Mesh,
) -> Callable[[Any, Any, Batch], jax.Array]:
    """Compiles `(params, fixed, batch) -> [B, ...]`, whole on all devices.

    `function` takes the arguments of `Objective.forward` and returns an array for each row.
    """
    rows = _map_without_dropout(objective, function, parallelism, mesh, mesh_lib.batch_spec(mesh))
    return jax.jit(rows, out_shardings=mesh_lib.replicated(mesh))


def _map_without_dropout(
    objective: Objective,
    function: Callable[..., Any],
    parallelism: Parallelism,
    mesh: jax.sharding.Mesh,
    out: PartitionSpec,
) -> Callable[[Any, Any, Batch], Any]:
    """Maps `function` over shards: each computes its rows, without dropout."""
    shapes = jax.eval_shape(lambda: objective.init_params(jax.random.key(0)))
    partition = sharding.partitions(shapes, parallelism, mesh, objective.rules)

    def shard(params: Any, fixed: Any, batch: Batch) -> Any:
        refusal = cudnn_attention.refusal(objective.model, mesh.devices.flat[0], parallelism)
        loop = Loop(
            layers=mesh_lib.layer_loop(parallelism, mesh),
            cudnn=refusal is None,
            token_loss=mesh_lib.token_loss(objective.model, mesh),
        )
        if parallelism.state != "replicated":
            method, dtype = method_of(mesh_lib.device_kind(mesh)), objective.model.compute_dtype
            collectives = Collectives(mesh_lib.data_axes(mesh), dtype, "float32", method)
            params, loop = gradients_lib.gather_outside_layers(params, partition, collectives, loop)
        return function(params, fixed, batch, None, loop)

    args = sharding.specs(partition), PartitionSpec(), mesh_lib.batch_spec(mesh)
    return mesh_lib.map_shards(shard, mesh, args, out)
