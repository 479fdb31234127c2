"""Names of TPU slices like v5e:8x8, and what follows from them."""

import dataclasses
import math
from typing import Any

from bert_jax import hardware
from bert_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice of a TPU pod.

    Attributes:
      name: as it is asked for, v5e:8x8.
      shape: chips along each axis of the torus.
      tpu: what its chips can do.
    """

    name: str
    shape: tuple[int, ...]
    tpu: hardware.Tpu

    @property
    def chips(self) -> int:
        """How many are rented."""
        return math.prod(self.shape)

    @property
    def devices(self) -> int:
        """How many jax sees: on v2 and v3 a chip is two."""
        return self.chips * self.tpu.devices_per_chip

    @property
    def device_memory(self) -> float:
        """Bytes of one device's memory."""
        return self.tpu.memory_bytes / self.tpu.devices_per_chip

    def peak_flops(self, compute_dtype: str) -> float:
        """Operations a second of all devices."""
        return hardware.PEAK_FLOPS[self.tpu.kind][compute_dtype] * self.devices

    def is_ring(self, axis: int) -> bool:
        """Whether the axis is closed, its last chip linked to its first."""
        if self.tpu.ring == "cubes":
            return all(length % 4 == 0 for length in self.shape)
        return self.shape[axis] == self.tpu.ring

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What the compiler must be told beside the name."""
        options: dict[str, Any] = {}
        if self.chips == 1:
            options["chips_per_host_bounds"] = [1, 1, 1]
        if self.name.startswith("v4:"):
            # As on a rented v4: the two cores of a chip are one device. Left to itself the
            # compiler takes them for two.
            options["chip_config_name"] = "megacore"
        return options


def parse(name: str) -> Topology:
    """A slice of those that are offered.

    Raises:
      InputError: no such generation, or no such slice; the known ones are named.
    """
    generation, _, shape = name.partition(":")
    if generation not in hardware.TPUS:
        known = "; ".join(f"{word}: {', '.join(tpu.slices)}" for word, tpu in hardware.TPUS.items())
        raise InputError(f"--topology {name}: unknown; write v5e:8x8 or the like, of {known}")
    tpu = hardware.TPUS[generation]
    if shape not in tpu.slices:
        raise InputError(
            f"--topology {name}: no such slice of {generation}; choose one of "
            + ", ".join(f"{generation}:{known}" for known in tpu.slices)
        )
    return Topology(name, tuple(map(int, shape.split("x"))), tpu)


def parse_list(names: str) -> list[Topology]:
    """Slices separated by commas, each once."""
    return [parse(name.strip()) for name in dict.fromkeys(names.split(","))]
