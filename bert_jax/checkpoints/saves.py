"""Writes the checkpoints of a run with Orbax, and handles saves that fail.

Saving is asynchronous: the state is copied and written during the next steps. A checkpoint counts
only once it is complete. A save that fails with a transient error costs a run of one process only
time; several processes all end and start again.
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
    DAMAGED_PREFIX,
    FORMAT_VERSION,
    Checkpoints,
    context,
    hash_json,
    orbax_client,
)
from bert_jax.config import Run
from bert_jax.distributed.peers import Peers
from bert_jax.errors import DiskFull, Unavailable
from bert_jax.storage import retry
from bert_jax.storage.workdir import Workdir, absolute, translate_os_errors, write_json
from bert_jax.training.checksums import checksums

# Orbax writes this file into a complete checkpoint in a bucket.
_COMMITTED = "commit_success.txt"
# Orbax adds this to the name of an incomplete checkpoint; it deletes such folders before it saves.
_UNFINISHED = ".orbax-checkpoint-tmp"


class Saves(Checkpoints):
    """Writes the checkpoints of one run; must be entered while it does.

    After process 0 has renamed or deleted checkpoints, the others call `refresh` to see it.
    """

    def __init__(self, workdir: Workdir, run: Run, peers: Peers, report: Callable[[str], None]):
        super().__init__(workdir.checkpoints)
        self.step = 0  # of the newest checkpoint, which may not be complete yet
        self._previous_step = 0  # of the previous checkpoint, which is complete
        self.unsaved_reason = ""  # why no checkpoint has the last steps; "" if one has them
        self._workdir, self._run, self._peers, self._report = workdir, run, peers, report
        self._losses: dict[int, float | None] = {}  # {step: held-out loss} of checkpoints
        self._orbax: ocp.training.Checkpointer | None = None
        self._is_saving = False
        self._has_failed = False  # the current save has failed here: `wait` will raise its error
        self._client = contextlib.ExitStack()  # entered with this object
        self._remove_unfinished()  # threads of a failed save may have written files after its end

    # --- save -----------------------------------------------------------------------------------

    def save(
        self, done: int, state: Any, metadata: dict[str, Any], held_out_loss: float | None = None
    ) -> None:
        """Starts to save the state of training.step and the JSON, after `wait_for_previous`.

        The best checkpoints have the lowest held-out loss; None if this step was not evaluated.

        Raises:
          Unavailable: transient errors lasted too long, or there are several processes.
        """
        metadata = {
            "format_version": FORMAT_VERSION,
            "step": done,
            "checksums": checksums(state),
            "held_out_loss": held_out_loss,
            **metadata,
        }
        metadata["sha256"] = hash_json(metadata)
        self._losses[done] = held_out_loss

        def begin() -> None:
            with self._writing():
                self._checkpointer.save_async(done, state, force=True, custom_metadata=metadata)

        self._outlast(begin)
        self._previous_step = self.step
        self.step, self.unsaved_reason, self._is_saving = done, "", True

    def poll(self) -> None:
        """Notices whether the current save has failed, or has become a complete checkpoint."""
        if self._has_failed:
            self.wait_for_previous()  # at once: the other processes wait for this one inside Orbax
        if self._is_saving and self._orbax and not self._orbax.is_saving_in_progress():
            self._is_saving = False
            with contextlib.suppress(Exception):  # does not wait for a bucket without an answer
                if self.step in checkpoint_steps(absolute(self._folder)):
                    self._record(self.step)

    def wait(self) -> None:
        """Waits until the current save is on disk; deletes the files of a failed save.

        Raises:
          Unavailable: the save failed with a transient error; the next one may succeed.
        """
        self._has_failed = False
        with self._writing():
            if self._orbax is not None:
                self._orbax.wait()

    def wait_for_previous(self) -> None:
        """Waits for the previous save; if it has failed, the save that follows replaces it."""
        with self.tolerate_full_disk(self.step):  # a failed save has freed its space
            try:
                self.wait()
            except DiskFull:
                self.step = self._previous_step
                raise
            except Unavailable as error:
                self._give_up(error)

    def finish(self, done: int, save: Callable[[], None] | None) -> None:
        """Waits for the last save; repeats it with `save` if it failed with a transient error."""
        try:
            self.wait()
        except Unavailable as error:
            self._give_up(error)
            if save is None:
                raise

            def repeat() -> None:
                if done not in self.steps:  # perhaps only the deletion of an old one has failed
                    save()
                    self.wait()

            self._outlast(repeat)
        self._record()

    def skip(self, reason: str) -> None:
        """Records why the last steps are not saved."""
        newest = f"the newest checkpoint is of step {self.step}"
        self.unsaved_reason = f"not saved, since {reason}; {newest}"

    @contextlib.contextmanager
    def tolerate_full_disk(self, done: int) -> Iterator[None]:
        """Continues without a checkpoint on a full disk if `run.when_disk_is_full` allows it."""
        try:
            yield
        except DiskFull as error:
            if self._run.when_disk_is_full == "stop" or self._peers.count > 1:
                raise
            self.unsaved_reason = f"without a new checkpoint: {error}"
            self._report(f"step {done}: {self.unsaved_reason}")

    def require_space(self, state: Any) -> None:
        """Reports if the disk has too little space; raises DiskFull if no checkpoint fits."""
        if self._workdir.remote is not None or not self._peers.is_primary:
            return
        run, size = self._run, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._workdir.root).free
        # One more than are kept: an old one is deleted after the next is complete.
        more = max(run.keep_checkpoints + run.keep_best + 1 - len(self.steps), 1)
        message = (
            f"{self._folder}: its disk has {free / 1e6:,.1f} MB free, and {more} more "
            f"checkpoints take {size / 1e6:,.1f} MB each; free some space"
        )
        # If the memory is too small as well, a larger disk would not help: the first step fails.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if free < size < memory and run.when_disk_is_full == "stop":
            raise DiskFull(f"{message} and run again")
        if free < more * size:
            self._report(message)

    # --- resume ---------------------------------------------------------------------------------

    def resume_from(self, done: int) -> None:
        """Records that the run starts from the checkpoint of this step; 0 if there is none."""
        self.step, self.unsaved_reason = done, ""
        self._record()

    def rename_damaged(self, step: int) -> str:
        """Renames a damaged checkpoint, so that it no longer counts; called by process 0 only.

        Returns its new name; "" if it does not exist.
        """
        folder = self._folder / str(step)

        def rename() -> str:
            if not folder.exists():
                return ""
            # An earlier attempt may have moved a part of it in a bucket: the rest gets a number.
            ends = itertools.chain([""], (f"-{number}" for number in itertools.count(1)))
            paths = (self._folder / f"{DAMAGED_PREFIX}{step}{end}" for end in ends)
            target = next(path for path in paths if not path.exists())
            with self._transient_faults():  # the object may have moved, and the answer be lost
                folder.rename(target)
            if self._storage.is_bucket:  # Orbax deletes folders without this file as unfinished
                (target / _COMMITTED).write_text("")
            return target.name

        return self._retry(rename)

    def refresh(self) -> None:
        """Lists checkpoints again; otherwise steps of deleted ones could not be saved again."""
        if self._orbax is not None:
            self._retry(self._orbax.reload)

    def delete_after(self, step: int, send: Callable[[], None]) -> None:
        """Deletes checkpoints after `step`, whose steps will be repeated; called by process 0 only.

        First records the newest that remains and calls `send`, which copies the record to a bucket:
        a later start must not report the deleted checkpoints as lost.
        """
        self._record(max((number for number in self.steps if number <= step), default=0))
        send()

        def delete(folder: epath.Path) -> None:
            # Renames first: a partly deleted checkpoint would count as damaged.
            renamed = self._folder / f"{folder.name}{_UNFINISHED}"
            renamed.rmtree(missing_ok=True)
            if folder.exists():
                with self._transient_faults():
                    folder.rename(renamed)
                renamed.rmtree()

        for newer in [number for number in self.steps if number > step]:
            self._retry(lambda number=newer: delete(self._folder / str(number)))

    def __enter__(self) -> "Saves":
        self._client.enter_context(orbax_client(self._folder))
        return self

    def __exit__(self, *_: object) -> None:
        with self._client:
            try:
                if self._orbax is not None:
                    with self._writing():
                        self._orbax.close()
            finally:
                self._remove_unfinished()

    # --- internals ------------------------------------------------------------------------------

    @property
    def _checkpointer(self) -> ocp.training.Checkpointer:
        """Orbax's checkpointer, opened on first use. All checkpoints must be readable then."""
        if self._orbax is None:
            for step in self.steps:
                self._losses[step] = self.metadata(step)["held_out_loss"]
            settings = context()
            _leave_barriers(settings.asynchronous, lambda: setattr(self, "_has_failed", True))
            self._orbax = ocp.training.Checkpointer(
                absolute(self._folder),
                context=settings,
                preservation_policy=self,
                cleanup_tmp_directories=True,
            )
        return self._orbax

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether to keep each checkpoint, oldest first; Orbax calls it before it deletes.

        Orbax's `best_fn` with `max_to_keep` would delete the newest, and its metrics are files
        without which it cannot be opened.
        """
        del context
        run, steps = self._run, [checkpoint.step for checkpoint in checkpoints]
        losses = {step: self._losses.get(step) for step in steps}
        evaluated = sorted((loss, step) for step, loss in losses.items() if loss is not None)
        kept = {*steps[-run.keep_checkpoints :], *(step for _, step in evaluated[: run.keep_best])}
        checked = (steps[-1] - 1) // run.replay_every * run.replay_every if run.replay_every else 0
        kept.update([step for step in steps if step <= checked][-1:])
        return [s in kept or (run.keep_every > 0 and s % run.keep_every == 0) for s in steps]

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Translates errors of a save; after a failure deletes its files and closes Orbax."""
        try:
            with translate_os_errors(self._folder), self._transient_faults():
                yield
        except Exception:
            # Orbax's own list of checkpoints may be wrong now.
            orbax, self._orbax = self._orbax, None
            with contextlib.suppress(Exception):
                if orbax is not None:
                    orbax.close()
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
        """Deletes incomplete checkpoints, to free their space; nothing may be saving meanwhile."""
        if not self._peers.is_primary:
            return
        # Orbax does the same only when it starts a save.
        with contextlib.suppress(Exception), orbax_client(self._folder):
            for path in self._folder.glob(f"*{_UNFINISHED}"):
                path.rmtree()
            self._folder.rmdir()

    def _record(self, step: int | None = None) -> None:
        """Records the newest complete checkpoint, so that a later start notices if it is lost."""
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
        """Does the work, again after each transient error; only once with several processes."""
        if self._peers.count > 1:
            work()
        else:
            retry.call_with_retries(work, f"{self._folder}")


def _leave_barriers(options: ocp.options.AsyncOptions, fail: Callable[[], None]) -> None:
    """Keeps a saving thread that has failed away from Orbax's barriers, and calls `fail` then.

    The other processes wait for its part at another barrier, and would not learn of the failure.
    """
    make_options = options.v0  # the options of Orbax's older interface, which the new one uses

    def wait(*, key: str, timeout_ms: int) -> None:
        error = sys.exception()
        if error is not None and threading.current_thread() is not threading.main_thread():
            fail()
            raise error
        foreign.wait_at_barrier(key, timeout_ms)

    options.v0 = lambda: dataclasses.replace(make_options(), barrier_sync_fn=wait)
