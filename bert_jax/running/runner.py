"""The training loop of pre-training and fine-tuning.

A run is a function of (experiment, corpus, step): the loop resumes from the step of the newest
checkpoint, and nothing but the state has memory. Only logging, evaluating and saving wait for the
devices.
"""

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import config
from bert_jax.checkpoints.load import Restored
from bert_jax.config import SKIPPED_STEPS
from bert_jax.errors import Unavailable
from bert_jax.model import losses
from bert_jax.running import lines as lines_lib
from bert_jax.running import start
from bert_jax.running.environment import environment
from bert_jax.running.job import Context, Evaluator, PhaseBatches, Result
from bert_jax.running.lines import RunLines
from bert_jax.running.progress import Counts, Profile
from bert_jax.running.start import Divergence, RunFailure
from bert_jax.training import feed as feed_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.replay import RecomputeCheck, SilentCorruption

# Maximum number of dispatched steps: a longer queue delays stopping and hides hangs.
_MOST_DISPATCHED = 4

# Copies on devices; a call costs a fifth of a call of jnp.copy.
_copy: Callable[[jax.Array], jax.Array] = jax.jit(jnp.copy)

# Seconds between two checks whether an epoch is planned.
_POLL_SECONDS = 0.05


class Trainer:
    """One run on the devices of all its processes, from its newest checkpoint to its end.

    Every process runs every step and reads the numbers of every line, so that all processes make
    the same decisions. Only the primary process writes files and reports.
    """

    def __init__(self, context: Context):
        self.context, self.job, self.saves = context, context.job, context.saves
        self.mesh, self.watchdog, self.clock = context.mesh, context.watchdog, context.clock
        self.experiment, self.report, self.stop = self.job.experiment, self.job.report, context.stop
        run, workdir, peers = self.experiment.run, self.job.workdir, context.peers
        self.lines = RunLines(workdir, run.when_disk_is_full, writes=peers.is_primary)
        self.replay = RecomputeCheck(self.mesh)
        self.empty_window = step.make_empty_window(self.job.metric_names, self.mesh)
        self.profile = Profile(run.profile_steps, workdir, peers.number, self.report, self.clock)
        self.state: step.State = {}
        self.window: dict[str, jax.Array] = {}
        self.done = 0  # steps
        self.skipped: tuple[int, ...] = ()  # steps that roll-backs excluded
        self.init_sha256, self.start_step = "", 0  # step of the first state: not 0 in a fork
        self.losses = self.job.objective.losses  # names of the losses of the current phase
        # (step, window, the state's counters, counts) of a line whose numbers are on the devices.
        self.pending: tuple[int, dict[str, jax.Array], dict[str, jax.Array], Counts] | None = None
        # Numbers of dispatched steps, perhaps not done yet; may belong to the previous phase.
        self.dispatched: collections.deque[jax.Array] = collections.deque()
        self.evaluation: dict[str, Any] = {}  # the newest line with a held-out loss
        self.held_out: list[tuple[int, float]] = []  # all (step, held-out loss), if patience > 0
        self.stops_for = ""  # slices that the run stops for, to restart with them

    # --- the order of operations ----------------------------------------------------------------

    def run(self) -> Result:
        """Trains the run; returns how it ended."""
        total = self.job.total_steps
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.saves)
            stack.enter_context(self.context.peers.abort_together(self.context.clean_up))
            stack.enter_context(mesh_lib.translate_memory_errors())
            # Keeps the timings of lost steps; drops a last line that a kill has cut off.
            if self.context.peers.is_primary:
                self.lines.timings.delete_after(total)
            with self.clock.waiting("restore"):
                restored = start.begin(self.context)
            self._resume_from(restored)
            del restored  # the steps donate its arrays
            # Not earlier: the workdir must not hold an experiment that was refused.
            start.write_experiment(self.context)
            if self._is_finished:
                return Result("finished", self.done)
            self.saves.require_space(self.state)
            fork = {} if self.job.fork_point is None else {"branch": str(self.job.fork_point)}
            facts = {"environment": environment()} | fork
            facts |= self.context.peers.report_slices(self.lines.timings.read(), self.report)
            self._log_timing("start", facts)
            if fork and self.done not in self.saves.checkpoints.steps:
                self._save()  # now the fork has a checkpoint of its own, as any other run
            try:
                with self.context.progress.bar(self.done, total):
                    error = self._train()
                self.watchdog.pause()
                with self.clock.waiting("checkpoint"):
                    if error is None and self.saves.step != self.done:
                        self._save()
                    self.saves.finish(self.done, self._save if error is None else None)
                    stack.close()  # inside `waiting`, which counts the end of the last save
                # After the save: a process that must stop may have little time.
                self.profile.end()
            except BaseException as exception:
                with contextlib.suppress(Exception):  # the disk may be full
                    self.profile.end()
                    self._log_timing("end", {"outcome": "failed", "why": str(exception)})
                raise
        if isinstance(error, Divergence):
            self.saves.skip(f"it must roll back over the steps {error.bad[0]} to {error.bad[-1]}")
        reason = str(error) if isinstance(error, RunFailure) else self.saves.unsaved_reason
        outcome = "finished" if self._is_finished and not reason else "stopped"
        outcome = "failed" if isinstance(error, RunFailure) else outcome
        slices = {"for_slices": self.stops_for} if self.stops_for else {}
        self._log_timing("end", {"outcome": outcome} | slices)
        return Result(outcome, self.done, reason)

    def _train(self) -> RunFailure | Divergence | None:
        """Trains all phases; returns an error if the state must not be saved.

        Returns a `Divergence` if a request to stop comes before the roll-back.
        """
        try:
            while not (self.stop.requested or self._is_finished):
                try:
                    phase = self.job.batches(self.done)
                    try:
                        if self._await_rows(phase):
                            self._train_phase(phase)
                    finally:
                        phase.close()
                except (Divergence, SilentCorruption) as error:
                    error = error.with_traceback(None)  # its frames hold a batch and a state
                    if isinstance(error, Divergence) and self.stop.requested:
                        return error
                    self._roll_back(error)
        except RunFailure as error:
            return error.with_traceback(None)
        return None

    def _train_phase(self, phase: PhaseBatches) -> None:
        """Trains the current phase until its end or a request to stop."""
        train_step, checked_step, program = self.job.make_steps(phase, self.mesh)
        replayed_step = self.replay.wrap_step(checked_step, program)
        self.losses = (phase.objective or self.job.objective).losses
        key = step.phase_key(self.job.objective.model, self.experiment.seed, phase.number)
        run, last = self.experiment.run, phase.first + phase.steps
        compiled: set[Any] = set()
        self.watchdog.reset(times=2)
        feed = feed_lib.Feed(
            phase.batch,
            self.done - phase.first,
            phase.steps,
            phase.batch_size,
            mesh_lib.batch_sharding(self.mesh),
            run.prefetch_batches,
            run.data_workers,
            self.report,
        )
        with feed:
            while self.done < last and not (self.stop.requested or self._stops_early):
                with self.profile.step(self.done, self.state):
                    with self.clock.waiting("data"):
                        if not self._await_rows(phase):
                            break
                        batch = next(feed)
                    check = run.check_every > 0 and self.done % run.check_every == 0
                    run_step = checked_step if check else train_step
                    if run.replay_every and self.done % run.replay_every == 0:
                        run_step = replayed_step
                    timer = contextlib.nullcontext()
                    if run_step not in compiled:
                        # The first call compiles the step, or loads it from the cache.
                        compiled.add(run_step)
                        self.watchdog.reset(times=2)
                        timer = self.clock.waiting("compilation")
                    with timer:
                        self.state, self.window = run_step(
                            self.state, self.window, batch, key, self.job.frozen
                        )
                self.dispatched.append(_copy(self.state["step"]))
                if len(self.dispatched) > _MOST_DISPATCHED:
                    jax.block_until_ready(self.dispatched.popleft())
                self.done += 1
                self.watchdog.reset()
                self.clock.count(batch["input_ids"].size, self.job.count_flops(batch))
                self._finish_step(phase.ends_line and self.done == last)
                self.stop.requested |= bool(self.stops_for)
                self.stop.on_step(self.done)
        self._write_pending()

    def _finish_step(self, ends_line: bool) -> None:
        """Logs, evaluates and saves what is due; evaluating and saving wait for the devices."""
        run, is_last = self.experiment.run, self.done == self.job.total_steps
        self.context.mirror.require_owned()
        self.saves.poll()
        self._write_pending()
        if self.done % run.log_every == 0 or is_last or ends_line:
            self._close_window()
        due = self._due_evaluators(self.done)
        saves = self.done % run.checkpoint_every == 0 or is_last
        if due or saves:
            jax.block_until_ready(self.state["step"])  # counts as time of the steps
        if due:
            self._evaluate_due(due)
            self.watchdog.reset()
        if saves:
            with self.clock.waiting("checkpoint"):
                self._save()
            self.watchdog.reset()
            timings, steps_left = self.lines.timings, self.job.total_steps - self.done
            self.stops_for = self.context.peers.slices_to_admit(timings.read, steps_left)
            if self.stops_for:
                self.report(f"slices: {self.stops_for} can train as well; stopping to take them")

    def _roll_back(self, error: Divergence | SilentCorruption) -> None:
        """Rolls back to a checkpoint before the bad steps and skips them, or before a corruption.

        The decision is not stored: a run that restarts from a checkpoint before the bad steps meets
        the same bad steps and rolls back again.

        Raises:
          RunFailure: no checkpoint is old enough; none is removed.
          Unavailable: devices were wrong again; the next start resumes from the checkpoint.
        """
        peers, skipped, event = self.context.peers, self.skipped, f"{error}"
        if isinstance(error, Divergence):
            skipped, first = start.exclude_steps(self.skipped, error.bad)
            facts = {"bad": [error.bad[0], error.bad[-1]], "skipped": list(skipped)}
        else:
            first = self.done - self.experiment.run.replay_every
            facts = {"replayed": self.done, "erred": [device.id for device in error.devices]}
            event = f"step {self.done}: {start.describe_corruption(error, peers)}"
        self.pending = None
        self.state, self.window = {}, {}  # frees memory: two states may not fit
        self.watchdog.reset(times=2)
        with self.clock.waiting("restore"):
            restored = start.roll_back(error, first, self.start_step, self.context)
        if isinstance(error, Divergence):
            target = "" if restored.step else " to step 0, since there is no earlier checkpoint"
            self.report(
                f"{event}; rolling back{target}, and skipping these and the one before "
                f"({self.job.inspection_hint(first)})"
            )
            restored.state = start.with_skipped(restored.state, skipped)
        else:
            self.report(f"{event}; rolling back to step {restored.step}")
        self._resume_from(restored)
        if isinstance(error, Divergence):
            self.skipped = skipped  # `_resume_from` reads them only from a checkpoint
        self._log_timing("roll_back", facts)
        if isinstance(error, SilentCorruption) and error.is_last:
            self.context.mirror.flush()  # the files of process 0 are lost when it ends
            peers.agree("devices", f"{event}, again; run again on another machine", Unavailable)

    # --- resume ---------------------------------------------------------------------------------

    def _resume_from(self, restored: Restored) -> None:
        """Sets the state of the next step; drops lines of steps that will be repeated."""
        self.done, self.state, metadata = restored.step, restored.state, restored.metadata
        window = self.empty_window()
        # A fork with another objective drops metric sums that no longer exist.
        sums = {k: np.array(v, np.float32) for k, v in metadata["window"].items() if k in window}
        self.window = window | feed_lib.put(sums, mesh_lib.replicated(self.mesh))
        # Not at step 0: a fresh state may not fit, and then JAX would wait forever for its parts.
        slots = jax.device_get(self.state["skipped_steps"]) if self.done else ()
        self.skipped = tuple(int(s) for s in slots if s >= 0)
        self.init_sha256, self.start_step = metadata["init_sha256"], metadata.get("begun_at", 0)
        self.evaluation, self.held_out = {}, [*metadata.get("held_out", [])]
        with self.saves.checkpoints.folder.cached_lists():
            self.saves.resume_from(self.done)
        for name, lost in self.lines.resume_from(self.done, metadata.get("lines", {})):
            self.report(f"{name}: is missing; continuing without its {lost} lines")
        if self.done:
            self.report(f"resume: from step {self.done}")
        elif due := self._due_evaluators(0):
            self._evaluate(due)

    def _await_rows(self, phase: PhaseBatches) -> bool:
        """Waits until the rows of the next step are planned; False after a request to stop.

        Planning an epoch may take minutes, so the watchdog pauses.
        """
        number = self.done - phase.first
        if phase.ready(number):
            return True
        self.watchdog.pause()
        while not (self.stop.requested or phase.ready(number)):
            time.sleep(_POLL_SECONDS)
        self.watchdog.reset()
        return not self.stop.requested

    # --- log ------------------------------------------------------------------------------------

    def _close_window(self) -> None:
        """Moves the sums to `pending`, for the next `_write_pending`; begins an empty window."""
        # Copies: the next step is given the state's memory.
        counters = {name: _copy(self.state[name]) for name in ("step", "bad_in_a_row")}
        self.pending = (self.done, self.window, counters, self.clock.take_counts())
        self.window = self.empty_window()

    def _write_pending(self) -> None:
        """Writes the line of the last full window; by now the devices are a step further."""
        if self.pending is None:
            return
        (done, window, counters, counts), self.pending = self.pending, None
        sums, counters = jax.device_get((window, counters))
        worst_loss, worst_step = sums.pop(step.WORST_STEP)  # the step with the highest loss
        means = lines_lib.means(sums)
        # Measured now that the devices have done these steps: dispatching them takes no time.
        seconds = self.clock.lap(counts, means.get("filled"))
        reached, in_a_row = int(counters["step"]), int(counters["bad_in_a_row"])
        if in_a_row >= self.experiment.optimizer.bad_steps_in_a_row:
            self._diverged(range(reached - in_a_row, reached))
        line: dict[str, Any] = {"step": done, "kind": "train", **means}
        if terms := [means[name] for name in self.losses if name in means]:
            line["loss"] = sum(terms)
            line |= {"worst_step": int(worst_step), "worst_step_loss": float(worst_loss)}
        self.lines.append(line, "metrics")
        self.lines.time(done, "train", seconds)
        self.context.progress.train(line, seconds)
        if spike := self.lines.spikes.check(line):
            number, loss, usual = spike
            self.report(
                f"step {number}: its loss jumps to {loss:.3f}, usually below {usual:.3f}; "
                f"{self.job.inspection_hint(number)}"
            )

    @property
    def _stops_early(self) -> bool:
        return lines_lib.should_stop_early(self.held_out, self.job.patience)

    @property
    def _is_finished(self) -> bool:
        return self.done == self.job.total_steps or self._stops_early

    def _diverged(self, bad: range) -> NoReturn:
        """Raises the error after many bad steps in a row: it rolls the run back, or ends it."""
        skipped, _ = start.exclude_steps(self.skipped, bad)
        if self.experiment.optimizer.after_bad_steps == "stop":
            reason = "optimizer.after_bad_steps=stop"
        elif len(skipped) > SKIPPED_STEPS:
            reason = f"{len(self.skipped)} steps are skipped already"
        else:
            raise Divergence(bad)
        raise RunFailure(
            f"no finite loss or gradient in the {len(bad)} steps from {bad[0]} to {bad[-1]}, and "
            f"{reason}; all checkpoints are older than these steps"
        )

    def _lap(self) -> dict[str, float]:
        return self.clock.lap(self.clock.take_counts())

    def _log_timing(self, kind: str, facts: dict[str, Any]) -> None:
        self.lines.time(self.done, kind, self._lap() | facts)
        self.lines.flush()

    # --- evaluate -------------------------------------------------------------------------------

    def _due_evaluators(self, done: int) -> list[Evaluator]:
        return [evaluator for evaluator in self.job.evaluators if evaluator.is_due(done)]

    def _evaluate_due(self, due: list[Evaluator]) -> None:
        """Evaluates what is due; after an early stop, also what is due after the last step."""
        self._evaluate(due)
        total = self.job.total_steps
        if self._stops_early and self.done < total:
            if self.done % self.experiment.run.log_every:  # no later line will have these steps
                self._close_window()
            self._evaluate([e for e in self._due_evaluators(total) if e not in due])

    def _evaluate(self, evaluators: list[Evaluator]) -> None:
        """Evaluates and writes the lines; raises RunFailure if the held-out loss is not finite."""
        for evaluator in evaluators:
            self._write_pending()
            with self.clock.waiting(evaluator.wait):
                values = evaluator.evaluate(self.state["params"], self.done)
            if not math.isfinite(values.get("loss", 0.0)):
                if jax.device_get(self.state["bad_in_a_row"]):  # a roll-back will follow
                    return
                raise RunFailure(
                    f"the held-out loss of step {self.done} is not finite: the parameters have run "
                    "away"
                )
            if not values:
                continue
            line = {"step": self.done, "kind": evaluator.name, **values}
            if "loss" in values:
                self.evaluation = line
            self.lines.append(line, evaluator.file)
            if description := evaluator.describe(line):
                self.report(f"step {self.done}: {description}")
            # Bad steps do not change the state: an equal loss must not stop the run early.
            changed = self.job.patience and not jax.device_get(self.state["bad_in_a_row"])
            if "loss" in values and changed:
                self.held_out.append((self.done, values["loss"]))
                if self._stops_early and self.done < self.job.total_steps:
                    best, loss = min(self.held_out, key=lambda evaluated: evaluated[1])
                    self.report(
                        f"step {self.done}: early stopping, since the last {self.job.patience} "
                        f"held-out losses are not below {loss:.4f} of step {best} (patience)"
                    )

    # --- save -----------------------------------------------------------------------------------

    def _save(self) -> None:
        self._write_pending()
        self.job.require_unchanged()
        sums, bad = jax.device_get((self.window, self.state["bad_in_a_row"]))
        if bad and not self._is_finished:
            # A roll-back needs an older checkpoint, and only a few are kept.
            self.saves.skip(f"{int(bad)} steps up to it have no finite loss or gradient")
            self.report(f"step {self.done}: {self.saves.unsaved_reason}")
            return
        evaluated = self.evaluation if self.evaluation.get("step") == self.done else {}
        metadata = {
            "window": {k: v.tolist() for k, v in sums.items()},
            "corpus_sha256": self.job.data_sha256,
            "init_sha256": self.init_sha256,
            "begun_at": self.start_step,
            "experiment": json.loads(config.to_json(self.experiment)),
            "environment": environment(),
            "notes": self.job.notes(evaluated),
        }
        if self.job.patience:
            metadata["held_out"] = [*self.held_out]  # a copy: saving is asynchronous
        self.saves.wait_for_previous()
        with self.saves.tolerate_full_disk(self.done):
            # Before the checkpoint, since a resumed run does not write these lines again.
            self.lines.flush()
            self.watchdog.pause()
            self.context.mirror.flush()  # copies all files to the run's bucket, if it has one
            self.watchdog.reset(times=2)
            metadata["lines"] = self.lines.tallies()
            # Not the loss of pairs: few documents make it, so it is noisy.
            token_task = losses.find_task(evaluated, losses.TOKENS)
            loss = evaluated.get(f"{token_task}_loss", evaluated.get("loss"))
            self.saves.save(self.done, self.state, metadata, loss)
