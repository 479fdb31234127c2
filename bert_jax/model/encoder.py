"""What every kind of encoder is made of: tables of vectors, turned positions, stacked layers.

The layers' parameters are stacked along a first dimension L and scanned.

Shape letters: B batch, S sequence, D width, H heads, L layers, V vocabulary.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from bert_jax.config import Model
from bert_jax.model import attention, layers
from bert_jax.model.attention import Scores
from bert_jax.model.kernels import Kernels

# Rows of the vocabulary's tables are a multiple of this on every mesh, so that they can be
# sharded anywhere and a checkpoint fits everywhere.
VOCAB_MULTIPLE = 1_024
# Under this name `remat="dots"` finds what it keeps, already rounded to the compute type.
PRODUCT = "product"


class Loop(NamedTuple):
    """The way in which the layers are run."""

    remat: Literal["none", "dots", "full"] = "none"  # what is kept for the backward pass
    layers: Literal["scan", "unroll"] = "scan"  # scanned or unrolled
    # How kernels for the devices are made; None: there are none, and XLA does it all.
    kernels: Kernels | None = None
    # Of stacked layers that lie cut over devices: what is scanned, and what makes of a round's part
    # of it a whole layer. That is called within what the backward pass computes again, so that no
    # more than one layer is whole at a time of what it gathers.
    gather: Callable[[nnx.Module], tuple[Any, Callable[[Any], nnx.Module]]] = lambda stacked: (
        stacked,
        lambda layer: layer,
    )


def padded_vocab_size(cfg: Model) -> int:
    """Returns how many rows the word embeddings and the output bias have."""
    return -(-cfg.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def initializer(cfg: Model) -> nnx.Initializer:
    """Returns a normal distribution, cut off at two deviations and not widened for it.

    The reference draws its weights so; a deviation is `initializer_range`.
    """
    return jax.nn.initializers.truncated_normal(cfg.initializer_range)


def params_of(module: nnx.Module) -> dict[str, Any]:
    """Returns a module's parameters as nested dicts; their paths are their names everywhere."""
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def fill_params(params: dict[str, Any], make: Callable[..., nnx.Module], *args: Any) -> Any:
    """Returns the module that `make` makes of `args` and `rngs`, with these parameters in it.

    Those that it has no place for are left out; a part that they do not have cannot be used.
    """
    graph, shapes = _traced(make, *args)
    state = jax.tree.map(lambda shape: shape, shapes)
    nnx.replace_by_pure_dict(state, {name: params[name] for name in params if name in state})
    return nnx.merge(graph, state)


@functools.lru_cache
def _traced(make: Callable[..., nnx.Module], *args: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns a module and the shapes of its parameters; to trace it takes half a second."""
    module = nnx.eval_shape(lambda: make(*args, rngs=nnx.Rngs(params=jax.random.key(0))))
    return nnx.split(module, nnx.Param)


class Embedding(nnx.Module):
    """A table of vectors, `embedding` [rows, D]; rows beyond `used` are zero."""

    def __init__(
        self, used: int, width: int, init: nnx.Initializer, *, rngs: nnx.Rngs, rows: int = 0
    ):
        table = init(rngs.params(), (used, width), jnp.float32)
        self.embedding = nnx.Param(jnp.pad(table, ((0, max(rows - used, 0)), (0, 0))))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def look_up(table: jax.Array, ids: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Reads rows of a table, rounded to a type beforehand; the gradient adds up in float32.

    The output's product reads the rounded table too, so that no other need exist.

    Args:
      table: float32 [V, D].
      ids: int32 [...].
      dtype: to round to.

    Returns:
      float32 [..., D].
    """
    return jnp.take(table.astype(dtype), ids, axis=0).astype(jnp.float32)


def _look_up_forward(
    table: jax.Array, ids: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return look_up(table, ids, dtype), (ids, len(table))


def _look_up_backward(
    dtype: jnp.dtype, kept: tuple[jax.Array, int], gradient: jax.Array
) -> tuple[jax.Array, None]:
    del dtype
    ids, rows = kept
    zeros = jnp.zeros((rows, gradient.shape[-1]), jnp.float32)
    return zeros.at[ids].add(gradient), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def rope_angles(cfg: Model, positions: jax.Array) -> jax.Array:
    """Returns cosines and sines of the angles by which pairs are turned (Su et al. 2021).

    Args:
      cfg: whose bases they are of.
      positions: int32 [..., S].

    Returns:
      float32 [2, 2, ..., S, 1, D / H / 2]: of layers that attend to whole rows, and of the others,
      cosines and sines.
    """
    width, after = cfg.hidden_size // cfg.num_attention_heads, [1] * (positions.ndim + 1)
    settings = (
        (cfg.global_rotary_base, cfg.global_rotary_scaling),
        (cfg.local_rotary_base, cfg.local_rotary_scaling),
    )
    steps, factors = zip(*(_steps(*setting, width) for setting in settings), strict=True)
    steps = jnp.asarray(steps, jnp.float32).reshape(2, *after, -1)
    angles = positions.astype(jnp.float32)[..., None, None] * steps
    turns = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    if factors == (1.0, 1.0):
        return turns
    return turns * jnp.asarray(factors, jnp.float32).reshape(2, 1, *after, 1)


def _steps(base: float, scaling: str, width: int) -> tuple[np.ndarray, float]:
    """Returns the angle of each pair from one position to the next, and what turned ones grow by.

    Args:
      base: of the rotary positions.
      scaling: empty, `linear:FACTOR`, or `yarn:POSITIONS:FACTOR`, by Peng et al. 2023 (section 3):
        pairs that turn over 32 times in so many positions stay as they are, those that turn less
        than once are slowed down by the factor, and those between in part.
      width: D / H.

    Returns:
      float64 [D / H / 2], and a factor of cosines and sines.
    """
    steps = base ** -(np.arange(0, width, 2) / width)
    if not scaling:
        return steps, 1.0
    kind, *positions, factor = scaling.split(":")
    slowed = steps / float(factor)
    if kind == "linear":
        return slowed, 1.0

    def pair(turns: int) -> float:
        """Returns which pair turns so often."""
        return width * math.log(int(positions[0]) / (turns * 2 * math.pi)) / (2 * math.log(base))

    first, last = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), width - 1)
    share = np.clip((np.arange(width // 2) - first) / (last - first or 0.001), 0, 1)
    return steps * (1 - share) + slowed * share, 0.1 * math.log(float(factor)) + 1


@jax.custom_vjp
def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Turns pairs of x, each half a head apart; they are turned in float32.

    Args:
      x: [B, S, H, D / H], any float type.
      rotation: cosines and sines, float32 [2, ..., S, 1, D / H / 2].

    Returns:
      The same shape and type as x.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = rotation
    turned = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def _rotate_forward(x: jax.Array, rotation: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rotate(x, rotation), rotation


def _rotate_backward(rotation: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    cosine, sine = rotation
    return rotate(gradient, jnp.stack([cosine, -sine])), None


rotate.defvjp(_rotate_forward, _rotate_backward)


def run_layers(
    run: Callable[[Any, jax.Array, jax.Array, layers.Noise | None, Scores], jax.Array],
    stacked: nnx.Module,
    x: jax.Array,
    noise: layers.Noise | None,
    loop: Loop,
    outputs: Literal["last", "all"],
) -> tuple[jax.Array, jax.Array | None]:
    """Runs stacked layers, one after the other.

    Args:
      run: takes a layer, its number, [B, S, D], the layer's noise, and what becomes of scores.
      stacked: a layer whose parameters carry a first dimension L.
      x: [B, S, D], what the first one reads.
      noise: of dropout; None drops nothing.
      loop: how they are run.
      outputs: what is kept.

    Returns:
      What the last one gives, [B, S, D]; with `all`, x and what every one gives, [L + 1, B, S, D].
    """
    scores: Scores = "recomputed" if loop.remat == "dots" else "kept"
    scanned, whole = loop.gather(stacked)

    def body(
        x: jax.Array, layer_and_number: tuple[Any, jax.Array]
    ) -> tuple[jax.Array, jax.Array | None]:
        layer, number = layer_and_number
        layer_noise = None if noise is None else noise.at(number)
        x = run(whole(layer), number, x, layer_noise, scores)
        return x, x if outputs == "all" else None

    if loop.remat != "none":
        policies = jax.checkpoint_policies
        policy = {
            "dots": policies.save_only_these_names(PRODUCT, *attention.KEPT),
            "full": policies.nothing_saveable,
        }[loop.remat]
        body = jax.checkpoint(body, policy=policy, prevent_cse=loop.layers == "unroll")
    count = len(jax.tree.leaves(stacked)[0])
    unroll = count if loop.layers == "unroll" else 1
    last, every = jax.lax.scan(body, x, (scanned, jnp.arange(count)), unroll=unroll)
    return last, None if every is None else jnp.concatenate([x[None], every])
