"""The checkpoints that a run writes, by Orbax, and what becomes of a save that does not succeed.

Saving is asynchronous: the state is copied, written behind the next steps, and counts only once it
is whole. A save that is lost to a passing fault costs a run of one process nothing but time; of
several, all end and start again.
"""

import contextlib
import dataclasses
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from etils import epath
from orbax.checkpoint import v1 as ocp
from orbax.checkpoint.utils import checkpoint_steps

from bert_jax import foreign
from bert_jax.checkpoints.checkpoint import (
    ASIDE,
    FORMAT_VERSION,
    Checkpoints,
    context,
    orbax_client,
    sha256_of,
)
from bert_jax.config import Run
from bert_jax.distributed.peers import Peers
from bert_jax.errors import DiskFull, Unavailable
from bert_jax.storage import retry
from bert_jax.storage.workdir import Workdir, absolute, translate_os_errors, write_json
from bert_jax.training.checksums import checksums

# Orbax's, in a whole checkpoint; in a bucket one without it is not whole.
_COMMITTED = "commit_success.txt"
# Orbax's, after the step of one that is not whole; it removes them before it saves.
_UNFINISHED = ".orbax-checkpoint-tmp"


class Saves(Checkpoints):
    """The checkpoints of one run as it writes them; entered while it does.

    What of it is by one process for all, the others learn by `refresh`.
    """

    def __init__(self, workdir: Workdir, run: Run, peers: Peers, report: Callable[[str], None]):
        super().__init__(workdir.checkpoints)
        self.step = 0  # of the newest checkpoint, perhaps still on its way
        self._previous_step = 0  # of the checkpoint before it, whose save has ended
        self.unsaved_reason = ""  # why the last steps are in no checkpoint; "" if they are
        self._workdir, self._run, self._peers, self._report = workdir, run, peers, report
        self._losses: dict[int, float | None] = {}  # of checkpoints
        self._opened: ocp.training.Checkpointer | None = None
        self._is_saving = False
        self._has_failed = False  # the save under way, in this process: `wait` will raise why
        self._client = contextlib.ExitStack()  # while entered
        self._remove_unfinished()  # by writers of a failed save that outlived its end

    # --- to save --------------------------------------------------------------------------------

    def save(
        self, done: int, state: Any, metadata: dict[str, Any], held_out_loss: float | None = None
    ) -> None:
        """Begins to save the state of training.step and the JSON; an earlier save must have ended.

        The lowest held-out losses, of masked LM or of a task, are the best; None if it was not
        evaluated at this step.

        Raises:
          Unavailable: passing faults lasted too long, or there are several processes.
        """
        metadata = {
            "format_version": FORMAT_VERSION,
            "step": done,
            "checksums": checksums(state),
            "held_out_loss": held_out_loss,
            **metadata,
        }
        whole = metadata | {"sha256": sha256_of(metadata)}
        self._losses[done] = held_out_loss

        def begin() -> None:
            with self._writing():
                self._checkpointer.save_async(done, state, force=True, custom_metadata=whole)

        self._outlast(begin)
        self._previous_step = self.step
        self.step, self.unsaved_reason, self._is_saving = done, "", True

    def poll(self) -> None:
        """Notices that the save under way has failed, or has become a whole checkpoint."""
        if self._has_failed:
            self.wait_for_previous()  # at once: the other processes wait for this one inside Orbax
        if self._is_saving and self._opened and not self._opened.is_saving_in_progress():
            self._is_saving = False
            with contextlib.suppress(Exception):  # of a bucket that is away, and not waited for
                if self.step in checkpoint_steps(absolute(self._folder)):
                    self._record(self.step)

    def wait(self) -> None:
        """Waits until what is being saved is on disk; a save that fails leaves nothing.

        Raises:
          Unavailable: it could not be written for now; the next save begins afresh.
        """
        self._has_failed = False
        with self._writing():
            if self._opened is not None:
                self._opened.wait()

    def wait_for_previous(self) -> None:
        """Waits for the save before the one that is due, which takes the place of a lost one."""
        with self.tolerate_full_disk(self.step):  # a failed save has freed its space
            try:
                self.wait()
            except DiskFull:
                self.step = self._previous_step
                raise
            except Unavailable as error:
                self._give_up(error)

    def finish(self, done: int, save: Callable[[], None] | None) -> None:
        """Waits for the last save; one that was lost to a passing fault is made again by `save`."""
        try:
            self.wait()
        except Unavailable as error:
            self._give_up(error)
            if save is None:
                raise

            def again() -> None:
                if done not in self.steps:  # removing an old one may have failed
                    save()
                    self.wait()

            self._outlast(again)
        self._record()

    def skip(self, why: str) -> None:
        """Notes why the last steps are not saved."""
        self.unsaved_reason = (
            f"not saved, since {why}; the newest checkpoint is of step {self.step}"
        )

    @contextlib.contextmanager
    def tolerate_full_disk(self, done: int) -> Iterator[None]:
        """Lets the run go on without a checkpoint on a full disk, where its settings say so."""
        try:
            yield
        except DiskFull as error:
            if self._run.when_disk_is_full == "stop" or self._peers.count > 1:
                raise
            self.unsaved_reason = f"without a new checkpoint: {error}"
            self._report(f"step {done}: {self.unsaved_reason}")

    def require_space(self, state: Any) -> None:
        """Says whether the disk has too little room; raises DiskFull if no checkpoint fits."""
        if self._workdir.remote is not None or not self._peers.is_primary:
            return
        run, one = self._run, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._workdir.root).free
        # One more than are kept: an old one goes once the next is whole.
        more = max(run.keep_checkpoints + run.keep_best + 1 - len(self.steps), 1)
        words = (
            f"{self._folder}: its disk has {free / 1e6:,.1f} MB free, and {more} more "
            f"checkpoints take {one / 1e6:,.1f} MB each; free some space"
        )
        # What no memory holds, either, the first step names: no larger disk would help.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if free < one < memory and run.when_disk_is_full == "stop":
            raise DiskFull(f"{words} and run again")
        if free < more * one:
            self._report(words)

    # --- to go on -------------------------------------------------------------------------------

    def resume_from(self, done: int) -> None:
        """Begins with the checkpoint of this step, or with none."""
        self.step, self.unsaved_reason = done, ""
        self._record()

    def rename_damaged(self, step: int) -> str:
        """Renames a damaged checkpoint, so that it is no longer counted; by one process for all.

        Returns its new name; "" if nothing of it is there.
        """
        folder = self._folder / str(step)

        def rename() -> str:
            if not folder.exists():
                return ""
            # In a bucket it may have been moved in part, before a fault: the rest goes next to it.
            ends = itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
            places = (self._folder / f"{ASIDE}{step}{end}" for end in ends)
            aside = next(place for place in places if not place.exists())
            with self._transient_faults():  # the object may have moved, and the answer be lost
                folder.rename(aside)
            if self._storage.is_bucket:  # where Orbax removes what has none as unfinished
                (aside / _COMMITTED).write_text("")
            return aside.name

        return self._again(rename)

    def refresh(self) -> None:
        """Lists checkpoints again: else steps of removed ones cannot be saved again."""
        if self._opened is not None:
            self._again(self._opened.reload)

    def delete_after(self, step: int, send: Callable[[], None]) -> None:
        """Removes newer checkpoints: of steps that will be done again, otherwise.

        By one process for all. A start that misses one must not end there: `send` is called before.
        """
        self._record(max((number for number in self.steps if number <= step), default=0))
        send()

        def remove(folder: epath.Path) -> None:
            # Half removed under its own name it would be a damaged one, perhaps the last.
            gone = self._folder / f"{folder.name}{_UNFINISHED}"
            gone.rmtree(missing_ok=True)
            if folder.exists():
                with self._transient_faults():
                    folder.rename(gone)
                gone.rmtree()

        for newer in [number for number in self.steps if number > step]:
            self._again(lambda number=newer: remove(self._folder / str(number)))

    def __enter__(self) -> "Saves":
        self._client.enter_context(orbax_client(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        with self._client:
            try:
                if self._opened is not None:
                    with self._writing():
                        self._opened.close()
            finally:
                self._remove_unfinished()

    # --- how ------------------------------------------------------------------------------------

    @property
    def _checkpointer(self) -> ocp.training.Checkpointer:
        """Orbax's own. It cannot be opened where one checkpoint is not readable."""
        if self._opened is None:
            for step in self.steps:
                self._losses[step] = self.metadata(step)["held_out_loss"]
            settings = context()
            _leave_barriers(settings.asynchronous, lambda: setattr(self, "_has_failed", True))
            self._opened = ocp.training.Checkpointer(
                absolute(self._folder),
                context=settings,
                preservation_policy=self,
                cleanup_tmp_directories=True,
            )
        return self._opened

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Decides whether to keep each checkpoint, the oldest first: Orbax asks before it removes.

        Not its `best_fn` with `max_to_keep`, which removes the newest; nor its metrics, files
        without which it cannot be opened.
        """
        del context
        run, steps = self._run, [checkpoint.step for checkpoint in checkpoints]
        losses = {step: self._losses.get(step) for step in steps}
        known = sorted((loss, step) for step, loss in losses.items() if loss is not None)
        kept = {*steps[-run.keep_checkpoints :], *(step for _, step in known[: run.keep_best])}
        replayed = (steps[-1] - 1) // run.replay_every * run.replay_every if run.replay_every else 0
        kept.update([step for step in steps if step <= replayed][-1:])
        return [s in kept or (run.keep_every > 0 and s % run.keep_every == 0) for s in steps]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Names errors of a save; one that failed leaves nothing, and the next begins afresh."""
        try:
            with translate_os_errors(self._folder), self._transient_faults():
                yield
        except Exception:
            # What Orbax remembers of its checkpoints may be wrong now.
            opened, self._opened = self._opened, None
            with contextlib.suppress(Exception):
                if opened is not None:
                    opened.close()
            self._remove_unfinished()
            raise

    @contextlib.contextmanager
    def _transient_faults(self) -> Iterator[None]:
        """Raises Unavailable for an error of a save or a rename in a bucket.

        Such an error is transient: the run has tested its access at the start, and no other program
        writes there. A damaged answer or a stale listing gives errors of many types.
        """
        try:
            yield
        except (OSError, ValueError) as error:  # TensorStore raises ValueError for everything
            if not self._storage.is_bucket:
                raise
            reason = str(error).partition("\n")[0][:200]
            raise Unavailable(f"{self._folder}: {reason}; run again to resume") from error

    def _remove_unfinished(self) -> None:
        """Removes what is unfinished, once nothing is being saved, lest a full disk stay full."""
        if not self._peers.is_primary:
            return
        # Orbax does the same where it begins to save.
        with contextlib.suppress(Exception), orbax_client(self._folder):
            for path in self._folder.glob(f"*{_UNFINISHED}"):
                path.rmtree()
            self._folder.rmdir()

    def _record(self, step: int | None = None) -> None:
        """Writes down which checkpoint is whole: a start that misses it must not begin again."""
        if self._peers.is_primary:
            step = max(self.steps, default=0) if step is None else step
            with contextlib.suppress(DiskFull):
                write_json(self._workdir.saved, {"format_version": 1, "step": step})

    def _give_up(self, error: Unavailable) -> None:
        """Gives up the save under way; with several processes, raises its error instead."""
        if self._peers.count > 1:  # the other processes wait for this one inside Orbax
            raise error
        self._report(f"step {self.step}: no checkpoint was written ({error})")
        self.step = self._previous_step

    def _outlast(self, work: Callable[[], None]) -> None:
        """Does the work, again after each passing fault; once in several processes (`_give_up`)."""
        if self._peers.count > 1:
            work()
        else:
            retry.again(work, f"{self._folder}")


def _leave_barriers(options: ocp.options.AsyncOptions, fail: Callable[[], None]) -> None:
    """Keeps a thread of a save from Orbax's barriers once it has failed, and calls `fail` then.

    The other processes wait for its part at another barrier, and would not learn of the failure.
    """
    options_below = options.v0  # as Orbax's older interface, below, takes them

    def wait(*, key: str, timeout_ms: int) -> None:
        error = sys.exception()
        if error is not None and threading.current_thread() is not threading.main_thread():
            fail()
            raise error
        foreign.wait_at_barrier(key, timeout_ms)

    options.v0 = lambda: dataclasses.replace(options_below(), barrier_sync_fn=wait)
