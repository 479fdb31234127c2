"""What the training loop works with, how it ends, and hooks into it."""

import contextvars
import dataclasses
from collections.abc import Callable
from typing import Literal

import jax
from etils import epath

from bert_jax.checkpoints.save import Saver
from bert_jax.distributed.peers import Peers
from bert_jax.distributed.watchdog import StopRequest, Watchdog
from bert_jax.running.job import Job
from bert_jax.running.progress import Clock, Progress
from bert_jax.storage.mirror import Mirror
from bert_jax.training.objective import Batch


class Hooks:
    """Observes a run, and may change its batches; a subclass overrides some of the methods.

    `done` is the number of steps done.
    """

    def on_restore(self, step: int, done: int | None) -> None:
        """Runs when a checkpoint is restored: to roll back from `done`, or (None) at a start."""

    def on_open_file(self, file: str) -> None:
        """Runs when a JSON Lines file is opened, without the lines of steps to be repeated."""

    def change_batch(self, done: int, batch: Batch) -> Batch:
        """Returns the batch to train on in the next step, which is not dispatched yet."""
        del done
        return batch

    def on_evaluation(self, done: int, name: str) -> None:
        """Runs before an evaluation; `name` is that of its `Evaluator`."""

    def on_save(self, done: int, path: epath.Path) -> None:
        """Runs before a checkpoint is saved at `path`."""


NO_HOOKS = Hooks()
# The hooks of the runs that this thread starts.
HOOKS: contextvars.ContextVar[Hooks] = contextvars.ContextVar("hooks", default=NO_HOOKS)


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a run."""

    outcome: Literal["finished", "stopped", "failed"]
    steps_done: int
    reason: str = ""  # why the run failed, or why no checkpoint has its last steps; "" if neither


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything that the training loop works with."""

    job: Job  # after `open`
    write_experiment: Callable[[], None]  # writes the experiment and its origin to the workdir
    mesh: jax.sharding.Mesh
    peers: Peers
    saver: Saver
    mirror: Mirror
    progress: Progress
    clock: Clock
    watchdog: Watchdog
    stop: StopRequest  # its context is entered
    # Deletes the files of a refused run; called before all processes abort, which skips `finally`.
    clean_up: Callable[[], None]
    hooks: Hooks
