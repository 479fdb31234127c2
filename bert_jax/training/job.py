"""What the loop is given to do: pre-training, or a task."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

from bert_jax.config import Optimizer
from bert_jax.training.feed import MakeBatch
from bert_jax.training.objective import Objective
from bert_jax.training.peers import Peers
from bert_jax.training.step import State


class Stretch(NamedTuple):
    """Steps of one kind, one after the other.

    Attributes:
      number: of the stretch, from 0.
      first: the step it begins with.
      steps: how many.
      batch_size: global rows a step.
      batch: (step of the stretch, rows) to these rows of its batch, on the host.
      ready: whether a step's batch can be made at once; if not, what it waits for is under way.
      close: ends what is under way.
    """

    number: int
    first: int
    steps: int
    batch_size: int
    batch: MakeBatch
    ready: Callable[[int], bool] = lambda step: True
    close: Callable[[], None] = lambda: None


class Job(Protocol):
    """A claim with what it learns from; it knows files, and nothing of the loop.

    Attributes:
      claim: what is kept with every checkpoint, an `Experiment` or the like.
      compute_dtype: in which products are computed.
      how_to_go_on: a finished run, in words.
      objective: what is learned.
      optimizer: the update.
      total_steps: of all stretches; the schedule's length.
      sha256: of what is learned from, which checkpoints keep as `corpus_sha256`.
      fixed: arrays that the steps read and do not change, on the devices; None: there are none.
    """

    claim: Any
    compute_dtype: str
    how_to_go_on: str
    objective: Objective
    optimizer: Optimizer
    total_steps: int
    sha256: str
    fixed: Any

    def require_runnable(self, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError if the batches or the state cannot be laid over these devices."""

    def require_start(self) -> None:
        """Raises InputError if the weights it begins with are not there, or do not fit."""

    def changed(self, saved: Any, metadata: dict[str, Any]) -> list[str]:
        """How the claim differs from a saved one that it is to go on with, in words.

        Args:
          saved: the claim of a checkpoint.
          metadata: of the checkpoint, its `notes` and as `init_sha256` what `begin` gave among it.

        Raises:
          InputError: the weights it begins with are others now, or what it learns from, as far as
            that is known.
        """

    def prepare(self, processes: int) -> None:
        """Makes what is learned from, or finds it; on one process for all."""

    def fetch(self) -> None:
        """Copies what was prepared to this machine, if need be; on all processes, for as long."""

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        """Opens what was prepared. What is named above is known from here on, and what is below.

        Raises:
          InputError: it is not there, or another one than on process 0.
        """

    def stretch(self, done: int) -> Stretch:
        """The one that the step after `done` steps belongs to."""

    def operations(self, batch: dict[str, jax.Array]) -> int:
        """Of a step with such a batch: what utilisation is reckoned by."""

    def begin(self, state: State) -> tuple[State, str]:
        """The state before the first step, from a fresh one; and a hash of weights it is given."""

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint with this metadata learned from the same."""

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """What checkpoints keep as `notes` for those who ask the model later, as JSON.

        Args:
          evaluation: what `evaluate` said after this step; empty if it was not asked.
        """

    def require_unchanged(self) -> None:
        """Raises InputError if what is learned from was changed since the run began."""

    def evaluate(self, params: Any) -> dict[str, Any]:
        """What metrics.jsonl keeps of an evaluation, its `loss` among it."""

    def summary(self, line: dict[str, Any]) -> str:
        """An evaluation in words."""

    def probed(self, done: int, params: Any) -> dict[str, Any]:
        """What metrics.jsonl keeps of probes after so many steps; empty if they are not asked.

        It depends on the claim and on `done` alone whether they are; all processes ask for it.
        """

    def watched(self, params: Any) -> list[dict[str, Any]]:
        """What predictions.jsonl keeps of an evaluation; all processes ask for it."""

    def how_to_see(self, step: int) -> str:
        """Where the text of a step is to be seen, in words."""
