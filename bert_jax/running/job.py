"""What the loop is given to do: pre-training, or a task."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from bert_jax.checkpoints.fork import Branch
from bert_jax.checkpoints.saves import Saves
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
    """The batches of one phase, whose steps are all alike."""

    number: int  # of the phase, from 0
    first: int  # the step it begins with
    steps: int  # how many
    batch_size: int  # global rows a step
    batch: MakeBatch  # (step of the phase, rows) to these rows of its batch, on the host
    # Whether a step's batch can be made at once; if not, what it waits for is under way.
    ready: Callable[[int], bool] = lambda step: True
    close: Callable[[], None] = lambda: None  # ends what is under way
    objective: Objective | None = None  # what is learned in this phase; None: the job's
    # Whether the next phase learns something else, so that no line of metrics has steps of both.
    ends_line: bool = False


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A question about the parameters; all processes ask it after the same steps."""

    name: str  # the `kind` of its lines
    # Whether it is asked after so many steps; 0: before the first. A function of the experiment
    # alone.
    is_due: Callable[[int], bool]
    # (parameters, steps done) to what its line holds next to `step` and `kind`; empty: no line. A
    # run whose `loss` is not finite has failed, and of checkpoints the one of the lowest is the
    # best.
    ask: Callable[[Any, int], dict[str, Any]]
    describe: Callable[[dict[str, Any]], str]  # a line in words; "": nothing is shown
    file: Literal["metrics", "predictions"] = "metrics"  # which of the run's files its lines go to
    wait: Literal["evaluation", "probes"] = "evaluation"  # by what name its time is counted


def every(steps: int, total: int) -> Callable[[int], bool]:
    """Returns an `is_due`: after each so many steps, and after the last."""
    return lambda done: done > 0 and (done % steps == 0 or done == total)


class Job:
    """An experiment in its workdir, and what the loop does of it.

    A run calls `read`, `require_runnable`, `require_start`, `differences`, `prepare` and `open`,
    in this order; the loop, which comes then, asks for the rest. `PretrainingJob` and
    `FinetuningJob` implement the methods that raise NotImplementedError.
    """

    how_to_go_on = "choose another --workdir"  # with a finished run, in words
    # `extend` allows more steps than the run was started with.
    length: Literal["keep", "extend"] = "keep"
    # The checkpoint of another run that stands before the first of this one; None: none.
    branch: Branch | None = None
    # Arrays that the steps read and do not change, on the devices; None: there are none.
    fixed: Any = None
    patience = 0  # evaluations in a row without a lower `loss` that end the run; 0: it goes on

    # Known once it is open, or before.
    optimizer: Optimizer  # the update
    total_steps: int  # of all phases; the schedule's length
    objective: Objective  # what is learned
    measured: tuple[str, ...]  # names of what any of its steps measures
    evaluators: tuple[Evaluator, ...]  # in the order in which they are asked
    data_sha256: str  # of what is learned from, which checkpoints keep as `corpus_sha256`

    def __init__(self, experiment: Any, workdir: Workdir, say: Callable[[str], None]):
        self.experiment = experiment  # an `Experiment` or the like, kept with every checkpoint
        self.workdir, self.say = workdir, say  # of the run; shows a line

    # --- before it is open ----------------------------------------------------------------------

    def placed(self, taken: int, booked: int, hosts: int) -> Any | None:
        """Returns the experiment laid over some of its slices, of so many processes each.

        None: it cannot be, as a task's on less than all. It is asked before devices start.
        """
        return self.experiment if taken == booked else None

    def read(self) -> None:
        """Reads what is there already, once jax knows how many processes it has."""

    def require_runnable(self, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError if the batches or the state cannot be laid over these devices."""

    def require_start(self) -> None:
        """Raises InputError if the weights it begins with are not there, or do not fit."""

    def differences(self, saved: Any, metadata: dict[str, Any]) -> list[str]:
        """Returns how the experiment differs from that of a checkpoint that is to go on, in words.

        `metadata` is the checkpoint's, its `notes` and its `init_sha256` among it.
        """
        raise NotImplementedError

    def prepare(self, peers: Peers) -> None:
        """Makes what is learned from, or finds it, by one process for all; lays it on each host."""

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        """Opens what was prepared."""

    # --- once it is open ------------------------------------------------------------------------

    def batches(self, done: int) -> PhaseBatches:
        """Returns the phase of the step after so many."""
        raise NotImplementedError

    def initial_state(self, fresh: step.State) -> tuple[step.State, str]:
        """Returns the state before the first step, and a hash of weights that it was given."""
        raise NotImplementedError

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint with this metadata learned from the same."""

    def require_unchanged(self) -> None:
        """Raises InputError if what is learned from was changed since it was opened."""

    def operations(self, batch: Batch) -> int:
        """Returns those of a step with such a batch: what utilisation is reckoned by."""
        raise NotImplementedError

    def how_to_see(self, step: int) -> str:
        """Returns where the text of a step is to be seen, in words."""
        return f"`bert-jax show --workdir {self.workdir.named} --step {step}`"

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Returns what checkpoints keep as `notes` for those who ask the model later, as JSON.

        `evaluation` is the newest line of the first evaluator; {}: it is not of this step.
        """
        raise NotImplementedError

    def steps_of(self, phase: PhaseBatches, mesh: jax.sharding.Mesh) -> tuple[Callable, ...]:
        """Returns the step, that in which a TPU checks itself if there is one, and the replay."""
        parallelism, objective = self.experiment.parallelism, phase.objective or self.objective
        parts = parallelism.accumulation_of(phase.number)
        spec = step.StepSpec(objective, self.optimizer, parallelism, parts, mesh)
        train_step = checked_step = step.make_train_step(spec, self.total_steps)
        if self.experiment.run.check_every:
            checks = step.self_checks(mesh_lib.device_kind(mesh))
            checked_step = step.make_train_step(spec, self.total_steps, checks)
        return train_step, checked_step, step.make_replay(spec)


@dataclasses.dataclass(frozen=True)
class Result:
    """The end of a run, after so many steps."""

    outcome: Literal["finished", "stopped", "failed"]
    done: int  # steps
    why: str = ""  # it failed; or its last steps are in no checkpoint: "" if they are


@dataclasses.dataclass(frozen=True)
class Context:
    """A run that is about to begin: what it does, on which devices, and those who watch it."""

    job: Job  # open
    booked: Any  # its experiment on all slices, some of which may be missing
    origin: dict[str, Any] | None  # where that comes from, see `session.run`
    mesh: jax.sharding.Mesh
    peers: Peers
    saves: Saves
    mirror: Mirror
    progress: Progress
    clock: Clock
    watchdog: Watchdog
    stop: StopRequest  # entered
    forget: Callable[[], None]  # is called if several processes end without unwinding
