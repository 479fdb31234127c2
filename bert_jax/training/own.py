"""Code of an experiment's own, traced before anything runs: with shapes and types alone.

What is asked of an objective is `training.objective.Objective`, of an encoder
`model.kinds.OwnEncoder`. Every error is one line, which names the file and what is at fault.
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


def require_sound(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError unless an experiment's own objective and encoder keep to their protocols.

    Of an experiment without any nothing is looked at.
    """
    model, data = experiment.model, experiment.data
    if model.code:
        with code.failures(code.path_of(model.code)):
            _trace_encoder(model)
    if data.code:
        with code.failures(code.path_of(data.code)):
            objective = objective_lib.of(model, data)
            if hasattr(objective, "compare"):
                _require_comparable(experiment)
            params = _init_params(objective)
            sharding.partitions(params, experiment.parallelism, mesh, objective.rules)
            for number, phase in enumerate(experiment.phases):
                objective = objective_lib.make_objective(experiment, number)
                _trace_step(objective, params, objective_lib.abstract_batch(phase, data))


def _require(holds: bool, what: str, why: str) -> None:
    if not holds:
        raise InputError(f"{what}: {why}")


def _require_comparable(experiment: Experiment) -> None:
    """Raises InputError if settings do not suit an objective that compares rows of a batch."""
    why = "needs the whole batch; set optimizer.clip=global, since per_replica splits batches"
    _require(experiment.optimizer.clip != "per_replica", "compare", why)
    # A replay moves rows to other devices, which changes the order of sums over all rows.
    why = "sums over the rows of all devices, whose order a replay changes; set run.replay_every=0"
    _require(not experiment.run.replay_every, "compare", why)


def _require_array(given: Any, what: str, shape: tuple[int, ...], dtype: str = "float32") -> None:
    is_it = getattr(given, "shape", None) == shape and given.dtype == dtype
    is_now = f"{given.dtype} {list(given.shape)}" if hasattr(given, "shape") else repr(given)
    _require(is_it, what, f"must be {dtype} {list(shape)}, not {is_now}")


def _trace_encoder(model: Model) -> None:
    own = encoder_of(model)
    _require(isinstance(own, OwnEncoder), model.code.split(":")[1], "must return an OwnEncoder")
    params = jax.eval_shape(lambda: heads.init_params(model, jax.random.key(0)))
    b, s, d, count = 2, 8, model.hidden_size, model.num_hidden_layers

    def run(params: Any, ids: jax.Array) -> list[jax.Array]:
        encoder = heads.merge(model, params).encoder
        how = (encoder, model, ids, ids, ids, None, Loop())
        return [encode(*how, "last"), encode(*how, "all")]

    def maps(params: Any, hidden: jax.Array) -> jax.Array:
        return attention_probabilities(heads.merge(model, params).encoder, model, hidden)

    last, every = jax.eval_shape(run, params, jax.ShapeDtypeStruct((b, s), jnp.int32))
    _require_array(last, "encode", (b, s, d), model.compute_dtype)
    _require_array(every, "encode(outputs='all')", (count + 1, b, s, d), model.compute_dtype)
    if own.attention_probabilities is not None:
        given = jax.eval_shape(maps, params, jax.ShapeDtypeStruct((count, s, d), jnp.float32))
        _require_array(given, "attention_probabilities", (count, model.num_attention_heads, s, s))


def _init_params(objective: Objective) -> Any:
    """Returns the shapes of an objective's parameters: float32, the model's own as it has them."""
    hash(objective)  # programs are kept by it: a frozen dataclass has one
    _require(set(objective.losses) <= set(objective.metrics), "losses", "must be of the metrics")
    params = jax.eval_shape(lambda: objective.init_params(jax.random.key(0)))
    ours = jax.eval_shape(lambda: heads.init_params(objective.model, jax.random.key(0)))
    for name in ours.keys() & {"encoder", *params}:
        same = jax.tree.map(jnp.shape, params.get(name)) == jax.tree.map(jnp.shape, ours[name])
        _require(same, f"init_params[{name!r}]", "must be as heads.init_params has it")
    return params


def _trace_step(objective: Objective, params: Any, batch: dict[str, jax.ShapeDtypeStruct]) -> None:
    counts = jax.eval_shape(objective.counts, batch)
    shapes = jax.tree.map(jnp.shape, counts)
    _require(
        shapes == ((),) * len(objective.losses),
        "counts",
        f"must be a tuple of {len(objective.losses)} scalars",
    )
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
