"""An experiment laid over devices in another way."""

import dataclasses
from typing import NamedTuple

from bert_jax.config import Experiment
from bert_jax.plan.topology import Topology


class Variant(NamedTuple):
    """How one phase is laid over devices: values of the fields of `parallelism`."""

    state: str
    remat: str
    accumulation: int

    def __str__(self) -> str:
        return f"{self.state}, remat {self.remat}, accumulation {self.accumulation}"


def variant_of(experiment: Experiment, phase: int) -> Variant:
    """How the experiment lays this phase."""
    laid = experiment.parallelism
    return Variant(laid.state, laid.remat, laid.accumulation_of(phase))


def vary(experiment: Experiment, phase: int, variant: Variant) -> Experiment:
    """The experiment with this phase laid so.

    Raises:
      InputError: the experiment's other settings forbid it.
    """
    parts = [experiment.parallelism.accumulation_of(n) for n in range(len(experiment.phases))]
    parts[phase] = variant.accumulation
    parallelism = dataclasses.replace(
        experiment.parallelism,
        state=variant.state,
        remat=variant.remat,
        accumulation=tuple(parts),
    )
    return dataclasses.replace(experiment, parallelism=parallelism)


def shards_of(experiment: Experiment, topology: Topology) -> int:
    """Into how many parts the batch is cut: devices that share rows count once."""
    return max(topology.devices // experiment.parallelism.tensor, 1)
