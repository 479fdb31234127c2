"""Fine-tuning in a workdir."""

import dataclasses
from typing import Any

from bert_jax import resolve
from bert_jax.config import Finetuning
from bert_jax.tasks.job import FinetuningJob
from bert_jax.training import session
from bert_jax.training.progress import Progress
from bert_jax.workdir import Workdir


def finetune(
    claim: Finetuning,
    base: str | None,
    root: str | None,
    progress: Progress,
    origin: dict[str, Any] | None = None,
) -> session.Outcome:
    """Adapts a base to a task, or goes on with it.

    Args:
      claim: the task, and how.
      base: a base or a run; None: the one that the claim or the run here names.
      root: the workdir; None: runs/NAME.
      progress: shows what happens.
      origin: see session.run.

    Raises:
      InputError: no base, examples that cannot be read, or a workdir of another run.
    """
    workdir = Workdir(root or f"runs/{claim.name}")
    if base is None and not claim.init_from and workdir.experiment.exists():
        base = resolve.load_saved(workdir, Finetuning).init_from
    if base is not None:
        claim = dataclasses.replace(claim, init_from=base)
    job = FinetuningJob(claim, workdir, progress.say)
    return session.run(job, workdir, progress, origin=origin)
