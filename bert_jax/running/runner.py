"""The only loop.

A run is a function of (experiment, corpus, step): the loop finds the newest checkpoint and goes on
from its step; nothing but the state has memory. What waits for the device is done here, by name:
log, evaluate, save.
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
from bert_jax.checkpoints.checkpoint import Restored
from bert_jax.config import SKIPPED_STEPS
from bert_jax.errors import Unavailable
from bert_jax.model import losses
from bert_jax.running import lines as lines_lib
from bert_jax.running import start
from bert_jax.running.environment import environment
from bert_jax.running.job import Context, Evaluator, PhaseBatches, Result
from bert_jax.running.lines import RunLines
from bert_jax.running.progress import Counts, Profile
from bert_jax.running.start import Diverged, Failed
from bert_jax.training import feed as feed_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import step
from bert_jax.training.replay import Replay, SilentCorruption

# Maximum number of dispatched steps: a longer queue delays stopping and hides hangs.
_AHEAD = 4

# A copy on devices, by a call that costs a fifth of that of jnp.copy.
_copied: Callable[[jax.Array], jax.Array] = jax.jit(jnp.copy)

# Seconds between two looks at whether an epoch is planned.
_LOOK = 0.05


class Trainer:
    """One run on the devices of all its processes, from its newest checkpoint to its end.

    Every process takes every step and reads every line's numbers, so that all decide alike; the
    primary one writes and speaks.
    """

    def __init__(self, context: Context):
        self.context, self.job, self.saves = context, context.job, context.saves
        self.mesh, self.watchdog, self.clock = context.mesh, context.watchdog, context.clock
        self.experiment, self.say, self.stop = self.job.experiment, self.job.say, context.stop
        run, workdir, peers = self.experiment.run, self.job.workdir, context.peers
        self.lines = RunLines(workdir, run.when_disk_is_full, writes=peers.is_primary)
        self.replay = Replay(self.mesh)
        self.empty_window = step.make_empty_window(self.job.measured, self.mesh)
        self.profile = Profile(run.profile_steps, workdir, peers.number, self.say, self.clock)
        self.state: step.State = {}
        self.window: dict[str, jax.Array] = {}
        self.done = 0  # steps
        self.skipped: tuple[int, ...] = ()  # steps that are left out
        self.init_sha256, self.begun_at = "", 0  # the step of a fork's or a decay's first state
        self.losses = self.job.objective.losses  # what is learned in the phase that is on
        # (step, window, the state's counters, counts) of a line whose numbers are on the device.
        self.pending: tuple[int, dict[str, jax.Array], dict[str, jax.Array], Counts] | None = None
        # Numbers of steps that devices may not have done yet; a phase begins before the last ends.
        self.under_way: collections.deque[jax.Array] = collections.deque()
        self.evaluation: dict[str, Any] = {}  # the last line with a held-out loss
        self.held_out: list[tuple[int, float]] = []  # (step, held-out loss) of all, with patience
        self.stops_for = ""  # slices that wait

    # --- the order of operations ----------------------------------------------------------------

    def run(self) -> Result:
        """Trains; returns how it ended."""
        total = self.job.total_steps
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.saves)
            stack.enter_context(self.context.peers.abort_together(self.context.forget))
            stack.enter_context(mesh_lib.named_memory())
            # Times of lost steps are kept; a line cut off by a kill is not.
            if self.context.peers.is_primary:
                self.lines.timings.forget_after(total)
            with self.clock.waiting("restore"):
                begun = start.begin(self.context)
            self._go_on_from(begun)
            del begun  # whose arrays are given away step by step
            # Only now: an experiment that was refused must not stand in the workdir.
            start.write_experiment(self.context)
            if self._is_whole:
                return Result("finished", self.done)
            self.saves.require_space(self.state)
            branch = {} if self.job.branch is None else {"branch": str(self.job.branch)}
            about = {"environment": environment()} | branch
            about |= self.context.peers.slices_here(self.lines.timings.read(), self.say)
            self._note("start", self._lap() | about)
            if branch and self.done not in self.saves.steps:
                self._save()  # from here on it is a run like any other
            try:
                with self.context.progress.bar(self.done, total):
                    wrong = self._train()
                self.watchdog.pause()
                with self.clock.waiting("checkpoint"):
                    if wrong is None and self.saves.step != self.done:
                        self._save()
                    self.saves.finish(self.done, self._save if wrong is None else None)
                    stack.close()  # here, so that the last save's end is counted
                # After the save, for which one that is asked to stop may have little time.
                self.profile.end()
            except BaseException as error:
                with contextlib.suppress(Exception):  # the disk may be full
                    self.profile.end()
                    self._note("end", self._lap() | {"outcome": "failed", "why": str(error)})
                raise
        if isinstance(wrong, Diverged):
            bad = wrong.bad
            self.saves.skip(f"it has to go back over the steps {bad[0]} to {bad[-1]}")
        failed, whole = isinstance(wrong, Failed), self._is_whole and not self.saves.missing
        outcome = "failed" if failed else "finished" if whole else "stopped"
        asked = {"for_slices": self.stops_for} if self.stops_for else {}
        self._note("end", self._lap() | {"outcome": outcome} | asked)
        return Result(outcome, self.done, str(wrong) if failed else self.saves.missing)

    def _train(self) -> Failed | Diverged | None:
        """Does all phases; returns what went wrong if the state is not to be saved.

        That is a `Diverged` if a request to stop comes before the roll-back.
        """
        try:
            while not (self.stop.requested or self._is_whole):
                try:
                    phase = self.job.batches(self.done)
                    try:
                        if self._await_rows(phase):
                            self._steps(phase)
                    finally:
                        phase.close()
                except (Diverged, SilentCorruption) as error:
                    error = error.with_traceback(None)  # whose frames hold a batch, and a state
                    if isinstance(error, Diverged) and self.stop.requested:
                        return error
                    self._go_back(error)
        except Failed as error:
            return error.with_traceback(None)
        return None

    def _steps(self, phase: PhaseBatches) -> None:
        """Does steps of the phase that is on, until its end or a request to stop."""
        train_step, checked_step, program = self.job.steps_of(phase, self.mesh)
        replayed_step = self.replay.before(checked_step, program)
        self.losses = (phase.objective or self.job.objective).losses
        key = step.phase_key(self.job.objective.model, self.experiment.seed, phase.number)
        run, last = self.experiment.run, phase.first + phase.steps
        called: set[Any] = set()
        self.watchdog.reset(times=2)
        feed = feed_lib.Feed(
            phase.batch,
            self.done - phase.first,
            phase.steps,
            phase.batch_size,
            mesh_lib.batch_sharding(self.mesh),
            run.prefetch_batches,
            run.data_workers,
            self.say,
        )
        with feed:
            while self.done < last and not (self.stop.requested or self._is_in_vain):
                with self.profile.step(self.done, self.state):
                    with self.clock.waiting("data"):
                        if not self._await_rows(phase):
                            break
                        batch = next(feed)
                    check = run.check_every > 0 and self.done % run.check_every == 0
                    one_step = checked_step if check else train_step
                    if run.replay_every and self.done % run.replay_every == 0:
                        one_step = replayed_step
                    calling = contextlib.nullcontext()
                    if one_step not in called:
                        # It compiles, or finds what was compiled before.
                        called.add(one_step)
                        self.watchdog.reset(times=2)
                        calling = self.clock.waiting("compilation")
                    with calling:
                        self.state, self.window = one_step(
                            self.state, self.window, batch, key, self.job.fixed
                        )
                self.under_way.append(_copied(self.state["step"]))
                if len(self.under_way) > _AHEAD:
                    jax.block_until_ready(self.under_way.popleft())
                self.done += 1
                self.watchdog.reset()
                self.clock.count(batch["input_ids"].size, self.job.operations(batch))
                self._after_step(phase.ends_line and self.done == last)
                self.stop.requested |= bool(self.stops_for)
                self.stop.after_step(self.done)
        self._write_pending()

    def _after_step(self, ends_line: bool) -> None:
        """Does what is due, in this order; to evaluate and to save waits for the devices."""
        run, is_last = self.experiment.run, self.done == self.job.total_steps
        self.context.mirror.require_owned()
        self.saves.look()
        self._write_pending()
        if self.done % run.log_every == 0 or is_last or ends_line:
            self._close_window()
        due = self._due_evaluators(self.done)
        saves = self.done % run.checkpoint_every == 0 or is_last
        if due or saves:
            jax.block_until_ready(self.state["step"])  # which is time of the steps
        if due:
            self._evaluate_due(due)
            self.watchdog.reset()
        if saves:
            with self.clock.waiting("checkpoint"):
                self._save()
            self.watchdog.reset()
            lines, left = self.lines.timings, self.job.total_steps - self.done
            self.stops_for = self.context.peers.slices_due(lines.read, left)
            if self.stops_for:
                self.say(f"slices: {self.stops_for} can train as well; stopping to take them")

    def _go_back(self, error: Diverged | SilentCorruption) -> None:
        """Goes on from a state before bad steps, leaving these out, or before devices erred.

        Nothing of this needs to be remembered: a run that goes on from a checkpoint before the bad
        steps comes to the same bad steps, and here.

        Raises:
          Failed: no checkpoint is old enough; none is removed.
          Unavailable: devices erred again; the next start goes on from there.
        """
        peers, skipped, words = self.context.peers, self.skipped, f"{error}"
        if isinstance(error, Diverged):
            skipped, first = start.left_out(self.skipped, error.bad)
            about = {"bad": [error.bad[0], error.bad[-1]], "skipped": list(skipped)}
        else:
            first = self.done - self.experiment.run.replay_every
            about = {"replayed": self.done, "erred": [device.id for device in error.devices]}
            words = f"step {self.done}: {start.named(error, peers)}"
        self.pending = None
        self.state, self.window = {}, {}  # two states may be more than there is room for
        self.watchdog.reset(times=2)
        with self.clock.waiting("restore"):
            restored = start.roll_back(error, first, self.begun_at, self.context)
        if isinstance(error, Diverged):
            where = "" if restored.step else " to step 0, since there is no earlier checkpoint"
            self.say(
                f"{words}; going back{where}, and leaving out these and the one before "
                f"({self.job.how_to_see(first)})"
            )
            restored.state = start.with_skipped(restored.state, skipped)
        else:
            self.say(f"{words}; going back to step {restored.step}")
        self._go_on_from(restored)
        if isinstance(error, Diverged):
            self.skipped = skipped  # at step 0, too
        self._note("roll_back", self._lap() | about)
        if isinstance(error, SilentCorruption) and error.is_last:
            self.context.mirror.flush()  # what process 0 leaves behind ends with it
            peers.agree("devices", f"{words}, again; run again on another machine", Unavailable)

    # --- where to begin -------------------------------------------------------------------------

    def _go_on_from(self, begun: Restored) -> None:
        """Sets what the next steps begin with; drops lines of steps that will be done again."""
        self.done, self.state, metadata = begun.step, begun.state, begun.metadata
        window = self.empty_window()
        # A fork that learns something else drops the sums of what it does not measure.
        sums = {k: np.array(v, np.float32) for k, v in metadata["window"].items() if k in window}
        self.window = window | feed_lib.put(sums, mesh_lib.replicated(self.mesh))
        # A fresh state may not fit, and jax waits for ever for a part of one that does not.
        slots = jax.device_get(self.state["skipped_steps"]) if self.done else ()
        self.skipped = tuple(int(s) for s in slots if s >= 0)
        self.init_sha256, self.begun_at = metadata["init_sha256"], metadata.get("begun_at", 0)
        self.evaluation, self.held_out = {}, [*metadata.get("held_out", [])]
        with self.saves.cached_lists():
            self.saves.go_on_from(self.done)
        for name, gone in self.lines.go_on_from(self.done, metadata.get("lines", {})):
            self.say(f"{name}: is missing; going on without its {gone} up to step {self.done}")
        if self.done:
            self.say(f"resume: from step {self.done}")
        elif due := self._due_evaluators(0):
            self._evaluate(due)

    def _await_rows(self, phase: PhaseBatches) -> bool:
        """Waits until the next step's rows are known; whether they are, and nobody asked to stop.

        Which rows an epoch has may take minutes to plan, and is no hang.
        """
        number = self.done - phase.first
        if phase.ready(number):
            return True
        self.watchdog.pause()
        while not (self.stop.requested or phase.ready(number)):
            time.sleep(_LOOK)
        self.watchdog.reset()
        return not self.stop.requested

    # --- log ------------------------------------------------------------------------------------

    def _close_window(self) -> None:
        """Leaves the sums so far for the next `_write_pending`, and begins with none."""
        # Copies: the state is given away to the next step.
        counters = {name: _copied(self.state[name]) for name in ("step", "bad_in_a_row")}
        self.pending = (self.done, self.window, counters, self.clock.take_counts())
        self.window = self.empty_window()

    def _write_pending(self) -> None:
        """Writes the line of the last full window: by now the device is a step further."""
        if self.pending is None:
            return
        (done, window, counters, counts), self.pending = self.pending, None
        sums, counters = jax.device_get((window, counters))
        worst, number = sums.pop(step.WORST_STEP)  # the highest loss of a step, and of which
        means = lines_lib.means(sums)
        # Here, when the device has done these steps: handing them over takes no time.
        seconds = self.clock.lap(counts, means.get("filled"))
        reached, in_a_row = int(counters["step"]), int(counters["bad_in_a_row"])
        if in_a_row >= self.experiment.optimizer.bad_steps_in_a_row:
            self._diverged(range(reached - in_a_row, reached))
        line: dict[str, Any] = {"step": done, "kind": "train", **means}
        if terms := [means[name] for name in self.losses if name in means]:
            line["loss"] = sum(terms)
            line |= {"worst_step": int(number), "worst_step_loss": float(worst)}
        self.lines.append(line, "metrics")
        self.lines.time(done, "train", seconds)
        self.context.progress.train(line, seconds)
        if spike := self.lines.spikes.of_line(line):
            number, loss, usual = spike
            self.say(
                f"step {number}: its loss jumps to {loss:.3f}, usually below {usual:.3f}; "
                f"{self.job.how_to_see(number)}"
            )

    @property
    def _is_in_vain(self) -> bool:
        return lines_lib.should_stop_early(self.held_out, self.job.patience)

    @property
    def _is_whole(self) -> bool:
        return self.done == self.job.total_steps or self._is_in_vain

    def _diverged(self, bad: range) -> NoReturn:
        """Raises what is to be done after many bad steps in a row; the device waits for it."""
        skipped, _ = start.left_out(self.skipped, bad)
        if self.experiment.optimizer.after_bad_steps == "stop":
            more = "optimizer.after_bad_steps=stop"
        elif len(skipped) > SKIPPED_STEPS:
            more = f"{len(self.skipped)} steps are left out already"
        else:
            raise Diverged(bad)
        raise Failed(
            f"no finite loss or gradient in the {len(bad)} steps from {bad[0]} to {bad[-1]}, and "
            f"{more}; the checkpoints are of the time before"
        )

    def _lap(self) -> dict[str, float]:
        return self.clock.lap(self.clock.take_counts())

    def _note(self, kind: str, values: dict[str, Any]) -> None:
        self.lines.time(self.done, kind, values)
        self.lines.flush()

    # --- evaluate -------------------------------------------------------------------------------

    def _due_evaluators(self, done: int) -> list[Evaluator]:
        return [evaluator for evaluator in self.job.evaluators if evaluator.is_due(done)]

    def _evaluate_due(self, due: list[Evaluator]) -> None:
        """Evaluates what is due, and at an early stop what is asked after the last step alone."""
        self._evaluate(due)
        total = self.job.total_steps
        if self._is_in_vain and self.done < total:
            if self.done % self.experiment.run.log_every:  # no later line has these steps
                self._close_window()
            self._evaluate([e for e in self._due_evaluators(total) if e not in due])

    def _evaluate(self, evaluators: list[Evaluator]) -> None:
        """Asks each, and writes what it answers; parameters that ran away are asked no more."""
        for evaluator in evaluators:
            self._write_pending()
            with self.clock.waiting(evaluator.wait):
                values = evaluator.ask(self.state["params"], self.done)
            if not math.isfinite(values.get("loss", 0.0)):
                if jax.device_get(self.state["bad_in_a_row"]):  # the steps will show it
                    return
                raise Failed(
                    f"the held-out loss of step {self.done} is not finite: the parameters have run "
                    "away"
                )
            if not values:
                continue
            line = {"step": self.done, "kind": evaluator.name, **values}
            if "loss" in values:
                self.evaluation = line
            self.lines.append(line, evaluator.file)
            if words := evaluator.describe(line):
                self.say(f"step {self.done}: {words}")
            # A state that bad steps left standing is scored as before: a roll-back follows, no end.
            moves = self.job.patience and not jax.device_get(self.state["bad_in_a_row"])
            if "loss" in values and moves:
                self.held_out.append((self.done, values["loss"]))
                if self._is_in_vain and self.done < self.job.total_steps:
                    best, loss = min(self.held_out, key=lambda evaluated: evaluated[1])
                    self.say(
                        f"step {self.done}: ends here, since of {self.job.patience} evaluations "
                        f"none is below the held-out loss {loss:.4f} of step {best} (patience)"
                    )

    # --- save -----------------------------------------------------------------------------------

    def _save(self) -> None:
        self._write_pending()
        self.job.require_unchanged()
        sums, bad = jax.device_get((self.window, self.state["bad_in_a_row"]))
        if bad and not self._is_whole:
            # A roll-back needs one from before, and those that are kept are few.
            self.saves.skip(f"{int(bad)} steps up to it have no finite loss or gradient")
            self.say(f"step {self.done}: {self.saves.missing}")
            return
        evaluated = self.evaluation if self.evaluation.get("step") == self.done else {}
        metadata = {
            "window": {k: v.tolist() for k, v in sums.items()},
            "corpus_sha256": self.job.data_sha256,
            "init_sha256": self.init_sha256,
            "begun_at": self.begun_at,
            "experiment": json.loads(config.to_json(self.experiment)),
            "environment": environment(),
            "notes": self.job.notes(evaluated),
        }
        if self.job.patience:
            metadata["held_out"] = [*self.held_out]  # it is written while the run goes on
        self.saves.end()
        with self.saves.unless_full(self.done):
            # Before the checkpoint that will not write them again.
            self.lines.flush()
            self.watchdog.pause()
            self.context.mirror.flush()  # all of it to the run's bucket, if it has one
            self.watchdog.reset(times=2)
            metadata["lines"] = self.lines.written()
            # A loss of pairs would decide with its noise, which is that of a few documents.
            pieces = losses.learned(evaluated, losses.PIECES)
            loss = evaluated.get(f"{pieces}_loss", evaluated.get("loss"))
            self.saves.save(self.done, self.state, metadata, loss)
