"""Our training step on one batch of some size, as `step`, `torch_step` and `loop` time it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure
from bert_jax.config import Model, Optimizer, Parallelism
from bert_jax.data.batches import Batch
from bert_jax.running import lines as lines_lib
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

OPTIMIZER = Optimizer(name="adamw", schedule="linear", warmup_steps=10)
_TOTAL_STEPS, _MATMUL_WIDTH = 1_000, 2_048


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
    def fields(self) -> dict[str, Any]:
        """Of our model, and of PyTorch's."""
        return {
            "vocab_size": 30_522,
            "hidden_size": self.width,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "intermediate_size": 4 * self.width,
        }


SHAPES = {
    "micro": Shape(layers=1, width=32, heads=2, batch=4, turn=1),
    "tiny": Shape(layers=2, width=128, heads=2, batch=16, turn=4),
    "mini": Shape(layers=4, width=256, heads=4, batch=16, turn=2),
    "small": Shape(layers=4, width=512, heads=8, batch=8, turn=1),
    "base": Shape(layers=12, width=768, heads=12, batch=8, turn=1),
    "large": Shape(layers=24, width=1_024, heads=16, batch=8, turn=1),
}
CHOICE = "tiny,mini,small,base", "also large, and micro for tests"  # of `--shapes`


def model_of(shape: Shape, dtype: str) -> Model:
    """The model of a shape, with the paper's dropout."""
    return Model(**shape.fields, compute_dtype=dtype)


def first_state(
    learned: Pretraining, mesh: jax.sharding.Mesh
) -> tuple[step.State, dict[str, jax.Array]]:
    """State and metrics window before the first step, on all devices."""

    def make() -> tuple[step.State, dict[str, jax.Array]]:
        return step.init_state(learned, OPTIMIZER, 0), step.empty_window(learned.metrics)

    return jax.jit(make, out_shardings=mesh_lib.replicated(mesh))()


def make_batch(shape: Shape) -> Batch:
    """Random ids as `bert_jax.data.batches` lays them out; the last row is padded to two thirds."""
    rng, vocab_size = np.random.default_rng(0), shape.fields["vocab_size"]
    b, s, p = shape.batch, shape.sequence, shape.predictions
    lengths = np.full((b, 1), s)
    lengths[-1] = 2 * s // 3
    column = np.arange(s)
    input_mask = (column < lengths).astype(np.int32)
    positions = [np.sort(rng.permutation(np.arange(1, n))[:p]) for n in lengths[:, 0]]
    return {
        "rows": np.arange(b, dtype=np.uint32),
        "row_weights": np.ones(b, np.float32),
        "input_ids": rng.integers(1_000, vocab_size, (b, s)).astype(np.int32) * input_mask,
        "segment_ids": (column >= s // 2) * input_mask,
        "input_mask": input_mask,
        "masked_lm_positions": np.array(positions, np.int32),
        "masked_lm_ids": rng.integers(1_000, vocab_size, (b, p)).astype(np.int32),
        "masked_lm_weights": np.ones((b, p), np.float32),
        "next_sentence_labels": rng.integers(0, 2, b).astype(np.int32),
    }


class Bare:
    """A compiled step with a state and a batch of its own, and no loop around it."""

    def __init__(
        self, model: Model, batch: Batch, parallelism: Parallelism, objective: str = "mlm_nsp"
    ):
        mesh, rows = mesh_lib.make_mesh(parallelism), np.arange(len(batch["rows"]))
        self._batch = feed.place(batch, rows, len(rows), mesh_lib.batch_sharding(mesh))
        learned = Pretraining(model, objective)
        spec = step.StepSpec(learned, OPTIMIZER, parallelism, 1, mesh)
        self._run = step.make_train_step(spec, _TOTAL_STEPS)
        self._key = step.phase_key(model, 0, 0)
        self._state = first_state(learned, mesh)
        self.take(1)
        means = lines_lib.mean_metrics(jax.device_get(self._state[1]))
        self.first_loss = sum(means[name] for name in learned.losses)
        self.take(2)

    @classmethod
    def of(cls, shape: Shape, dtype: str) -> "Bare":
        """The step of a shape."""
        return cls(model_of(shape, dtype), make_batch(shape), Parallelism(layer_loop="unroll"))

    def take(self, steps: int) -> tuple[float, float]:
        """CPU and wall seconds of a step, the mean of so many."""

        def turn() -> None:
            for _ in range(steps):
                self._state = self._run(*self._state, self._batch, self._key)
            jax.block_until_ready(self._state)

        cpu, wall = measure.clocked(turn)
        return cpu / steps, wall / steps


def matmul(dtype: str) -> float:
    """Operations a CPU second of a large product, summed in float32.

    Not `hardware.measured_matmul_flops`, which takes wall time: half of what a core can do if
    somebody else has it half of the time.
    """
    side = jnp.ones((_MATMUL_WIDTH, _MATMUL_WIDTH), dtype)

    def multiply() -> None:
        jax.block_until_ready(jnp.matmul(side, side, preferred_element_type=jnp.float32))

    multiply()  # which compiles it at first
    return 2 * _MATMUL_WIDTH**3 / measure.clocked(multiply)[0]
