"""The job that the training loop runs: pre-training or fine-tuning."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from bert_jax.checkpoints.fork import ForkPoint
from bert_jax.checkpoints.save import Saver
from bert_jax.config import Optimizer
from bert_jax.distributed.peers import Peers
from bert_jax.distributed.watchdog import StopRequest, Watchdog
from bert_jax.running.progress import Clock, Progress
from bert_jax.storage.mirror import Mirror
from bert_jax.storage.workdir import Workdir
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.feed import MakeBatch
from bert_jax.training.objective import Batch, Objective


class PhaseBatches(NamedTuple):
    """The batches of one phase; all its steps have the same shapes."""

    number: int  # of the phase, from 0
    first: int  # step before which the phase begins
    steps: int  # number of steps
    batch_size: int  # global rows per step
    batch: MakeBatch  # (step of the phase, row numbers) -> these rows of its batch, on the host
    # Whether the batch of a step can be made now; if not, its epoch is still being planned.
    ready: Callable[[int], bool] = lambda step: True
    close: Callable[[], None] = lambda: None  # stops the planning
    objective: Objective | None = None  # objective of this phase; None: the job's
    # Whether the next phase has another objective: a metrics line must not mix steps of both.
    ends_line: bool = False


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """An evaluation of the parameters; all processes run it after the same steps."""

    name: str  # the `kind` of its lines
    # Whether the evaluation is due after this many steps (0: before the first). Depends on the
    # experiment alone.
    is_due: Callable[[int], bool]
    # (parameters, steps done) -> fields of its line besides `step` and `kind`; empty: no line. A
    # run fails if `loss` is not finite; the best checkpoint has the lowest `loss`.
    evaluate: Callable[[Any, int], dict[str, Any]]
    describe: Callable[[dict[str, Any]], str]  # text for people about a line; "": none
    file: Literal["metrics", "predictions"] = "metrics"  # the file that its lines go to
    wait: Literal["evaluation", "probes"] = "evaluation"  # name under which `Clock` counts its time


def repeat_every(steps: int, total: int) -> Callable[[int], bool]:
    """Returns an `is_due` that is true after every `steps` steps and after the last."""
    return lambda done: done > 0 and (done % steps == 0 or done == total)


class Job:
    """An experiment in its workdir, with everything that the training loop needs to know about it.

    `session.run` calls `read`, `require_runnable`, `require_start`, `differences`, `prepare` and
    `open`, in this order; then the loop calls the other methods. `PretrainingJob` and
    `FinetuningJob` implement the methods that raise NotImplementedError.
    """

    restart_hint = "choose another --workdir"  # what to do after a finished run
    # `extend` allows more steps than the run was started with.
    length: Literal["keep", "extend"] = "keep"
    # The checkpoint of another run that this run starts from; None: it is no fork.
    fork_point: ForkPoint | None = None
    # Arrays on the devices that the steps read and do not change; None: there are none.
    frozen: Any = None
    patience = 0  # evaluations without a lower `loss` after which the run stops; 0: never

    # Set by `open`, or before.
    optimizer: Optimizer
    total_steps: int  # of all phases; the length of the schedules
    objective: Objective
    metric_names: tuple[str, ...]  # of all metrics that any step has
    evaluators: tuple[Evaluator, ...]  # in the order in which they run
    data_sha256: str  # hash of the training data; checkpoints save it as `corpus_sha256`

    def __init__(self, experiment: Any, workdir: Workdir, report: Callable[[str], None]):
        self.experiment = experiment  # an `Experiment` or `Finetuning`; checkpoints save it
        self.workdir, self.report = workdir, report  # `report` shows a line

    # --- before `open` --------------------------------------------------------------------------

    def fit_to_slices(self, taken: int, booked: int, hosts: int) -> Any | None:
        """Returns the experiment for `taken` of its `booked` slices, each with `hosts` processes.

        Returns None if it cannot run on these; fine-tuning needs all. Called before JAX starts.
        """
        return self.experiment if taken == booked else None

    def read(self) -> None:
        """Reads inputs that exist already, such as a base; JAX knows the number of processes."""

    def require_runnable(self, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError if the batches or the state cannot be sharded over these devices."""

    def require_start(self) -> None:
        """Raises InputError if the initial weights are missing or do not fit."""

    def differences(self, saved: Any, metadata: dict[str, Any]) -> list[str]:
        """Returns descriptions of how the experiment differs from `saved`, which is to be resumed.

        `metadata` is that of the checkpoint, with its `notes` and `init_sha256`.
        """
        raise NotImplementedError

    def prepare(self, peers: Peers) -> None:
        """Makes or finds the training data on process 0, then copies it to each host."""

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        """Opens what was prepared."""

    # --- after `open` ---------------------------------------------------------------------------

    def batches(self, done: int) -> PhaseBatches:
        """Returns the phase of the step that comes after `done` steps."""
        raise NotImplementedError

    def initial_state(self, fresh: step.State) -> tuple[step.State, str]:
        """Returns the state before the first step, and the hash of its base ("" without a base)."""
        raise NotImplementedError

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError if a checkpoint with this metadata was trained on other data."""

    def require_unchanged(self) -> None:
        """Raises InputError if the training data was changed since `open`."""

    def count_flops(self, batch: Batch) -> int:
        """Returns the useful operations of a step with this batch, for the utilisation."""
        raise NotImplementedError

    def inspection_hint(self, step: int) -> str:
        """Returns which command shows the text of a step."""
        return f"`bert-jax show --workdir {self.workdir.address} --step {step}`"

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Returns the `notes` of a checkpoint, as JSON, which later users of the model need.

        `evaluation` is the line of the first evaluator for this step; {} if there is none.
        """
        raise NotImplementedError

    def make_steps(self, phase: PhaseBatches, mesh: jax.sharding.Mesh) -> tuple[Callable, ...]:
        """Returns the train step, the step in which TPUs check themselves, the recompute check."""
        parallelism, objective = self.experiment.parallelism, phase.objective or self.objective
        accumulation = parallelism.accumulation_of(phase.number)
        spec = step.StepSpec(objective, self.optimizer, parallelism, accumulation, mesh)
        train_step = checked_step = step.make_train_step(spec, self.total_steps)
        if self.experiment.run.check_every:
            checks = step.self_checks(mesh_lib.device_kind(mesh))
            checked_step = step.make_train_step(spec, self.total_steps, checks)
        return train_step, checked_step, step.make_fingerprints(spec)


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a run."""

    outcome: Literal["finished", "stopped", "failed"]
    done: int  # steps
    reason: str = ""  # why the run failed, or why no checkpoint has its last steps; "" if neither


@dataclasses.dataclass(frozen=True)
class Context:
    """Everything that the training loop works with."""

    job: Job  # after `open`
    booked: Any  # its experiment on all slices, even if some are missing now
    origin: dict[str, Any] | None  # where the experiment comes from, see `session.run`
    mesh: jax.sharding.Mesh
    peers: Peers
    saves: Saver
    mirror: Mirror
    progress: Progress
    clock: Clock
    watchdog: Watchdog
    stop: StopRequest  # entered
    clean_up: Callable[[], None]  # called if several processes exit without unwinding
