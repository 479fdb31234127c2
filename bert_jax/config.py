"""The claim a run makes: frozen dataclasses, validated where they are built.

An experiment file returns an `Experiment`; it is saved with the run as JSON.
"""

import contextvars
import pathlib
import runpy
import traceback
from dataclasses import dataclass, field
from typing import Any

from bert_jax.errors import InputError
from bert_jax.finetuning import Adapt, Finetuning, Task
from bert_jax.section import Section
from bert_jax.sections import SKIPPED_STEPS, Corpus, Data, Mesh, Model, Optimizer, Phase, Run

__all__ = [
    "SKIPPED_STEPS",
    "Adapt",
    "Corpus",
    "Data",
    "Experiment",
    "Finetuning",
    "InputError",
    "Loaded",
    "Mesh",
    "Model",
    "Optimizer",
    "Phase",
    "Run",
    "Task",
    "load_file",
    "parent",
]


@dataclass(frozen=True, kw_only=True)
class Experiment(Section):
    """One runnable claim: all a run needs to know."""

    kind = "identity"
    label = "experiment"

    name: str
    seed: int = 0
    # A folder that `bert-jax import` made, whose weights the run begins with; empty: fresh ones.
    init_from: str = ""
    model: Model = field(default_factory=Model)
    corpus: Corpus
    data: Data = field(default_factory=Data)
    phases: tuple[Phase, ...]
    optimizer: Optimizer = field(default_factory=Optimizer)
    mesh: Mesh = field(default_factory=Mesh)
    run: Run = field(default_factory=Run)

    @property
    def total_steps(self) -> int:
        """Steps of all phases together; the learning-rate schedule runs over their sum."""
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, done: int) -> tuple[int, int]:
        """Number of the phase of the step after `done` steps, and the first step of that phase."""
        first = 0
        for number, phase in enumerate(self.phases):
            if done < first + phase.steps:
                return number, first
            first += phase.steps
        raise ValueError(f"{done} steps are all of them")

    def _validate(self) -> None:
        self._require_folder_name("name")
        self._require(0 <= self.seed < 2**32, "seed", "must be in [0, 2**32)")
        self._require(len(self.phases) > 0, "phases", "name at least one phase")
        lengths = {
            f"phases.{i}.sequence_length": p.sequence_length for i, p in enumerate(self.phases)
        }
        for where, length in lengths.items():
            if length % 4 and self.model.dropout_rng == "threefry8":
                raise InputError(
                    f"{where}={length}: must be a multiple of 4 with model.dropout_rng=threefry8"
                )
        lengths["data.eval_sequence_length"] = self.data.eval_sequence_length
        for where, length in lengths.items():
            if length > self.model.max_position_embeddings:
                raise InputError(
                    f"{where}={length}: longer than the position table, "
                    f"model.max_position_embeddings={self.model.max_position_embeddings}"
                )
        if len(self.mesh.accumulation) not in (1, len(self.phases)):
            raise InputError(
                f"mesh.accumulation={self.mesh.accumulation}: give one number, or one for each of "
                f"the {len(self.phases)} phases"
            )
        for i, phase in enumerate(self.phases):
            where = f"phases.{i}.batch_size={phase.batch_size}"
            parts = self.mesh.accumulation_of(i)
            if phase.batch_size % parts:
                raise InputError(f"{where}: not a multiple of mesh.accumulation={parts}")
            if phase.batch_size % self.optimizer.reference_replicas:
                raise InputError(
                    f"{where}: not a multiple of "
                    f"optimizer.reference_replicas={self.optimizer.reference_replicas}"
                )
            if phase.steps * phase.batch_size >= 2**32:
                raise InputError(f"phases.{i}.steps={phase.steps}: over 2**32 rows in one phase")
        if self.model.num_attention_heads % self.mesh.tensor:
            raise InputError(
                f"mesh.tensor={self.mesh.tensor}: does not divide "
                f"model.num_attention_heads={self.model.num_attention_heads}"
            )
        if self.optimizer.clip == "per_replica":
            if max(self.mesh.accumulation) != 1:
                raise InputError(
                    f"mesh.accumulation={max(self.mesh.accumulation)}: optimizer.clip=per_replica "
                    "already takes one backward pass a replica; set mesh.accumulation=1"
                )
            if self.mesh.parallelism == "zero3":
                raise InputError(
                    "mesh.parallelism=zero3: its gradients arrive summed, so "
                    "optimizer.clip=per_replica cannot clip each replica's own; use clip=global"
                )
        if self.optimizer.warmup_steps >= self.total_steps:
            raise InputError(
                f"optimizer.warmup_steps={self.optimizer.warmup_steps}: must be below the "
                f"{self.total_steps} steps of all phases"
            )


@dataclass
class Loaded:
    """What an experiment file says.

    Attributes:
      folder: where it stands.
      parent: name and claim of the file it varies; None if it stands alone.
      experiment: its own claim.
    """

    folder: pathlib.Path
    parent: tuple[str, Any] | None = None
    experiment: Any = None


_loading: contextvars.ContextVar[Loaded] = contextvars.ContextVar("experiment file being run")


def load_file(path: pathlib.Path) -> Loaded:
    """Runs an experiment file and returns what its `experiment()` returns, and what it varies.

    Raises:
      InputError: the file raises, has no `experiment`, or returns something else.
    """
    loaded = Loaded(path.parent)
    token = _loading.set(loaded)
    try:
        value = runpy.run_path(str(path), run_name=path.stem)["experiment"]()
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except (Exception, SystemExit) as error:
        lines = [
            f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)
        ]
        line = getattr(error, "lineno", None) or (lines[-1] if lines else None)
        place = f"{path}:{line}" if line else str(path)
        if isinstance(error, KeyError) and error.args == ("experiment",) and not lines:
            raise InputError(f"{path}: defines no experiment() -> Experiment") from error
        raise InputError(f"{place}: {type(error).__name__}: {error}") from error
    finally:
        _loading.reset(token)
    if not isinstance(value, Experiment | Finetuning):
        raise InputError(
            f"{path}: experiment() returned {type(value).__name__}, not bert_jax.config.Experiment "
            "or Finetuning"
        )
    loaded.experiment = value
    return loaded


def parent(name: str) -> Any:
    """The claim in the file `name` beside the experiment file that calls this, to be varied."""
    loading = _loading.get()
    path = loading.folder / name
    if not path.is_file():
        raise InputError(f"parent({name!r}): no such experiment file in {loading.folder}")
    experiment = load_file(path).experiment
    loading.parent = (name, experiment)
    return experiment
