"""Kernels for TPUs: attention with rotary positions, to whole rows or to a window.

They compute what `encoder.rotate` and `attention.attend` compute, in the same types. A
program holds a row's keys and values of as many heads as fill its lanes, and goes through its
queries block by block: of a layer with a window it looks at the keys near the block alone, of
another at all, of long rows part by part (Dao et al. 2022, FlashAttention, section 3.1).

Shape letters: B batch, S sequence, W width, H heads; of one block K keys and Q queries. Scores lie
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
from bert_jax.model.kernels import LANES, Kernels

# Rows that a program holds whole, with their gradients.
LONGEST = 8_192
# Keys whose scores with a block are there at a time, of all or a part of a longer row's.
_AT_ONCE, _PART = 2_048, 1_024
# A core's own memory that such a program is given at least; v2 to v4 have less.
_MEMORY = 64 * 2**20
# Queries of a block: of layers that attend to whole rows, and of those with a window.
_QUERIES, _NEAR_QUERIES = 256, 128
# Places of the first key near a block are a multiple of this, which no type's tile exceeds.
_STEP = 64


class RotaryAttentionShape(NamedTuple):
    """The part of `attention` that is known before it runs."""

    kernels: Kernels  # how they are made
    size: int  # W / H
    rows: Literal["alone", "shared"]  # as of `attention_kernels.RotaryAttentionShape`
    half: int  # of the window, places on each side; 0: every layer attends to whole rows
    wholes: int  # layers that attend to whole rows, of so many `layers`
    layers: int


def fits(kernels: Kernels, heads: int, length: int, width: int, half: int) -> bool:
    """Returns whether kernels can be used for such rows; `half` of a window, 0 if there is none."""
    size = width // heads
    lanes = (LANES % size == 0 or size % LANES == 0) and width % LANES == 0
    rows = length % _QUERIES == 0 and _near(half) <= min(length, _AT_ONCE) and length <= LONGEST
    rows &= length <= _AT_ONCE or length % _PART == 0
    return lanes and rows and size % 2 == 0 and kernels.memory >= _MEMORY


def _near(half: int) -> int:
    """Returns how many keys a block of queries with a window looks at."""
    return _NEAR_QUERIES + 2 * -(-half // _STEP) * _STEP if half else 0


def turns(rotations: jax.Array, size: int) -> jax.Array:
    """Lays cosines and sines out as kernels read them: for each lane of the heads that share them.

    Args:
      rotations: float32 [2, 2, ..., S, 1, W / H / 2], of `encoder.rope_angles`.
      size: W / H.

    Returns:
      float32 [2, 2, B or 1, S, lanes]: of layers that attend to whole rows, and of the others,
      cosines, and sines with the sign that a lane's other half is added with.
    """
    cosine, sine = rotations[:, 0], rotations[:, 1]
    laid = jnp.stack(
        [jnp.concatenate([cosine, cosine], -1), jnp.concatenate([-sine, sine], -1)], axis=1
    )[..., 0, :]
    laid = laid if laid.ndim == 5 else laid[:, :, None]
    return jnp.tile(laid, max(LANES, size) // size)


def _forward(static: RotaryAttentionShape, *arrays: jax.Array) -> list[jax.Array]:
    query, blocks = arrays[0], Blocks(static.kernels, static.size, arrays[0])
    outputs = [(blocks.row, query), (blocks.sums, blocks.sums_shape)]
    return _run(static, blocks, _forward_kernel, arrays, [], outputs, 2, [query.dtype])


def _backward(
    static: RotaryAttentionShape, arrays: tuple[jax.Array, ...], *more: jax.Array
) -> tuple[jax.Array | None, ...]:
    query, blocks = arrays[0], Blocks(static.kernels, static.size, arrays[0])
    read = [*zip((blocks.row, blocks.sums, blocks.row), more, strict=True)]
    outputs, scratch = [(blocks.row, query)] * 3, [query.dtype, jnp.float32, jnp.float32]
    made = _run(static, blocks, _backward_kernel, arrays, read, outputs, 5, scratch)
    return *made, None, None, None


def _run(
    static: RotaryAttentionShape,
    blocks: Blocks,
    kernel: Callable[..., None],
    arrays: tuple[jax.Array, ...],
    more: list[tuple[pl.BlockSpec, Any]],
    outputs: list[tuple[pl.BlockSpec, Any]],
    products: int,
    scratch: Sequence[Any],
) -> list[jax.Array]:
    """Runs a pass over whole rows or near each query, as the layer is.

    `scratch`: arrays [S, lanes] of its own.
    """
    *read, turns, numbers, is_global = arrays
    # Once, not once more for the next program: they are large, and change with the row at most.
    once = {"pipeline_mode": pl.Buffered(1)}
    own, shape = turns.shape[2] > 1, (2, 1, blocks.length, blocks.lanes)
    laid = pl.BlockSpec(shape, lambda b, p: (0, b if own else 0, 0, 0), **once)
    memory = [pltpu.VMEM((blocks.length, blocks.lanes), dtype) for dtype in scratch]

    def run(half: int, turns: jax.Array) -> list[jax.Array]:
        # In the order of `_Row`.
        inputs = [*((blocks.row, array) for array in read), (laid, turns)]
        inputs += [*blocks.numbers(numbers, **once), *more]
        name = f"rotary{kernel.__name__.removesuffix('_kernel')}_{'window' if half else 'rows'}"
        of_half = functools.partial(kernel, static._replace(half=half))
        return blocks.call(of_half, name, inputs, outputs, products, _near(half), memory)

    if not static.half:
        return run(0, turns[0])
    # A plan reads there how often which is run.
    with jax.named_scope(f"held_{static.wholes}_of_{static.layers}"):
        return lax.cond(is_global, lambda: run(0, turns[0]), lambda: run(static.half, turns[1]))


# Takes an `RotaryAttentionShape` and
#   query, key, value: [B, S, W], all heads, one behind the other,
#   turns: see the function of this name,
#   numbers: int32 [B, S], see `RotaryAttentionShape.rows`,
#   is_global: bool [], whether the layer attends to whole rows,
# to [B, S, W], in the type of value: scaled dot-product attention of what is turned first.
attention = with_gradient(_forward, _backward)


class _Row(Heads):
    """What both passes read, and how they go through it."""

    def __init__(self, static: RotaryAttentionShape, refs: Sequence[Any], key_ref: Any):
        self._query, key, self.value_ref, self._turns, self._keys, self._queries = refs
        super().__init__(static.size, key.shape[2])
        self._static, self.key_ref = static, key_ref  # where the turned keys are kept, [S, lanes]
        self.dtype, self.length = key.dtype, key.shape[1]
        every = pl.ds(0, self.length)
        key_ref[...] = self.turned(key[0], every, 1.0).astype(self.dtype)
        self.queries = _NEAR_QUERIES if static.half else _QUERIES
        self.keys = _near(static.half) or self.length

    def turned(self, x: jax.Array, places: Any, sign: float) -> jax.Array:
        """Turns x, [n, lanes] of so many places, back if the sign is -1; float32."""
        x = x.astype(jnp.float32)
        half = self.size // 2
        lane = lax.broadcasted_iota(jnp.int32, x.shape, 1) % self.size
        from_right = pltpu.roll(x, self.lanes - half, 1)
        other = jnp.where(lane < half, from_right, pltpu.roll(x, half, 1))
        return x * self._turns[0, 0, places, :] + other * (sign * self._turns[1, 0, places, :])

    def each(self, run: Callable[[Any, Any], None]) -> None:
        """Runs something for each block: it is given the block's queries and their keys."""

        def body(number: jax.Array, nothing: None) -> None:
            first = pl.multiple_of(number * self.queries, self.queries)
            start = 0
            if self._static.half:
                reach = (self.keys - self.queries) // 2
                start = jnp.clip(first - reach, 0, self.length - self.keys)
                start = pl.multiple_of(start, _STEP)
            run(pl.ds(first, self.queries), pl.ds(start, self.keys))

        lax.fori_loop(0, self.length // self.queries, body, None)

    def parts(self, keys: Any, run: Callable[[Any, Any], Any], start: Any) -> Any:
        """Runs something for the keys of a block: at once, after None; or for each part of them.

        It is given the keys and what it returned for the part before, `start` at the first.
        """
        if self.keys <= _AT_ONCE:
            return run(keys, None)

        def body(number: jax.Array, state: Any) -> Any:
            return run(pl.ds(pl.multiple_of(number * _PART, _PART), _PART), state)

        return lax.fori_loop(0, self.keys // _PART, body, start)

    def query(self, queries: Any) -> jax.Array:
        """Returns a block's queries, turned and scaled, [Q, lanes]."""
        turned = self.turned(self._query[0, queries, :], queries, 1.0).astype(self.dtype)
        return turned * jnp.asarray(self.before, self.dtype)

    def lowered(self, queries: Any, keys: Any) -> jax.Array:
        """Returns what is added to the scores of a block, [K, Q] or [K, 1]."""
        numbers = self._keys[0, keys, :]
        seen = numbers != 0
        if self._static.rows == "shared":
            seen = numbers == self._queries[0, :, queries]
        if self._static.half:
            shape = keys.size, self.queries
            place = lax.broadcasted_iota(jnp.int32, shape, 0) + keys.start
            place -= lax.broadcasted_iota(jnp.int32, shape, 1) + queries.start
            seen &= jnp.abs(place) <= self._static.half
        return jnp.where(seen, 0.0, MASKED_SCORE)


def _forward_kernel(static: RotaryAttentionShape, *refs: Any) -> None:
    *read, context_ref, sums_ref, key_ref = refs
    row = _Row(static, read, key_ref)

    def block(queries: Any, keys: Any) -> None:
        query = row.query(queries)

        def part(keys: Any, before: Any) -> Any:
            key, lowered = key_ref[keys, :], row.lowered(queries, keys)
            value = row.value_ref[0, keys, :].T
            after = []
            for head in row.heads:
                scores = row.scores(key, row.own(head, query, 1), lowered)
                highest = scores.max(axis=0, keepdims=True)
                if before is not None:
                    highest = jnp.maximum(highest, before[head][0])
                weights = jnp.exp(scores - highest)
                sums = weights.sum(axis=0, keepdims=True)  # [1, Q]
                product = kernels_lib.dot(row.own(head, value, 0), weights.astype(row.dtype), 1, 0)
                if before is not None:
                    factor = jnp.exp(before[head][0] - highest)
                    sums += factor * before[head][1]
                    product += factor * before[head][2]
                after.append((highest, sums, product))
            return after

        line, whole = (1, row.queries), (row.lanes, row.queries)
        start = jnp.full(line, 2 * MASKED_SCORE), jnp.zeros(line), jnp.zeros(whole)
        context = jnp.zeros(whole, jnp.float32)
        for head, (highest, sums, product) in enumerate(
            row.parts(keys, part, [start] * len(row.heads))
        ):
            sums_ref[0, 0, head : head + 1, queries] = highest + jnp.log(sums)
            context += product / sums
        context_ref[0, queries, :] = context.T.astype(context_ref.dtype)

    row.each(block)


def _backward_kernel(static: RotaryAttentionShape, *refs: Any) -> None:
    *read, context_ref, sums_ref, gradient_ref = refs[:-6]
    d_query_ref, d_key_ref, d_value_ref, key_ref, d_key, d_value = refs[-6:]
    row = _Row(static, read, key_ref)
    d_key[...], d_value[...] = jnp.zeros_like(d_key), jnp.zeros_like(d_value)

    def block(queries: Any, keys: Any) -> None:
        query, gradient = row.query(queries), gradient_ref[0, queries, :]
        # The softmax's gradient subtracts sum(p * dp) over keys: sum(context * gradient).
        products = gradient.astype(jnp.float32) * context_ref[0, queries, :].astype(jnp.float32)
        products = products.T  # [lanes, Q]
        nothing = jnp.zeros((row.lanes, row.queries), jnp.float32)

        def part(keys: Any, of_query: Any) -> jax.Array:
            key, lowered = key_ref[keys, :], row.lowered(queries, keys)
            value, turned_key = row.value_ref[0, keys, :], key.T
            of_query = nothing if of_query is None else of_query
            of_key, of_value = (jnp.zeros((keys.size, row.lanes), jnp.float32) for _ in range(2))
            for head in row.heads:
                own_query, upper = row.own(head, query, 1), row.own(head, gradient, 1)
                sums = sums_ref[0, 0, head : head + 1, queries]
                probs = jnp.exp(row.scores(key, own_query, lowered) - sums)
                inner = row.own(head, products, 0).sum(axis=0, keepdims=True)
                d_probs = kernels_lib.dot(value, upper, 1, 1)
                d_scores = (probs * (d_probs - inner)).astype(row.dtype)
                of_value += kernels_lib.dot(probs.astype(row.dtype), upper, 1, 0)
                of_key += kernels_lib.dot(d_scores, own_query, 1, 0)
                of_query += kernels_lib.dot(row.own(head, turned_key, 0), d_scores, 1, 0)
            d_key[keys, :] += of_key
            d_value[keys, :] += of_value
            return of_query

        of_query = row.parts(keys, part, nothing).T * (row.before * row.after)
        d_query_ref[0, queries, :] = row.turned(of_query, queries, -1.0).astype(row.dtype)

    row.each(block)
    every = pl.ds(0, row.length)
    d_key_ref[0] = row.turned(d_key[...] * row.after, every, -1.0).astype(row.dtype)
    d_value_ref[0] = d_value[...].astype(row.dtype)
