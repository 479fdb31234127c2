"""The parameters of a trained run or a base, for those who ask it."""

import dataclasses
import sys
from typing import Any, Literal

import jax
from etils import epath

from bert_jax import base as base_lib
from bert_jax import config
from bert_jax.base import Moments
from bert_jax.config import Experiment, Model, Parallelism
from bert_jax.errors import InputError
from bert_jax.storage import mirror
from bert_jax.storage.workdir import Workdir, load_experiment
from bert_jax.text.tokenizer import Tokenizer
from bert_jax.training import lines as lines_lib
from bert_jax.training import mesh as mesh_lib
from bert_jax.training import optimizer as optimizer_lib
from bert_jax.training import step
from bert_jax.training.checkpoint import Checkpoints
from bert_jax.training.objective import Pretraining
from bert_jax.training.pretraining import Prepared

What = Literal["params", "with_moments"]


@dataclasses.dataclass
class Trained:
    """Parameters with what is known of them.

    Attributes:
      name: of the run or the base.
      model: their shape.
      params: nested dict of float32 arrays, on one device.
      tokenizer: whose ids they know.
      fresh: parts that were never trained.
      step: of the checkpoint; 0 of a base.
      source: in words, where a base comes from; "" of a run.
      experiment: the claim; None of a base.
      manifest: of the corpus; None of a base.
      evaluation: the line of metrics.jsonl of this step; None if there is none.
      moments: of the optimizer, if they were asked for.
    """

    name: str
    model: Model
    params: dict[str, Any]
    tokenizer: Tokenizer
    fresh: tuple[str, ...] = ()
    step: int = 0
    source: str = ""
    experiment: Experiment | None = None
    manifest: dict[str, Any] | None = None
    evaluation: dict[str, Any] | None = None
    moments: Moments | None = None

    @classmethod
    def of(cls, folder: epath.Path, what: What = "params", which: str = "newest") -> "Trained":
        """A base, or a checkpoint of a run.

        Args:
          folder: of a base or a run.
          what: is wanted of it.
          which: of a run's checkpoints: `newest`, `best`, or a step.

        Raises:
          InputError: neither is here, or it is damaged, or has no moments that were asked for.
        """
        run = mirror.opened(folder)
        if base_lib.is_base(run.root):
            _require_newest(folder, which)
            base = base_lib.read(run.root)
            if what == "with_moments" and base.moments is None:
                raise InputError(
                    f"{folder}: --with-optimizer: this base holds weights alone; import it anew "
                    "with --with-optimizer"
                )
            return cls(
                folder.name,
                base.model,
                jax.device_put(base.params),
                base.tokenizer,
                base.fresh,
                source=base.source,
                moments=base.moments if what == "with_moments" else None,
            )
        experiment = load_experiment(run)
        workdir = Workdir(run.root, experiment.run.corpus_dir, run.remote)
        prepared = Prepared.open(workdir.corpus)
        if what == "with_moments" and experiment.optimizer.name != "bert_adam":
            raise InputError(
                f"{folder}: --with-optimizer: optimizer.name={experiment.optimizer.name}; only "
                "bert_adam's moments can go elsewhere"
            )
        state, done = _restored(experiment, workdir, prepared, mesh_lib.one_device(), what, which)
        moments = None
        if what == "with_moments":
            kept = jax.device_get(optimizer_lib.moments(state["optimizer"]))
            moments = Moments(done, kept.mu, kept.nu)
        lines = lines_lib.Lines(workdir.metrics).read()
        found = [x for x in lines if x.get("kind") == "evaluation" and x["step"] == done]
        return cls(
            experiment.name,
            experiment.model,
            state["params"],
            prepared.tokenizer,
            step=done,
            experiment=experiment,
            manifest=prepared.manifest,
            evaluation=found[-1] if found else None,
            moments=moments,
        )


def load_params(
    experiment: Experiment,
    workdir: Workdir,
    prepared: Prepared,
    mesh: jax.sharding.Mesh,
    which: str = "newest",
) -> tuple[Any, int]:
    """Parameters of a checkpoint, and its step; of a base its own, and 0.

    They are whole on each device of the mesh.

    Raises:
      InputError: there is none, or it belongs to another experiment or corpus.
    """
    if base_lib.is_base(workdir.root):
        _require_newest(workdir.root, which)
        base = base_lib.read(workdir.root)
        base_lib.require_same_model(base, experiment.model, str(workdir.root))
        base_lib.require_same_tokenizer(base, prepared.tokenizer, str(workdir.root))
        return jax.device_put(base.params, mesh_lib.replicated(mesh)), 0
    state, done = _restored(experiment, workdir, prepared, mesh, "params", which)
    return state["params"], done


def _require_newest(folder: epath.Path, which: str) -> None:
    if which != "newest":
        raise InputError(f"--checkpoint {which}: {folder} is a base, which has none; leave it out")


def _restored(
    experiment: Experiment,
    workdir: Workdir,
    prepared: Prepared,
    mesh: jax.sharding.Mesh,
    what: What,
    which: str,
) -> tuple[step.State, int]:
    """`params`, and `optimizer` if it is asked for, of a checkpoint, and its step.

    Whole on each device of the mesh: a run's own sharding is for the devices it was trained on.
    """
    if not mirror.names(workdir.checkpoints):
        raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
    with Checkpoints(workdir.checkpoints, experiment.run, "read") as saved:
        newest = saved.newest_step()
        if newest is None:
            raise InputError(f"{workdir.checkpoints}: no checkpoint yet")
        changed = config.differences(saved.claim(newest), experiment, "identity")
        if changed:
            raise InputError(
                f"{workdir.named}: was trained with other settings ({'; '.join(changed)})"
            )
        abstract = step.abstract_state(
            Pretraining(experiment.model), experiment.optimizer, Parallelism(), mesh
        )
        wanted = ("params",) if what == "params" else ("params", "optimizer")
        part = {name: abstract[name] for name in wanted}
        if which == "newest":
            restored = saved.newest(part)
        else:
            restored = saved.restore(saved.named(which), part)
        prepared.require_same(restored.metadata)
        for why in restored.damaged.values():
            print(f"{why}; step {restored.step} is used instead", file=sys.stderr)
        return restored.state, restored.step
