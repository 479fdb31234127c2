"""Texts one behind the other in a row, with no padding between them.

What is done to each token by itself takes rows as they are; attention takes each text by itself.

Shape letters: B batch, S sequence, N texts of all rows, K places for the tokens of a text.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Packing(NamedTuple):
    """Where the texts stand. Tokens are counted through all rows, B * S of them.

    Attributes:
      positions: int32 [B, S], of each token in its text.
      tokens: int32 [N, K], of each text, in order; B * S where there is none.
      places: int32 [B, S], of each token in `tokens`, counted through all N * K; any for padding
        at the end of a row.
    """

    positions: jax.Array
    tokens: jax.Array
    places: jax.Array

    @property
    def mask(self) -> jax.Array:
        """int32 [N, K], 0 where there is no token."""
        return (self.tokens < self.positions.size).astype(jnp.int32)

    def apart(self, x: jax.Array) -> jax.Array:
        """[B, S, ...] -> [N, K, ...], each text by itself; zero where there is no token."""
        rows = x.reshape(self.positions.size, *x.shape[2:])
        return jnp.take(rows, self.tokens, axis=0, mode="fill", fill_value=0)

    def together(self, x: jax.Array) -> jax.Array:
        """[N, K, ...] -> [B, S, ...], as it was before `apart`."""
        return jnp.take(x.reshape(self.tokens.size, *x.shape[2:]), self.places, axis=0, mode="clip")
