"""What the loop is given to do: pre-training, or a task."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, Protocol

import jax

from bert_jax.config import Optimizer
from bert_jax.training.branch import Branch
from bert_jax.training.feed import MakeBatch
from bert_jax.training.objective import Batch, Objective
from bert_jax.training.peers import Peers
from bert_jax.training.step import State


class PhaseBatches(NamedTuple):
    """The batches of one phase, whose steps are all alike.

    Attributes:
      number: of the phase, from 0.
      first: the step it begins with.
      steps: how many.
      batch_size: global rows a step.
      batch: (step of the phase, rows) to these rows of its batch, on the host.
      ready: whether a step's batch can be made at once; if not, what it waits for is under way.
      close: ends what is under way.
      objective: what is learned in this phase; None: the job's.
    """

    number: int
    first: int
    steps: int
    batch_size: int
    batch: MakeBatch
    ready: Callable[[int], bool] = lambda step: True
    close: Callable[[], None] = lambda: None
    objective: Objective | None = None


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """A question about the parameters; all processes ask it after the same steps.

    Attributes:
      name: the `kind` of its lines.
      is_due: whether it is asked after so many steps; 0: before the first. A function of the
        experiment alone.
      ask: parameters to what its line holds next to `step` and `kind`; empty: no line. A run whose
        `loss` is not finite has failed, and of checkpoints the one of the lowest is the best.
      describe: a line in words; "": nothing is shown.
      file: which of the run's files its lines go to.
      wait: by what name its time is counted.
    """

    name: str
    is_due: Callable[[int], bool]
    ask: Callable[[Any], dict[str, Any]]
    describe: Callable[[dict[str, Any]], str]
    file: Literal["metrics", "predictions"] = "metrics"
    wait: Literal["evaluation", "probes"] = "evaluation"


def every(steps: int, total: int) -> Callable[[int], bool]:
    """Returns an `is_due`: after each so many steps, and after the last."""
    return lambda done: done > 0 and (done % steps == 0 or done == total)


@dataclasses.dataclass(frozen=True)
class Job:
    """An experiment with what it learns from, opened; it knows nothing of the loop.

    Attributes:
      experiment: what is kept with every checkpoint, an `Experiment` or the like.
      objective: what is learned.
      optimizer: the update.
      total_steps: of all phases; the schedule's length.
      batches: (steps done) to the phase of the next step.
      initial_state: a fresh state to the one before the first step, and a hash of weights it was
        given.
      evaluators: in the order in which they are asked.
      data_sha256: of what is learned from, which checkpoints keep as `corpus_sha256`.
      require_same: raises InputError unless a checkpoint with this metadata learned from the same.
      operations: of a step with such a batch: what utilisation is reckoned by.
      how_to_see: where the text of a step is to be seen, in words.
      notes: the newest line of the first evaluator ({}: not of this step) to what checkpoints keep
        as `notes` for those who ask the model later, as JSON.
      require_unchanged: raises InputError if what is learned from was changed since it was opened.
      branch: the checkpoint of another run that stands before the first of this one; None: none.
      fixed: arrays that the steps read and do not change, on the devices; None: there are none.
      patience: evaluations in a row without a lower `loss` after which the run ends; 0: it goes on.
    """

    experiment: Any
    objective: Objective
    optimizer: Optimizer
    total_steps: int
    batches: Callable[[int], PhaseBatches]
    initial_state: Callable[[State], tuple[State, str]]
    evaluators: tuple[Evaluator, ...]
    data_sha256: str
    require_same: Callable[[dict[str, Any]], None]
    operations: Callable[[Batch], int]
    how_to_see: Callable[[int], str]
    notes: Callable[[dict[str, Any]], dict[str, Any]] = lambda evaluation: {}
    require_unchanged: Callable[[], None] = lambda: None
    branch: Branch | None = None
    fixed: Any = None
    patience: int = 0


class Setup(Protocol):
    """An experiment in its workdir, before its data are there; `open` makes the job of it.

    Attributes:
      experiment: an `Experiment` or the like.
      compute_dtype: in which products are computed.
      how_to_go_on: a finished run, in words.
    """

    experiment: Any
    compute_dtype: str
    how_to_go_on: str

    def require_runnable(self, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError if the batches or the state cannot be laid over these devices."""

    def require_start(self) -> None:
        """Raises InputError if the weights it begins with are not there, or do not fit."""

    def differences(self, saved: Any, metadata: dict[str, Any]) -> list[str]:
        """Returns how the experiment differs from a saved one that is to go on, in words.

        Args:
          saved: the experiment of a checkpoint.
          metadata: of the checkpoint, its `notes` and its `init_sha256` among it.

        Raises:
          InputError: the weights it begins with are others now, or what it learns from, as far as
            that is known.
        """

    def prepare(self, processes: int) -> None:
        """Makes what is learned from, or finds it; on one process for all."""

    def fetch(self) -> None:
        """Copies what was prepared to this machine, if need be; on all processes."""

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> Job:
        """Opens what was prepared.

        Raises:
          InputError: it is not there, or another one than on process 0.
        """
