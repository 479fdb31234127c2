"""Attention kernels for TPUs. Nothing of size [S, S] leaves a core.

They compute what `attention.attend` computes, in the same types; see `model.kernels`.

Shape letters: B batch, S sequence (Q queries, K keys), W width, H heads. Scores are [K, Q]: a
softmax then sums along sublanes, which is cheaper than along lanes.
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

from bert_jax.model import kernels as kernels_lib
from bert_jax.model.attention import MASKED_SCORE, SAVED_NAMES
from bert_jax.model.kernels import LANES, KernelCall, Kernels


class AttentionShape(NamedTuple):
    """The static arguments of `attention`."""

    kernels: Kernels  # settings of the kernels
    size: int  # W / H
    rate: float  # of dropout on the probabilities
    # `alone`: numbers are 1 for tokens and 0 for padding, to which no query attends; `shared`: a
    # query attends to the tokens that have its own number.
    rows: Literal["alone", "shared"]


def _forward(static: AttentionShape, *arrays: Any) -> list[jax.Array]:
    query, blocks = arrays[0], Blocks(static.kernels, static.size, arrays[0])
    outputs = [(blocks.row, query), (blocks.sums, blocks.sums_shape)]
    kernel = functools.partial(_forward_kernel, static)
    call = KernelCall(kernel, "attention_forward", _inputs(blocks, *arrays), outputs)
    return blocks.run(call, products=2)


def _backward(static: AttentionShape, arrays: tuple[Any, ...], *more: jax.Array) -> tuple[Any, ...]:
    query, blocks = arrays[0], Blocks(static.kernels, static.size, arrays[0])
    b, _, w = query.shape
    inputs = _inputs(blocks, *arrays)
    inputs += zip((blocks.row, blocks.sums, blocks.row), more, strict=True)
    biases_block = pl.BlockSpec((1, 3, blocks.lanes), lambda b, p: (b, 0, p))
    outputs = [(blocks.row, query)] * 3
    outputs += [(biases_block, jax.ShapeDtypeStruct((b, 3, w), jnp.float32))]
    kernel = functools.partial(_backward_kernel, static)
    call = KernelCall(kernel, "attention_backward", inputs, outputs)
    *gradients, d_biases = blocks.run(call, products=5)
    return *gradients, d_biases.sum(axis=0), None, None, None


def _inputs(blocks: "Blocks", *arrays: Any) -> list[tuple[pl.BlockSpec, Any]]:
    """Returns the inputs of both passes with their blocks, in the order of `_AttentionInputs`."""
    query, key, value, biases, numbers, seed, bits = arrays
    inputs = [(kernels_lib.SCALARS, seed), *((blocks.row, array) for array in (query, key, value))]
    inputs += [(pl.BlockSpec((3, blocks.lanes), lambda b, p: (0, p)), biases)]
    inputs += blocks.numbers(numbers)
    if bits is not None:
        square = (1, blocks.sums_shape.shape[2], *bits.shape[2:])
        inputs.append((pl.BlockSpec(square, lambda b, p: (b, p, 0, 0)), bits))
    return inputs


class Blocks:
    """The blocks of a program: one row, and the heads that fill a register's lanes."""

    def __init__(self, kernels: Kernels, size: int, query: jax.Array):
        self.kernels, self._size, self._shape = kernels, size, query.shape
        b, self.length, w = query.shape
        self.lanes = max(LANES, size)
        heads, s = self.lanes // size, self.length
        self._grid = (b, w // self.lanes)
        self.row = pl.BlockSpec((1, s, self.lanes), lambda b, p: (b, 0, p))
        self.sums = pl.BlockSpec((1, 1, heads, s), lambda b, p: (b, p, 0, 0))
        self.sums_shape = jax.ShapeDtypeStruct((*self._grid, heads, s), jnp.float32)

    def numbers(self, numbers: jax.Array, **options: Any) -> list[tuple[pl.BlockSpec, Any]]:
        """Returns the numbers of keys and of queries; `options` are for the block of the keys."""
        keys = pl.BlockSpec((1, self.length, 1), lambda b, p: (b, 0, 0), **options)
        queries = pl.BlockSpec((1, 1, self.length), lambda b, p: (b, 0, 0))
        return [(keys, numbers[:, :, None]), (queries, numbers[:, None, :])]

    def scratch(self, dtype: Any) -> Any:
        """Returns memory of a program for an array [S, lanes]."""
        return pltpu.VMEM((self.length, self.lanes), dtype)

    def run(self, call: KernelCall, products: int, keys: int = 0) -> list[jax.Array]:
        """Runs a kernel with a number of `products`, each of scores [Q, K] with [K, W / H].

        `keys` is the number of keys that a query attends to, 0: all.
        """
        b, s, w = self._shape
        work = b * s * (keys or s) * w
        return call.run(self.kernels, self._grid, 2 * products * work, work // self._size)


class Heads:
    """The heads of a program. Each head occupies some of the lanes.

    A product over all lanes equals one over a head's lanes if one operand is 0 in all other lanes.
    """

    def __init__(self, size: int, lanes: int):
        self.size, self.lanes, self.heads = size, lanes, range(lanes // size)
        factor = 1.0 / math.sqrt(size)
        # Scaling a query by a power of two is exact; another factor scales the scores instead.
        is_exact = math.frexp(factor)[0] == 0.5
        self.query_scale, self.score_scale = (factor, 1.0) if is_exact else (1.0, factor)

    def select(self, head: int, x: jax.Array, axis: int) -> jax.Array:
        """Returns x with zeros in the lanes, along `axis`, of other heads."""
        lane = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        is_head = (lane >= head * self.size) & (lane < (head + 1) * self.size)
        return jnp.where(is_head, x, jnp.zeros_like(x))

    def scores(self, key: jax.Array, query: jax.Array, bias: jax.Array) -> jax.Array:
        """Returns scores plus `bias`, float32 [K, Q]."""
        scores = kernels_lib.dot(key, query, 1, 1)
        return (scores if self.score_scale == 1.0 else scores * self.score_scale) + bias


class _AttentionInputs(Heads):
    """The inputs of both passes."""

    def __init__(self, static: AttentionShape, refs: Sequence[Any]):
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
            self.score_bias = jnp.where(keys[0] == queries[0], 0.0, MASKED_SCORE)  # [K, Q]
        else:
            self.score_bias = jnp.where(keys[0] == 0, MASKED_SCORE, 0.0)  # [K, 1]

    def head_query(self, head: int) -> jax.Array:
        """Returns the scaled queries of a head, [Q, lanes]."""
        query = self.select(head, self.query, 1)
        return query * jnp.asarray(self.query_scale, self.operand)

    def keep(self, head: int) -> jax.Array:
        """Draws bool [K, Q], False for dropped probabilities."""
        shape, program = (self.tokens, self.tokens), 0
        if self._bits is None:
            program = pl.program_id(0) * pl.num_programs(1) + pl.program_id(1)
            program = program * len(self.heads) + head
        bits = None if self._bits is None else self._bits[0, head]
        return kernels_lib.draw_keep(self._static.rate, self._seed, bits, program, shape)


def _forward_kernel(static: AttentionShape, *refs: Any) -> None:
    *inputs, context_ref, sums_ref = refs
    row = _AttentionInputs(static, inputs)
    value = row.value.T
    context = jnp.zeros((row.lanes, row.tokens), jnp.float32)
    for head in row.heads:
        scores = row.scores(row.key, row.head_query(head), row.score_bias)
        highest = scores.max(axis=0, keepdims=True)
        weights = jnp.exp(scores - highest)
        sums = weights.sum(axis=0, keepdims=True)  # [1, Q]
        sums_ref[0, 0, head : head + 1, :] = highest + jnp.log(sums)
        if static.rate:
            weights = jnp.where(row.keep(head), weights, 0.0)
        product = kernels_lib.dot(row.select(head, value, 0), weights.astype(row.operand), 1, 0)
        context += product * (kernels_lib.dropout_scale(static.rate) / sums)
    context_ref[0] = context.T.astype(context_ref.dtype)


def _backward_kernel(static: AttentionShape, *refs: Any) -> None:
    *inputs, context_ref, sums_ref, gradient_ref = refs[:-4]
    d_query_ref, d_key_ref, d_value_ref, d_biases_ref = refs[-4:]
    row = _AttentionInputs(static, inputs)
    gradient = gradient_ref[0].astype(jnp.float32)
    # The softmax's gradient subtracts sum(p * dp) over keys, which is sum(context * gradient).
    products = (gradient * context_ref[0].astype(jnp.float32)).T  # [lanes, Q]
    scaled = (gradient * kernels_lib.dropout_scale(static.rate)).astype(row.operand)
    key = row.key.T
    d_query = jnp.zeros((row.lanes, row.tokens), jnp.float32)
    d_key, d_value = (jnp.zeros((row.tokens, row.lanes), jnp.float32) for _ in range(2))
    for head in row.heads:
        query, upstream = row.head_query(head), row.select(head, scaled, 1)
        scores = row.scores(row.key, query, row.score_bias)
        probs = jnp.exp(scores - sums_ref[0, 0, head : head + 1, :])
        inner = row.select(head, products, 0).sum(axis=0, keepdims=True)
        d_probs, dropped = kernels_lib.dot(row.value, upstream, 1, 1), probs
        if static.rate:
            keep = row.keep(head)
            d_probs, dropped = jnp.where(keep, d_probs, 0.0), jnp.where(keep, probs, 0.0)
        d_scores = (probs * (d_probs - inner)).astype(row.operand)
        d_value += kernels_lib.dot(dropped.astype(row.operand), upstream, 1, 0)
        d_key += kernels_lib.dot(d_scores, query, 1, 0)
        d_query += kernels_lib.dot(row.select(head, key, 0), d_scores, 1, 0)
    d_query = d_query.T * (row.query_scale * row.score_scale)
    d_key = d_key * row.score_scale
    for i, (ref, d) in enumerate(
        ((d_query_ref, d_query), (d_key_ref, d_key), (d_value_ref, d_value))
    ):
        ref[0] = d.astype(ref.dtype)
        d_biases_ref[0, i : i + 1, :] = d.sum(axis=0, keepdims=True)


def with_gradient(
    forward: Callable[..., Any], backward: Callable[..., tuple[Any, ...]]
) -> Callable[..., jax.Array]:
    """Combines two passes into a differentiable function `(static, *arrays) -> context`.

    Args:
      forward: `(static, *arrays)` to the context and the logarithms of the softmax's sums, which
        are saved under the names of `attention.SAVED_NAMES`.
      backward: `(static, arrays, context, logarithms, gradient)` to the arrays' gradients.
    """

    @functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
    def run(static: Any, *arrays: Any) -> jax.Array:
        return run_forward(static, *arrays)[0]

    def run_forward(static: Any, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        context, log_sums = forward(static, *arrays)
        log_sums_name, context_name = SAVED_NAMES
        context = checkpoint_name(context, context_name)
        return context, (arrays, context, checkpoint_name(log_sums, log_sums_name))

    def run_backward(static: Any, saved: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
        return backward(static, *saved, gradient)

    run.defvjp(run_forward, run_backward)
    return run


# Scaled dot-product attention with dropout on the probabilities. Arguments are an `AttentionShape`,
#   query, key, value: [B, S, W], concatenated heads, products without their biases,
#   biases: float32 [3, W], of these products,
#   numbers: int32 [B, S], see `AttentionShape.rows`,
#   seed: int32 [2], depends on step, micro-batch, shard, layer and site,
#   bits: uint32 [B, H, K, Q], replaces drawn bits; None: bits are drawn.
# Returns [B, S, W], in the type of value.
attention = with_gradient(_forward, _backward)
