"""Kernels for TPUs: attention with rotary positions, in global layers and in local ones.

They compute what `encoder.rotate` and `attention.attend` compute, in the same types. A program
holds the keys and values of one row, for the heads that fill a register's lanes, and loops over
blocks of queries. In a local layer a block attends to the keys near the block; in a global layer to
all keys, in parts if the row is long (Dao et al. 2022, FlashAttention, section 3.1).

Shape letters: B batch, S sequence, W width, H heads; K keys and Q queries of a block. Scores are
[K, Q], as in `attention_kernels`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from bert_jax.model import kernels as kernels_lib
from bert_jax.model.attention import MASKED_SCORE
from bert_jax.model.attention_kernels import Blocks, Heads, with_gradient
from bert_jax.model.kernels import LANES, KernelCall, Kernels

# Longest row; a program holds the whole row and its gradients.
LONGEST = 8_192
# Maximum number of keys scored at a time, and the keys of a part of a longer row.
_MAX_KEYS, _PART = 2_048, 1_024
# A row of more tokens is long; its programs may use `Kernels.long_row_memory`.
_LONG = 4_096
# Bytes of VMEM that the program of a short row and of a long row needs. TPUs v2 to v4 have less.
_MEMORY, _LONG_MEMORY = 48 * 2**20, 56 * 2**20
# With fewer bytes, an input of a long row has one buffer, not two; unhidden copies take 1% of time.
_TWO_BUFFERS = 64 * 2**20
# Queries of a block in global layers and in local layers.
_GLOBAL_QUERIES, _LOCAL_QUERIES = 256, 128
# The first key near a block is at a multiple of this; no type has a larger tile.
_STEP = 64


class RotaryAttentionShape(NamedTuple):
    """The static arguments of `attention`."""

    kernels: Kernels  # settings of the kernels
    size: int  # W / H
    rows: Literal["alone", "shared"]  # see `attention_kernels.AttentionShape`
    half_window: int  # positions on each side of a query; 0: every layer is global
    global_layers: int  # number of global layers among all `layers`
    layers: int


def fits(kernels: Kernels, heads: int, length: int, width: int, half_window: int) -> bool:
    """Returns whether kernels support these rows; `half_window` is 0 if every layer is global."""
    size = width // heads
    fits_lanes = (LANES % size == 0 or size % LANES == 0) and width % LANES == 0
    keys = _local_keys(half_window)
    fits_blocks = length % _GLOBAL_QUERIES == 0 and keys <= min(length, _MAX_KEYS)
    fits_blocks &= length <= _MAX_KEYS or length % _PART == 0
    is_long = length > _LONG
    memory = kernels.long_row_memory if is_long else kernels.memory
    has_memory = memory >= (_LONG_MEMORY if is_long else _MEMORY)
    return fits_lanes and fits_blocks and length <= LONGEST and size % 2 == 0 and has_memory


def _local_keys(half_window: int) -> int:
    """Returns the number of keys that a block of queries attends to in a local layer."""
    return _LOCAL_QUERIES + 2 * -(-half_window // _STEP) * _STEP if half_window else 0


def lay_out_angles(angles: jax.Array, size: int) -> jax.Array:
    """Lays out cosines and sines for kernels: a column for each lane.

    Args:
      angles: float32 [2, 2, ..., S, 1, W / H / 2], from `encoder.rotary_cos_sin`.
      size: W / H.

    Returns:
      float32 [2, 2, B or 1, S, lanes]: for global and local layers, the cosines, and the sines with
      the sign for the other half of the head.
    """
    cosine, sine = angles[:, 0], angles[:, 1]
    columns = jnp.stack(
        [jnp.concatenate([cosine, cosine], -1), jnp.concatenate([-sine, sine], -1)], axis=1
    )[..., 0, :]
    columns = columns if columns.ndim == 5 else columns[:, :, None]
    return jnp.tile(columns, max(LANES, size) // size)


def _blocks(static: RotaryAttentionShape, query: jax.Array) -> Blocks:
    kernels = static.kernels
    if query.shape[1] > _LONG:
        kernels = kernels._replace(memory=kernels.long_row_memory)
    return Blocks(kernels, static.size, query)


def _input_row(blocks: Blocks) -> pl.BlockSpec:
    """Returns the block of an input, a row, with one buffer if two of a long row do not fit."""
    if blocks.length <= _LONG or blocks.kernels.memory >= _TWO_BUFFERS:
        return blocks.row
    block = blocks.row
    return pl.BlockSpec(block.block_shape, block.index_map, pipeline_mode=pl.Buffered(1))


def _forward(static: RotaryAttentionShape, *arrays: jax.Array) -> list[jax.Array]:
    query, blocks = arrays[0], _blocks(static, arrays[0])
    outputs = [(blocks.row, query), (blocks.sums, blocks.sums_shape)]
    scratch = [blocks.scratch(query.dtype)]
    call = KernelCall(_forward_kernel, "rotary_forward", [], outputs, scratch)
    return _run(static, blocks, arrays, call, products=2)


def _backward(
    static: RotaryAttentionShape, arrays: tuple[jax.Array, ...], *more: jax.Array
) -> tuple[jax.Array | None, ...]:
    query, blocks = arrays[0], _blocks(static, arrays[0])
    row = _input_row(blocks)
    inputs = [*zip((row, blocks.sums, row), more, strict=True)]
    scratch = [blocks.scratch(dtype) for dtype in (query.dtype, jnp.float32, jnp.float32)]
    outputs = [(blocks.row, query)] * 3
    call = KernelCall(_backward_kernel, "rotary_backward", inputs, outputs, scratch)
    return *_run(static, blocks, arrays, call, products=5), None, None, None


def _run(
    static: RotaryAttentionShape,
    blocks: Blocks,
    arrays: tuple[jax.Array, ...],
    call: KernelCall,
    products: int,
) -> list[jax.Array]:
    """Runs a pass for a global or a local layer; the inputs of `call` come after `arrays`."""
    *vectors, angles, numbers, is_global = arrays
    # One buffer, not two: the blocks are large, and do not change within a row.
    single_buffer = {"pipeline_mode": pl.Buffered(1)}
    by_row, shape = angles.shape[2] > 1, (2, 1, blocks.length, blocks.lanes)
    angles_block = pl.BlockSpec(shape, lambda b, p: (0, b if by_row else 0, 0, 0), **single_buffer)

    def run(half_window: int, angles: jax.Array) -> list[jax.Array]:
        # In the order of `_RotaryInputs`.
        inputs = [*((_input_row(blocks), array) for array in vectors), (angles_block, angles)]
        inputs += [*blocks.numbers(numbers, **single_buffer), *call.inputs]
        kernel = functools.partial(call.kernel, static._replace(half_window=half_window))
        name = f"{call.name}_{'window' if half_window else 'rows'}"
        passed = call._replace(kernel=kernel, name=name, inputs=inputs)
        return blocks.run(passed, products, _local_keys(half_window))

    if not static.half_window:
        return run(0, angles[0])
    local = functools.partial(run, static.half_window)
    # `plan` reads from this name how often the condition holds.
    with jax.named_scope(f"held_{static.global_layers}_of_{static.layers}"):
        return lax.cond(is_global, lambda: run(0, angles[0]), lambda: local(angles[1]))


# Scaled dot-product attention of rotated queries and keys. Arguments are a `RotaryAttentionShape`,
#   query, key, value: [B, S, W], concatenated heads,
#   angles: see `lay_out_angles`,
#   numbers: int32 [B, S], see `RotaryAttentionShape.rows`,
#   is_global: bool [], whether the layer is global.
# Returns [B, S, W], in the type of value.
attention = with_gradient(_forward, _backward)


class _RotaryInputs(Heads):
    """The inputs of both passes, and the loop over their blocks."""

    def __init__(self, static: RotaryAttentionShape, refs: Sequence[Any], key_ref: Any):
        self._query, key, self.value_ref, self._angles, self._keys, self._queries = refs
        super().__init__(static.size, key.shape[2])
        self._static, self.key_ref = static, key_ref  # scratch for the rotated keys, [S, lanes]
        self.dtype, self.length = key.dtype, key.shape[1]
        key_ref[...] = self.rotate(key[0], pl.ds(0, self.length), 1.0).astype(self.dtype)
        self.queries = _LOCAL_QUERIES if static.half_window else _GLOBAL_QUERIES
        self.keys = _local_keys(static.half_window) or self.length

    def rotate(self, x: jax.Array, positions: Any, sign: float) -> jax.Array:
        """Rotates x, [n, lanes] at n positions, or rotates back if the sign is -1; float32."""
        x = x.astype(jnp.float32)
        half = self.size // 2
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) % self.size
        from_right = pltpu.roll(x, self.lanes - half, 1)
        other = jnp.where(lane < half, from_right, pltpu.roll(x, half, 1))
        cosine, sine = self._angles[0, 0, positions, :], self._angles[1, 0, positions, :]
        return x * cosine + other * (sign * sine)

    def run_blocks(self, run: Callable[[Any, Any], None]) -> None:
        """Calls `run` for each block with the slices of its queries and keys."""

        def body(number: jax.Array, nothing: None) -> None:
            first = pl.multiple_of(number * self.queries, self.queries)
            start = 0
            if self._static.half_window:
                reach = (self.keys - self.queries) // 2
                start = jnp.clip(first - reach, 0, self.length - self.keys)
                start = pl.multiple_of(start, _STEP)
            run(pl.ds(first, self.queries), pl.ds(start, self.keys))

        lax.fori_loop(0, self.length // self.queries, body, None)

    def run_parts(self, keys: Any, run: Callable[[Any, Any], Any], start: Any) -> Any:
        """Calls `run(keys, None)` for all keys of a block, or `run(part, state)` for each part.

        The state is the result for the previous part, `start` at the first.
        """
        if self.keys <= _MAX_KEYS:
            return run(keys, None)

        def body(number: jax.Array, state: Any) -> Any:
            return run(pl.ds(pl.multiple_of(number * _PART, _PART), _PART), state)

        return lax.fori_loop(0, self.keys // _PART, body, start)

    def query(self, queries: Any) -> jax.Array:
        """Returns the rotated and scaled queries of a block, [Q, lanes]."""
        rotated = self.rotate(self._query[0, queries, :], queries, 1.0).astype(self.dtype)
        return rotated * jnp.asarray(self.query_scale, self.dtype)

    def score_bias(self, queries: Any, keys: Any) -> jax.Array:
        """Returns the bias of a block's scores, which masks keys, [K, Q] or [K, 1]."""
        numbers = self._keys[0, keys, :]
        visible = numbers != 0
        if self._static.rows == "shared":
            visible = numbers == self._queries[0, :, queries]
        if self._static.half_window:
            shape = keys.size, self.queries
            distance = lax.broadcasted_iota(jnp.int32, shape, 0) + keys.start
            distance -= lax.broadcasted_iota(jnp.int32, shape, 1) + queries.start
            visible &= jnp.abs(distance) <= self._static.half_window
        return jnp.where(visible, 0.0, MASKED_SCORE)


def _forward_kernel(static: RotaryAttentionShape, *refs: Any) -> None:
    *inputs, context_ref, sums_ref, key_ref = refs
    row = _RotaryInputs(static, inputs, key_ref)

    def block(queries: Any, keys: Any) -> None:
        query = row.query(queries)

        def part(keys: Any, previous: Any) -> Any:
            key, bias = key_ref[keys, :], row.score_bias(queries, keys)
            value = row.value_ref[0, keys, :].T
            state = []
            for head in row.heads:
                scores = row.scores(key, row.select(head, query, 1), bias)
                highest = scores.max(axis=0, keepdims=True)
                if previous is not None:
                    highest = jnp.maximum(highest, previous[head][0])
                weights = jnp.exp(scores - highest)
                sums = weights.sum(axis=0, keepdims=True)  # [1, Q]
                own_value = row.select(head, value, 0)
                product = kernels_lib.dot(own_value, weights.astype(row.dtype), 1, 0)
                if previous is not None:
                    factor = jnp.exp(previous[head][0] - highest)
                    sums += factor * previous[head][1]
                    product += factor * previous[head][2]
                state.append((highest, sums, product))
            return state

        line, shape = (1, row.queries), (row.lanes, row.queries)
        start = jnp.full(line, 2 * MASKED_SCORE), jnp.zeros(line), jnp.zeros(shape)
        context = jnp.zeros(shape, jnp.float32)
        for head, (highest, sums, product) in enumerate(
            row.run_parts(keys, part, [start] * len(row.heads))
        ):
            sums_ref[0, 0, head : head + 1, queries] = highest + jnp.log(sums)
            context += product / sums
        context_ref[0, queries, :] = context.T.astype(context_ref.dtype)

    row.run_blocks(block)


def _backward_kernel(static: RotaryAttentionShape, *refs: Any) -> None:
    *inputs, context_ref, sums_ref, gradient_ref = refs[:-6]
    d_query_ref, d_key_ref, d_value_ref, key_ref, d_key, d_value = refs[-6:]
    row = _RotaryInputs(static, inputs, key_ref)
    d_key[...], d_value[...] = jnp.zeros_like(d_key), jnp.zeros_like(d_value)

    def block(queries: Any, keys: Any) -> None:
        query, gradient = row.query(queries), gradient_ref[0, queries, :]
        # The softmax's gradient subtracts sum(p * dp) over keys: sum(context * gradient).
        products = gradient.astype(jnp.float32) * context_ref[0, queries, :].astype(jnp.float32)
        products = products.T  # [lanes, Q]
        zeros = jnp.zeros((row.lanes, row.queries), jnp.float32)

        def part(keys: Any, d_query: Any) -> jax.Array:
            key, bias = key_ref[keys, :], row.score_bias(queries, keys)
            value, key_columns = row.value_ref[0, keys, :], key.T
            d_query = zeros if d_query is None else d_query
            part_key, part_value = (jnp.zeros((keys.size, row.lanes), jnp.float32) for _ in (0, 1))
            for head in row.heads:
                own_query, upstream = row.select(head, query, 1), row.select(head, gradient, 1)
                sums = sums_ref[0, 0, head : head + 1, queries]
                probs = jnp.exp(row.scores(key, own_query, bias) - sums)
                inner = row.select(head, products, 0).sum(axis=0, keepdims=True)
                d_probs = kernels_lib.dot(value, upstream, 1, 1)
                d_scores = (probs * (d_probs - inner)).astype(row.dtype)
                part_value += kernels_lib.dot(probs.astype(row.dtype), upstream, 1, 0)
                part_key += kernels_lib.dot(d_scores, own_query, 1, 0)
                d_query += kernels_lib.dot(row.select(head, key_columns, 0), d_scores, 1, 0)
            d_key[keys, :] += part_key
            d_value[keys, :] += part_value
            return d_query

        d_query = row.run_parts(keys, part, zeros).T * (row.query_scale * row.score_scale)
        d_query_ref[0, queries, :] = row.rotate(d_query, queries, -1.0).astype(row.dtype)

    row.run_blocks(block)
    positions = pl.ds(0, row.length)
    d_key_ref[0] = row.rotate(d_key[...] * row.score_scale, positions, -1.0).astype(row.dtype)
    d_value_ref[0] = d_value[...].astype(row.dtype)
