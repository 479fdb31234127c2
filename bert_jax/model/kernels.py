"""Kernels for TPUs: what all share, the layer norm of a residual, and a ring's additions.

Dropout's bits are drawn inside, and do not leave a core: the backward pass draws again what the
forward pass drew, from the same two words. They compute what `layers` computes, in the same types:
products in the type of their input with sums in float32, everything else float32.

Bits come from the generator of the core, whose numbers are those of one kind of chip. Tests hand
them in, since the generator does nothing where kernels are interpreted.

Shape letters: W width, R rows of tokens.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax import hardware

# Lanes of a register, and columns of the matrix unit.
LANES = 128
# Rows that go through attention in one piece; scores of longer ones do not fit next to each other.
LONGEST = 512
# Of one operand of `add_part` at a time: six of them, since the next block of each arrives while
# one is worked on, are little of the 16 MiB of VMEM that a kernel has on any generation.
_ADDED_BYTES = 2**20
# Rows of a block are a multiple of this, which no type's tile exceeds.
_TILE_ROWS = 32
# Numbers of an array that a norm holds at a time: float32, and some eight arrays of them.
_AT_ONCE = 256 * 1_024
# Rates are multiples of one over it, as where bits are drawn outside (`layers.ShardNoise`).
_STEPS = 65_536
# Tokens that a program normalises at a time, as many as divide the rows.
_TOKENS = (256, 128, 64, 32, 16)


class Kernels(NamedTuple):
    """The way in which kernels are made for a kind of TPU."""

    # Of the matrix unit: as they come, or `float32`, which v2 and v3 want of a kernel.
    operands: Literal["as_they_come", "float32"] = "as_they_come"
    memory: int = 64 * 2**20  # bytes that a kernel may use of the core's own memory


_ONE_CORE_OF_TWO = Kernels(operands="float32", memory=14 * 2**20)
# By `device_kind`.
BY_DEVICE = {
    hardware.TPUS["v2"].kind: _ONE_CORE_OF_TWO,
    hardware.TPUS["v3"].kind: _ONE_CORE_OF_TWO,
    hardware.TPUS["v4"].kind: Kernels(memory=14 * 2**20),
    hardware.TPUS["v5e"].kind: Kernels(),
    hardware.TPUS["v5p"].kind: Kernels(),
    hardware.TPUS["v6e"].kind: Kernels(),
}


def fits(heads: int, batch: int, length: int, width: int) -> bool:
    """Returns whether kernels can be used for these shapes."""
    size = width // heads
    lanes = LANES % size == 0 or size % LANES == 0
    rows = length % LANES == 0 and length <= LONGEST
    return lanes and rows and width % LANES == 0 and batch * length % _TOKENS[-1] == 0


def program_seed(words: Sequence[Any], program: Any) -> tuple[Any, Any]:
    """Returns the two words with which a program of a kernel seeds the generator.

    Two programs of a site never have the same, whatever the site's words are.
    """
    return words[0], words[1] ^ program


# --- the norm of a residual -----------------------------------------------------------------------


class Norm(NamedTuple):
    """The part of a norm that is known before it runs."""

    kernels: Kernels  # how they are made
    rate: float  # of dropout
    eps: float  # added to the variance


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def residual_norm(
    static: Norm,
    x: jax.Array,
    y: jax.Array,
    bias: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    seed: jax.Array,
    bits: jax.Array | None,
) -> jax.Array:
    """Computes the layer norm of x + dropout(y + bias), biased variance.

    The backward pass finds x and y, and nothing else.

    Args:
      static: see `Norm`.
      x: [R, W], the residual.
      y: [R, W], a product without its bias.
      bias: float32 [W], of that product.
      scale: float32 [W], of the norm.
      shift: float32 [W], of the norm.
      seed: int32 [2], of the step, micro-batch, shard, layer and site.
      bits: uint32 [R, W] instead of drawn ones; None: they are drawn.

    Returns:
      [R, W], in the type of x.
    """
    return _norm_forward(static, x, y, bias, scale, shift, seed, bits)[0]


def _norm_forward(static: Norm, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    x = arrays[0]
    rows, _ = _row_blocks(x)
    (normed,) = _run_norm(static, _norm_kernel, "norm_forward", arrays, (), [(rows, x)])
    return normed, arrays


def _norm_backward(
    static: Norm, kept: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    x = kept[0]
    rows, _ = _row_blocks(x)
    sums = jax.ShapeDtypeStruct((len(x) // _block_height(x), 1, x.shape[1]), jnp.float32)
    of_columns = pl.BlockSpec((1, 1, x.shape[1]), lambda i: (i, 0, 0))
    outputs = [*[(rows, x)] * 2, *[(of_columns, sums)] * 3]
    d_x, d_y, *d_columns = _run_norm(
        static, _norm_backward_kernel, "norm_backward", kept, (gradient,), outputs
    )
    return d_x, d_y, *(d.sum(axis=(0, 1)) for d in d_columns), None, None


residual_norm.defvjp(_norm_forward, _norm_backward)


def _row_blocks(x: jax.Array) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Returns the blocks of rows of tokens, and that of a row of columns."""
    width = x.shape[1]
    columns = pl.BlockSpec((1, width), lambda i: (0, 0))
    return pl.BlockSpec((_block_height(x), width), lambda i: (i, 0)), columns


def _block_height(x: jax.Array) -> int:
    """Returns the number of tokens in a block of rows."""
    rows, width = x.shape
    fit = (h for h in _TOKENS if rows % h == 0 and h * width <= _AT_ONCE)
    return next(fit, _TOKENS[-1])


def _run_norm(
    static: Norm,
    kernel: Callable[..., None],
    name: str,
    arrays: tuple[Any, ...],
    more: tuple[jax.Array, ...],
    outputs: list[tuple[pl.BlockSpec, Any]],
) -> list[jax.Array]:
    x, y, *vectors, seed, bits = arrays
    rows, columns = _row_blocks(x)
    inputs = [(SCALARS, seed), (rows, x), (rows, y)]
    inputs += [(columns, vector[None]) for vector in vectors]
    inputs += [(rows, array) for array in (*more, bits) if array is not None]
    grid = (len(x) // _block_height(x),)
    run = functools.partial(kernel, static)
    return launch(static.kernels, run, name, grid, inputs, outputs, 0, len(x))


def _sum_of(
    rate: float, seed: Any, x_ref: Any, y_ref: Any, bias_ref: Any, bits: Sequence[Any]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns x + dropout(y + bias), float32, and what is kept of y; None if all of it."""
    x = x_ref[...].astype(jnp.float32)
    y = y_ref[...].astype(jnp.float32) + bias_ref[...]
    if not rate:
        return x + y, None
    given, program = (bits[0][...], 0) if bits else (None, pl.program_id(0))
    keep = keep_some(rate, seed, given, program, y.shape)
    return x + jnp.where(keep, y * kept_scale(rate), 0.0), keep


def _normed(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns x with mean 0 and variance 1 along lanes, and one over its deviation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)
    return centred * deviation, deviation


def _norm_kernel(static: Norm, *refs: Any) -> None:
    seed, x, y, bias, scale, shift, *bits, out = refs
    total, _ = _sum_of(static.rate, seed, x, y, bias, bits)
    normed, _ = _normed(total, static.eps)
    out[...] = (normed * scale[...] + shift[...]).astype(out.dtype)


def _norm_backward_kernel(static: Norm, *refs: Any) -> None:
    *inputs, d_x, d_y, d_bias, d_scale, d_shift = refs
    seed, x, y, bias, scale, _, gradient_ref, *bits = inputs
    total, keep = _sum_of(static.rate, seed, x, y, bias, bits)
    normed, deviation = _normed(total, static.eps)
    gradient = gradient_ref[...].astype(jnp.float32)
    upper = gradient * scale[...]
    along = (upper * normed).mean(axis=-1, keepdims=True)
    d_total = deviation * (upper - upper.mean(axis=-1, keepdims=True) - normed * along)
    d_x[...] = d_total.astype(d_x.dtype)
    d_dropped = d_total if keep is None else jnp.where(keep, d_total * kept_scale(static.rate), 0.0)
    d_y[...] = d_dropped.astype(d_y.dtype)
    sums = ((d_bias, d_dropped), (d_scale, gradient * normed), (d_shift, gradient))
    for ref, values in sums:
        ref[0] = values.sum(axis=0, keepdims=True)


# --- a ring's additions ---------------------------------------------------------------------------


def add_part(parts: jax.Array, received: jax.Array, index: jax.Array) -> jax.Array:
    """Adds one of several parts to what was received, in one pass over memory.

    The part is read where it lies; XLA would copy it out first. Sums are float32, rounded once: the
    bits of `received + parts[index]`.

    Args:
      parts: [N, ..., C], any float type.
      received: [..., C], as one part; may be overwritten.
      index: int32 [], which part.

    Returns:
      [..., C], in the type of received.
    """
    columns = received.shape[-1]
    flat = received.reshape(-1, columns)
    rows = len(flat)
    most = _ADDED_BYTES // (columns * received.dtype.itemsize)
    block = min(rows, max(most // _TILE_ROWS, 1) * _TILE_ROWS)
    here = pl.BlockSpec((block, columns), lambda i, index: (i, 0))
    there = pl.BlockSpec((1, block, columns), lambda i, index: (index[0], i, 0))
    total = _call(
        _add_part_kernel,
        "ring_add",
        [index.astype(jnp.int32).reshape(1), parts.reshape(-1, rows, columns), flat],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, block),),
            in_specs=[there, here],
            out_specs=here,
        ),
        out_shape=jax.ShapeDtypeStruct(flat.shape, received.dtype),
        input_output_aliases={2: 0},
        cost_estimate=pl.CostEstimate(
            flops=flat.size, bytes_accessed=3 * received.nbytes, transcendentals=0
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )
    return total.reshape(received.shape)


def _add_part_kernel(index_ref: Any, parts_ref: Any, received_ref: Any, total_ref: Any) -> None:
    total = received_ref[...].astype(jnp.float32) + parts_ref[0].astype(jnp.float32)
    total_ref[...] = total.astype(total_ref.dtype)


# --- what all share -------------------------------------------------------------------------------

SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


def launch(
    kernels: Kernels,
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    inputs: list[tuple[pl.BlockSpec, Any]],
    outputs: list[tuple[pl.BlockSpec, Any]],
    operations: int,
    exponentials: int,
    scratch: Sequence[Any] = (),
) -> list[jax.Array]:
    """Runs a kernel over a grid; of `outputs` the shapes and types are read alone.

    `scratch` is memory of each core's own, which no other program sees.
    """
    arrays = [array for _, array in inputs + outputs]
    moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
    return _call(
        kernel,
        name,
        [array for _, array in inputs],
        grid=grid,
        in_specs=[spec for spec, _ in inputs],
        out_specs=[spec for spec, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(like.shape, like.dtype) for _, like in outputs],
        scratch_shapes=scratch,
        cost_estimate=pl.CostEstimate(
            flops=operations, bytes_accessed=moved, transcendentals=exponentials
        ),
        # In any order: on v4 and v5p two cores share the programs.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * len(grid), vmem_limit_bytes=kernels.memory
        ),
    )


def kept_scale(rate: float) -> float:
    """Returns one over the probability with which something is kept."""
    return _STEPS / (_STEPS - round(rate * _STEPS))


def keep_some(
    rate: float, seed: Any, bits: jax.Array | None, program: Any, shape: tuple[int, ...]
) -> jax.Array:
    """Returns bool `shape`, False for `rate` of it: of these bits, or of some that are drawn."""
    if bits is None:
        pltpu.prng_seed(*program_seed((seed[0], seed[1]), program))
        bits = pltpu.bitcast(pltpu.prng_random_bits(shape), jnp.uint32)
    return bits >= jnp.uint32(round(rate * _STEPS) * (2**32 // _STEPS))


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Multiplies over one axis of each, with sums in float32."""
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _call(kernel: Callable[..., None], name: str, operands: Sequence[Any], **how: Any) -> Any:
    """Runs a kernel on a TPU, or on a CPU in the interpreter; `how` is for `pallas_call`.

    A plan names the operation by `name`.
    """

    def call(*operands: jax.Array, **more: Any) -> Any:
        return pl.pallas_call(kernel, name=name, **how, **more)(*operands)

    interpreted = functools.partial(call, interpret=True)
    return lax.platform_dependent(*operands, cpu=interpreted, default=call)
