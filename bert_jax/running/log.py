"""The training lines of a run, written one step late, and its timings."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from bert_jax.running import lines as lines_lib
from bert_jax.running.context import Context
from bert_jax.running.lines import RunLines
from bert_jax.running.progress import Counts
from bert_jax.running.start import Divergence, RunState
from bert_jax.training import step

# Copies an array on its devices; calling it takes a fifth of the time of calling jnp.copy.
copy_array: Callable[[jax.Array], jax.Array] = jax.jit(jnp.copy)


class _PendingLine(NamedTuple):
    """A training line whose metrics are still on the devices."""

    done: int  # steps
    window: dict[str, jax.Array]  # sums of metrics over its window
    counters: dict[str, jax.Array]  # copies of the state's `step` and `bad_in_a_row`
    counts: Counts
    losses: tuple[str, ...]  # names of the losses that the objective of these steps adds up


class TrainingLog:
    """The lines of a run; a training line waits until the devices have done its steps."""

    def __init__(self, context: Context):
        self._context, job = context, context.job
        writes, when_disk_is_full = context.peers.is_primary, job.experiment.run.when_disk_is_full
        self.lines = RunLines(job.workdir, when_disk_is_full, writes)
        self._empty_window = step.make_empty_window(job.training.metric_names, context.mesh)
        self._pending: _PendingLine | None = None

    def end_window(self, state: RunState, losses: tuple[str, ...]) -> None:
        """Makes the line of the steps since the last one pending; begins an empty window."""
        # Copies, since the next step donates the buffers of the state.
        counters = {name: copy_array(state.arrays[name]) for name in ("step", "bad_in_a_row")}
        counts = self._context.clock.take_counts()
        self._pending = _PendingLine(state.done, state.window, counters, counts, losses)
        state.window = self._empty_window()

    def write_pending(self) -> None:
        """Writes the pending line, if there is one; waits until the devices have done its steps.

        Raises:
          Divergence: many steps in a row were bad; the line is not written.
        """
        if self._pending is None:
            return
        pending, self._pending = self._pending, None
        context, job = self._context, self._context.job
        sums, counters = jax.device_get((pending.window, pending.counters))
        worst_loss, worst_step = sums.pop(step.WORST_STEP)  # the step with the highest loss
        means = lines_lib.mean_metrics(sums)
        # After device_get: steps are dispatched asynchronously, which takes no time.
        timings = context.clock.end_window(pending.counts, means.get("filled"))
        device_step, in_a_row = int(counters["step"]), int(counters["bad_in_a_row"])
        if in_a_row >= job.experiment.optimizer.bad_steps_in_a_row:
            raise Divergence(range(device_step - in_a_row, device_step))
        line: dict[str, Any] = {"step": pending.done, "kind": "train", **means}
        if terms := [means[name] for name in pending.losses if name in means]:
            line["loss"] = sum(terms)
            line |= {"worst_step": int(worst_step), "worst_step_loss": float(worst_loss)}
        self.lines.append(line, "metrics")
        self.lines.time(pending.done, "train", timings)
        context.progress.show_training_line(line, timings)
        if spike := self.lines.spikes.check(line):
            number, loss, usual = spike
            job.report(
                f"step {number}: its loss jumps to {loss:.3f}, usually below {usual:.3f}; "
                f"{job.inspection_hint(number)}"
            )

    def discard_pending(self) -> None:
        """Drops a line whose steps will be repeated."""
        self._pending = None

    def write_timing(self, done: int, kind: str, facts: dict[str, Any]) -> None:
        """Writes a line of the timings, and buffered lines."""
        clock = self._context.clock
        self.lines.time(done, kind, clock.end_window(clock.take_counts()) | facts)
        self.lines.flush()
