"""Attention on NVIDIA GPUs by the fused kernels of cuDNN. Nothing of size [H, S, S] is stored.

They compute what `attention.attend` computes without dropout of probabilities, in the same types.
cuDNN can drop probabilities, too, but XLA gives it bits that depend on the number of earlier calls
of the process: a resumed run would draw other bits, and in a loop over layers the backward pass
other bits than the forward pass (CudnnGraph::UpdateDropoutState in XLA's cuda_dnn.h).

What a query may attend to is given to cuDNN in one of three ways:
    lengths       rows of one text each, which padding follows; keys and queries of padding are
                  skipped
    causal mask   the same rows with `model.direction=left_to_right`: padding is never to the left
    bias          windows, and rows that several texts share; `attention.MASKED_SCORE` is added to
                  the scores of other keys
cuDNN's own window is not used: through XLA it has no right side, and without a causal mask it does
not mask keys to the right at all. In a local layer rows are split into blocks instead, which
attend to the keys of their windows only.

cuDNN's kernels for several texts in a row, by their offsets, are not used either: the largest
number of texts would have to be fixed, and rows with more texts would give wrong results.

Shape letters: B batch, S sequence, H heads, W width; N blocks of all rows, Q queries and K keys of
a block.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from bert_jax import private_apis
from bert_jax.config import Model, Parallelism
from bert_jax.model import attention
from bert_jax.model.attention import MASKED_SCORE, Packing, Shared
from bert_jax.model.encoder import half_window
from bert_jax.private_apis import CudnnInputs

# The first compute capability with fused attention, and that of the H100, where heads of 256 fit.
_AMPERE, _HOPPER = (8, 0), (9, 0)


def refusal(model: Model, device: jax.Device, parallelism: Parallelism) -> str | None:
    """Returns why no layer can use cuDNN's attention on this device; None if layers can."""
    if device.platform != "gpu" or private_apis.cudnn_version() is None:
        return "the device is not an NVIDIA GPU"
    if parallelism.attention == "xla":
        return "parallelism.attention=xla"
    if model.relative_position_buckets:
        return "model.relative_position_buckets adds a bias to the scores"
    if model.code:
        return "model.code computes its own attention"
    if model.compute_dtype != "bfloat16":
        return f"model.compute_dtype={model.compute_dtype}, and cuDNN needs bfloat16"
    if parallelism.tensor > 1:
        return f"parallelism.tensor={parallelism.tensor} splits heads over devices"
    capability = tuple(map(int, device.compute_capability.split(".")))
    if capability < _AMPERE:
        return f"compute capability {device.compute_capability}, and cuDNN needs 8.0"
    width = model.hidden_size // model.num_attention_heads
    widest = 256 if capability >= _HOPPER else 128
    if width % 8 or width > widest:
        return f"heads are {width} wide, and cuDNN needs a multiple of 8 up to {widest}"
    return None


def training_refusal(model: Model, device: jax.Device, parallelism: Parallelism) -> str | None:
    """Returns why training steps cannot use it, since they may drop probabilities; else None."""
    reason, rate = refusal(model, device, parallelism), model.attention_probs_dropout_prob
    if reason is None and rate:
        return f"model.attention_probs_dropout_prob={rate:g}; set it to 0 for attention by cuDNN"
    return reason


def fits(model: Model, length: int, has_noise: bool) -> bool:
    """Returns whether cuDNN can compute rows of this length, with dropout if `has_noise`."""
    # cuDNN has no gradient with a bias if the length is odd.
    return length % 2 == 0 and not (has_noise and model.attention_probs_dropout_prob > 0)


class CudnnAttentionShape(NamedTuple):
    """The static arguments of attention by cuDNN."""

    is_causal: bool  # whether a query attends to keys up to its own position only
    half_window: int  # positions on each side of a query in local layers; 0: all layers are global
    is_shared: bool  # whether several texts share a row


def attend(
    cfg: Model,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    is_global: jax.Array | None,
) -> jax.Array:
    """Computes scaled dot-product attention.

    Args:
      cfg: the model; its direction and its window are used.
      query: bfloat16 [B, S, H, W / H].
      key: as query.
      value: as query.
      input_mask: as in `attention.attend`, but padding must follow all tokens of a row.
      is_global: whether this layer is global, bool []; None: all layers are.

    Returns:
      The same shape and type as query.
    """
    if isinstance(input_mask, Packing):
        query, key, value = map(input_mask.unpack, (query, key, value))
        return input_mask.pack(attend(cfg, query, key, value, input_mask.mask, is_global))
    is_shared, half = isinstance(input_mask, Shared), half_window(cfg)
    half = 0 if is_global is None or query.shape[1] <= half + 1 else half
    static = CudnnAttentionShape(cfg.direction == "left_to_right", half, is_shared)
    numbers = input_mask.numbers if isinstance(input_mask, Shared) else input_mask
    return _attend(static, query, key, value, numbers, is_global)


# Arguments are a `CudnnAttentionShape`, queries, keys and values, the numbers of the texts (1 for
# every token and 0 for padding unless texts share rows), int32 [B, S], and `is_global`.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: CudnnAttentionShape, *arrays: Any) -> jax.Array:
    return _attend_forward(static, *arrays)[0]


def _attend_forward(static: CudnnAttentionShape, *arrays: Any) -> tuple[jax.Array, tuple[Any, ...]]:
    def run(blocks: QueryBlocks) -> tuple[jax.Array, jax.Array]:
        context, sums = private_apis.cudnn_attention(blocks.inputs(*arrays[:3]))
        return blocks.merge(jnp.swapaxes(sums, 1, 2)), blocks.merge(context)

    saved = _run_layer(static, arrays, run)
    sums, context = map(checkpoint_name, saved, attention.SAVED_NAMES)
    return context, (*arrays, sums, context)


def _attend_backward(
    static: CudnnAttentionShape, saved: tuple[Any, ...], gradient: jax.Array
) -> tuple[jax.Array | None, ...]:
    *arrays, sums, context = saved

    def run(blocks: QueryBlocks) -> tuple[jax.Array, ...]:
        own_sums, *own = map(blocks.split, (sums, context, gradient))
        d_query, d_key, d_value = private_apis.cudnn_attention_gradients(
            blocks.inputs(*arrays[:3]), jnp.swapaxes(own_sums, 1, 2), *own
        )
        return blocks.merge(d_query), blocks.merge_keys(d_key), blocks.merge_keys(d_value)

    return *_run_layer(static, arrays, run), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _run_layer(
    static: CudnnAttentionShape, arrays: Sequence[Any], run: Callable[["QueryBlocks"], Any]
) -> Any:
    """Runs a pass for the layer, which is a global or a local one; `arrays` as in `_attend`."""
    *_, numbers, is_global = arrays
    in_global = functools.partial(run, QueryBlocks(static, numbers, is_local=False))
    if not static.half_window:
        return in_global()
    return lax.cond(is_global, in_global, lambda: run(QueryBlocks(static, numbers, is_local=True)))


class QueryBlocks:
    """Rows as N blocks of Q queries, each with the K keys that the block attends to.

    In global layers a block is a row. In local layers a block is as long as two half windows, and
    its keys are twice as many: those from half a window before the block to half a window after it.
    If rows have no whole number of such blocks, or only one, a block is a row there, too.
    """

    def __init__(self, static: CudnnAttentionShape, numbers: jax.Array, is_local: bool):
        self._static, self._numbers, self._is_local = static, numbers, is_local
        length, block = numbers.shape[1], 2 * static.half_window
        self._is_split = is_local and length > block and length % block == 0
        self._length, self._queries = length, block if self._is_split else length

    def split(self, x: jax.Array) -> jax.Array:
        """Splits rows into blocks: [B, S, ...] -> [N, Q, ...]."""
        return x.reshape(-1, self._queries, *x.shape[2:])

    def merge(self, x: jax.Array) -> jax.Array:
        """Joins blocks to rows: [N, Q, ...] -> [B, S, ...]."""
        return x.reshape(-1, self._length, *x.shape[2:])

    def split_keys(self, x: jax.Array) -> jax.Array:
        """Returns the keys of each block, zeros outside of the row: [B, S, ...] -> [N, K, ...]."""
        if not self._is_split:
            return x
        half = self._static.half_window
        padded = jnp.pad(x, [(0, 0), (half, half), *[(0, 0)] * (x.ndim - 2)])
        parts = padded.reshape(len(x), -1, self._queries, *x.shape[2:])
        keys = jnp.concatenate([parts[:, :-1], parts[:, 1:]], axis=2)
        return keys.reshape(-1, 2 * self._queries, *x.shape[2:])

    def merge_keys(self, gradient: jax.Array) -> jax.Array:
        """Adds up gradients of the same key in float32, the transpose of `split_keys`."""
        if not self._is_split:
            return gradient
        wide = gradient.astype(jnp.float32)
        rows = jax.ShapeDtypeStruct((*self._numbers.shape, *wide.shape[2:]), wide.dtype)
        return jax.linear_transpose(self.split_keys, rows)(wide)[0].astype(gradient.dtype)

    def inputs(self, query: jax.Array, key: jax.Array, value: jax.Array) -> CudnnInputs:
        """Returns the inputs of cuDNN for queries, keys and values [B, S, H, W / H]."""
        static, bias, lengths = self._static, None, None
        if (allowed := self._allowed_by_bias()) is not None:
            bias = jnp.where(allowed, 0.0, MASKED_SCORE).astype(query.dtype)[:, None]
        if not (self._is_split or static.is_causal or static.is_shared):
            lengths = jnp.maximum(self._numbers.sum(axis=1), 1)
        vectors = self.split(query), self.split_keys(key), self.split_keys(value)
        return CudnnInputs(*vectors, bias, lengths, static.is_causal and not self._is_split)

    def _allowed_by_bias(self) -> jax.Array | None:
        """Returns where a query may attend to a key, bool [N or 1, Q, K].

        Conditions that the lengths or the causal mask of cuDNN express are left out; None: nothing
        remains.
        """
        conditions, half = [], self._static.half_window
        query, key = (
            self.split(self._numbers)[:, :, None],
            self.split_keys(self._numbers)[:, None, :],
        )
        # Positions from the first query of the block.
        position = jnp.arange(query.shape[1])[:, None]
        key_position = jnp.arange(key.shape[2]) - (half if self._is_split else 0)
        if self._is_local:
            conditions.append((jnp.abs(position - key_position) <= half)[None])
        if self._is_split and self._static.is_causal:
            conditions.append((key_position <= position)[None])
        if self._static.is_shared:
            conditions.append(query == key)
        elif self._is_split:
            conditions.append(key > 0)
        return functools.reduce(jnp.logical_and, conditions) if conditions else None
