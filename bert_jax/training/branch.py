"""A decay that branches off a stable run (`optimizer.schedule=wsd`).

As long as the rate is at its peak nothing depends on when it will fall. So a run of the same
experiment that decays from step N on is, up to there, the stable run itself, and begins with its
checkpoint: what it comes to is what it would have come to from step 0, bit for bit. Its own
experiment is therefore all there is to record.
"""

import os
from collections.abc import Sequence
from typing import NamedTuple

from etils import epath

from bert_jax import config
from bert_jax.config import Experiment
from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir, load_experiment, named_errors, write_atomic
from bert_jax.training.checkpoint import Checkpoints

# Fields in which the experiments of the two runs may differ, next to the last phase's steps.
_FREE = ("name:", "optimizer.decay_steps:", "optimizer.decay_shape:")


class Branch(NamedTuple):
    """The checkpoint that a run begins with: of another run, after so many steps."""

    workdir: Workdir
    step: int

    def __str__(self) -> str:
        return os.fspath(self.workdir.checkpoints / str(self.step))

    def require(self, experiment: Experiment) -> None:
        """Raises InputError unless the checkpoint is there, and the stable part of this experiment.

        It is refused, too, where something else than the rate goes by the steps of all phases.
        """
        with Checkpoints(self.workdir.checkpoints, experiment.run, "read") as checkpoints:
            if self.step not in checkpoints.steps:
                there = ", ".join(map(str, checkpoints.steps)) or "none"
                raise InputError(f"--decay-from {self}: no such checkpoint; there are {there}")
            saved = checkpoints.experiment(self.step)
        last = f"phases.{len(saved.phases) - 1}.steps:"
        changed = [
            line
            for line in config.differences(saved, experiment, "identity")
            if not line.startswith((*_FREE, last))
        ]
        if changed:
            raise InputError(
                f"--decay-from {self}: of a run with other settings ({'; '.join(changed)}); only "
                "the decay and the last phase's steps may differ"
            )
        stable = saved.total_steps - saved.optimizer.decay_steps
        if not experiment.optimizer.warmup_steps <= self.step <= stable:
            raise InputError(
                f"--decay-from {self}: the rate is at its peak from step "
                f"{experiment.optimizer.warmup_steps} to {stable}; name one of these"
            )
        if experiment.data.final_masked_lm_prob:
            raise InputError(
                f"data.final_masked_lm_prob={experiment.data.final_masked_lm_prob}: depends on "
                "the number of steps, which --decay-from changes; set it to 0"
            )

    def copy_lines(self, workdir: Workdir) -> None:
        """Copies the lines that the run begins with; those after the step are dropped later."""
        for name in ("metrics", "predictions"):
            source, target = getattr(self.workdir, name), getattr(workdir, name)
            if source.exists() and not target.exists():
                with named_errors(source):
                    text = source.read_text()
                write_atomic(target, text)


def opened(
    checkpoint: str, given: str | None, settings: Sequence[str]
) -> tuple[Experiment, Branch]:
    """Returns the experiment that decays from a checkpoint on, and where it branches off.

    Args:
      checkpoint: `RUN/checkpoints/STEP`.
      given: an experiment file; None: the run's own experiment.
      settings: for `config.override`.

    Raises:
      InputError: no such run, or one whose rate is not made for it.
    """
    path = epath.Path(checkpoint)
    if not path.name.isdecimal() or path.parent.name != "checkpoints":
        raise InputError(f"--decay-from {checkpoint}: name a checkpoint, RUN/checkpoints/STEP")
    branch = Branch(mirror.opened(os.fspath(path.parent.parent)), int(path.name))
    saved = load_experiment(branch.workdir)
    if saved.optimizer.schedule != "wsd":
        raise InputError(
            f"--decay-from {checkpoint}: of a run with optimizer.schedule="
            f"{saved.optimizer.schedule}, whose rate has no stable part; name one with wsd"
        )
    experiment = config.override(saved if given is None else config.load(given), settings)
    if experiment.optimizer.decay_steps == 0:
        raise InputError(
            "optimizer.decay_steps=0: --decay-from needs optimizer.schedule=wsd and the steps of "
            "the decay, --set optimizer.decay_steps=1000 say"
        )
    before = sum(phase.steps for phase in experiment.phases[:-1])
    last = branch.step + experiment.optimizer.decay_steps - before
    if branch.step < before:
        raise InputError(
            f"--decay-from {checkpoint}: lies before the last phase, which begins at step {before}"
        )
    changed = f"phases.{len(experiment.phases) - 1}.steps={last}"
    return config.override(experiment, [changed]), branch
