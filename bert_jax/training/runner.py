"""The only loop.

A run is a function of (experiment, corpus, step): the loop finds the newest checkpoint and goes on
from its step; nothing but the state has memory. What waits for the device is done here, by name:
log, evaluate, save.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import time
from typing import Any, Literal

import jax
import numpy as np
from etils import epath

from bert_jax import resolve
from bert_jax.config import Experiment, InputError
from bert_jax.data import batches, corpus
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import evaluate as evaluate_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import metrics, step
from bert_jax.training.checkpoint import Checkpoints, environment
from bert_jax.training.feed import Feed
from bert_jax.training.progress import Progress
from bert_jax.training.signals import StopRequest
from bert_jax.workdir import Workdir

Outcome = Literal["finished", "stopped", "failed"]


@dataclasses.dataclass
class Prepared:
    """A corpus, opened."""

    manifest: dict[str, Any]
    tokenizer: Tokenizer
    ids: batches.Ids
    folder: epath.Path

    @classmethod
    def open(cls, folder: epath.Path) -> "Prepared":
        """Opens a complete corpus folder."""
        manifest = corpus.open_manifest(folder)
        tokenizer = corpus.open_tokenizer(folder, manifest)
        return cls(manifest, tokenizer, batches.Ids.of(tokenizer), folder)

    @property
    def sha256(self) -> str:
        """Of the manifest: what the corpus was made from and with."""
        text = json.dumps(self.manifest, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def train_batches(self, experiment: Experiment, phase: int) -> batches.TrainBatches:
        """The batches of a phase."""
        spec = experiment.phases[phase]
        stream = corpus.open_stream(self.folder, "train")
        rows = batches.rows_per_epoch(
            stream,
            experiment.data,
            spec.sequence_length,
            experiment.seed,
            phase,
            self.folder / "plans.json",
        )
        shape = batches.Shape(spec.sequence_length, spec.max_predictions_per_seq, spec.batch_size)
        return batches.TrainBatches(
            stream, self.ids, experiment.data, shape, experiment.seed, phase, rows
        )

    def held_out(self, experiment: Experiment, mesh: jax.sharding.Mesh) -> evaluate_lib.HeldOut:
        """The evaluation rows."""
        return evaluate_lib.HeldOut.of(
            corpus.open_stream(self.folder, "train"),
            corpus.open_stream(self.folder, "validation"),
            self.ids,
            experiment.data,
            experiment.run,
            experiment.seed,
            mesh,
        )


def abstract_state(experiment: Experiment, mesh: jax.sharding.Mesh) -> step.State:
    """Shapes, types and shardings of the state; nothing is computed."""
    shapes = jax.eval_shape(
        lambda: step.init_state(experiment.model, experiment.optimizer, experiment.seed)
    )
    sharding = mesh_lib.replicated(mesh)
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding), shapes)


def require_runnable(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if the batches cannot be laid over these devices."""
    replicas = experiment.optimizer.reference_replicas
    shards = mesh_lib.data_shards(mesh)
    if experiment.optimizer.clip == "per_replica" and replicas % shards:
        raise InputError(
            f"optimizer.reference_replicas={replicas}: not a multiple of the {shards} devices; "
            "a replica's gradient must be computed on one device"
        )
    for i, phase in enumerate(experiment.phases):
        where = f"phases.{i}.batch_size"
        mesh_lib.require_divisible(phase.batch_size, where, mesh, experiment.mesh.accumulation)


def phase_of(experiment: Experiment, done: int) -> tuple[int, int]:
    """(phase, first step of it) for the step after `done` steps."""
    first = 0
    for number, phase in enumerate(experiment.phases):
        if done < first + phase.steps:
            return number, first
        first += phase.steps
    raise ValueError(f"{done} steps are all of them")


class Trainer:
    """One run on this machine's devices, from its newest checkpoint to its end."""

    def __init__(self, experiment: Experiment, workdir: Workdir, progress: Progress):
        self.experiment, self.workdir, self.progress = experiment, workdir, progress
        self.mesh = mesh_lib.make_mesh(experiment.mesh)
        self.prepared = Prepared.open(workdir.corpus)
        self.metrics = metrics.Lines(workdir.metrics)
        self.timings = metrics.Lines(workdir.timings)
        self.held_out = self.prepared.held_out(experiment, self.mesh)
        self.eval_step = step.make_eval_step(experiment.model, experiment.mesh, self.mesh)
        replicated = mesh_lib.replicated(self.mesh)
        self.empty_window = jax.jit(step.empty_window, out_shardings=replicated)
        # (step, window, seconds) of a log line whose numbers are still on the device.
        self.pending: tuple[int, dict[str, jax.Array], dict[str, float]] | None = None
        self.failed = ""  # why, once it has
        self.done = 0  # steps

    def run(self, stop: StopRequest) -> Outcome:
        """Trains; returns how it ended. The state is saved unless it failed."""
        with Checkpoints(
            self.workdir.checkpoints, self.experiment.run.keep_checkpoints, "write"
        ) as saved:
            state, window = self._start(saved)
            total = self.experiment.total_steps
            with self.progress.bar(self.done, total):
                while self.done < total and not stop.requested and not self.failed:
                    state, window = self._phase(saved, state, window, stop)
                if not self.failed and saved.latest_step != self.done:
                    self._save(saved, state, window)
        if self.failed:
            return "failed"
        return "finished" if self.done == total else "stopped"

    def _start(self, saved: Checkpoints) -> tuple[step.State, dict[str, jax.Array]]:
        """The newest checkpoint, or the state before the first step; sets `done`."""
        abstract = abstract_state(self.experiment, self.mesh)
        shardings = jax.tree.map(lambda s: s.sharding, abstract)
        done = saved.latest_step
        if done is None:
            self.metrics.forget_after(-1)
            make = jax.jit(
                lambda: step.init_state(
                    self.experiment.model, self.experiment.optimizer, self.experiment.seed
                ),
                out_shardings=shardings,
            )
            return make(), self.empty_window()
        state, metadata = saved.restore(done, abstract)
        if metadata["corpus_sha256"] != self.prepared.sha256:
            raise InputError(
                f"{self.workdir.corpus}: not the corpus this run was trained on; put that one "
                "back, or start anew with another --workdir"
            )
        for name, value in environment().items():
            if metadata["environment"].get(name) != value:
                self.progress.say(
                    f"resume: {name} differs from the saved run's: batches exact, arithmetic to "
                    "rounding"
                )
        self.metrics.forget_after(done)
        window = {k: np.array(v, np.float32) for k, v in metadata["window"].items()}
        window = jax.device_put(window, mesh_lib.replicated(self.mesh))
        self.progress.say(f"resume: from step {done}")
        self.done = done
        return state, window

    def _phase(
        self,
        saved: Checkpoints,
        state: step.State,
        window: dict[str, jax.Array],
        stop: StopRequest,
    ) -> tuple[step.State, dict[str, jax.Array]]:
        """Steps of the phase that is on, until its end or a request to stop."""
        experiment, run = self.experiment, self.experiment.run
        phase, first = phase_of(experiment, self.done)
        spec = experiment.phases[phase]
        train_step = step.make_train_step(
            experiment.model,
            experiment.optimizer,
            experiment.mesh,
            experiment.total_steps,
            self.mesh,
        )
        key = step.phase_key(experiment.model, experiment.seed, phase)
        clock = _Clock(spec.batch_size * spec.sequence_length)
        feed = Feed(
            self.prepared.train_batches(experiment, phase).batch,
            self.done - first,
            spec.steps,
            spec.batch_size,
            mesh_lib.batch_sharding(self.mesh),
            run.prefetch_batches,
            run.data_workers,
        )
        with feed:
            while self.done < first + spec.steps and not stop.requested and not self.failed:
                with clock.waiting("data"):
                    batch = next(feed)
                state, window = train_step(state, window, batch, key)
                self.done += 1
                clock.steps += 1
                self._write_pending()
                last = self.done == experiment.total_steps
                if self.done % run.log_every == 0 or last:
                    self.pending = (self.done, window, clock.lap())
                    window = self.empty_window()
                evaluates = self.done % run.eval_every == 0 or last
                saves = self.done % run.checkpoint_every == 0 or last
                if evaluates or saves:
                    # Both wait for the steps under way, which is no time of theirs.
                    jax.block_until_ready(state["step"])
                if evaluates:
                    with clock.waiting("evaluation"):
                        self._evaluate(state)
                if saves:
                    with clock.waiting("checkpoint"):
                        self._save(saved, state, window)
        self._write_pending()
        return state, window

    def _write_pending(self) -> None:
        """Writes the line of the last full window: by now the device is a step further."""
        if self.pending is None:
            return
        (done, window, seconds), self.pending = self.pending, None
        sums = metrics.fetch(window)
        line = {"step": done, "kind": "train", **metrics.means(sums)}
        if "masked_lm_loss" not in line:
            self.failed = (
                f"no finite loss in the steps up to {done}: the update was skipped at each; lower "
                "optimizer.peak_learning_rate, or look at `bert-jax show --step`"
            )
        else:
            line["loss"] = line["masked_lm_loss"] + line["next_sentence_loss"]
        self.metrics.append(line)
        if "filled" in line:
            seconds["real_tokens_per_second"] = seconds["tokens_per_second"] * line["filled"]
        self.timings.append({"step": done, "time": time.time(), **seconds})
        self.progress.train(line, seconds)

    def _evaluate(self, state: step.State) -> None:
        self._write_pending()
        found = evaluate_lib.evaluate(self.held_out, state["params"], self.eval_step, self.mesh)
        if not math.isfinite(found["loss"]):
            self.failed = (
                f"the held-out loss of step {self.done} is not finite: the parameters have run "
                "away; lower optimizer.peak_learning_rate"
            )
            return
        line = {"step": self.done, "kind": "evaluation", **found}
        self.metrics.append(line)
        self.progress.say(f"step {self.done}: {evaluate_lib.summary(line)}")

    def _save(self, saved: Checkpoints, state: step.State, window: dict[str, jax.Array]) -> None:
        # Lines up to this step are on disk before the checkpoint that will not write them again.
        self._write_pending()
        if self.failed:
            return
        metadata = {
            "window": {k: v.tolist() for k, v in metrics.fetch(window).items()},
            "corpus_sha256": self.prepared.sha256,
            "experiment": json.loads(resolve.to_json(self.experiment)),
            "environment": environment(),
        }
        saved.save(self.done, state, metadata)


class _Clock:
    """Where the time between two log lines went."""

    def __init__(self, tokens_per_step: int):
        self._tokens = tokens_per_step
        self._reset()

    def _reset(self) -> None:
        self.steps = 0
        self._start = time.monotonic()
        self._waits: dict[str, float] = {}

    @contextlib.contextmanager
    def waiting(self, what: str):
        """Counts the time spent inside."""
        start = time.monotonic()
        yield
        self._waits[what] = self._waits.get(what, 0.0) + time.monotonic() - start

    def lap(self) -> dict[str, float]:
        """Seconds and rates since the last lap."""
        seconds = time.monotonic() - self._start
        busy = seconds - self._waits.get("evaluation", 0.0) - self._waits.get("checkpoint", 0.0)
        found = {
            "seconds": seconds,
            "steps_per_second": self.steps / max(busy, 1e-9),
            "tokens_per_second": self._tokens * self.steps / max(busy, 1e-9),
            **{f"{what}_seconds": value for what, value in sorted(self._waits.items())},
        }
        self._reset()
        return found
