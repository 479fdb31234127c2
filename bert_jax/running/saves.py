"""What a run does about its checkpoints: which one is whole, full disks and faults that pass.

`running.checkpoint` reads and writes them. A save that is lost to a passing fault costs a run of
one process nothing but time; of several, all end and start again.
"""

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax

from bert_jax.config import Run
from bert_jax.errors import DiskFull, Unavailable
from bert_jax.running.checkpoint import Checkpoints
from bert_jax.running.job import Context
from bert_jax.storage import retry
from bert_jax.storage.workdir import sealed, write_atomic


class Saves:
    """The saves of one run; `step` is that of the newest, perhaps still on its way."""

    def __init__(self, context: Context, run: Run):
        self.checkpoints = Checkpoints(context.workdir.checkpoints, run, "write")
        self.step = 0
        self.missing = ""  # why the last steps are in no checkpoint; "" if they are
        self._workdir, self._peers, self._run = context.workdir, context.peers, run
        self._say = context.progress.say
        self._is_saving = False

    def go_on_from(self, done: int) -> None:
        """Begins with the checkpoint of this step, or with none."""
        self.step, self.missing = done, ""
        self._record()

    def look(self, done: int) -> None:
        """Notices that the save under way has failed, or has become a whole checkpoint."""
        if self.checkpoints.has_failed:
            self.end(done)  # now: the others wait for it, inside Orbax
        if self._is_saving and (ended := self.checkpoints.has_ended(self.step)) is not None:
            self._is_saving = False
            if ended:
                self._record(self.step)

    def skip(self, why: str) -> None:
        """Notes why the last steps are not saved."""
        self.missing = f"not saved, since {why}; the newest checkpoint is of step {self.step}"

    def end(self, done: int) -> None:
        """Waits for the save before the one that is due, which takes the place of a lost one."""
        with self.unless_full(done):  # what it took is free again
            try:
                self.checkpoints.finish()
            except DiskFull:
                raise
            except Unavailable as error:
                self._lost(done, error)

    def save(
        self, done: int, state: Any, metadata: dict[str, Any], held_out_loss: float | None
    ) -> None:
        """Begins to save, again after each passing fault; see `Checkpoints.save`."""
        self._outlast(lambda: self.checkpoints.save(done, state, metadata, held_out_loss))
        self.step, self.missing, self._is_saving = done, "", True

    def finish(self, done: int, save: Callable[[], None] | None) -> None:
        """Waits for the last save; one that was lost to a passing fault is made again by `save`."""
        try:
            self.checkpoints.finish()
        except Unavailable as error:
            self._lost(done, error)
            if save is None:
                raise

            def again() -> None:
                if done not in self.checkpoints.steps:  # removing an old one may have failed
                    save()
                    self.checkpoints.finish()

            self._outlast(again)
        self._record()

    @contextlib.contextmanager
    def unless_full(self, done: int) -> Iterator[None]:
        """Lets the run go on without a checkpoint on a full disk, where its settings say so."""
        try:
            yield
        except DiskFull as error:
            if self._run.when_disk_is_full == "stop" or self._peers.count > 1:
                raise
            self.missing = f"without a new checkpoint: {error}"
            self._say(f"step {done}: {self.missing}")

    def require_space(self, state: Any) -> None:
        """Says whether the disk has too little room; raises DiskFull if no checkpoint fits."""
        if self._workdir.remote is not None or not self._peers.is_primary:
            return
        run, one = self._run, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._workdir.root).free
        # One more than are kept: an old one goes once the next is whole.
        more = max(run.keep_checkpoints + run.keep_best + 1 - len(self.checkpoints.steps), 1)
        words = (
            f"{self._workdir.checkpoints}: its disk has {free / 1e6:,.1f} MB free, and {more} more "
            f"checkpoints take {one / 1e6:,.1f} MB each; free some space"
        )
        # What no memory holds, either, the first step names: no larger disk would help.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if free < one < memory and run.when_disk_is_full == "stop":
            raise DiskFull(f"{words} and run again")
        if free < more * one:
            self._say(words)

    def _record(self, step: int | None = None) -> None:
        """Writes down which checkpoint is whole: a start that misses it must not begin again."""
        if self._peers.is_primary:
            step = max(self.checkpoints.steps, default=0) if step is None else step
            record = json.dumps(sealed({"format_version": 1, "step": step}))
            with contextlib.suppress(DiskFull):
                write_atomic(self._workdir.saved, record + "\n")

    def _lost(self, done: int, error: Unavailable) -> None:
        """One process goes on without a checkpoint that could not be written for now."""
        if self._peers.count > 1:  # the others wait for it, inside Orbax
            raise error
        self._say(f"step {done}: no checkpoint was written ({error})")

    def _outlast(self, work: Callable[[], None]) -> None:
        """Does the work, again after each passing fault; once in several processes, see `_lost`."""
        if self._peers.count > 1:
            work()
        else:
            retry.again(work, f"{self._workdir.checkpoints}")
