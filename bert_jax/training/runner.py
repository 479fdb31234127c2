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
from typing import Any, Literal

import jax
import jax.numpy as jnp

from bert_jax import config
from bert_jax.errors import Unavailable
from bert_jax.storage import retry
from bert_jax.storage.mirror import Mirror
from bert_jax.storage.workdir import DiskFull, Workdir, sealed, write_atomic
from bert_jax.training import divergence, step
from bert_jax.training import lines as lines_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training.beginning import Beginning, Beginnings
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.environment import environment
from bert_jax.training.feed import Feed
from bert_jax.training.job import Job, Stretch
from bert_jax.training.peers import Peers
from bert_jax.training.profile import Profile
from bert_jax.training.progress import Clock, Counts, Progress
from bert_jax.training.watchdog import StopRequest, Watchdog

Outcome = Literal["finished", "stopped", "failed"]

# Steps that wait for the devices. jax lets dozens wait, and a request to stop, or a beat, for them.
_AHEAD = 4

# Seconds between two looks at whether an epoch is planned.
_LOOK = 0.05


class Trainer:
    """One run on the devices of all its processes, from its newest checkpoint to its end.

    Every process takes every step and reads every line's numbers, so that all decide alike; the
    one that leads writes and speaks.
    """

    def __init__(
        self,
        job: Job,
        workdir: Workdir,
        mesh: jax.sharding.Mesh,
        progress: Progress,
        clock: Clock,
        origin: dict[str, Any] | None,
        peers: Peers,
        watchdog: Watchdog,
        mirror: Mirror,
    ):
        self.job, self.claim, self.workdir, self.mesh = job, job.claim, workdir, mesh
        self.progress, self.clock, self.origin = progress, clock, origin
        self.peers, self.watchdog, self.mirror = peers, watchdog, mirror
        lines = lines_lib.Lines if peers.is_primary else lines_lib.NoLines
        full = self.claim.run.when_disk_is_full
        self.metrics = lines(workdir.metrics, full)
        self.predictions = lines(workdir.predictions, full)
        self.timings = lines(workdir.timings, full)
        # Whose lines up to a checkpoint never change again.
        self._lasting = {"metrics.jsonl": self.metrics, "predictions.jsonl": self.predictions}
        self.empty_window = jax.jit(
            lambda: step.empty_window(job.objective), out_shardings=mesh_lib.replicated(mesh)
        )
        self.beginnings = Beginnings(job, mesh, peers, progress)
        steps = self.claim.run.profile_steps
        self.profile = Profile(
            steps, workdir.profile, peers.number, progress, clock, workdir.named / "profile"
        )
        self.began = Beginning(0, {}, {}, (), "", {})  # from where the steps since were done
        # (step, window, the state's counters, counts) of a line whose numbers are on the device.
        self.pending: tuple[int, dict[str, jax.Array], dict[str, jax.Array], Counts] | None = None
        # Numbers of steps that devices may not have done yet; a phase begins before the last ends.
        self.under_way: collections.deque[jax.Array] = collections.deque()
        self.spikes = divergence.Spikes()
        self.evaluation: dict[str, Any] = {}  # the last line of its kind
        self.bad_steps: range | None = None  # that the run is to roll back over
        self.failed = ""  # why, once it has
        self.done = 0  # steps
        self.saved_step = 0  # of the newest checkpoint, perhaps still on its way
        self.kept = "saved"  # what of the last steps is on disk, in words

    def run(self, stop: StopRequest, forget: Callable[[], None]) -> Outcome:
        """Trains; returns how it ended. The state is saved unless it failed.

        Args:
          stop: a request to stop, entered.
          forget: is called if several processes end without unwinding.
        """
        total = self.job.total_steps
        with contextlib.ExitStack() as stack:
            folder, run, say = self.workdir.checkpoints, self.claim.run, self.progress.say
            saved = Checkpoints(folder, run, "write", say)
            stack.enter_context(saved)
            stack.enter_context(self.peers.abort_together(forget))
            stack.enter_context(mesh_lib.named_memory())
            # Times of lost steps are kept; a line cut off by a kill is not.
            self.timings.forget_after(total)
            state, window = self._begin(saved)
            # Only now: a claim that was refused must not stand in the workdir.
            if self.peers.is_primary:
                write_atomic(self.workdir.experiment, config.to_json(self.claim))
            if self.peers.is_primary and self.origin is not None:
                write_atomic(self.workdir.origin, json.dumps(sealed(self.origin), indent=2) + "\n")
            if self.done == total:
                return "finished"
            self._note("start", self._lap() | {"environment": environment()})
            try:
                with self.progress.bar(self.done, total):
                    while not stop.requested and not self.failed:
                        if self.bad_steps is not None:
                            state, window = {}, {}  # two states may be more than there is room for
                            state, window = self._roll_back(saved, self.bad_steps)
                        elif self.done < total:
                            state, window = self._phase(saved, state, window, stop)
                        else:
                            break
                self.watchdog.pause()
                with self.clock.waiting("checkpoint"):
                    if not self.failed and self.saved_step != self.done:
                        self._save(saved, state, window)
                    self._finish_saving(saved, state, window)
                    stack.close()  # here, so that the last save's end is counted
                # After the save, for which one that is asked to stop may have little time.
                self.profile.end()
            except BaseException as error:
                with contextlib.suppress(Exception):  # the disk may be full
                    self.profile.end()
                    self._note("end", self._lap() | {"outcome": "failed", "why": str(error)})
                raise
        whole = self.done == total and self.kept == "saved"
        outcome = "failed" if self.failed else "finished" if whole else "stopped"
        self._note("end", self._lap() | {"outcome": outcome})
        return outcome

    def _lap(self) -> dict[str, float]:
        return self.clock.lap(self.clock.take_counts())

    def _note(self, kind: str, values: dict[str, object]) -> None:
        self.timings.append({"step": self.done, "kind": kind, "time": time.time(), **values})
        self._flush_lines()

    def _flush_lines(self) -> None:
        for lines in (self.metrics, self.predictions, self.timings):
            lines.flush()

    def _begin(self, saved: Checkpoints) -> tuple[step.State, dict[str, jax.Array]]:
        """The state and the window to go on with; sets `done`."""
        with self.clock.waiting("restore"):
            self._go_on_from(self.beginnings.find(saved))
        return self.began.state, self.began.window

    def _go_on_from(self, found: Beginning) -> None:
        """Sets what the next steps begin with; drops lines of steps that will be done again."""
        self.began = found
        self.done = self.saved_step = self.began.done
        self.evaluation = {}
        before = self.done or -1
        for name, lines in self._lasting.items():
            lines.forget_after(before, self.began.lines.get(name))
        self.spikes = divergence.Spikes.of(self.metrics.read())
        if self.done:
            self.progress.say(f"resume: from step {self.done}")
        else:
            self._probe(self.began.state)

    def _roll_back(self, saved: Checkpoints, bad: range) -> tuple[step.State, dict[str, jax.Array]]:
        """The state before the bad steps, which will be left out; the newer checkpoints go.

        Nothing of this needs to be remembered: whoever goes on from a checkpoint before the bad
        steps comes to the same bad steps, and here. If no checkpoint is old enough, sets `failed`
        and removes nothing.
        """
        skipped, first = divergence.left_out(self.began.skipped, bad)
        self.pending, self.bad_steps = None, None
        self.watchdog.reset(times=2)
        what = f"steps {bad[0]} to {bad[-1]} have no finite loss or gradient"
        with self.clock.waiting("restore"):
            found = self.beginnings.find_before(saved, first)
        if found is None:
            self.failed = (
                f"{what}, and no checkpoint from shortly before step {first + 1} is kept to go "
                "back to; those that are there stay; start anew with a larger run.keep_checkpoints "
                "or a lower optimizer.peak_learning_rate"
            )
            return {}, {}
        where = "" if found.done else " to step 0, since there is no earlier checkpoint"
        self.progress.say(
            f"{what}; going back{where}, and leaving out these and the one before "
            f"({self.job.how_to_see(first)})"
        )
        self._go_on_from(found)
        self.began.skipped = skipped
        self._note("roll_back", self._lap() | {"bad": [bad[0], bad[-1]], "skipped": list(skipped)})
        return self.beginnings.leave_out(found.state, skipped), found.window

    def _phase(
        self,
        saved: Checkpoints,
        state: step.State,
        window: dict[str, jax.Array],
        stop: StopRequest,
    ) -> tuple[step.State, dict[str, jax.Array]]:
        """Steps of the phase that is on, until its end or a request to stop."""
        stretch = self.job.stretch(self.done)
        with contextlib.closing(stretch):
            if self._await_rows(stretch, stop):
                return self._steps(stretch, saved, state, window, stop)
        return state, window

    def _await_rows(self, stretch: Stretch, stop: StopRequest) -> bool:
        """Waits until the next step's rows are known; whether they are, and nobody asked to stop.

        Which rows an epoch has may take minutes to plan, and is no hang.
        """
        number = self.done - stretch.first
        if stretch.ready(number):
            return True
        self.watchdog.pause()
        while not (stop.requested or stretch.ready(number)):
            time.sleep(_LOOK)
        self.watchdog.reset(times=2)
        return not stop.requested

    def _steps(
        self,
        stretch: Stretch,
        saved: Checkpoints,
        state: step.State,
        window: dict[str, jax.Array],
        stop: StopRequest,
    ) -> tuple[step.State, dict[str, jax.Array]]:
        """See `_phase`."""
        claim, run = self.claim, self.claim.run
        parts = claim.parallelism.accumulation_of(stretch.number)
        of = (
            self.job.objective,
            self.job.optimizer,
            claim.parallelism,
            parts,
            self.job.total_steps,
        )
        train_step = checked_step = step.make_train_step(*of, self.mesh)
        if run.check_every:
            options = step.self_checks(self.mesh.devices.flat[0].device_kind)
            checked_step = step.make_train_step(*of, self.mesh, options)
        key = step.phase_key(self.job.objective.model, claim.seed, stretch.number)
        feed = Feed(
            stretch.batch,
            self.done - stretch.first,
            stretch.steps,
            stretch.batch_size,
            mesh_lib.batch_sharding(self.mesh),
            run.prefetch_batches,
            run.data_workers,
            self.progress.say,
        )
        last = stretch.first + stretch.steps
        called: set[Any] = set()
        self.watchdog.reset(times=2)
        with feed:
            while self.done < last and not (stop.requested or self._went_wrong):
                with self.profile.step(self.done, state):
                    with self.clock.waiting("data"):
                        if not self._await_rows(stretch, stop):
                            break
                        batch = next(feed)
                    check = run.check_every > 0 and self.done % run.check_every == 0
                    one_step = checked_step if check else train_step
                    calling = contextlib.nullcontext()
                    if one_step not in called:
                        # It compiles, or finds what was compiled before.
                        called.add(one_step)
                        self.watchdog.reset(times=2)
                        calling = self.clock.waiting("compilation")
                    with calling:
                        state, window = one_step(state, window, batch, key, self.job.fixed)
                self.under_way.append(jnp.copy(state["step"]))
                if len(self.under_way) > _AHEAD:
                    jax.block_until_ready(self.under_way.popleft())
                self.done += 1
                self.watchdog.reset()
                self.clock.count(batch["input_ids"].size, self.job.operations(batch))
                window = self._after_step(saved, state, window)
                stop.after_step(self.done)
        self._write_pending()
        return state, window

    def _after_step(
        self, saved: Checkpoints, state: step.State, window: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Logs, evaluates and saves what is due; returns the window of the next step."""
        run = self.claim.run
        self.mirror.check()
        self._write_pending()
        last = self.done == self.job.total_steps
        if self.done % run.log_every == 0 or last:
            # Copies: the state is given away to the next step.
            counters = {name: jnp.copy(state[name]) for name in ("step", "bad_in_a_row")}
            self.pending = (self.done, window, counters, self.clock.take_counts())
            window = self.empty_window()
        evaluates = self.done % run.eval_every == 0 or last
        saves = self.done % run.checkpoint_every == 0 or last
        if evaluates or saves:
            # Both wait for the steps under way, which is no time of theirs.
            jax.block_until_ready(state["step"])
        if evaluates:
            with self.clock.waiting("evaluation"):
                self._evaluate(state)
            self._probe(state)
            self.watchdog.reset()
        if saves:
            with self.clock.waiting("checkpoint"):
                self._save(saved, state, window)
        return window

    def _write_pending(self) -> None:
        """Writes the line of the last full window: by now the device is a step further."""
        if self.pending is None:
            return
        (done, window, counters, counts), self.pending = self.pending, None
        sums, counters = lines_lib.fetch((window, counters))
        # Here, when the device has done these steps: handing them over takes no time.
        seconds = self.clock.lap(counts)
        most = self.claim.optimizer.bad_steps_in_a_row
        bad = divergence.bad_steps(int(counters["step"]), int(counters["bad_in_a_row"]), most)
        if bad is not None:
            self._diverged(bad)
            return
        worst_loss, worst_step = map(float, sums.pop(step.WORST_STEP))
        line = {"step": done, "kind": "train", **lines_lib.means(sums)}
        losses = [line[name] for name in self.job.objective.losses if name in line]
        if losses:
            line["loss"] = sum(losses)
            line |= {"worst_step": int(worst_step), "worst_step_loss": worst_loss}
        self.metrics.append(line)
        if "filled" in line:
            seconds["real_tokens_per_second"] = seconds["tokens_per_second"] * line["filled"]
        self.timings.append({"step": done, "kind": "train", "time": time.time(), **seconds})
        self.progress.train(line, seconds)
        if spike := self.spikes.of_line(line):
            number, loss, usual = spike
            self.progress.say(
                f"step {number}: its loss jumps to {loss:.3f}, usually below {usual:.3f}; "
                f"{self.job.how_to_see(number)}"
            )

    @property
    def _went_wrong(self) -> bool:
        return bool(self.failed) or self.bad_steps is not None

    def _diverged(self, bad: range) -> None:
        """Many steps in a row were bad, and the device waits for what is to be done."""
        what = f"no finite loss or gradient in the {len(bad)} steps from {bad[0]} to {bad[-1]}"
        skipped, _ = divergence.left_out(self.began.skipped, bad)
        if self.claim.optimizer.after_bad_steps == "stop":
            self.failed = f"{what}, and optimizer.after_bad_steps=stop"
        elif divergence.too_many(skipped):
            self.failed = f"{what}, and {len(self.began.skipped)} steps are left out already"
        else:
            self.bad_steps = bad
            return
        self.failed += (
            "; the checkpoints are of the time before; start anew with a lower "
            "optimizer.peak_learning_rate"
        )

    def _evaluate(self, state: step.State) -> None:
        self._write_pending()
        found = self.job.evaluate(state["params"])
        if not math.isfinite(found["loss"]):
            if lines_lib.fetch(state["bad_in_a_row"]):
                return  # the steps will tell
            self.failed = (
                f"the held-out loss of step {self.done} is not finite: the parameters have run "
                "away; start anew with a lower optimizer.peak_learning_rate"
            )
            return
        self.evaluation = {"step": self.done, "kind": "evaluation", **found}
        self.metrics.append(self.evaluation)
        said = self.job.watched(state["params"])
        if said:
            self.predictions.append({"step": self.done, "kind": "predictions", "sentences": said})
        self.progress.say(f"step {self.done}: {self.job.summary(self.evaluation)}")

    def _probe(self, state: step.State) -> None:
        if self._went_wrong or self.done != self.evaluation.get("step", 0):
            return  # parameters that could not be evaluated
        with self.clock.waiting("probes"):
            found = self.job.probed(self.done, state["params"])
        if found:
            self.metrics.append({"step": self.done, "kind": "probes", **found})
            told = (f"{name} {score:.4f}" for name, score in found["scores"].items())
            self.progress.say(f"step {self.done}: probes: {', '.join(told)}")

    def _save(self, saved: Checkpoints, state: step.State, window: dict[str, jax.Array]) -> None:
        self._write_pending()
        if self.bad_steps is not None:
            self.kept = (
                f"not saved, since it has to go back over the steps {self.bad_steps[0]} to "
                f"{self.bad_steps[-1]}; the newest checkpoint is of step {self.saved_step}"
            )
        if self._went_wrong:
            return
        self.job.require_unchanged()
        sums, bad_in_a_row = lines_lib.fetch((window, state["bad_in_a_row"]))
        if bad_in_a_row and self.done < self.job.total_steps:
            # Whoever rolls back needs one from before, and those that are kept are few.
            self.kept = (
                f"not saved, since {bad_in_a_row} steps up to it have no finite loss or gradient; "
                f"the newest checkpoint is of step {self.saved_step}"
            )
            self.progress.say(f"step {self.done}: {self.kept}")
            return
        evaluated = self.evaluation if self.evaluation.get("step") == self.done else {}
        metadata = {
            "window": {k: v.tolist() for k, v in sums.items()},
            "corpus_sha256": self.job.sha256,
            "init_sha256": self.began.init_sha256,
            "experiment": json.loads(config.to_json(self.claim)),
            "environment": environment(),
            "notes": self.job.notes(evaluated),
        }
        try:
            saved.finish()
        except DiskFull as error:  # the one before; what it took is free again
            self._not_saved(error)
        except Unavailable as error:
            self._lost(error)  # this one takes its place
        try:
            # Before the checkpoint that will not write them again.
            self._flush_lines()
            self._send()
            metadata["lines"] = {n: lines.written() for n, lines in self._lasting.items()}
            self._outlast(lambda: saved.save(self.done, state, metadata, evaluated.get("loss")))
            self.saved_step, self.kept = self.done, "saved"
        except DiskFull as error:
            self._not_saved(error)

    def _finish_saving(
        self, saved: Checkpoints, state: step.State, window: dict[str, jax.Array]
    ) -> None:
        """Waits for the last save; one that was lost to a passing fault is made again."""
        try:
            saved.finish()
        except Unavailable as error:
            self._lost(error)
            if self.failed:
                raise

            def save() -> None:
                if self.done not in saved.steps:  # what failed may be the removal of an old one
                    self._save(saved, state, window)
                    saved.finish()

            self._outlast(save)

    def _lost(self, error: Unavailable) -> None:
        """One process goes on without a checkpoint that could not be written for now."""
        if self.peers.count > 1:  # the others wait for it, inside Orbax
            raise error
        self.progress.say(f"step {self.done}: {error}")

    def _outlast(self, work: Callable[[], None]) -> None:
        """Does the work, again after each passing fault; once in several processes, see `_lost`."""
        if self.peers.count > 1:
            work()
        else:
            retry.again(work, f"{self.workdir.checkpoints}", say=self.progress.say)

    def _send(self) -> None:
        """Waits until all that is written is in the run's bucket, if it has one."""
        self.watchdog.pause()
        self.mirror.flush()
        self.watchdog.reset(times=2)

    def _not_saved(self, error: DiskFull) -> None:
        if self.claim.run.when_disk_is_full == "stop" or self.peers.count > 1:
            raise error
        self.kept = f"without a new checkpoint: {error}"
        self.progress.say(f"step {self.done}: {self.kept}")
