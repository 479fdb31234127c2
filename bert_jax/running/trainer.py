"""The training loop of pre-training and fine-tuning.

The batch of a step depends only on the experiment, the data and the number of the step, so a run
resumes exactly from the state in its newest checkpoint. A training line of metrics.jsonl sums up
the steps since the previous training line, its window. A step is dispatched to the devices, then
all processes do what is due, in this order:

1. check that the run still owns its bucket, and look for a failed save, which ends a run of several
   processes and is reported by a run of one;
2. log: fetch the pending line, if an earlier step has ended a window, and write it. If its window
   ends with too many bad steps in a row, it is not written and the run rolls back, if it may;
   nothing else looks for bad steps. If this step ends a window, its line is now pending: it is
   written, with the same check, after the next step, before this step's evaluation or save, or when
   the phase or the run ends;
3. evaluate, if due; this waits for the devices;
4. save, if due, unless the newest steps are bad and the run goes on; this waits for the devices,
   then for the previous save;
5. stop, if a signal or slices that came back have asked for it, or (fine-tuning) early.

A recompute check is due before a step: if a device erred, the run rolls back and the step is not
taken. Lines, evaluations and checkpoints give the number of steps done, while a single step, such
as a bad one, has the number of steps done before it.

If nothing else is due, a line is written one step late: while the loop waits for the window's last
step, the next step is queued, so that the devices do not idle. The loop also waits if more than
`_MOST_DISPATCHED` steps are in flight.
"""

import collections
import contextlib
import json
import math
import time
from collections.abc import Callable
from typing import Any

import jax

from bert_jax import config
from bert_jax.distributed.peers import describe_lost_process
from bert_jax.errors import Unavailable, pluralize
from bert_jax.model import losses
from bert_jax.running import lines as lines_lib
from bert_jax.running import start
from bert_jax.running.context import Context, Result
from bert_jax.running.environment import environment
from bert_jax.running.job import Evaluator, PhaseBatches, make_steps
from bert_jax.running.log import TrainingLog, copy_array
from bert_jax.running.progress import Profile
from bert_jax.running.start import Divergence, RunFailure, RunState
from bert_jax.training import feed as feed_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.objective import Batch
from bert_jax.training.recompute_check import RecomputeCheck, SilentCorruption

# Maximum number of dispatched steps: a longer queue delays stopping and hides hangs.
_MOST_DISPATCHED = 4

# Seconds between two checks whether the plan of an epoch is computed (data.plans).
_POLL_SECONDS = 0.05


class Trainer:
    """One run on the devices of all its processes, from its newest checkpoint to its end.

    Every process runs every step and fetches the metrics of every line, so that all processes make
    the same decisions. Only the primary process writes files and reports.
    """

    state: RunState  # set by `run`

    def __init__(self, context: Context):
        self.context, self.job = context, context.job
        self.log = TrainingLog(context)
        self.recompute_check = RecomputeCheck(context.mesh)
        self.profile = Profile(
            self.job.experiment.run.profile_steps,
            self.job.workdir,
            context.peers.number,
            self.job.report,
            context.clock,
        )
        # An output of each dispatched step, to wait for it; some may be of the previous phase.
        self.in_flight: collections.deque[jax.Array] = collections.deque()
        self.waiting_slices = ""  # names of slices with which the run is to restart; "": none

    def run(self) -> Result:
        """Trains the run; returns how it ended."""
        context, saver = self.context, self.context.saver
        with contextlib.ExitStack() as stack:
            stack.enter_context(saver)
            # If one process fails, all end.
            stack.enter_context(context.peers.abort_together(context.clean_up))
            stack.enter_context(mesh_lib.translate_memory_errors())
            with context.clock.waiting("restore"):
                self.state = start.begin(context, self.log.lines)
            self._evaluate_step_0()
            # Not earlier: the start may refuse the experiment, and then must not write it.
            context.write_experiment()
            if self._is_finished:
                return Result("finished", self.state.done)
            saver.require_space(self.state.arrays)
            self._log_start()
            if self.job.fork_point is not None and self.state.done not in saver.checkpoints.steps:
                self._save()  # from now on the fork resumes from a checkpoint of its own
            try:
                with context.progress.bar(self.state.done, self.job.training.total_steps):
                    error = self._train()
                context.watchdog.pause()
                with context.clock.waiting("checkpoint"):
                    if error is None and saver.saved_step != self.state.done:  # not saved yet
                        self._save()
                    # Waits for the save. If it failed, `finish` saves again, unless there is an
                    # error: then the current state must not be saved.
                    saver.finish(self.state.done, self._save if error is None else None)
                    stack.close()  # here, so that closing Orbax counts as checkpoint time
                # After the save: a process that must stop may have little time.
                self.profile.end()
            except BaseException as exception:
                with contextlib.suppress(Exception):  # the disk may be full
                    self.profile.end()
                    lost = context.peers.count > 1 and describe_lost_process(exception)
                    facts = {"outcome": "failed", "why": lost or str(exception)}
                    self.log.write_timing(self.state.done, "end", facts)
                raise
        return self._result(error)

    def _log_start(self) -> None:
        fork_point, peers = self.job.fork_point, self.context.peers
        fork = {} if fork_point is None else {"branch": str(fork_point)}  # its name in files
        slice_facts = peers.report_slices(self.log.lines.timings.read(), self.job.report)
        facts = {"environment": environment()} | fork | slice_facts
        self.log.write_timing(self.state.done, "start", facts)

    def _result(self, error: RunFailure | Divergence | None) -> Result:
        """Returns and logs how the run ended; `error` is why its last state was not saved."""
        saver = self.context.saver
        if isinstance(error, Divergence):
            saver.set_unsaved_reason(
                f"the run must roll back over the steps {error.bad[0]} to {error.bad[-1]}"
            )
        if isinstance(error, RunFailure):
            outcome, reason = "failed", str(error)
        else:
            reason = saver.unsaved_reason
            outcome = "finished" if self._is_finished and not reason else "stopped"
        facts: dict[str, Any] = {"outcome": outcome}
        if reason:
            facts["why"] = reason
        if self.waiting_slices:
            facts["for_slices"] = self.waiting_slices
        self.log.write_timing(self.state.done, "end", facts)
        return Result(outcome, self.state.done, reason)

    # --- train ----------------------------------------------------------------------------------

    def _train(self) -> RunFailure | Divergence | None:
        """Trains all phases; returns an error if the state must not be saved.

        Returns a `Divergence` if the run may roll back and is asked to stop before it has.
        """
        stop = self.context.stop
        try:
            while not (stop.requested or self._is_finished):
                try:
                    phase = self.job.training.phase_batches_at(self.state.done)
                    try:
                        if self._await_plan(phase):
                            self._train_phase(phase)
                    finally:
                        phase.stop_planning()
                except (Divergence, SilentCorruption) as error:
                    error = error.with_traceback(None)  # its frames hold a batch and a state
                    if isinstance(error, Divergence):
                        start.require_excludable(error, self.state.excluded, self.job.experiment)
                        if stop.requested:
                            return error
                    self._roll_back(error)
        except RunFailure as error:
            return error.with_traceback(None)
        return None

    def _train_phase(self, phase: PhaseBatches) -> None:
        """Trains the current phase until its end or a request to stop."""
        context, job, state = self.context, self.job, self.state
        run, phase_end = job.experiment.run, phase.first + phase.steps
        train_step, checked_step, fingerprints = make_steps(job, phase, context.mesh)
        recomputed_step = self.recompute_check.wrap_step(checked_step, fingerprints)
        key = step.phase_key(job.training.objective.model, job.experiment.seed, phase.number)
        compiled: set[Callable] = set()
        context.watchdog.reset(times=2)  # twice the usual time limit, here and below
        feed = feed_lib.Feed(
            phase.make_batch,
            range(state.done - phase.first, phase.steps),
            phase.batch_size,
            mesh_lib.batch_sharding(context.mesh),
            run,
            job.report,
        )
        with feed:
            while state.done < phase_end and not (context.stop.requested or self._stops_early):
                with self.profile.step(state.done, state.arrays):
                    with context.clock.waiting("data"):
                        if not self._await_plan(phase):
                            break
                        batch = next(feed)
                    batch = context.hooks.change_batch(state.done, batch)
                    if run.replay_every and state.done % run.replay_every == 0:
                        program = recomputed_step  # checks the devices, then takes the step
                    elif run.check_every and state.done % run.check_every == 0:
                        program = checked_step  # a TPU that finds an error in it ends the run
                    else:
                        program = train_step
                    timer = contextlib.nullcontext()
                    if program not in compiled:
                        # The first call compiles the step, or loads it from the cache.
                        compiled.add(program)
                        context.watchdog.reset(times=2)
                        timer = context.clock.waiting("compilation")
                    with timer:
                        state.arrays, state.window = program(
                            state.arrays, state.window, batch, key, job.training.frozen
                        )
                self._count_step(batch)
                self._finish_step(phase)
        self.log.write_pending()  # raises Divergence, as in `_finish_step`

    def _await_plan(self, phase: PhaseBatches) -> bool:
        """Waits until the epoch of the next step is planned; returns False if asked to stop."""
        phase_step, context = self.state.done - phase.first, self.context
        if phase.is_ready(phase_step):
            return True
        context.watchdog.pause()  # computing a plan may take minutes
        while not (context.stop.requested or phase.is_ready(phase_step)):
            time.sleep(_POLL_SECONDS)
        context.watchdog.reset()
        return not context.stop.requested

    def _count_step(self, batch: Batch) -> None:
        """Counts a dispatched step; waits if too many are in the queue of the devices."""
        self.in_flight.append(copy_array(self.state.arrays["step"]))
        if len(self.in_flight) > _MOST_DISPATCHED:
            jax.block_until_ready(self.in_flight.popleft())
        self.state.done += 1
        self.context.watchdog.reset()
        self.context.clock.count(batch["input_ids"].size, self.job.training.count_flops(batch))

    def _finish_step(self, phase: PhaseBatches) -> None:
        """Does what is due after a step, in the order of the module docstring."""
        state, context, run = self.state, self.context, self.job.experiment.run
        is_last = state.done == self.job.training.total_steps
        context.mirror.require_owned()
        context.saver.poll()
        self.log.write_pending()
        phase_ends_window = phase.ends_window and state.done == phase.first + phase.steps
        ends_window = state.done % run.log_every == 0 or is_last or phase_ends_window
        if ends_window:
            self.log.end_window(state, phase.objective.losses)
        due = self._due_evaluators(state.done)
        is_save_due = state.done % run.checkpoint_every == 0 or is_last
        is_save_due |= state.done in run.keep_steps
        if due or is_save_due:
            jax.block_until_ready(state.arrays["step"])  # so that this wait counts as training
        if due:
            self._evaluate(due)
            if self._stops_early and not is_last:  # this step is the last one after all
                if not ends_window:
                    self.log.end_window(state, phase.objective.losses)
                due_at_end = self._due_evaluators(self.job.training.total_steps)
                self._evaluate([evaluator for evaluator in due_at_end if evaluator not in due])
            context.watchdog.reset()
        if is_save_due:
            with context.clock.waiting("checkpoint"):
                self._save()
            context.watchdog.reset()
            self._stop_for_slices()
        # All processes of a run notice a request after the same step; a single one at once.
        context.stop.on_step(state.done)

    def _stop_for_slices(self) -> None:
        """Requests a stop if slices wait and a restart with them pays off."""
        peers, steps_left = self.context.peers, self.job.training.total_steps - self.state.done
        self.waiting_slices = peers.slices_to_admit(self.log.lines.timings.read, steps_left)
        if self.waiting_slices:
            self.job.report(f"stopping to restart with slices that are back: {self.waiting_slices}")
            self.context.stop.requested = True

    def _roll_back(self, error: Divergence | SilentCorruption) -> None:
        """Replaces the state by that of a checkpoint from before the error.

        Raises:
          RunFailure: no checkpoint is close enough before the error; none is deleted.
          Unavailable: a device computed a wrong result again. The next start resumes from the
            checkpoint.
        """
        context, done = self.context, self.state.done
        description = start.describe_error(error, done, context.peers)
        self.log.discard_pending()
        context.watchdog.reset(times=2)
        with context.clock.waiting("restore"):
            self.state = start.roll_back(self.state, error, description, context, self.log.lines)
        self._evaluate_step_0()
        if isinstance(error, Divergence):
            bad = [error.bad[0], error.bad[-1]]
            facts = {"bad": bad, "skipped": list(self.state.excluded)}
        else:
            facts = {"replayed": done, "erred": [device.id for device in error.devices]}
        self.log.write_timing(self.state.done, "roll_back", facts)
        if isinstance(error, SilentCorruption) and error.is_repeated:
            context.mirror.flush()  # the local files of process 0 may be lost when it ends
            message = f"{description}, again; run again on another machine"
            context.peers.raise_first_error("devices", message, Unavailable)  # always raises here

    # --- evaluate -------------------------------------------------------------------------------

    @property
    def _stops_early(self) -> bool:
        return lines_lib.should_stop_early(self.state.held_out, self.job.training.patience)

    @property
    def _is_finished(self) -> bool:
        return self.state.done == self.job.training.total_steps or self._stops_early

    def _due_evaluators(self, done: int) -> list[Evaluator]:
        """Returns the evaluators to run after this many steps."""
        return [evaluator for evaluator in self.job.training.evaluators if evaluator.is_due(done)]

    def _evaluate_step_0(self) -> None:
        """Runs the evaluations that are due before the first step, if no step is done."""
        if self.state.done == 0:
            self._evaluate(self._due_evaluators(0))

    def _evaluate(self, evaluators: list[Evaluator]) -> None:
        """Evaluates and writes the lines; raises RunFailure if the held-out loss is not finite."""
        state, report, patience = self.state, self.job.report, self.job.training.patience
        for evaluator in evaluators:
            self.log.write_pending()
            self.context.hooks.on_evaluation(state.done, evaluator.name)
            with self.context.clock.waiting(evaluator.time_category):
                values = evaluator.evaluate(state.arrays["params"], state.done)
            if not math.isfinite(values.get("loss", 0.0)):
                if jax.device_get(state.arrays["bad_in_a_row"]) and not self._is_finished:
                    return  # more bad steps lead to a roll-back, a good one to later evaluations
                raise RunFailure(
                    f"the held-out loss of step {state.done} is not finite: training has diverged"
                )
            if not values:
                continue
            line = {"step": state.done, "kind": evaluator.name, **values}
            self.log.lines.append(line, evaluator.file)
            if description := evaluator.describe(line):
                report(f"step {state.done}: {description}")
            if "loss" not in values:
                continue
            state.evaluation = line
            # After bad steps the parameters, and so the loss, are the same as before: such an
            # evaluation does not count for early stopping.
            if patience and not jax.device_get(state.arrays["bad_in_a_row"]):
                state.held_out.append((state.done, values["loss"]))
                if self._stops_early and state.done < self.job.training.total_steps:
                    best_step, best_loss = min(state.held_out, key=lambda evaluated: evaluated[1])
                    report(
                        f"step {state.done}: early stopping, as the last {patience} held-out "
                        f"losses are not below {best_loss:.4f} of step {best_step} (patience)"
                    )

    # --- save -----------------------------------------------------------------------------------

    def _save(self) -> None:
        """Begins to save the state, unless its last steps are bad and the run continues."""
        state, context, saver = self.state, self.context, self.context.saver
        self.log.write_pending()
        self.job.training.require_data_unchanged()
        sums, bad = jax.device_get((state.window, state.arrays["bad_in_a_row"]))
        if bad and not self._is_finished:
            # A roll-back needs an older checkpoint, and only a few are kept.
            saver.set_unsaved_reason(
                f"no finite loss or gradient in the last {pluralize(int(bad), 'step')}"
            )
            self.job.report(f"step {state.done}: {saver.unsaved_reason}")
            return
        evaluated = state.evaluation if state.evaluation.get("step") == state.done else {}
        metadata: dict[str, Any] = {
            "window": {k: v.tolist() for k, v in sums.items()},
            "corpus_sha256": self.job.training.data_sha256,
            "init_sha256": state.init_sha256,
            "begun_at": state.start_step,
            "experiment": json.loads(config.to_json(self.job.experiment)),
            "environment": environment(),
            "notes": self.job.notes(evaluated),
        }
        if self.job.training.patience:
            metadata["held_out"] = [*state.held_out]  # a copy: saving is asynchronous
        saver.wait_and_tolerate_failure()
        with saver.tolerate_full_disk(state.done):
            # Before the checkpoint: a run that resumes from it does not write these lines again.
            self.log.lines.flush()
            context.watchdog.pause()
            context.mirror.flush()  # copies all files to the run's bucket, if it has one
            context.watchdog.reset(times=2)
            metadata["lines"] = self.log.lines.tallies()
            # The loss that ranks checkpoints (run.keep_best): of tokens alone, if there is one. The
            # loss of sentence pairs is noisy, since an evaluation has few pairs.
            token_task = losses.find_task(evaluated, losses.TOKENS)
            held_out_loss = evaluated.get(f"{token_task}_loss" if token_task else "loss")
            context.hooks.on_save(state.done, self.job.workdir.checkpoints / str(state.done))
            saver.save(state.done, state.arrays, metadata, held_out_loss)
