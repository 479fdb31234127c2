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
    first: int  # number of its first step in the run
    steps: int  # number of steps
    batch_size: int  # global rows per step
    objective: Objective  # its parameters have the same names and shapes in all phases
    make_batch: MakeBatch  # (step of the phase, row numbers) -> these rows of its batch
    # Whether the batch can be made: the plan of its epoch (see data.plans) may not be computed yet.
    is_ready: Callable[[int], bool] = lambda phase_step: True
    stop_planning: Callable[[], None] = lambda: None  # stops computing plans in the background
    # Whether a training line must end with the phase, since the next one has another objective.
    ends_window: bool = False


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """An evaluation of the parameters; all processes run it after the same steps."""

    name: str  # the `kind` of its lines, which are records of a JSON Lines file
    # Whether the evaluation is due after this many steps (0: before the first). The answer must
    # depend only on the experiment, so that all processes give the same.
    is_due: Callable[[int], bool]
    # (parameters, steps done) -> fields of its line besides `step` and `kind`; empty: no line. An
    # evaluation with a field `loss` measures the held-out loss: the run fails if it is not finite,
    # and it ranks checkpoints (see `Trainer._save`).
    evaluate: Callable[[Any, int], dict[str, Any]]
    describe: Callable[[dict[str, Any]], str]  # text for people about a line; "": none
    file: Literal["metrics", "predictions"] = "metrics"  # the file that its lines go to
    # timings.jsonl has its time as `<category>_seconds`. (Probes: see docs/glossary.md.)
    time_category: Literal["evaluation", "probes"] = "evaluation"


def due_every(steps: int, total: int) -> Callable[[int], bool]:
    """Returns an `is_due` that is true after every `steps` steps and after the last."""
    return lambda done: done > 0 and (done % steps == 0 or done == total)


@dataclasses.dataclass(frozen=True)
class Training:
    """Everything that the loop trains, evaluates and logs; `Job.open` creates it."""

    objective: Objective
    optimizer: Optimizer
    total_steps: int  # of all phases; the length of the schedules
    metric_names: tuple[str, ...]  # of all metrics that any step has
    phase_batches_at: Callable[[int], PhaseBatches]  # steps done -> the phase of the next step
    evaluators: tuple[Evaluator, ...]  # in the order in which they run
    data_sha256: str  # hash of the training data, always called `corpus_sha256` in checkpoints
    # Raises InputError if the training data has changed since `Job.open`.
    require_data_unchanged: Callable[[], None] = lambda: None
    # The frozen parameters, on the devices: steps read them and do not change them. None: none.
    frozen: Any = None
    # The run stops after this many evaluations without a lower held-out loss; 0: never.
    patience: int = 0

    def count_flops(self, batch: Batch) -> int:
        """Returns the operations of a step with this batch, as model.flops counts them.

        Fine-tuning is counted as if all parameters were trained, whatever the value of adapt.how.
        """
        model, (rows, length) = self.objective.model, batch["input_ids"].shape
        predictions = batch["masked_lm_positions"].shape[1] if "masked_lm_positions" in batch else 0
        operations = flops.train_step_flops(model, rows, length, predictions)
        if "decoder_ids" in batch:  # of task.kind=generate; its cross-attention is not counted
            rows, length = batch["decoder_ids"].shape
            operations += flops.train_step_flops(model, rows, length, length)
        return operations


class Job:
    """An experiment in its workdir, and how to train it.

    `session.run` calls `fit_to_slices` and `check_inputs`. Then it calls `require_initial_weights`
    if the workdir has no checkpoint, else `differences`; then `prepare` and `open`. After that the
    loop works with `training`, and calls the methods below `open`. `PretrainingJob` and
    `FinetuningJob` implement the methods that raise NotImplementedError.
    """

    finished_hint = "choose another --workdir"  # how to train again after a finished run
    # Whether the last phase may have more steps than the saved run (the command `extend`).
    may_extend: bool = False
    # The checkpoint of another run that this run starts from; None: it is no fork.
    fork_point: ForkPoint | None = None
    training: Training  # set by `open`

    def __init__(self, experiment: Any, workdir: Workdir, report: Callable[[str], None]):
        self.experiment = experiment  # an `Experiment` or `Finetuning`; checkpoints save it
        self.workdir, self.report = workdir, report  # `report` shows a line

    def fit_to_slices(self, active: int, slice_count: int, processes_per_slice: int) -> Any | None:
        """Returns the experiment changed to run on `active` of its `slice_count` slices.

        Returns None if it cannot run on these; fine-tuning needs all. Called before JAX starts.
        """
        return self.experiment if active == slice_count else None

    def check_inputs(self, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError if the batches or the state cannot be sharded over the mesh.

        In fine-tuning, first reads the inputs that must exist before the run: base and examples.
        """
        raise NotImplementedError

    def require_initial_weights(self) -> None:
        """Raises InputError if the base, or the checkpoint to fork, is missing or does not fit."""

    def differences(self, saved: Any, metadata: dict[str, Any]) -> list[str]:
        """Returns the settings that differ from those of the run that is to be resumed, in words.

        `saved` is the experiment of its newest checkpoint, `metadata` the checkpoint's metadata,
        with `notes` and `init_sha256`.
        """
        raise NotImplementedError

    def prepare(self, peers: Peers) -> None:
        """Makes the training data on process 0 unless they exist, then copies them to each host."""

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        """Opens the training data and sets `training`."""
        raise NotImplementedError

    def initial_state(self, new_state: step.State) -> tuple[step.State, str]:
        """Returns the state before the first step, and the hash of its base ("" without a base)."""
        raise NotImplementedError

    def accept_checkpoint(self, metadata: dict[str, Any]) -> None:
        """Raises InputError if the checkpoint to resume has other data; else reads its `notes`."""
        raise NotImplementedError

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Returns what users of the model need besides parameters, such as labels, for JSON.

        A checkpoint saves them as `notes`. `evaluation` is the line with the held-out loss at the
        checkpoint's step; {} if this step was not evaluated.
        """
        raise NotImplementedError

    def inspection_hint(self, step: int) -> str:
        """Returns a hint for messages: the command that prints the text of a step's rows."""
        return f"`bert-jax show --workdir {self.workdir.address} --step {step}` shows its text"


def make_steps(job: Job, phase: PhaseBatches, mesh: jax.sharding.Mesh) -> tuple[Callable, ...]:
    """Returns the train step, one with self-checks of TPUs (run.check_every), and a third function.

    The third function computes fingerprints of gradients for recompute checks, see
    `step.make_fingerprints`.
    """
    parallelism, training = job.experiment.parallelism, job.training
    accumulation = parallelism.accumulation_of(phase.number)
    spec = step.StepSpec(phase.objective, training.optimizer, parallelism, accumulation, mesh)
    train_step = checked_step = step.make_train_step(spec, training.total_steps)
    if job.experiment.run.check_every:
        checks = step.self_check_options(mesh_lib.device_kind(mesh))
        checked_step = step.make_train_step(spec, training.total_steps, checks)
    return train_step, checked_step, step.make_fingerprints(spec)
