"""Pre-training as a job of the training loop: an opened corpus, and an experiment on it."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from etils import epath

from bert_jax import config, system
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.fork import ForkPoint
from bert_jax.checkpoints.layout import hash_json
from bert_jax.config import Experiment, Model
from bert_jax.data import batches, corpus, mixture
from bert_jax.data.dataset import SPLITS
from bert_jax.data.plans import Plans
from bert_jax.data.stream import Stream
from bert_jax.distributed import slices
from bert_jax.distributed.peers import Peers
from bert_jax.errors import InputError, pluralize
from bert_jax.model import flops
from bert_jax.pretraining import evaluators
from bert_jax.running import session
from bert_jax.running.job import Evaluator, Job, PhaseBatches, repeat_every
from bert_jax.running.progress import Progress
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import Workdir
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import feed, own
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import objective as objective_lib
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import step as step_lib
from bert_jax.training.objective import Batch, Objective


@dataclasses.dataclass
class OpenCorpus:
    """A prepared corpus whose manifest and tokenizer are loaded."""

    manifest: dict[str, Any]  # the sources and settings of the corpus
    tokenizer: Tokenizer  # the tokenizer that it was prepared with
    ids: batches.Ids  # of the tokenizer
    folder: epath.Path  # on this machine
    location: epath.Path  # the path that users gave, perhaps in a bucket
    # `_stamps()` when batches were first requested; empty before.
    stamps: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, folder: epath.Path) -> "OpenCorpus":
        """Opens a complete corpus folder; if it is in a bucket, opens this host's copy."""
        local = corpus.local_corpus(folder)
        manifest = corpus.open_manifest(local)
        tokenizer = corpus.open_tokenizer(local, manifest)
        return cls(manifest, tokenizer, batches.Ids.of(tokenizer), local, folder)

    @property
    def sha256(self) -> str:
        """Returns the hash of the manifest, which identifies the corpus."""
        return hash_json(self.manifest)

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint with this metadata was trained on this corpus."""
        if metadata["corpus_sha256"] != self.sha256:
            raise InputError(
                f"{self.location}: not the corpus this run was trained on; restore that corpus, or "
                "start again with another --workdir"
            )

    def require_unchanged(self) -> None:
        """Raises InputError if the corpus was changed or removed since its batches were requested.

        Verifies checksums only if a file was written since.
        """
        if corpus.open_manifest(self.folder) != self.manifest:
            raise InputError(
                f"{self.folder / 'manifest.json'}: was changed while a run was reading the corpus; "
                "restore the old file and run again, the run resumes from its newest checkpoint"
            )
        if self.stamps and self.stamps != (now := self._stamps()):
            corpus.verify(self.folder)
            self.stamps = now

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Returns the size and the modification time of each file of the training split."""
        stamps = {}
        for path in (self.folder / "stream" / "train").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                stat = os.stat(path)
                stamps[path.name] = stat.st_size, stat.st_mtime_ns
        return stamps

    def train_batches(
        self, experiment: Experiment, phase: int, sends_counts: bool = False
    ) -> batches.TrainBatches | mixture.MixedBatches:
        """Returns the batches of a phase, which are planned at the first request.

        With `sends_counts`, row counts of epochs are copied to the bucket; one process does that.
        """
        spec = experiment.phases[phase]
        stream = corpus.open_stream(self.folder, "train")
        self.stamps = self.stamps or self._stamps()
        data, names = experiment.data_of(phase), (experiment.seed, "train", phase)
        widths = spec.sequence_length, spec.max_predictions_per_seq, spec.batch_size
        shape = batches.BatchShape(*widths, spec.row_offset)
        sends_counts = sends_counts and self.location != self.folder

        def plan_batches(part: Stream, *source: object) -> batches.TrainBatches:
            plans = Plans(
                part,
                (*names, *source),
                spec.sequence_length,
                data.short_seq_prob,
                self.sha256,
                self.folder / corpus.COUNTS,
                self.location / corpus.COUNTS if sends_counts else None,
                data.units,
            )
            return batches.TrainBatches(
                plans,
                self.ids,
                data,
                shape,
                first_step=sum(earlier.steps for earlier in experiment.phases[:phase]),
                total_steps=experiment.total_steps,
            )

        weights = experiment.corpus.mixture
        if not weights:
            return plan_batches(stream)
        parts = mixture.split_sources(self.manifest, stream)
        by_source = [plan_batches(part, "source", number) for number, part in enumerate(parts)]
        return mixture.MixedBatches(by_source, mixture.Order(weights, names))

    def held_out(self, experiment: Experiment, mesh: jax.sharding.Mesh) -> evaluators.HeldOut:
        """Returns the evaluation rows of an experiment."""
        train, validation = (corpus.open_stream(self.folder, split) for split in SPLITS)
        shards = mesh_lib.batch_shards(mesh)
        size = -(-experiment.run.eval_batch_size // shards) * shards
        return evaluators.HeldOut.of(train, validation, self.ids, experiment.data, size)


def pretrain(
    experiment: Experiment,
    workdir: Workdir,
    length: Literal["keep", "extend"],
    progress: Progress,
    origin: dict[str, Any] | None = None,
    probes: Any = None,
    branch: ForkPoint | None = None,
) -> session.Outcome:
    """Runs the experiment in its workdir to its last step, or until a request to stop.

    The arguments are described at `PretrainingJob` and `session.run`.
    """
    job = PretrainingJob(experiment, workdir, progress.report, length, probes, branch)
    return session.run(job, progress, origin)


def require_runnable(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if the batches or the state cannot be sharded over these devices."""
    own.require_sound(experiment, mesh)
    objective = objective_lib.of(experiment.model, experiment.data)
    step_lib.abstract_state(objective, experiment.optimizer, experiment.parallelism, mesh)
    replicas = experiment.optimizer.reference_replicas
    shards = mesh_lib.batch_shards(mesh)
    if experiment.optimizer.clip == "per_replica" and replicas % shards:
        raise InputError(
            f"optimizer.reference_replicas={replicas}: not a multiple of the {shards} devices; "
            "a replica's gradient must be computed on one device"
        )
    for i, phase in enumerate(experiment.phases):
        field = f"phases.{i}.batch_size"
        parts = experiment.parallelism.accumulation_of(i)
        mesh_lib.require_divisible(phase.batch_size, field, mesh, parts)


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


class PretrainingJob(Job):
    """An experiment on its corpus.

    Args:
      length: `extend` lets the last phase have more steps.
      probes: evaluated during the run; a `tasks.probes.Probes`, or None.
      branch: the fork that creates the run; None: the run exists, or starts at step 0.
    """

    restart_hint = "choose another --workdir, or run `bert-jax extend` for more steps"
    experiment: Experiment

    def __init__(
        self,
        experiment: Experiment,
        workdir: Workdir,
        report: Callable[[str], None],
        length: Literal["keep", "extend"] = "keep",
        probes: Any = None,
        branch: ForkPoint | None = None,
    ):
        super().__init__(experiment, workdir, report)
        self.length, self.probes, self.fork_point = length, probes, branch
        self._notes: dict[str, Any] = {}  # saved with checkpoints, see `notes`

    def fit_to_slices(self, taken: int, booked: int, hosts: int) -> Experiment | None:
        """Returns the experiment fitted to some of its slices; None if it does not fit."""
        # make_mesh rejects a tensor axis that is longer than a slice.
        shards = max(hosts * system.local_device_count() // self.experiment.parallelism.tensor, 1)
        return slices.fit_to_slices(self.experiment, taken, booked, shards)

    def require_runnable(self, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError if the batches or the state cannot be sharded over these devices."""
        require_runnable(self.experiment, mesh)

    def require_start(self) -> None:
        """Raises InputError if the initial weights are missing or do not fit."""
        if self.fork_point is None:
            base_lib.load_initial(self.experiment)
        else:
            self.fork_point.require(self.experiment)

    def differences(self, saved: Experiment, metadata: dict[str, Any]) -> list[str]:
        """Returns the differences between the experiment and the saved one, which it resumes."""
        experiment = self.experiment
        changed = config.differences(saved, experiment, "identity")
        if self.length == "extend":
            last = f"phases.{len(saved.phases) - 1}.steps:"
            if experiment.total_steps < saved.total_steps:
                raise InputError(
                    f"extend: {experiment.total_steps} steps are fewer than the "
                    f"{saved.total_steps} that the run has already"
                )
            if any(line.startswith(last) for line in changed):
                self.report("extend: the learning rate schedules change, since they end later")
            changed = [line for line in changed if not line.startswith(last)]
        moved = [line for line in changed if line.startswith("corpus.sources:")]
        if moved and corpus.is_made_of(self.workdir.corpus, experiment.corpus):
            changed = [line for line in changed if line not in moved]
        if experiment.init_from and not changed:
            base = epath.Path(experiment.init_from)
            if not base_lib.is_base(base):
                self.report(f"resume: {base} is gone, so its weights are not compared")
            elif base_lib.hash_weights(base) != metadata["init_sha256"]:
                raise InputError(
                    f"init_from={base}: its weights are not those that this run began with; "
                    "restore them, or choose another --workdir"
                )
        return changed

    def prepare(self, peers: Peers) -> None:
        """Prepares the corpus unless it exists, and copies it to this machine if needed."""
        experiment, folder = self.experiment, self.workdir.corpus

        def make() -> None:
            corpus.prepare(experiment.corpus, experiment.model.vocab_size, folder, self.report)
            if self.fork_point is not None:
                self.fork_point.begin(self.workdir)
            for split in SPLITS if peers.count > 1 else ():  # builds files, by one process alone
                corpus.open_stream(corpus.local_corpus(folder), split)

        peers.run_on_primary("made", make)
        corpus.local_corpus(folder, self.report)

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        """Opens the corpus, and creates the objective and the evaluators."""
        experiment = self.experiment
        self.optimizer, self.total_steps = experiment.optimizer, experiment.total_steps
        self.objective = objective_lib.of(experiment.model, experiment.data)
        self.metric_names = objective_lib.metric_names(experiment)
        self._peers, self._prepared = peers, OpenCorpus.open(self.workdir.corpus)
        corpus.require_rows(self._prepared.folder, experiment)
        self.data_sha256 = self._prepared.sha256
        peers.require_same(
            "corpus",
            {"corpus.manifest": self.data_sha256[:16]},
            "give all processes the corpus that one of them prepared",
        )
        self.evaluators = tuple(self._evaluators(mesh))
        self.report(_summary(experiment, self.objective, mesh))

    def batches(self, done: int) -> PhaseBatches:
        """Returns the phase of the step after `done` steps."""
        experiment = self.experiment
        number, first = experiment.phase_at(done)
        neighbours = range(number, min(number + 2, len(experiment.phases)))  # this and the next
        phase = experiment.phases[number]
        train = self._prepared.train_batches(experiment, number, self._peers.is_primary)
        return PhaseBatches(
            *(
                number,
                first,
                phase.steps,
                phase.batch_size,
                train.batch,
                train.is_ready,
                train.close,
            ),
            objective=objective_lib.make_objective(experiment, number),
            ends_line=len({experiment.data_of(n).objective for n in neighbours}) > 1,
        )

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint was trained on this corpus; copies its notes."""
        self._prepared.require_same(metadata)
        self._notes = metadata.get("notes", {})

    def require_unchanged(self) -> None:
        """Raises InputError if the corpus was changed since it was opened."""
        self._prepared.require_unchanged()

    def count_flops(self, batch: Batch) -> int:
        """Returns the number of operations of a training step on a batch."""
        predictions = batch["masked_lm_positions"].shape[1]
        rows, length = batch["input_ids"].shape
        return flops.train_step_flops(self.experiment.model, rows, length, predictions)

    def inspection_hint(self, step: int) -> str:
        """Returns a hint for messages: the command that shows the text of a step."""
        return f"{super().inspection_hint(step)} shows its text"

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Returns metadata for checkpoints: the base's settings for text vectors, if it has any."""
        return self._notes

    def initial_state(self, fresh: step_lib.State) -> tuple[step_lib.State, str]:
        """Returns the fresh state, with the weights of `init_from` if it is set, and their hash."""
        base = base_lib.load_initial(self.experiment)
        if base is None:
            return fresh, ""
        path = self.experiment.init_from
        base_lib.require_same_tokenizer(base, self._prepared.tokenizer, path)
        self._peers.require_same(
            "init_from", {"weights": base.sha256[:16]}, f"give all processes the same {path}"
        )
        random = f"; freshly initialised there: {', '.join(base.fresh)}" if base.fresh else ""
        moments = "" if base.moments is None else f" and moments of step {base.moments.step}"
        self.report(f"init_from: {path}, weights{moments} {base.sha256[:12]}{random}")
        if base.vectors is not None:
            self._notes = {"vectors": dataclasses.asdict(base.vectors)}
            self.report(
                f"init_from: {path} gives text vectors, which this training changes; a task of "
                "task.kind=similar in run.probes measures how much"
            )
        shardings = jax.tree.map(lambda leaf: leaf.sharding, fresh["params"])
        state = fresh | {"params": feed.put(base.params, shardings)}
        if base.moments is not None:
            trees = (base.moments.mean, base.moments.square)
            sharded = (feed.put(tree, shardings) for tree in trees)
            state["optimizer"] = optimizer_lib.with_moments(state["optimizer"], *sharded)
        return state, base.sha256

    def _evaluators(self, mesh: jax.sharding.Mesh) -> Iterator[Evaluator]:
        """Yields the evaluators; each uses the model of the current phase."""
        experiment, run, prepared = self.experiment, self.experiment.run, self._prepared
        is_due = repeat_every(run.eval_every, experiment.total_steps)
        held_out = prepared.held_out(experiment, mesh)
        stream = corpus.open_stream(prepared.folder, "validation")
        objectives, samplers = {}, {}
        for model in dict.fromkeys(map(experiment.model_of, range(len(experiment.phases)))):
            # One direction for held-out rows of all phases, so that losses are comparable.
            directed = dataclasses.replace(model, direction=experiment.model.direction)
            objectives[model] = objective_lib.of(directed, experiment.data)
            if model.direction == "both":
                samplers[model] = evaluators.PredictionSampler(
                    run.watch, model, prepared.tokenizer, stream
                )

        def score(params: Any, done: int) -> dict[str, float]:
            objective = objectives[experiment.model_after(done)]
            return evaluators.evaluate(held_out, params, objective, experiment.parallelism, mesh)

        def sample(params: Any, done: int) -> dict[str, Any]:
            model = experiment.model_after(done)
            return samplers[model].sample(params, mesh) if model in samplers else {}

        yield Evaluator("evaluation", is_due, score, evaluators.summary)
        yield Evaluator("predictions", is_due, sample, lambda line: "", "predictions")
        if self.probes is None:
            return
        setup = prepared.tokenizer, experiment.parallelism, mesh, run.eval_batch_size
        opened_for: list[Any] = []  # the model and the notes that the probes were opened with

        def open_probes(model: Model) -> int:
            opened_for[:] = model, self._notes
            return self.probes.open(model, *setup, base_lib.read_vectors(self._notes))

        def probe(params: Any, done: int) -> dict[str, Any]:
            if opened_for != [model := experiment.model_after(done), self._notes]:
                open_probes(model)
            return self.probes.evaluate(params)

        self._peers.require_same(
            "probes",
            {"examples": self.probes.sha256[:16]},
            "give all processes the same files of run.probes",
        )
        is_probe_due = self._probe_schedule(open_probes(experiment.model_of(0)))
        self.report(f"probes: {self.probes.about}")
        yield Evaluator("probes", is_probe_due, probe, self._describe_probes, wait="probes")

    def _describe_probes(self, line: dict[str, Any]) -> str:
        scores = (f"{name} {score:.4f}" for name, score in line["scores"].items())
        warning, base = "", self.experiment.init_from
        if base and "similar" in line and line["step"]:
            lines = JsonLines(self.workdir.metrics).read()
            warning = evaluators.similarity_warning(line, lines, base)
        return f"probes: {', '.join(scores)}{warning}"

    def _probe_schedule(self, operations: int) -> Callable[[int], bool]:
        """Returns a function that tells after which steps probes of so many operations are due.

        They are due before the first step, after the last, and as `run.probe_share` allows.
        """
        experiment, run = self.experiment, self.experiment.run

        def allowed(done: int) -> int:
            """Returns how many evaluations of probes fit into the share of so many steps."""
            trained = 0
            for phase in experiment.phases:
                steps = min(done, phase.steps)
                done -= steps
                trained += steps * flops.phase_flops(experiment.model, phase)
            return int(run.probe_share * trained / operations)

        def is_due(done: int) -> bool:
            if done in (0, experiment.total_steps):
                return True
            previous = (done - 1) // run.eval_every * run.eval_every
            return done % run.eval_every == 0 and allowed(done) > allowed(previous)

        return is_due
