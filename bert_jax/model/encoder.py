"""Parts of all encoders: embedding tables, rotary positions, and the scan over layers.

The parameters of the layers are stacked along a first dimension L and scanned.

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
from bert_jax.model.attention import ProbabilityPolicy
from bert_jax.model.kernels import Kernels

# The vocabulary's tables have a multiple of this number of rows on every mesh, so that they can be
# sharded on any number of devices and a checkpoint fits every mesh.
VOCAB_MULTIPLE = 1_024
# Distances from here on share the last bucket of relative positions.
_LONGEST_DISTANCE = 128
# Name of the results of linear layers, rounded to the compute type, which `remat="dots"` saves.
LINEAR_OUTPUT = "product"


class Loop(NamedTuple):
    """Options of computing a model: those of the loop over layers, and that of the loss."""

    remat: Literal["none", "dots", "full"] = "none"  # recomputed: nothing, all but products, all
    layers: Literal["scan", "unroll"] = "scan"
    kernels: Kernels | None = None  # settings of TPU kernels; None: there are none
    cudnn: bool = False  # whether cuDNN computes attention where it can, see `cudnn_attention`
    # Whether the loss of predicted tokens has all logits in memory, or chunks: see `token_loss`.
    token_loss: Literal["all_logits", "by_chunk"] = "all_logits"
    # Takes sharded layers. Returns the arrays to scan, and a function that makes a whole layer of
    # this device's shard of it. The function is called inside the rematerialized block, so that
    # only one layer is whole at a time.
    gather: Callable[[nnx.Module], tuple[Any, Callable[[Any], nnx.Module]]] = lambda stacked: (
        stacked,
        lambda layer: layer,
    )


def padded_vocab_size(cfg: Model) -> int:
    """Returns the number of rows of the word embeddings and of the output bias."""
    return -(-cfg.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


def initializer(cfg: Model) -> nnx.Initializer:
    """Returns a normal distribution truncated at two standard deviations, as in the reference.

    The standard deviation before truncation is `initializer_range`.
    """
    return jax.nn.initializers.truncated_normal(cfg.initializer_range)


def params_of(module: nnx.Module) -> dict[str, Any]:
    """Returns a module's parameters as nested dicts.

    The path of a parameter is its name in checkpoints and in the rules of sharding.
    """
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def fill_params(params: dict[str, Any], make: Callable[..., nnx.Module], *args: Any) -> Any:
    """Returns the module `make(*args, rngs=...)` with these parameters.

    Parameters that the module lacks are ignored. A part whose parameters are missing in `params`
    must not be called.
    """
    graph, shapes = _trace(make, *args)
    state = jax.tree.map(lambda shape: shape, shapes)  # a copy, since `shapes` is cached
    nnx.replace_by_pure_dict(state, {name: params[name] for name in params if name in state})
    return nnx.merge(graph, state)


@functools.lru_cache
def _trace(make: Callable[..., nnx.Module], *args: Any) -> tuple[nnx.GraphDef, nnx.State]:
    """Returns a module and the shapes of its parameters; tracing takes half a second."""
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
    """Reads rows of a table rounded to a type; the gradient is summed in float32.

    The output layer rounds the same table to the same type, so that memory holds one rounded copy.

    Args:
      table: float32 [V, D].
      ids: int32 [...].
      dtype: the type to which the table is rounded.

    Returns:
      float32 [..., D].
    """
    return jnp.take(table.astype(dtype), ids, axis=0).astype(jnp.float32)


def _look_up_forward(
    table: jax.Array, ids: jax.Array, dtype: jnp.dtype
) -> tuple[jax.Array, tuple[jax.Array, int]]:
    return look_up(table, ids, dtype), (ids, len(table))


def _look_up_backward(
    dtype: jnp.dtype, saved: tuple[jax.Array, int], gradient: jax.Array
) -> tuple[jax.Array, None]:
    del dtype
    ids, rows = saved
    zeros = jnp.zeros((rows, gradient.shape[-1]), jnp.float32)
    return zeros.at[ids].add(gradient), None


look_up.defvjp(_look_up_forward, _look_up_backward)


def rotary_cos_sin(cfg: Model, positions: jax.Array) -> jax.Array:
    """Returns cosines and sines of the angles of rotary positions (Su et al. 2021).

    Args:
      cfg: the model.
      positions: int32 [..., S].

    Returns:
      float32 [2, 2, ..., S, 1, D / H / 2]: for global and for local layers, cosines and sines.
    """
    width, axes = cfg.hidden_size // cfg.num_attention_heads, [1] * (positions.ndim + 1)
    settings = (
        (cfg.global_rotary_base, cfg.global_rotary_scaling),
        (cfg.local_rotary_base, cfg.local_rotary_scaling),
    )
    frequencies, factors = zip(
        *(_rotary_frequencies(*setting, width) for setting in settings), strict=True
    )
    frequencies = jnp.asarray(frequencies, jnp.float32).reshape(2, *axes, -1)
    angles = positions.astype(jnp.float32)[..., None, None] * frequencies
    rotation = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    if factors == (1.0, 1.0):
        return rotation
    return rotation * jnp.asarray(factors, jnp.float32).reshape(2, 1, *axes, 1)


def _rotary_frequencies(base: float, scaling: str, width: int) -> tuple[np.ndarray, float]:
    """Returns the angle by which each pair of dimensions turns per position, and a factor.

    Args:
      base: the base of the rotary positions.
      scaling: empty, `linear:FACTOR`, or `yarn:POSITIONS:FACTOR` (Peng et al. 2023, section 3):
        pairs that rotate more than 32 times in POSITIONS keep their angle, pairs that rotate less
        than once have it divided by FACTOR, pairs in between by an interpolated factor.
      width: D / H.

    Returns:
      Angles, float64 [D / H / 2], and a factor for the cosines and sines of all angles.
    """
    frequencies = base ** -(np.arange(0, width, 2) / width)
    if not scaling:
        return frequencies, 1.0
    kind, *positions, factor = scaling.split(":")
    scaled = frequencies / float(factor)
    if kind == "linear":
        return scaled, 1.0

    def pair(rotations: int) -> float:
        """Returns the index of the pair with this number of rotations."""
        length = int(positions[0]) / (rotations * 2 * math.pi)
        return width * math.log(length) / (2 * math.log(base))

    first, last = max(math.floor(pair(32)), 0), min(math.ceil(pair(1)), width - 1)
    share = np.clip((np.arange(width // 2) - first) / (last - first or 0.001), 0, 1)
    return frequencies * (1 - share) + scaled * share, 0.1 * math.log(float(factor)) + 1


def position_bias(table: jax.Array, length: int) -> jax.Array:
    """Returns the bias of attention scores for relative positions, float32 [H, S, S].

    Distances fall into buckets (Raffel et al. 2020, section 2.1; transformers' MPNetEncoder). Half
    of the buckets are for keys after the query. In each half, small distances have a bucket each,
    and the other buckets grow exponentially up to a distance of 128.

    Args:
      table: the biases, float32 [buckets, H].
      length: S.
    """
    half = len(table) // 2
    distances = np.arange(1 - length, length)  # of keys after the query
    sizes, exact = np.abs(distances), half // 2
    logs = np.log(np.maximum(sizes, exact).astype(np.float32) / np.float32(exact))
    logs = logs / np.float32(math.log(_LONGEST_DISTANCE / exact)) * np.float32(half - exact)
    large = np.minimum(exact + logs.astype(np.int32), half - 1)
    buckets = np.where(sizes < exact, sizes, large) + half * (distances > 0)
    positions = jnp.arange(length)
    by_distance = table[buckets].T  # [H, 2 S - 1]
    return by_distance[:, positions - positions[:, None] + length - 1]


@jax.custom_vjp
def rotate(x: jax.Array, rotation: jax.Array) -> jax.Array:
    """Rotates the pairs of x in float32; the elements of a pair are half a head apart.

    Args:
      x: [B, S, H, D / H], any float type.
      rotation: cosines and sines, float32 [2, ..., S, 1, D / H / 2].

    Returns:
      The same shape and type as x.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cosine, sine = rotation
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def _rotate_forward(x: jax.Array, rotation: jax.Array) -> tuple[jax.Array, jax.Array]:
    return rotate(x, rotation), rotation


def _rotate_backward(rotation: jax.Array, gradient: jax.Array) -> tuple[jax.Array, None]:
    cosine, sine = rotation
    return rotate(gradient, jnp.stack([cosine, -sine])), None


rotate.defvjp(_rotate_forward, _rotate_backward)


# --- windows ----------------------------------------------------------------------------------


def global_every(cfg: Model) -> int:
    """Returns n; the layers 0, n, 2n, ... are global."""
    return cfg.global_every if cfg.kind == "modern" else 1


def count_global_layers(cfg: Model) -> int:
    """Returns the number of global layers."""
    return -(-cfg.num_hidden_layers // global_every(cfg))


def half_window(cfg: Model) -> int:
    """Returns the number of positions of a window on each side; 0 if every layer is global."""
    return 0 if global_every(cfg) == 1 else cfg.local_window // 2


def attention_window(cfg: Model, is_global: jax.Array | None, length: int) -> jax.Array | None:
    """Returns where a query may attend to a key, bool [S, S]; None: everywhere in such a row."""
    half = half_window(cfg)
    causal = attention.causal_mask(length) if cfg.direction == "left_to_right" else None
    if not half or is_global is None or length <= half + 1:
        return causal
    position = jnp.arange(length)
    near = is_global | (jnp.abs(position[:, None] - position) <= half)
    return near if causal is None else near & causal


# --- the loop over layers ---------------------------------------------------------------------


def run_layers(
    run: Callable[[Any, jax.Array, jax.Array, layers.Noise | None, ProbabilityPolicy], jax.Array],
    stacked: nnx.Module,
    x: jax.Array,
    noise: layers.Noise | None,
    loop: Loop,
    outputs: Literal["last", "all"],
) -> tuple[jax.Array, jax.Array | None]:
    """Runs stacked layers, one after the other.

    Args:
      run: takes a layer, its index, its input [B, S, D], its noise, and what attention keeps.
      stacked: a layer whose parameters have a first dimension L.
      x: [B, S, D], the input of the first layer.
      noise: dropout noise; None drops nothing.
      loop: settings of the loop.
      outputs: the outputs to return.

    Returns:
      The last output, [B, S, D]; and x with all outputs, [L + 1, B, S, D], or None with `last`.
    """
    policy: ProbabilityPolicy = "recomputed" if loop.remat == "dots" else "kept"
    scanned, gather_layer = loop.gather(stacked)

    def body(
        x: jax.Array, layer_and_number: tuple[Any, jax.Array]
    ) -> tuple[jax.Array, jax.Array | None]:
        layer, number = layer_and_number
        layer_noise = None if noise is None else noise.at(number)
        x = run(gather_layer(layer), number, x, layer_noise, policy)
        return x, x if outputs == "all" else None

    if loop.remat != "none":
        policies = jax.checkpoint_policies
        saveable = {
            "dots": policies.save_only_these_names(LINEAR_OUTPUT, *attention.SAVED_NAMES),
            "full": policies.nothing_saveable,
        }[loop.remat]
        body = jax.checkpoint(body, policy=saveable, prevent_cse=loop.layers == "unroll")
    count = len(jax.tree.leaves(stacked)[0])
    unroll = count if loop.layers == "unroll" else 1
    last, states = jax.lax.scan(body, x, (scanned, jnp.arange(count)), unroll=unroll)
    return last, None if states is None else jnp.concatenate([x[None], states])
