"""Estimates how long a step takes from what its program does, term by term.

Nothing here was measured on a TPU. A step is followed along its schedule. Work and kernels take
their time; a transfer begins when its links are free, the links of an axis serving one after the
other; what waits for a transfer waits until it has arrived. So a transfer costs only the wait that
work and kernels in between leave, and each stretch of work hides one transfer a link, not several.

    products      matrix products: the compiler's estimate, which leaves out much of what is fused
                  into one, or the cycles that it schedules, whichever is more / clock
    copies        bytes of the device's memory (HBM) read and written / its bandwidth, and
                  COPY_SECONDS to begin; at most what the compiler estimates
    other         the compiler's estimate / clock: up to three times too much
    kernels       the larger of cycles as the compiler schedules them / clock, and bytes / memory
                  bandwidth; of those whose cycles are not known the latter, and they are named
    random bits   bytes drawn / (RANDOM_BYTES_PER_CYCLE x cores x clock)
    prefetch      waits for what the compiler fetches from memory, or puts there, during other work
    issue         ISSUE_SECONDS, an assumption, for each permutation
    collectives   waits, less latency. A transfer takes (N-1)/N of a gather's or scatter's whole
                  array, twice that of an all-reduce's, over the links of the axes that the group
                  spans: both directions of each where the axis is a ring, one where it is not;
                  a permutation takes what its slowest pair does
    network       waits for the sums of slices, one after the other: bytes as of an all-reduce, over
                  a chip's share of the data centre's network; and NETWORK_SECONDS, an assumption,
                  for each of two ways
    latency       the last part of each wait: HOP_SECONDS, an assumption, for each chip on the way;
                  a gather over several axes at once is one ring through all chips, both ways round
"""

import collections
import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from bert_jax.tools.plan import work
from bert_jax.tools.plan.schedule import SEND, Collective, Program, Step
from bert_jax.tools.plan.topology import Topology

# TPUs draw bits by an instruction of their own. The compiler schedules a register of 4,096 bytes
# every other cycle and little besides: 1,940 bytes a cycle on v5e, 1,990 on v3.
RANDOM_BYTES_PER_CYCLE = 1950
# "How to Scale Your Model" takes as much for the way from a chip to the next.
HOP_SECONDS = 1e-6
# A copy begins with a round to memory. The compiler charges 1.2 us for the smallest.
COPY_SECONDS = 1e-6
# Time in which a core starts the transfer of a permutation and checks its end. Not published.
ISSUE_SECONDS = 0.25e-6
# From a chip over its host to one of another slice; nobody publishes it.
NETWORK_SECONDS = 50e-6
ASSUMPTIONS = {
    "random_bytes_per_cycle": RANDOM_BYTES_PER_CYCLE,
    "hop_seconds": HOP_SECONDS,
    "copy_seconds": COPY_SECONDS,
    "issue_seconds": ISSUE_SECONDS,
    "network_seconds": NETWORK_SECONDS,
}
# Among axes of the torus: the way between the cores of a chip.
WITHIN_CHIPS = -1
# Among links: the way between a device and its memory, and the network between slices.
_MEMORY, NETWORK = -2, -3

# Where a device is: chip coordinates, then its number on the chip.
Place = Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """A step's time: its terms; and what they come from."""

    terms: dict[str, float]  # by name, all of TERMS
    # For each of the program's collectives, what all its runs are waited for.
    waits: tuple[float, ...]
    busy: dict[int, float]  # for each axis, or WITHIN_CHIPS, how long its links transfer

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return sum(self.terms.values())


TERMS = (
    *("products", "copies", "other", "kernels", "random_bits"),
    *("prefetch", "issue", "collectives", "latency", "network"),
)


class Cost(NamedTuple):
    """One run of a collective: seconds, and whose links it has for itself meanwhile."""

    transfer: float
    latency: float
    axes: frozenset[int]  # WITHIN_CHIPS among them where cores of one chip take part


def estimate(program: Program, topology: Topology, places: Sequence[Place]) -> Seconds:
    """Returns how long a step takes, term by term.

    `places` are the devices', in the order of the mesh.
    """
    timeline = _Timeline(program, topology, places)
    timeline.run(program.schedule, 1)
    return Seconds(
        terms={name: timeline.terms[name] for name in TERMS},
        waits=tuple(timeline.waits),
        busy={axis: busy for axis, busy in sorted(timeline.busy.items()) if axis != NETWORK},
    )


class _Timeline:
    """Follows a schedule."""

    def __init__(self, program: Program, topology: Topology, places: Sequence[Place]):
        tpu = topology.tpu
        self.clock_hz = tpu.clock_hz
        self.bandwidth = topology.device_bandwidth
        self.drawn = RANDOM_BYTES_PER_CYCLE * tpu.cores_per_device * tpu.clock_hz
        self.kernels = program.kernels
        self.permutes = [bool(one.pairs) for one in program.collectives]
        self.costs = [cost(one, topology, places) for one in program.collectives]
        self.now = 0.0  # seconds since the step began
        self.free: dict[int, float] = {}  # when the links of an axis will be
        # By name of the start, the collective's place, or None of a fetch, and when it arrives.
        self.under_way: dict[str, tuple[int | None, float]] = {}
        # As `Seconds` has them, each as often as it occurs.
        self.terms: dict[str, float] = collections.defaultdict(int)
        self.waits = [0.0] * len(program.collectives)
        self.busy: dict[int, float] = collections.defaultdict(int)

    def run(self, steps: Sequence[Step], times: float) -> None:
        """Follows steps once that occur so often."""
        for step in steps:
            match step:
                case "work", work.COPIES, cycles, size:
                    arrival = self._move(size)
                    self._spend("prefetch", arrival - size / self.bandwidth - self.now, times)
                    seconds = COPY_SECONDS + size / self.bandwidth
                    self._spend("copies", min(cycles / self.clock_hz, seconds), times)
                case "work", kind, cycles, _:
                    self._spend(kind, cycles / self.clock_hz, times)
                case "bits", size:
                    self._spend("random_bits", size / self.drawn, times)
                case "kernel", number:
                    kernel = self.kernels[number]
                    self._move(kernel.bytes)
                    scheduled = (kernel.cycles or 0) / self.clock_hz
                    self._spend("kernels", max(scheduled, kernel.bytes / self.bandwidth), times)
                case "start", number, name:
                    self._spend("issue", ISSUE_SECONDS * self.permutes[number], times)
                    self._start(number, name, times)
                case "fetch", size, name:
                    self.under_way[name] = None, self._move(size)
                case "done", name:
                    number, arrival = self.under_way.pop(name)
                    wait = max(0.0, arrival - self.now)
                    if number is None:
                        self._spend("prefetch", wait, times)
                        continue
                    latency = min(wait, self.costs[number].latency)
                    self.waits[number] += times * wait
                    if NETWORK in self.costs[number].axes:
                        self._spend("network", wait, times)
                        continue
                    self._spend("collectives", wait - latency, times)
                    self._spend("latency", latency, times)
                case "loop", rounds, body:
                    self._loop(rounds, body, times)
                case "either", share, first, second:
                    began, queues = self.now, dict(self.free)
                    self.run(first, times * share)
                    ended, free = self.now, self.free
                    self.now, self.free = began, queues
                    self.run(second, times * (1 - share))
                    self.now = share * ended + (1 - share) * self.now
                    for queue in free.keys() | queues.keys():
                        ends = free.get(queue, began), queues.get(queue, began)
                        queues[queue] = share * ends[0] + (1 - share) * ends[1]

    def _spend(self, term: str, seconds: float, times: float) -> None:
        self.now += seconds
        self.terms[term] += times * seconds

    def _move(self, size: int) -> float:
        """Queues bytes for the way from or to memory; returns when they have arrived."""
        begin = max(self.now, self.free.get(_MEMORY, 0.0))
        self.free[_MEMORY] = begin + size / self.bandwidth
        return self.free[_MEMORY]

    def _start(self, number: int, name: str, times: float) -> None:
        transfer, latency, axes = self.costs[number]
        begin = max([self.now, *(self.free.get(axis, 0.0) for axis in axes)])
        for axis in axes:
            self.free[axis] = begin + transfer
            self.busy[axis] += times * transfer
        self.under_way[name] = number, begin + transfer + latency

    def _loop(self, rounds: int, body: Sequence[Step], times: float) -> None:
        """Follows rounds until the links are free at the start of one; all after it are alike."""
        while rounds > 0:
            alike = 1 if max(self.free.values(), default=0.0) > self.now else rounds
            began = self.now
            self.run(body, times * alike)
            self.now += (alike - 1) * (self.now - began)
            rounds -= alike


def cost(collective: Collective, topology: Topology, places: Sequence[Place]) -> Cost:
    """Returns what one run of a collective takes.

    Groups of the same kind work at the same time. Where they are made of one core of each chip,
    the groups of the other cores share the links. Between the cores of one chip all links' rate
    is assumed.
    """
    if collective.kind == SEND:
        rate = topology.tpu.network_bandwidth
        assert rate is not None  # a topology of several slices has one
        seconds = _network_bytes(collective, topology) / rate
        return Cost(seconds, 2 * NETWORK_SECONDS, frozenset({NETWORK}))
    link = topology.tpu.link_bandwidth
    if collective.pairs:
        bandwidth, hops, axes = _permutation(collective.pairs, topology, places)
        return Cost(collective.payload / bandwidth, hops * HOP_SECONDS, axes)
    members = [places[device] for device in collective.group]
    if len(members) <= 1:
        return Cost(0.0, 0.0, frozenset())
    directions = hops = 0
    axes = set()
    for axis, length in enumerate(topology.shape):
        spanned = len({place[axis] for place in members})
        if spanned <= 1:
            continue
        ring = spanned == length and topology.is_ring(axis)
        # Groups of devices that are no neighbours share the links between them.
        coordinates = [place[axis] for place in members]
        apart = (max(coordinates) - min(coordinates)) // (spanned - 1)
        directions += (2 if ring else 1) / apart
        hops += math.ceil(spanned / 2) if ring else apart * (spanned - 1)
        axes.add(axis)
    # One ring through all, both ways round. The compiler names no emitter of asynchronous gathers.
    in_a_ring = collective.emitter.startswith("1D") or collective.asynchronous
    if collective.kind == "all-gather" and len(axes) > 1 and in_a_ring:
        directions, hops = 2, len(members) // 2
    cores = len({place[-1] for place in members})
    if cores > 1:
        axes.add(WITHIN_CHIPS)
    bandwidth = directions * link * cores / topology.tpu.devices_per_chip
    if directions == 0:
        bandwidth = 2 * len(topology.shape) * link
    rounds = 2 if collective.kind == "all-reduce" else 1  # a scatter, then a gather
    share = (len(members) - 1) / len(members)
    transfer = rounds * share * collective.payload / bandwidth
    return Cost(transfer, rounds * hops * HOP_SECONDS, frozenset(axes))


def _network_bytes(collective: Collective, topology: Topology) -> float:
    """Returns the bytes that a device gives to the network in one sum over slices.

    Each slice adds up a part for all, and gives it to all.
    """
    return 2 * (topology.slices - 1) / topology.slices * collective.payload


def network(program: Program, topology: Topology) -> dict[str, float | None]:
    """Returns bytes that a device gives to the network in a step, and its seconds and rate."""
    rate = topology.tpu.network_bandwidth
    sends = [one for one in program.collectives if one.kind == SEND]
    size = sum(one.count * _network_bytes(one, topology) for one in sends)
    return {"bytes": size, "bandwidth": rate, "busy": size / rate if rate else 0.0}


def _permutation(
    pairs: Sequence[tuple[int, int]], topology: Topology, places: Sequence[Place]
) -> tuple[float, int, frozenset[int]]:
    """Returns bytes a second and hops of the slowest pair, and all axes.

    A pair's data go along one axis after the other, round a ring the shorter way. All pairs send
    at the same time, and one direction of a link serves all that go through it.
    """
    load: collections.Counter[tuple] = collections.Counter()
    hops = 0
    for source, target in pairs:
        at, way = list(places[source][:-1]), 0
        for axis, length in enumerate(topology.shape):
            distance = places[target][axis] - at[axis]
            if topology.is_ring(axis) and 2 * abs(distance) > length:
                distance -= length if distance > 0 else -length
            sign = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                load[axis, sign, *at] += 1
                at[axis] = (at[axis] + sign) % length
            way += abs(distance)
        hops = max(hops, way)
    link = topology.tpu.link_bandwidth
    bandwidth = link / max(load.values()) if load else 2 * len(topology.shape) * link
    return bandwidth, hops, frozenset(key[0] for key in load) or frozenset({WITHIN_CHIPS})
