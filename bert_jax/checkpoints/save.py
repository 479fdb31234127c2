"""Saves the checkpoints of a run with Orbax, and handles saves that fail.

Saving is asynchronous: the state is copied and written during the next steps. A checkpoint is used
only once it is complete. After a save has failed with a transient error, a run of one process
continues; if a run has several processes, all of them end and must be started again.
"""

import contextlib
import dataclasses
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from orbax.checkpoint import multihost
from orbax.checkpoint import v1 as ocp

from bert_jax.checkpoints import layout
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Run
from bert_jax.distributed.peers import Peers
from bert_jax.errors import DiskFull, Unavailable
from bert_jax.storage import retry
from bert_jax.storage.workdir import Workdir, absolute, translate_os_errors, write_json
from bert_jax.training.checksums import checksums


class Saver:
    """Saves the checkpoints of one run; a context manager around all its saves."""

    def __init__(self, workdir: Workdir, cfg: Run, peers: Peers, report: Callable[[str], None]):
        self.checkpoints = Checkpoints(workdir.checkpoints)
        self.saved_step = 0  # of the newest checkpoint, which may not be complete yet
        self.unsaved_reason = ""  # why the latest steps are not saved; "" if they are
        self._previous_step = 0  # of the checkpoint before, which is complete
        self._is_saving = False
        self._has_failed = False  # whether the current save has failed in this process
        self._workdir, self._peers, self._report = workdir, peers, report
        self._settings, self._retention = cfg, _Retention(cfg)
        self._orbax: ocp.training.Checkpointer | None = None  # opened at the first save
        self._exit_stack = contextlib.ExitStack()  # entered with this object
        self._delete_unfinished()  # an earlier process may have been killed while it saved

    def __enter__(self) -> "Saver":
        self._exit_stack.enter_context(layout.retry_orbax_requests(self._workdir.checkpoints))
        return self

    def __exit__(self, *_: object) -> None:
        with self._exit_stack:
            try:
                if self._orbax is not None:
                    with self._translate_errors():
                        self._orbax.close()
            finally:
                self._delete_unfinished()

    def save(
        self, step: int, state: Any, metadata: dict[str, Any], held_out_loss: float | None = None
    ) -> None:
        """Starts to save the training state and its metadata after a step.

        Call `wait_and_tolerate_failure` first. `held_out_loss` decides which checkpoints are the
        best; None if this step was not evaluated.

        Raises:
          Unavailable: a transient error, which a run of one process has retried for ten minutes.
        """
        content: dict[str, Any] = {"format_version": layout.FORMAT_VERSION, "step": step}
        content |= {"checksums": checksums(state), "held_out_loss": held_out_loss, **metadata}
        content["sha256"] = layout.hash_json(content)

        def begin() -> None:
            with self._translate_errors():
                orbax = self._orbax or self._open_orbax()
                self._retention.losses[step] = held_out_loss
                orbax.save_async(step, state, force=True, custom_metadata=content)

        self._retry(begin)
        self._previous_step = self.saved_step
        self.saved_step, self.unsaved_reason, self._is_saving = step, "", True

    def poll(self) -> None:
        """Checks whether the current save has failed, or has become a complete checkpoint."""
        if self._has_failed:  # raised now, since the other processes wait for this one inside Orbax
            self.wait_and_tolerate_failure()
        if self._is_saving and self._orbax and not self._orbax.is_saving_in_progress():
            self._is_saving = False
            with contextlib.suppress(Exception):  # `finish` or a later save records it
                if self.saved_step in layout.list_steps(self._workdir.checkpoints):
                    self._write_newest_step(self.saved_step)

    def wait(self) -> None:
        """Waits until the current save is complete; if it has failed, raises its error."""
        self._has_failed = False
        with self._translate_errors():
            if self._orbax is not None:
                self._orbax.wait()

    def wait_and_tolerate_failure(self) -> None:
        """Waits as `wait` does; reports a failure that the run can survive, and raises others."""
        with self.tolerate_full_disk(self.saved_step):
            try:
                self.wait()
            except DiskFull:
                self.saved_step = self._previous_step
                raise
            except Unavailable as error:
                self._report_failed_save(error)

    def finish(self, step: int, save_again: Callable[[], None] | None) -> None:
        """Waits for the save of the last step; after a transient error calls `save_again`.

        If `save_again` is None, as when the run ends with an error, raises the transient error.
        """
        try:
            self.wait()
        except Unavailable as error:
            self._report_failed_save(error)
            if save_again is None:
                raise

            def save_if_missing() -> None:
                # If the checkpoint is there, only the deletion of an old one has failed.
                if step not in self.checkpoints.steps:
                    save_again()
                    self.wait()

            self._retry(save_if_missing)
        self._write_newest_step()

    def set_unsaved_reason(self, reason: str) -> None:
        """Sets `unsaved_reason` to this reason and the step of the newest checkpoint."""
        newest = f"the newest checkpoint is of step {self.saved_step}"
        self.unsaved_reason = f"not saved: {reason}; {newest}"

    @contextlib.contextmanager
    def tolerate_full_disk(self, step: int) -> Iterator[None]:
        """Continues without a checkpoint on a full disk if `run.when_disk_is_full` allows it."""
        try:
            yield
        except DiskFull as error:  # the files of the failed save are deleted already
            if self._settings.when_disk_is_full == "stop" or self._peers.count > 1:
                raise
            self.unsaved_reason = f"without a new checkpoint: {error}"
            self._report(f"step {step}: {self.unsaved_reason}")

    def require_space(self, state: Any) -> None:
        """Reports if the disk has too little space; raises DiskFull if no checkpoint fits."""
        if self._workdir.remote is not None or not self._peers.is_primary:
            return
        run, size = self._settings, sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free = shutil.disk_usage(self._workdir.root).free
        # One more than the run keeps, because it deletes an old one only after a save.
        needed = max(run.keep_checkpoints + run.keep_best + 1 - len(self.checkpoints.steps), 1)
        space = f"{self._workdir.checkpoints}: its disk has {free / 1e6:,.1f} MB free, and "
        space += f"a checkpoint takes {size / 1e6:,.1f} MB"
        # A state larger than the host's memory fails at the first step, with or without disk space.
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if free < size < memory and run.when_disk_is_full == "stop":
            raise DiskFull(f"{space}; free some space and run again")
        if free < needed * size:
            endings = {"stop": "ends with exit code 74", "go_on": "continues without checkpoints"}
            self._report(
                f"warning: {space}. The run needs space for {needed} more before it deletes an "
                f"old one (run.keep_checkpoints={run.keep_checkpoints}, "
                f"run.keep_best={run.keep_best}, and one during a save). "
                f"It starts anyway, and {endings[run.when_disk_is_full]} "
                "once the disk is full; free some space, or keep fewer checkpoints"
            )

    def resume_from(self, step: int) -> None:
        """Takes this step's checkpoint as the newest (0: none); records the newest complete one."""
        self.saved_step, self.unsaved_reason = step, ""
        self._write_newest_step()

    def refresh(self) -> None:
        """Makes Orbax list checkpoints again: it refuses to save a step that is in its old list."""
        if self._orbax is not None:
            self.checkpoints.folder.retry(self._orbax.reload)

    def delete_after(self, step: int, upload_record: Callable[[], None]) -> None:
        """Deletes checkpoints of steps after `step`, which will be repeated; process 0 calls it.

        `upload_record` copies the record of the newest checkpoint to a bucket.
        """
        steps = self.checkpoints.steps
        # This is done first: a later start must not report the deleted checkpoints as lost.
        self._write_newest_step(max((number for number in steps if number <= step), default=0))
        upload_record()
        for newer in [number for number in steps if number > step]:
            self.checkpoints.folder.delete(newer)

    def _open_orbax(self) -> ocp.training.Checkpointer:
        """Opens Orbax's checkpointer, and reads the held-out losses of all checkpoints."""
        for step in self.checkpoints.steps:
            self._retention.losses[step] = self.checkpoints.metadata(step)["held_out_loss"]
        settings = layout.orbax_settings()
        # Orbax v1 has no option for the barrier. `v0()` converts to the options of v0, which do.
        make_options = settings.asynchronous.v0
        settings.asynchronous.v0 = lambda: dataclasses.replace(
            make_options(), barrier_sync_fn=self._wait_at_barrier
        )
        self._orbax = ocp.training.Checkpointer(
            absolute(self._workdir.checkpoints),
            context=settings,
            preservation_policy=self._retention,
            cleanup_tmp_directories=True,
        )
        return self._orbax

    def _wait_at_barrier(self, *, key: str, timeout_ms: int) -> None:
        """Waits at a barrier of Orbax; if this thread has failed to save, raises its error instead.

        After a failure Orbax waits at the last barrier in a `finally`, for 20 minutes and with the
        error unreported, while the other processes wait at an earlier barrier for this one.
        """
        error = sys.exception()  # which the `finally` would raise after the wait
        if error is not None and threading.current_thread() is not threading.main_thread():
            self._has_failed = True
            raise error
        multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)

    @contextlib.contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Translates the errors of a save; after one, closes Orbax and deletes the save's files."""
        folder = self.checkpoints.folder
        try:
            with translate_os_errors(folder.path), folder.translate_write_errors():
                yield
        except Exception:
            # Closed, because its own list of checkpoints may be wrong now.
            orbax, self._orbax = self._orbax, None
            with contextlib.suppress(Exception):
                if orbax is not None:
                    orbax.close()
            self._delete_unfinished()
            raise

    def _delete_unfinished(self) -> None:
        if self._peers.is_primary:
            self.checkpoints.folder.delete_unfinished()

    def _write_newest_step(self, step: int | None = None) -> None:
        """Records the newest complete checkpoint, so that a later start notices if it is lost."""
        if self._peers.is_primary:
            step = max(self.checkpoints.steps, default=0) if step is None else step
            with contextlib.suppress(DiskFull):
                write_json(self._workdir.saved, {"format_version": 1, "step": step})

    def _report_failed_save(self, error: Unavailable) -> None:
        """Reports that the current save has failed; with several processes, raises its error."""
        if self._peers.count > 1:  # the other processes wait for this one inside Orbax
            raise error
        self._report(f"step {self.saved_step}: no checkpoint was written ({error})")
        self.saved_step = self._previous_step

    def _retry(self, work: Callable[[], None]) -> None:
        """Calls `work`; retries it after transient errors if there is only one process."""
        if self._peers.count > 1:
            work()
        else:
            retry.call_with_retries(work, f"{self._workdir.checkpoints}")


class _Retention:
    """Decides which checkpoints a run keeps; Orbax calls it after each save to delete the others.

    Orbax's `best_fn` with `max_to_keep` would delete the newest checkpoint. It would also need a
    file of metrics in each checkpoint: Orbax does not open a folder where one is missing.
    """

    def __init__(self, run: Run):
        self.run = run
        self.losses: dict[int, float | None] = {}  # {step: held-out loss} of checkpoints

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Returns whether to keep each checkpoint, oldest first."""
        del context
        run, steps = self.run, [checkpoint.step for checkpoint in checkpoints]
        losses = {step: self.losses.get(step) for step in steps}
        evaluated = sorted((loss, step) for step, loss in losses.items() if loss is not None)
        kept = {*steps[-run.keep_checkpoints :], *(step for _, step in evaluated[: run.keep_best])}
        kept.update(run.keep_steps)
        if run.replay_every:
            # Also the newest checkpoint that a recompute check has passed: if the next check fails,
            # the run rolls back to it. A check at the newest step runs after the save.
            last_check = (steps[-1] - 1) // run.replay_every * run.replay_every
            kept.update([step for step in steps if step <= last_check][-1:])
        return [s in kept or (run.keep_every > 0 and s % run.keep_every == 0) for s in steps]
