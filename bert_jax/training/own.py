"""Code of an experiment's own, traced before anything runs: with shapes and types alone.

What is asked of an objective is `training.objective.Objective`, of an encoder
`model.kinds.OwnEncoder`. Every error is one line, which names the file and the function at fault.
"""

import pathlib
import traceback
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import Experiment, Model
from bert_jax.errors import InputError
from bert_jax.model import heads, layers
from bert_jax.model.encoder import Loop
from bert_jax.model.kinds import OwnEncoder, attention_probabilities, encode, encoder_of
from bert_jax.training import objective as objective_lib
from bert_jax.training import sharding
from bert_jax.training.objective import Batch, Objective
from bert_jax.training.step import row_noise


def require_sound(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError unless an experiment's own objective and encoder keep to their protocols.

    Of an experiment without any nothing is looked at.
    """
    model, data = experiment.model, experiment.data
    if model.code:
        with _Asking(model.code) as asking:
            _trace_encoder(asking, model)
    if data.code:
        with _Asking(data.code) as asking:
            objective = objective_lib.of(model, data)
            params = _init_params(asking, objective)
            asking.part = ".rules"
            sharding.partitions(params, experiment.parallelism, mesh, objective.rules)
            for number, phase in enumerate(experiment.phases):
                objective = objective_lib.of(experiment.model_of(number), data)
                _trace_step(asking, objective, params, objective_lib.abstract_batch(phase, data))


class _Asking:
    """Names the file, its line, the function and the part of what it gives in any error."""

    def __init__(self, reference: str):
        self._file, self._function, _ = reference.split(":")
        self.part = ""

    def require(self, holds: bool, why: str) -> None:
        if not holds:
            raise InputError(f"{self._file}: {self._function}(){self.part}: {why}")

    def require_array(self, given: Any, shape: tuple[int, ...], dtype: str, what: str = "") -> None:
        is_it = getattr(given, "shape", None) == shape and given.dtype == dtype
        is_now = f"{given.dtype} {list(given.shape)}" if hasattr(given, "shape") else repr(given)
        self.require(is_it, f"{what}must be {dtype} {list(shape)}, not {is_now}")

    def __enter__(self) -> "_Asking":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not isinstance(error, InputError):
            frames = traceback.extract_tb(trace)
            ours = [f.lineno for f in frames if pathlib.Path(f.filename).name == self._file]
            line = f":{ours[-1]}" if ours else ""
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            where = f"{self._file}{line}: {self._function}(){self.part}"
            raise InputError(f"{where}: {why}") from error


def _trace_encoder(asking: _Asking, model: Model) -> None:
    asking.require(isinstance(encoder_of(model), OwnEncoder), "does not return an OwnEncoder")
    asking.part = ".encoder"
    params = jax.eval_shape(lambda: heads.init_params(model, jax.random.key(0)))
    b, s, d, count = 2, 8, model.hidden_size, model.num_hidden_layers

    def hidden(params: Any, ids: jax.Array, outputs: Any) -> jax.Array:
        encoder = heads.merge(model, params).encoder
        return encode(encoder, model, ids, ids, ids, None, Loop(), outputs)

    def maps(params: Any, hidden: jax.Array) -> jax.Array:
        return attention_probabilities(heads.merge(model, params).encoder, model, hidden)

    ids = jax.ShapeDtypeStruct((b, s), jnp.int32)
    asking.part = ".encode"
    for outputs, wanted in (("last", (b, s, d)), ("all", (count + 1, b, s, d))):
        given = jax.eval_shape(lambda p, x, of=outputs: hidden(p, x, of), params, ids)
        asking.require_array(given, wanted, model.compute_dtype, f"(outputs={outputs!r}) ")
    if encoder_of(model).attention_probabilities is None:
        return
    asking.part = ".attention_probabilities"
    given = jax.eval_shape(maps, params, jax.ShapeDtypeStruct((count, s, d), jnp.float32))
    asking.require_array(given, (count, model.num_attention_heads, s, s), "float32")


def _init_params(asking: _Asking, objective: Objective) -> Any:
    """Returns the shapes of an objective's parameters: float32, the model's own as it has them."""
    hash(objective)  # programs are kept by it: a frozen dataclass has one
    known = set(objective.losses) <= set(objective.metrics)
    asking.require(known, "its losses must be some of its metrics")
    asking.part = ".init_params"
    params = jax.eval_shape(lambda: objective.init_params(jax.random.key(0)))
    ours = jax.eval_shape(lambda: heads.init_params(objective.model, jax.random.key(0)))
    for name in ours.keys() & {"encoder", *params}:
        is_same = _shapes(params.get(name)) == _shapes(ours[name])
        asking.require(is_same, f"[{name!r}] must be as heads.init_params has it for this model")
    return params


def _trace_step(asking: _Asking, objective: Objective, params: Any, batch: Batch) -> None:
    asking.part = ".counts"
    counts = jax.eval_shape(objective.counts, batch)
    asking.require(
        isinstance(counts, tuple)
        and [getattr(count, "shape", None) for count in counts] == [()] * len(objective.losses),
        f"must return a tuple of {len(objective.losses)} scalars, one for each of the losses",
    )

    def forward(params: Any, batch: Batch, key: jax.Array | None) -> Any:
        noise: layers.Noise | None = None
        if key is not None:
            fast = objective.model.dropout_rng != "threefry8"
            noise = layers.ShardNoise(key) if fast else row_noise(batch, key)
        return objective.forward(params, None, batch, noise, Loop())

    impl = "threefry2x32" if objective.model.dropout_rng == "threefry8" else "rbg"
    for key in (jax.eval_shape(lambda: jax.random.key(0, impl=impl)), None):
        asking.part = ".forward"
        metrics = jax.eval_shape(forward, params, batch, key)
        asking.require(
            set(metrics) == set(objective.metrics), f"must return {', '.join(objective.metrics)}"
        )
        for name, pair in metrics.items():
            asking.require_array(pair, (2,), "float32", f"[{name!r}] ")
        asking.part = ".loss"
        asking.require_array(jax.eval_shape(objective.loss, metrics, counts), (), "float32")


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.shape, tree)
