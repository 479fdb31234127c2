"""ELMo's encoder: LSTMs from left to right and from right to left (Peters et al. 2018, section 3).

Numerics follow the code of its authors (allenai/bilm-tf, training.py): cells and states are clipped
at 3, forget gates begin open, states are projected, layers after the first add to what they read,
and dropout comes before each layer and before the softmax. What differs: pieces have a table of
vectors, which both directions share and the softmax reads, in place of convolutions over
characters; the softmax is whole; and every row begins with states of zero.

The halves of D are the two directions, each of which sees its own half alone. The layers'
parameters are stacked along a first dimension L and scanned, those of both directions along a
second.

Shape letters: B batch, S sequence, D width, L layers, V vocabulary; of a direction N what it
reads, P = D / 2 what it gives, C cells.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from bert_jax.config import Model
from bert_jax.errors import InputError
from bert_jax.model import layers
from bert_jax.model.attention import Packing, Shared
from bert_jax.model.encoder import (
    Embedding,
    Loop,
    Scores,
    initializer,
    look_up,
    padded_vocab_size,
    run_layers,
)

# Of cells and of projected states.
_CLIP = 3.0


class Direction(nnx.Module):
    """An LSTM, whose state may be projected (Sak et al. 2014)."""

    def __init__(self, reads: int, cells: int, gives: int | None, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.glorot_uniform()
        # Kernel [N + P, 4 C], the rows of what is read before those of the state; input gate,
        # candidate, forget gate and output gate side by side.
        self.gates = layers.Dense(reads + (gives or cells), 4 * cells, init, rngs=rngs)
        # Kernel [C, P]; None: the state is as wide as the cells.
        self.projection = None if gives is None else layers.Linear(cells, gives, init, rngs=rngs)


def both_directions(
    reads: int, cells: int, gives: int | None = None, *, rngs: nnx.Rngs
) -> Direction:
    """Returns a layer: two of them, whose parameters carry a first dimension 2."""
    keys = jax.random.split(rngs.params(), 2)
    return jax.vmap(lambda key: Direction(reads, cells, gives, rngs=nnx.Rngs(params=key)))(keys)


class Embeddings(nnx.Module):
    """Vectors of pieces, half as wide as the encoder."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        rows, half = padded_vocab_size(cfg), cfg.hidden_size // 2
        self.word = Embedding(cfg.vocab_size, half, initializer(cfg), rngs=rngs, rows=rows)


class Encoder(nnx.Module):
    """Embeddings and L layers."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        self.embeddings = Embeddings(cfg, rngs=rngs)
        keys = jax.random.split(rngs.params(), cfg.num_hidden_layers)
        half, cells = cfg.hidden_size // 2, cfg.intermediate_size

        def layer(key: jax.Array) -> Direction:
            return both_directions(half, cells, half, rngs=nnx.Rngs(params=key))

        # A layer whose parameters carry the first dimensions [L, 2].
        self.layers = jax.vmap(layer)(keys)


class Softmax(nnx.Module):
    """Its bias; its weights are the word embeddings."""

    def __init__(self, cfg: Model, *, rngs: nnx.Rngs):
        del rngs
        self.output_bias = nnx.Param(jnp.zeros(padded_vocab_size(cfg), jnp.float32))


def encode(
    encoder: Encoder,
    cfg: Model,
    input_ids: jax.Array,
    segment_ids: jax.Array,
    input_mask: jax.Array | Shared | Packing,
    noise: layers.Noise | None,
    loop: Loop,
    outputs: Literal["last", "all"] = "last",
) -> jax.Array:
    """Runs the encoder, see `model.kinds`; segments are not looked at.

    Layer 0 is the embeddings twice, once for each direction.
    """
    del segment_ids
    dtype, mask = jnp.dtype(cfg.compute_dtype), input_mask
    word = look_up(encoder.embeddings.word.embedding[...], input_ids, dtype).astype(dtype)

    def run(
        layer: Direction, number: jax.Array, x: jax.Array, noise: layers.Noise | None, _: Scores
    ) -> jax.Array:
        x = layers.dropout(x, noise, cfg.hidden_dropout_prob).astype(dtype)
        if isinstance(mask, Packing):
            halves = jnp.stack(jnp.split(mask.unpack(x), 2, axis=-1))
            read = mask.pack(run_both(layer, halves, mask.mask))
        else:
            read = run_both(layer, jnp.stack(jnp.split(x, 2, axis=-1)), mask)
        return (read + jnp.where(number == 0, 0.0, x.astype(jnp.float32))).astype(dtype)

    twice = jnp.concatenate([word, word], axis=-1)
    last, every = run_layers(run, encoder.layers, twice, noise, loop, outputs)
    return last if every is None else every


def run_both(layer: Direction, x: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Runs an LSTM in each direction, over what each of them reads, [2, B, S, N].

    `input_mask` is [B, S], 0 for padding, over which states stay as they are. Gives float32
    [B, S, 2 P], from left to right and from right to left side by side.
    """
    there = jnp.stack([input_mask, input_mask[:, ::-1]]) > 0
    left, right = jax.vmap(_run)(layer, jnp.stack([x[0], x[1, :, ::-1]]), there)
    return jnp.concatenate([left, right[:, ::-1]], axis=-1)


def _run(lstm: Direction, x: jax.Array, there: jax.Array) -> jax.Array:
    """Runs an LSTM from left to right: [B, S, N], bool [B, S] -> float32 [B, S, P]."""
    kernel = lstm.gates.kernel[...].astype(x.dtype)
    of_state = kernel[x.shape[-1] :]
    cells, gives = kernel.shape[1] // 4, len(of_state)
    # What is read is known beforehand, for all places at once.
    of_input = _times(x, kernel[: x.shape[-1]]) + lstm.gates.bias[...]

    def step(
        carry: tuple[jax.Array, jax.Array], now: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, cell = carry
        gates, there = now[0] + _times(state.astype(x.dtype), of_state), now[1][:, None]
        admit, candidate, keep, give = jnp.split(gates, 4, axis=-1)
        # These gates begin open: what was read is not lost at once (Jozefowicz et al. 2015).
        kept = jax.nn.sigmoid(keep + 1.0) * cell
        new = jnp.clip(kept + jax.nn.sigmoid(admit) * jnp.tanh(candidate), -_CLIP, _CLIP)
        shown = jax.nn.sigmoid(give) * jnp.tanh(new)
        if lstm.projection is not None:
            projection = lstm.projection.kernel[...].astype(x.dtype)
            shown = jnp.clip(_times(shown.astype(x.dtype), projection), -_CLIP, _CLIP)
        carry = jnp.where(there, shown, state), jnp.where(there, new, cell)
        return carry, carry[0]

    zeros = tuple(jnp.zeros((len(x), width), jnp.float32) for width in (gives, cells))
    by_place = jnp.swapaxes(of_input, 0, 1), jnp.swapaxes(there, 0, 1)
    return jnp.swapaxes(lax.scan(step, zeros, by_place)[1], 0, 1)


def _times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies [..., N] and [N, M], and adds up in float32."""
    return jnp.einsum("...n,nm->...m", x, kernel, preferred_element_type=jnp.float32)


def attention_probabilities(encoder: Encoder, cfg: Model, hidden: jax.Array) -> jax.Array:
    """Raises InputError: there is no attention."""
    del encoder, hidden
    raise InputError(f"model.kind={cfg.kind}: has no attention to show; ask another kind")


def token_flops(cfg: Model, sequence_length: int) -> int:
    """Counts the operations of a forward pass through all layers, a token of any row."""
    del sequence_length
    half, cells = cfg.hidden_size // 2, cfg.intermediate_size
    # Gates of what is read and of the state, and the projection, of both directions.
    return cfg.num_hidden_layers * 2 * 2 * (2 * half * 4 * cells + cells * half)
