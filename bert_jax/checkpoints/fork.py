"""A run that begins with another run's checkpoint: a decay, or a fork.

As long as the rate is at its peak nothing depends on when it will fall. So a run of the same
experiment that decays from step N on (`optimizer.schedule=wsd`) is, up to there, the stable run
itself, and begins with its checkpoint: what it comes to is what it would have come to from step 0,
bit for bit. Its own experiment is therefore all there is to record.

A fork may have other settings than the run it leaves, so that its own do not tell how its state
came about: origin.json keeps the other run's, and `Phase.row_offset` which rows come next.
"""

import dataclasses
import json
import os
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from etils import epath

from bert_jax import config
from bert_jax.checkpoints.checkpoint import Checkpoints, sha256_of
from bert_jax.config import Experiment
from bert_jax.data import corpus
from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.json_lines import JsonLines
from bert_jax.storage.workdir import (
    Workdir,
    absolute,
    fork_of,
    load_experiment,
    translate_os_errors,
    write_atomic,
)

# Fields in which a decay may differ from the stable run, next to the last phase's steps.
_FREE = ("name:", "optimizer.decay_steps:", "optimizer.decay_shape:")
# Fields in which a fork may not differ from the run it leaves: they say what the state is.
_FIXED = ("model.", "data.code:", "init_from:")


class ForkPoint(NamedTuple):
    """The checkpoint that a run begins with: of another run, after so many steps."""

    workdir: Workdir
    step: int
    command: Literal["decay", "fork"]

    def __str__(self) -> str:
        return os.fspath(self.workdir.checkpoints / str(self.step))

    def saved(self) -> tuple[Experiment, str]:
        """Returns the experiment of the checkpoint, and its checksum; InputError: not there."""
        checkpoints = Checkpoints(self.workdir.checkpoints)
        if self.step not in checkpoints.steps:
            there = ", ".join(map(str, checkpoints.steps)) or "none"
            raise InputError(f"{self.command} {self}: no such checkpoint; there are {there}")
        return checkpoints.experiment(self.step), sha256_of(checkpoints.metadata(self.step))

    def require(self, experiment: Experiment) -> None:
        """Raises InputError unless the checkpoint is there, and this experiment may begin with it.

        A decay must have the same stable part, and is refused, too, where something else than the
        rate goes by the steps of all phases.
        """
        saved, _ = self.saved()
        changed = config.differences(saved, experiment, "identity")
        if self.command == "fork":
            if fixed := [line for line in changed if line.startswith(_FIXED)]:
                why = f"of another model ({'; '.join(fixed)})"
            elif self.step >= experiment.total_steps:
                why = f"phases have {experiment.total_steps} steps alone"
            elif experiment.corpus.tokenizer == "train" and (
                saved.corpus.tokenizer != "train" or self.has_other_text(saved, experiment)
            ):
                why = (
                    "corpus.tokenizer=train makes another vocabulary of another text; add --set "
                    f"corpus.tokenizer={self.corpus / 'tokenizer'}"
                )
            else:
                return
            raise InputError(f"fork {self}: {why}")
        last = f"phases.{len(saved.phases) - 1}.steps:"
        first, stable = experiment.optimizer.warmup_steps, saved.total_steps
        stable -= saved.optimizer.decay_steps
        if changed := [line for line in changed if not line.startswith((*_FREE, last))]:
            why = f"its run has other settings ({'; '.join(changed)}) than the decay's"
        elif not first <= self.step <= stable:
            why = f"the rate is at its peak from step {first} to {stable}; name one of these"
        elif experiment.data.final_masked_lm_prob:
            why = "data.final_masked_lm_prob depends on the number of steps; set it to 0"
        else:
            return
        raise InputError(f"decay {self}: {why}")

    def has_other_text(self, saved: Experiment, experiment: Experiment) -> bool:
        """Returns whether the rows of an experiment are others than the run's that is left.

        They are not by the file of a vocabulary, since both must have the same, nor by where the
        same text lies; nor by weights of sources, with which rows are counted on in all.
        """
        ours, theirs = (dataclasses.asdict(one.corpus) for one in (experiment, saved))
        changed = {name for name in ours if ours[name] != theirs[name]} - {"tokenizer", "mixture"}
        is_moved = changed == {"sources"} and corpus.is_made_of(self.corpus, experiment.corpus)
        return bool(changed) and not is_moved

    @property
    def corpus(self) -> epath.Path:
        """The corpus of the run that is left."""
        corpus_dir = load_experiment(self.workdir).run.corpus_dir
        return self.workdir.with_corpus(corpus_dir).corpus

    def begin(self, workdir: Workdir) -> None:
        """Copies the lines up to the checkpoint, with which a run that has none begins."""
        if _has_saved(workdir):
            return
        if self.command == "fork":
            one, other = map(corpus.open_manifest, (self.corpus, workdir.corpus))
            if one["tokenizer"] != other["tokenizer"]:
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
                JsonLines(target).forget_after(self.step)


def plan_decay(
    checkpoint: str, given: str | None, settings: Sequence[str]
) -> tuple[Experiment, dict[str, Any], ForkPoint]:
    """Returns what decays from RUN/checkpoints/STEP on, its origin, and where it branches off.

    The experiment is that of the file `given`, None: the run's own, with these `settings`. What
    decays from a fork is itself a fork, of the run which that one left.
    """
    branch = _parse_fork_point("decay", checkpoint)
    saved = load_experiment(branch.workdir)
    experiment = config.override(saved if given is None else config.load(given), settings)
    optimizer = experiment.optimizer
    if saved.optimizer.schedule != "wsd" or optimizer.decay_steps == 0:
        raise InputError(
            f"decay {checkpoint}: needs a run with optimizer.schedule=wsd, not "
            f"{saved.optimizer.schedule}, and the steps of the decay, --set "
            "optimizer.decay_steps=1000 say"
        )
    before = sum(phase.steps for phase in experiment.phases[:-1])
    if branch.step < before:
        raise InputError(
            f"decay {checkpoint}: lies before the last phase, which begins at step {before}"
        )
    last = branch.step + optimizer.decay_steps - before
    changed = f"phases.{len(experiment.phases) - 1}.steps={last}"
    experiment = config.override(experiment, [changed])
    origin = config.origin_of(given or os.fspath(branch.workdir.experiment), settings, experiment)
    if fork := fork_of(branch.workdir):
        origin["fork"] = fork
    return experiment, origin, branch


def plan_fork(
    checkpoint: str, given: str | None, settings: Sequence[str], workdir: Workdir
) -> tuple[Experiment, dict[str, Any] | None, ForkPoint]:
    """Returns what a fork computes, where that comes from, and the checkpoint it begins with.

    Each phase goes on at its first row that was not seen, whatever its batch size; of another text
    or seed none was. Once `workdir`, the fork's, has a checkpoint, nothing is asked of the run that
    was left, and its rows and its record stay. For the other arguments see `plan_decay`.
    """
    branch, own = _parse_fork_point("fork", checkpoint), workdir.experiment
    if _has_saved(workdir):
        if fork_of(workdir).get("checkpoint") != str(branch):
            raise InputError(f"{workdir.named}: holds another run than a fork of {branch}")
        experiment = config.override(config.load(given or os.fspath(own)), settings)
        phases = zip(experiment.phases, load_experiment(workdir).phases, strict=False)
        offsets = [saved.row_offset for _, saved in phases]
        return _with_offsets(experiment, offsets), None, branch
    (parent, sha256), own = branch.saved(), branch.workdir.experiment
    experiment, origin = config.load_with_origin(given or os.fspath(own), settings)
    tree = json.loads(config.to_json(parent))
    origin["fork"] = {"checkpoint": str(branch), "sha256": sha256, "experiment": tree}
    is_other = parent.seed != experiment.seed or branch.has_other_text(parent, experiment)
    seen = [] if is_other else parent.rows_after(branch.step)
    seen += [0] * len(experiment.phases)
    now = experiment.rows_after(branch.step)
    rows = zip(experiment.phases, seen, now, strict=False)
    offsets = [phase.row_offset + one - other for phase, one, other in rows]
    return _with_offsets(experiment, offsets), origin, branch


def find_pending_fork(workdir: Workdir) -> ForkPoint | None:
    """Returns where a fork begins that was killed before its first save; None: there is none."""
    record = {} if _has_saved(workdir) else fork_of(workdir)
    return _parse_fork_point("fork", record["checkpoint"]) if record else None


def _has_saved(workdir: Workdir) -> bool:
    """Returns whether there is a checkpoint, not only one that a kill has cut off."""
    return bool(Checkpoints(workdir.checkpoints).steps)


def _parse_fork_point(command: Literal["decay", "fork"], checkpoint: str) -> ForkPoint:
    path = absolute(epath.Path(checkpoint))
    if not path.name.isdecimal() or path.parent.name != "checkpoints":
        raise InputError(f"{command} {checkpoint}: name a checkpoint, RUN/checkpoints/STEP")
    return ForkPoint(mirror.open_workdir(path.parent.parent), int(path.name), command)


def _with_offsets(experiment: Experiment, offsets: list[int]) -> Experiment:
    settings = [f"phases.{i}.row_offset={offset}" for i, offset in enumerate(offsets)]
    return config.override(experiment, settings)
