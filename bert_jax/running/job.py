"""The job that the training loop runs: pre-training or fine-tuning."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax

from bert_jax.checkpoints.fork import ForkPoint
from bert_jax.config import Optimizer
from bert_jax.distributed.peers import Peers
from bert_jax.model import flops
from bert_jax.storage.workdir import Workdir
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.feed import MakeBatch
from bert_jax.training.objective import Batch, Objective


class PhaseBatches(NamedTuple):
    """The batches of one phase; all its steps have the same shapes."""

    number: int  # of the phase, from 0
    first: int  # number of its first step
    steps: int  # number of steps
    batch_size: int  # global rows per step
    objective: Objective  # has the same parameters as `Training.objective`
    batch: MakeBatch  # (step of the phase, row numbers) -> these rows of its batch, on the host
    # Whether the batch of a step can be made now; if not, its epoch is still being planned.
    ready: Callable[[int], bool] = lambda step: True
    close: Callable[[], None] = lambda: None  # stops the planning
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


@dataclasses.dataclass(frozen=True)
class Training:
    """Everything that the loop trains, evaluates and logs; `Job.open` creates it."""

    objective: Objective
    optimizer: Optimizer
    total_steps: int  # of all phases; the length of the schedules
    metric_names: tuple[str, ...]  # of all metrics that any step has
    batches: Callable[[int], PhaseBatches]  # steps done -> the phase of the next step
    evaluators: tuple[Evaluator, ...]  # in the order in which they run
    data_sha256: str  # hash of the training data; checkpoints save it as `corpus_sha256`
    # Raises InputError if the training data has changed since `Job.open`.
    require_data_unchanged: Callable[[], None] = lambda: None
    # Arrays on the devices that the steps read and do not change; None: there are none.
    frozen: Any = None
    patience: int = 0  # evaluations without a lower `loss` after which the run stops; 0: never

    def count_flops(self, batch: Batch) -> int:
        """Returns the useful operations of a step with this batch, for the utilisation.

        Counts full fine-tuning; other values of adapt.how cost about as much.
        """
        model, (rows, length) = self.objective.model, batch["input_ids"].shape
        predictions = batch["masked_lm_positions"].shape[1] if "masked_lm_positions" in batch else 0
        operations = flops.train_step_flops(model, rows, length, predictions)
        if "decoder_ids" in batch:  # without the cross-attention
            rows, length = batch["decoder_ids"].shape
            operations += flops.train_step_flops(model, rows, length, length)
        return operations


class Job:
    """An experiment in its workdir, and how to train it.

    `session.run` calls `fit_to_slices`, `read`, then `require_start` if the workdir has no
    checkpoint or else `differences`, then `prepare` and `open`. After that the loop works with
    `training`, and calls the methods below `open`. `PretrainingJob` and `FinetuningJob` implement
    the methods that raise NotImplementedError.
    """

    restart_hint = "choose another --workdir"  # what to do after a finished run
    # `extend` allows more steps than the run was started with.
    length: Literal["keep", "extend"] = "keep"
    # The checkpoint of another run that this run starts from; None: it is no fork.
    fork_point: ForkPoint | None = None
    training: Training  # set by `open`

    def __init__(self, experiment: Any, workdir: Workdir, report: Callable[[str], None]):
        self.experiment = experiment  # an `Experiment` or `Finetuning`; checkpoints save it
        self.workdir, self.report = workdir, report  # `report` shows a line

    def fit_to_slices(self, taken: int, booked: int, hosts: int) -> Any | None:
        """Returns the experiment for `taken` of its `booked` slices, each with `hosts` processes.

        Returns None if it cannot run on these; fine-tuning needs all. Called before JAX starts.
        """
        return self.experiment if taken == booked else None

    def read(self, mesh: jax.sharding.Mesh) -> None:
        """Reads inputs that exist already, such as a base.

        Raises InputError if the batches or the state cannot be sharded over the mesh.
        """
        raise NotImplementedError

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
        """Opens the training data and sets `training`."""
        raise NotImplementedError

    def initial_state(self, fresh: step.State) -> tuple[step.State, str]:
        """Returns the state before the first step, and the hash of its base ("" without a base)."""
        raise NotImplementedError

    def resume(self, metadata: dict[str, Any]) -> None:
        """Reads the notes of the checkpoint to resume; InputError if it has other training data."""
        raise NotImplementedError

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Returns the `notes` of a checkpoint, as JSON, which later users of the model need.

        `evaluation` is the line of this step that has a held-out loss; {} if there is none.
        """
        raise NotImplementedError

    def inspection_hint(self, step: int) -> str:
        """Returns a hint for messages: the command that shows the text of a step."""
        return f"`bert-jax show --workdir {self.workdir.address} --step {step}` shows its text"


def make_steps(job: Job, phase: PhaseBatches, mesh: jax.sharding.Mesh) -> tuple[Callable, ...]:
    """Returns the train step, one in which TPUs check themselves, and the fingerprint function."""
    parallelism, training = job.experiment.parallelism, job.training
    accumulation = parallelism.accumulation_of(phase.number)
    spec = step.StepSpec(phase.objective, training.optimizer, parallelism, accumulation, mesh)
    train_step = checked_step = step.make_train_step(spec, training.total_steps)
    if job.experiment.run.check_every:
        checks = step.self_checks(mesh_lib.device_kind(mesh))
        checked_step = step.make_train_step(spec, training.total_steps, checks)
    return train_step, checked_step, step.make_fingerprints(spec)
