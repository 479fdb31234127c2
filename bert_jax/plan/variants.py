"""An experiment laid over devices in another way."""

import dataclasses
from typing import NamedTuple

from bert_jax.config import Experiment


class Variant(NamedTuple):
    """How one phase is laid over devices: values of the fields of `mesh`."""

    parallelism: str
    remat: str
    accumulation: int

    def __str__(self) -> str:
        return f"{self.parallelism}, remat {self.remat}, accumulation {self.accumulation}"


def variant_of(experiment: Experiment, phase: int) -> Variant:
    """How the experiment lays this phase."""
    del phase
    mesh = experiment.mesh
    return Variant(mesh.parallelism, mesh.remat, mesh.accumulation)


def vary(experiment: Experiment, phase: int, variant: Variant) -> Experiment:
    """The experiment with this phase laid so.

    Raises:
      InputError: the experiment's other settings forbid it.
    """
    del phase
    mesh = dataclasses.replace(experiment.mesh, **variant._asdict())
    return dataclasses.replace(experiment, mesh=mesh)
