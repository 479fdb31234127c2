"""Checks of an experiment's custom code, traced with shapes and types before anything runs.

An objective must follow `training.objective.Objective`, an encoder `model.kinds.OwnEncoder`. Every
error is one line, which names the file and the function or value at fault.
"""

from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import Experiment, Model, code
from bert_jax.errors import InputError
from bert_jax.model import heads, layers
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import OwnEncoder, attention_probabilities, encode, encoder_of
from bert_jax.training import objective as objective_lib
from bert_jax.training import sharding
from bert_jax.training.gradients import row_noise
from bert_jax.training.objective import Batch, Objective


def require_valid(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if a custom objective or encoder does not follow its protocol.

    Checks nothing for an experiment without custom code.
    """
    model, data = experiment.model, experiment.data
    if model.code:
        with code.report_failures(code.path_of(model.code)):
            _trace_encoder(model)
    if data.code:
        with code.report_failures(code.path_of(data.code)):
            objective = objective_lib.pretraining_objective(model, data)
            if hasattr(objective, "compare"):
                _require_comparable(experiment)
            params = _init_params(objective)
            sharding.partitions(params, experiment.parallelism, mesh, objective.rules)
            for number, phase in enumerate(experiment.phases):
                objective = objective_lib.make_objective(experiment, number)
                _trace_step(objective, params, objective_lib.abstract_batch(phase, data))


def _require(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise InputError(f"{name}: {message}")


def _require_comparable(experiment: Experiment) -> None:
    """Raises InputError if settings do not suit an objective that compares rows of a batch."""
    message = "needs the whole batch; set optimizer.clip=global, since per_replica splits batches"
    _require(experiment.optimizer.clip != "per_replica", "compare", message)
    message = "sums over all rows, whose order a recompute check changes; set run.replay_every=0"
    _require(not experiment.run.replay_every, "compare", message)


def _require_array(value: Any, name: str, shape: tuple[int, ...], dtype: str = "float32") -> None:
    fits = getattr(value, "shape", None) == shape and value.dtype == dtype
    actual = f"{value.dtype} {list(value.shape)}" if hasattr(value, "shape") else repr(value)
    _require(fits, name, f"must be {dtype} {list(shape)}, not {actual}")


def _trace_encoder(model: Model) -> None:
    custom = encoder_of(model)
    _require(isinstance(custom, OwnEncoder), model.code.split(":")[1], "must return an OwnEncoder")
    params = jax.eval_shape(lambda: heads.init_params(model, jax.random.key(0)))
    b, s, d, count = 2, 8, model.hidden_size, model.num_hidden_layers

    def run(params: Any, ids: jax.Array) -> list[jax.Array]:
        encoder = heads.build_model(model, params).encoder
        args = (encoder, model, ids, ids, ids, None, Loop())
        return [encode(*args, "last"), encode(*args, "all")]

    def compute_maps(params: Any, hidden: jax.Array) -> jax.Array:
        return attention_probabilities(heads.build_model(model, params).encoder, model, hidden)

    last, every = jax.eval_shape(run, params, jax.ShapeDtypeStruct((b, s), jnp.int32))
    _require_array(last, "encode", (b, s, d), model.compute_dtype)
    _require_array(every, "encode(outputs='all')", (count + 1, b, s, d), model.compute_dtype)
    if custom.attention_probabilities is not None:
        hidden = jax.ShapeDtypeStruct((count, s, d), jnp.float32)
        maps = jax.eval_shape(compute_maps, params, hidden)
        _require_array(maps, "attention_probabilities", (count, model.num_attention_heads, s, s))


def _init_params(objective: Objective) -> Any:
    """Returns the shapes of an objective's parameters, after checks of encoder and heads."""
    hash(objective)  # raises TypeError if it cannot key a cache, as a frozen dataclass can
    _require(set(objective.losses) <= set(objective.metrics), "losses", "must be of the metrics")
    params = jax.eval_shape(lambda: objective.init_params(jax.random.key(0)))
    usual = jax.eval_shape(lambda: heads.init_params(objective.model, jax.random.key(0)))
    for name in usual.keys() & {"encoder", *params}:
        same = jax.tree.map(jnp.shape, params.get(name)) == jax.tree.map(jnp.shape, usual[name])
        _require(same, f"init_params[{name!r}]", "must have the shapes of heads.init_params")
    return params


def _trace_step(objective: Objective, params: Any, batch: dict[str, jax.ShapeDtypeStruct]) -> None:
    counts, number = jax.eval_shape(objective.counts, batch), len(objective.losses)
    are_scalars = jax.tree.map(jnp.shape, counts) == ((),) * number
    _require(are_scalars, "counts", f"must be a tuple of {number} scalars")
    by_row = objective.model.dropout_rng == "threefry8"

    def forward(params: Any, batch: Batch, key: jax.Array | None) -> Any:
        noise: layers.Noise | None = None
        if key is not None:
            noise = row_noise(batch, key) if by_row else layers.ShardNoise(key)
        return objective.forward(params, None, batch, noise, Loop())

    impl = "threefry2x32" if by_row else "rbg"
    for key in (jax.eval_shape(lambda: jax.random.key(0, impl=impl)), None):
        metrics = jax.eval_shape(forward, params, batch, key)
        named = set(metrics) == set(objective.metrics)
        _require(named, "forward", f"must return {', '.join(objective.metrics)}")
        for name, pair in metrics.items():
            _require_array(pair, f"forward[{name!r}]", (2,))
        _require_array(jax.eval_shape(objective.loss, metrics, counts), "loss", ())
