"""Pre-training as a job of the training loop."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from bert_jax import config, system
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.base import TextVectors
from bert_jax.checkpoints.fork import ForkPoint
from bert_jax.config import Experiment
from bert_jax.data import corpus
from bert_jax.data.dataset import SPLITS
from bert_jax.distributed import slices
from bert_jax.distributed.peers import Peers
from bert_jax.errors import InputError, pluralize
from bert_jax.pretraining import evaluators
from bert_jax.pretraining.prepared_corpus import PreparedCorpus
from bert_jax.running.job import Job, PhaseBatches, Training
from bert_jax.storage.workdir import Workdir
from bert_jax.training import custom_code, feed
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import step as step_lib
from bert_jax.training.objective import Objective


class PretrainingJob(Job):
    """The pre-training of an experiment on its corpus.

    `probes`, a `tasks.probes.Probes` or None, are evaluated during the run. For `finished_hint`,
    `may_extend` and `fork_point` see `Job`.
    """

    finished_hint = "choose another --workdir, or run `bert-jax extend` for more steps"
    experiment: Experiment

    def __init__(
        self,
        experiment: Experiment,
        workdir: Workdir,
        report: Callable[[str], None],
        may_extend: bool = False,
        probes: Any = None,
        fork_point: ForkPoint | None = None,
    ):
        super().__init__(experiment, workdir, report)
        self.may_extend, self.probes, self.fork_point = may_extend, probes, fork_point
        # How the base makes text vectors; set by `initial_state` or `accept_checkpoint`.
        self._vector_settings: TextVectors | None = None

    def fit_to_slices(
        self, active: int, slice_count: int, processes_per_slice: int
    ) -> Experiment | None:
        devices = processes_per_slice * system.local_device_count()
        # At least 1: make_mesh rejects a tensor axis that is longer than a slice.
        shards_per_slice = max(devices // self.experiment.parallelism.tensor, 1)
        return slices.adapt_experiment(self.experiment, active, slice_count, shards_per_slice)

    def check_inputs(self, mesh: jax.sharding.Mesh) -> None:
        require_runnable(self.experiment, mesh)  # the corpus may not exist yet

    def require_initial_weights(self) -> None:
        if self.fork_point is None:
            base_lib.load_initial(self.experiment)  # raises InputError if they are missing
        else:
            self.fork_point.require_compatible(self.experiment)

    def differences(self, saved: Experiment, metadata: dict[str, Any]) -> list[str]:
        experiment = self.experiment
        changed = config.differences(saved, experiment, "identity")
        if self.may_extend:
            last_steps = f"phases.{len(saved.phases) - 1}.steps:"
            if experiment.total_steps < saved.total_steps:
                raise InputError(
                    f"extend: {experiment.total_steps} steps are fewer than the "
                    f"{saved.total_steps} that the run has already"
                )
            if any(line.startswith(last_steps) for line in changed):
                self.report("extend: the learning rate schedules change, since they end later")
            changed = [line for line in changed if not line.startswith(last_steps)]
        # Sources at other paths are no change if their files are the same.
        moved = [line for line in changed if line.startswith("corpus.sources:")]
        if moved and corpus.is_made_of(self.workdir.corpus, experiment.corpus):
            changed = [line for line in changed if line not in moved]
        if experiment.init_from and not changed:
            self._require_same_base(metadata["init_sha256"])
        return changed

    def _require_same_base(self, sha256: str) -> None:
        """Raises InputError if the base has other weights than those with this hash."""
        base = epath.Path(self.experiment.init_from)
        if not base_lib.is_base(base):
            self.report(f"resume: {base} is gone, so its weights are not compared")
        elif base_lib.hash_weights(base) != sha256:
            raise InputError(
                f"init_from={base}: its weights are not those that this run began with; "
                "restore them, or choose another --workdir"
            )

    def prepare(self, peers: Peers) -> None:
        experiment, location = self.experiment, self.workdir.corpus

        def make() -> None:
            corpus.prepare(experiment.corpus, experiment.model.vocab_size, location, self.report)
            if self.fork_point is not None:
                self.fork_point.copy_metrics(self.workdir)  # compares the vocabularies, too
            # The first `open_stream` of a split builds files, which one process must do alone.
            for split in SPLITS if peers.count > 1 else ():
                corpus.open_stream(corpus.ensure_local(location), split)

        peers.run_on_primary("prepare corpus", make)
        corpus.ensure_local(location, self.report)  # downloads a corpus from a bucket to this host

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        experiment = self.experiment
        self._peers, self._corpus = peers, PreparedCorpus.open(self.workdir.corpus)
        corpus.require_enough_text(self._corpus.folder, experiment)
        hashes = {"corpus.manifest": self._corpus.sha256[:16]}
        if self.probes is not None:
            hashes["run.probes"] = self.probes.sha256[:16]
        remedy = "give all processes the corpus that one of them prepared, and the same run.probes"
        peers.require_same("data", hashes, remedy)
        objective = objective_lib.pretraining_objective(experiment.model, experiment.data)
        run_evaluators = evaluators.held_out_evaluators(experiment, self._corpus, mesh)
        if self.probes is not None:
            tokenizer, metrics = self._corpus.tokenizer, self.workdir.metrics
            probe_evaluator = evaluators.probe_evaluator(
                self.probes, experiment, tokenizer, mesh, lambda: self._vector_settings, metrics
            )
            run_evaluators = *run_evaluators, probe_evaluator
            self.report(f"probes: {self.probes.description}")
        self.training = Training(
            objective=objective,  # of data.objective, which phases may replace: `_phase_batches`
            optimizer=experiment.optimizer,
            total_steps=experiment.total_steps,
            metric_names=objective_lib.metric_names(experiment),
            phase_batches_at=self._phase_batches,
            evaluators=run_evaluators,
            data_sha256=self._corpus.sha256,
            require_data_unchanged=self._corpus.require_unchanged,
        )
        for line in self._corpus.describe_shares(experiment):
            self.report(line)
        self.report(_summary(experiment, objective, mesh))

    def initial_state(self, new_state: step_lib.State) -> tuple[step_lib.State, str]:
        base = base_lib.load_initial(self.experiment)
        if base is None:
            return new_state, ""
        path = self.experiment.init_from
        base_lib.require_same_tokenizer(base, self._corpus.tokenizer, path)
        remedy = f"give all processes the same {path}"
        self._peers.require_same("init_from", {"weights": base.sha256[:16]}, remedy)
        untrained = f"; untrained: {', '.join(base.fresh)}" if base.fresh else ""
        moments = "" if base.moments is None else f" and moments of step {base.moments.step}"
        self.report(f"init_from: {path}, all weights{moments}, hash {base.sha256[:12]}{untrained}")
        if base.vectors is not None:
            self._vector_settings = base.vectors
            self.report(
                f"init_from: {path} is a model of text vectors, which pre-training may make worse; "
                "to measure this, add a task of task.kind=similar to run.probes"
            )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, new_state["params"])
        state = new_state | {"params": feed.put(base.params, shardings)}
        if base.moments is not None:
            trees = (feed.put(tree, shardings) for tree in (base.moments.mean, base.moments.square))
            state["optimizer"] = optimizer_lib.with_moments(state["optimizer"], *trees)
        return state, base.sha256

    def accept_checkpoint(self, metadata: dict[str, Any]) -> None:
        self._corpus.require_same(metadata)
        self._vector_settings = base_lib.read_vectors(metadata.get("notes", {}))

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        settings = self._vector_settings
        return {"vectors": dataclasses.asdict(settings)} if settings else {}

    def _phase_batches(self, done: int) -> PhaseBatches:
        """Returns the batches of the phase of the next step, after `done` steps."""
        experiment = self.experiment
        phase_index, first_step = experiment.phase_at(done)
        phase = experiment.phases[phase_index]
        train = self._corpus.train_batches(experiment, phase_index, self._peers.is_primary)
        objectives = [experiment.data_of(n).objective for n in range(len(experiment.phases))]
        return PhaseBatches(
            number=phase_index,
            first=first_step,
            steps=phase.steps,
            batch_size=phase.batch_size,
            objective=objective_lib.make_objective(experiment, phase_index),
            make_batch=train.batch,
            is_ready=train.is_ready,
            stop_planning=train.close,
            # A line of training metrics averages steps of one objective only.
            ends_window=len({*objectives[phase_index : phase_index + 2]}) > 1,
        )


def require_runnable(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if the batches or the state cannot be sharded over these devices."""
    custom_code.require_valid(experiment, mesh)
    objective = objective_lib.pretraining_objective(experiment.model, experiment.data)
    # Raises InputError if the state cannot be sharded over the mesh.
    step_lib.abstract_state(objective, experiment.optimizer, experiment.parallelism, mesh)
    replicas = experiment.optimizer.reference_replicas  # groups of rows that clip a gradient each
    shards = mesh_lib.batch_shards(mesh)  # devices, or tensor-parallel groups of them
    if experiment.optimizer.clip == "per_replica" and replicas % shards:
        raise InputError(
            f"optimizer.reference_replicas={replicas}: not a multiple of the {shards} devices; "
            "a replica's gradient must be computed on one device"
        )
    for i, phase in enumerate(experiment.phases):
        micro_batches = experiment.parallelism.accumulation_of(i)
        mesh_lib.require_divisible(phase.batch_size, f"phases.{i}.batch_size", mesh, micro_batches)


def _summary(experiment: Experiment, objective: Objective, mesh: jax.sharding.Mesh) -> str:
    """Returns the line that is logged before the first step: the model, the devices, the phases."""
    args = experiment.optimizer, experiment.parallelism, mesh
    shapes = step_lib.abstract_state(objective, *args)["params"]
    count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    phases = ", then ".join(
        f"{pluralize(phase.steps, 'step')} of {phase.batch_size} x {phase.sequence_length} tokens"
        f"{phase.objective and f' ({phase.objective})'}"
        for phase in experiment.phases
    )
    devices = pluralize(mesh.size, f"{mesh.devices.flat[0].device_kind} device")
    return (
        f"{experiment.name}: {count / 1e6:.1f}M parameters, {experiment.model.compute_dtype}, on "
        f"{devices}; {phases}; the first step is compiled before it runs"
    )
