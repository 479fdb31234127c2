"""Estimates how long a step takes from what its program does, term by term.

Nothing here was measured on a TPU. The compiler's cycles are close for matrix products (3 to 14 %
too high) and up to three times too high for element-wise work that is not fused into one;
collectives, kernels and random bits it takes for free, so they are added by arithmetic:

    compute       cycles / clock
    kernels       the larger of operations / peak and bytes / memory bandwidth
    random bits   bytes drawn / (RANDOM_BYTES_PER_CYCLE x cores x clock), an assumption
    collectives   bytes over links: (N-1)/N of a gather's or scatter's whole array, twice that of
                  an all-reduce's, over the links of the axes that the group spans: both directions
                  of each where the axis is a ring, one where it is not; less what other work covers
    latency       HOP_SECONDS, an assumption, for each chip on the way of what is not covered
"""

import dataclasses
import math
from collections.abc import Sequence

from bert_jax import hardware
from bert_jax.plan.hlo import Collective, Kernel, Program
from bert_jax.plan.topology import Topology

# A register of 4,096 bytes in 16 cycles: Philox's ten rounds on the four units of a vector core.
RANDOM_BYTES_PER_CYCLE = 256
# "How to Scale Your Model" takes as much for the way from a chip to the next.
HOP_SECONDS = 1e-6

# Where a device is: chip coordinates, then its number on the chip.
Place = Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """The terms of a step's time."""

    compute: float
    kernels: float
    random_bits: float
    collectives: float
    latency: float

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return sum(dataclasses.astuple(self))


@dataclasses.dataclass(frozen=True)
class Route:
    """The links that a group of devices has for itself.

    Attributes:
      size: devices of the group.
      bandwidth: into each device, bytes a second.
      hops: chips from the farthest device.
    """

    size: int
    bandwidth: float
    hops: int


def estimate(
    program: Program, topology: Topology, places: Sequence[Place], compute_dtype: str
) -> Seconds:
    """Returns how long a step takes, term by term.

    Args:
      program: of one device.
      topology: where it runs.
      places: of the devices, in the order of the mesh.
      compute_dtype: of matrix products; says which peak a kernel cannot exceed.
    """
    tpu = topology.tpu
    transfer = wait = 0.0
    for collective in program.collectives:
        seconds, latency = collective_seconds(collective, topology, places)
        transfer += collective.count * seconds
        wait += collective.count * latency
    drawn = RANDOM_BYTES_PER_CYCLE * tpu.cores_per_device * tpu.clock_hz
    return Seconds(
        compute=program.cycles / tpu.clock_hz,
        kernels=sum(k.count * kernel_seconds(k, tpu, compute_dtype) for k in program.kernels),
        random_bits=program.random_bytes / drawn,
        collectives=transfer,
        latency=wait,
    )


def kernel_seconds(kernel: Kernel, tpu: hardware.Tpu, compute_dtype: str) -> float:
    """Returns the least seconds of one run of a kernel on a device."""
    peak = hardware.PEAK_FLOPS[tpu.kind][compute_dtype]
    bandwidth = tpu.memory_bandwidth / tpu.devices_per_chip
    return max((kernel.flops or 0) / peak, kernel.bytes / bandwidth)


def collective_seconds(
    collective: Collective, topology: Topology, places: Sequence[Place]
) -> tuple[float, float]:
    """Returns (transfer, latency) of one run of a collective, in seconds, less what work covers."""
    links = route(collective.group, topology, places)
    if links.size == 1:
        return 0.0, 0.0
    share = (links.size - 1) / links.size
    rounds = 1
    if collective.kind == "all-reduce":
        rounds = 2  # a scatter, then a gather
    elif collective.kind == "collective-permute":
        share = 1.0
    transfer = rounds * share * collective.payload / links.bandwidth
    latency = rounds * links.hops * HOP_SECONDS
    if collective.cover is None:
        return transfer, latency
    left = max(0.0, transfer + latency - collective.cover / topology.tpu.clock_hz)
    return left, 0.0


def route(group: Sequence[int], topology: Topology, places: Sequence[Place]) -> Route:
    """Returns the links that carry a group's collective.

    Groups of the same kind work at the same time. Where they are made of one core of each chip,
    the groups of the other cores share the links. Between the cores of one chip all links' rate
    is assumed.
    """
    members = [places[device] for device in group]
    link = topology.tpu.link_bandwidth
    directions = hops = 0
    for axis, length in enumerate(topology.shape):
        spanned = len({place[axis] for place in members})
        if spanned == 1:
            continue
        ring = spanned == length and topology.is_ring(axis)
        directions += 2 if ring else 1
        hops += math.ceil(spanned / 2) if ring else spanned - 1
    if directions == 0:
        return Route(len(group), 2 * len(topology.shape) * link, 0)
    cores = len({place[-1] for place in members})
    return Route(len(group), directions * link * cores / topology.tpu.devices_per_chip, hops)
