"""Runs that start from a checkpoint of another run, their parent: decays and forks.

A decay differs from its parent only in when the learning rate falls (`optimizer.schedule=wsd`).
Before that step the two runs are identical. Started from the parent's checkpoint, the decay
computes the same bits as from step 0, so that its own experiment describes it completely.

A fork may have other settings than its parent, so its own experiment does not tell how its state
was computed: origin.json holds the parent's experiment, and `Phase.row_offset` tells at which row
each phase continues.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from etils import epath

from bert_jax import config
from bert_jax.checkpoints.layout import hash_json
from bert_jax.checkpoints.load import Checkpoints
from bert_jax.config import Experiment
from bert_jax.data import corpus
from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import (
    Workdir,
    absolute,
    fork_record,
    load_experiment,
    translate_os_errors,
    write_atomic,
)

# Fields in which a decay may differ from its parent, besides the steps of the last phase.
_FREE = ("name:", "optimizer.decay_steps:", "optimizer.decay_shape:")
# Fields in which a fork may not differ from its parent: its checkpoint has the parameters of the
# model and of the objective's custom code, and the hash of the base.
_FIXED = ("model.", "data.code:", "init_from:")


class ForkPoint(NamedTuple):
    """The checkpoint of another run, the parent, from which a run starts."""

    workdir: Workdir  # of the parent
    step: int
    command: Literal["decay", "fork"]

    def __str__(self) -> str:
        return os.fspath(self.workdir.checkpoints / str(self.step))

    def load_saved(self) -> tuple[Experiment, str]:
        """Returns the experiment and checksum of the checkpoint; raises InputError without it."""
        checkpoints = Checkpoints(self.workdir.checkpoints)
        if self.step not in checkpoints.steps:
            steps = ", ".join(map(str, checkpoints.steps)) or "none"
            raise InputError(f"{self.command} {self}: no such checkpoint; there are {steps}")
        return checkpoints.experiment(self.step), hash_json(checkpoints.metadata(self.step))

    def require_compatible(self, experiment: Experiment) -> None:
        """Raises InputError unless the checkpoint exists and this experiment may start from it."""
        saved, _ = self.load_saved()
        find_obstacle = self._fork_obstacle if self.command == "fork" else self._decay_obstacle
        if obstacle := find_obstacle(saved, experiment):
            raise InputError(f"{self.command} {self}: {obstacle}")

    def _fork_obstacle(self, saved: Experiment, experiment: Experiment) -> str:
        """Returns why this experiment cannot fork the saved one; "" if it can."""
        # Settings of the role "identity" determine results; those of "placement" do not.
        changed = config.differences(saved, experiment, role="identity")
        if fixed := [line for line in changed if line.startswith(_FIXED)]:
            return f"is of another model ({'; '.join(fixed)})"
        if self.step >= experiment.total_steps:
            return f"the experiment has only {experiment.total_steps} steps"
        if experiment.corpus.tokenizer == "train" and (
            saved.corpus.tokenizer != "train" or self.has_other_text(saved, experiment)
        ):
            return (
                "corpus.tokenizer=train would make another vocabulary; add --set "
                f"corpus.tokenizer={self.corpus / 'tokenizer'}"
            )
        return ""

    def _decay_obstacle(self, saved: Experiment, experiment: Experiment) -> str:
        """Returns why this experiment is not a decay of the saved one; "" if it is.

        Before the decay they must be equal: only the learning rate may depend on the total steps.
        """
        changed = config.differences(saved, experiment, role="identity")
        last = f"phases.{len(saved.phases) - 1}.steps:"
        peak_start = experiment.optimizer.warmup_steps
        peak_end = saved.total_steps - saved.optimizer.decay_steps
        if changed := [line for line in changed if not line.startswith((*_FREE, last))]:
            return f"its run has other settings ({'; '.join(changed)}) than the decay"
        if not peak_start <= self.step <= peak_end:
            return f"choose a step from {peak_start} to {peak_end}, where the rate is at its peak"
        if experiment.data.final_masked_lm_prob:
            return "data.final_masked_lm_prob depends on the number of steps; set it to 0"
        return ""

    def has_other_text(self, saved: Experiment, experiment: Experiment) -> bool:
        """Returns whether the experiment has other text than its parent, and so other rows."""
        new, old = (dataclasses.asdict(side.corpus) for side in (experiment, saved))
        # No differences of text: vocabularies must be equal, and mixtures count all their rows.
        changed = {name for name in new if new[name] != old[name]}
        changed -= {"tokenizer", "mixture", "temperature"}
        is_moved = changed == {"sources"} and corpus.is_made_of(self.corpus, experiment.corpus)
        return bool(changed) and not is_moved

    @property
    def corpus(self) -> epath.Path:
        """The corpus of the parent."""
        return self.workdir.with_corpus(load_experiment(self.workdir).run.corpus_dir).corpus

    def copy_metrics(self, workdir: Workdir) -> None:
        """Copies the parent's metrics and predictions to a new run; checks a fork's vocabulary."""
        if _has_checkpoint(workdir):
            return
        if self.command == "fork":
            parent, fork = map(corpus.open_manifest, (self.corpus, workdir.corpus))
            if parent["tokenizer"] != fork["tokenizer"]:
                raise InputError(
                    f"{workdir.corpus}: has another vocabulary than {self.corpus}; remove it, and "
                    f"add --set corpus.tokenizer={self.corpus / 'tokenizer'}"
                )
        for name in ("metrics", "predictions"):
            source, target = getattr(self.workdir, name), getattr(workdir, name)
            if source.exists():
                with translate_os_errors(source):
                    text = source.read_text()
                write_atomic(target, text)
                JsonLines(target).delete_after(self.step)


def plan_decay(
    checkpoint: str, given: str | None, settings: Sequence[str]
) -> tuple[Experiment, dict[str, Any], ForkPoint]:
    """Returns the experiment of a decay, the record for its origin.json, and its fork point.

    `checkpoint` is RUN/checkpoints/STEP. `settings` change the experiment of the file `given`, or
    the parent's if it is None. A decay of a fork is recorded as a fork, too.
    """
    fork_point = _parse_fork_point("decay", checkpoint)
    parent = load_experiment(fork_point.workdir)
    experiment = config.override(parent if given is None else config.load(given), settings)
    optimizer = experiment.optimizer
    if optimizer.decay_steps == 0:
        raise InputError(
            f"decay {checkpoint}: needs a number of steps, for example --set "
            "optimizer.decay_steps=1000"
        )
    phase_start = sum(phase.steps for phase in experiment.phases[:-1])
    phase_steps = fork_point.step + optimizer.decay_steps - phase_start
    changed = f"phases.{len(experiment.phases) - 1}.steps={phase_steps}"
    if parent.optimizer.schedule != "wsd":
        raise InputError(
            f"decay {checkpoint}: needs a run with optimizer.schedule=wsd, not "
            f"{parent.optimizer.schedule}; decay in a fork: `bert-jax fork` with "
            f"the same arguments, --set optimizer.schedule=wsd and --set {changed}"
        )
    if fork_point.step < phase_start:
        raise InputError(
            f"decay {checkpoint}: is before the last phase, which begins at step {phase_start}"
        )
    experiment = config.override(experiment, [changed])
    file = given or os.fspath(fork_point.workdir.experiment)
    origin = config.origin_of(file, settings, experiment)
    if fork := fork_record(fork_point.workdir):
        origin["fork"] = fork
    return experiment, origin, fork_point


def plan_fork(
    checkpoint: str, given: str | None, settings: Sequence[str], workdir: Workdir
) -> tuple[Experiment, dict[str, Any] | None, ForkPoint]:
    """Returns the experiment of a fork, the record for its origin.json, and its fork point.

    Each phase continues at its first row that the parent has not seen; with another text or seed,
    at the first row. Once the fork's `workdir` has a checkpoint, the parent is not read, the row
    offsets stay, and the record is None. For the other arguments see `plan_decay`.
    """
    fork_point = _parse_fork_point("fork", checkpoint)
    if _has_checkpoint(workdir):
        if fork_record(workdir).get("checkpoint") != str(fork_point):
            raise InputError(f"{workdir.address}: holds another run than a fork of {fork_point}")
        experiment = config.override(config.load(given or os.fspath(workdir.experiment)), settings)
        phases = zip(experiment.phases, load_experiment(workdir).phases, strict=False)
        offsets = [saved.row_offset for _, saved in phases]
        return _set_row_offsets(experiment, offsets), None, fork_point
    (parent, sha256), file = fork_point.load_saved(), fork_point.workdir.experiment
    experiment, origin = config.load_with_origin(given or os.fspath(file), settings)
    tree = json.loads(config.to_json(parent))
    origin["fork"] = {"checkpoint": str(fork_point), "sha256": sha256, "experiment": tree}
    has_new_rows = parent.seed != experiment.seed or fork_point.has_other_text(parent, experiment)
    parent_rows = [] if has_new_rows else parent.rows_after(fork_point.step)
    parent_rows += [0] * len(experiment.phases)
    # An offset makes the fork's own count continue at the parent's next row; it may be negative.
    rows = zip(experiment.phases, parent_rows, experiment.rows_after(fork_point.step), strict=False)
    offsets = [phase.row_offset + seen - counted for phase, seen, counted in rows]
    return _set_row_offsets(experiment, offsets), origin, fork_point


def find_pending_fork(workdir: Workdir) -> ForkPoint | None:
    """Returns the fork point of a fork that was killed before its first save, else None."""
    record = {} if _has_checkpoint(workdir) else fork_record(workdir)
    return _parse_fork_point("fork", record["checkpoint"]) if record else None


def _has_checkpoint(workdir: Workdir) -> bool:
    """Returns whether the run has a complete checkpoint."""
    return bool(Checkpoints(workdir.checkpoints).steps)


def _parse_fork_point(command: Literal["decay", "fork"], checkpoint: str) -> ForkPoint:
    path = absolute(epath.Path(checkpoint))
    if not path.name.isdecimal() or path.parent.name != "checkpoints":
        raise InputError(f"{command} {checkpoint}: name a checkpoint, RUN/checkpoints/STEP")
    return ForkPoint(mirror.open_workdir(path.parent.parent), int(path.name), command)


def _set_row_offsets(experiment: Experiment, offsets: list[int]) -> Experiment:
    settings = [f"phases.{i}.row_offset={offset}" for i, offset in enumerate(offsets)]
    return config.override(experiment, settings)
