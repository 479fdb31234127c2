"""Pre-training as the loop is given it: a prepared corpus, and an experiment on it."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable
from typing import Any, Literal, Protocol

import jax
from etils import epath

from bert_jax import base as base_lib
from bert_jax import config
from bert_jax.config import Experiment, Model, Parallelism
from bert_jax.data import batches, corpus
from bert_jax.data.dataset import SPLITS
from bert_jax.data.plans import Plans
from bert_jax.errors import InputError
from bert_jax.model import flops
from bert_jax.storage.workdir import Workdir
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import evaluators, feed, session
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import step as step_lib
from bert_jax.training.evaluators import Watched
from bert_jax.training.job import Stretch
from bert_jax.training.objective import Pretraining
from bert_jax.training.peers import Peers
from bert_jax.training.progress import Progress


@dataclasses.dataclass
class Prepared:
    """A corpus, opened.

    Attributes:
      manifest: what it was made from, and with.
      tokenizer: with which it was made.
      ids: of the tokenizer.
      folder: where it lies here.
      named: where it was said to lie: in a bucket, perhaps.
      stamps: {file: (bytes, when written)} of what batches are made of.
    """

    manifest: dict[str, Any]
    tokenizer: Tokenizer
    ids: batches.Ids
    folder: epath.Path
    named: epath.Path
    stamps: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)

    @classmethod
    def open(cls, folder: epath.Path) -> "Prepared":
        """Opens a complete corpus folder; of one in a bucket, this host's copy."""
        here = corpus.here(folder)
        manifest = corpus.open_manifest(here)
        tokenizer = corpus.open_tokenizer(here, manifest)
        return cls(manifest, tokenizer, batches.Ids.of(tokenizer), here, folder)

    @property
    def sha256(self) -> str:
        """Of the manifest: what the corpus was made from and with."""
        text = json.dumps(self.manifest, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def require_same(self, metadata: dict[str, Any]) -> None:
        """Raises InputError unless a checkpoint with this metadata was trained on this corpus."""
        if metadata["corpus_sha256"] != self.sha256:
            raise InputError(
                f"{self.named}: not the corpus this run was trained on; put that one back, or "
                "start anew with another --workdir"
            )

    def require_unchanged(self) -> None:
        """Raises InputError if the corpus was changed or removed since its batches were asked for.

        Files are read anew only if they were written since.
        """
        if corpus.open_manifest(self.folder) != self.manifest:
            raise InputError(
                f"{self.folder / 'manifest.json'}: was changed while a run was reading the corpus; "
                "put that one back and run again, it goes on from its newest checkpoint"
            )
        if any(_stamp(name) != stamp for name, stamp in self.stamps.items()):
            corpus.verify(self.folder)
            self.stamps |= {name: _stamp(name) for name in self.stamps}

    def train_batches(self, experiment: Experiment, phase: int) -> batches.TrainBatches:
        """The batches of a phase; nothing is planned before they are asked for."""
        spec = experiment.phases[phase]
        stream = corpus.open_stream(self.folder, "train")
        files = sorted((self.folder / "stream" / "train").iterdir())
        self.stamps |= {os.fspath(path): _stamp(path) for path in files}
        plans = Plans(
            stream,
            (experiment.seed, "train", phase),
            spec.sequence_length,
            experiment.data.short_seq_prob,
            self.sha256,
            self.folder / "plans.json",
        )
        shape = batches.Shape(spec.sequence_length, spec.max_predictions_per_seq, spec.batch_size)
        return batches.TrainBatches(plans, self.ids, experiment.data, shape)

    def held_out(self, experiment: Experiment, mesh: jax.sharding.Mesh) -> evaluators.HeldOut:
        """The evaluation rows."""
        return evaluators.HeldOut.of(
            corpus.open_stream(self.folder, "train"),
            corpus.open_stream(self.folder, "validation"),
            self.ids,
            experiment.data,
            experiment.run,
            experiment.seed,
            mesh,
        )

    def watched(self, experiment: Experiment) -> Watched:
        """The sentences whose predictions are followed."""
        return Watched(
            experiment.run.watch,
            experiment.model,
            self.tokenizer,
            corpus.open_stream(self.folder, "validation"),
        )


def _stamp(path: epath.PathLike) -> tuple[int, int]:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return (-1, -1)
    return found.st_size, found.st_mtime_ns


class Probes(Protocol):
    """What is asked of the encoder beside its own losses; see `tasks.probes`.

    Attributes:
      sha256: of what is asked.
    """

    sha256: str

    def open(
        self,
        model: Model,
        tokenizer: Tokenizer,
        parallelism: Parallelism,
        mesh: jax.sharding.Mesh,
        size: int,
    ) -> int:
        """Makes ready to ask, in batches of about so many rows; operations of asking once."""

    def describe(self) -> str:
        """What they are, in words."""

    def ask(self, params: Any) -> dict[str, dict[str, float]]:
        """`scores` and `majority`, what nobody needs an encoder for, by name."""


def pretrain(
    experiment: Experiment,
    workdir: Workdir,
    length: Literal["keep", "extend"],
    progress: Progress,
    origin: dict[str, Any] | None = None,
    probes: Probes | None = None,
) -> session.Outcome:
    """Runs the experiment in its workdir to its end, or until asked to stop.

    Args:
      experiment: the claim; a run that is there already must have made the same.
      workdir: where it lives.
      length: `extend` allows more steps in the last phase than the run was started with.
      progress: shows what happens.
      origin: see session.run.
      probes: those that `run.probes` names; None: none.

    Raises:
      InputError: bad settings, bad text, or a workdir of another run.
    """

    def make() -> PretrainingJob:
        return PretrainingJob(experiment, workdir, length, progress.say, probes)

    return session.run(make, workdir, progress, length, origin)


def require_runnable(experiment: Experiment, mesh: jax.sharding.Mesh) -> None:
    """Raises InputError if the batches or the state cannot be laid over these devices."""
    objective = Pretraining(experiment.model)
    step_lib.abstract_state(objective, experiment.optimizer, experiment.parallelism, mesh)
    replicas = experiment.optimizer.reference_replicas
    shards = mesh_lib.data_shards(mesh)
    if experiment.optimizer.clip == "per_replica" and replicas % shards:
        raise InputError(
            f"optimizer.reference_replicas={replicas}: not a multiple of the {shards} devices; "
            "a replica's gradient must be computed on one device"
        )
    for i, phase in enumerate(experiment.phases):
        where = f"phases.{i}.batch_size"
        parts = experiment.parallelism.accumulation_of(i)
        mesh_lib.require_divisible(phase.batch_size, where, mesh, parts)


class PretrainingJob:
    """An experiment on its corpus; see `training.job.Job`.

    Args:
      experiment: the claim.
      workdir: of the run.
      length: `extend` allows more steps in the last phase than the run was started with.
      say: shows a line.
      probes: to be asked at times; None: none.
    """

    fixed = None
    how_to_go_on = "choose another --workdir, to go on raise the last phase's steps with --extend"

    def __init__(
        self,
        experiment: Experiment,
        workdir: Workdir,
        length: Literal["keep", "extend"],
        say: Callable[[str], None],
        probes: Probes | None = None,
    ):
        self.claim, self.objective = experiment, Pretraining(experiment.model)
        self.optimizer = experiment.optimizer
        self.compute_dtype = experiment.model.compute_dtype
        self.total_steps = experiment.total_steps
        self._workdir, self._length, self._say = workdir, length, say
        self._probes = probes
        self._begun = 0

    def require_runnable(self, mesh: jax.sharding.Mesh) -> None:
        """See `Job`."""
        require_runnable(self.claim, mesh)

    def require_start(self) -> None:
        """See `Job`."""
        base_lib.start_of(self.claim)

    def changed(self, saved: Experiment, metadata: dict[str, Any]) -> list[str]:
        """See `Job`."""
        claim = self.claim
        changed = config.differences(saved, claim, "identity")
        if self._length == "extend":
            last = f"phases.{len(saved.phases) - 1}.steps:"
            if claim.total_steps < saved.total_steps:
                raise InputError(
                    f"--extend: the run has {saved.total_steps} steps already, "
                    f"not {claim.total_steps}"
                )
            if any(line.startswith(last) for line in changed):
                self._say("extend: the learning-rate schedule now ends later, and so changes")
            changed = [line for line in changed if not line.startswith(last)]
        if claim.init_from and not changed:
            if base_lib.is_base(epath.Path(claim.init_from)):
                base_lib.require_same_weights(claim.init_from, metadata["init_sha256"])
            else:
                self._say(f"resume: there is no {claim.init_from} any more to compare with")
        return changed

    def prepare(self, processes: int) -> None:
        """Makes the corpus, or finds it, with the streams that all processes would make at once."""
        claim, folder = self.claim, self._workdir.corpus
        corpus.prepare(claim.corpus, claim.model.vocab_size, folder, self._say)
        if processes == 1:
            return
        prepared = Prepared.open(folder)
        for split in SPLITS:
            corpus.open_stream(prepared.folder, split)

    def fetch(self) -> None:
        """See `Job`."""
        corpus.here(self._workdir.corpus, self._say)

    def open(self, mesh: jax.sharding.Mesh, peers: Peers) -> None:
        """See `Job`."""
        self._mesh, self._peers = mesh, peers
        self._prepared = Prepared.open(self._workdir.corpus)
        self.sha256 = self._prepared.sha256
        peers.require_same(
            "corpus",
            {"corpus.manifest": self.sha256[:16]},
            "give all of them the corpus that one of them prepared",
        )
        self._held_out = self._prepared.held_out(self.claim, mesh)
        self._watched = self._prepared.watched(self.claim)
        self._eval_step = step_lib.make_eval_step(self.objective, self.claim.parallelism, mesh)
        if self._probes is not None:
            peers.require_same(
                "probes",
                {"examples": self._probes.sha256[:16]},
                "give all of them the same files of run.probes",
            )
            claim, tokenizer = self.claim, self._prepared.tokenizer
            self._probe_operations = self._probes.open(
                claim.model, tokenizer, claim.parallelism, mesh, claim.run.eval_batch_size
            )
            self._say(f"probes: {self._probes.describe()}")

    def stretch(self, done: int) -> Stretch:
        """A phase."""
        number, first = self.claim.phase_at(done)
        phase = self.claim.phases[number]
        batches = self._prepared.train_batches(self.claim, number)
        return Stretch(
            number,
            first,
            phase.steps,
            phase.batch_size,
            batches.batch,
            batches.ready,
            batches.close,
        )

    def operations(self, batch: dict[str, jax.Array]) -> int:
        """See `Job`."""
        predictions = batch["masked_lm_positions"].shape[1]
        return flops.train_step_flops(self.claim.model, *batch["input_ids"].shape, predictions)

    def begin(self, state: step_lib.State) -> tuple[step_lib.State, str]:
        """With the weights of `init_from`, if it names some."""
        base = base_lib.start_of(self.claim)
        if base is None:
            return state, ""
        where = self.claim.init_from
        base_lib.require_same_tokenizer(base, self._prepared.tokenizer, where)
        self._begun += 1
        self._peers.require_same(
            f"init_from {self._begun}",
            {"weights": base.sha256[:16]},
            f"give all of them the same {where}",
        )
        fresh = f"; freshly initialised there: {', '.join(base.fresh)}" if base.fresh else ""
        kept = "" if base.moments is None else f" and moments of step {base.moments.step}"
        self._say(f"init_from: {where}, weights{kept} {base.sha256[:12]}{fresh}")
        places = jax.tree.map(lambda leaf: leaf.sharding, state["params"])
        state = state | {"params": feed.put(base.params, places)}
        if base.moments is not None:
            trees = (base.moments.mean, base.moments.square)
            placed = (feed.put(tree, places) for tree in trees)
            state["optimizer"] = optimizer_lib.with_moments(state["optimizer"], *placed)
        return state, base.sha256

    def require_same(self, metadata: dict[str, Any]) -> None:
        """See `Job`."""
        self._prepared.require_same(metadata)

    def notes(self, evaluation: dict[str, Any]) -> dict[str, Any]:
        """None: the corpus says it all."""
        del evaluation
        return {}

    def require_unchanged(self) -> None:
        """See `Job`."""
        self._prepared.require_unchanged()

    def evaluate(self, params: Any) -> dict[str, Any]:
        """On held-out text."""
        return evaluators.evaluate(self._held_out, params, self._eval_step, self._mesh)

    def summary(self, line: dict[str, Any]) -> str:
        """See `Job`."""
        return evaluators.summary(line)

    def probed(self, done: int, params: Any) -> dict[str, Any]:
        """See `Job`; before the first step, after the last, and where `run.probe_share` allows."""
        if self._probes is None:
            return {}
        before = max(done - 1, 0) // self.claim.run.eval_every * self.claim.run.eval_every
        allowed = self._probes_allowed(done) > self._probes_allowed(before)
        if not allowed and done not in (0, self.total_steps):
            return {}
        return self._probes.ask(params)

    def _probes_allowed(self, done: int) -> int:
        """How often probes may be asked in so many steps."""
        claim, operations = self.claim, 0
        for phase in claim.phases:
            steps = min(done, phase.steps)
            done -= steps
            shape = phase.batch_size, phase.sequence_length, phase.max_predictions_per_seq
            operations += steps * flops.train_step_flops(claim.model, *shape)
        return int(claim.run.probe_share * operations / self._probe_operations)

    def watched(self, params: Any) -> list[dict[str, Any]]:
        """What the model says of a few sentences."""
        params = evaluators.on_one_device(params, self._mesh)
        return [] if params is None else self._watched.predict(params)

    def how_to_see(self, step: int) -> str:
        """See `Job`."""
        return f"`bert-jax show --workdir {self._workdir.named} --step {step}` shows its text"
