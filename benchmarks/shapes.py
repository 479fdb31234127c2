"""The models that are timed, and a batch for each. NumPy alone: both environments read this."""

import dataclasses

import numpy as np

VOCAB_SIZE = 30_522


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and its batch."""

    layers: int
    width: int
    heads: int
    batch: int
    turn: int  # steps in a row, about a second together: a turn soon has its caches warm
    sequence: int = 128
    predictions: int = 20

    @property
    def tokens(self) -> int:
        """Positions a step."""
        return self.batch * self.sequence


SHAPES = {
    "micro": Shape(layers=1, width=32, heads=2, batch=4, turn=1),  # for tests
    "tiny": Shape(layers=2, width=128, heads=2, batch=16, turn=4),
    "mini": Shape(layers=4, width=256, heads=4, batch=16, turn=2),
    "small": Shape(layers=4, width=512, heads=8, batch=8, turn=1),
    "base": Shape(layers=12, width=768, heads=12, batch=8, turn=1),
    "large": Shape(layers=24, width=1_024, heads=16, batch=8, turn=1),
}


def make_batch(shape: Shape, seed: int) -> dict[str, np.ndarray]:
    """Random ids as `bert_jax.data.batches` lays them out; the last row is padded to two thirds."""
    rng = np.random.default_rng(seed)
    b, s, p = shape.batch, shape.sequence, shape.predictions
    lengths = np.full((b, 1), s)
    lengths[-1] = 2 * s // 3
    column = np.arange(s)
    input_mask = (column < lengths).astype(np.int32)
    segment_ids = ((column >= s // 2) & (column < lengths)).astype(np.int32)
    positions = [np.sort(rng.permutation(np.arange(1, n))[:p]) for n in lengths[:, 0]]
    return {
        "rows": np.arange(b, dtype=np.uint32),
        "row_weights": np.ones(b, np.float32),
        "input_ids": rng.integers(1_000, VOCAB_SIZE, (b, s)).astype(np.int32) * input_mask,
        "segment_ids": segment_ids,
        "input_mask": input_mask,
        "masked_lm_positions": np.array(positions, np.int32),
        "masked_lm_ids": rng.integers(1_000, VOCAB_SIZE, (b, p)).astype(np.int32),
        "masked_lm_weights": np.ones((b, p), np.float32),
        "next_sentence_labels": rng.integers(0, 2, b).astype(np.int32),
    }


def sized(name: str, sequence: int, batch: int = 0) -> Shape:
    """The shape of that name at another sequence length, and with that many rows unless 0."""
    shape = SHAPES[name]
    return dataclasses.replace(shape, sequence=sequence, batch=batch or shape.batch)
