"""Pre-training as the loop is given it: a prepared corpus, and an experiment on it."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, Literal

import jax
from etils import epath

from bert_jax import config, system
from bert_jax.checkpoints import base as base_lib
from bert_jax.checkpoints.checkpoint import sha256_of
from bert_jax.checkpoints.fork import ForkPoint
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
class Prepared:
    """A corpus, opened."""

    manifest: dict[str, Any]  # what it was made from, and with
    tokenizer: Tokenizer  # with which it was made
    ids: batches.Ids  # of the tokenizer
    folder: epath.Path  # where it lies here
    named: epath.Path  # where users say it lies: in a bucket, perhaps
    # Of the files that batches are made of, once they are asked for; see `_stamps`.
    stamps: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, folder: epath.Path) -> "Prepared":
        """Opens a complete corpus folder; of one in a bucket, this host's copy."""
        local = corpus.local_corpus(folder)
        manifest = corpus.open_manifest(local)
        tokenizer = corpus.open_tokenizer(local, manifest)
        return cls(manifest, tokenizer, batches.Ids.of(tokenizer), local, folder)

    @property
    def sha256(self) -> str:
        """Returns the hash of the manifest: what the corpus was made from and with."""
        return sha256_of(self.manifest)

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint with this metadata was trained on this corpus."""
        if metadata["corpus_sha256"] != self.sha256:
            raise InputError(
                f"{self.named}: not the corpus this run was trained on; put that one back, or "
                "start again with another --workdir"
            )

    def require_unchanged(self) -> None:
        """Raises InputError if the corpus was changed or removed since its batches were asked for.

        Files are read again only if they were written since.
        """
        if corpus.open_manifest(self.folder) != self.manifest:
            raise InputError(
                f"{self.folder / 'manifest.json'}: was changed while a run was reading the corpus; "
                "put that one back and run again, it goes on from its newest checkpoint"
            )
        if self.stamps and self.stamps != (now := self._stamps()):
            corpus.verify(self.folder)
            self.stamps = now

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Returns of each file of the training split its bytes and when it was written."""
        stamps = {}
        for path in (self.folder / "stream" / "train").glob("*"):
            with contextlib.suppress(FileNotFoundError):  # removed since it was listed
                stat = os.stat(path)
                stamps[path.name] = stat.st_size, stat.st_mtime_ns
        return stamps

    def train_batches(
        self, experiment: Experiment, phase: int, sends_counts: bool = False
    ) -> batches.TrainBatches | mixture.MixedBatches:
        """Returns the batches of a phase; nothing is planned before they are asked for.

        `sends_counts`: how many rows an epoch has goes to the corpus's bucket, as one process does.
        """
        spec = experiment.phases[phase]
        stream = corpus.open_stream(self.folder, "train")
        self.stamps = self.stamps or self._stamps()
        data, names = experiment.data_of(phase), (experiment.seed, "train", phase)
        widths = spec.sequence_length, spec.max_predictions_per_seq, spec.batch_size
        shape = batches.BatchShape(*widths, spec.row_offset)

        def of(part: Stream, *source: object) -> batches.TrainBatches:
            plans = Plans(
                part,
                (*names, *source),
                spec.sequence_length,
                data.short_seq_prob,
                self.sha256,
                self.folder / corpus.COUNTS,
                self.named / corpus.COUNTS if sends_counts and self.named != self.folder else None,
                data.units,
            )
            return batches.TrainBatches(
                plans,
                self.ids,
                data,
                shape,
                first_step=sum(before.steps for before in experiment.phases[:phase]),
                total_steps=experiment.total_steps,
            )

        weights = experiment.corpus.mixture
        if not weights:
            return of(stream)
        parts = mixture.split_sources(self.manifest, stream)
        each = [of(part, "source", number) for number, part in enumerate(parts)]
        return mixture.MixedBatches(each, mixture.Order(weights, names))

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
    """Runs the experiment in its workdir to its end, or until asked to stop.

    For what it takes see `PretrainingJob` and `session.run`.
    """
    job = PretrainingJob(experiment, workdir, progress.report, length, probes, branch)
    return session.run(job, progress, origin)


def require_runnable(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if the batches or the state cannot be laid over these devices."""
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
        where = f"phases.{i}.batch_size"
        parts = experiment.parallelism.accumulation_of(i)
        mesh_lib.require_divisible(phase.batch_size, where, mesh, parts)


def _summary(experiment: Experiment, objective: Objective, mesh: jax.sharding.Mesh) -> str:
    """Returns what is shown before the first step: the model, the devices and the work."""
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
      probes: of the encoder, to be asked at times: a `tasks.probes.Probes`, or None.
      branch: what a run begins with that is not there yet; None: its step 0.
    """

    restart_hint = "choose another --workdir, or run `bert-jax extend` for more steps"
    experiment: Experiment

    def __init__(
        self,
        experiment: Experiment,
        workdir: Workdir,
        say: Callable[[str], None],
        length: Literal["keep", "extend"] = "keep",
        probes: Any = None,
        branch: ForkPoint | None = None,
    ):
        super().__init__(experiment, workdir, say)
        self.length, self.probes, self.fork_point = length, probes, branch
        self._notes: dict[str, Any] = {}  # what checkpoints keep for those who ask the model

    def fit_to_slices(self, taken: int, booked: int, hosts: int) -> Experiment | None:
        """Returns the experiment laid over some of its slices; None: it cannot be."""
        # A tensor axis that is longer than a slice is for make_mesh to refuse.
        shards = max(hosts * system.devices_here() // self.experiment.parallelism.tensor, 1)
        return slices.fit_to_slices(self.experiment, taken, booked, shards)

    def require_runnable(self, mesh: jax.sharding.Mesh) -> None:
        """Raises InputError if the batches or the state cannot be laid over these devices."""
        require_runnable(self.experiment, mesh)

    def require_start(self) -> None:
        """Raises InputError if the weights it begins with are not there, or do not fit."""
        if self.fork_point is None:
            base_lib.start_of(self.experiment)
        else:
            self.fork_point.require(self.experiment)

    def differences(self, saved: Experiment, metadata: dict[str, Any]) -> list[str]:
        """Returns how the experiment differs from a saved one that is to go on."""
        experiment = self.experiment
        changed = config.differences(saved, experiment, "identity")
        if self.length == "extend":
            last = f"phases.{len(saved.phases) - 1}.steps:"
            if experiment.total_steps < saved.total_steps:
                raise InputError(
                    f"extend: the run has {saved.total_steps} steps already, "
                    f"not {experiment.total_steps}"
                )
            if any(line.startswith(last) for line in changed):
                self.report("extend: the schedules now end later, and so change")
            changed = [line for line in changed if not line.startswith(last)]
        moved = [line for line in changed if line.startswith("corpus.sources:")]
        if moved and corpus.is_made_of(self.workdir.corpus, experiment.corpus):
            changed = [line for line in changed if line not in moved]
        if experiment.init_from and not changed:
            base = epath.Path(experiment.init_from)
            if not base_lib.is_base(base):
                self.report(f"resume: {base} is gone; its weights are not compared again")
            elif base_lib.begins_with(base) != metadata["init_sha256"]:
                raise InputError(
                    f"init_from={base}: holds other weights than those this run began with; put "
                    "those back, or choose another --workdir"
                )
        return changed

    def prepare(self, peers: Peers) -> None:
        """Makes the corpus, or finds it; copies it to this machine, if need be."""
        experiment, folder = self.experiment, self.workdir.corpus

        def make() -> None:
            corpus.prepare(experiment.corpus, experiment.model.vocab_size, folder, self.report)
            if self.fork_point is not None:
                self.fork_point.begin(self.workdir)
            for split in SPLITS if peers.count > 1 else ():  # which all would make at once
                corpus.open_stream(corpus.local_corpus(folder), split)

        peers.run_on_primary("made", make)
        corpus.local_corpus(folder, self.report)

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        """Opens what was prepared."""
        experiment = self.experiment
        self.optimizer, self.total_steps = experiment.optimizer, experiment.total_steps
        self.objective = objective_lib.of(experiment.model, experiment.data)
        self.metric_names = objective_lib.metric_names(experiment)
        self._peers, self._prepared = peers, Prepared.open(self.workdir.corpus)
        corpus.require_rows(self._prepared.folder, experiment)
        self.data_sha256 = self._prepared.sha256
        peers.require_same(
            "corpus",
            {"corpus.manifest": self.data_sha256[:16]},
            "give all of them the corpus that one of them prepared",
        )
        self.evaluators = tuple(self._evaluators(mesh))
        self.report(_summary(experiment, self.objective, mesh))

    def batches(self, done: int) -> PhaseBatches:
        """Returns the phase of the step after so many."""
        experiment = self.experiment
        number, first = experiment.phase_at(done)
        both = range(number, min(number + 2, len(experiment.phases)))  # and the next, if any
        phase = experiment.phases[number]
        of = self._prepared.train_batches(experiment, number, self._peers.is_primary)
        return PhaseBatches(
            *(number, first, phase.steps, phase.batch_size, of.batch, of.is_ready, of.close),
            objective=objective_lib.make_objective(experiment, number),
            ends_line=len({experiment.data_of(n).objective for n in both}) > 1,
        )

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint was trained on this corpus; keeps its notes."""
        self._prepared.require_same(metadata)
        self._notes = metadata.get("notes", {})

    def require_unchanged(self) -> None:
        """Raises InputError if the corpus was changed since it was opened."""
        self._prepared.require_unchanged()

    def count_flops(self, batch: Batch) -> int:
        """Returns those of a step with such a batch."""
        predictions = batch["masked_lm_positions"].shape[1]
        rows, length = batch["input_ids"].shape
        return flops.train_step_flops(self.experiment.model, rows, length, predictions)

    def inspection_hint(self, step: int) -> str:
        """Returns where the text of a step is to be seen, in words."""
        return f"{super().inspection_hint(step)} shows its text"

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """Returns what checkpoints keep: how a model that gives vectors was asked for them."""
        return self._notes

    def initial_state(self, fresh: step_lib.State) -> tuple[step_lib.State, str]:
        """Returns the fresh state, or with the weights of `init_from` if it names some."""
        base = base_lib.start_of(self.experiment)
        if base is None:
            return fresh, ""
        where = self.experiment.init_from
        base_lib.require_same_tokenizer(base, self._prepared.tokenizer, where)
        self._peers.require_same(
            "init_from", {"weights": base.sha256[:16]}, f"give all of them the same {where}"
        )
        random = f"; freshly initialised there: {', '.join(base.fresh)}" if base.fresh else ""
        kept = "" if base.moments is None else f" and moments of step {base.moments.step}"
        self.report(f"init_from: {where}, weights{kept} {base.sha256[:12]}{random}")
        if base.vectors is not None:
            self._notes = {"vectors": dataclasses.asdict(base.vectors)}
            self.report(
                f"init_from: {where} gives vectors of texts, and what is learned now changes them; "
                "a task of task.kind=similar in run.probes shows how much"
            )
        places = jax.tree.map(lambda leaf: leaf.sharding, fresh["params"])
        state = fresh | {"params": feed.put(base.params, places)}
        if base.moments is not None:
            trees = (base.moments.mean, base.moments.square)
            placed = (feed.put(tree, places) for tree in trees)
            state["optimizer"] = optimizer_lib.with_moments(state["optimizer"], *placed)
        return state, base.sha256

    def _evaluators(self, mesh: jax.sharding.Mesh) -> Iterator[Evaluator]:
        """Yields what is asked of the model, which in another phase may be another one."""
        experiment, run, prepared = self.experiment, self.experiment.run, self._prepared
        often = repeat_every(run.eval_every, experiment.total_steps)
        held_out = prepared.held_out(experiment, mesh)
        stream = corpus.open_stream(prepared.folder, "validation")
        scored, samplers = {}, {}
        for model in dict.fromkeys(map(experiment.model_of, range(len(experiment.phases)))):
            # Held-out rows are scored alike in all phases, so that their curve is one.
            alike = dataclasses.replace(model, direction=experiment.model.direction)
            scored[model] = objective_lib.of(alike, experiment.data)
            if model.direction == "both":
                samplers[model] = evaluators.PredictionSampler(
                    run.watch, model, prepared.tokenizer, stream
                )

        def score(params: Any, done: int) -> dict[str, float]:
            objective = scored[experiment.model_after(done)]
            return evaluators.evaluate(held_out, params, objective, experiment.parallelism, mesh)

        def watch(params: Any, done: int) -> dict[str, Any]:
            model = experiment.model_after(done)
            return samplers[model].ask(params, mesh) if model in samplers else {}

        yield Evaluator("evaluation", often, score, evaluators.summary)
        yield Evaluator("predictions", often, watch, lambda line: "", "predictions")
        if self.probes is None:
            return
        more = prepared.tokenizer, experiment.parallelism, mesh, run.eval_batch_size
        opened: list[Any] = []  # for which model and notes the probes are open

        def open_probes(model: Model) -> int:
            opened[:] = model, self._notes
            return self.probes.open(model, *more, base_lib.vectors_of(self._notes))

        def probe(params: Any, done: int) -> dict[str, Any]:
            if opened != [model := experiment.model_after(done), self._notes]:
                open_probes(model)
            return self.probes.ask(params)

        self._peers.require_same(
            "probes",
            {"examples": self.probes.sha256[:16]},
            "give all of them the same files of run.probes",
        )
        seldom = self._when_probed(open_probes(experiment.model_of(0)))
        self.report(f"probes: {self.probes.about}")
        yield Evaluator("probes", seldom, probe, self._describe_probes, wait="probes")

    def _describe_probes(self, line: dict[str, Any]) -> str:
        scores = (f"{name} {score:.4f}" for name, score in line["scores"].items())
        lost, base = "", self.experiment.init_from
        if base and "similar" in line and line["step"]:
            lost = evaluators.vectors_lost(line, JsonLines(self.workdir.metrics).read(), base)
        return f"probes: {', '.join(scores)}{lost}"

    def _when_probed(self, operations: int) -> Callable[[int], bool]:
        """Returns when probes that take so many operations are due.

        Before the first step, after the last, and as `run.probe_share` allows.
        """
        experiment, run = self.experiment, self.experiment.run

        def allowed(done: int) -> int:
            """How often probes may be asked in so many steps."""
            trained = 0
            for phase in experiment.phases:
                steps = min(done, phase.steps)
                done -= steps
                trained += steps * flops.phase_flops(experiment.model, phase)
            return int(run.probe_share * trained / operations)

        def is_due(done: int) -> bool:
            if done in (0, experiment.total_steps):
                return True
            before = (done - 1) // run.eval_every * run.eval_every
            return done % run.eval_every == 0 and allowed(done) > allowed(before)

        return is_due
