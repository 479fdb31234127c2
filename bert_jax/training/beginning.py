"""The state a run goes on with: of its newest good checkpoint, or the one before the first step."""

import dataclasses
import itertools
import time
from typing import Any

import jax
import numpy as np

from bert_jax.errors import Unavailable
from bert_jax.storage import retry
from bert_jax.training import divergence, feed, step
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.checkpoint import Checkpoints, Restored
from bert_jax.training.environment import environment
from bert_jax.training.job import Job
from bert_jax.training.peers import Peers
from bert_jax.training.progress import Progress

# Seconds between looks at a disk that processes share: its clients may show old listings a while.
_LOOKS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


@dataclasses.dataclass
class Beginning:
    """Where a run goes on.

    Attributes:
      done: steps.
      state: of training.step, laid over the mesh.
      window: sums since the last line was written.
      skipped: steps that are left out.
      init_sha256: of the weights the first step began with; "" of fresh ones.
      lines: what the run's files of lines held up to here (see metrics.Lines.written); empty
        before the first step.
    """

    done: int
    state: step.State
    window: dict[str, jax.Array]
    skipped: tuple[int, ...]
    init_sha256: str
    lines: dict[str, Any]


class Beginnings:
    """Finds them; all processes find the same."""

    def __init__(
        self,
        job: Job,
        mesh: jax.sharding.Mesh,
        peers: Peers,
        progress: Progress,
    ):
        self.job, self.mesh, self.peers, self.progress = job, mesh, peers, progress
        self._abstract = step.abstract_state(
            job.objective, job.optimizer, job.claim.parallelism, mesh
        )
        self._shardings = jax.tree.map(lambda s: s.sharding, self._abstract)
        self._asked = 0

    def find(self, saved: Checkpoints) -> Beginning:
        """The newest checkpoint that can be used; damaged ones before it are put aside.

        Raises:
          InputError: all are damaged, or of another corpus.
          Unavailable: the storage does not answer, or the processes see different checkpoints.
        """
        self._agree_on_steps(saved)
        return self._restore(saved, None)

    def find_before(self, saved: Checkpoints, first: int) -> Beginning | None:
        """As `find`, of a step up to `first`; the newer ones are removed.

        Returns:
          None, and nothing was removed, if too much would be done again: `divergence.can_go_back`.
        """
        try:
            saved.finish()
        except Unavailable:
            if self.peers.count > 1:
                raise  # the others wait for it, inside Orbax; one process goes back past it
        self._agree_on_steps(saved)
        if not divergence.can_go_back(saved.steps, first, self.job.claim.run.checkpoint_every):
            return None
        found = self._restore(saved, first)
        saved.forget_after(first)
        # Until then the first process may be removing some.
        self.peers.agree(f"removed {self._asked}", "")
        saved.look_again()
        return found

    def _agree_on_steps(self, saved: Checkpoints) -> None:
        """Raises Unavailable unless all processes see the same checkpoints."""
        self._asked += 1
        # Until then the first process may be saving one.
        self.peers.agree(f"last save {self._asked}", "")
        self._require_same_view(saved)

    def _restore(self, saved: Checkpoints, at_most: int | None) -> Beginning:
        restored = saved.newest(self._abstract, at_most, self._agreed)
        if restored is None:
            return self._first()
        self.job.require_same(restored.metadata)
        self._put_aside(saved, restored)
        for name, value in environment().items():
            if restored.metadata["environment"].get(name) != value:
                self.progress.say(
                    f"resume: {name} differs from the saved run's: batches exact, arithmetic to "
                    "rounding"
                )
        window = {k: np.array(v, np.float32) for k, v in restored.metadata["window"].items()}
        window = feed.put(window, mesh_lib.replicated(self.mesh))
        skipped = tuple(int(s) for s in jax.device_get(restored.state["skipped_steps"]) if s >= 0)
        began_with = restored.metadata["init_sha256"]
        lines = restored.metadata.get("lines", {})
        return Beginning(restored.step, restored.state, window, skipped, began_with, lines)

    def leave_out(self, state: step.State, steps: tuple[int, ...]) -> step.State:
        """The state with these steps among those that are left out."""
        slots = np.full(step.SKIPPED_STEPS, -1, np.int32)
        slots[: len(steps)] = steps
        return state | {"skipped_steps": feed.put(slots, self._shardings["skipped_steps"])}

    def _require_same_view(self, saved: Checkpoints) -> None:
        """Waits until all processes see the same checkpoints; raises Unavailable if they do not."""
        for look in itertools.count():
            saved.look_again()
            difference = self.peers.difference(
                f"checkpoints {self._asked}, look {look}",
                {"checkpoints": ", ".join(map(str, saved.steps))},
                "run again once all see the same files",
            )
            if not difference:
                return
            if look == len(_LOOKS):
                self.peers.agree(f"view {self._asked}", difference, Unavailable)
            time.sleep(_LOOKS[look])

    def _agreed(self, what: str, complaint: str) -> str:
        # One may have tried to read until it gives up, and then all end with its line.
        where = f"checkpoint {what}, {self._asked}"
        return self.peers.complaint(where, complaint, patience=2 * retry.GIVE_UP)

    def _put_aside(self, saved: Checkpoints, restored: Restored) -> None:
        """Of those that are older than the one restored, where nothing can be said of them."""

        def rename() -> None:
            for number, why in (saved.unreadable() | restored.damaged).items():
                aside = saved.set_aside(number)
                self.progress.say(f"{why}; now {aside.name}, going on from step {restored.step}")

        self.peers.on_primary(f"damaged {self._asked}", rename)
        saved.look_again()

    def _first(self) -> Beginning:
        """The state before the first step."""
        job = self.job
        make = jax.jit(
            lambda: step.init_state(job.objective, job.optimizer, job.claim.seed),
            out_shardings=self._shardings,
        )
        window = jax.jit(
            lambda: step.empty_window(job.objective), out_shardings=mesh_lib.replicated(self.mesh)
        )
        state, sha256 = self.job.begin(make())
        return Beginning(0, state, window(), (), sha256, {})
