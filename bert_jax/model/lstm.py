"""LSTMs that read a text from left to right and from right to left.

Cells and projected states are clipped at 3, and forget gates begin open, as in allenai/bilm-tf,
training.py (Peters et al. 2018).

Shape letters: B batch, S sequence; of a direction N what it reads, P what it gives, C cells.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from bert_jax.model import layers

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

    zeros = jnp.zeros((len(x), gives), jnp.float32), jnp.zeros((len(x), cells), jnp.float32)
    by_place = jnp.swapaxes(of_input, 0, 1), jnp.swapaxes(there, 0, 1)
    return jnp.swapaxes(lax.scan(step, zeros, by_place)[1], 0, 1)


def _times(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Multiplies [..., N] and [N, M], and adds up in float32."""
    return jnp.einsum("...n,nm->...m", x, kernel, preferred_element_type=jnp.float32)
