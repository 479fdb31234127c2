"""Kernels for TPUs: attention, and the layer norm of a residual, with dropout's bits drawn inside.

Nothing of size [S, S] leaves a core, and no bits do: the backward pass draws again what the forward
pass drew, from the same two words. They compute what `attention.attend` and `layers` compute, in
the same types: products in the type of their input with sums in float32, everything else float32.

Bits come from the generator of the core, whose numbers are those of one kind of chip. Tests hand
them in, since the generator does nothing where kernels are interpreted.

Shape letters: B batch, S sequence (Q queries, K keys), W width, H heads, R rows of tokens. Scores
lie [K, Q]: a softmax then adds up along sublanes, which is cheaper than along lanes.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax import hardware
from bert_jax.model.attention import KEPT, MASKED_SCORE

# Lanes of a register, and columns of the matrix unit.
LANES = 128
# Rows that go through attention in one piece; scores of longer ones do not fit next to each other.
LONGEST = 512
_EPS = 1e-12
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


# --- attention ------------------------------------------------------------------------------------


class _Attention(NamedTuple):
    """What is known of attention before it runs."""

    kernels: Kernels  # how they are made
    size: int  # W / H
    rate: float  # of dropout on the probabilities
    # `alone`: numbers are 1 for tokens and 0 for padding, which no query sees; `shared`: a query
    # sees the tokens that have its own number.
    rows: Literal["alone", "shared"]


def attention(
    kernels: Kernels,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    biases: jax.Array,
    numbers: jax.Array,
    seed: jax.Array,
    heads: int,
    rate: float,
    rows: Literal["alone", "shared"],
    bits: jax.Array | None = None,
) -> jax.Array:
    """Computes scaled dot-product attention with dropout on the probabilities.

    Args:
      kernels: how they are made.
      query: [B, S, W], a product without its bias; all heads, one behind the other.
      key: as query.
      value: as query.
      biases: float32 [3, W], of the three.
      numbers: int32 [B, S], see `rows`.
      seed: int32 [2], of the step, micro-batch, shard, layer and site.
      heads: H.
      rate: share of probabilities dropped.
      rows: `alone`: numbers are 1 for tokens and 0 for padding, which no query sees; `shared`: a
        query sees the tokens that have its own number.
      bits: uint32 [B, H, K, Q] instead of drawn ones.

    Returns:
      [B, S, W], in the type of value.
    """
    static = _Attention(kernels, query.shape[-1] // heads, rate, rows)
    return _attention(static, query, key, value, biases, numbers, seed, bits)


def _forward(static: _Attention, *arrays: Any) -> list[jax.Array]:
    query, blocks = arrays[0], Blocks(static.kernels, static.size, arrays[0])
    outputs = [(blocks.row, query), (blocks.sums, blocks.sums_shape)]
    run = functools.partial(_forward_kernel, static)
    return blocks.call(run, "attention_forward", _inputs(blocks, *arrays), outputs, products=2)


def _backward(static: _Attention, arrays: tuple[Any, ...], *more: jax.Array) -> tuple[Any, ...]:
    query, blocks = arrays[0], Blocks(static.kernels, static.size, arrays[0])
    b, _, w = query.shape
    inputs = _inputs(blocks, *arrays)
    inputs += zip((blocks.row, blocks.sums, blocks.row), more, strict=True)
    of_biases = pl.BlockSpec((1, 3, blocks.lanes), lambda b, p: (b, 0, p))
    outputs = [(blocks.row, query)] * 3
    outputs += [(of_biases, jax.ShapeDtypeStruct((b, 3, w), jnp.float32))]
    run = functools.partial(_backward_kernel, static)
    *gradients, d_biases = blocks.call(run, "attention_backward", inputs, outputs, products=5)
    return *gradients, d_biases.sum(axis=0), None, None, None


def _inputs(blocks: "Blocks", *arrays: Any) -> list[tuple[pl.BlockSpec, Any]]:
    """Returns what both passes read, in the order of `_Read`."""
    query, key, value, biases, numbers, seed, bits = arrays
    given = [(_SCALARS, seed), *((blocks.row, array) for array in (query, key, value))]
    given += [(pl.BlockSpec((3, blocks.lanes), lambda b, p: (0, p)), biases)]
    given += blocks.numbers(numbers)
    if bits is not None:
        square = (1, blocks.sums.block_shape[2], *bits.shape[2:])
        given.append((pl.BlockSpec(square, lambda b, p: (b, p, 0, 0)), bits))
    return given


class Blocks:
    """The part of each array that a program works on: a row, and the heads that fill its lanes."""

    def __init__(self, kernels: Kernels, size: int, like: jax.Array):
        self._kernels, self._size, self._shape = kernels, size, like.shape
        b, self.length, w = like.shape
        self.lanes = max(LANES, size)
        heads, s = self.lanes // size, self.length
        self._grid = (b, w // self.lanes)
        self.row = pl.BlockSpec((1, s, self.lanes), lambda b, p: (b, 0, p))
        self.sums = pl.BlockSpec((1, 1, heads, s), lambda b, p: (b, p, 0, 0))
        self.sums_shape = jax.ShapeDtypeStruct((*self._grid, heads, s), jnp.float32)

    def numbers(self, numbers: jax.Array, **how: Any) -> list[tuple[pl.BlockSpec, Any]]:
        """Returns the numbers of the keys, whose block is made so, and of the queries."""
        keys = pl.BlockSpec((1, self.length, 1), lambda b, p: (b, 0, 0), **how)
        queries = pl.BlockSpec((1, 1, self.length), lambda b, p: (b, 0, 0))
        return [(keys, numbers[:, :, None]), (queries, numbers[:, None, :])]

    def call(
        self,
        kernel: Callable[..., None],
        name: str,
        inputs: list[tuple[pl.BlockSpec, Any]],
        outputs: list[tuple[pl.BlockSpec, Any]],
        products: int,
        keys: int = 0,
        scratch: Sequence[Any] = (),
    ) -> list[jax.Array]:
        """Runs a kernel; `products` counts those of scores with a head's [K, W / H].

        `keys` are those that a query looks at, 0: all; `scratch`, see `launch`.
        """
        b, s, w = self._shape
        work = b * s * (keys or s) * w
        costs = 2 * products * work, work // self._size
        return launch(self._kernels, kernel, name, self._grid, inputs, outputs, *costs, scratch)


class Heads:
    """A program's heads, each in lanes of its own.

    A product over all lanes is one over a head's own if the others are zero in one operand.
    """

    def __init__(self, size: int, lanes: int):
        self.size, self.lanes, self.heads = size, lanes, range(lanes // size)
        factor = 1.0 / math.sqrt(size)
        # A power of two changes no bit of a query; another factor would be rounded with it.
        is_exact = math.frexp(factor)[0] == 0.5
        self.before, self.after = (factor, 1.0) if is_exact else (1.0, factor)

    def own(self, head: int, x: jax.Array, axis: int) -> jax.Array:
        """Returns x with zeros in the lanes, along `axis`, of other heads."""
        lane = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        mine = (lane >= head * self.size) & (lane < (head + 1) * self.size)
        return jnp.where(mine, x, jnp.zeros_like(x))

    def scores(self, key: jax.Array, query: jax.Array, lowered: jax.Array) -> jax.Array:
        """Returns float32 [K, Q]."""
        scores = dot(key, query, 1, 1)
        return (scores if self.after == 1.0 else scores * self.after) + lowered


class _Read(Heads):
    """What both passes read."""

    def __init__(self, static: _Attention, refs: Sequence[Any]):
        seed, query, key, value, biases, keys, queries, *bits = refs
        self._static, self._seed, self._bits = static, seed, bits[0] if bits else None
        super().__init__(static.size, query.shape[2])
        self.tokens = query.shape[1]
        self.operand = query.dtype if static.kernels.operands == "as_they_come" else jnp.float32
        self.query, self.key, self.value = (
            (ref[0].astype(jnp.float32) + biases[i : i + 1, :]).astype(self.operand)
            for i, ref in enumerate((query, key, value))
        )
        if static.rows == "shared":
            self.lowered = jnp.where(keys[0] == queries[0], 0.0, MASKED_SCORE)  # [K, Q]
        else:
            self.lowered = jnp.where(keys[0] == 0, MASKED_SCORE, 0.0)  # [K, 1]

    def own_query(self, head: int) -> jax.Array:
        """Returns a head's queries, scaled, [Q, lanes]."""
        query = self.own(head, self.query, 1)
        return query * jnp.asarray(self.before, self.operand)

    def keep(self, head: int) -> jax.Array:
        """Draws bool [K, Q]."""
        shape, program = (self.tokens, self.tokens), 0
        if self._bits is None:
            program = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
            program = program * len(self.heads) + head
        bits = None if self._bits is None else self._bits[0, head]
        return _keep(self._static.rate, self._seed, bits, program, shape)


def _forward_kernel(static: _Attention, *refs: Any) -> None:
    *read, context_ref, sums_ref = refs
    row = _Read(static, read)
    value = row.value.T
    context = jnp.zeros((row.lanes, row.tokens), jnp.float32)
    for head in row.heads:
        scores = row.scores(row.key, row.own_query(head), row.lowered)
        highest = scores.max(axis=0, keepdims=True)
        weights = jnp.exp(scores - highest)
        sums = weights.sum(axis=0, keepdims=True)  # [1, Q]
        sums_ref[0, 0, head : head + 1, :] = highest + jnp.log(sums)
        if static.rate:
            weights = jnp.where(row.keep(head), weights, 0.0)
        product = dot(row.own(head, value, 0), weights.astype(row.operand), 1, 0)
        context += product * (_scale(static.rate) / sums)
    context_ref[0] = context.T.astype(context_ref.dtype)


def _backward_kernel(static: _Attention, *refs: Any) -> None:
    *read, context_ref, sums_ref, gradient_ref = refs[:-4]
    d_query_ref, d_key_ref, d_value_ref, d_biases_ref = refs[-4:]
    row = _Read(static, read)
    gradient = gradient_ref[0].astype(jnp.float32)
    # The softmax's gradient subtracts sum(p * dp) over keys, which is sum(context * gradient).
    products = (gradient * context_ref[0].astype(jnp.float32)).T  # [lanes, Q]
    scaled = (gradient * _scale(static.rate)).astype(row.operand)
    key = row.key.T
    d_query = jnp.zeros((row.lanes, row.tokens), jnp.float32)
    d_key, d_value = (jnp.zeros((row.tokens, row.lanes), jnp.float32) for _ in range(2))
    for head in row.heads:
        query, upper = row.own_query(head), row.own(head, scaled, 1)
        scores = row.scores(row.key, query, row.lowered)
        probs = jnp.exp(scores - sums_ref[0, 0, head : head + 1, :])
        inner = row.own(head, products, 0).sum(axis=0, keepdims=True)
        d_probs, dropped = dot(row.value, upper, 1, 1), probs
        if static.rate:
            keep = row.keep(head)
            d_probs, dropped = jnp.where(keep, d_probs, 0.0), jnp.where(keep, probs, 0.0)
        d_scores = (probs * (d_probs - inner)).astype(row.operand)
        d_value += dot(dropped.astype(row.operand), upper, 1, 0)
        d_key += dot(d_scores, query, 1, 0)
        d_query += dot(row.own(head, key, 0), d_scores, 1, 0)
    d_query = d_query.T * (row.before * row.after)
    d_key = d_key * row.after
    for i, (ref, d) in enumerate(
        ((d_query_ref, d_query), (d_key_ref, d_key), (d_value_ref, d_value))
    ):
        ref[0] = d.astype(ref.dtype)
        d_biases_ref[0, i : i + 1, :] = d.sum(axis=0, keepdims=True)


def with_gradient(
    forward: Callable[..., Any], backward: Callable[..., tuple[Any, ...]]
) -> Callable[..., jax.Array]:
    """Makes `(static, *arrays) -> context` of its two passes.

    Args:
      forward: `(static, *arrays)` to the context and the logarithms of the softmax's sums, which
        the backward pass finds under the names of `attention.KEPT`.
      backward: `(static, arrays, context, logarithms, gradient)` to the arrays' gradients.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(static: Any, *arrays: Any) -> jax.Array:
        return run_forward(static, *arrays)[0]

    def run_forward(static: Any, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        context, log_sums = forward(static, *arrays)
        of_log_sums, of_context = KEPT
        context = checkpoint_name(context, of_context)
        return context, (arrays, context, checkpoint_name(log_sums, of_log_sums))

    def run_backward(static: Any, kept: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
        return backward(static, *kept, gradient)

    run.defvjp(run_forward, run_backward)
    return run


_attention = with_gradient(_forward, _backward)


# --- the norm of a residual -----------------------------------------------------------------------


class _Norm(NamedTuple):
    """What is known of a norm before it runs."""

    kernels: Kernels  # how they are made
    rate: float  # of dropout


def residual_norm(
    kernels: Kernels,
    x: jax.Array,
    y: jax.Array,
    bias: jax.Array,
    scale: jax.Array,
    shift: jax.Array,
    seed: jax.Array,
    rate: float,
    bits: jax.Array | None = None,
) -> jax.Array:
    """Computes the layer norm of x + dropout(y + bias), biased variance, eps 1e-12.

    The backward pass finds x and y, and nothing else. Vectors are float32 [W].

    Args:
      kernels: how they are made.
      x: [R, W], the residual.
      y: [R, W], a product without its bias.
      bias: of that product.
      scale: of the norm.
      shift: of the norm.
      seed: as of `attention`.
      rate: share of y dropped.
      bits: uint32 [R, W] instead of drawn ones.

    Returns:
      [R, W], in the type of x.
    """
    return _residual_norm(_Norm(kernels, rate), x, y, bias, scale, shift, seed, bits)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _residual_norm(static: _Norm, *arrays: Any) -> jax.Array:
    return _norm_forward(static, *arrays)[0]


def _norm_forward(static: _Norm, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    x = arrays[0]
    rows, _ = _row_blocks(x)
    (normed,) = _run_norm(static, _norm_kernel, "norm_forward", arrays, (), [(rows, x)])
    return normed, arrays


def _norm_backward(
    static: _Norm, kept: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    x = kept[0]
    rows, _ = _row_blocks(x)
    sums = jax.ShapeDtypeStruct((len(x) // rows.block_shape[0], 1, x.shape[1]), jnp.float32)
    of_columns = pl.BlockSpec((1, 1, x.shape[1]), lambda i: (i, 0, 0))
    outputs = [*[(rows, x)] * 2, *[(of_columns, sums)] * 3]
    d_x, d_y, *d_columns = _run_norm(
        static, _norm_backward_kernel, "norm_backward", kept, (gradient,), outputs
    )
    return d_x, d_y, *(d.sum(axis=(0, 1)) for d in d_columns), None, None


_residual_norm.defvjp(_norm_forward, _norm_backward)


def _row_blocks(x: jax.Array) -> tuple[pl.BlockSpec, pl.BlockSpec]:
    """Returns the blocks of rows of tokens, and that of a row of columns."""
    rows, width = x.shape
    fit = (h for h in _TOKENS if rows % h == 0 and h * width <= _AT_ONCE)
    height = next(fit, _TOKENS[-1])
    columns = pl.BlockSpec((1, width), lambda i: (0, 0))
    return pl.BlockSpec((height, width), lambda i: (i, 0)), columns


def _run_norm(
    static: _Norm,
    kernel: Callable[..., None],
    name: str,
    arrays: tuple[Any, ...],
    more: tuple[jax.Array, ...],
    outputs: list[tuple[pl.BlockSpec, Any]],
) -> list[jax.Array]:
    x, y, *vectors, seed, bits = arrays
    rows, columns = _row_blocks(x)
    inputs = [(_SCALARS, seed), (rows, x), (rows, y)]
    inputs += [(columns, vector[None]) for vector in vectors]
    has_bits = bits is not None
    inputs += [(rows, array) for array in (*more, *[bits] * has_bits)]
    grid = (x.shape[0] // rows.block_shape[0],)
    run = functools.partial(kernel, static.rate, has_bits)
    return launch(static.kernels, run, name, grid, inputs, outputs, 0, len(x))


def _sum_of(rate: float, refs: Sequence[Any], bits: Any) -> tuple[jax.Array, jax.Array | None]:
    """Returns x + dropout(y + bias), float32, and what is kept of y; None if all of it."""
    seed, x_ref, y_ref, bias_ref = refs
    x = x_ref[...].astype(jnp.float32)
    y = y_ref[...].astype(jnp.float32) + bias_ref[...]
    if not rate:
        return x + y, None
    given = None if bits is None else bits[...]
    program = 0 if bits is not None else pl.program_id(0)
    keep = _keep(rate, seed, given, program, y.shape)
    return x + jnp.where(keep, y * _scale(rate), 0.0), keep


def _normed(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns x with mean 0 and variance 1 along lanes, and one over its deviation."""
    centred = x - x.mean(axis=-1, keepdims=True)
    deviation = lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + _EPS)
    return centred * deviation, deviation


def _norm_kernel(rate: float, has_bits: bool, *refs: Any) -> None:
    seed, x, y, bias, scale, shift, *bits, out = refs
    total, _ = _sum_of(rate, (seed, x, y, bias), bits[0] if has_bits else None)
    normed, _ = _normed(total)
    out[...] = (normed * scale[...] + shift[...]).astype(out.dtype)


def _norm_backward_kernel(rate: float, has_bits: bool, *refs: Any) -> None:
    *refs, d_x, d_y, d_bias, d_scale, d_shift = refs
    seed, x, y, bias, scale, _, gradient_ref, *bits = refs
    total, keep = _sum_of(rate, (seed, x, y, bias), bits[0] if has_bits else None)
    normed, deviation = _normed(total)
    gradient = gradient_ref[...].astype(jnp.float32)
    upper = gradient * scale[...]
    along = (upper * normed).mean(axis=-1, keepdims=True)
    d_total = deviation * (upper - upper.mean(axis=-1, keepdims=True) - normed * along)
    d_x[...] = d_total.astype(d_x.dtype)
    d_dropped = d_total if keep is None else jnp.where(keep, d_total * _scale(rate), 0.0)
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

_SCALARS = pl.BlockSpec(memory_space=pltpu.SMEM)


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


def _scale(rate: float) -> float:
    """Returns one over the probability with which something is kept."""
    return _STEPS / (_STEPS - round(rate * _STEPS))


def _keep(
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
