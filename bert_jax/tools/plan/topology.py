"""TPU slices, with names like v5e:8x8 and 4*v5e:8x8, and layouts of training steps."""

import dataclasses
import math
from typing import Any, NamedTuple

from bert_jax import hardware
from bert_jax.config import Experiment
from bert_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of a TPU pod, or several slices joined by the data centre's network."""

    name: str  # such as v5e:8x8
    shape: tuple[int, ...]  # chips along each axis of the torus of one slice
    tpu: hardware.Tpu  # facts about its chips
    slices: int = 1

    @property
    def slice_name(self) -> str:
        """Returns the name of one of the slices."""
        return self.name.rpartition("*")[2]

    @property
    def chips(self) -> int:
        """Returns the number of chips."""
        return math.prod(self.shape) * self.slices

    @property
    def devices(self) -> int:
        """Returns the number of devices in jax: a chip of v2, v3 or TPU7x is two."""
        return self.chips * self.tpu.devices_per_chip

    @property
    def device_memory(self) -> float:
        """Bytes of one device's memory."""
        return self.tpu.memory_bytes / self.tpu.devices_per_chip

    @property
    def device_bandwidth(self) -> float:
        """Bytes a second from and to the memory of one device."""
        return self.tpu.memory_bandwidth / self.tpu.devices_per_chip

    def peak_flops(self, compute_dtype: str) -> float:
        """Returns the peak of all devices, operations a second."""
        return hardware.PEAK_FLOPS[self.tpu.kind][compute_dtype] * self.devices

    def is_ring(self, axis: int) -> bool:
        """Returns whether the axis is a ring: its last chip is linked to its first."""
        if self.tpu.ring == "cubes":  # slices of whole cubes of 4x4x4 chips have rings
            return all(length % 4 == 0 for length in self.shape)
        return self.shape[axis] == self.tpu.ring

    @property
    def compiler_options(self) -> dict[str, Any]:
        """Returns the options that the compiler needs in addition to the name."""
        options: dict[str, Any] = {"num_slices": self.slices} if self.slices > 1 else {}
        if self.chips == self.slices:  # one chip on its host; by default a host has several
            options["chips_per_host_bounds"] = [1, 1, 1]
        if self.slice_name.startswith("v4:"):
            # On a v4 the two cores of a chip are one device. By default the compiler takes them
            # for two.
            options["chip_config_name"] = "megacore"
        return options


def parse(name: str) -> Topology:
    """Returns the slice named like v5e:8x8, or the slices named like 4*v5e:8x8."""
    count, star, slice_name = name.rpartition("*")
    generation, _, shape = slice_name.partition(":")
    if generation not in hardware.TPUS:
        known = "; ".join(f"{word}: {', '.join(tpu.slices)}" for word, tpu in hardware.TPUS.items())
        raise InputError(f"--topology {name}: unknown; write, e.g., v5e:8x8; known are {known}")
    tpu = hardware.TPUS[generation]
    if shape not in tpu.slices:
        raise InputError(
            f"--topology {name}: no such slice of {generation}; choose one of "
            + ", ".join(f"{generation}:{known}" for known in tpu.slices)
        )
    slices = int(count) if count.isdecimal() else 0
    if star and (slices < 2 or tpu.network_bandwidth is None):
        joined = [word for word, tpu in hardware.TPUS.items() if tpu.network_bandwidth]
        raise InputError(
            f"--topology {name}: write 2*v5e:8x8 or the like for several slices, of "
            + ", ".join(joined)
        )
    return Topology(name, tuple(map(int, shape.split("x"))), tpu, slices or 1)


def parse_list(names: str) -> list[Topology]:
    """Returns the slices of names separated by commas, each once."""
    return [parse(name) for name in dict.fromkeys(map(str.strip, names.split(",")))]


class Layout(NamedTuple):
    """Settings of `parallelism` for one phase; not the layout of an array in memory."""

    state: str  # how the training state is sharded, such as zero1
    remat: str
    accumulation: int

    def __str__(self) -> str:
        return f"{self.state}, remat {self.remat}, accumulation {self.accumulation}"


def layout_of(experiment: Experiment, phase: int) -> Layout:
    """Returns the layout of a phase in the experiment."""
    parallelism = experiment.parallelism
    return Layout(parallelism.state, parallelism.remat, parallelism.accumulation_of(phase))


def with_layout(experiment: Experiment, phase: int, layout: Layout) -> Experiment:
    """Returns the experiment with another layout of a phase."""
    counts = [experiment.parallelism.accumulation_of(n) for n in range(len(experiment.phases))]
    counts[phase] = layout.accumulation
    changed = layout._asdict() | {"accumulation": tuple(counts)}
    parallelism = dataclasses.replace(experiment.parallelism, **changed)
    return dataclasses.replace(experiment, parallelism=parallelism)


def shards_of(experiment: Experiment, topology: Topology) -> int:
    """Returns the number of parts into which devices divide the batch."""
    return max(topology.devices // experiment.parallelism.tensor, 1)
