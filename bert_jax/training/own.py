"""Code of an experiment's own, checked before anything runs: shapes and types alone are computed.

What is asked of an objective is `training.objective.Objective`, of an encoder
`model.kinds.OwnEncoder`. Every error is one line, which names the file and the function at fault.
"""

import contextlib
import pathlib
import traceback
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from bert_jax.config import Experiment, Model
from bert_jax.config.code import Reference
from bert_jax.errors import InputError
from bert_jax.model import heads, layers
from bert_jax.model.encoder import Loop, padded_vocab_size
from bert_jax.model.kinds import OwnEncoder, attention_probabilities, encode, encoder_of
from bert_jax.training import objective as objective_lib
from bert_jax.training import sharding
from bert_jax.training.objective import Batch, Objective
from bert_jax.training.step import row_noise

_ATTRIBUTES = ("model", "metrics", "losses", "rules", "init_params", "forward", "counts", "loss")


def require_sound(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError unless an experiment's own objective and encoder keep to their protocols.

    Of an experiment without any nothing is looked at.
    """
    if experiment.model.code:
        _Check(experiment.model.code).encoder(experiment.model)
    if experiment.data.code:
        _Check(experiment.data.code).objective(experiment, mesh)


class _Check:
    """A function of a file, named in errors."""

    def __init__(self, reference: str):
        self._reference = Reference.parse(reference)

    def encoder(self, model: Model) -> None:
        """Raises InputError unless the function gives an `OwnEncoder` that keeps to its shapes."""
        with self._asking(""):
            own = encoder_of(model)
            self._require(isinstance(own, OwnEncoder), "", "does not return an OwnEncoder")
        with self._asking(".encoder"):
            params = jax.eval_shape(lambda: heads.init_params(model, jax.random.key(0)))
        tree, table = params["encoder"], (padded_vocab_size(model), model.hidden_size)
        try:
            held = tree["embeddings"]["word"]["embedding"].shape
            stacked = {leaf.shape[0] for leaf in jax.tree.leaves(tree["layers"])}
        except (KeyError, TypeError, IndexError):
            held, stacked = (), set()
        count = model.num_hidden_layers
        self._require(
            held == table and stacked == {count},
            ".encoder",
            f"needs embeddings.word.embedding {list(table)} and layers stacked [{count}, ...]",
        )
        b, s, d = 2, 8, model.hidden_size
        ids = jax.ShapeDtypeStruct((b, s), jnp.int32)
        for outputs, wanted in (("last", (b, s, d)), ("all", (count + 1, b, s, d))):

            def hidden(params: Any, ids: jax.Array, outputs: Any = outputs) -> jax.Array:
                encoder = heads.merge(model, params).encoder
                return encode(encoder, model, ids, ids, ids, None, Loop(), outputs)

            with self._asking(".encode"):
                given = jax.eval_shape(hidden, params, ids)
            self._require_array(given, wanted, model.compute_dtype, f".encode(outputs={outputs!r})")

        def maps(params: Any, hidden: jax.Array) -> jax.Array:
            return attention_probabilities(heads.merge(model, params).encoder, model, hidden)

        with self._asking(".attention_probabilities"):
            given = jax.eval_shape(maps, params, jax.ShapeDtypeStruct((count, s, d), jnp.float32))
        wanted = (count, model.num_attention_heads, s, s)
        self._require_array(given, wanted, "float32", ".attention_probabilities")

    def objective(self, experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError unless the function gives an `Objective` for all batches of a run."""
        model = experiment.model
        with self._asking(""):
            objective = objective_lib.of(model, experiment.data)
        for name in _ATTRIBUTES:
            self._require(hasattr(objective, name), "", f"gives no {name}; see Objective")
        try:
            same = objective == objective_lib.of(model, experiment.data) and hash(objective)
        except TypeError:
            same = None
        self._require(same is not None, "", "is not hashable; make it a frozen dataclass")
        self._require(
            bool(objective.losses) and set(objective.losses) <= set(objective.metrics),
            ".losses",
            "must be some of the metrics",
        )
        with self._asking(".init_params"):
            params = jax.eval_shape(lambda: objective.init_params(jax.random.key(0)))
        whole = jax.eval_shape(lambda: heads.init_params(model, jax.random.key(0)))
        self._require(isinstance(params, dict), ".init_params", "must return a dict")
        for name in whole:
            self._require(
                (name != "encoder" and name not in params)
                or _shapes(params.get(name)) == _shapes(whole[name]),
                ".init_params",
                f"[{name!r}] must be as model.heads.init_params has it for this model",
            )
        wrong = [leaf.dtype for leaf in jax.tree.leaves(params) if leaf.dtype != jnp.float32]
        self._require(not wrong, ".init_params", f"must be float32, there is {wrong[:1]}")
        with self._asking(".rules"):
            sharding.partitions(params, experiment.parallelism, mesh, objective.rules)
        for number, phase in enumerate(experiment.phases):
            objective = objective_lib.of(experiment.model_of(number), experiment.data)
            batch = objective_lib.abstract_batch(phase, experiment.data)
            self._step(objective, params, batch)

    def _step(self, objective: Objective, params: Any, batch: Batch) -> None:
        with self._asking(".counts"):
            counts = jax.eval_shape(objective.counts, batch)
        self._require(
            isinstance(counts, tuple)
            and [getattr(count, "shape", None) for count in counts] == [()] * len(objective.losses),
            ".counts",
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
            with self._asking(".forward"):
                metrics = jax.eval_shape(forward, params, batch, key)
            self._require(
                isinstance(metrics, dict) and set(metrics) == set(objective.metrics),
                ".forward",
                f"must return {', '.join(objective.metrics)}",
            )
            for name, pair in metrics.items():
                self._require_array(pair, (2,), "float32", f".forward()[{name!r}]")
        with self._asking(".loss"):
            loss = jax.eval_shape(objective.loss, metrics, counts)
        self._require_array(loss, (), "float32", ".loss")

    def _require_array(self, given: Any, shape: tuple[int, ...], dtype: str, part: str) -> None:
        is_it = getattr(given, "shape", None) == shape and given.dtype == dtype
        is_now = f"{given.dtype} {list(given.shape)}" if hasattr(given, "shape") else repr(given)
        self._require(is_it, part, f"must be {dtype} {list(shape)}, not {is_now}")

    def _require(self, holds: bool, part: str, why: str) -> None:
        if not holds:
            raise InputError(f"{self._reference.file}: {self._reference.function}(){part}: {why}")

    @contextlib.contextmanager
    def _asking(self, part: str) -> Iterator[None]:
        """Names the file, its line and the part of what it gives in any error."""
        file, function = self._reference.file, self._reference.function
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            frames = traceback.extract_tb(error.__traceback__)
            ours = [f.lineno for f in frames if pathlib.Path(f.filename).name == file]
            line = f":{ours[-1]}" if ours else ""
            why = (str(error).splitlines() or [""])[0]
            raise InputError(
                f"{file}{line}: {function}(){part}: {type(error).__name__}: {why}"
            ) from error


def _shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.shape, tree)
