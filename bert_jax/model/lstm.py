"""Bidirectional LSTMs.

Cells and projected states are clipped at 3, and forget gates have a bias of 1, as in
allenai/bilm-tf, training.py (Peters et al. 2018).

Shape letters: B batch, S sequence; N inputs, P outputs and C cells of a direction.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from bert_jax.model import layers

_CLIP = 3.0  # for cells and projected states


class Direction(nnx.Module):
    """An LSTM, whose state may be projected (Sak et al. 2014)."""

    def __init__(self, inputs: int, cells: int, width: int | None, *, rngs: nnx.Rngs):
        init = jax.nn.initializers.glorot_uniform()
        # Kernel [N + P, 4 C]: rows for the input, then for the state; columns for the input gate,
        # the candidate, the forget gate and the output gate.
        self.gates = layers.Dense(inputs + (width or cells), 4 * cells, init, rngs=rngs)
        # Kernel [C, P]; None: the state is as wide as the cells.
        self.projection = None if width is None else layers.Linear(cells, width, init, rngs=rngs)


def both_directions(
    inputs: int, cells: int, width: int | None = None, *, rngs: nnx.Rngs
) -> Direction:
    """Returns a bidirectional layer: two LSTMs, whose parameters have a first dimension 2."""
    keys = jax.random.split(rngs.params(), 2)
    return jax.vmap(lambda key: Direction(inputs, cells, width, rngs=nnx.Rngs(params=key)))(keys)


def run_both(layer: Direction, x: jax.Array, input_mask: jax.Array) -> jax.Array:
    """Runs both LSTMs, each over its own input: [2, B, S, N] -> float32 [B, S, 2 P].

    `input_mask` is [B, S], 0 for padding, which leaves the states unchanged. The output
    concatenates left to right and right to left.
    """
    is_token = jnp.stack([input_mask, input_mask[:, ::-1]]) > 0
    left, right = jax.vmap(_run)(layer, jnp.stack([x[0], x[1, :, ::-1]]), is_token)
    return jnp.concatenate([left, right[:, ::-1]], axis=-1)


def _run(lstm: Direction, x: jax.Array, is_token: jax.Array) -> jax.Array:
    """Runs an LSTM from left to right: [B, S, N], bool [B, S] -> float32 [B, S, P]."""
    kernel = lstm.gates.kernel[...].astype(x.dtype)
    state_kernel = kernel[x.shape[-1] :]
    cells, width = kernel.shape[1] // 4, len(state_kernel)
    # The product of the inputs does not depend on states: it is computed for all positions at once.
    input_gates = _times(x, kernel[: x.shape[-1]]) + lstm.gates.bias[...]

    def step(
        carry: tuple[jax.Array, jax.Array], inputs: tuple[jax.Array, jax.Array]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state, cell = carry
        gates = inputs[0] + _times(state.astype(x.dtype), state_kernel)
        admit, candidate, forget, emit = jnp.split(gates, 4, axis=-1)
        # Open forget gates keep early inputs from being lost at once (Jozefowicz et al. 2015).
        old_cell = jax.nn.sigmoid(forget + 1.0) * cell
        new_cell = jnp.clip(old_cell + jax.nn.sigmoid(admit) * jnp.tanh(candidate), -_CLIP, _CLIP)
        new_state = jax.nn.sigmoid(emit) * jnp.tanh(new_cell)
        if lstm.projection is not None:
            projection = lstm.projection.kernel[...].astype(x.dtype)
            new_state = jnp.clip(_times(new_state.astype(x.dtype), projection), -_CLIP, _CLIP)
        is_token = inputs[1][:, None]
        carry = jnp.where(is_token, new_state, state), jnp.where(is_token, new_cell, cell)
        return carry, carry[0]

    zeros = jnp.zeros((len(x), width), jnp.float32), jnp.zeros((len(x), cells), jnp.float32)
    steps = jnp.swapaxes(input_gates, 0, 1), jnp.swapaxes(is_token, 0, 1)
    return jnp.swapaxes(lax.scan(step, zeros, steps)[1], 0, 1)


def _times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies [..., N] and [N, M], and sums in float32."""
    return jnp.einsum("...n,nm->...m", x, kernel, preferred_element_type=jnp.float32)
