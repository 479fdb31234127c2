"""The parameters of a trained run, for those who ask it."""

from typing import Any

import jax

from bert_jax import resolve
from bert_jax.config import Experiment, InputError
from bert_jax.training import step
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.prepared import Prepared
from bert_jax.workdir import Workdir


def load_params(
    experiment: Experiment, workdir: Workdir, prepared: Prepared, mesh: jax.sharding.Mesh
) -> tuple[Any, int]:
    """Parameters of the newest checkpoint, and its step.

    Raises:
      InputError: there is none, or it belongs to another experiment or corpus.
    """
    if not workdir.checkpoints.exists():
        raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
    with Checkpoints(workdir.checkpoints, experiment.run.keep_checkpoints, "read") as saved:
        if saved.latest_step is None:
            raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
        changed = resolve.differences(saved.claim(saved.latest_step), experiment, "identity")
        if changed:
            raise InputError(
                f"{workdir.root}: was trained with other settings ({'; '.join(changed)})"
            )
        abstract = step.abstract_state(
            experiment.model, experiment.optimizer, experiment.seed, mesh
        )
        state, metadata = saved.restore(saved.latest_step, {"params": abstract["params"]})
        prepared.require_same(metadata)
        return state["params"], saved.latest_step
