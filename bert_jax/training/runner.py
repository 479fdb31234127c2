"""The only loop.

A run is a function of (experiment, corpus, step): the loop finds the newest checkpoint and goes on
from its step; nothing but the state has memory. What waits for the device is done here, by name:
log, evaluate, save.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from bert_jax import base as base_lib
from bert_jax import resolve
from bert_jax.config import Experiment, InputError
from bert_jax.model import flops
from bert_jax.training import evaluate as evaluate_lib
from bert_jax.training import feed as feed_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import metrics, step, watch
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training.checkpoint import Checkpoints, environment
from bert_jax.training.clock import Clock, Counts
from bert_jax.training.feed import Feed
from bert_jax.training.peers import Peers
from bert_jax.training.prepared import Prepared
from bert_jax.training.progress import Progress
from bert_jax.training.signals import Pulse, StopRequest
from bert_jax.workdir import Workdir, write_atomic

Outcome = Literal["finished", "stopped", "failed"]

# After this many steps in a row without a finite loss and gradient a run has failed.
_HOPELESS = 50


def require_runnable(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if the batches or the state cannot be laid over these devices."""
    step.abstract_state(experiment.model, experiment.optimizer, experiment.mesh, mesh)
    replicas = experiment.optimizer.reference_replicas
    shards = mesh_lib.data_shards(mesh)
    if experiment.optimizer.clip == "per_replica" and replicas % shards:
        raise InputError(
            f"optimizer.reference_replicas={replicas}: not a multiple of the {shards} devices; "
            "a replica's gradient must be computed on one device"
        )
    for i, phase in enumerate(experiment.phases):
        where = f"phases.{i}.batch_size"
        parts = experiment.mesh.accumulation_of(i)
        mesh_lib.require_divisible(phase.batch_size, where, mesh, parts)


class Trainer:
    """One run on the devices of all its processes, from its newest checkpoint to its end.

    Every process takes every step and reads every line's numbers, so that all decide alike; the
    one that leads writes and speaks.

    Raises:
      InputError: a corpus that is not there, or another one than on process 0.
    """

    def __init__(
        self,
        experiment: Experiment,
        workdir: Workdir,
        mesh: jax.sharding.Mesh,
        progress: Progress,
        clock: Clock,
        origin: dict[str, Any] | None,
        peers: Peers,
        pulse: Pulse,
    ):
        self.experiment, self.workdir, self.mesh = experiment, workdir, mesh
        self.progress, self.clock, self.origin = progress, clock, origin
        self.peers, self.pulse = peers, pulse
        self.prepared = Prepared.open(workdir.corpus)
        peers.require_same(
            "corpus",
            {"corpus.manifest": self.prepared.sha256[:16]},
            "give all of them the corpus that one of them prepared",
        )
        lines = metrics.Lines if peers.leads else metrics.NoLines
        self.metrics = lines(workdir.metrics)
        self.predictions = lines(workdir.predictions)
        self.timings = lines(workdir.timings)
        # Which weights the first step began with; "" for fresh ones.
        self.init_sha256 = ""
        self.held_out = self.prepared.held_out(experiment, self.mesh)
        self.watched = self.prepared.watched(experiment)
        self.eval_step = step.make_eval_step(experiment.model, experiment.mesh, self.mesh)
        replicated = mesh_lib.replicated(self.mesh)
        self.empty_window = jax.jit(step.empty_window, out_shardings=replicated)
        # (step, window, bad steps in a row, counts) of a line whose numbers are on the device.
        self.pending: tuple[int, dict[str, jax.Array], jax.Array, Counts] | None = None
        self.failed = ""  # why, once it has
        self.done = 0  # steps

    def run(self, stop: StopRequest, forget: Callable[[], None]) -> Outcome:
        """Trains; returns how it ended. The state is saved unless it failed.

        Args:
          stop: a request to stop, entered.
          forget: is called if several processes end without unwinding.
        """
        total = self.experiment.total_steps
        with contextlib.ExitStack() as stack:
            keep = self.experiment.run.keep_checkpoints
            saved = stack.enter_context(Checkpoints(self.workdir.checkpoints, keep, "write"))
            stack.enter_context(self.peers.at_once(forget))
            stack.enter_context(mesh_lib.named_memory())
            state, window = self._start(saved)
            # Only now: a claim that was refused must not stand in the workdir.
            if self.peers.leads:
                write_atomic(self.workdir.experiment, resolve.to_json(self.experiment))
            if self.peers.leads and self.origin is not None:
                write_atomic(self.workdir.origin, json.dumps(self.origin, indent=2) + "\n")
            if self.done == total:
                return "finished"
            self._note("start", self._lap() | {"environment": environment()})
            self.pulse.beat()
            try:
                with self.progress.bar(self.done, total):
                    while self.done < total and not stop.requested and not self.failed:
                        state, window = self._phase(saved, state, window, stop)
                self.pulse.rest()
                with self.clock.waiting("checkpoint"):
                    if not self.failed and saved.latest_step != self.done:
                        self._save(saved, state, window)
                    stack.close()  # here, so that the last save's end is counted
            except BaseException as error:
                with contextlib.suppress(Exception):  # the disk may be full
                    self._note("end", self._lap() | {"outcome": "failed", "why": str(error)})
                raise
        outcome = "failed" if self.failed else "finished" if self.done == total else "stopped"
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

    def _start(self, saved: Checkpoints) -> tuple[step.State, dict[str, jax.Array]]:
        """The newest checkpoint, or the state before the first step; sets `done`."""
        experiment = self.experiment
        abstract = step.abstract_state(
            experiment.model, experiment.optimizer, experiment.mesh, self.mesh
        )
        shardings = jax.tree.map(lambda s: s.sharding, abstract)
        # Times of lost steps are kept; a line cut off by a kill is not.
        self.timings.forget_after(experiment.total_steps)
        done = saved.latest_step
        self.peers.require_same(
            "newest checkpoint", {"newest": str(done)}, "wait until all see the same files"
        )
        if done is None:
            self.metrics.forget_after(-1)
            self.predictions.forget_after(-1)
            make = jax.jit(
                lambda: step.init_state(experiment.model, experiment.optimizer, experiment.seed),
                out_shardings=shardings,
            )
            return self._with_init(make(), shardings), self.empty_window()
        with self.clock.waiting("restore"):
            state, metadata = saved.restore(done, abstract)
        self.prepared.require_same(metadata)
        # Checkpoints from before there was `init_from` began with fresh weights.
        self.init_sha256 = metadata.get("init_sha256", "")
        for name, value in environment().items():
            if metadata["environment"].get(name) != value:
                self.progress.say(
                    f"resume: {name} differs from the saved run's: batches exact, arithmetic to "
                    "rounding"
                )
        self.metrics.forget_after(done)
        self.predictions.forget_after(done)
        window = {k: np.array(v, np.float32) for k, v in metadata["window"].items()}
        window = feed_lib.put(window, mesh_lib.replicated(self.mesh))
        self.progress.say(f"resume: from step {done}")
        self.done = done
        return state, window

    def _with_init(self, state: step.State, shardings: step.State) -> step.State:
        """The state with the weights of `init_from`, if the claim names some."""
        base = base_lib.start_of(self.experiment)
        if base is None:
            return state
        where = self.experiment.init_from
        base_lib.require_same_tokenizer(base, self.prepared.tokenizer, where)
        self.init_sha256 = base.sha256
        self.peers.require_same(
            "init_from", {"weights": base.sha256[:16]}, f"give all of them the same {where}"
        )
        fresh = f"; freshly initialised there: {', '.join(base.fresh)}" if base.fresh else ""
        kept = "" if base.moments is None else f" and moments of step {base.moments.step}"
        self.progress.say(f"init_from: {where}, weights{kept} {base.sha256[:12]}{fresh}")
        state = state | {"params": feed_lib.put(base.params, shardings["params"])}
        if base.moments is not None:
            trees = (base.moments.mean, base.moments.square)
            placed = (feed_lib.put(tree, shardings["params"]) for tree in trees)
            state["optimizer"] = optimizer_lib.with_moments(state["optimizer"], *placed)
        return state

    def _phase(
        self,
        saved: Checkpoints,
        state: step.State,
        window: dict[str, jax.Array],
        stop: StopRequest,
    ) -> tuple[step.State, dict[str, jax.Array]]:
        """Steps of the phase that is on, until its end or a request to stop."""
        experiment, run = self.experiment, self.experiment.run
        phase, first = experiment.phase_at(self.done)
        spec = experiment.phases[phase]
        train_step = step.make_train_step(
            experiment.model,
            experiment.optimizer,
            experiment.mesh,
            experiment.mesh.accumulation_of(phase),
            experiment.total_steps,
            self.mesh,
        )
        key = step.phase_key(experiment.model, experiment.seed, phase)
        tokens = spec.batch_size * spec.sequence_length
        operations = flops.train_step_flops(
            experiment.model, spec.batch_size, spec.sequence_length, spec.max_predictions_per_seq
        )
        feed = Feed(
            self.prepared.train_batches(experiment, phase).batch,
            self.done - first,
            spec.steps,
            spec.batch_size,
            mesh_lib.batch_sharding(self.mesh),
            run.prefetch_batches,
            run.data_workers,
        )
        # The first call compiles, or finds what was compiled before.
        calling = self.clock.waiting("compilation")
        with feed:
            while self.done < first + spec.steps and not stop.requested and not self.failed:
                with self.clock.waiting("data"):
                    batch = next(feed)
                with calling:
                    state, window = train_step(state, window, batch, key)
                calling = contextlib.nullcontext()
                self.done += 1
                self.clock.count(tokens, operations)
                window = self._after_step(saved, state, window)
                self.pulse.beat()
                stop.after_step(self.done)
        self._write_pending()
        return state, window

    def _after_step(
        self, saved: Checkpoints, state: step.State, window: dict[str, jax.Array]
    ) -> dict[str, jax.Array]:
        """Logs, evaluates and saves what is due; returns the window of the next step."""
        run = self.experiment.run
        self._write_pending()
        last = self.done == self.experiment.total_steps
        if self.done % run.log_every == 0 or last:
            # A copy: the state is given away to the next step.
            bad = jnp.copy(state["bad_in_a_row"])
            self.pending = (self.done, window, bad, self.clock.take_counts())
            window = self.empty_window()
        evaluates = self.done % run.eval_every == 0 or last
        saves = self.done % run.checkpoint_every == 0 or last
        if evaluates or saves:
            # Both wait for the steps under way, which is no time of theirs.
            jax.block_until_ready(state["step"])
        if evaluates:
            with self.clock.waiting("evaluation"):
                self._evaluate(state)
        if saves:
            with self.clock.waiting("checkpoint"):
                self._save(saved, state, window)
        return window

    def _write_pending(self) -> None:
        """Writes the line of the last full window: by now the device is a step further."""
        if self.pending is None:
            return
        (done, window, bad, counts), self.pending = self.pending, None
        sums, bad_in_a_row = metrics.fetch((window, bad))
        # Here, when the device has done these steps: handing them over takes no time.
        seconds = self.clock.lap(counts)
        line = {"step": done, "kind": "train", **metrics.means(sums)}
        if "masked_lm_loss" in line:
            line["loss"] = line["masked_lm_loss"] + line["next_sentence_loss"]
        if bad_in_a_row >= _HOPELESS:
            self.failed = (
                f"no finite loss or gradient in the {bad_in_a_row} steps up to {done}, whose "
                "updates were skipped; start anew with a lower optimizer.peak_learning_rate"
            )
        self.metrics.append(line)
        if "filled" in line:
            seconds["real_tokens_per_second"] = seconds["tokens_per_second"] * line["filled"]
        self.timings.append({"step": done, "kind": "train", "time": time.time(), **seconds})
        self.progress.train(line, seconds)

    def _evaluate(self, state: step.State) -> None:
        self._write_pending()
        found = evaluate_lib.evaluate(self.held_out, state["params"], self.eval_step, self.mesh)
        if not math.isfinite(found["loss"]):
            self.failed = (
                f"the held-out loss of step {self.done} is not finite: the parameters have run "
                "away; start anew with a lower optimizer.peak_learning_rate"
            )
            return
        line = {"step": self.done, "kind": "evaluation", **found}
        self.metrics.append(line)
        params = watch.on_one_device(state["params"], self.mesh)
        if self.peers.leads:
            said = self.watched.predict(params)
            self.predictions.append({"step": self.done, "kind": "predictions", "sentences": said})
        self.progress.say(f"step {self.done}: {evaluate_lib.summary(line)}")

    def _save(self, saved: Checkpoints, state: step.State, window: dict[str, jax.Array]) -> None:
        # Lines up to this step are on disk before the checkpoint that will not write them again.
        self._write_pending()
        if self.failed:
            return
        self._flush_lines()
        metadata = {
            "window": {k: v.tolist() for k, v in metrics.fetch(window).items()},
            "corpus_sha256": self.prepared.sha256,
            "init_sha256": self.init_sha256,
            "experiment": json.loads(resolve.to_json(self.experiment)),
            "environment": environment(),
        }
        saved.save(self.done, state, metadata)
