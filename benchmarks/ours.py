"""Our training step, served to `step` and `torch_step`."""

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import measure, shapes, worker
from bert_jax.config import Model, Optimizer, Parallelism
from bert_jax.model import flops
from bert_jax.training import feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.objective import Pretraining

OPTIMIZER = Optimizer(name="adamw", schedule="linear", warmup_steps=10)
_TOTAL_STEPS = 1_000
_MATMUL_WIDTH = 2_048


def model_of(shape: shapes.Shape, dtype: str) -> Model:
    """The model of a shape, with the paper's dropout."""
    return Model(
        vocab_size=shapes.VOCAB_SIZE,
        hidden_size=shape.width,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        intermediate_size=4 * shape.width,
        compute_dtype=dtype,
    )


def first_state(model: Model, mesh: jax.sharding.Mesh) -> tuple[step.State, dict[str, jax.Array]]:
    """State and metrics window before the first step, on all devices."""

    def make() -> tuple[step.State, dict[str, jax.Array]]:
        learned = Pretraining(model)
        return step.init_state(learned, OPTIMIZER, 0), step.empty_window(learned.metrics)

    return jax.jit(make, out_shardings=mesh_lib.replicated(mesh))()


class Ours:
    """Compiled steps by name, each with a state of its own."""

    def __init__(self):
        self._entries = {}

    def build(
        self, entry: str, shape: str, dtype: str, layer_loop: str, sequence: int, batch: int = 0
    ) -> float:
        """Compiles a step, runs it and returns its first loss."""
        size = shapes.sized(shape, sequence, batch)
        model = model_of(size, dtype)
        mesh = mesh_lib.make_mesh(Parallelism())
        parallelism = Parallelism(layer_loop=layer_loop)
        state, window = first_state(model, mesh)
        rows = np.arange(size.batch)
        placed = feed.place(
            shapes.make_batch(size, 0), rows, size.batch, mesh_lib.batch_sharding(mesh)
        )
        run = step.make_train_step(
            Pretraining(model), OPTIMIZER, parallelism, 1, _TOTAL_STEPS, mesh
        )
        key = step.phase_key(model, 0, 0)
        state, window = run(state, window, placed, key)
        sums = jax.device_get(window)
        self._entries[entry] = [run, size, state, window, placed, key]
        self.step(entry)
        names = ("masked_lm_loss", "next_sentence_loss")
        return float(sum(sums[name][0] / sums[name][1] for name in names))

    def step(self, entry: str) -> tuple[float, float]:
        """CPU and wall seconds of a step, the mean of one turn."""
        run, size, *_, batch, key = self._entries[entry]

        def turn() -> None:
            state, window = self._entries[entry][2:4]
            for _ in range(size.turn):
                state, window = run(state, window, batch, key)
            self._entries[entry][2:4] = jax.block_until_ready((state, window))

        cpu, wall = measure.clocked(turn)
        return cpu / size.turn, wall / size.turn

    def matmul(self, dtype: str) -> tuple[float, float]:
        """Operations a CPU second and a wall second of a large product, summed in float32.

        Not `hardware.measured_matmul_flops`, which takes wall time: half of what a core can do if
        somebody else has it half of the time.
        """
        entry = f"matmul {dtype}"
        if entry not in self._entries:
            product = jax.jit(lambda a, b: jnp.matmul(a, b, preferred_element_type=jnp.float32))
            side = jnp.ones((_MATMUL_WIDTH, _MATMUL_WIDTH), dtype)
            jax.block_until_ready(product(side, side))
            self._entries[entry] = [product, side]
        product, side = self._entries[entry]
        cpu, wall = measure.clocked(lambda: jax.block_until_ready(product(side, side)))
        return 2 * _MATMUL_WIDTH**3 / cpu, 2 * _MATMUL_WIDTH**3 / wall

    def step_flops(self, shape: str, sequence: int) -> int:
        """Useful operations of a step, as the library counts them."""
        size = shapes.sized(shape, sequence)
        model = model_of(size, "float32")
        return flops.train_step_flops(model, size.batch, size.sequence, size.predictions)


if __name__ == "__main__":
    worker.serve(Ours())
