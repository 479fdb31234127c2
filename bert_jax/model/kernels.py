"""Kernels for TPUs: shared functions, the layer norm of a residual, and the additions of a ring.

Kernels draw the bits of dropout themselves, and the bits do not leave a core: the backward pass
draws the same bits again from the same two words. Kernels compute what `layers` computes, in the
same types: products in the type of their input with sums in float32, everything else float32.

The bits come from the core's generator and differ between kinds of chips. Tests pass bits as an
argument, because the generator does nothing in the interpreter.

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
# Longest sequence for attention; the scores of longer ones do not fit into a core's memory.
LONGEST = 512
# Bytes of an operand's block in `add_part`. A core holds two blocks of each of the three operands,
# far less than the 16 MiB of VMEM that every generation has.
_ADDED_BYTES = 2**20
# The rows of a block are a multiple of this; no type has a larger tile.
_TILE_ROWS = 32
# Elements of a block of a norm, which holds about eight float32 arrays of this size.
_BLOCK_ELEMENTS = 256 * 1_024
# Dropout rates are multiples of 1 / this, as in `layers.ShardNoise`.
_STEPS = 65_536
# Possible numbers of tokens in a block of a norm; a block's tokens divide the rows.
_TOKENS = (256, 128, 64, 32, 16)


class Kernels(NamedTuple):
    """The settings of kernels for a kind of TPU."""

    # Types of the matrix unit's operands: unchanged, or `float32`, which v2 and v3 require.
    operands: Literal["as_they_come", "float32"] = "as_they_come"
    memory: int = 64 * 2**20  # bytes of a core's VMEM that a kernel may use
    long_row_memory: int = 64 * 2**20  # the same for the longest rows of `rotary_kernels`
    # How layers that have kernels compute GELU's erf, see `erf_in`.
    erf: Literal["exact", "by_tanh"] = "exact"


_ONE_CORE_OF_TWO = Kernels(operands="float32", memory=14 * 2**20)
# Settings by `device_kind`.
BY_DEVICE = {
    hardware.TPUS["v2"].kind: _ONE_CORE_OF_TWO,
    hardware.TPUS["v3"].kind: _ONE_CORE_OF_TWO,
    hardware.TPUS["v4"].kind: Kernels(memory=14 * 2**20),
    hardware.TPUS["v5e"].kind: Kernels(),
    hardware.TPUS["v5p"].kind: Kernels(),
    hardware.TPUS["v6e"].kind: Kernels(),
    hardware.TPUS["tpu7x"].kind: Kernels(
        memory=48 * 2**20, long_row_memory=56 * 2**20, erf="by_tanh"
    ),
}


def erf_in(kernels: Kernels | None, dtype: Any) -> Literal["exact", "by_tanh"]:
    """Returns how GELU's erf is computed if activations have the type `dtype`.

    Float32 is always computed exactly, as is everything in layers without kernels.
    """
    return kernels.erf if kernels is not None and dtype == jnp.bfloat16 else "exact"


def fits(heads: int, batch: int, length: int, width: int) -> bool:
    """Returns whether kernels support these shapes."""
    size = width // heads
    lanes = LANES % size == 0 or size % LANES == 0
    rows = length % LANES == 0 and length <= LONGEST
    return lanes and rows and width % LANES == 0 and batch * length % _TOKENS[-1] == 0


def program_seed(words: Sequence[Any], program: Any) -> tuple[Any, Any]:
    """Returns the two words that seed the generator of a kernel's program.

    Any two programs of a site have different seeds, for all `words` of the site.
    """
    return words[0], words[1] ^ program


# --- shared functions -----------------------------------------------------------------------------

SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


class KernelCall(NamedTuple):
    """A kernel with its arguments: arrays and their blocks."""

    kernel: Callable[..., None]
    name: str
    inputs: list[tuple[pl.BlockSpec, Any]]
    outputs: list[tuple[pl.BlockSpec, Any]]  # only shapes and types of the arrays count
    scratch: Sequence[Any] = ()  # memory of a program

    def run(
        self, kernels: Kernels, grid: tuple[int, ...], operations: int, exponentials: int
    ) -> list[jax.Array]:
        """Runs the kernel over a grid; `operations` and `exponentials` estimate its cost."""
        arrays = [array for _, array in self.inputs + self.outputs]
        moved = sum(math.prod(array.shape) * array.dtype.itemsize for array in arrays)
        return _call(
            self.kernel,
            self.name,
            [array for _, array in self.inputs],
            grid=grid,
            in_specs=[spec for spec, _ in self.inputs],
            out_specs=[spec for spec, _ in self.outputs],
            out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for _, a in self.outputs],
            scratch_shapes=self.scratch,
            cost_estimate=pl.CostEstimate(
                flops=operations, bytes_accessed=moved, transcendentals=exponentials
            ),
            # Programs run in any order: on v4 and v5p two cores share them.
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel",) * len(grid), vmem_limit_bytes=kernels.memory
            ),
        )


def dropout_scale(rate: float) -> float:
    """Returns 1 / the probability that dropout keeps an element."""
    return _STEPS / (_STEPS - round(rate * _STEPS))


def draw_keep(
    rate: float, seed: Any, bits: jax.Array | None, program: Any, shape: tuple[int, ...]
) -> jax.Array:
    """Returns bool `shape`, False for a share `rate` of it, from `bits` or drawn if None."""
    if bits is None:
        pltpu.prng_seed(*program_seed((seed[0], seed[1]), program))
        bits = pltpu.bitcast(pltpu.prng_random_bits(shape), jnp.uint32)
    return bits >= jnp.uint32(round(rate * _STEPS) * (2**32 // _STEPS))


def dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    """Multiplies over one axis of each, with sums in float32."""
    contract = (((a_axis,), (b_axis,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


def _call(kernel: Callable[..., None], name: str, operands: Sequence[Any], **options: Any) -> Any:
    """Runs a kernel on a TPU, or on a CPU in the interpreter; `options` are for `pallas_call`.

    `plan` shows the operation as `name`.
    """

    def call(*operands: jax.Array, **more: Any) -> Any:
        return pl.pallas_call(kernel, name=name, **options, **more)(*operands)

    interpreted = functools.partial(call, interpret=True)
    return lax.platform_dependent(*operands, cpu=interpreted, default=call)


# --- the norm of a residual -----------------------------------------------------------------------


class Norm(NamedTuple):
    """The static arguments of `residual_norm`."""

    kernels: Kernels  # settings of the kernels
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

    The forward pass saves x and y only.

    Args:
      static: see `Norm`.
      x: [R, W], the residual.
      y: [R, W], a product without its bias.
      bias: float32 [W], of that product.
      scale: float32 [W], of the norm.
      shift: float32 [W], of the norm.
      seed: int32 [2], depends on step, micro-batch, shard, layer and site.
      bits: uint32 [R, W], replaces drawn bits; None: bits are drawn.

    Returns:
      [R, W], in the type of x.
    """
    return _norm_forward(static, x, y, bias, scale, shift, seed, bits)[0]


def _norm_forward(static: Norm, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    x = arrays[0]
    call = KernelCall(_norm_kernel, "norm_forward", [], [(_row_block(x), x)])
    (normed,) = _run_norm(static, call, arrays)
    return normed, arrays


def _norm_backward(
    static: Norm, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    x = saved[0]
    rows, width = _row_block(x), x.shape[1]
    sums = jax.ShapeDtypeStruct((len(x) // _block_height(x), 1, width), jnp.float32)
    sums_block = pl.BlockSpec((1, 1, width), lambda i: (i, 0, 0))
    outputs = [*[(rows, x)] * 2, *[(sums_block, sums)] * 3]
    call = KernelCall(_norm_backward_kernel, "norm_backward", [(rows, gradient)], outputs)
    d_x, d_y, *d_columns = _run_norm(static, call, saved)
    return d_x, d_y, *(d.sum(axis=(0, 1)) for d in d_columns), None, None


residual_norm.defvjp(_norm_forward, _norm_backward)


def _row_block(x: jax.Array) -> pl.BlockSpec:
    """Returns the block of some rows of [R, W]."""
    return pl.BlockSpec((_block_height(x), x.shape[1]), lambda i: (i, 0))


def _block_height(x: jax.Array) -> int:
    """Returns the number of tokens in a block of rows."""
    rows, width = x.shape
    heights = (h for h in _TOKENS if rows % h == 0 and h * width <= _BLOCK_ELEMENTS)
    return next(heights, _TOKENS[-1])


def _run_norm(static: Norm, call: KernelCall, arrays: tuple[Any, ...]) -> list[jax.Array]:
    """Runs a kernel on the arrays of `residual_norm`; those of `call` come before the bits."""
    x, y, *vectors, seed, bits = arrays
    rows, columns = _row_block(x), pl.BlockSpec((1, x.shape[1]), lambda i: (0, 0))
    inputs = [(SCALARS, seed), (rows, x), (rows, y)]
    inputs += [(columns, vector[None]) for vector in vectors]
    inputs += call.inputs + ([] if bits is None else [(rows, bits)])
    call = call._replace(kernel=functools.partial(call.kernel, static), inputs=inputs)
    return call.run(static.kernels, (len(x) // _block_height(x),), 0, len(x))


def _residual_sum(
    rate: float, seed: Any, x_ref: Any, y_ref: Any, bias_ref: Any, bits: Sequence[Any]
) -> tuple[jax.Array, jax.Array | None]:
    """Returns x + dropout(y + bias), float32, and the mask of the dropout; None if rate is 0."""
    x = x_ref[...].astype(jnp.float32)
    y = y_ref[...].astype(jnp.float32) + bias_ref[...]
    if not rate:
        return x + y, None
    block_bits, program = (bits[0][...], 0) if bits else (None, pl.program_id(0))
    keep = draw_keep(rate, seed, block_bits, program, y.shape)
    return x + jnp.where(keep, y * dropout_scale(rate), 0.0), keep


def _normalize(x: jax.Array, eps: float) -> tuple[jax.Array, jax.Array]:
    """Returns x with mean 0 and variance 1 along lanes, and the factor 1 / deviation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    factor = lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + eps)
    return centred * factor, factor


def _norm_kernel(static: Norm, *refs: Any) -> None:
    seed, x, y, bias, scale, shift, *bits, out = refs
    total, _ = _residual_sum(static.rate, seed, x, y, bias, bits)
    normed, _ = _normalize(total, static.eps)
    out[...] = (normed * scale[...] + shift[...]).astype(out.dtype)


def _norm_backward_kernel(static: Norm, *refs: Any) -> None:
    *inputs, d_x, d_y, d_bias, d_scale, d_shift = refs
    seed, x, y, bias, scale, _, gradient_ref, *bits = inputs
    total, keep = _residual_sum(static.rate, seed, x, y, bias, bits)
    normed, factor = _normalize(total, static.eps)
    gradient = gradient_ref[...].astype(jnp.float32)
    d_normed = gradient * scale[...]
    along = (d_normed * normed).mean(axis=-1, keepdims=True)
    d_total = factor * (d_normed - d_normed.mean(axis=-1, keepdims=True) - normed * along)
    d_x[...] = d_total.astype(d_x.dtype)
    d_dropped = d_total
    if keep is not None:
        d_dropped = jnp.where(keep, d_total * dropout_scale(static.rate), 0.0)
    d_y[...] = d_dropped.astype(d_y.dtype)
    sums = ((d_bias, d_dropped), (d_scale, gradient * normed), (d_shift, gradient))
    for ref, values in sums:
        ref[0] = values.sum(axis=0, keepdims=True)


# --- a ring's additions ---------------------------------------------------------------------------


def add_part(parts: jax.Array, received: jax.Array, index: jax.Array) -> jax.Array:
    """Adds `parts[index]` to `received` in one pass over memory.

    The kernel reads the part in place, which XLA would copy first. Sums are float32, rounded once:
    the result equals `received + parts[index]` bit for bit.

    Args:
      parts: [N, ..., C], any float type.
      received: [..., C], like one part; may be overwritten.
      index: int32 [].

    Returns:
      [..., C], in the type of received.
    """
    columns = received.shape[-1]
    flat = received.reshape(-1, columns)
    rows = len(flat)
    limit = _ADDED_BYTES // (columns * received.dtype.itemsize)
    block = min(rows, max(limit // _TILE_ROWS, 1) * _TILE_ROWS)
    received_block = pl.BlockSpec((block, columns), lambda i, index: (i, 0))
    part_block = pl.BlockSpec((1, block, columns), lambda i, index: (index[0], i, 0))
    total = _call(
        _add_part_kernel,
        "ring_add",
        [index.astype(jnp.int32).reshape(1), parts.reshape(-1, rows, columns), flat],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, block),),
            in_specs=[part_block, received_block],
            out_specs=received_block,
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
