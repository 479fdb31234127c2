"""Estimates the time of a step from its program, term by term.

Nothing here was measured on a TPU. The estimate follows the schedule of a step. A transfer begins
when its links are free; the links of an axis serve one transfer at a time. What needs a transfer
waits for its arrival. So a transfer costs only the wait that remains after the work and kernels in
between, and each stretch of work hides one transfer per link, not several.

    products      matrix products: the compiler's estimate, which leaves out much of what is fused
                  into one, or the cycles that it schedules, whichever is more / clock
    copies        bytes of the device's memory (HBM) read and written / its bandwidth, and
                  COPY_SECONDS to begin; at most what the compiler estimates
    other         the compiler's estimate / clock: up to three times too much
    kernels       the larger of cycles as the compiler schedules them / clock, and bytes / memory
                  bandwidth; of those whose cycles are not known the latter, and they are named
    random bits   bytes drawn / (RANDOM_BYTES_PER_CYCLE x cores x clock)
    prefetch      waits for transfers from or to memory during other work
    issue         ISSUE_SECONDS, an assumption, for each permutation
    collectives   waits, less latency. A transfer moves (N-1)/N of the whole array of a gather or
                  scatter, twice as much for an all-reduce, over the links of the axes that the
                  group spans: in both directions if the axis is a ring, else in one; a permutation
                  takes as long as its slowest pair
    network       waits for the sums over slices, one after the other: bytes as for an all-reduce,
                  over a chip's share of the data centre's network; and NETWORK_SECONDS, an
                  assumption, for each of two ways
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

# TPUs draw random bits by a special instruction. The compiler schedules a register of 4,096 bytes
# every other cycle with little else: 1,940 bytes a cycle on v5e, 1,990 on v3.
RANDOM_BYTES_PER_CYCLE = 1950
# Time from a chip to the next, as in "How to Scale Your Model".
HOP_SECONDS = 1e-6
# A copy begins with a round trip to memory. The compiler charges 1.2 us for the smallest copy.
COPY_SECONDS = 1e-6
# Time in which a core starts the transfer of a permutation and checks its end. Not published.
ISSUE_SECONDS = 0.25e-6
# Time from a chip over its host to a chip of another slice. Not published.
NETWORK_SECONDS = 50e-6
ASSUMPTIONS = {
    "random_bytes_per_cycle": RANDOM_BYTES_PER_CYCLE,
    "hop_seconds": HOP_SECONDS,
    "copy_seconds": COPY_SECONDS,
    "issue_seconds": ISSUE_SECONDS,
    "network_seconds": NETWORK_SECONDS,
}
# Number of the links between the cores of a chip, next to the axes of the torus.
WITHIN_CHIPS = -1
# Numbers of the links between a device and its memory, and of the network between slices.
_MEMORY, NETWORK = -2, -3

# The location of a device: chip coordinates, then its number on the chip.
Location = Sequence[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Seconds:
    """The time of a step in terms, with waits and transfer times."""

    terms: dict[str, float]  # {name: seconds}, all of TERMS
    # For each of the program's collectives, the waits for all its runs.
    waits: tuple[float, ...]
    busy: dict[int, float]  # {axis or WITHIN_CHIPS: transfer time of its links}

    @property
    def total(self) -> float:
        """The sum of all terms."""
        return sum(self.terms.values())


TERMS = (
    *("products", "copies", "other", "kernels", "random_bits"),
    *("prefetch", "issue", "collectives", "latency", "network"),
)


class Cost(NamedTuple):
    """The seconds of one run of a collective, and the links that it occupies."""

    transfer: float
    latency: float
    axes: frozenset[int]  # includes WITHIN_CHIPS if several cores of a chip take part


def estimate(program: Program, topology: Topology, places: Sequence[Location]) -> Seconds:
    """Returns the time of a step, term by term.

    `places` are the locations of the devices, in the order of the mesh.
    """
    timeline = _Timeline(program, topology, places)
    timeline.run(program.schedule, 1)
    return Seconds(
        terms={name: timeline.terms[name] for name in TERMS},
        waits=tuple(timeline.waits),
        busy={axis: busy for axis, busy in sorted(timeline.busy.items()) if axis != NETWORK},
    )


class _Timeline:
    def __init__(self, program: Program, topology: Topology, places: Sequence[Location]):
        tpu = topology.tpu
        self.clock_hz = tpu.clock_hz
        self.bandwidth = topology.device_bandwidth
        self.random_bandwidth = RANDOM_BYTES_PER_CYCLE * tpu.cores_per_device * tpu.clock_hz
        self.kernels = program.kernels
        self.permutes = [bool(collective.pairs) for collective in program.collectives]
        self.costs = [cost(collective, topology, places) for collective in program.collectives]
        self.now = 0.0  # seconds since the step began
        self.free: dict[int, float] = {}  # {axis: time from which its links are free}
        # {name of the start: (number of the collective, or None for a fetch; time of arrival)}.
        self.under_way: dict[str, tuple[int | None, float]] = {}
        # As in `Seconds`, with all repetitions.
        self.terms: dict[str, float] = collections.defaultdict(int)
        self.waits = [0.0] * len(program.collectives)
        self.busy: dict[int, float] = collections.defaultdict(int)

    def run(self, steps: Sequence[Step], times: float) -> None:
        """Follows steps once, which occur `times` times."""
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
                    self._spend("random_bits", size / self.random_bandwidth, times)
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
        """Queues a transfer from or to memory; returns its time of arrival."""
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
        """Follows rounds until the links are free at the start of one; later rounds are equal."""
        while rounds > 0:
            equal = 1 if max(self.free.values(), default=0.0) > self.now else rounds
            start = self.now
            self.run(body, times * equal)
            self.now += (equal - 1) * (self.now - start)
            rounds -= equal


def cost(collective: Collective, topology: Topology, places: Sequence[Location]) -> Cost:
    """Returns the cost of one run of a collective.

    All groups of a collective work at the same time. If a group has one core of each chip, the
    groups of the other cores share the links. Cores of one chip are assumed to communicate at the
    rate of all links, which on TPU7x is the published one.
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
        # Groups whose devices are not neighbours share the links between them.
        coordinates = [place[axis] for place in members]
        apart = (max(coordinates) - min(coordinates)) // (spanned - 1)
        directions += (2 if ring else 1) / apart
        hops += math.ceil(spanned / 2) if ring else apart * (spanned - 1)
        axes.add(axis)
    # One ring through all, both ways round. The compiler names no emitter of asynchronous gathers.
    is_single_ring = collective.emitter.startswith("1D") or collective.asynchronous
    if collective.kind == "all-gather" and len(axes) > 1 and is_single_ring:
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
    """Returns the bytes that a device sends to the network in one sum over slices.

    Each slice adds up one part of the array, and sends the sum to all slices.
    """
    return 2 * (topology.slices - 1) / topology.slices * collective.payload


def network(program: Program, topology: Topology) -> dict[str, float | None]:
    """Returns the bytes that a device sends to the network in a step, the rate and the seconds."""
    rate = topology.tpu.network_bandwidth
    sends = [c for c in program.collectives if c.kind == SEND]
    size = sum(send.count * _network_bytes(send, topology) for send in sends)
    return {"bytes": size, "bandwidth": rate, "busy": size / rate if rate else 0.0}


def _permutation(
    pairs: Sequence[tuple[int, int]], topology: Topology, places: Sequence[Location]
) -> tuple[float, int, frozenset[int]]:
    """Returns bandwidth and hops of the slowest pair, and all axes.

    The data of a pair move along one axis after the other, the shorter way round a ring. All pairs
    send at the same time, and share each direction of a link.
    """
    load: collections.Counter[tuple] = collections.Counter()
    hops = 0
    for source, target in pairs:
        chip, distance_sum = list(places[source][:-1]), 0
        for axis, length in enumerate(topology.shape):
            distance = places[target][axis] - chip[axis]
            if topology.is_ring(axis) and 2 * abs(distance) > length:
                distance -= length if distance > 0 else -length
            sign = 1 if distance > 0 else -1
            for _ in range(abs(distance)):
                load[axis, sign, *chip] += 1
                chip[axis] = (chip[axis] + sign) % length
            distance_sum += abs(distance)
        hops = max(hops, distance_sum)
    link = topology.tpu.link_bandwidth
    bandwidth = link / max(load.values()) if load else 2 * len(topology.shape) * link
    return bandwidth, hops, frozenset(key[0] for key in load) or frozenset({WITHIN_CHIPS})
